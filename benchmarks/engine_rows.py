"""Rows of the bare engine: one ragged forward against the stock model's with its DynamicCache.

The same checkpoint, one process, one thread, forward by forward in turns.
"""

import statistics

from benchmarks.context import Bench
from benchmarks.registry import Measurement, row


async def _compare(bench: Bench, batch: int, context: int) -> Measurement:
    engine = await bench.engine()
    context = min(context, bench.scale.max_context)
    runs = await engine.call(
        "compare",
        batch=batch,
        context=context,
        num_runs=bench.scale.num_engine_runs,
        num_forwards=bench.scale.num_forwards,
    )
    return Measurement(runs["ours"], runs["peer"], [f"batch {batch}, context {context}"])


@row("engine_b8_ctx1024", unit="ms", at_most=0.4)
async def engine_b8(bench: Bench) -> Measurement:
    """One token in each of eight long sequences."""
    return await _compare(bench, batch=8, context=1024)


@row("engine_b1", unit="ms", at_most=0.7)
async def engine_b1(bench: Bench) -> Measurement:
    """One token of one sequence, and how near that is to reading the weights once."""
    measured = await _compare(bench, batch=1, context=128)
    floor = await (await bench.engine()).call("memory_floor")
    share = floor["ms"] / statistics.median(measured.ours)
    note = (
        f"{share:.0%} of the memory floor: {floor['bytes'] / 1e6:.0f} MB of weights at "
        f"{floor['gb_per_s']:.1f} GB/s take {floor['ms']:.2f} ms"
    )
    return Measurement(measured.ours, measured.peer, [*measured.notes, note])


ROWS = (engine_b8, engine_b1)
