"""How good a drafter is: its acceptance by position of the draft, and what one step of it costs.

Under greedy verification a draft's token counts only if all before it were right, so every token
that counts was drafted behind the target's own text. What a drafter drafts behind each prefix of an
answer therefore says everything about every verification; none need be made. Knows nothing of
models but `RaggedModel`.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from core.drafter import Drafter, DraftJob, TargetFeatures
from core.features import FeatureTap
from core.model import RaggedModel, Row
from core.params import SamplingParams
from drafter_service.distil.generate import Text

#: Of one answer, by place in the draft and then by where the draft begins (0: behind the answer's
#: first token, which comes with the prompt): whether that token is right, if those before it are.
#: One place only means that the others are the same, moved.
Matches = list[list[bool]]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What greedy verification would have accepted, over whole answers.

    by_position: of the tokens drafted at a position behind accepted ones, the share accepted.
    tokens_per_step: tokens a verify step commits, the target's own included.
    agreement: share of all tokens on which drafter and target agree, whatever was drafted.
    """

    by_position: tuple[float, ...]
    tokens_per_step: float
    agreement: float

    @property
    def mean(self) -> float:
        """The mean over the positions."""
        return sum(self.by_position) / len(self.by_position)


def acceptance(matches: Sequence[Matches], draft_length: int) -> Acceptance:
    """Replays answers step by step."""
    asked, accepted = [0] * draft_length, [0] * draft_length
    steps = tokens = 0
    for answer in matches:
        start, length = 0, len(answer[0])
        while start < length:
            steps += 1
            committed = 1  # the target's own token
            for position in range(min(draft_length, length - start)):
                asked[position] += 1
                is_moved = position >= len(answer)
                if not (answer[0][start + position] if is_moved else answer[position][start]):
                    break
                accepted[position] += 1
                committed += 1
            committed = min(committed, length - start)
            tokens += committed
            start += committed
    flat = [is_right for answer in matches for is_right in answer[0]]
    return Acceptance(
        tuple(a / max(1, n) for a, n in zip(accepted, asked, strict=True)),
        tokens / max(1, steps),
        sum(flat) / max(1, len(flat)),
    )


def matches(
    target: RaggedModel, drafter: Drafter, texts: Iterable[Text], draft_length: int
) -> list[Matches]:
    """What `acceptance` asks for: behind every prefix of greedy answers the drafter drafts."""
    tap = FeatureTap(target, drafter.needs) if drafter.needs else None
    found: list[Matches] = []
    for text in texts:
        ids = [*text.prompt_ids, *text.answer_ids]
        features = None if tap is None else _features(target, tap, ids[:-1])
        answer: Matches = [[] for _ in range(draft_length)]
        told = 0
        for length in range(len(text.prompt_ids) + 1, len(ids)):
            part = None if features is None else TargetFeatures(told, features[told : length - 1])
            told = length - 1
            job = DraftJob(0, ids[:length], draft_length, SamplingParams(), 0, part)
            draft = drafter.draft([job])[0].token_ids
            for place in range(min(draft_length, len(ids) - length)):
                is_right = place < len(draft) and draft[place] == ids[length + place]
                answer[place].append(is_right)
        drafter.close(0)
        found.append(answer)
    if tap is not None:
        tap.close()
    return found


def _features(target: RaggedModel, tap: FeatureTap, ids: Sequence[int]) -> torch.Tensor:
    """`[n, F]`, what the tap reads of a text."""
    parts = []
    target.open(0)
    for start in range(0, len(ids), target.max_batch_tokens):
        target.forward([Row(0, start, ids[start : start + target.max_batch_tokens], 0)])
        parts += tap.read([0])
    target.truncate(0, 0)
    target.close(0)
    return torch.cat(parts)


def draft_seconds(
    target: RaggedModel, drafter: Drafter, lengths: Sequence[int], context: int = 128
) -> list[float]:
    """Seconds of one draft of each length, one sequence, right behind a committed token: the median
    over as many drafts as the context takes, in turns."""
    tap = FeatureTap(target, drafter.needs) if drafter.needs else None
    ids = [1 + i % 7 for i in range(min(2 * context, drafter.max_length or 2 * context))]
    features = None if tap is None else _features(target, tap, ids)
    times: list[list[float]] = [[] for _ in lengths]
    told = 0
    for turn, length in enumerate(range(len(ids) // 2, len(ids) - max(lengths))):
        part = None if features is None else TargetFeatures(told, features[told : length - 1])
        told = length - 1
        wanted = lengths[turn % len(lengths)]
        job = DraftJob(0, ids[:length], wanted, SamplingParams(), length - 1, part)
        began = time.perf_counter()
        drafter.draft([job])
        if turn >= len(lengths):  # the first ones read the context
            times[turn % len(lengths)].append(time.perf_counter() - began)
    drafter.close(0)
    if tap is not None:
        tap.close()
    return [sorted(each)[len(each) // 2] for each in times]


def step_seconds(
    model: RaggedModel, num_tokens: int = 1, context: int = 128, repeats: int = 30
) -> float:
    """Seconds of a forward of `num_tokens` tokens of one sequence, all with logits, behind
    `context` others: the median of `repeats`."""
    context = min(context, model.max_length - num_tokens, model.max_batch_tokens)
    model.open(0)
    model.forward([Row(0, 0, [1] * context, 1)])
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        model.forward([Row(0, context, [1] * num_tokens, num_tokens)])
        times.append(time.perf_counter() - started)
    model.truncate(0, 0)
    model.close(0)
    return sorted(times)[repeats // 2]


@dataclass(frozen=True, slots=True)
class Report:
    """What a finished drafter was measured to do, on one machine.

    acceptance, draft_s: per draft length 1, 2, ...; draft_s are seconds of a draft. target_s: those
    of a verify step of 1, 2, ... tokens; one longer than `acceptance`.
    """

    acceptance: tuple[Acceptance, ...]
    draft_s: tuple[float, ...]
    target_s: tuple[float, ...]

    @property
    def step_s(self) -> float:
        """Seconds of one more token in a draft."""
        return (self.draft_s[-1] - self.draft_s[0]) / max(1, len(self.draft_s) - 1)

    @property
    def step_ratio(self) -> float:
        """The drafter's step in steps of the target, one token each."""
        return self.step_s / self.target_s[0]

    def speedup(self, draft_length: int) -> float:
        """Expected over plain decoding, of one client, greedy: draft, then verify, then again."""
        tokens = self.acceptance[draft_length - 1].tokens_per_step
        step_s = self.target_s[draft_length] + self.draft_s[draft_length - 1]
        return tokens * self.target_s[0] / step_s

    @property
    def best_length(self) -> int:
        """The draft length with the greatest expected speed-up."""
        return max(range(1, len(self.acceptance) + 1), key=self.speedup)


def report(
    target: RaggedModel,
    drafter: Drafter,
    texts: Sequence[Text],
    target_s: Sequence[float],
    longest: int,
) -> Report:
    """Measure a drafter as it will serve, on greedy answers, for drafts of 1 to `longest` tokens.

    target_s: seconds of the target's steps of 1 to `longest` + 1 tokens.
    """
    found = matches(target, drafter, texts, longest)
    lengths = range(1, longest + 1)
    return Report(
        tuple(acceptance(found, length) for length in lengths),
        tuple(draft_seconds(target, drafter, lengths)),
        tuple(target_s),
    )
