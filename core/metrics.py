"""Prometheus: the endpoint of a process, and the series of a verifier.

A process has one registry, made by whoever composes it, and may serve it on one port; nothing is
registered globally, so two services in one process (tests, Ray actors) never collide. Counters
carry the stems that users of other engines know (`spec_decode_num_drafts_total`, ...).

    accepted per draft   rate(forerun_spec_decode_num_accepted_tokens_total[1m])
                         / rate(forerun_spec_decode_num_drafts_total[1m])
    share of time computing   rate(forerun_verifier_forward_seconds_sum[1m])
    wait for the target, p99  histogram_quantile(0.99,
                              sum by (le) (rate(forerun_verifier_queue_seconds_bucket[1m])))
"""

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from core.errors import ConfigError
from core.types import VerdictStatus, VerifyBatch, VerifyResult

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


class VerifierMetrics:
    """What a verifier did, observed once per micro-batch; safe from any thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, namespace=NAMESPACE, registry=registry)

        def seconds(name: str, text: str) -> Histogram:
            return Histogram(
                name, text, namespace=NAMESPACE, registry=registry, buckets=SECONDS_BUCKETS
            )

        self._batches = counter("verifier_batches", "Micro-batches verified.")
        self._forwards = counter("verifier_forwards", "Forward passes of the target.")
        self._rows = counter("verifier_rows", "Rows verified, by what became of them.", "status")
        self._tokens = counter("verifier_tokens", "Tokens sent through the target.")
        self._cached = counter("verifier_cached_tokens", "Tokens copied instead of computed.")
        self._drafts = counter("spec_decode_num_drafts", "Rows that carried a draft.")
        self._drafted = counter("spec_decode_num_draft_tokens", "Draft tokens verified.")
        self._accepted = counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.")
        self._accepted_at = counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by their place in the draft.",
            "position",
        )
        self._forward = seconds("verifier_forward_seconds", "Time in the target, per batch.")
        self._sampling = seconds("verifier_sampling_seconds", "Time in the rule, per batch.")
        self._drafting = seconds(
            "verifier_drafting_seconds", "Time in attached drafters, and for features, per batch."
        )
        self._queue = seconds("verifier_queue_seconds", "Wait for the target, per batch.")
        self._open = Gauge(
            "verifier_open_sequences",
            "Sequences that hold a slot.",
            namespace=NAMESPACE,
            registry=registry,
        )

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
                for position in range(verdict.accepted):
                    self._accepted_at.labels(str(position)).inc()

    def set_open(self, num_open: int) -> None:
        """The number of sequences that hold a slot now."""
        self._open.set(num_open)
