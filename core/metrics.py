"""Prometheus: the endpoint of a process, and the series of a verifier and of a drafter.

A process has one registry, made by whoever composes it, and may serve it on one port; nothing is
registered globally, so two services in one process (tests, Ray actors) never collide. What drafts
brought is counted by the orchestrator, which knows their pools (`orchestrator.metrics`): a service
counts its own work. docs/metrics.md has each series with its PromQL.
"""

from collections.abc import Callable, Iterable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from core.errors import ConfigError
from core.types import DraftPlans, VerdictStatus, VerifyBatch, VerifyResult

NAMESPACE: Final = "forerun"
#: Buckets for anything between a hundred microseconds and ten seconds.
SECONDS_BUCKETS: Final = (
    *(base * 10**power for power in range(-4, 1) for base in (1.0, 2.0, 5.0)),
    10.0,
)


class MetricsServer:
    """An HTTP endpoint that serves one registry. `address` is "host:port"."""

    def __init__(self, registry: CollectorRegistry, port: int, host: str = "127.0.0.1") -> None:
        """Listen; port 0 takes a free one. Raises ConfigError that names host and port."""
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise ConfigError(f"metrics: cannot listen on {host}:{port}: {error}") from error
        self.address = f"{host}:{self._server.server_port}"

    def stop(self) -> None:
        """Close the port and end the thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _makers(
    registry: CollectorRegistry,
) -> tuple[Callable[..., Counter], Callable[..., Histogram], Callable[..., Gauge]]:
    """What makes counters, histograms of seconds and gauges: (name, text, *labels)."""

    def counter(name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, namespace=NAMESPACE, registry=registry)

    def seconds(name: str, text: str, *labels: str) -> Histogram:
        buckets = SECONDS_BUCKETS
        return Histogram(
            name, text, labels, namespace=NAMESPACE, registry=registry, buckets=buckets
        )

    def gauge(name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, namespace=NAMESPACE, registry=registry)

    return counter, seconds, gauge


class VerifierMetrics:
    """What a verifier did, observed once per micro-batch; safe from any thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter, seconds, gauge = _makers(registry)
        self._batches = counter("verifier_batches", "Micro-batches verified.")
        self._forwards = counter("verifier_forwards", "Forward passes of the target.")
        self._rows = counter("verifier_rows", "Rows verified, by what became of them.", "status")
        self._tokens = counter("verifier_tokens", "Tokens sent through the target.")
        self._cached = counter("verifier_cached_tokens", "Tokens copied instead of computed.")
        self._drafts = counter("verifier_drafts", "Rows that carried a draft.")
        self._drafted = counter("verifier_draft_tokens", "Draft tokens verified.")
        self._accepted = counter("verifier_accepted_tokens", "Draft tokens accepted.")
        self._forward = seconds("verifier_forward_seconds", "Time in the target, per batch.")
        self._sampling = seconds("verifier_sampling_seconds", "Time in the rule, per batch.")
        self._drafting = seconds(
            "verifier_drafting_seconds", "Time in attached drafters, and for features, per batch."
        )
        self._queue = seconds("verifier_queue_seconds", "Wait for the target, per batch.")
        self._open = gauge("verifier_open_sequences", "Sequences that hold a slot.")

    def observe(self, batch: VerifyBatch, result: VerifyResult) -> None:
        """Count one micro-batch."""
        timings = result.timings
        self._batches.inc()
        self._forwards.inc(timings.num_forwards)
        self._forward.observe(timings.forward_ns / 1e9)
        self._sampling.observe(timings.sampling_ns / 1e9)
        self._drafting.observe(timings.draft_ns / 1e9)
        self._queue.observe(timings.queue_ns / 1e9)
        for row, verdict in zip(batch.rows, result.verdicts, strict=True):
            self._rows.labels(verdict.status.value).inc()
            if verdict.status is not VerdictStatus.OK:
                continue
            self._tokens.inc(row.num_tokens - verdict.cached_tokens)
            self._cached.inc(verdict.cached_tokens)
            if row.draft_token_ids:
                self._drafts.inc()
                self._drafted.inc(len(row.draft_token_ids))
                self._accepted.inc(verdict.accepted)

    def set_open(self, num_open: int) -> None:
        """The number of sequences that hold a slot now."""
        self._open.set(num_open)


class DrafterMetrics:
    """What a drafter of `pool` did, observed once per round; safe from any thread."""

    def __init__(self, registry: CollectorRegistry, pool: str) -> None:
        counter, seconds, gauge = _makers(registry)

        def own(name: str, text: str) -> Counter:
            return counter(name, text, "pool").labels(pool)

        self._pool = pool
        self._steps = own("drafter_steps", "Batches drafted, or chunks of prompts read.")
        self._drafts = own("drafter_drafts", "Drafts made, with at least one token.")
        self._tokens = own("drafter_draft_tokens", "Draft tokens made.")
        self._refusals = counter(
            "drafter_need_opens", "Sequences given up, by reason.", "pool", "reason"
        )
        self._step = seconds("drafter_step_seconds", "Time of a step.", "pool").labels(pool)
        self._queue = seconds(
            "drafter_queue_seconds", "Wait of the oldest message for its round.", "pool"
        ).labels(pool)
        self._open = gauge("drafter_open_sequences", "Sequences held.", "pool").labels(pool)

    def taken(self, queue_s: float) -> None:
        """A round takes messages in, the oldest of which has waited for `queue_s`."""
        self._queue.observe(queue_s)

    def stepped(self, step_s: float, frames: Iterable[DraftPlans]) -> None:
        """A step took so long and gave these frames."""
        self._steps.inc()
        self._step.observe(step_s)
        num_drafts = num_tokens = 0
        for frame in frames:
            for plan in frame.plans:
                lengths = [len(branch.draft_token_ids) for branch in plan.branches]
                num_drafts += sum(length > 0 for length in lengths)
                num_tokens += sum(lengths)
            for need in frame.need_opens:
                self._refusals.labels(self._pool, need.reason.value).inc()
        self._drafts.inc(num_drafts)
        self._tokens.inc(num_tokens)

    def set_open(self, num_open: int) -> None:
        """The number of sequences held now."""
        self._open.set(num_open)
