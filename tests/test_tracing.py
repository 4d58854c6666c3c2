"""Traces through client, orchestrator, drafter and verifier, over the real wires."""

import contextlib
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, Sampler
from opentelemetry.trace import NoOpTracer, StatusCode, Tracer

from core.config import OrchestratorConfig, TracingConfig, parse_config
from core.errors import ConfigError, InvalidRequestError
from core.rpc import create_channel
from core.tokenizer import Tokenizer
from core.tracing import create_tracer, traceparent_of
from orchestrator.detokenizer import Detokenizer
from orchestrator.server import serve_orchestrator
from orchestrator.telemetry import Telemetry
from protos import generation_pb2
from protos.generation_pb2_grpc import GenerationServiceStub
from tests.echo_engine import EchoEngine
from tests.harness import Stack, pool, serving
from tests.policy import make_request
from tests.test_client_cli import run
from tests.test_metrics import watched

PARTS = ("queue", "prefill", "decode")


def recording(sampler: Sampler | None = None) -> tuple[Tracer, InMemorySpanExporter]:
    """A tracer of the SDK, and where its spans go as they end."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider.get_tracer("test"), exporter


def named(exporter: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    """The spans of that name."""
    return [span for span in exporter.get_finished_spans() if span.name == name]


@contextlib.asynccontextmanager
async def served(
    target: Path, tracer: Tracer | None
) -> AsyncIterator[tuple[Stack, GenerationServiceStub]]:
    """A stack with a drafter that agrees, behind the public API, and a client of it."""
    async with serving(target, [pool("perfect", "draft_model", target)], tracer=tracer) as stack:
        config, telemetry = OrchestratorConfig(port=0), Telemetry(tracer=tracer)
        server = await serve_orchestrator(stack.engine, stack.tokenizer, config, telemetry)
        try:
            async with create_channel(server.address) as channel:
                yield stack, GenerationServiceStub(channel)
        finally:
            await server.stop()


def message(num_tokens: int = 20, **fields: object) -> generation_pb2.GenerateRequest:
    """A request of exactly so many tokens."""
    stopping = generation_pb2.StoppingOptions(max_new_tokens=num_tokens, ignore_eos=True)
    return generation_pb2.GenerateRequest(
        request_id="seen", prompt="abc", stopping=stopping, **fields
    )


async def test_one_request_is_one_trace_with_the_right_parents(tiny_llama: Path) -> None:
    """Spans that do not hang together say nothing about the request one looks for."""
    tracer, exporter = recording()
    async with served(tiny_llama, tracer) as (_, client):
        with tracer.start_as_current_span("client") as outer:
            metadata = (("traceparent", traceparent_of(outer)),)
            responses = [r async for r in client.Generate(message(), metadata=metadata)]
    spans = exporter.get_finished_spans()
    assert {span.context.trace_id for span in spans} == {outer.get_span_context().trace_id}
    (request,) = named(exporter, "generate")
    assert request.parent.span_id == outer.get_span_context().span_id
    for name in (*PARTS, "verify", "draft"):
        (span,) = named(exporter, name)
        assert span.parent.span_id == request.context.span_id, name
    assert len(spans) == 2 + len(PARTS) + 2
    assert request.attributes["forerun.request_id"] == "seen"
    assert request.attributes["forerun.outcome"] == "length"
    assert request.attributes["gen_ai.usage.output_tokens"] == 20
    # The parts follow one another without a gap, from the request's arrival on.
    queue, prefill, decode = (named(exporter, name)[0] for name in PARTS)
    assert request.start_time == queue.start_time <= queue.end_time
    assert queue.end_time == prefill.start_time <= prefill.end_time == decode.start_time
    assert decode.start_time < decode.end_time
    # Every step is an event at the verifier, every plan one at the drafter.
    finished = responses[-1].finished.speculation
    verdicts = [e.attributes for e in named(exporter, "verify")[0].events if e.name == "verdict"]
    assert len(verdicts) == finished.num_verify_steps
    assert sum(e["accepted"] for e in verdicts) == finished.num_accepted_draft_tokens > 0
    plans = [e.attributes for e in named(exporter, "draft")[0].events if e.name == "plan"]
    assert len(plans) >= finished.num_plan_hits > 0


async def test_every_sample_has_spans_of_its_own(tiny_llama: Path) -> None:
    """Of two samples one could not tell whose time it was, or the second would be lost."""
    tracer, exporter = recording()
    async with served(tiny_llama, tracer) as (_, client):
        with tracer.start_as_current_span("client") as outer:
            metadata = (("traceparent", traceparent_of(outer)),)
            async for _ in client.Generate(message(8, n=2), metadata=metadata):
                pass
    requests = {span.attributes["forerun.request_id"]: span for span in named(exporter, "generate")}
    assert set(requests) == {"seen", "seen#1"}
    assert {s.parent.span_id for s in requests.values()} == {outer.get_span_context().span_id}
    parents = {span.parent.span_id for span in named(exporter, "verify")}
    assert parents == {span.context.span_id for span in requests.values()}


async def test_a_trace_that_nobody_samples_leaves_nothing_behind(tiny_llama: Path) -> None:
    """Unsampled requests must cost nothing and fill no memory, in any process."""
    tracer, exporter = recording(ParentBased(ALWAYS_OFF))
    async with served(tiny_llama, tracer) as (_, client):
        responses = [r async for r in client.Generate(message())]
    assert responses[-1].finished.usage.completion_tokens == 20
    assert exporter.get_finished_spans() == ()


async def test_without_tracing_a_context_is_handed_through(tiny_llama: Path) -> None:
    """An orchestrator that traces nothing must not cut the client's trace off its services, and a
    malformed context is as good as none."""
    tracer, exporter = recording()
    known = f"00-{'ab' * 16}-{'cd' * 8}-01"
    async with serving(tiny_llama, tracer=tracer) as stack:
        for number, traceparent in enumerate((known, "00-nonsense")):
            request = make_request(max_new_tokens=3, request_id=f"r{number}")
            request = replace(request, traceparent=traceparent)
            await watched(stack, Telemetry(), request)
    (span,) = exporter.get_finished_spans()
    assert span.name == "verify"
    assert f"{span.context.trace_id:032x}" == "ab" * 16
    assert f"{span.parent.span_id:016x}" == "cd" * 8


async def test_the_span_of_a_cancelled_or_refused_request_ends_too(tiny_llama: Path) -> None:
    """Requests that went wrong are those one looks for."""
    tracer, exporter = recording()
    telemetry = Telemetry(tracer=tracer)
    async with serving(tiny_llama, tracer=tracer) as stack:
        detokenizer = Detokenizer(stack.tokenizer)
        request = make_request(max_new_tokens=100, request_id="twice")
        run = telemetry.run(stack.engine.generate, request, detokenizer)
        async with contextlib.aclosing(run) as blocks:
            await anext(blocks)
            with pytest.raises(InvalidRequestError):
                await watched(stack, telemetry, request)
    outcomes = {
        span.attributes["forerun.outcome"]: span.status.status_code
        for span in named(exporter, "generate")
    }
    assert outcomes == {"cancelled": StatusCode.UNSET, "invalid": StatusCode.ERROR}
    assert len(named(exporter, "verify")) == 1  # ended with its close, or with the stream


async def test_the_command_line_joins_the_trace_of_its_environment(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that is traced would lose its trace at `forerun generate`."""
    traceparent = f"00-{'ab' * 16}-{'cd' * 8}-01"
    monkeypatch.setenv("TRACEPARENT", traceparent)
    engine, tokenizer = EchoEngine(), Tokenizer.load(str(tiny_llama))
    server = await serve_orchestrator(engine, tokenizer, OrchestratorConfig(port=0))
    try:
        code, _, errors = await run("generate", "abc", "--address", server.address)
    finally:
        await server.stop()
    assert code == 0, errors
    assert [request.traceparent for request in engine.requests] == [traceparent]


def test_tracing_is_off_unless_configured() -> None:
    """Nobody's spans may go anywhere unasked; a wrong endpoint is an error at the start."""
    assert isinstance(create_tracer(TracingConfig(), "test"), NoOpTracer)
    with pytest.raises(ConfigError, match=r"tracing\.endpoint"):
        parse_config({"target": {"model": "m"}, "tracing": {"endpoint": "collector:4317"}})


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what is exported to it."""

    def __init__(self) -> None:
        self.requests: list[Any] = []

    def Export(self, request: Any, context: Any) -> Any:
        """One batch of spans."""
        self.requests.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()


def test_spans_reach_a_collector() -> None:
    """The exporter, the sampler and the name of the service must be what the config says, with
    the SDK that is installed."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        for ratio in (1.0, 0.0):
            config = TracingConfig(endpoint=endpoint, sample_ratio=ratio)
            tracer: Any = create_tracer(config, "forerun-test")
            tracer.start_span(f"kept at {ratio}").end()
            tracer.span_processor.force_flush()
            tracer.span_processor.shutdown()
    finally:
        server.stop(0).wait()
    (resource_spans,) = (each for r in collector.requests for each in r.resource_spans)
    names = {a.key: a.value.string_value for a in resource_spans.resource.attributes}
    assert names["service.name"] == "forerun-test"
    assert [s.name for each in resource_spans.scope_spans for s in each.spans] == ["kept at 1.0"]
