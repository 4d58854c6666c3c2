"""The verifier side of the engine: connections, slots, batches in flight.

Knows the verifiers' pool and clients; knows nothing of drafts, text or scheduling. A lost verifier
loses nothing: its sequences are handed back as orphans and rebuilt from their committed tokens.
"""

import asyncio
import itertools
from collections.abc import Callable, Mapping

import structlog

from core.config import OrchestratorConfig
from core.errors import ForerunError, HandshakeError, InvalidRequestError, ModelError
from core.types import (
    ModelIdentity,
    OpenFailure,
    VerdictStatus,
    VerifierInfo,
    VerifyBatch,
    VerifyResult,
    VerifyRow,
)
from orchestrator.clients import VerifierClient
from orchestrator.costs import BatchWork, RoundCosts
from orchestrator.pipeline import Sequence
from orchestrator.pool import Pool, Replica
from orchestrator.requests import Health, ReplicaSpec
from orchestrator.trace import Recorder

log = structlog.get_logger()

_NO_SLOT_PAUSE_S = 0.25
#: Sampling parameters that the public API has elsewhere than in its sampling options.
_PUBLIC_NAMES = {
    "sampling.constraint": "constraint",
    "sampling.rule": "speculation.rule",
    "sampling.ensemble_weight": "speculation.ensemble_weight",
    "sampling.min_new_tokens": "stopping.min_new_tokens",
}


class Verifying:
    """All verifiers of one engine.

    attached: names of the drafter pools that must live beside every target.
    sequences: the engine's running sequences by id. costs: learns how long batches take.
    on_result: called with each result. on_orphans: called with sequences that lost their slot.
    on_change: called after a verifier came.
    """

    def __init__(
        self,
        config: OrchestratorConfig,
        attached: list[str],
        sequences: Mapping[int, Sequence],
        costs: RoundCosts,
        on_result: Callable[[VerifyResult], None],
        on_orphans: Callable[[list[Sequence]], None],
        on_change: Callable[[], None],
    ) -> None:
        self.pool = Pool("", "verifier")
        self.info: VerifierInfo | None = None
        self.recorder: Recorder | None = None
        self._config = config
        self._attached = attached
        self._sequences = sequences
        self._costs = costs
        self._on_result = on_result
        self._on_orphans = on_orphans
        self._on_change = on_change
        self._expected: ModelIdentity | None = None
        self._clients: dict[str, VerifierClient] = {}
        self._closes: dict[str, list[int]] = {}
        self._batch_numbers = itertools.count(1)

    def start(self, specs: list[ReplicaSpec], expected: ModelIdentity | None) -> None:
        """Connect to every verifier; those whose tokenizer is not `expected` are refused."""
        self._expected = expected
        for spec in specs:
            self._connect(spec, self.pool.add(spec.replica_id))

    def _connect(self, spec: ReplicaSpec, replica: Replica) -> None:
        client = VerifierClient(
            spec,
            check=self._check,
            on_ready=lambda address, info: self._ready(replica, address, info),
            on_message=lambda result: self._result(replica, result),
            on_lost=lambda health, reason: self._lost(replica, health, reason),
        )
        self._clients[spec.replica_id] = client
        client.start()

    async def stop(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            await client.stop()

    # ------------------------------------------------------------ what the engine tells

    def send(self, replica: Replica, rows: tuple[VerifyRow, ...]) -> None:
        """Send a batch, with the opens its rows need and the closes that wait."""
        sequences = [self._sequences[row.sequence] for row in rows]
        opens = tuple(s.open() for s in sequences if not s.is_open)
        closes = tuple(self._closes.pop(replica.replica_id, ()))
        batch = VerifyBatch(next(self._batch_numbers), rows, opens, closes)
        replica.in_flight[batch.batch] = BatchWork.of(batch)
        if self.recorder is not None:
            self.recorder.note(replica.replica_id, batch)
        self._clients[replica.replica_id].send(batch)
        loop = asyncio.get_running_loop()
        loop.call_later(self._config.verify_timeout_s, self._check_answered, replica, batch.batch)

    def release(self, sequence: Sequence) -> None:
        """Free the sequence's slot; the close goes with the next batch or with `flush`."""
        if sequence.verifier is None:
            return
        self.pool.replicas[sequence.verifier].sequences.discard(sequence.id)
        if sequence.is_open:
            self._closes.setdefault(sequence.verifier, []).append(sequence.id)
        sequence.forget_verifier()

    def flush(self) -> None:
        """Send the closes that no batch carried."""
        for replica_id, closes in self._closes.items():
            batch = VerifyBatch(next(self._batch_numbers), closes=tuple(closes))
            self._clients[replica_id].send(batch)
        self._closes.clear()

    # ------------------------------------------------------------ what the verifiers answer

    def _check(self, info: VerifierInfo) -> None:
        missing = set(self._attached) - {drafter.pool for drafter in info.attached}
        if missing:
            raise HandshakeError(
                f"drafter_pools.{min(missing)}: verifier {info.identity.model!r} was started"
                " without this attached drafter"
            )
        known = self.info.identity if self.info is not None else self._expected
        if known is None:
            return
        ours, theirs = known.tokenizer_fingerprint, info.identity.tokenizer_fingerprint
        if ours and theirs and ours != theirs:
            raise HandshakeError(
                f"verifier model {info.identity.model!r} has tokenizer {theirs[:12]}, the"
                f" orchestrator's {known.model!r} has {ours[:12]}: they must be the same"
            )

    def _ready(self, replica: Replica, address: str, info: VerifierInfo) -> None:
        replica.become_ready(address, info)
        self.info = self.info or info
        self._on_change()

    def _result(self, replica: Replica, result: VerifyResult) -> None:
        if self.recorder is not None:
            self.recorder.note(replica.replica_id, result)
        timings = result.timings
        if (work := replica.in_flight.pop(result.batch, None)) is not None:
            self._costs.observe(work, result)
        seconds = (timings.forward_ns + timings.sampling_ns + timings.draft_ns) / 1e9
        assert isinstance(replica.info, VerifierInfo)
        replica.busy_s += seconds / max(1, replica.info.num_stages)  # of each device
        for failure in result.open_failures:
            self._open_failed(replica, failure)
        self._on_result(result)

    def _open_failed(self, replica: Replica, failure: OpenFailure) -> None:
        """Somebody else holds the slots: ask this verifier for no more for a moment."""
        log.warning("open failed", replica=replica.replica_id, message=failure.message)
        if failure.status is VerdictStatus.NO_SLOT and not replica.is_blocked:
            replica.is_blocked = True
            asyncio.get_running_loop().call_later(_NO_SLOT_PAUSE_S, self._unblock, replica)

    def _unblock(self, replica: Replica) -> None:
        replica.is_blocked = False
        self._on_change()

    def _check_answered(self, replica: Replica, batch: int) -> None:
        if batch in replica.in_flight:
            reason = f"no verdict within {self._config.verify_timeout_s} s"
            self._clients[replica.replica_id].drop(reason)

    def _lost(self, replica: Replica, health: Health, reason: str) -> None:
        self._closes.pop(replica.replica_id, None)
        orphans = [self._sequences[i] for i in replica.become_lost(health, reason)]
        for sequence in orphans:
            sequence.forget_verifier()
        self._on_orphans(orphans)


def explain_refusal(message: str) -> ForerunError:
    """The client's error for an open that a verifier found invalid.

    A message about sampling parameters ("sampling.top_p: ...") is the client's fault and becomes
    an InvalidRequestError under the field's public name; any other is the target's.
    """
    field, separator, reason = message.removeprefix("opens.").partition(": ")
    if not separator or not field.startswith("sampling."):
        return ModelError(message)
    return InvalidRequestError(_PUBLIC_NAMES.get(field, field), reason)
