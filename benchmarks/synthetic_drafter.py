"""A drafter with set costs and a set acceptance, for benchmarks only.

It knows the target's text and says it, except where it is told to be wrong; see `Setting`. Drafting
ahead costs what it costs a model: a step for all branches together, and one more step before those
behind the whole block, whose last token has not been run.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.setting import Setting
from benchmarks.texts import IDENTITY, VOCAB_SIZE, Luck, Text
from core.drafter import Ahead, AheadJob, Draft, Drafter, DraftJob
from core.types import Branch, ModelIdentity


@dataclass(slots=True)
class _Twig:
    """The draft behind an outcome: how many steps until it is finished, how many it has had."""

    accepted: int
    token: int
    num_left: int
    num_done: int = 0


class SyntheticDrafter(Drafter):
    """Drafts what the target will say, as often as it is told to."""

    kind = "synthetic"
    can_draft_ahead = True

    def __init__(self, setting: Setting, text: Text | None = None) -> None:
        self._cost, self._text = setting.draft, text or Text()
        self._right, self._guess = Luck("right"), Luck("guess")
        self._acceptance, self._guess_hits = setting.acceptance, setting.guess_hits
        self._head_starts: dict[int, int] = {}  # sequence -> steps of its next draft that are done

    @property
    def identity(self) -> ModelIdentity:
        """The target's vocabulary."""
        return IDENTITY

    def draft(self, jobs: Sequence[DraftJob]) -> list[Draft]:
        """Right by chance, at a cost."""
        steps = [j.num_draft_tokens - self._head_starts.pop(j.sequence, 0) for j in jobs]
        num_read = sum(len(job.token_ids) - job.num_unchanged for job in jobs)
        num_rows = sum(job.num_draft_tokens > 0 for job in jobs)
        pause(self._cost.seconds(num_rows, max(0, *steps), num_read))
        return [
            Draft(self.tokens(j.sampling.seed, len(j.token_ids), j.num_draft_tokens)) for j in jobs
        ]

    def begin_ahead(self, job: AheadJob) -> "SyntheticAhead":
        """See `Drafter.begin_ahead`."""
        self._head_starts.pop(job.sequence, None)
        return SyntheticAhead(self, job)

    def advance(self, aheads: Sequence[Ahead]) -> None:
        """One step for all branches."""
        ours = [each for each in aheads if isinstance(each, SyntheticAhead)]
        pause(self._cost.seconds(sum(each.num_rows for each in ours), 1, 0))
        for each in ours:
            each.step()

    def close(self, sequence: int) -> None:
        """Forget what was drafted ahead."""
        self._head_starts.pop(sequence, None)

    def follow(self, sequence: int, num_steps: int) -> None:
        """So many steps of the sequence's next draft have been done ahead."""
        self._head_starts[sequence] = num_steps

    def tokens(self, seed: int, position: int, length: int) -> tuple[int, ...]:
        """The draft that begins at a position."""
        return tuple(self._token(seed, position + place, place) for place in range(length))

    def corrections(self, seed: int, position: int, count: int, drafted: int = -1) -> list[int]:
        """Guesses of what the target says where `drafted` is wrong (-1: where nothing was),
        likeliest first; never `drafted` itself."""
        right = self._text.token(seed, position)
        luck = self._guess.at(seed, position)
        hits = (self._guess_hits[min(i, len(self._guess_hits) - 1)] for i in range(count))
        rank = next((i for i, hit in enumerate(hits) if luck < hit), count)
        wrong = [(right + 2 + i) % VOCAB_SIZE for i in range(count)]
        if right == drafted:
            return wrong
        return [*wrong[:rank], right, *wrong[rank:]][:count]

    def bonuses(self, seed: int, position: int, place: int, count: int) -> list[int]:
        """Guesses of what the target says behind a draft of `place` tokens: the token that the
        draft would go on with comes first."""
        first = self._token(seed, position, place)
        others = self.corrections(seed, position, count)
        return [first, *(each for each in others if each != first)][:count]

    def _token(self, seed: int, position: int, place: int) -> int:
        right = self._text.token(seed, position)
        alpha = self._acceptance[min(place, len(self._acceptance) - 1)]
        return right if self._right.at(seed, position) < alpha else (right + 1) % VOCAB_SIZE


@dataclass(slots=True)
class SyntheticAhead(Ahead):
    """See `Ahead`."""

    drafter: SyntheticDrafter
    job: AheadJob
    _guesses: list[list[int]] = field(default_factory=list)
    _twigs: list[_Twig] = field(default_factory=list)
    _branches: list[Branch] = field(default_factory=list)
    _is_whole_run: bool = False

    def __post_init__(self) -> None:
        job = self.job
        seed, start, m = job.sampling.seed, len(job.token_ids), len(job.block)
        guess = self.drafter.corrections
        counts = [max(job.num_guesses, n) for n in job.fan_out]
        self._guesses = [guess(seed, start + j, counts[j], job.block[j]) for j in range(m)]
        self._guesses.append([])
        self._twigs = [
            _Twig(j, token, job.num_draft_tokens)
            for j in range(m)
            for token in self._guesses[j][: job.fan_out[j]]
        ]
        self._is_whole_run = job.fan_out[m] == 0

    @property
    def is_done(self) -> bool:
        """Whether every branch is finished."""
        return self._is_whole_run and not any(twig.num_left for twig in self._twigs)

    @property
    def branches(self) -> Sequence[Branch]:
        """The finished ones."""
        return self._branches

    @property
    def guesses(self) -> Sequence[Sequence[int]]:
        """By accepted count."""
        return self._guesses

    @property
    def num_rows(self) -> int:
        """Rows of the next step."""
        return sum(twig.num_left > 0 for twig in self._twigs) + (not self._is_whole_run)

    def step(self) -> None:
        """Another token for each branch."""
        for twig in self._twigs:
            if twig.num_left:
                twig.num_left, twig.num_done = twig.num_left - 1, twig.num_done + 1
                if not twig.num_left:
                    self._branches.append(self._finished(twig))
        if not self._is_whole_run:
            self._is_whole_run = True
            job, m = self.job, len(self.job.block)
            count = max(job.num_guesses, job.fan_out[m])
            position = len(job.token_ids) + m
            self._guesses[m] = self.drafter.bonuses(job.sampling.seed, position, m, count)
            drafted_for = self._guesses[m][: job.fan_out[m]]
            self._twigs += [_Twig(m, token, job.num_draft_tokens) for token in drafted_for]

    def keep(self, accepted: int, token: int) -> bool:
        """See `Ahead.keep`."""
        for twig in self._twigs:
            if (twig.accepted, twig.token) == (accepted, token):
                self.drafter.follow(self.job.sequence, twig.num_done)
                return True
        return False

    def _finished(self, twig: _Twig) -> Branch:
        job = self.job
        position = len(job.token_ids) + twig.accepted + 1
        draft = self.drafter.tokens(job.sampling.seed, position, job.num_draft_tokens)
        return Branch(twig.accepted, twig.token, draft)


def pause(seconds: float) -> None:
    """Take time, without taking the processor's."""
    if seconds > 0:
        time.sleep(seconds)
