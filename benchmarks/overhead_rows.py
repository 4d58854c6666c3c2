"""Rows of what everything around the target costs: a verify round against its bare forward.

One client; the time between two blocks at the client is one round: verdict, orchestrator, drafter,
orchestrator, verifier. The same rounds, token by token, then run as bare engine forwards. Prompt
lookup is deterministic, and the draft lengths are left alone here, so the drafts are known without
listening in: the drafter is asked again. The verifier's own account says how much of a round is
spent in it.
"""

from collections.abc import Sequence

from benchmarks.context import Bench
from benchmarks.processes import BenchError
from benchmarks.prompts import MIXED
from benchmarks.registry import Measurement, row
from benchmarks.stack import Generation, VerifierTime
from core.config import DrafterPoolConfig
from core.types import SamplingParams
from drafter_service.drafters import create_drafter
from drafter_service.drafters.base import Drafter, DraftJob

#: (position, token ids, number of logits), as `EngineProcess.replay` takes them.
Round = tuple[int, list[int], int]


def _rounds(
    prompt: list[int], generation: Generation, drafter: Drafter | None, limit: int
) -> list[Round]:
    """The rounds behind the prompt's own, with the drafts that were verified in them."""
    tokens = prompt + list(generation.blocks[0].token_ids)
    end = len(prompt) + len(generation.token_ids)
    rounds: list[Round] = []
    for block in generation.blocks[1:]:
        draft: tuple[int, ...] = ()
        wanted = min(limit, end - len(tokens) - 1)
        if drafter is not None and wanted > 0:
            [guess] = drafter.draft([DraftJob(0, tokens, wanted, SamplingParams())])
            draft = guess.token_ids
        rounds.append((len(tokens) - 1, [tokens[-1], *draft], 1 + len(draft)))
        tokens += block.token_ids
    drafted = sum(len(round_[1]) - 1 for round_ in rounds)
    told = generation.finished.speculation.num_draft_tokens
    if drafted != told:
        raise BenchError(f"{told} draft tokens were verified, but {drafted} can be explained")
    return rounds


async def _overhead(bench: Bench, pool: DrafterPoolConfig | None) -> Measurement:
    stack, engine = await bench.stack(is_adaptive=False), await bench.engine()
    name = pool.name if pool else ""
    ours: list[float] = []
    bare: list[float] = []
    inside: list[VerifierTime] = []
    for _ in range(bench.scale.num_runs):
        service_ms = bare_ms = 0.0
        num_rounds = 0
        for prompt in bench.fresh(MIXED[2:6]):
            await stack.generate(prompt, 1)  # leaves the prompt behind: all rounds are alike now
            before = await stack.verifier_time()
            timed = await stack.generate(prompt, bench.scale.num_new_tokens, name, ids=True)
            inside.append(await stack.verifier_time() - before)
            drafter = create_drafter(pool) if pool else None
            rounds = _rounds(prompt, timed, drafter, pool.max_draft_tokens if pool else 0)
            service_ms += (timed.blocks[-1].at_s - timed.blocks[0].at_s) * 1000
            bare_ms += await engine.call("replay", prompt=prompt, rounds=rounds)
            num_rounds += len(rounds)
        ours.append(service_ms / num_rounds)
        bare.append(bare_ms / num_rounds)
    return Measurement(ours, bare, [_breakdown(ours, bare, inside)])


def _breakdown(ours: Sequence[float], bare: Sequence[float], inside: list[VerifierTime]) -> str:
    """Where a round's time goes, in milliseconds, means over all runs."""
    batches = sum(each.batches for each in inside)
    forward = sum(each.forward_s for each in inside) / batches * 1000
    sampling = sum(each.sampling_s for each in inside) / batches * 1000
    queue = sum(each.queue_s for each in inside) / batches * 1000
    total = sum(ours) / len(ours)
    return (
        f"a round of {total:.2f} ms: bare forward {sum(bare) / len(bare):.2f}; in the verifier "
        f"forward {forward:.2f}, rule {sampling:.2f}, queue {queue:.2f}; wire, orchestrator, "
        f"drafter and client {total - forward - sampling - queue:.2f}"
    )


@row("overhead_1_client", unit="ms/round", at_most=1.10)
async def overhead_1_client(bench: Bench) -> Measurement:
    """With the drafter in the loop."""
    name = bench.pool("ngram")
    return await _overhead(bench, bench.config.pool(name))


@row("overhead_plain_1_client", unit="ms/round")
async def overhead_plain_1_client(bench: Bench) -> Measurement:
    """Without drafts: the difference to the row above is the drafter's way."""
    return await _overhead(bench, None)


ROWS = (overhead_1_client, overhead_plain_1_client)
