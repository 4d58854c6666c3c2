"""The embedded pair on real prompts, as it is served by default, against transformers' `generate`.

The pool is the configuration's `default_pool`. Greedy, end tokens ignored, the same number of
tokens on both sides. transformers cannot assist with a layer on the target's hidden states: its
assisted generation has prompt lookup and, as an assistant, the embedded target with fewer tokens
and layers, and counts with what is fastest of these. One row is about the streams that run while
long prompts arrive.
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
from core.embedded import resolve_model

_LOOKUPS = (2, 3, 5, 8, 10)
_ASSISTED = (2, 4)
_ASSISTANT = "embedded:smollm2-135m-pruned"
_CLIENTS = (1, 2, 4, 8, 16, 32)
_LONG = 4096
_NUM_STREAMS = 4
_NUM_ARRIVALS = 2


def _pool(bench: Bench) -> str:
    """The pool for requests that name none."""
    return bench.config.orchestrator.default_pool or bench.config.drafter_pools[0].name


@row("never_below_plain_worst", unit="tokens/s", at_least=0.95)
async def never_below_plain_worst(bench: Bench) -> Measurement:
    """The default pool against our own plain decoding: the worst of 1 to 32 clients."""
    stack, pool = await bench.stack(), _pool(bench)
    is_quick = bench.scale.num_runs == 1
    num_tokens = max(1, bench.scale.num_new_tokens // 2)
    measured: dict[int, tuple[list[float], list[float]]] = {}
    for num_clients in _CLIENTS[: 2 if is_quick else None]:
        speeds = measured[num_clients] = ([], [])
        tasks = list(itertools.islice(itertools.cycle(MIXED), max(4, num_clients)))
        for _ in range(max(1, bench.scale.num_runs - 1)):
            for each, drafter in zip(speeds, (pool, ""), strict=True):
                prompts = bench.fresh(tasks)
                seconds, _ = await stack.generate_all(prompts, num_tokens, drafter, num_clients)
                each.append(len(prompts) * num_tokens / seconds)
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
    return await one_client(bench, MIXED, _pool(bench))


@row("pair_1_client_vs_assisted", unit="tokens/s", at_least=2.2)
async def pair_1_client_vs_assisted(bench: Bench) -> Measurement:
    """One client against assisted generation by the method and draft length that are fastest."""
    peer, num_tokens = await bench.peer(), bench.scale.num_new_tokens
    prompts, is_quick = bench.fresh(MIXED), bench.scale.num_runs == 1
    speeds: dict[tuple[str, int], float] = {}
    for length in _LOOKUPS[: 1 if is_quick else None]:
        speeds["prompt lookup", length] = await lookup_seconds(bench, prompts, length)
    assistant = bench.config.target.model if is_quick else resolve_model(_ASSISTANT)
    for length in _ASSISTED[: 1 if is_quick else None]:
        options = {"num_draft_tokens": length, "assistant": assistant}
        await peer.call("assist", method="draft_model", **options)
        seconds = 0.0
        for prompt in prompts:
            call = {"prompt": prompt, "max_new_tokens": num_tokens}
            seconds += float((await peer.call("generate_assisted", **call))["seconds"])
        speeds["assistant", length] = seconds
    method, length = best = min(speeds, key=speeds.__getitem__)
    total = len(prompts) * num_tokens
    told = ", ".join(f"{m} {n}: {total / seconds:.1f}" for (m, n), seconds in speeds.items())
    ours: list[float] = []
    theirs: list[float] = []
    stack = await bench.stack()
    if method == "assistant":
        options = {"num_draft_tokens": length, "assistant": assistant}
        await peer.call("assist", method="draft_model", **options)
    for _ in range(bench.scale.num_runs):
        spent = [0.0, 0.0]
        for prompt in bench.fresh(MIXED):
            begin = time.perf_counter()
            await stack.generate(prompt, num_tokens, _pool(bench))
            spent[0] += time.perf_counter() - begin
            if method == "assistant":
                call = {"prompt": prompt, "max_new_tokens": num_tokens}
                spent[1] += float((await peer.call("generate_assisted", **call))["seconds"])
            else:
                spent[1] += await lookup_seconds(bench, [prompt], length)
        ours.append(total / spent[0])
        theirs.append(total / spent[1])
    note = (
        "transformers cannot assist with a layer on hidden states; of what it can (tokens/s: "
        f"{told}) {best[0]} with {best[1]} tokens is its best"
    )
    return Measurement(ours, theirs, [note])


@row("pair_8_clients_vs_batched", unit="tokens/s", at_least=1.5)
async def pair_8_clients_vs_batched(bench: Bench) -> Measurement:
    """Eight clients against `generate` on batches of eight."""
    return await eight_clients(bench, MIXED * 2, _pool(bench))


@row("itl_p99_with_4k_prompts", unit="ms", at_most=3.0)
async def itl_p99_with_4k_prompts(bench: Bench) -> Measurement:
    """Gaps between two tokens of running streams, from the first token to the last, while prompts
    of 4096 tokens arrive: the 99th percentile over the median. Without drafts."""
    is_quick = bench.scale.num_runs == 1
    long = min(_LONG, bench.scale.max_context) if is_quick else _LONG
    limits = {} if is_quick else {"max_length": 8192}
    config = bench.config.model_copy(
        update={"target": bench.config.target.model_copy(update=limits), "drafter_pools": []}
    )
    config = config.model_copy(
        update={
            "orchestrator": config.orchestrator.model_copy(
                update={"default_pool": "", "fallback_pool": ""}
            )
        }
    )
    async with bench.stack_of(config) as stack:
        gaps = await _gaps(bench, stack, long)
    gaps.sort()
    p50, p99 = (1000 * gaps[int(share * (len(gaps) - 1))] for share in (0.5, 0.99))
    chunk = config.orchestrator.max_prefill_tokens
    note = f"{len(gaps)} gaps of {_NUM_STREAMS} streams; chunks of up to {chunk} prompt tokens"
    return Measurement([p99], [p50], [note, f"longest gap {1000 * gaps[-1]:.0f} ms"])


async def _gaps(bench: Bench, stack: Stack, long: int) -> list[float]:
    """Seconds between two tokens of the streams. The long prompts come when each stream has a
    quarter of its tokens, one after the other."""
    num_tokens = 6 * bench.scale.num_new_tokens if bench.scale.num_runs > 1 else 16
    filler = bench.fresh([" ".join(MIXED * 8)])[0]
    prompts = [([200 + i] + filler * (1 + long // len(filler)))[:long] for i in range(2)]

    async def arrive() -> None:
        await stack.generate(bench.fresh(MIXED[:1])[0], num_tokens // 4)
        for prompt in prompts[:_NUM_ARRIVALS]:
            await stack.generate(prompt, 1)

    streams = [stack.generate(p, num_tokens) for p in bench.fresh(MIXED[:_NUM_STREAMS])]
    generations, _ = await asyncio.gather(asyncio.gather(*streams), arrive())
    return [
        after.at_s - before.at_s
        for generation in generations
        for before, after in itertools.pairwise(generation.blocks)
    ]


ROWS = (
    never_below_plain_worst,
    pair_1_client_vs_plain,
    pair_1_client_vs_assisted,
    pair_8_clients_vs_batched,
    itl_p99_with_4k_prompts,
)
