"""The embedded pair on real prompts, as it is served by default, against transformers' `generate`.

The pool is the configuration's `default_pool`. Greedy, end tokens ignored, the same number of
tokens on both sides. transformers cannot assist with a layer on the target's hidden states: its
assisted generation is held against ours with a small model that both can use, and, with whatever
is fastest for it, against the default pool. One row is about the streams that run while long
prompts arrive.
"""

import asyncio
import itertools
import statistics
import time

from benchmarks.context import Bench
from benchmarks.prompts import MIXED
from benchmarks.registry import Measurement, row
from benchmarks.serving_rows import eight_clients, lookup_seconds, one_client
from benchmarks.stack import Stack
from core.config import Config, DrafterPoolConfig
from core.embedded import resolve_model

_LOOKUPS = (2, 3, 5, 8, 10)
_ASSISTED = (2, 4)
_ASSISTANT = "embedded:smollm2-135m-pruned"
_CLIENTS = (1, 2, 4, 8, 16, 32)
_LONG = 4096
_NUM_STREAMS = 4
_NUM_ARRIVALS = 2


@row("never_below_plain_worst", unit="tokens/s", at_least=0.95)
async def never_below_plain_worst(bench: Bench) -> Measurement:
    """The default pool against our own plain decoding: the worst of 1 to 32 clients, counted while
    all of them are served."""
    stack, pool = await bench.stack(), bench.default_pool
    is_quick = bench.scale.num_runs == 1
    num_tokens = max(1, bench.scale.num_new_tokens // 2)
    measured: dict[int, tuple[list[float], list[float]]] = {}
    for num_clients in _CLIENTS[: 2 if is_quick else None]:
        speeds = measured[num_clients] = ([], [])
        tasks = list(itertools.islice(itertools.cycle(MIXED), max(8, 2 * num_clients)))
        for _ in range(max(1, bench.scale.num_runs - 1)):
            for each, drafter in zip(speeds, (pool, ""), strict=True):
                sent = (bench.fresh(tasks), num_tokens, drafter, num_clients)
                each.append(await stack.steady_speed(*sent))
    ratios = {
        n: statistics.median(ours) / statistics.median(plain)
        for n, (ours, plain) in measured.items()
    }
    worst = min(ratios, key=ratios.__getitem__)
    notes = [f"{n} clients: {ratio:.2f}" for n, ratio in ratios.items()]
    return Measurement(*measured[worst], [f"pool {pool}: " + ", ".join(notes)])


@row("pair_1_client_vs_plain", unit="tokens/s", at_least=2.2)
async def pair_1_client_vs_plain(bench: Bench) -> Measurement:
    """One client against plain `generate`."""
    return await one_client(bench, MIXED, bench.default_pool)


@row("pair_1_client_vs_assisted", unit="tokens/s", at_least=2.2)
async def pair_1_client_vs_assisted(bench: Bench) -> Measurement:
    """One client against assisted generation with the same drafter: the embedded target with fewer
    layers, as a drafter of ours on the other core and as their assistant at its best length."""
    assistant = _assistant(bench)
    speeds = await _assisted_speeds(bench, assistant)
    _, length = max(speeds, key=speeds.__getitem__)
    pool = DrafterPoolConfig(
        name="small",
        kind="draft_model",
        max_draft_tokens=4,
        model=bench.config.target.model_copy(update={"model": assistant}),
    )
    async with bench.stack_of(_with_pools(bench, [pool])) as stack:
        measured = await _in_turns(bench, stack, pool.name, assistant, length)
    note = f"assisted, tokens/s by length: {_told(speeds)}; {length} is best"
    return Measurement(*measured, [note])


@row("pair_1_client_vs_best_assisted", unit="tokens/s")
async def pair_1_client_vs_best_assisted(bench: Bench) -> Measurement:
    """One client with the default pool against whatever transformers is fastest with: prompt lookup
    or that assistant. It cannot assist with a layer on the target's hidden states."""
    is_quick, assistant, prompts = bench.scale.num_runs == 1, _assistant(bench), bench.fresh(MIXED)
    total = len(prompts) * bench.scale.num_new_tokens
    speeds = await _assisted_speeds(bench, assistant)
    for length in _LOOKUPS[: 1 if is_quick else None]:
        speeds["lookup", length] = total / await lookup_seconds(bench, prompts, length)
    method, length = max(speeds, key=speeds.__getitem__)
    if method == "lookup":
        assistant = ""
    measured = await _in_turns(bench, await bench.stack(), bench.default_pool, assistant, length)
    note = f"transformers, tokens/s: {_told(speeds)}; {method} with {length} tokens is best"
    return Measurement(*measured, [note])


def _with_pools(bench: Bench, pools: list[DrafterPoolConfig], **limits: int) -> Config:
    """The configuration with these pools only, and with other limits of the target."""
    empty = {"default_pool": "", "fallback_pool": ""}
    return bench.config.model_copy(
        update={
            "target": bench.config.target.model_copy(update=limits),
            "drafter_pools": pools,
            "orchestrator": bench.config.orchestrator.model_copy(update=empty),
        }
    )


def _assistant(bench: Bench) -> str:
    return bench.config.target.model if bench.scale.num_runs == 1 else resolve_model(_ASSISTANT)


def _told(speeds: dict[tuple[str, int], float]) -> str:
    return ", ".join(f"{method} {n}: {speed:.1f}" for (method, n), speed in speeds.items())


async def _assisted_speeds(bench: Bench, assistant: str) -> dict[tuple[str, int], float]:
    """Tokens per second of assisted generation by draft length; the best one is set up last."""
    prompts = bench.fresh(MIXED)
    total = len(prompts) * bench.scale.num_new_tokens
    speeds: dict[tuple[str, int], float] = {}
    for length in _ASSISTED[: 1 if bench.scale.num_runs == 1 else None]:
        await _assist(bench, assistant, length)
        seconds = [await _assisted_seconds(bench, prompt) for prompt in prompts]
        speeds["assistant", length] = total / sum(seconds)
    await _assist(bench, assistant, max(speeds, key=speeds.__getitem__)[1])
    return speeds


async def _assist(bench: Bench, assistant: str, length: int) -> None:
    options = {"num_draft_tokens": length, "assistant": assistant}
    await (await bench.peer()).call("assist", method="draft_model", **options)


async def _assisted_seconds(bench: Bench, prompt: list[int]) -> float:
    call = {"prompt": prompt, "max_new_tokens": bench.scale.num_new_tokens}
    return float((await (await bench.peer()).call("generate_assisted", **call))["seconds"])


async def _in_turns(
    bench: Bench, stack: Stack, pool: str, assistant: str, length: int
) -> tuple[list[float], list[float]]:
    """Tokens per second of ours and of theirs, prompt after prompt; theirs with the assistant that
    is set up, or with prompt lookup of `length` tokens."""
    ours: list[float] = []
    theirs: list[float] = []
    num_tokens = bench.scale.num_new_tokens
    for _ in range(bench.scale.num_runs):
        spent = [0.0, 0.0]
        for prompt in bench.fresh(MIXED):
            begin = time.perf_counter()
            await stack.generate(prompt, num_tokens, pool)
            spent[0] += time.perf_counter() - begin
            if assistant:
                spent[1] += await _assisted_seconds(bench, prompt)
            else:
                spent[1] += await lookup_seconds(bench, [prompt], length)
        ours.append(len(MIXED) * num_tokens / spent[0])
        theirs.append(len(MIXED) * num_tokens / spent[1])
    return ours, theirs


@row("pair_8_clients_vs_batched", unit="tokens/s", at_least=1.5)
async def pair_8_clients_vs_batched(bench: Bench) -> Measurement:
    """Eight clients against `generate` on batches of eight."""
    return await eight_clients(bench, MIXED * 4, bench.default_pool)


@row("itl_p99_with_4k_prompts", unit="ms", at_most=3.0)
async def itl_p99_with_4k_prompts(bench: Bench) -> Measurement:
    """Gaps between two tokens of running streams while prompts of 4096 tokens arrive, the 99th
    percentile, over the median gap of the same streams before. Without drafts."""
    is_quick = bench.scale.num_runs == 1
    long = min(_LONG, bench.scale.max_context) if is_quick else _LONG
    limits = {} if is_quick else {"max_length": 8192}
    async with bench.stack_of(_with_pools(bench, [], **limits)) as stack:
        before, beside, reading_s = await _gaps(bench, stack, long)
    p50, p99 = 1000 * statistics.median(before), 1000 * beside[int(0.99 * (len(beside) - 1))]
    notes = [
        f"{len(beside)} gaps of {_NUM_STREAMS} streams beside prompts of {long} tokens, each of "
        f"which was read in {reading_s:.1f} s",
        f"their median {1000 * statistics.median(beside):.0f}, longest {1000 * beside[-1]:.0f} ms",
    ]
    return Measurement([p99], [p50], notes)


async def _gaps(bench: Bench, stack: Stack, long: int) -> tuple[list[float], list[float], float]:
    """Seconds between two tokens of the streams, sorted: before the long prompts come, and from
    their coming until the last has its first token. They come when each stream has a quarter of its
    tokens, one after the other; and the seconds from sending one to its token."""
    num_tokens = 6 * bench.scale.num_new_tokens if bench.scale.num_runs > 1 else 16
    filler = bench.fresh([" ".join(MIXED * 8)])[0]
    prompts = [([200 + i] + filler * (1 + long // len(filler)))[:long] for i in range(2)]

    async def arrive() -> tuple[float, float]:
        await stack.generate(bench.fresh(MIXED[:1])[0], num_tokens // 4)
        begin = time.perf_counter()
        for prompt in prompts[:_NUM_ARRIVALS]:
            await stack.generate(prompt, 1)
        return begin, time.perf_counter()

    streams = [stack.generate(p, num_tokens) for p in bench.fresh(MIXED[:_NUM_STREAMS])]
    generations, (begin, end) = await asyncio.gather(asyncio.gather(*streams), arrive())
    pairs = [pair for each in generations for pair in itertools.pairwise(each.blocks)]
    started = max(each.blocks[0].at_s for each in generations)
    before = [b.at_s - a.at_s for a, b in pairs if started < a.at_s and b.at_s <= begin]
    beside = [b.at_s - a.at_s for a, b in pairs if begin < b.at_s and a.at_s < end]
    return sorted(before or beside), sorted(beside), (end - begin) / _NUM_ARRIVALS


ROWS = (
    never_below_plain_worst,
    pair_1_client_vs_plain,
    pair_1_client_vs_assisted,
    pair_1_client_vs_best_assisted,
    pair_8_clients_vs_batched,
    itl_p99_with_4k_prompts,
)
