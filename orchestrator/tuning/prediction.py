"""How fast a target would be with a drafter: the model behind `forerun tune`.

    tokens/s = rows x tokens per step / (verify + round [+ draft [+ trip]])

    verify  the target and the rule on 1 + drafted tokens of every row
    round   verifier -> orchestrator -> verifier, what plain decoding pays too
    draft   the drafter's seconds for the rows that one replica has
    trip    orchestrator -> drafter -> orchestrator; none for an attached drafter

The parts follow each other, as they do in the stack: a verifier's rows go together and wait for
their drafts. Pure policy; knows nothing of models, clocks and how anything was measured.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

#: More drafter replicas must bring so much more, or fewer are recommended.
_WORTH_A_REPLICA = 0.03


@dataclass(frozen=True, slots=True)
class Answer:
    """The target's greedy answer; `drafts[i]` is what a drafter proposed behind `token_ids[:i + 1]`
    (one draft less than there are tokens)."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    drafts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Steps:
    """What greedy verification of whole answers does with drafts of at most some length.

    tokens_per_step: tokens a verify step commits, the target's own included. by_position: of the
    tokens drafted at a position behind accepted ones, the share accepted. lengths: share of the
    steps by the length of their draft.
    """

    tokens_per_step: float
    by_position: tuple[float, ...]
    lengths: Mapping[int, float]


def count_steps(answers: Iterable[Answer], draft_length: int, max_new_tokens: int) -> Steps:
    """Replay answers step by step, from the second token on: the first comes with the prompt.

    A longer draft is cut to `draft_length`: drafts of a kind are beginnings of each other.
    """
    lengths: Counter[int] = Counter()
    asked, accepted = [0] * draft_length, [0] * draft_length
    num_tokens = 0
    for answer in answers:
        start = 1
        while start < len(answer.token_ids):
            length = min(draft_length, max_new_tokens - start - 1)
            draft = answer.drafts[start - 1][: max(0, length)]
            lengths[len(draft)] += 1
            committed = 1
            for position, pair in enumerate(zip(draft, answer.token_ids[start:], strict=False)):
                asked[position] += 1
                if pair[0] != pair[1]:
                    break
                accepted[position] += 1
                committed += 1
            committed = min(committed, len(answer.token_ids) - start)
            num_tokens += committed
            start += committed
    num_steps = max(1, lengths.total())
    return Steps(
        num_tokens / num_steps,
        tuple(right / max(1, count) for right, count in zip(accepted, asked, strict=True)),
        {length: count / num_steps for length, count in sorted(lengths.items())},
    )


@dataclass(frozen=True, slots=True)
class TargetCosts:
    """Seconds of a verify step without a drafter.

    verify_s: the target and the rule, by (rows, tokens of each row). round_s and trip_s: see above,
    by rows.
    """

    verify_s: Mapping[tuple[int, int], float]
    round_s: Mapping[int, float]
    trip_s: Mapping[int, float]

    def plain(self, rows: int) -> float:
        """Tokens per second of so many clients without drafts."""
        return rows / (self.verify_s[rows, 1] + self.round_s[rows])


@dataclass(frozen=True, slots=True)
class PoolCosts:
    """What was measured of a pool: `steps` per draft length 1, 2, ...; `draft_s` by (rows, draft
    length), for the same rows as the target's."""

    name: str
    is_attached: bool
    steps: Sequence[Steps]
    draft_s: Mapping[tuple[int, int], float]

    def seconds(self, rows: int, batch: int, draft_length: int) -> float:
        """Of a draft for `batch` of `rows` rows: on the line between one row and all of them."""
        one, every = self.draft_s[1, draft_length], self.draft_s[rows, draft_length]
        return one + (every - one) * (batch - 1) / max(1, rows - 1)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What `rows` clients together would get of a pool; `speedup` is over plain decoding."""

    pool: str
    rows: int
    draft_length: int
    replicas: int
    step_s: float
    tokens_per_s: float
    speedup: float


def predict(
    target: TargetCosts, pool: PoolCosts, rows: int, draft_length: int, replicas: int = 1
) -> Prediction:
    """Each of `replicas` drafters has its share of the rows, on hardware of its own."""
    steps = pool.steps[draft_length - 1]
    step_s = target.round_s[rows] + sum(
        share * target.verify_s[rows, 1 + length] for length, share in steps.lengths.items()
    )
    step_s += pool.seconds(rows, -(-rows // replicas), draft_length)
    if not pool.is_attached:
        step_s += target.trip_s[rows]
    tokens_per_s = rows * steps.tokens_per_step / step_s
    speedup = tokens_per_s / target.plain(rows)
    return Prediction(pool.name, rows, draft_length, replicas, step_s, tokens_per_s, speedup)


def best_of_pool(target: TargetCosts, pool: PoolCosts, rows: int) -> Prediction:
    """The draft length with the most tokens per second, and the fewest replicas that come within
    3 % of what one per row would bring. An attached pool has one per verifier."""
    counts = range(1, 2 if pool.is_attached else rows + 1)
    lengths = range(1, len(pool.steps) + 1)
    best = [
        max((predict(target, pool, rows, k, n) for k in lengths), key=lambda p: p.tokens_per_s)
        for n in counts
    ]
    enough = max(each.tokens_per_s for each in best) * (1 - _WORTH_A_REPLICA)
    return next(each for each in best if each.tokens_per_s >= enough)
