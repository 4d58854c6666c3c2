"""The drafter side of the engine: who drafts for whom, what they are told, what they answer.

Glue between the pools, the sequences' pipelines and the drafters' connections. Knows nothing of
verifiers: the engine tells it what was committed and asks nothing back; plans land in the
sequences. A drafter that is lost, full or confused costs speed and never text.
"""

from collections.abc import Callable, Mapping

import structlog

from core.config import DrafterPoolConfig
from core.errors import HandshakeError, InvalidRequestError
from core.types import (
    DrafterInfo,
    DraftFeatures,
    DraftPlans,
    NeedOpen,
    NeedOpenReason,
    Rule,
    Verdict,
    VerifierInfo,
    VerifyRow,
)
from orchestrator.clients import DrafterClient
from orchestrator.controller import Histories
from orchestrator.foresight import Foresight
from orchestrator.outbox import Outbox
from orchestrator.pipeline import Sequence
from orchestrator.pool import Pool, Replica, explain_mismatch
from orchestrator.requests import Health, PoolStatus, ReplicaSpec
from orchestrator.routing import Router, traffic_of
from orchestrator.trace import Recorder

log = structlog.get_logger()

_CAUSES = {
    NeedOpenReason.TOO_LONG: "too_long",
    NeedOpenReason.FULL: "drafter_full",
    NeedOpenReason.INVALID: "drafter_error",
}


class Drafting:
    """All drafter pools of one engine.

    sequences: the engine's running sequences by id.
    on_change: called after an event that may have made rows ready.
    retell: called with a sequence whose features the target must compute once more.
    """

    def __init__(
        self,
        configs: list[DrafterPoolConfig],
        default_pool: str,
        fallback_pool: str,
        sequences: Mapping[int, Sequence],
        clock: Callable[[], float],
        on_change: Callable[[], None],
        retell: Callable[[Sequence], None],
    ) -> None:
        self.pools = {c.name: Pool(c.name, c.kind, c.max_draft_tokens, c.attached) for c in configs}
        self._max_branches = {c.name: c.max_branches for c in configs}
        self._histories = {c.name: Histories.of_pool() for c in configs}
        self._foresights = {n: Foresight(h.model.first) for n, h in self._histories.items()}
        self._fallback_pool = fallback_pool
        self.default_pool = default_pool or next(iter(self.pools), "")
        routed = [name for name in self.pools if name != fallback_pool]
        self._router = Router([default_pool] if default_pool else routed)
        self._since: dict[int, tuple[float, int]] = {}  # sequence -> when, at how many tokens
        self._sequences = sequences
        self._num_ids = 0
        self._clock = clock
        self._on_change = on_change
        self._retell = retell
        self._clients: dict[str, DrafterClient] = {}
        self._replicas: dict[str, tuple[Pool, Replica]] = {}
        self._outboxes: dict[str, Outbox] = {}
        self.recorder: Recorder | None = None

    def start(self, specs: list[ReplicaSpec], target: VerifierInfo) -> None:
        """Connect to every drafter; those that do not fit `target` are refused."""
        self._num_ids = target.tokenizer_size
        for spec in specs:
            self.add(spec, target)

    def add(self, spec: ReplicaSpec, target: VerifierInfo) -> None:
        """Connect to one more drafter. It is refused when it does not fit `target`."""
        pool = self.pools[spec.pool]
        replica = pool.add(spec.replica_id)
        self._replicas[spec.replica_id] = (pool, replica)

        def check(info: DrafterInfo) -> None:
            if mismatch := explain_mismatch(info.identity, target.identity):
                raise HandshakeError(f"drafter_pools.{pool.name}: {mismatch}")

        client = DrafterClient(
            spec,
            check=check,
            on_ready=lambda address, info: self._ready(replica, address, info),
            on_message=lambda plans: self._plans(replica, plans),
            on_lost=lambda health, why: self._lost(replica, health, why),
        )
        self._clients[spec.replica_id] = client
        client.start()

    async def drain(self, replica_id: str) -> None:
        """Move a drafter's sequences to others, which take them up from what is committed, and
        close its connection. Raises InvalidRequestError when no pool has it."""
        pool, replica = self._replicas.get(replica_id, (None, None))
        if pool is None or replica is None or pool.replicas.get(replica_id) is not replica:
            raise InvalidRequestError("replica_id", f"there is no drafter {replica_id!r}")
        del pool.replicas[replica_id]  # from now on nobody chooses it
        self._lost(replica, Health.LOST, "drained")
        await self._clients.pop(replica_id).stop()

    @property
    def is_settled(self) -> bool:
        """Whether every drafter has shaken hands, or failed to."""
        replicas = [r for pool in self.pools.values() for r in pool.replicas.values()]
        return all(r.health is not Health.CONNECTING for r in replicas)

    async def stop(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            await client.stop()

    def status(self, verifiers: Pool) -> tuple[PoolStatus, ...]:
        """All pools; attached drafters are where the verifiers are."""
        return tuple(p.status(verifiers if p.is_attached else p) for p in self.pools.values())

    # ------------------------------------------------------------ what the engine tells

    def attach(self, sequence: Sequence) -> None:
        """Give a sequence a drafter if it wants one and there is one."""
        if sequence.no_draft_cause or sequence.has_drafter:
            return
        is_ensemble = sequence.request.sampling.rule is Rule.ENSEMBLE
        pool = self._pool_for(sequence, is_ensemble)
        if pool is not None and pool.is_attached:
            sequence.near.use(pool.name, pool.max_draft_tokens, is_fallback=False)
            self._enter(sequence, pool)
            return
        if fallback := self.pools.get(self._fallback_pool):
            sequence.near.use(fallback.name, fallback.max_draft_tokens, is_fallback=True)
        if pool is None or (replica := pool.choose(is_ensemble)) is None:
            is_lacking = is_ensemble and pool is not None and pool.choose() is not None
            sequence.absence = "no_distributions" if is_lacking else "no_drafter"
            return
        replica.take(sequence.id)
        most = self._max_branches[pool.name] if replica.can_draft_ahead else 0
        limits = self._limit(pool, replica), self._clock(), most
        opened = sequence.open_drafter(replica.replica_id, *limits)
        self._enter(sequence, pool)
        self._outbox(replica).opens.append(opened)
        sequence.needs = replica.needs
        if sequence.needs and sequence.is_open:
            self._retell(sequence)

    def _pool_for(self, sequence: Sequence, is_ensemble: bool) -> Pool | None:
        """The pool the request names, or else the one that did best for its kind of traffic."""
        if sequence.request.speculation.drafter:
            return self.pools.get(sequence.request.speculation.drafter)
        available = [
            name
            for name, pool in self.pools.items()
            if pool.is_attached or pool.choose(is_ensemble) is not None
        ]
        if sequence.stats.drafter in available:  # as long as it can, it stays where it is
            return self.pools[sequence.stats.drafter]
        available = [name for name in available if name in self._router.pools]
        if not available:
            return self.pools.get(self.default_pool)
        return self.pools[self._router.choose(traffic_of(sequence.request), available)]

    def _report(self, sequence: Sequence) -> None:
        """Tell the router what a sequence got with its pool."""
        if sequence.id in self._since:
            began_at, num_tokens = self._since.pop(sequence.id)
            seconds, gained = self._clock() - began_at, sequence.num_generated - num_tokens
            traffic = traffic_of(sequence.request)
            self._router.observe(traffic, sequence.stats.drafter, gained, seconds)

    def _enter(self, sequence: Sequence, pool: Pool) -> None:
        """The sequence drafts with a pool from now on: what others got there is its best guess."""
        if sequence.stats.drafter != pool.name:
            self._report(sequence)
            name = sequence.stats.drafter = pool.name
            sequence.histories = Histories(self._histories[name])
            sequence.foresight = self._foresights[name]

    def commit(self, sequence: Sequence, token_ids: tuple[int, ...]) -> None:
        """Tell the sequence's drafter what was committed, or find it one."""
        if sequence.drafter is None:
            self.attach(sequence)
            return
        commit = sequence.commit_drafter(token_ids, self._clock())
        self._outbox(self._replicas[sequence.drafter][1]).commits.append(commit)

    def sent(self, rows: tuple[VerifyRow, ...]) -> None:
        """Have the drafters whose blocks went to the target draft ahead of the verdict."""
        for sequence in (self._sequences[row.sequence] for row in rows):
            drafter = sequence.drafter
            if drafter is not None and (told := sequence.draft_ahead(self._clock())) is not None:
                self._outbox(self._replicas[drafter][1]).sents.append(told)

    def tell(self, sequence: Sequence, verdict: Verdict) -> None:
        """Hand on what the target computed of the tokens it holds, if the drafter needs it."""
        if verdict.features is not None and sequence.needs and sequence.drafter is not None:
            told = DraftFeatures(sequence.id, sequence.generation, verdict.features)
            self._outbox(self._replicas[sequence.drafter][1]).features.append(told)

    def take(self, sequence: Sequence, verdict: Verdict) -> None:
        """Keep the draft that came with a verdict, once it is committed."""
        self._since.setdefault(sequence.id, (self._clock(), sequence.num_generated))
        sequence.take_attached(verdict, self._num_ids)

    def count(self, source: str, num_draft_tokens: int, num_accepted: int) -> None:
        """Add one verified draft to the totals of the pool it came from."""
        if num_draft_tokens and source in self.pools:
            self.pools[source].count(num_draft_tokens, num_accepted)

    def detach(self, sequence: Sequence) -> None:
        """Let the sequence's drafter forget it: the sequence has ended."""
        self._report(sequence)
        if pool := self.pools.get(sequence.stats.drafter):
            pool.retire(sequence.stats)
        self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        if sequence.drafter is None:
            return
        _, replica = self._replicas[sequence.drafter]
        replica.sequences.discard(sequence.id)
        outbox = self._outbox(replica)
        is_unsent = outbox.drop(sequence.id)
        close = sequence.close_drafter()
        if not is_unsent or close.generation > 1:
            outbox.closes.append(close)

    def flush(self) -> None:
        """Send what was collected: one frame per drafter."""
        for replica_id, outbox in self._outboxes.items():
            frame = outbox.frame()
            if self.recorder is not None:
                self.recorder.note(replica_id, frame)
            self._clients[replica_id].send(frame)
        self._outboxes.clear()

    # ------------------------------------------------------------ what the drafters answer

    def _ready(self, replica: Replica, address: str, info: DrafterInfo) -> None:
        replica.become_ready(address, info)
        pool, _ = self._replicas[replica.replica_id]
        for sequence_id in pool.surplus(replica):
            self._leave(self._sequences[sequence_id])
        for sequence in self._sequences.values():
            if sequence.verifier is not None:
                self.attach(sequence)
        self._on_change()

    def _lost(self, replica: Replica, health: Health, reason: str) -> None:
        self._outboxes.pop(replica.replica_id, None)
        for sequence_id in replica.become_lost(health, reason):
            if sequence := self._sequences.get(sequence_id):
                sequence.forget_drafter()
                self.attach(sequence)
        self._on_change()

    def _plans(self, replica: Replica, plans: DraftPlans) -> None:
        if self.recorder is not None:
            self.recorder.note(replica.replica_id, plans)
        self._replicas[replica.replica_id][0].busy_s += plans.draft_ns / 1e9
        for plan in plans.plans:
            if sequence := self._sequences.get(plan.sequence):
                draft_s, foresight = plans.draft_ns / 1e9, sequence.foresight
                sequence.plans.time(plan, self._clock(), draft_s, foresight)
                sequence.take_plan(plan, self._num_ids)
        for need in plans.need_opens:
            sequence = self._sequences.get(need.sequence)
            if sequence is not None and sequence.generation == need.generation:
                self._reopen(sequence, replica, need)
        self._on_change()

    def _reopen(self, sequence: Sequence, replica: Replica, need: NeedOpen) -> None:
        replica.sequences.discard(sequence.id)
        sequence.forget_drafter()
        if need.reason is NeedOpenReason.GAP:
            self.attach(sequence)
        else:
            sequence.no_draft_cause = _CAUSES[need.reason]
            told = {"request_id": sequence.request.request_id, "sequence": sequence.id}
            log.info("drafting ended", **told, why=need.message or need.reason.value)

    def _limit(self, pool: Pool, replica: Replica) -> int:
        own = replica.info.max_draft_tokens if isinstance(replica.info, DrafterInfo) else 0
        return min(pool.max_draft_tokens, own or pool.max_draft_tokens)

    def _outbox(self, replica: Replica) -> Outbox:
        return self._outboxes.setdefault(replica.replica_id, Outbox())
