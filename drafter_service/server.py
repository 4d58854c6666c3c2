"""The DrafterService over gRPC: reads commands as they arrive, pushes plans as they are made.

Knows protobuf frames and threads, nothing of drafting. One engine serves all streams; everything
that touches it runs in one place: in a worker thread, or for a drafter that takes microseconds on
the event loop itself.

    stream 1 ──reader──▶ ┐         ┌─ worker: apply all that came, one step ─┐ ┌──▶ writer ──▶ 1
    stream 2 ──reader──▶ ┴─ inbox ─┴──────────── again while work ───────────┴─┴──▶ writer ──▶ 2

While the worker drafts, frames gather in the inbox and make one batch of the next step. A stream's
sequences end with it. A command that cannot be understood quarantines its sequence, nothing else.
"""

import asyncio
import contextlib
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import structlog
from opentelemetry.trace import NoOpTracer, Tracer
from prometheus_client import CollectorRegistry

from core import wire
from core.config import DrafterPoolConfig
from core.drafter import Drafter
from core.errors import InvalidRequestError
from core.metrics import DrafterMetrics, MetricsServer
from core.rpc import RunningServer, create_server
from core.tracing import SequenceSpans
from core.types import DrafterInfo, DraftPlans
from drafter_service.drafters import create_drafter
from drafter_service.engine import DrafterEngine
from protos import drafter_pb2, drafter_pb2_grpc

_log = structlog.get_logger(__name__)

_SERVICE = "forerun.v1.DrafterService"

#: Plans to send; None ends the stream, an exception fails it.
_Outbox = asyncio.Queue[DraftPlans | Exception | None]
_Change = Callable[[DrafterEngine], None]


class Worker:
    """Runs the engine: changes gather in the inbox, plans go to the outbox of their stream."""

    def __init__(
        self,
        engine: DrafterEngine,
        thread: ThreadPoolExecutor | None,
        metrics: DrafterMetrics | None = None,
    ) -> None:
        self._engine = engine
        self._metrics = metrics or DrafterMetrics(CollectorRegistry(), "")
        self._since = 0.0  # when the oldest change in the inbox came
        self._thread = thread  # None: on the event loop
        self._inbox: list[_Change] = []
        self._outboxes: dict[int, _Outbox] = {}
        self._wake = asyncio.Event()
        self._streams = itertools.count()

    def open_stream(self) -> tuple[int, _Outbox]:
        """A new stream's id and where its plans will be put."""
        stream = next(self._streams)
        self._outboxes[stream] = outbox = _Outbox()
        return stream, outbox

    def close_stream(self, stream: int) -> None:
        """Forget the stream's sequences before anything that comes later is done."""
        del self._outboxes[stream]
        self.submit(lambda engine: engine.close_stream(stream))

    def submit(self, change: _Change) -> None:
        """Have the engine changed, in order."""
        if not self._inbox:
            self._since = time.perf_counter()
        self._inbox.append(change)
        self._wake.set()

    async def run(self) -> None:
        """Work until cancelled. An error fails every stream: their peers open again elsewhere."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                while await self._work_once():
                    await asyncio.sleep(0)  # let readers and writers in between two steps
            except Exception as error:  # the boundary: the service outlives a broken step
                _log.exception("engine_failed", num_streams=len(self._outboxes))
                for outbox in self._outboxes.values():
                    outbox.put_nowait(error)

    async def _work_once(self) -> bool:
        inbox, self._inbox = self._inbox, []
        if inbox:
            self._metrics.taken(time.perf_counter() - self._since)
        if self._thread is None:
            frames, has_work = self._work(inbox)
        else:
            loop = asyncio.get_running_loop()
            frames, has_work = await loop.run_in_executor(self._thread, self._work, inbox)
        for stream, plans in frames:
            if stream in self._outboxes:
                self._outboxes[stream].put_nowait(plans)
        return has_work

    def _work(self, inbox: list[_Change]) -> tuple[list[tuple[int, DraftPlans]], bool]:
        for change in inbox:
            change(self._engine)
        self._metrics.set_open(self._engine.num_sequences)
        if not self._engine.has_work:
            return [], False
        started_at = time.perf_counter()
        frames = self._engine.step()
        self._metrics.stepped(time.perf_counter() - started_at, [plans for _, plans in frames])
        return frames, self._engine.has_work


class DrafterServicer(drafter_pb2_grpc.DrafterServiceServicer):
    """The two calls of drafter.proto."""

    def __init__(self, info: DrafterInfo, worker: Worker, spans: SequenceSpans) -> None:
        self._info = info
        self._worker = worker
        self._spans = spans

    async def DescribeDrafter(
        self, request: drafter_pb2.DescribeDrafterRequest, context: Any
    ) -> drafter_pb2.DescribeDrafterResponse:
        """What the drafter is."""
        return wire.drafter_info_to_proto(self._info)

    async def Session(
        self, request_iterator: AsyncIterator[drafter_pb2.SessionRequest], context: Any
    ) -> AsyncIterator[drafter_pb2.SessionResponse]:
        """One peer's sequences, until it ends the stream or goes away."""
        stream, outbox = self._worker.open_stream()
        reader = asyncio.create_task(self._read(stream, outbox, request_iterator))
        try:
            while (plans := await outbox.get()) is not None:
                if isinstance(plans, Exception):
                    raise plans
                self._spans.drafted(stream, plans)  # before a close that answers it
                yield wire.draft_plans_to_proto(plans)
        finally:
            reader.cancel()
            self._worker.close_stream(stream)
            self._spans.close_stream(stream)

    async def _read(
        self,
        stream: int,
        outbox: _Outbox,
        requests: AsyncIterator[drafter_pb2.SessionRequest],
    ) -> None:
        try:
            async for request in requests:
                closes = (close.sequence for close in request.closes)
                self._spans.apply(stream, request.opens, closes)
                self._worker.submit(_change(stream, request))
        except Exception as error:  # handed to the call, whose boundary turns it into a status
            outbox.put_nowait(error)
        else:
            outbox.put_nowait(None)


def _change(stream: int, request: drafter_pb2.SessionRequest) -> _Change:
    """What a frame asks of the engine; an open that makes no sense is refused by itself."""
    bad: list[tuple[int, int, str]] = []
    try:
        commands = wire.draft_commands_from_proto(request)
    except InvalidRequestError:
        good = drafter_pb2.SessionRequest(
            commits=request.commits,
            closes=request.closes,
            features=request.features,
            sents=request.sents,  # as commits: those of a refused sequence change nothing
        )
        for open_ in request.opens:
            try:
                wire.draft_commands_from_proto(drafter_pb2.SessionRequest(opens=[open_]))
                good.opens.append(open_)
            except InvalidRequestError as error:
                bad.append((open_.sequence, open_.generation, str(error)))
        commands = wire.draft_commands_from_proto(good)

    def change(engine: DrafterEngine) -> None:
        for sequence, generation, message in bad:
            engine.refuse(stream, sequence, generation, message)
        engine.apply(stream, commands)

    return change


async def serve_drafter(
    pool: DrafterPoolConfig,
    registry: CollectorRegistry | None = None,
    tracer: Tracer | None = None,
) -> RunningServer:
    """Load the pool's drafter and serve it on `pool.host`, `pool.port` (0: a free one), and its
    metrics (in `registry`) if the pool gives a port for them.

    Raises ConfigError or ModelError when the drafter cannot be made.
    """
    drafter = await asyncio.to_thread(create_drafter, pool)
    return await serve(drafter, pool, registry, tracer)


async def serve(
    drafter: Drafter,
    pool: DrafterPoolConfig,
    registry: CollectorRegistry | None = None,
    tracer: Tracer | None = None,
) -> RunningServer:
    """Serve a drafter that is already there; of `pool`, name, addresses and draft length count."""
    engine = DrafterEngine(drafter, pool.max_draft_tokens)
    info = DrafterInfo(
        kind=drafter.kind,
        identity=drafter.identity,
        max_length=drafter.max_length,
        max_sequences=drafter.max_sequences,
        max_draft_tokens=pool.max_draft_tokens,
        instance_id=secrets.token_hex(8),
        has_distributions=drafter.has_distributions,
        needs=drafter.needs,
        can_draft_ahead=engine.can_draft_ahead,
    )
    thread = None if drafter.runs_inline else ThreadPoolExecutor(1, thread_name_prefix="drafter")
    registry = registry or CollectorRegistry()
    metrics = DrafterMetrics(registry, pool.name)
    worker = Worker(engine, thread, metrics)
    task = asyncio.create_task(worker.run(), name="drafter-worker")
    resources = contextlib.ExitStack()

    async def stop() -> None:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await asyncio.to_thread(resources.close)
        if thread is not None:
            await asyncio.to_thread(thread.shutdown)

    servicer = DrafterServicer(info, worker, SequenceSpans(tracer or NoOpTracer(), "draft"))
    try:
        if pool.metrics_port is not None:
            resources.callback(MetricsServer(registry, pool.metrics_port, pool.host).stop)
        return await create_server(
            lambda server: drafter_pb2_grpc.add_DrafterServiceServicer_to_server(servicer, server),
            [_SERVICE],
            pool.host,
            pool.port,
            on_stop=stop,
        )
    except BaseException:
        await stop()
        raise
