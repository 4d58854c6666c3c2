"""What is told of every request: metrics, spans and one line in the log.

Stands around the engine's iterator of blocks, where a client stands too, so its times are those a
client feels. Everything is made from the blocks: a request costs a few microseconds per block, and
its spans are made at its end, when all their times are known. Knows nothing of the wire, of text or
of how blocks come about.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from types import TracebackType
from typing import Final, Self

import structlog
from opentelemetry.trace import NoOpTracer, SpanKind, StatusCode, Tracer, set_span_in_context
from prometheus_client import CollectorRegistry

from core import errors
from core.tracing import context_of, traceparent_of
from orchestrator.detokenizer import Detokenizer
from orchestrator.metrics import RequestMetrics, Seen
from orchestrator.requests import Block, GenerationRequest

log = structlog.get_logger()

#: Outcomes beside the reasons of a regular end.
_OUTCOMES: Final[tuple[tuple[type[BaseException], str], ...]] = (
    (GeneratorExit, "cancelled"),
    (asyncio.CancelledError, "cancelled"),
    (errors.OverloadedError, "overloaded"),
    (errors.UnavailableError, "unavailable"),
    (errors.InvalidRequestError, "invalid"),
    (errors.ModelError, "model_error"),
)

Generate = Callable[[GenerationRequest, Detokenizer], AsyncGenerator[Block, None]]


class Telemetry:
    """Watches all requests of one orchestrator. Without a tracer there are no spans."""

    def __init__(self, metrics: RequestMetrics | None = None, tracer: Tracer | None = None) -> None:
        self._metrics = metrics or RequestMetrics(CollectorRegistry())
        self._tracer = tracer or NoOpTracer()

    async def run(
        self, generate: Generate, request: GenerationRequest, detokenizer: Detokenizer
    ) -> AsyncGenerator[Block, None]:
        """What `generate` yields for the request, unchanged; closing it closes that."""
        with _Watch(request, self._metrics, self._tracer) as watch:
            async with contextlib.aclosing(generate(watch.request, detokenizer)) as blocks:
                async for block in blocks:
                    watch.see(block)
                    yield block


class _Watch:
    """One request from its arrival to its end. `request` names the span of it."""

    def __init__(self, request: GenerationRequest, metrics: RequestMetrics, tracer: Tracer) -> None:
        self._metrics = metrics
        self._tracer = tracer
        self._arrived_at = self._last_at = time.monotonic()
        self._first_at: float | None = None
        self._last: Block | None = None
        self._num_tokens = 0
        self._seen = Seen()
        attributes = {"forerun.request_id": request.request_id}
        context = context_of(request.traceparent)
        self._started_ns = time.time_ns()
        self._span = tracer.start_span(
            "generate", context, SpanKind.SERVER, attributes, start_time=self._started_ns
        )
        self.request = replace(request, traceparent=traceparent_of(self._span))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        finished = self._last.finished if self._last is not None else None
        if finished is not None:
            outcome = finished.reason.value
            self._metrics.end_to_end.observe(self._last_at - self._arrived_at)
            self._metrics.cached_prompt_tokens.inc(finished.cached_prompt_tokens)
        else:
            known = (name for base, name in _OUTCOMES if isinstance(error, base))
            outcome = next(known, "internal_error")
        if self._last is not None:
            self._metrics.tally(self._last.stats, self._seen)
        self._metrics.finished.labels(outcome).inc()
        self._log(outcome)
        self._trace(outcome, is_error=finished is None and outcome != "cancelled")

    def see(self, block: Block) -> None:
        """A block is handed to the client now."""
        now, metrics = time.monotonic(), self._metrics
        if self._first_at is None:
            self._first_at = now
            metrics.queue.observe(block.queue_s)
            metrics.first_token.observe(now - self._arrived_at)
            metrics.prompt_tokens.inc(len(self.request.prompt_token_ids))
        else:
            per_token = (now - self._last_at) / max(1, len(block.token_ids))
            metrics.inter_token.observe(per_token)
        self._last_at, self._last = now, block
        self._num_tokens += len(block.token_ids)
        metrics.completion_tokens.inc(len(block.token_ids))
        metrics.tally(block.stats, self._seen)

    def _log(self, outcome: str) -> None:
        first_at = self._last_at if self._first_at is None else self._first_at
        log.info(
            "request ended",
            request_id=self.request.request_id,
            outcome=outcome,
            prompt_tokens=len(self.request.prompt_token_ids),
            completion_tokens=self._num_tokens,
            drafter=self._last.stats.drafter if self._last else "",
            queue_ms=round(1000 * self._last.queue_s, 1) if self._last else None,
            first_token_ms=round(1000 * (first_at - self._arrived_at), 1) if self._last else None,
            total_ms=round(1000 * (time.monotonic() - self._arrived_at), 1),
        )

    def _trace(self, outcome: str, is_error: bool) -> None:
        """End the span, and make those of its parts."""
        span = self._span
        if not span.is_recording():
            return
        span.set_attribute("forerun.outcome", outcome)
        span.set_attribute("gen_ai.usage.input_tokens", len(self.request.prompt_token_ids))
        span.set_attribute("gen_ai.usage.output_tokens", self._num_tokens)
        if is_error:
            span.set_status(StatusCode.ERROR, outcome)
        if self._last is not None and self._first_at is not None:
            stats = self._last.stats
            span.set_attribute("forerun.num_verify_steps", stats.num_verify_steps)
            span.set_attribute("forerun.num_plan_hits", stats.num_plan_hits)
            span.set_attribute("forerun.num_draft_tokens", stats.num_draft_tokens)
            span.set_attribute("forerun.num_accepted_tokens", stats.num_accepted_draft_tokens)
            admitted_at = self._arrived_at + self._last.queue_s
            self._part("queue", self._arrived_at, admitted_at)
            self._part("prefill", admitted_at, self._first_at)
            self._part("decode", self._first_at, self._last_at)
        span.end()

    def _part(self, name: str, start: float, end: float) -> None:
        context = set_span_in_context(self._span)
        part = self._tracer.start_span(name, context, start_time=self._ns(start))
        part.end(self._ns(end))

    def _ns(self, moment: float) -> int:
        """Wall-clock nanoseconds of a moment on the monotonic clock."""
        return self._started_ns + round((moment - self._arrived_at) * 1e9)
