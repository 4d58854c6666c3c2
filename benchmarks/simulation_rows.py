"""The simulator against the real thing: tokens per second of the same setting, simulated and real.

Both sides have the same costs. The `simulated_` rows with a number of clients use a target and
drafters that sleep (benchmarks/synthetic.py), as processes behind real gRPC and, for some, slow
links; the `ngram` rows the embedded model, whose costs are measured first, with its own texts and
the real prompt lookup. What messages cost here is measured in each row by plain decoding, which
the simulator has to predict nothing of. A row's ratio is the simulated speed by the measured one.
"""

import asyncio
import functools
import statistics
import time
from collections.abc import Sequence

import numpy as np

from benchmarks.context import Bench
from benchmarks.links import Link, Overhead
from benchmarks.loads import Result, Services, quiet
from benchmarks.prompts import GROUNDED
from benchmarks.registry import Measurement, row
from benchmarks.setting import DraftCost, Setting, TargetCost
from benchmarks.simulate import simulate
from benchmarks.stack import Stack
from benchmarks.texts import Text
from drafter_service.drafters.ngram import NgramDrafter

_CLOSE = functools.partial(row, unit="tokens/s", at_least=0.9, at_most=1.1)
_BASE = Setting(
    target=TargetCost(base_s=0.03, row_s=0.0003, token_s=0.0001),
    draft=DraftCost(step_s=0.003, row_s=0.0001),
    acceptance=(0.8,),
    num_new_tokens=64,
)
_R10 = Link(one_way_s=0.005, jitter_s=0.0005)
_CALIBRATION_TOKENS = 24
_BATCH = 8
#: Tokens behind which a verify step is measured, about the length of the prompts.
_CONTEXT = 240


# ---------------------------------------------------------------- what messages cost


def _plain(setting: Setting, num_clients: int) -> Setting:
    changes = {"num_drafters": 0, "num_clients": num_clients}
    return setting.model_copy(update={**changes, "num_new_tokens": _CALIBRATION_TOKENS})


def _overhead(extra_s: Sequence[float], cpu_s: Sequence[float] = (0.0, 0.0)) -> Overhead:
    """From the seconds of a round of plain decoding beyond its forward, and those of the
    orchestrator's core in it, with 1 and with 8 clients: a round has two messages."""
    cpu_s = cpu_s[0], max(cpu_s)
    extra_s = max(extra_s[0], cpu_s[0]), max(*extra_s, cpu_s[1])

    def split(seconds: Sequence[float]) -> tuple[float, float]:
        item_s = (seconds[1] - seconds[0]) / (2 * (_BATCH - 1))
        return max(0.0, seconds[0] / 2 - item_s), item_s

    (message_s, item_s), (cpu_message_s, cpu_item_s) = split(extra_s), split(cpu_s)
    return Overhead(
        cpu_message_s=cpu_message_s,
        cpu_item_s=cpu_item_s,
        hop_message_s=max(0.0, message_s - cpu_message_s),
        hop_item_s=max(0.0, item_s - cpu_item_s),
    )


async def calibrate(services: Services) -> Overhead:
    """What messages cost between these services and an engine here."""
    extra, cpu = [], []
    for num_clients in (1, _BATCH):
        plain = _plain(services.setting, num_clients)
        real, ideal = await services.run(plain), await asyncio.to_thread(simulate, plain)
        extra.append((real.seconds - ideal.seconds) / _CALIBRATION_TOKENS)
        cpu.append(real.cpu_s / _CALIBRATION_TOKENS)
    return _overhead(extra, cpu)


# ---------------------------------------------------------------- set costs


async def _compare(bench: Bench, **changes: object) -> Measurement:
    setting = _BASE.model_copy(update=changes)
    ours: list[float] = []
    theirs: list[float] = []
    async with Services.start(setting, bench.target_core, bench.other_core) as services:
        for _ in range(bench.scale.num_runs):
            with quiet():
                overhead = await calibrate(services)
                real = await services.run()
            simulated = await asyncio.to_thread(simulate, setting, overhead)
            theirs.append(real.tokens_per_s)
            ours.append(simulated.tokens_per_s)
    notes = [_note(simulated, real), f"the texts are {_same(simulated, real)}"]
    return Measurement(ours, theirs, notes)


def _same(simulated: Result, real: Result) -> str:
    return "the same" if simulated.texts == real.texts else "NOT the same"


def _note(simulated: Result, real: Result) -> str:
    return (
        f"tokens per verify step: simulated {simulated.tokens_per_step:.2f}, measured "
        f"{real.tokens_per_step:.2f}; steps with a plan: {simulated.hit_rate:.0%}, "
        f"{real.hit_rate:.0%}"
    )


@_CLOSE("simulated_1_client")
async def simulated_1_client(bench: Bench) -> Measurement:
    """One client, one drafter, no link."""
    return await _compare(bench)


@_CLOSE("simulated_8_clients")
async def simulated_8_clients(bench: Bench) -> Measurement:
    """Eight clients, one drafter, no link."""
    return await _compare(bench, num_clients=8)


@_CLOSE("simulated_1_client_r10")
async def simulated_1_client_r10(bench: Bench) -> Measurement:
    """One client; a round trip to the drafter takes 10 ms."""
    return await _compare(bench, link=_R10)


@_CLOSE("simulated_1_client_r10_ahead")
async def simulated_1_client_r10_ahead(bench: Bench) -> Measurement:
    """The same, drafting ahead for eight outcomes."""
    pool = {"max_draft_tokens": 4, "max_branches": 8}
    return await _compare(bench, link=_R10, pool=pool)


@_CLOSE("simulated_8_clients_r10_ahead")
async def simulated_8_clients_r10_ahead(bench: Bench) -> Measurement:
    """Eight clients, four drafters that draft ahead."""
    pool = {"max_draft_tokens": 4, "max_branches": 8}
    return await _compare(bench, link=_R10, pool=pool, num_clients=8, num_drafters=4)


@_CLOSE("simulated_4_clients_coupled")
async def simulated_4_clients_coupled(bench: Bench) -> Measurement:
    """Four clients under COUPLED, drafts of up to eight tokens that are less often right."""
    changes = {"acceptance": (0.7, 0.6), "temperature": 0.8, "pool": {"max_draft_tokens": 8}}
    return await _compare(bench, num_clients=4, num_drafters=2, **changes)


@_CLOSE("simulated_8_clients_in_flight")
async def simulated_8_clients_in_flight(bench: Bench) -> Measurement:
    """Eight clients, two micro-batches in flight, slow links."""
    orchestrator = {"max_in_flight": 2}
    return await _compare(bench, link=_R10, orchestrator=orchestrator, num_clients=8)


# ---------------------------------------------------------------- the embedded model


async def _target_cost(bench: Bench, stack: Stack) -> TargetCost:
    """The line through measured verify steps of 1 and 8 rows, 2 and 5 tokens each; for prompts,
    what a first token takes."""
    engine = await bench.verifying()
    shapes, seconds = [], []
    for num_rows in (1, _BATCH):
        for num_draft_tokens in (1, 4):
            length = min(_CONTEXT, bench.scale.max_prompt_tokens) + num_draft_tokens
            runs = await engine.call(
                "compare",
                parameters="mixed",
                texts=[ids[:length] for ids in bench.fresh(GROUNDED[:num_rows])],
                num_draft_tokens=num_draft_tokens,
                num_runs=1,
                num_steps=max(1, bench.scale.num_forwards),
            )
            shapes.append((1, num_rows, num_rows * (1 + num_draft_tokens)))
            seconds.append(runs["peer"][0] / 1000)
    base_s, row_s, token_s = np.linalg.lstsq(np.array(shapes), np.array(seconds))[0].tolist()
    prefill = []
    for prompt in bench.fresh(GROUNDED[:3]):
        begin = time.perf_counter()
        await stack.generate(prompt, 1)
        prefill.append((time.perf_counter() - begin - base_s) / len(prompt))
    prefill_s = max(0.0, statistics.median(prefill))
    return TargetCost(base_s=base_s, row_s=row_s, token_s=token_s, prefill_s=prefill_s)


async def _calibrate_stack(bench: Bench, stack: Stack, setting: Setting) -> Overhead:
    """As `calibrate`, of services and an orchestrator that are processes; all of it is hop."""
    extra = []
    for count in (1, _BATCH):
        prompts = bench.fresh(GROUNDED[:count])
        seconds, _ = await stack.generate_all(prompts, _CALIBRATION_TOKENS, "", count)
        plain = _plain(setting, count)
        ideal = await asyncio.to_thread(simulate, plain, prompts=prompts)
        extra.append(max(0.0, seconds - ideal.seconds) / _CALIBRATION_TOKENS)
    return _overhead(extra)


async def _ngram(bench: Bench, num_clients: int) -> Measurement:
    stack, name = await bench.stack(), bench.pool("ngram")
    pool, settings = bench.config.pool(name), bench.config.orchestrator
    num_tokens = max(8, bench.scale.num_new_tokens * 2 // 3)
    cost = await _target_cost(bench, stack)
    names = ("max_in_flight", "max_prefill_tokens", "draft_wait_ms")
    setting = Setting(
        target=cost,
        draft=DraftCost(step_s=0.0),
        num_clients=num_clients,
        num_new_tokens=num_tokens,
        max_batch_tokens=bench.config.target.max_batch_tokens,
        orchestrator={key: getattr(settings, key) for key in names},
        pool={"max_draft_tokens": pool.max_draft_tokens},
    )
    ours: list[float] = []
    theirs: list[float] = []
    steps = 0
    for _ in range(bench.scale.num_runs):
        overhead = await _calibrate_stack(bench, stack, setting)
        prompts = bench.fresh(GROUNDED[: max(2, num_clients)])
        begin = time.perf_counter()
        waiting = iter(enumerate(prompts))
        texts: dict[int, list[int]] = {}

        async def client() -> int:
            steps = 0
            for seed, prompt in waiting:  # noqa: B023 - all are awaited below
                generation = await stack.generate(prompt, num_tokens, name, ids=True)
                texts[seed] = prompt + generation.token_ids  # noqa: B023
                steps += generation.finished.speculation.num_verify_steps
            return steps

        steps = sum(await asyncio.gather(*(client() for _ in range(num_clients))))
        theirs.append(len(prompts) * num_tokens / (time.perf_counter() - begin))
        again = functools.partial(
            simulate, text=Text(texts), drafter=NgramDrafter(pool), num_warm_ups=1
        )
        result = await asyncio.to_thread(again, setting, overhead, prompts=prompts)
        ours.append(result.tokens_per_s)
    measured = len(prompts) * num_tokens / max(1, steps)
    note = f"tokens per step: simulated {result.tokens_per_step:.2f}, measured {measured:.2f}"
    line = f"a step takes {1000 * cost.base_s:.1f} ms, {1000 * cost.row_s:.2f} more per row and"
    line += f" {1000 * cost.token_s:.2f} per token ({1000 * (cost.prefill_s or 0):.2f} of a prompt)"
    return Measurement(ours, theirs, [note, line])


@_CLOSE("simulated_ngram_1_client")
async def simulated_ngram_1_client(bench: Bench) -> Measurement:
    """The embedded model with prompt lookup, one client."""
    return await _ngram(bench, 1)


@_CLOSE("simulated_ngram_8_clients")
async def simulated_ngram_8_clients(bench: Bench) -> Measurement:
    """The same, eight clients."""
    return await _ngram(bench, _BATCH)


ROWS = (
    simulated_1_client,
    simulated_8_clients,
    simulated_1_client_r10,
    simulated_1_client_r10_ahead,
    simulated_8_clients_r10_ahead,
    simulated_4_clients_coupled,
    simulated_8_clients_in_flight,
    simulated_ngram_1_client,
    simulated_ngram_8_clients,
)
