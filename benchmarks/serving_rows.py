"""Rows of the whole system: tokens per second through gRPC against transformers' `generate`.

The same prompts on both sides, greedy, end tokens ignored, so equally many tokens. "8 clients" are
eight calls at once, each client with its next prompt as soon as it has an answer, against one
left-padded batch of eight after the other; "1 client" is one prompt after the other.
"""

import time
from collections.abc import Sequence

from benchmarks.context import Bench
from benchmarks.processes import BenchError
from benchmarks.prompts import CHAT, GROUNDED, MIXED
from benchmarks.registry import Measurement, row
from benchmarks.stack import Generation

_LOOKUPS = (2, 3, 5, 8, 10)
_BATCH = 8


async def eight_clients(bench: Bench, tasks: Sequence[str], drafter: str) -> Measurement:
    """Eight clients at once against `generate` on batches of eight."""
    stack, peer = await bench.stack(), await bench.peer()
    num_tokens = bench.scale.num_new_tokens
    seen: list[Generation] = []
    # Unmeasured: the controller learns what a batch costs.
    await stack.generate_all(bench.fresh(tasks[:_BATCH]), num_tokens // 4, drafter)

    async def ours(prompts: list[list[int]]) -> float:
        seconds, generations = await stack.generate_all(prompts, num_tokens, drafter)
        seen.extend(generations)
        return len(prompts) * num_tokens / seconds

    async def theirs(prompts: list[list[int]]) -> float:
        seconds = 0.0
        for i in range(0, len(prompts), _BATCH):
            batch = prompts[i : i + _BATCH]
            result = await peer.call("generate", prompts=batch, max_new_tokens=num_tokens)
            _check_lengths(result["token_ids"], num_tokens)
            seconds += float(result["seconds"])
        return len(prompts) * num_tokens / seconds

    runs = await bench.in_turns(tasks, ours, theirs)
    return Measurement(*runs, _notes(seen))


async def one_client(
    bench: Bench, tasks: Sequence[str], drafter: str, lookup: int = 0, num_runs: int = 0
) -> Measurement:
    """One client, prompt after prompt, in turns with `generate` on the same prompt; with prompt
    lookup of `lookup` tokens unless that is 0."""
    stack = await bench.stack()
    num_tokens = bench.scale.num_new_tokens
    ours: list[float] = []
    theirs: list[float] = []
    seen: list[Generation] = []
    for _ in range(num_runs or bench.scale.num_runs):
        seconds = [0.0, 0.0]
        for prompt in bench.fresh(tasks):
            begin = time.perf_counter()
            seen.append(await stack.generate(prompt, num_tokens, drafter))
            seconds[0] += time.perf_counter() - begin
            seconds[1] += await lookup_seconds(bench, [prompt], lookup)
        ours.append(len(tasks) * num_tokens / seconds[0])
        theirs.append(len(tasks) * num_tokens / seconds[1])
    return Measurement(ours, theirs, _notes(seen))


async def turns_between_pools(
    bench: Bench, tasks: Sequence[str], pools: Sequence[str]
) -> list[list[float]]:
    """Tokens per second of one client with each pool in turn, prompt after prompt: a list per pool,
    a figure per run."""
    stack = await bench.stack()
    num_tokens = bench.scale.num_new_tokens
    speeds: list[list[float]] = [[] for _ in pools]
    for _ in range(bench.scale.num_runs):
        seconds = [0.0] * len(pools)
        for task in tasks:
            for i, pool in enumerate(pools):
                (prompt,) = bench.fresh([task])
                begin = time.perf_counter()
                await stack.generate(prompt, num_tokens, pool)
                seconds[i] += time.perf_counter() - begin
        for each, spent in zip(speeds, seconds, strict=True):
            each.append(len(tasks) * num_tokens / spent)
    return speeds


async def lookup_seconds(bench: Bench, prompts: Sequence[Sequence[int]], lookup: int) -> float:
    """Seconds of the peer, prompt after prompt, with prompt lookup unless `lookup` is 0."""
    peer = await bench.peer()
    num_tokens = bench.scale.num_new_tokens
    seconds = 0.0
    for prompt in prompts:
        result = await peer.call(
            "generate",
            prompts=[prompt],
            max_new_tokens=num_tokens,
            prompt_lookup_num_tokens=lookup,
        )
        _check_lengths(result["token_ids"], num_tokens)
        seconds += float(result["seconds"])
    return seconds


def _check_lengths(token_ids: list[list[int]], num_tokens: int) -> None:
    """Raises BenchError if a text is shorter: the two sides would not do the same work."""
    if any(len(ids) != num_tokens for ids in token_ids):
        raise BenchError(f"generate gave {[len(ids) for ids in token_ids]}, not {num_tokens}")


def _notes(generations: Sequence[Generation]) -> list[str]:
    steps = drafted = accepted = rounds = tokens = cached = 0
    for generation in generations:
        stats, usage = generation.finished.speculation, generation.finished.usage
        steps += stats.num_spec_steps
        drafted += stats.num_draft_tokens
        accepted += stats.num_accepted_draft_tokens
        rounds += stats.num_verify_steps
        tokens += usage.completion_tokens
        cached += usage.cached_prompt_tokens
    notes = [f"{tokens / max(1, rounds):.2f} tokens per round, {cached} prompt tokens reused"]
    if steps:
        notes.append(
            f"{steps / rounds:.0%} of rounds drafted, {drafted / steps:.1f} tokens each, "
            f"{accepted / drafted:.0%} accepted"
        )
    return notes


@row("plain_8_clients", unit="tokens/s", at_least=1.4)
async def plain_8_clients(bench: Bench) -> Measurement:
    """Continuous batching alone."""
    return await eight_clients(bench, CHAT, drafter="")


@row("ngram_8_clients_mixed", unit="tokens/s", at_least=1.5)
async def ngram_8_clients_mixed(bench: Bench) -> Measurement:
    """Prompt lookup where it finds little."""
    return await eight_clients(bench, CHAT * 2, bench.pool("ngram"))


@row("ngram_8_clients_grounded", unit="tokens/s", at_least=1.9)
async def ngram_8_clients_grounded(bench: Bench) -> Measurement:
    """Prompt lookup where answers repeat their input."""
    return await eight_clients(bench, GROUNDED * 2, bench.pool("ngram"))


@row("ngram_1_client", unit="tokens/s", at_least=1.4)
async def ngram_1_client(bench: Bench) -> Measurement:
    """Prompt lookup against transformers' own, at the draft length that suits it best."""
    prompts = bench.fresh(MIXED)
    lookups = _LOOKUPS if bench.scale.num_runs > 1 else _LOOKUPS[:1]
    seconds = {n: await lookup_seconds(bench, prompts, n) for n in lookups}
    best = min(seconds, key=seconds.__getitem__)
    tokens = len(prompts) * bench.scale.num_new_tokens
    speeds = ", ".join(f"{n}: {tokens / seconds[n]:.1f}" for n in lookups)
    measured = await one_client(bench, MIXED, bench.pool("ngram"), best)
    note = f"generate(prompt_lookup_num_tokens={best}) is its best (tokens/s: {speeds})"
    return Measurement(measured.ours, measured.peer, [note, *measured.notes])


@row("plain_1_client", unit="tokens/s")
async def plain_1_client(bench: Bench) -> Measurement:
    """One client without drafts against plain `generate`."""
    return await one_client(bench, MIXED[:4], drafter="", num_runs=2)


@row("greedy_texts_equal", unit="texts")
async def greedy_texts_equal(bench: Bench) -> Measurement:
    """How many drafted texts equal `generate`'s; in bf16 a near tie may part them."""
    stack, peer = await bench.stack(), await bench.peer()
    num_tokens = bench.scale.num_new_tokens
    notes = []
    prompts = bench.fresh(MIXED)
    for number, prompt in enumerate(prompts):
        generation = await stack.generate(prompt, num_tokens, bench.pool("ngram"), ids=True)
        result = await peer.call("generate", prompts=[prompt], max_new_tokens=num_tokens)
        ours, theirs = generation.token_ids, result["token_ids"][0]
        if ours != theirs:
            at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
            margin = await peer.call("margin", token_ids=prompt + ours[:at])
            notes.append(f"text {number} parts at token {at}: top-two margin {margin:.3f}")
    return Measurement([len(prompts) - len(notes)], [len(prompts)], notes)


ROWS = (
    plain_8_clients,
    ngram_1_client,
    ngram_8_clients_mixed,
    ngram_8_clients_grounded,
    plain_1_client,
    greedy_texts_equal,
)
