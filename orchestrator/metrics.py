"""The orchestrator's Prometheus series: a view of the engine's status, taken when scraped.

Costs nothing between scrapes. Knows the status and prometheus-client, nothing else.

    requests per second   rate(forerun_requests_finished_total[1m])
    tokens per second     rate(forerun_completion_tokens_total[1m])
    acceptance by pool    rate(forerun_pool_accepted_draft_tokens_total[1m])
                          / rate(forerun_pool_draft_tokens_total[1m])
"""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from core.metrics import NAMESPACE
from orchestrator.requests import ClusterStatus, Health


class EngineCollector(Collector):
    """Turns `status()` into series at each scrape."""

    def __init__(self, status: Callable[[], ClusterStatus]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """All series of one moment."""
        status = self._status()
        yield _gauge("requests_waiting", "Requests that wait for a slot.", status.num_waiting)
        yield _gauge("requests_running", "Requests that hold a slot.", status.num_running)
        yield _counter("requests_finished", "Requests that ended.", status.num_finished)
        yield _counter("completion_tokens", "Tokens generated.", status.num_completion_tokens)
        yield from self._replicas(status)
        yield from self._pools(status)

    def _replicas(self, status: ClusterStatus) -> Iterator[Metric]:
        labels = ("pool", "replica")
        up = GaugeMetricFamily(
            f"{NAMESPACE}_replica_up", "1 while the replica serves.", None, labels
        )
        held = GaugeMetricFamily(f"{NAMESPACE}_replica_sequences", "Sequences held.", None, labels)
        losses = CounterMetricFamily(f"{NAMESPACE}_replica_losses", "Times lost.", None, labels)
        pools = [("", status.verifiers), *((p.pool, p.replicas) for p in status.drafter_pools)]
        for pool, replicas in pools:
            for replica in replicas:
                values = (pool or "verifier", replica.replica_id)
                up.add_metric(values, float(replica.health is Health.READY))
                held.add_metric(values, replica.num_sequences)
                losses.add_metric(values, replica.num_losses)
        yield from (up, held, losses)

    def _pools(self, status: ClusterStatus) -> Iterator[Metric]:
        def family(name: str, text: str) -> CounterMetricFamily:
            return CounterMetricFamily(f"{NAMESPACE}_pool_{name}", text, None, ("pool",))

        drafts = family("drafts", "Drafts verified.")
        drafted = family("draft_tokens", "Draft tokens verified.")
        accepted = family("accepted_draft_tokens", "Draft tokens accepted.")
        for pool in status.drafter_pools:
            drafts.add_metric((pool.pool,), pool.num_drafts)
            drafted.add_metric((pool.pool,), pool.num_draft_tokens)
            accepted.add_metric((pool.pool,), pool.num_accepted_draft_tokens)
        yield from (drafts, drafted, accepted)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{NAMESPACE}_{name}", text, value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"{NAMESPACE}_{name}", text, value)


def engine_registry(status: Callable[[], ClusterStatus]) -> CollectorRegistry:
    """A registry that serves the engine's series."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(status))
    return registry
