"""Processes of a real Ray are killed in mid-stream: Ray restarts them, the streams go on."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest

os.environ["RAY_AUTH_MODE"] = "disabled"  # read when ray is imported; only loopback talks here

from core.config import Config, RayConfig, parse_config
from core.tokenizer import Tokenizer
from orchestrator.cluster import RayCluster
from orchestrator.detokenizer import Detokenizer
from orchestrator.engine import Engine
from orchestrator.local_ray import LocalRay
from orchestrator.requests import ClusterStatus, Health, ReplicaStatus
from tests.harness import MODEL
from tests.policy import make_request
from tests.tiny_models import TinyFactory, greedy_reference

NUM_STREAMS = 4
LENGTH = 200


@pytest.fixture(scope="module")
def target(tiny: TinyFactory) -> Path:
    return tiny("llama", eos_token_id=300)


@pytest.fixture(scope="module")
def config(target: Path) -> Config:
    placement = {"num_cpus": 0.1}
    model = {"model": str(target), **MODEL}
    pool = {"name": "copy", "kind": "draft_model", "max_draft_tokens": 2, "model": model}
    return parse_config(
        {
            "target": model,
            "verifier": {"placement": placement},
            "drafter_pools": [{**pool, "placement": placement}],
            "ray": {"namespace": "failures"},
        }
    )


@pytest.fixture(scope="module")
def cluster(config: Config) -> Iterator[RayCluster]:
    """Both services as actors of a local Ray, for all tests here: each leaves them running."""
    local = LocalRay(RayConfig())
    try:
        with RayCluster.start(config) as running:
            yield running
    finally:
        local.stop()


@pytest.fixture
async def engine(cluster: RayCluster, config: Config) -> AsyncIterator[Engine]:
    running = Engine(config.orchestrator, config.drafter_pools, cluster.replicas())
    await running.start()
    yield running
    await running.stop()


def _drafter(status: ClusterStatus) -> ReplicaStatus:
    return status.drafter_pools[0].replicas[0]


def _verifier(status: ClusterStatus) -> ReplicaStatus:
    return status.verifiers[0]


def _listener(address: str) -> psutil.Process:
    """The process that listens there."""
    port = int(address.rpartition(":")[2])
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
            return psutil.Process(connection.pid)
    raise AssertionError(f"nobody listens at {address}")


async def _start_streams(
    engine: Engine, target: Path, name: str
) -> list["asyncio.Task[list[int]]"]:
    """Start NUM_STREAMS requests; returns once each has begun to stream."""
    tokenizer = Tokenizer.load(str(target))
    begun = asyncio.Semaphore(0)

    async def run(index: int) -> list[int]:
        request = make_request((index + 1, 7, 9), LENGTH, request_id=f"{name}{index}")
        ids: list[int] = []
        async for block in engine.generate(request, Detokenizer(tokenizer)):
            if not ids:
                begun.release()
            ids.extend(block.token_ids)
        return ids

    tasks = [asyncio.create_task(run(index)) for index in range(NUM_STREAMS)]
    for _ in tasks:
        await begun.acquire()
    return tasks


@pytest.mark.parametrize("victim", [_drafter, _verifier])
async def test_killed_process_changes_no_stream(  # type: ignore[no-untyped-def]
    engine: Engine, target: Path, victim
) -> None:
    """Every stream ends with the tokens it would have had; the killed service comes back."""
    tasks = await _start_streams(engine, target, victim.__name__)
    _listener(victim(engine.status()).address).kill()
    for index, task in enumerate(tasks):
        assert await task == greedy_reference(target, (index + 1, 7, 9), LENGTH)
    while victim(engine.status()).health is not Health.READY:
        await asyncio.sleep(0.05)
    assert victim(engine.status()).num_losses == 1


async def test_frozen_drafter_is_not_waited_for(engine: Engine, target: Path) -> None:
    """A drafter that neither answers nor dies must not hold its streams up for ever."""
    tasks = await _start_streams(engine, target, "frozen")
    frozen = _listener(_drafter(engine.status()).address)
    frozen.suspend()
    try:
        for index, task in enumerate(tasks):
            assert await task == greedy_reference(target, (index + 1, 7, 9), LENGTH)
    finally:
        frozen.resume()
