"""Seconds of the target by shape, and of a drafter by rows and draft length.

All shapes take turns, so that a busy moment of the machine falls on all of them; each is a median.
A drafter is timed while its drafts are verified, so what it has to catch up with is what it has in
the stack. Its time depends on the text (a lookup, or a model): there the mean counts, of what is
left without the slowest tenth. If the target was slower or faster beside it than when its shapes
were timed, so was the machine, and the drafter's time is put right by as much. Knows nothing of
predictions.
"""

import statistics
from collections.abc import Mapping, Sequence

from core.types import VerifyBatch, VerifyOpen, VerifyRow
from orchestrator.tuning.prediction import Answer
from orchestrator.tuning.replay import (
    GREEDY,
    Options,
    Source,
    Step,
    compute_seconds,
    replay,
    verify,
)
from verifier_service.engine import VerifierEngine

_WARM_UP = 2
#: A drafter's times are means over these prompts (or all rows) and steps behind each.
_TIMED_PROMPTS = 3
_STEPS_PER_PROMPT = 12


def verify_seconds(
    engine: VerifierEngine,
    answers: Sequence[Answer],
    row_counts: Sequence[int],
    longest: int,
    repeats: int = 9,
) -> dict[tuple[int, int], float]:
    """Target and rule, by (rows, tokens of each row), up to `longest` tokens, behind the texts."""
    most = max(row_counts)
    texts = [_text(answers[i % len(answers)], longest) for i in range(most)]
    heads = [VerifyRow(i, 0, text[:-longest], partial=True) for i, text in enumerate(texts)]
    opens = [VerifyOpen(i, GREEDY, len(text)) for i, text in enumerate(texts)]
    verify(engine, VerifyBatch(0, tuple(heads), tuple(opens)))
    times: dict[tuple[int, int], list[float]] = {
        (count, length): [] for count in row_counts for length in range(1, longest + 1)
    }
    for turn in range(_WARM_UP + repeats):
        for (count, length), taken in times.items():
            chosen = [(turn + i) % most for i in range(count)]
            rows = tuple([_row(i, texts[i], longest, length) for i in chosen])
            result = verify(engine, VerifyBatch(0, rows))
            if turn >= _WARM_UP:
                taken.append(compute_seconds(result))
    engine.close_stream(0)
    return {shape: statistics.median(taken) for shape, taken in times.items()}


def _text(answer: Answer, longest: int) -> tuple[int, ...]:
    """The prompt and half of the answer, the middle of a generation, and `longest` tokens more."""
    half = len(answer.prompt_ids) + len(answer.token_ids) // 2
    whole = (*answer.prompt_ids, *answer.token_ids)
    return (whole + whole[-1:] * longest)[: half + longest]


def _row(sequence: int, text: tuple[int, ...], longest: int, length: int) -> VerifyRow:
    position = len(text) - longest
    tokens = text[position : position + length]
    return VerifyRow(sequence, position, tokens[:1], tokens[1:])


def draft_seconds(
    engine: VerifierEngine,
    source: Source,
    prompts: Sequence[Sequence[int]],
    verify_s: Mapping[tuple[int, int], float],
    longest: int,
    max_new_tokens: int,
) -> dict[tuple[int, int], float]:
    """A drafter's seconds, by (rows, draft length), up to `longest` tokens.

    verify_s: of the same target, by (rows, tokens of each row), up to `longest` + 1 tokens.
    """
    found = {}
    for rows in sorted({count for count, _ in verify_s}):
        num_prompts = max(rows, _TIMED_PROMPTS)
        chosen = [prompts[i % len(prompts)] for i in range(num_prompts // rows * rows)]
        for length in range(1, longest + 1):
            options = Options(rows, length, max_new_tokens, (), True, _STEPS_PER_PROMPT)
            steps = replay(engine, source, chosen, options).steps
            whole = [each for each in steps if len(each.lengths) == rows]
            expected = [statistics.fmean(verify_s[rows, 1 + n] for n in s.lengths) for s in whole]
            pace = statistics.median(map(_ratio, expected, whole))
            found[rows, length] = pace * _trimmed_mean([step.draft_s for step in whole])
    return found


def _ratio(expected_s: float, step: Step) -> float:
    return expected_s / step.verify_s


def _trimmed_mean(values: Sequence[float]) -> float:
    kept = sorted(values)[: max(1, len(values) - len(values) // 10)]
    return statistics.fmean(kept)
