"""core.metrics: the endpoint of a process. What a verifier counts is tested where it counts."""

import asyncio
import urllib.error
import urllib.request

import pytest
from prometheus_client import CollectorRegistry

from core.errors import ConfigError
from core.metrics import MetricsServer, VerifierMetrics
from orchestrator.metrics import engine_registry
from tests.harness import pool, serving
from tests.policy import make_request


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


async def test_the_orchestrator_serves_what_its_status_says(tiny_llama):
    """Series that disagree with `forerun status` would send an operator after the wrong thing."""
    async with serving(tiny_llama, [pool("ngram", "ngram")]) as stack:
        await stack.run(make_request((1, 2, 3) * 5, 12))
        status = stack.engine.status()
        server = MetricsServer(engine_registry(stack.engine.status), 0)
        try:
            text = await asyncio.to_thread(fetch, server.address)
        finally:
            server.stop()
        drafted = status.drafter_pools[0].num_draft_tokens
        assert "forerun_completion_tokens_total 12.0" in text
        assert f'forerun_pool_draft_tokens_total{{pool="ngram"}} {float(drafted)}' in text
        assert 'forerun_replica_up{pool="ngram",replica="ngram"} 1.0' in text
