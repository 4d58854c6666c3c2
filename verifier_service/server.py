"""The verifier on the wire: streams of micro-batches around one engine in one thread.

    stream A ── reader ─┐                             ┌─▶ writer A, results in order
    stream B ── reader ─┴▶ the worker's queue, FIFO ──┴─▶ writer B
                           (one batch runs)

With a target over several devices one batch runs on each: the worker submits the next one while
another thread waits for the devices. A reader takes a batch off its stream only while the stream
has not more under way than can run: one more waits, so the target never waits for the orchestrator
and no stream can flood it. A stream's sequences end with it, however it ends. Knows nothing of
models and rules.
"""

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import structlog
from opentelemetry.trace import NoOpTracer, Tracer
from prometheus_client import CollectorRegistry

from core.config import ModelConfig, VerifierConfig
from core.constraints import ConstraintCompiler
from core.embedded import resolve_model
from core.metrics import MetricsServer, VerifierMetrics
from core.model import RaggedModel
from core.rpc import RunningServer, create_server
from core.tracing import SequenceSpans
from core.types import VerifyBatch, VerifyResult
from core.wire import (
    verifier_info_to_proto,
    verify_batch_from_proto,
    verify_result_to_proto,
)
from protos import verifier_pb2, verifier_pb2_grpc
from verifier_service.attached import Attach, AttachedDrafters
from verifier_service.engine import VerifierEngine
from verifier_service.work import Submission

SERVICE_NAME: Final = verifier_pb2.DESCRIPTOR.services_by_name["VerifierService"].full_name

#: A batch, when it arrived (nanoseconds), and what will become of it.
_UnderWay = tuple[VerifyBatch, int, "asyncio.Future[VerifyResult]"]

_log = structlog.get_logger(__name__)


async def serve_verifier(
    config: ModelConfig,
    verifier: VerifierConfig,
    registry: CollectorRegistry | None = None,
    attach: Attach = lambda model: (),
    tracer: Tracer | None = None,
) -> RunningServer:
    """Load the target and serve it, and its metrics (in `registry`) if the config gives a port.

    `attach` makes the drafters that live beside the target; `tracer` makes spans, without one there
    are none. Returns when it is ready. Raises ModelError when the model cannot be served,
    ConfigError when a port cannot be had or a drafter does not fit.
    """
    registry = registry or CollectorRegistry()
    with contextlib.ExitStack() as undo:
        resources = undo.enter_context(contextlib.ExitStack())
        # One thread for loading and running: torch's thread count is a property of the thread.
        worker = ThreadPoolExecutor(1, thread_name_prefix="verifier")
        resources.callback(worker.shutdown)
        engine = await asyncio.get_running_loop().run_in_executor(worker, _load, config, attach)
        metrics = VerifierMetrics(registry)
        servicer = VerifierServicer(engine, worker, metrics, tracer)
        if verifier.metrics_port is not None:
            resources.callback(MetricsServer(registry, verifier.metrics_port, verifier.host).stop)
        server = await create_server(
            functools.partial(verifier_pb2_grpc.add_VerifierServiceServicer_to_server, servicer),
            [SERVICE_NAME],
            verifier.host,
            verifier.port,
            on_stop=functools.partial(asyncio.to_thread, resources.close),
        )
        undo.pop_all()
    _log.info(
        "verifier_ready",
        address=server.address,
        model=config.model,
        max_sequences=engine.info.max_sequences,
        max_length=engine.info.max_length,
        threads=config.threads,
    )
    return server


def _load(config: ModelConfig, attach: Attach) -> VerifierEngine:
    path = resolve_model(config.model)
    model = RaggedModel.load(config.model_copy(update={"model": path}))
    compiler = None
    if model.tokenizer is not None:
        compiler = ConstraintCompiler(model.tokenizer.to_json(), model.eos_token_ids)
    return VerifierEngine(model, compiler, AttachedDrafters(model, attach(model)))


class VerifierServicer(verifier_pb2_grpc.VerifierServiceServicer):
    """The two calls. Everything that touches the engine runs in `worker`, one at a time."""

    def __init__(
        self,
        engine: VerifierEngine,
        worker: ThreadPoolExecutor,
        metrics: VerifierMetrics,
        tracer: Tracer | None = None,
    ) -> None:
        self._engine = engine
        self._spans = SequenceSpans(tracer or NoOpTracer(), "verify")
        self._worker = worker
        self._metrics = metrics
        self._num_stages = engine.info.num_stages
        self._stages = asyncio.Semaphore(self._num_stages)
        self._streams = itertools.count()

    async def DescribeVerifier(
        self, request: verifier_pb2.DescribeVerifierRequest, context: Any
    ) -> verifier_pb2.DescribeVerifierResponse:
        """The handshake."""
        return verifier_info_to_proto(self._engine.info)

    async def Verify(
        self, requests: AsyncIterator[verifier_pb2.VerifyRequest], context: Any
    ) -> AsyncIterator[verifier_pb2.VerifyResponse]:
        """Verify one orchestrator's micro-batches, in order.

        A message that cannot be understood ends this stream, and only this one.
        """
        stream = next(self._streams)
        under_way: asyncio.Queue[_UnderWay | None] = asyncio.Queue()
        room = asyncio.Semaphore(self._num_stages + 1)
        reader = asyncio.create_task(self._read(stream, requests, under_way, room))
        try:
            while (item := await under_way.get()) is not None:
                batch, arrived_ns, future = item
                result = await future
                room.release()
                response = verify_result_to_proto(result)
                response.timings.total_ns = time.perf_counter_ns() - arrived_ns
                self._spans.verified(stream, batch, result)  # before a close that answers it
                yield response
                self._metrics.observe(batch, result)
            await reader  # raises what ended the reading, if anything did
        finally:
            reader.cancel()
            while not under_way.empty():
                item = under_way.get_nowait()
                if item is not None:
                    item[-1].cancel()  # a batch that has not begun never does
            self._worker.submit(self._close_stream, stream)
            self._spans.close_stream(stream)

    async def _read(
        self,
        stream: int,
        requests: AsyncIterator[verifier_pb2.VerifyRequest],
        under_way: asyncio.Queue[_UnderWay | None],
        room: asyncio.Semaphore,
    ) -> None:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[VerifyResult]
        try:
            async for request in requests:
                arrived_ns = time.perf_counter_ns()
                batch = verify_batch_from_proto(request)
                self._spans.apply(stream, request.opens, request.closes)
                await room.acquire()
                if self._num_stages > 1:
                    future = loop.create_task(self._pass_stages(stream, batch, arrived_ns))
                else:
                    future = loop.run_in_executor(
                        self._worker, self._verify, stream, batch, arrived_ns
                    )
                under_way.put_nowait((batch, arrived_ns, future))
        finally:
            under_way.put_nowait(None)

    async def _pass_stages(self, stream: int, batch: VerifyBatch, arrived_ns: int) -> VerifyResult:
        """Verify a batch beside those that are on other devices; batches keep their order."""
        run = functools.partial(asyncio.get_running_loop().run_in_executor, self._worker)
        async with self._stages:
            submission, queue_ns = await run(self._submit, stream, batch, arrived_ns)
            await asyncio.to_thread(submission.wait)
            return await run(self._complete, submission, queue_ns)

    # ------------------------------------------------------------ in the worker

    def _verify(self, stream: int, batch: VerifyBatch, arrived_ns: int) -> VerifyResult:
        return self._complete(*self._submit(stream, batch, arrived_ns))

    def _submit(self, stream: int, batch: VerifyBatch, arrived_ns: int) -> tuple[Submission, int]:
        queue_ns = time.perf_counter_ns() - arrived_ns
        return self._engine.submit(stream, batch), queue_ns

    def _complete(self, submission: Submission, queue_ns: int) -> VerifyResult:
        result = self._engine.complete(submission)
        self._metrics.set_open(self._engine.num_open)
        timings = dataclasses.replace(result.timings, queue_ns=queue_ns)
        return dataclasses.replace(result, timings=timings)

    def _close_stream(self, stream: int) -> None:
        self._engine.close_stream(stream)
        self._metrics.set_open(self._engine.num_open)
