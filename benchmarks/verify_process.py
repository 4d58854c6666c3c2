"""The verifier's engine without its wire, on the target's core: one verify step against another.

Both steps verify the same tokens: the rows' real texts, the last of them as the draft. They differ
in their sampling parameters only, and take turns step by step. A verdict remembers nothing, so one
batch can be verified again and again. Run as `python -m benchmarks.verify_process` by
`benchmarks.context`. Knows nothing of services.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.worker import serve
from core.config import ModelConfig
from core.model import RaggedModel
from core.types import Rule, SamplingParams, VerdictStatus, VerifyBatch, VerifyOpen, VerifyRow
from verifier_service.engine import VerifierEngine

_WARM_UP = 3
_MAX_ROWS = 32
_MAX_LENGTH = 256

#: What row i of a batch is drawn with, given its tokens; the draft is the last of them.
Parameters = Callable[[int, list[int]], SamplingParams]


def greedy(row: int, token_ids: list[int]) -> SamplingParams:
    """What both steps are compared with."""
    return SamplingParams()


def coupled(row: int, token_ids: list[int]) -> SamplingParams:
    """Noise over the whole vocabulary."""
    return SamplingParams(temperature=1.0, seed=row, rule=Rule.COUPLED)


def mixed(row: int, token_ids: list[int]) -> SamplingParams:
    """Eight kinds of request in turns, each row with figures of its own."""
    few = 1 + row // 8
    sampled: dict[str, Any] = {"rule": Rule.COUPLED, "seed": row, "temperature": 0.6 + 0.1 * few}
    kinds: tuple[dict[str, Any], ...] = (
        {"repetition_penalty": 1.0 + 0.1 * few, **sampled, "top_p": 0.9},
        {"presence_penalty": 0.2 * few, "frequency_penalty": 0.1 * few},
        {"logit_bias": tuple((token, 0.5 * few) for token in sorted(set(token_ids[:20])))},
        {"bad_words_ids": ((token_ids[1],), *itertools.pairwise(token_ids[2:9]))},
        {"no_repeat_ngram_size": 1 + few, **sampled, "top_k": 10 * few},
        {"min_p": 0.02 * few, **sampled},
        {"frequency_penalty": 0.3, **sampled, "top_k": 50, "top_p": 0.95},
        {**sampled, "repetition_penalty": 1.1, "no_repeat_ngram_size": 4, "min_p": 0.05},
    )
    return SamplingParams(num_prompt_tokens=len(token_ids) // 2, **kinds[row % 8])


_PARAMETERS = {"coupled": coupled, "mixed": mixed}


class VerifyProcess:
    """The functions that can be called; see `benchmarks.worker`."""

    def __init__(self) -> None:
        self._engine: VerifierEngine | None = None
        self._sequences = itertools.count()

    def load(self, config: dict[str, Any]) -> None:
        """Load the target with slots for both sides' rows."""
        limits = {"threads": 1, "max_sequences": 2 * _MAX_ROWS, "max_length": _MAX_LENGTH}
        settings = ModelConfig.model_validate(config).model_copy(update=limits)
        self._engine = VerifierEngine(RaggedModel.load(settings))

    def compare(
        self,
        parameters: str,
        texts: list[list[int]],
        num_draft_tokens: int,
        num_runs: int,
        num_steps: int,
    ) -> dict[str, list[float]]:
        """Milliseconds of a step with `parameters` ("ours") and greedy ("peer"), a run being the
        median of `num_steps`; beside them what the rule took of it ("our_rule", "peer_rule")."""
        assert self._engine is not None
        steps = [
            self._step(texts, _PARAMETERS[parameters], num_draft_tokens),
            self._step(texts, greedy, num_draft_tokens),
        ]
        for _ in range(_WARM_UP):
            for step in steps:
                step()
        names = ("ours", "our_rule", "peer", "peer_rule")
        runs: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(num_runs):
            times = [(*steps[0](), *steps[1]()) for _ in range(num_steps)]
            for name, column in zip(names, zip(*times, strict=True), strict=True):
                runs[name].append(statistics.median(column))
        self._engine.close_stream(0)
        return runs

    def _step(
        self, texts: Sequence[list[int]], parameters: Parameters, num_draft_tokens: int
    ) -> Callable[[], tuple[float, float]]:
        """Open a sequence per text and read it but for its end; returns what verifies the end."""
        assert self._engine is not None
        engine, opens, heads, rows = self._engine, [], [], []
        for index, text in enumerate(texts):
            sequence, position = next(self._sequences), len(text) - num_draft_tokens - 1
            head, last, draft = text[:position], text[position], text[position + 1 :]
            opens.append(VerifyOpen(sequence, parameters(index, text), len(text)))
            heads.append(VerifyRow(sequence, 0, tuple(head), partial=True))
            rows.append(VerifyRow(sequence, position, (last,), tuple(draft)))
        _verify(engine, VerifyBatch(0, tuple(heads), tuple(opens)))
        batch = VerifyBatch(1, tuple(rows))
        return lambda: _verify(engine, batch)


def _verify(engine: VerifierEngine, batch: VerifyBatch) -> tuple[float, float]:
    """Milliseconds of the whole step, and of the rule in it."""
    begin = time.perf_counter()
    result = engine.verify(0, batch)
    total_ms = (time.perf_counter() - begin) * 1000
    wrong = [each.message for each in result.open_failures]
    wrong += [each.message for each in result.verdicts if each.status is not VerdictStatus.OK]
    if wrong:
        raise ValueError(f"{len(wrong)} rows were not verified: {wrong[0]}")
    return total_ms, result.timings.sampling_ns / 1e6


if __name__ == "__main__":
    process = VerifyProcess()
    serve({"load": process.load, "compare": process.compare})
