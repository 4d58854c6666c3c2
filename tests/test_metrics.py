"""The endpoint of a process, and what an orchestrator and its drafters count.

What a verifier counts is tested in test_verifier_server.py.
"""

import asyncio
import contextlib
import time
import urllib.error
import urllib.request

import pytest
from prometheus_client import CollectorRegistry

from core.errors import ConfigError, OverloadedError
from core.metrics import MetricsServer, VerifierMetrics
from orchestrator.detokenizer import Detokenizer
from orchestrator.metrics import EngineCollector, RequestMetrics
from orchestrator.requests import Block, GenerationRequest
from orchestrator.telemetry import Telemetry
from tests.harness import Stack, pool, serving
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


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    """A sample of a registry, 0 when it has no such series yet."""
    return registry.get_sample_value(f"forerun_{name}", labels) or 0.0


async def watched(stack: Stack, telemetry: Telemetry, request: GenerationRequest) -> list[Block]:
    """A request through the stack, as the API runs it."""
    detokenizer = Detokenizer(stack.tokenizer, request.stopping.stop)
    run = telemetry.run(stack.engine.generate, request, detokenizer)
    async with contextlib.aclosing(run) as blocks:
        return [block async for block in blocks]


async def test_the_mean_acceptance_length_is_one_plus_the_rates_by_position(tiny_llama):
    """A dashboard whose charts contradict each other, or what clients got, decides nothing. Two
    drafter replicas share the work, drafts are accepted whole, in part and not at all."""
    kind = pool("mixed", "test_sometimes_right", tiny_llama, k=4, replicas=2)
    registry = CollectorRegistry()
    telemetry = Telemetry(RequestMetrics(registry))
    async with serving(tiny_llama, [kind], adaptive_draft_length=False) as stack:
        registry.register(EngineCollector(stack.engine.status))
        requests = [make_request((i, 2, 3), 30 + i, request_id=f"r{i}") for i in range(1, 7)]
        answers = await asyncio.gather(*(watched(stack, telemetry, r) for r in requests))
        made = [
            value(stack.registries[name], "drafter_draft_tokens_total", pool="mixed")
            for name in ("mixed", "mixed-1")
        ]
    assert all(made), "one replica did nothing"
    num_drafts = value(registry, "spec_decode_num_drafts_total", pool="mixed")
    positions = [
        value(
            registry,
            "spec_decode_num_accepted_tokens_per_pos_total",
            pool="mixed",
            position=str(position),
        )
        for position in range(5)
    ]
    accepted = value(registry, "spec_decode_num_accepted_tokens_total", pool="mixed")
    drafted = value(registry, "spec_decode_num_draft_tokens_total", pool="mixed")
    assert num_drafts > positions[0] > positions[3] > 0 == positions[4]
    assert sorted(positions, reverse=True) == positions
    assert 0 < accepted < drafted <= sum(made)
    assert sum(positions) == accepted
    # What the clients received: every block brings one token of the target, the rest were drafted.
    blocks = [block for answer in answers for block in answer]
    num_tokens = sum(len(block.token_ids) for block in blocks)
    stats = [block.finished.stats for block in blocks if block.finished is not None]
    assert num_tokens - len(blocks) == accepted
    assert num_drafts == sum(each.num_spec_steps for each in stats)
    mean_length = 1 + sum(positions) / num_drafts
    assert mean_length == pytest.approx(1 + (num_tokens - len(blocks)) / num_drafts)


async def test_steps_misses_and_fallbacks_add_up_to_the_requests_statistics(tiny_llama):
    """An operator must find on the dashboard what clients find in their responses. One request
    drafts well, one has no drafter of its own, and one is cancelled halfway: it counts too."""
    registry = CollectorRegistry()
    telemetry = Telemetry(RequestMetrics(registry))
    async with serving(tiny_llama, [pool("perfect", "draft_model", tiny_llama)]) as stack:
        one = (await watched(stack, telemetry, make_request(max_new_tokens=20)))[-1].stats
        two = await watched(stack, telemetry, make_request((7, 7, 7), 8, enabled=False))
        detokenizer = Detokenizer(stack.tokenizer)
        request = make_request((9, 9), 200, request_id="cancelled")
        async with contextlib.aclosing(
            telemetry.run(stack.engine.generate, request, detokenizer)
        ) as blocks:
            received = [await anext(blocks) for _ in range(3)]
        cancelled = received[-1].stats
    for_pool = {"pool": "perfect"}
    num_steps = one.num_verify_steps + cancelled.num_verify_steps
    assert value(registry, "verify_steps_total", **for_pool) == num_steps
    num_hits = one.num_plan_hits + cancelled.num_plan_hits
    assert 0 < value(registry, "plan_hits_total", **for_pool) == num_hits
    for name, counts in (
        ("plan_misses_total", one.plan_misses + cancelled.plan_misses),
        ("fallback_steps_total", one.fallback_steps + cancelled.fallback_steps),
    ):
        for cause, count in counts.items():
            assert value(registry, name, cause=cause, **for_pool) == count
    assert value(registry, "fallback_steps_total", pool="", cause="disabled") == 7
    assert value(registry, "verify_steps_total", pool="") == len(two) == 8
    num_tokens = 20 + 8 + sum(len(block.token_ids) for block in received)
    assert value(registry, "completion_tokens_total") == num_tokens
    assert value(registry, "requests_finished_total", outcome="length") == 2
    assert value(registry, "requests_finished_total", outcome="cancelled") == 1


async def test_latencies_are_observed_as_often_as_documented(tiny_llama):
    """A percentile over the wrong events misleads: waits and first tokens are per request, gaps per
    block behind the first, and only a finished request has an end."""
    registry = CollectorRegistry()
    telemetry = Telemetry(RequestMetrics(registry))
    async with serving(tiny_llama, model={"max_sequences": 1}, max_queue=1) as stack:
        requests = [make_request((i, 2), 10, request_id=f"r{i}") for i in range(3)]
        answers = await asyncio.gather(
            *(watched(stack, telemetry, r) for r in requests), return_exceptions=True
        )
    refused = [answer for answer in answers if isinstance(answer, Exception)]
    assert [type(error) for error in refused] == [OverloadedError]
    assert value(registry, "requests_finished_total", outcome="overloaded") == 1
    for name, count in (
        ("request_queue_time_seconds", 2),
        ("time_to_first_token_seconds", 2),
        ("e2e_request_latency_seconds", 2),
        ("inter_token_latency_seconds", 18),
    ):
        assert value(registry, f"{name}_count") == count, name
    waits, firsts, ends = (
        value(registry, f"{name}_seconds_sum")
        for name in ("request_queue_time", "time_to_first_token", "e2e_request_latency")
    )
    gaps = value(registry, "inter_token_latency_seconds_sum")
    assert 0 < waits < firsts < ends
    assert firsts + gaps == pytest.approx(ends)  # blocks of one token: the gaps are all the rest


async def test_shares_of_time_are_of_the_time_that_passed(tiny_llama):
    """Busy and idle shares above 1, or always 0, would scale the wrong pool."""
    registry = CollectorRegistry()
    async with serving(tiny_llama, [pool("perfect", "draft_model", tiny_llama)]) as stack:
        registry.register(EngineCollector(stack.engine.status))
        started_at = time.monotonic()
        await stack.run(make_request(max_new_tokens=40))
        passed = time.monotonic() - started_at
        busy = value(registry, "verifier_busy_seconds_total", replica="verifier")
        idle = value(registry, "verifier_idle_seconds_total", replica="verifier")
        drafting = value(registry, "drafter_busy_seconds_total", pool="perfect")
        stepped = value(stack.registries["perfect"], "drafter_step_seconds_sum", pool="perfect")
    assert 0 < busy < passed
    assert 0 < idle < passed
    assert busy + idle < passed
    assert 0 < drafting <= stepped < passed
