"""Connections to verifiers and drafters: one long-lived stream each, kept up for ever.

Knows gRPC and the wire; knows nothing of sequences or policy. A client resolves its replica's
address, shakes hands, opens the stream, delivers what arrives, and after any loss starts again
with back-off. All callbacks run on the event loop; what belongs to a lost stream is never delivered
after `on_lost`.
"""

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import grpc
import structlog

from core import PROTOCOL_VERSION, wire
from core.errors import ForerunError, HandshakeError
from core.rpc import create_channel
from core.types import (
    DraftCommands,
    DrafterInfo,
    DraftPlans,
    VerifierInfo,
    VerifyBatch,
    VerifyResult,
)
from orchestrator.requests import Health, ReplicaSpec
from protos import drafter_pb2, drafter_pb2_grpc, verifier_pb2, verifier_pb2_grpc

Info = TypeVar("Info")
Outgoing = TypeVar("Outgoing")
Incoming = TypeVar("Incoming")

_HANDSHAKE_TIMEOUT_S = 10.0
_BACKOFF_S = (0.05, 0.1, 0.2, 0.5, 1.0)
_REFUSED_BACKOFF_S = 5.0

log = structlog.get_logger()


class ReplicaClient(ABC, Generic[Info, Outgoing, Incoming]):
    """Keeps one replica connected.

    check(info) raises HandshakeError when the replica does not fit.
    on_ready(address, info), on_message(message), on_lost(health, reason) are called in this order,
    over and over.
    """

    def __init__(
        self,
        spec: ReplicaSpec,
        *,
        check: Callable[[Info], None],
        on_ready: Callable[[str, Info], None],
        on_message: Callable[[Incoming], None],
        on_lost: Callable[[Health, str], None],
    ) -> None:
        self.spec = spec
        self._check = check
        self._on_ready = on_ready
        self._on_message = on_message
        self._on_lost = on_lost
        self._outbox: asyncio.Queue[Outgoing] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._call: Any = None
        self._drop_reason = ""

    @abstractmethod
    async def _describe(self, channel: grpc.aio.Channel) -> tuple[int, Info]:
        """The replica's protocol version and facts."""

    @abstractmethod
    def _stream(self, channel: grpc.aio.Channel) -> Any:
        """Open the long-lived stream."""

    @abstractmethod
    def _encode(self, message: Outgoing) -> Any: ...

    @abstractmethod
    def _decode(self, message: Any) -> Incoming: ...

    def start(self) -> None:
        """Begin connecting in the background."""
        self._task = asyncio.create_task(self._run(), name=f"client {self.spec.replica_id}")

    async def stop(self) -> None:
        """End the stream and stop reconnecting; `on_lost` is not called."""
        # More than once: grpc loses a cancellation that meets an answer just arriving.
        while self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=1.0)

    def send(self, message: Outgoing) -> None:
        """Queue a message for the current stream."""
        self._outbox.put_nowait(message)

    def drop(self, reason: str) -> None:
        """Give up the current stream (it went silent) and connect again."""
        if self._call is not None:
            self._drop_reason = reason
            self._call.cancel()

    async def _run(self) -> None:
        attempt = 0
        while True:
            was_ready = False
            try:
                address = await self.spec.resolve()
                async with (self.spec.connect or create_channel)(address) as channel:
                    info = await self._shake_hands(channel)
                    self._outbox, attempt, was_ready = asyncio.Queue(), 0, True
                    self._call = self._stream(channel)
                    self._on_ready(address, info)
                    log.info("replica ready", replica=self.spec.replica_id, address=address)
                    await self._pump(self._call)
                health, reason = Health.LOST, "the stream ended"
            except HandshakeError as error:
                health, reason = Health.REFUSED, str(error)
            except grpc.aio.AioRpcError as error:
                health, reason = Health.LOST, self._drop_reason or error.details() or "no details"
            except ForerunError as error:
                health, reason = Health.LOST, str(error)
            except Exception as error:  # the boundary to a peer: whatever it is, connect again
                log.exception("client failed", replica=self.spec.replica_id)
                health, reason = Health.LOST, self._drop_reason or repr(error)
            self._call, self._drop_reason = None, ""
            if was_ready or health is Health.REFUSED:
                log.warning("replica lost", replica=self.spec.replica_id, reason=reason)
            self._on_lost(health, reason)
            refused = health is Health.REFUSED
            await asyncio.sleep(_REFUSED_BACKOFF_S if refused else _BACKOFF_S[attempt])
            attempt = min(attempt + 1, len(_BACKOFF_S) - 1)

    async def _shake_hands(self, channel: grpc.aio.Channel) -> Info:
        version, info = await self._describe(channel)
        if version != PROTOCOL_VERSION:
            raise HandshakeError(
                f"{self.spec.replica_id} speaks protocol {version}, this orchestrator"
                f" {PROTOCOL_VERSION}"
            )
        self._check(info)
        return info

    async def _pump(self, call: Any) -> None:
        """Write what is queued, deliver what arrives, until the stream ends or fails."""
        writer = asyncio.create_task(self._write(call, self._outbox))
        try:
            while (message := await call.read()) is not grpc.aio.EOF:
                self._on_message(self._decode(message))
            code = await call.code()
            if code is not grpc.StatusCode.OK:
                raise ForerunError(self._drop_reason or await call.details() or str(code))
        except asyncio.CancelledError:
            # `drop` cancels the call, which surfaces here; only our own task's end passes on.
            task = asyncio.current_task()
            if not self._drop_reason or (task is not None and task.cancelling()):
                raise
            raise ForerunError(self._drop_reason) from None
        finally:
            writer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await writer
            call.cancel()

    async def _write(self, call: Any, outbox: "asyncio.Queue[Outgoing]") -> None:
        while True:
            message = await outbox.get()
            try:
                await call.write(self._encode(message))
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return  # the reader sees the same end and says why


class VerifierClient(ReplicaClient[VerifierInfo, VerifyBatch, VerifyResult]):
    """The connection to one verifier."""

    async def _describe(self, channel: grpc.aio.Channel) -> tuple[int, VerifierInfo]:
        stub = verifier_pb2_grpc.VerifierServiceStub(channel)
        reply = await stub.DescribeVerifier(
            verifier_pb2.DescribeVerifierRequest(), timeout=_HANDSHAKE_TIMEOUT_S
        )
        return reply.protocol_version, wire.verifier_info_from_proto(reply)

    def _stream(self, channel: grpc.aio.Channel) -> Any:
        return verifier_pb2_grpc.VerifierServiceStub(channel).Verify()

    def _encode(self, message: VerifyBatch) -> Any:
        return wire.verify_batch_to_proto(message)

    def _decode(self, message: Any) -> VerifyResult:
        return wire.verify_result_from_proto(message)


class DrafterClient(ReplicaClient[DrafterInfo, DraftCommands, DraftPlans]):
    """The connection to one drafter."""

    async def _describe(self, channel: grpc.aio.Channel) -> tuple[int, DrafterInfo]:
        stub = drafter_pb2_grpc.DrafterServiceStub(channel)
        reply = await stub.DescribeDrafter(
            drafter_pb2.DescribeDrafterRequest(), timeout=_HANDSHAKE_TIMEOUT_S
        )
        return reply.protocol_version, wire.drafter_info_from_proto(reply)

    def _stream(self, channel: grpc.aio.Channel) -> Any:
        return drafter_pb2_grpc.DrafterServiceStub(channel).Session()

    def _encode(self, message: DraftCommands) -> Any:
        return wire.draft_commands_to_proto(message)

    def _decode(self, message: Any) -> DraftPlans:
        return wire.draft_plans_from_proto(message)
