"""core.metrics: the endpoint of a process. What a verifier counts is tested where it counts."""

import urllib.error
import urllib.request

import pytest
from prometheus_client import CollectorRegistry

from core.errors import ConfigError
from core.metrics import MetricsServer, VerifierMetrics


def fetch(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as response:
        return response.read().decode()


def test_the_endpoint_serves_its_own_registry_until_it_is_stopped():
    """Two services in one process must not mix their series, nor keep ports when they end."""
    registries = [CollectorRegistry(), CollectorRegistry()]
    servers = [MetricsServer(registry, 0) for registry in registries]
    for registry, num_open in zip(registries, (3, 5), strict=True):
        VerifierMetrics(registry).set_open(num_open)
    assert "forerun_verifier_open_sequences 3.0" in fetch(servers[0].address)
    assert "forerun_verifier_open_sequences 5.0" in fetch(servers[1].address)
    for server in servers:
        assert server.address.startswith("127.0.0.1:")
        server.stop()
        with pytest.raises(urllib.error.URLError):
            fetch(server.address)


def test_a_port_in_use_is_one_clear_error():
    """A metrics port that two services claim must name itself, not fail with a bare errno."""
    server = MetricsServer(CollectorRegistry(), 0)
    port = int(server.address.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
        MetricsServer(CollectorRegistry(), port)
    server.stop()
