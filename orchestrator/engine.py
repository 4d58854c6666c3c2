"""The engine: turns requests into micro-batches and verdicts into blocks.

Glue between the pure policy (scheduler, pipeline) and the two sides (verifying, drafting). One
event loop, no locks: every event (request, verdict, plan, loss, timer) changes the state and then
calls `_pump`, which admits, forms batches and sends. Knows no protobuf, no gRPC, no tokenizer
beyond the detokenizer it is handed, and no Ray.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator

from core.config import DrafterPoolConfig, OrchestratorConfig
from core.errors import ForerunError, InvalidRequestError, ModelError, UnavailableError
from core.types import ModelIdentity, Verdict, VerdictStatus, VerifierInfo, VerifyResult
from orchestrator.changes import Changes
from orchestrator.controller import Controller
from orchestrator.delivery import Deliveries
from orchestrator.demand import PoolLoad, measure
from orchestrator.drafting import Drafting
from orchestrator.pipeline import Sequence
from orchestrator.pool import Replica
from orchestrator.requests import Block, ClusterStatus, GenerationRequest, ReplicaSpec
from orchestrator.scheduler import Scheduler
from orchestrator.stream import Detokenizer, Stream
from orchestrator.trace import Recorder
from orchestrator.verifying import Verifying, explain_refusal

_DRAFTER_START_S = 10.0


class Engine:
    """Serves requests with the given replicas.

    replicas: verifiers (pool "") and drafters (pool = a name from `pools`).
    expected: what the orchestrator's own tokenizer demands of the verifiers, when known.
    """

    def __init__(
        self,
        config: OrchestratorConfig,
        pools: list[DrafterPoolConfig],
        replicas: list[ReplicaSpec],
        expected: ModelIdentity | None = None,
    ) -> None:
        self.config = config
        self._expected = expected
        self._specs = replicas
        self._sequences: dict[int, Sequence] = {}
        self._streams: dict[int, Stream] = {}
        self._scheduler = Scheduler(
            config.max_queue,
            config.draft_wait_ms / 1000,
            config.max_prefill_tokens,
            config.max_prefill_slowdown,
            Controller(config.adaptive_draft_length),
        )
        costs = self._scheduler.controller.costs
        attached = [pool.name for pool in pools if pool.attached]
        self._verifying = Verifying(
            config, attached, self._sequences, costs, self._verdicts, self._orphans, self._pump
        )
        self._drafting = Drafting(
            pools,
            config.default_pool,
            config.fallback_pool,
            self._sequences,
            time.monotonic,
            self._pump,
            self._begin_again,
        )
        self._ids = itertools.count(1)
        self._wake: asyncio.TimerHandle | None = None
        self._deliveries = Deliveries()
        self._changes = Changes()
        self._is_draining = False
        self._started_at = time.monotonic()
        self._num_finished = 0
        self._num_completion_tokens = 0

    # ------------------------------------------------------------ life cycle

    @property
    def info(self) -> VerifierInfo | None:
        """The first verifier's facts; None until one has shaken hands."""
        return self._verifying.info

    @property
    def pool_kinds(self) -> dict[str, str]:
        """Kinds of the drafter pools by name, the default pool first."""
        pools, default = self._drafting.pools, self._drafting.default_pool
        return {name: pools[name].kind for name in sorted(pools, key=lambda n: n != default)}

    async def start(self) -> None:
        """Connect; returns once a verifier serves and the drafters had time to shake hands.

        Raises HandshakeError when a replica does not fit the others.
        """
        self._verifying.start([s for s in self._specs if s.pool == ""], self._expected)
        await self._changes.until(lambda: self._refuse_none() and self.info is not None)
        assert self.info is not None
        self._drafting.start([s for s in self._specs if s.pool], self.info)
        await self._changes.until(
            lambda: self._refuse_none() and self._drafting.is_settled, _DRAFTER_START_S
        )

    def _refuse_none(self) -> bool:
        for pool in (self._verifying.pool, *self._drafting.pools.values()):
            pool.check_fit()
        return True

    def add_replica(self, spec: ReplicaSpec) -> None:
        """Use one more drafter: it serves as soon as it is there and has shaken hands."""
        assert self.info is not None, "start() has returned"
        self._drafting.add(spec, self.info)

    async def drain_replica(self, replica_id: str) -> None:
        """Do without a drafter: it gets nothing new, its sequences move to others, and their text
        does not change. Raises InvalidRequestError when there is none of that name."""
        await self._drafting.drain(replica_id)

    def record(self, recorder: Recorder | None) -> None:
        """Have what is sent and received noted from now on, or no longer."""
        self._verifying.recorder = self._drafting.recorder = recorder

    async def stop(self, drain_timeout_s: float = 0.0) -> None:
        """Refuse new requests, let the running ones end for a while, then close everything."""
        self._is_draining = True
        await self._changes.until(lambda: not self._sequences, drain_timeout_s)
        for stream in list(self._streams.values()):
            stream.fail(UnavailableError("the orchestrator is shutting down"))
        self._set_timer(None)
        self._deliveries.flush(is_urgent=True)
        await self._drafting.stop()
        await self._verifying.stop()

    # ------------------------------------------------------------ requests

    async def generate(
        self, request: GenerationRequest, detokenizer: Detokenizer
    ) -> AsyncGenerator[Block, None]:
        """Run one request and yield its blocks. Closing the iterator frees everything at once.

        Raises OverloadedError (slots and queue full), UnavailableError (draining, or no verifier
        was ever there), InvalidRequestError (the id is in use, or the verifier refused a
        parameter), ModelError (the target failed).
        """
        sequence = self._enqueue(request)
        stream = Stream(sequence, detokenizer, time.monotonic())
        self._sequences[sequence.id] = sequence
        self._streams[sequence.id] = stream
        try:
            self._pump()
            finished = None
            while finished is None:
                block = await stream.next_block()
                finished = block.finished
                yield block
        finally:
            self._release(sequence)
            self._pump()

    def _enqueue(self, request: GenerationRequest) -> Sequence:
        if self._is_draining or self.info is None:
            raise UnavailableError("the orchestrator is shutting down or has no verifier yet")
        if any(s.request.request_id == request.request_id for s in self._sequences.values()):
            raise InvalidRequestError("request_id", f"{request.request_id!r} is running already")
        sequence = Sequence(next(self._ids), request)
        self._scheduler.enqueue(sequence, self._verifying.pool.num_free)
        return sequence

    def _release(self, sequence: Sequence) -> None:
        """Free a sequence everywhere; harmless when it was freed before."""
        if self._sequences.pop(sequence.id, None) is None:
            return
        del self._streams[sequence.id]
        self._scheduler.cancel(sequence)
        self._drafting.detach(sequence)
        self._verifying.release(sequence)
        self._num_finished += 1
        self._num_completion_tokens += sequence.num_generated

    # ------------------------------------------------------------ the pump

    def _pump(self) -> None:
        """Do all that can be done now: admit, form batches, send. Runs after every event."""
        for sequence in self._scheduler.admit(self._verifying.pool):
            self._drafting.attach(sequence)
            self._streams[sequence.id].admit(time.monotonic())
        deadlines = [self._feed(replica) for replica in self._verifying.pool.ready()]
        self._verifying.flush()
        self._drafting.flush()
        wake_at = min((d for d in deadlines if d is not None), default=None)
        self._set_timer(wake_at)
        self._deliveries.flush(is_urgent=wake_at is None)
        self._changes.announce()

    def _feed(self, replica: Replica) -> float | None:
        """Send a verifier all the batches it may have; returns when to look again, if ever."""
        assert isinstance(replica.info, VerifierInfo)
        num_stages = max(1, replica.info.num_stages)
        limit = self.config.max_in_flight or num_stages
        while len(replica.in_flight) < limit:
            sequences = [self._sequences[i] for i in sorted(replica.sequences)]
            budget = replica.info.max_batch_tokens
            now = time.monotonic()
            selection = self._scheduler.select(sequences, budget, now, min(limit, num_stages))
            replica.note_idle(now, selection.wake_at is not None and not replica.in_flight)
            if not selection.rows:
                return selection.wake_at
            self._verifying.send(replica, selection.rows)
            self._drafting.sent(selection.rows)
        return None

    def _set_timer(self, wake_at: float | None) -> None:
        if self._wake is not None:
            self._wake.cancel()
        self._wake = None
        if wake_at is not None:
            delay = max(0.0, wake_at - time.monotonic())
            self._wake = asyncio.get_running_loop().call_later(delay, self._pump)

    # ------------------------------------------------------------ verdicts

    def _verdicts(self, result: VerifyResult) -> None:
        for failure in result.open_failures:
            if failure.status is VerdictStatus.INVALID:
                self._fail(failure.sequence, explain_refusal(failure.message))
        for verdict in result.verdicts:
            sequence = self._sequences.get(verdict.sequence)
            if sequence is None:
                continue  # cancelled while the row was in flight
            if verdict.status is VerdictStatus.OK:
                self._commit(sequence, verdict)
            elif verdict.status is VerdictStatus.INVALID:
                self._fail(sequence.id, ModelError(verdict.message))
            else:  # no slot, or the prefix was lost
                self._begin_again(sequence)
        self._pump()

    def _begin_again(self, sequence: Sequence) -> None:
        """Have the target compute a sequence once more from what is committed."""
        self._verifying.release(sequence)
        self._scheduler.requeue([sequence])

    def _fail(self, sequence_id: int, error: ForerunError) -> None:
        if sequence := self._sequences.get(sequence_id):
            self._streams[sequence_id].fail(error)
            self._release(sequence)

    def _commit(self, sequence: Sequence, verdict: Verdict) -> None:
        row = sequence.row
        if row is None or not sequence.accept(verdict):
            return
        stream = self._streams[sequence.id]
        stream.read_prompt(row, verdict)
        self._drafting.tell(sequence, verdict)
        if row.partial:
            return
        try:
            block = stream.cut(verdict)
        except ModelError as error:
            self._fail(sequence.id, error)
            return
        accepted = sequence.commit(block.token_ids, row, verdict.accepted)
        self._drafting.count(sequence.draft_source, len(row.draft_token_ids), accepted)
        now = time.monotonic()
        self._deliveries.add(lambda: stream.deliver(block, accepted, now))
        if block.finished is not None:
            self._release(sequence)
        else:
            self._drafting.take(sequence, verdict)
            self._drafting.commit(sequence, block.token_ids)

    def _orphans(self, sequences: list[Sequence]) -> None:
        self._scheduler.requeue(sequences)
        self._pump()

    # ------------------------------------------------------------ status

    def status(self) -> ClusterStatus:
        """The cluster at this moment."""
        num_waiting = len(self._scheduler.waiting)
        return ClusterStatus(
            model=self.info.identity.model if self.info else "",
            verifiers=self._verifying.pool.status().replicas,
            drafter_pools=self._drafting.status(self._verifying.pool),
            num_waiting=num_waiting,
            num_running=len(self._sequences) - num_waiting,
            num_finished=self._num_finished,
            num_completion_tokens=self._num_completion_tokens,
            uptime_s=time.monotonic() - self._started_at,
        )

    def loads(self) -> dict[str, PoolLoad]:
        """What the pools of remote drafters have to do at this moment, by name."""
        drafting, verifiers = self._drafting, self._verifying.pool
        return measure(drafting.pools, drafting.default_pool, verifiers, self._sequences.values())
