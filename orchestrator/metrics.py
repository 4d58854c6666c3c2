"""The orchestrator's Prometheus series; docs/metrics.md has each with its PromQL.

Two halves. RequestMetrics is updated as requests go: histograms and totals that no state holds,
once per block. EngineCollector is a view of the engine's status, taken when scraped, and costs
nothing between scrapes. Names and stems are those that users of other engines know. Knows requests
and the status, nothing else.
"""

from collections import Counter as Count
from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from core.metrics import NAMESPACE
from orchestrator.requests import ClusterStatus, Health, PoolStatus, SpeculationStats

#: Buckets for what a client feels: from a millisecond to ten minutes.
REQUEST_BUCKETS: Final = (
    *(base * 10**power for power in range(-3, 2) for base in (1.0, 2.5, 5.0)),
    *(100.0, 250.0, 600.0),
)


class RequestMetrics:
    """What clients felt and what speculation did for them. Used on the event loop."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, namespace=NAMESPACE, registry=registry)

        def seconds(name: str, text: str) -> Histogram:
            return Histogram(
                name, text, namespace=NAMESPACE, registry=registry, buckets=REQUEST_BUCKETS
            )

        self.finished = counter("requests_finished", "Requests that ended, by outcome.", "outcome")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens read.")
        self.cached_prompt_tokens = counter(
            "cached_prompt_tokens", "Prompt tokens copied from another sequence's cache."
        )
        self.completion_tokens = counter("completion_tokens", "Tokens generated.")
        self.queue = seconds("request_queue_time_seconds", "Wait for a slot, per request.")
        self.first_token = seconds(
            "time_to_first_token_seconds", "From arrival to the first token, per request."
        )
        self.inter_token = seconds(
            "inter_token_latency_seconds",
            "Time since the block before, per token of the block; once per block.",
        )
        self.end_to_end = seconds(
            "e2e_request_latency_seconds", "From arrival to the end, per finished request."
        )
        self._steps = counter("verify_steps", "Rows verified that drew a token.", "pool")
        self._hits = counter("plan_hits", "Verify steps whose plan was there in time.", "pool")
        self._misses = counter(
            "plan_misses", "Plans that could not be used, by cause.", "pool", "cause"
        )
        self._fallbacks = counter(
            "fallback_steps", "Verify steps without their drafter's draft.", "pool", "cause"
        )

    def tally(self, stats: SpeculationStats, seen: "Seen") -> None:
        """Count what a request's statistics gained since they were last looked at."""
        pool = stats.drafter
        if gained := stats.num_verify_steps - seen.num_steps:
            self._steps.labels(pool).inc(gained)
        if gained := stats.num_plan_hits - seen.num_hits:
            self._hits.labels(pool).inc(gained)
        seen.num_steps, seen.num_hits = stats.num_verify_steps, stats.num_plan_hits
        _count(self._misses, pool, stats.plan_misses, seen.misses)
        _count(self._fallbacks, pool, stats.fallback_steps, seen.fallbacks)


class Seen:
    """How much of one request's statistics is counted already."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_hits = 0
        self.misses: Count[str] = Count()
        self.fallbacks: Count[str] = Count()


def _count(counter: Counter, pool: str, now: Count[str], seen: Count[str]) -> None:
    for cause, count in now.items():
        if gained := count - seen[cause]:
            counter.labels(pool, cause).inc(gained)
            seen[cause] = count


class EngineCollector(Collector):
    """Turns `status()` into series at each scrape; `status` may be called from any thread."""

    def __init__(self, status: Callable[[], ClusterStatus]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """All series of one moment."""
        status = self._status()
        yield _gauge("requests_waiting", "Requests that wait for a slot.", status.num_waiting)
        yield _gauge("requests_running", "Requests that hold a slot.", status.num_running)
        yield from _replicas(status)
        yield from _verifiers(status)
        yield from _pools(status.drafter_pools)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{NAMESPACE}_{name}", text, value)


def _counters(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"{NAMESPACE}_{name}", text, None, labels)


def _replicas(status: ClusterStatus) -> Iterator[Metric]:
    labels = ("pool", "replica")
    up = GaugeMetricFamily(f"{NAMESPACE}_replica_up", "1 while the replica serves.", None, labels)
    held = GaugeMetricFamily(f"{NAMESPACE}_replica_sequences", "Sequences held.", None, labels)
    losses = _counters("replica_losses", "Times lost.", *labels)
    for pool, replicas in (
        ("verifier", status.verifiers),
        *((pool.pool, pool.replicas) for pool in status.drafter_pools),
    ):
        for replica in replicas:
            values = (pool, replica.replica_id)
            up.add_metric(values, float(replica.health is Health.READY))
            held.add_metric(values, replica.num_sequences)
            losses.add_metric(values, replica.num_losses)
    yield from (up, held, losses)


def _verifiers(status: ClusterStatus) -> Iterator[Metric]:
    busy = _counters("verifier_busy_seconds", "Time spent on this one's batches.", "replica")
    idle = _counters(
        "verifier_idle_seconds", "Time without a batch while rows waited for plans.", "replica"
    )
    for replica in status.verifiers:
        busy.add_metric((replica.replica_id,), replica.busy_s)
        idle.add_metric((replica.replica_id,), replica.idle_s)
    yield from (busy, idle)


def _pools(pools: tuple[PoolStatus, ...]) -> Iterator[Metric]:
    drafts = _counters("spec_decode_num_drafts", "Drafts verified.", "pool")
    drafted = _counters("spec_decode_num_draft_tokens", "Draft tokens verified.", "pool")
    accepted = _counters("spec_decode_num_accepted_tokens", "Draft tokens accepted.", "pool")
    accepted_at = _counters(
        "spec_decode_num_accepted_tokens_per_pos",
        "Draft tokens accepted, by their place in the draft.",
        *("pool", "position"),
    )
    busy = _counters("drafter_busy_seconds", "Time all drafters of a pool spent drafting.", "pool")
    for pool in pools:
        drafts.add_metric((pool.pool,), pool.num_drafts)
        drafted.add_metric((pool.pool,), pool.num_draft_tokens)
        accepted.add_metric((pool.pool,), pool.num_accepted_draft_tokens)
        for position, count in enumerate(pool.num_accepted_per_pos):
            accepted_at.add_metric((pool.pool, str(position)), count)
        busy.add_metric((pool.pool,), pool.busy_s)
    yield from (drafts, drafted, accepted, accepted_at, busy)
