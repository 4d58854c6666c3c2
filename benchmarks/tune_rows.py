"""`forerun tune`'s predictions against the stack: one client, drafts of a constant length.

A row's ratio is the predicted speed-up over plain decoding by the measured one. Both are of the
same prompts. What is measured is the time between the first block and the last, as seen by the
client of a real stack, prompt by prompt without drafts and with them, the best of each prompt's
runs; what is predicted was measured without that stack, before it was started.
"""

import dataclasses
import functools
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import cross_tokenizer
from benchmarks.context import Bench
from benchmarks.processes import Process
from benchmarks.prompts import CHAT, GROUNDED
from benchmarks.registry import Measurement, row
from benchmarks.stack import Generation
from core.config import Config, DrafterPoolConfig
from core.embedded import resolve_model

_NUM_PROMPTS = 4
_CLOSE = functools.partial(row, unit="x plain", at_least=0.85, at_most=1.15)


async def _compare(bench: Bench, pool: DrafterPoolConfig, tasks: Sequence[str]) -> Measurement:
    scale, target = bench.scale, bench.config.target
    prompts = bench.fresh(tasks)
    process = await Process.start("tune", "benchmarks.tune_process", core=bench.target_core)
    try:
        expected = await process.call(
            "measure",
            target=target.model_dump(),
            pool=pool.model_dump(),
            prompts=prompts,
            max_new_tokens=scale.num_new_tokens,
        )
    finally:
        await process.stop()
    settings = bench.config.orchestrator.model_copy(
        update={"adaptive_draft_length": False, "default_pool": pool.name}
    )
    plain = [_Best() for _ in prompts]
    drafted = [_Best() for _ in prompts]
    async with bench.stack_of(
        Config(target=target, drafter_pools=[pool], orchestrator=settings)
    ) as stack:
        await stack.generate(prompts[0], 4, pool.name)  # what a first call loads
        for _ in range(scale.num_runs):
            for prompt, without, with_drafts in zip(prompts, plain, drafted, strict=True):
                without.add(await stack.generate(prompt, scale.num_new_tokens))
                with_drafts.add(await stack.generate(prompt, scale.num_new_tokens, pool.name))
    measured = sum(each.seconds for each in plain) / sum(each.seconds for each in drafted)
    num_tokens = len(prompts) * (scale.num_new_tokens - 1)
    tokens = num_tokens / max(1, sum(each.steps for each in drafted))
    note = (
        f"predicted: plain {expected['plain_ms']:.1f} ms a token; a step {expected['step_ms']:.1f} "
        f"ms (draft {expected['draft_ms']:.1f}, round {expected['round_ms']:.1f}, trip "
        f"{expected['trip_ms']:.1f}), {expected['tokens_per_step']:.2f} tokens"
    )
    told = (
        f"measured: plain {_per_step(plain):.1f} ms a token; a step {_per_step(drafted):.1f} ms, "
        f"{tokens:.2f} tokens"
    )
    return Measurement([expected["speedup"]], [measured], [note, told])


@dataclasses.dataclass(slots=True)
class _Best:
    """Of the runs of a prompt, which all do the same, the one that was disturbed least: seconds
    behind the first block, and the verify steps in them."""

    seconds: float = math.inf
    steps: int = 0

    def add(self, generation: Generation) -> None:
        """Take in a run."""
        blocks = generation.blocks
        self.seconds = min(self.seconds, blocks[-1].at_s - blocks[0].at_s)
        self.steps = len(blocks) - 1


def _per_step(runs: Sequence[_Best]) -> float:
    """Milliseconds."""
    return 1000 * sum(run.seconds for run in runs) / max(1, sum(run.steps for run in runs))


@_CLOSE("tune_prediction_ngram_chat")
async def tune_prediction_ngram_chat(bench: Bench) -> Measurement:
    """Prompt lookup, where it finds little."""
    pool = DrafterPoolConfig(name="ngram", kind="ngram", max_draft_tokens=4)
    return await _compare(bench, pool, CHAT[:_NUM_PROMPTS])


@_CLOSE("tune_prediction_ngram_grounded")
async def tune_prediction_ngram_grounded(bench: Bench) -> Measurement:
    """Prompt lookup, where it finds much."""
    pool = DrafterPoolConfig(name="ngram", kind="ngram", max_draft_tokens=4)
    return await _compare(bench, pool, GROUNDED[:_NUM_PROMPTS])


@_CLOSE("tune_prediction_early_exit")
async def tune_prediction_early_exit(bench: Bench) -> Measurement:
    """28 of the target's 30 layers, beside it."""
    pool = DrafterPoolConfig(
        name="early",
        kind="early_exit",
        attached=True,
        max_draft_tokens=2,
        options={"num_layers": 28},
    )
    return await _compare(bench, pool, CHAT[:_NUM_PROMPTS])


@_CLOSE("tune_prediction_draft_model")
async def tune_prediction_draft_model(bench: Bench) -> Measurement:
    """24 of the target's 30 layers on the other core, one token a step."""
    name = resolve_model("embedded:smollm2-135m-pruned")
    model = bench.config.target.model_copy(update={"model": name})
    pool = DrafterPoolConfig(name="draft", kind="draft_model", max_draft_tokens=1, model=model)
    return await _compare(bench, pool, CHAT[:_NUM_PROMPTS])


@_CLOSE("tune_prediction_distilled")
async def tune_prediction_distilled(bench: Bench) -> Measurement:
    """The layer that comes with forerun, beside the target, three tokens a step."""
    pool = bench.config.pool(bench.pool("mtp_layers")).model_copy(update={"max_draft_tokens": 3})
    return await _compare(bench, pool, CHAT[:_NUM_PROMPTS])


@_CLOSE("tune_prediction_cross_tokenizer")
async def tune_prediction_cross_tokenizer(bench: Bench) -> Measurement:
    """A network with 16,000 of the target's tokens, by text."""
    target = bench.config.target
    with tempfile.TemporaryDirectory() as folder:
        cross_tokenizer.save_drafter("gpt2-16000", Path(target.model), Path(folder))
        pool = DrafterPoolConfig(
            name="cross",
            kind="cross_tokenizer",
            max_draft_tokens=4,
            model=target.model_copy(update={"model": folder}),
            options={"target": target.model, "method": "slem"},
        )
        return await _compare(bench, pool, CHAT[:_NUM_PROMPTS])


ROWS = (
    tune_prediction_ngram_chat,
    tune_prediction_ngram_grounded,
    tune_prediction_early_exit,
    tune_prediction_draft_model,
    tune_prediction_distilled,
    tune_prediction_cross_tokenizer,
)
