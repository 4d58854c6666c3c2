"""The drafter that comes with forerun, made by `forerun distil` for the embedded target.

How good it is on prompts that it was not trained on, what it costs, and what a client gets from it,
alone and together with prompt lookup. Greedy, one client. "Never below the better" is asked of the
hybrid for each class of prompts.
"""

import itertools
from collections.abc import Sequence

from benchmarks.context import Bench
from benchmarks.prompts import CHAT, GROUNDED, MIXED
from benchmarks.registry import Measurement, Row, row
from benchmarks.serving_rows import one_client, turns_between_pools
from benchmarks.stack import Stack
from core.tokenizer import Tokenizer
from drafter_service.distil.prompts import HELD_OUT
from protos import common_pb2, generation_pb2

_DRAFT_LENGTH = 5
_ANSWER_TOKENS = 160  # as long as the answers it was trained on


@row("drafter_acceptance", unit="accepted/drafted", at_least=0.55)
async def drafter_acceptance(bench: Bench) -> Measurement:
    """Mean over the places of a draft, of the tokens drafted there behind accepted ones."""
    stack = await bench.stack(is_adaptive=False)
    prompts = HELD_OUT if bench.scale.num_runs > 1 else HELD_OUT[:2]
    tokenizer = Tokenizer.load(bench.config.target.model)
    reached = [0] * (_DRAFT_LENGTH + 1)  # steps that got to each place, all accepted at the last
    for prompt in prompts:
        ids = tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
        stats = await _drafted(stack, bench, ids, _DRAFT_LENGTH, _ANSWER_TOKENS)
        for accepted, count in enumerate(stats.acceptance_histogram):
            for place in range(accepted + 1):
                reached[place] += count
    shares = [after / max(1, before) for before, after in itertools.pairwise(reached)]
    places = ", ".join(f"{share:.3f}" for share in shares)
    note = f"by place: {places}; {sum(reached) / reached[0]:.2f} tokens per step"
    return Measurement([sum(shares) / len(shares)], [1.0], [note, f"{len(prompts)} prompts"])


@row("drafter_step", unit="ms", at_most=0.2)
async def drafter_step(bench: Bench) -> Measurement:
    """One more token in a draft against a step of the target, both as they serve, on one core."""
    stack = await bench.stack(is_adaptive=False)
    ours: list[float] = []
    peer: list[float] = []
    for _ in range(bench.scale.num_runs):
        spent = []
        for length in (1, _DRAFT_LENGTH):
            (prompt,) = bench.fresh(CHAT[:1])
            before = await stack.verifier_time()
            await _drafted(stack, bench, prompt, length, bench.scale.num_new_tokens)
            time = await stack.verifier_time() - before
            spent.append(1000 * time.drafting_s / time.batches)
        ours.append(max(1e-3, (spent[1] - spent[0]) / (_DRAFT_LENGTH - 1)))
        (prompt,) = bench.fresh(CHAT[:1])
        before = await stack.verifier_time()
        await stack.generate(prompt, bench.scale.num_new_tokens)
        time = await stack.verifier_time() - before
        peer.append(1000 * time.forward_s / time.batches)
    return Measurement(ours, peer)


async def _drafted(
    stack: Stack, bench: Bench, ids: Sequence[int], draft_length: int, num_tokens: int
) -> generation_pb2.SpeculationStats:
    """One greedy answer with drafts of one length."""
    request = generation_pb2.GenerateRequest(
        prompt_token_ids=common_pb2.TokenIds(ids=ids),
        sampling=generation_pb2.SamplingOptions(temperature=0.0),
        stopping=generation_pb2.StoppingOptions(max_new_tokens=num_tokens),
        speculation=generation_pb2.SpeculationOptions(
            drafter=bench.pool("mtp_layers"), max_draft_tokens=draft_length
        ),
    )
    return (await stack.call(request)).finished.speculation


@row("distilled_1_client_vs_plain", unit="tokens/s", at_least=1.8)
async def distilled_1_client_vs_plain(bench: Bench) -> Measurement:
    """Against transformers' plain `generate`, on open talk."""
    return await one_client(bench, CHAT, bench.pool("mtp_layers"))


@row("distilled_vs_ngram_nonrepetitive", unit="tokens/s", at_least=1.15)
async def distilled_vs_ngram_nonrepetitive(bench: Bench) -> Measurement:
    """Against our own prompt lookup, on open talk."""
    pools = bench.pool("mtp_layers"), bench.pool("ngram")
    speeds = await turns_between_pools(bench, CHAT, pools)
    return Measurement(speeds[0], speeds[1])


def _hybrid_row(name: str, tasks: Sequence[str]) -> Row:
    """The hybrid against the better of its two parts."""

    async def measure(bench: Bench) -> Measurement:
        pools = [bench.pool(kind) for kind in ("hybrid", "mtp_layers", "ngram")]
        hybrid, *parts = await turns_between_pools(bench, tasks, pools)
        better = max(parts, key=sum)
        note = f"the better one is {pools[1 + parts.index(better)]}"
        return Measurement(hybrid, better, [note])

    return row(f"hybrid_vs_better_{name}", unit="tokens/s", at_least=1.0)(measure)


ROWS = (
    drafter_acceptance,
    drafter_step,
    distilled_1_client_vs_plain,
    distilled_vs_ngram_nonrepetitive,
    *(
        _hybrid_row(name, tasks)
        for name, tasks in (("chat", CHAT), ("grounded", GROUNDED), ("mixed", MIXED))
    ),
)
