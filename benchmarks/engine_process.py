"""Our engine without services beside the stock forward, both in one process on the target's core.

They take turns forward by forward, so that whatever else the machine does hits both alike. Run as
`python -m benchmarks.engine_process` by `benchmarks.context`. Knows nothing of services.
"""

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from benchmarks.peer import load_stock
from benchmarks.worker import serve
from core.config import ModelConfig
from core.model import RaggedModel, Row

_WARM_UP = 3
_BANDWIDTH_BYTES = 512 * 1024 * 1024


class EngineProcess:
    """The functions that can be called; see `benchmarks.worker`."""

    def __init__(self) -> None:
        self._engine: RaggedModel | None = None
        self._stock: PreTrainedModel | None = None
        self._sequences = itertools.count()

    def load(self, config: dict[str, Any]) -> None:
        """Load the target twice: our engine as the verifier has it, and the stock model."""
        settings = ModelConfig.model_validate(config)
        self._stock = load_stock(settings.model, settings.dtype)
        self._engine = RaggedModel.load(settings.model_copy(update={"threads": 1}))

    def compare(
        self, batch: int, context: int, num_runs: int, num_forwards: int
    ) -> dict[str, list[float]]:
        """Milliseconds of one token per row; a run is the median of `num_forwards` forwards."""
        assert self._engine is not None and self._stock is not None
        generator = torch.Generator().manual_seed(0)
        prompt = torch.randint(self._engine.tokenizer_size, (context,), generator=generator)
        sequences, ours = self._our_step(batch, prompt)
        peer = self._stock_step(batch, prompt)
        for _ in range(_WARM_UP):
            ours(), peer()
        runs: dict[str, list[float]] = {"ours": [], "peer": []}
        for _ in range(num_runs):
            times = [(ours(), peer()) for _ in range(num_forwards)]
            runs["ours"].append(statistics.median(pair[0] for pair in times))
            runs["peer"].append(statistics.median(pair[1] for pair in times))
        for sequence in sequences:
            self._engine.close(sequence)
        return runs

    def _our_step(self, batch: int, prompt: torch.Tensor) -> tuple[list[int], Callable[[], float]]:
        assert self._engine is not None
        engine, context = self._engine, len(prompt)
        sequences = [next(self._sequences) for _ in range(batch)]
        for sequence in sequences:
            self._prefill(sequence, prompt.tolist())
        rows = [Row(sequence, context, [1], 1) for sequence in sequences]
        return sequences, lambda: _milliseconds(lambda: engine.forward(rows))

    def _prefill(self, sequence: int, token_ids: list[int]) -> None:
        assert self._engine is not None
        self._engine.open(sequence)
        done = self._engine.reuse_prefix(sequence, token_ids)
        while done < len(token_ids):
            chunk = token_ids[done : done + self._engine.max_batch_tokens]
            self._engine.forward([Row(sequence, done, chunk, 0)])
            done += len(chunk)

    @torch.inference_mode()
    def _stock_step(self, batch: int, prompt: torch.Tensor) -> Callable[[], float]:
        assert self._stock is not None
        stock = self._stock
        cache = DynamicCache(config=stock.config)
        stock(prompt[None], past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache.batch_repeat_interleave(batch)
        tokens = torch.ones((batch, 1), dtype=torch.long)

        @torch.inference_mode()
        def step() -> float:
            time_ms = _milliseconds(lambda: stock(tokens, past_key_values=cache, use_cache=True))
            cache.crop(-1)
            return time_ms

        return step

    def replay(self, prompt: list[int], rounds: list[tuple[int, list[int], int]]) -> float:
        """Milliseconds of the bare forwards of one sequence's rounds, each (position, tokens,
        number of logits); the prompt is there before the clock runs."""
        assert self._engine is not None
        sequence = next(self._sequences)
        self._prefill(sequence, prompt)
        rows = [Row(sequence, position, tokens, logits) for position, tokens, logits in rounds]
        total_ms = 0.0
        for row in rows:
            total_ms += _milliseconds(lambda row=row: self._engine.forward([row]))  # type: ignore[misc]
        self._engine.close(sequence)
        return total_ms

    def memory_floor(self) -> dict[str, float]:
        """Bytes of the weights, the core's read bandwidth, and their quotient in milliseconds."""
        assert self._stock is not None
        weights = {p.data_ptr(): p.nbytes for p in self._stock.parameters()}  # tied ones once
        block = torch.ones(_BANDWIDTH_BYTES // 4, dtype=torch.float32)
        best_ms = min(_milliseconds(lambda: block.sum()) for _ in range(7))
        bytes_per_ms = block.nbytes / best_ms
        size = sum(weights.values())
        return {"bytes": size, "gb_per_s": bytes_per_ms / 1e6, "ms": size / bytes_per_ms}


def _milliseconds(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return (time.perf_counter() - begin) * 1000


if __name__ == "__main__":
    engine = EngineProcess()
    serve(
        {
            "load": engine.load,
            "compare": engine.compare,
            "replay": engine.replay,
            "memory_floor": engine.memory_floor,
        }
    )
