"""How much the drafters of a pool have to do, and how well they keep up: what scaling goes by.

Pure policy: knows nothing of clocks, sockets or Ray. Totals only grow, so whoever looks twice knows
what happened in between.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from orchestrator.pipeline import Sequence
from orchestrator.pool import Pool


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """One pool at one moment.

    num_ready: drafters that serve. num_sequences: sequences they draft for, and such that found no
    room. max_sequences: what one drafter can hold, 0 for any number.
    Totals since the start: busy_s is time spent drafting, of all drafters together; num_steps are
    verify steps of the pool's sequences, num_late those that went without a plan that did not come
    in time; idle_s is the time the verifiers, on average, stood still to wait for plans.
    """

    num_ready: int = 0
    num_sequences: int = 0
    max_sequences: int = 0
    busy_s: float = 0.0
    num_steps: int = 0
    num_late: int = 0
    idle_s: float = 0.0


def measure(
    pools: Mapping[str, Pool], default_pool: str, verifiers: Pool, sequences: Iterable[Sequence]
) -> dict[str, PoolLoad]:
    """The load of each pool whose drafters are processes of their own.

    default_pool: where sequences belong that name no pool and have found no drafter yet.
    """
    remote = {name: pool for name, pool in pools.items() if not pool.is_attached}
    num_sequences = {name: sum(len(r.sequences) for r in p.ready()) for name, p in remote.items()}
    num_steps = {name: pool.num_steps for name, pool in remote.items()}
    num_late = {name: pool.num_late for name, pool in remote.items()}
    for sequence in sequences:
        stats = sequence.stats
        wish = sequence.request.speculation.drafter or stats.drafter or default_pool
        is_lacking = not sequence.has_drafter and not sequence.no_draft_cause
        if is_lacking and wish in remote:
            num_sequences[wish] += 1
        if stats.drafter in remote:
            num_steps[stats.drafter] += stats.num_verify_steps
            num_late[stats.drafter] += stats.fallback_steps["late"]
    idle = [verifier.idle_s for verifier in verifiers.replicas.values()]
    return {
        name: PoolLoad(
            num_ready=len(ready := list(pool.ready())),
            num_sequences=num_sequences[name],
            max_sequences=max((r.max_sequences for r in ready), default=0),
            busy_s=pool.busy_s,
            num_steps=num_steps[name],
            num_late=num_late[name],
            idle_s=sum(idle) / max(1, len(idle)),
        )
        for name, pool in remote.items()
    }
