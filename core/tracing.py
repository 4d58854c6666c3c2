"""OpenTelemetry: a tracer made from the config, trace context as text, the spans of a service.

Off unless an endpoint is configured: then every tracer is the API's own that does nothing, and a
client's trace context is handed through untouched. Nothing is registered globally: whoever
composes a process makes its tracer and passes it on. Context travels as W3C `traceparent`: in the
metadata of Generate, and in the opens that verifiers and drafters get.

    client's span
     └─ generate (orchestrator)        a request, from its arrival to its end
         ├─ queue, prefill, decode     where its time went
         ├─ verify (verifier)          while it held a slot; one event per micro-batch
         └─ draft (drafter)            while a drafter held it; one event per plan

A micro-batch belongs to many requests, so it is an event in each of their spans, not a span.
"""

import time
from collections.abc import Iterable, Mapping
from typing import Protocol

from opentelemetry.context import Context
from opentelemetry.trace import NoOpTracer, Span, SpanKind, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from core.config import TracingConfig
from core.errors import ConfigError
from core.types import DraftPlans, VerifyBatch, VerifyResult

_PROPAGATOR = TraceContextTextMapPropagator()


def create_tracer(config: TracingConfig, service: str) -> Tracer:
    """A tracer that sends the spans of `service` to the configured endpoint by OTLP/gRPC.

    Spans wait in a background thread and are sent at the end of the process too. Raises
    ConfigError when the SDK is not installed.
    """
    if not config.endpoint:
        return NoOpTracer()
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
    except ImportError as error:
        raise ConfigError(
            f"tracing.endpoint: {error.name} is not installed; `pip install forerun[tracing]`"
        ) from error
    provider = TracerProvider(
        sampler=ParentBasedTraceIdRatio(config.sample_ratio),
        resource=Resource.create({SERVICE_NAME: service}),
    )
    exporter = OTLPSpanExporter(endpoint=config.endpoint)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider.get_tracer("forerun")


def context_of(traceparent: str) -> Context:
    """The context that a `traceparent` names; an empty one when it is absent or malformed."""
    return _PROPAGATOR.extract({"traceparent": traceparent})


def traceparent_of(span: Span) -> str:
    """The `traceparent` for the children of a span; "" when there is no trace."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, set_span_in_context(span, Context()))
    return carrier.get("traceparent", "")


class _Open(Protocol):
    """An open of either service, as it arrived."""

    @property
    def sequence(self) -> int: ...

    @property
    def traceparent(self) -> str: ...


class SequenceSpans:
    """One span per sequence that a service holds and whose request is traced.

    A sequence is known by its stream and its id. Costs nothing while no request is traced. Used
    from one thread.
    """

    def __init__(self, tracer: Tracer, name: str) -> None:
        self._tracer = tracer
        self._name = name
        self._spans: dict[tuple[int, int], Span] = {}

    def apply(self, stream: int, opens: Iterable[_Open], closes: Iterable[int]) -> None:
        """A message came: closes end spans, opens begin them; an open again ends the one before."""
        for sequence in closes:
            self._end(stream, sequence)
        for open_ in opens:
            self._end(stream, open_.sequence)
            if open_.traceparent:
                span = self._tracer.start_span(
                    self._name, context_of(open_.traceparent), kind=SpanKind.SERVER
                )
                if span.is_recording():
                    self._spans[stream, open_.sequence] = span

    def verified(self, stream: int, batch: VerifyBatch, result: VerifyResult) -> None:
        """A micro-batch was verified: one event per row."""
        if not self._spans:
            return
        forward_ms = result.timings.forward_ns / 1e6
        for row, verdict in zip(batch.rows, result.verdicts, strict=True):
            attributes: dict[str, int | float | str] = {
                "batch": batch.batch,
                "num_rows": len(batch.rows),
                "num_new_tokens": len(row.new_token_ids),
                "num_draft_tokens": len(row.draft_token_ids),
                "accepted": verdict.accepted,
                "status": verdict.status.value,
                "forward_ms": forward_ms,
            }
            self._event(stream, row.sequence, "verdict", attributes)

    def drafted(self, stream: int, plans: DraftPlans) -> None:
        """A frame of plans is sent: one event per plan; a sequence that was given up ends."""
        if not self._spans:
            return
        for plan in plans.plans:
            attributes = {
                "num_branches": len(plan.branches),
                "num_draft_tokens": sum(len(b.draft_token_ids) for b in plan.branches),
                "draft_ms": plans.draft_ns / 1e6,
            }
            self._event(stream, plan.sequence, "plan", attributes)
        for need in plans.need_opens:
            self._event(stream, need.sequence, "need_open", {"reason": need.reason.value})
            self._end(stream, need.sequence)

    def close_stream(self, stream: int) -> None:
        """The stream ended, and with it its sequences."""
        for key in [key for key in self._spans if key[0] == stream]:
            self._end(*key)

    def _event(
        self, stream: int, sequence: int, name: str, attributes: Mapping[str, int | float | str]
    ) -> None:
        if span := self._spans.get((stream, sequence)):
            span.add_event(name, attributes, time.time_ns())

    def _end(self, stream: int, sequence: int) -> None:
        if span := self._spans.pop((stream, sequence), None):
            span.end()
