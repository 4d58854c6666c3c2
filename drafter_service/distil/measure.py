"""How good a drafter is: its acceptance by position of the draft, and what one step of it costs.

Under greedy verification a draft's token counts only if all before it were right, so every token
that counts was drafted behind the target's own text. Whether the drafter's choice behind each
prefix of an answer is the answer's next token therefore says everything about every draft; none
need be made. Knows nothing of models but `RaggedModel`.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from core.model import RaggedModel, Row
from drafter_service.distil.generate import Text


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


def acceptance(matches: Sequence[Sequence[bool]], draft_length: int) -> Acceptance:
    """Replays answers step by step. `matches`: per answer, whether the drafter's choice behind the
    tokens so far was right, from the answer's second token on (the first comes with the prompt)."""
    asked, accepted = [0] * draft_length, [0] * draft_length
    steps = tokens = 0
    for answer in matches:
        start = 0
        while start < len(answer):
            steps += 1
            committed = 1  # the target's own token
            for position, is_right in enumerate(answer[start : start + draft_length]):
                asked[position] += 1
                if not is_right:
                    break
                accepted[position] += 1
                committed += 1
            committed = min(committed, len(answer) - start)
            tokens += committed
            start += committed
    flat = [is_right for answer in matches for is_right in answer]
    return Acceptance(
        tuple(a / max(1, n) for a, n in zip(accepted, asked, strict=True)),
        tokens / max(1, steps),
        sum(flat) / max(1, len(flat)),
    )


def matches(model: RaggedModel, texts: Iterable[Text]) -> list[list[bool]]:
    """What `acceptance` asks for, of a loaded drafter and greedy answers."""
    found: list[list[bool]] = []
    for text in texts:
        ids = [*text.prompt_ids, *text.answer_ids[:-1]]
        wanted = torch.tensor(text.answer_ids[1:])
        model.open(0)
        choices = []
        for start in range(0, len(ids), model.max_batch_tokens):
            part = ids[start : start + model.max_batch_tokens]
            choices.append(model.forward([Row(0, start, part, len(part))]).argmax(dim=-1).cpu())
        model.truncate(0, 0)
        model.close(0)
        found.append((torch.cat(choices)[len(text.prompt_ids) :] == wanted).tolist())
    return found


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

    acceptance: per draft length 1, 2, ... drafter_s: one token. target_s: a verify step of 1, 2,
    ... tokens; one longer than `acceptance`.
    """

    acceptance: tuple[Acceptance, ...]
    drafter_s: float
    target_s: tuple[float, ...]

    @property
    def step_ratio(self) -> float:
        """The drafter's step in steps of the target, one token each."""
        return self.drafter_s / self.target_s[0]

    def speedup(self, draft_length: int) -> float:
        """Expected over plain decoding, of one client, greedy: draft, then verify, then again."""
        tokens = self.acceptance[draft_length - 1].tokens_per_step
        step_s = self.target_s[draft_length] + draft_length * self.drafter_s
        return tokens * self.target_s[0] / step_s

    @property
    def best_length(self) -> int:
        """The draft length with the greatest expected speed-up."""
        return max(range(1, len(self.acceptance) + 1), key=self.speedup)


def report(
    drafter: RaggedModel, texts: Sequence[Text], target_s: Sequence[float], longest: int
) -> Report:
    """Measure a loaded drafter on greedy answers, for drafts of 1 to `longest` tokens.

    target_s: seconds of the target's steps of 1 to `longest` + 1 tokens.
    """
    found = matches(drafter, texts)
    by_length = tuple(acceptance(found, length) for length in range(1, longest + 1))
    return Report(by_length, step_seconds(drafter), tuple(target_s))
