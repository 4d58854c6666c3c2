"""Rows of where time goes around the target: how long it stands still, what the orchestrator uses.

The orchestrator's own recorder (`forerun trace`) is on: the services say what they did and for how
long, and the orchestrator when it sent and heard. The default pool drafts, as it is served; the
rows named `remote` have prompt lookup in a process of its own instead, so every round has its way
to the drafter and back in it, and nothing hides it. The verifier's idle time is what is left
between its first batch and its last when its forwards, its rule and the drafters beside it are
taken out.
"""

import json
from typing import Any

from benchmarks.context import Bench
from benchmarks.prompts import MIXED
from benchmarks.registry import Measurement, row
from orchestrator.timeline import CAUSES

_CPU_MS_PER_ROUND, _CPU_MS_PER_ROW = 1.0, 0.05


async def _figures(bench: Bench, num_clients: int, is_remote: bool = False) -> list[dict[str, Any]]:
    """What the recorder told of each run; a first one is not told."""
    stack, num_tokens = await bench.traced_stack(), bench.scale.num_new_tokens
    drafter = bench.pool("ngram") if is_remote else bench.default_pool
    tasks = MIXED[:4] if num_clients == 1 else MIXED * 2
    await stack.generate_all(bench.fresh(tasks[:num_clients]), num_tokens // 4, drafter)
    figures = []
    for _ in range(bench.scale.num_runs):
        prompts = bench.fresh(tasks)
        await stack.orchestrator.say("begin")
        await stack.orchestrator.hear()
        await stack.generate_all(prompts, num_tokens, drafter, num_clients)
        await stack.orchestrator.say("end")
        figures.append(json.loads(await stack.orchestrator.hear()))
    return figures


async def _idle(bench: Bench, num_clients: int, is_remote: bool = False) -> Measurement:
    runs = await _figures(bench, num_clients, is_remote)
    idle = [run["verifier_idle"] * run["seconds"] for run in runs]
    return Measurement(idle, [run["seconds"] for run in runs], _notes(runs))


def _notes(runs: list[dict[str, Any]]) -> list[str]:
    """Means over all runs, in milliseconds per round."""
    rounds = sum(run["num_rounds"] for run in runs)
    rows = sum(run["num_rows"] for run in runs)
    causes = [
        f"{cause} {sum(r['idle_by_cause'][cause] * r['seconds'] for r in runs) / rounds * 1e3:.2f}"
        for cause in CAUSES
    ]
    waits = sum(run["mean_plan_wait_ms"] for run in runs) / len(runs)
    loop = sum(run["thread_s"] for run in runs) / rounds * 1000
    whole = sum(run["process_s"] for run in runs) / rounds * 1000
    return [
        f"{rows / rounds:.1f} rows per round of "
        f"{sum(run['seconds'] for run in runs) / rounds * 1000:.1f} ms; idle by cause, ms per "
        f"round: {', '.join(causes)}",
        f"mean wait for a plan {waits:.2f} ms; orchestrator CPU per round {loop:.2f} ms in the "
        f"event loop's thread, {whole:.2f} ms in all threads",
    ]


@row("verifier_idle_1_client", unit="s", at_most=0.08)
async def verifier_idle_1_client(bench: Bench) -> Measurement:
    """Seconds in which the target stood still, over all of them; one client."""
    return await _idle(bench, 1)


@row("verifier_idle_8_clients", unit="s", at_most=0.05)
async def verifier_idle_8_clients(bench: Bench) -> Measurement:
    """The same with eight clients."""
    return await _idle(bench, 8)


@row("verifier_idle_remote_1_client", unit="s")
async def verifier_idle_remote_1_client(bench: Bench) -> Measurement:
    """One client, a drafter elsewhere that nothing hides."""
    return await _idle(bench, 1, is_remote=True)


@row("verifier_idle_remote_8_clients", unit="s")
async def verifier_idle_remote_8_clients(bench: Bench) -> Measurement:
    """The same with eight clients."""
    return await _idle(bench, 8, is_remote=True)


@row("orchestrator_cpu_per_round", unit="ms/round", at_most=1.0)
async def orchestrator_cpu_per_round(bench: Bench) -> Measurement:
    """CPU time of the orchestrator's process, all threads, over 1.0 ms + 0.05 ms per row."""
    runs = await _figures(bench, 8)
    ours = [run["process_s"] / run["num_rounds"] * 1000 for run in runs]
    allowed = [
        _CPU_MS_PER_ROUND + _CPU_MS_PER_ROW * run["num_rows"] / run["num_rounds"] for run in runs
    ]
    return Measurement(ours, allowed, _notes(runs))


ROWS = (
    verifier_idle_1_client,
    verifier_idle_8_clients,
    verifier_idle_remote_1_client,
    verifier_idle_remote_8_clients,
    orchestrator_cpu_per_round,
)
