"""Drafters come and go under running streams, in one process: the engine, the scaler and the API.

The host starts real drafter servers; tests/test_multi_node.py does the same with Ray.
"""

import asyncio
import contextlib
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest

from core.config import DrafterPoolConfig, OrchestratorConfig
from core.errors import InvalidRequestError, UnavailableError
from core.rpc import RunningServer, create_channel
from core.types import VerifyBatch, VerifyResult
from drafter_service.server import serve_drafter
from orchestrator import autoscaling
from orchestrator.autoscaling import DrafterScaler
from orchestrator.requests import Health, ReplicaSpec
from orchestrator.server import serve_orchestrator
from protos import cluster_pb2
from protos.cluster_pb2_grpc import ClusterServiceStub
from tests.harness import Stack, pool, serving
from tests.policy import make_request
from tests.tiny_models import TinyFactory, greedy_reference
from verifier_service.engine import VerifierEngine

LENGTH = 120
NUM_STREAMS = 6


class LocalHost:
    """Starts drafters in this process, at the moment at which they are first looked for."""

    def __init__(self, config: DrafterPoolConfig) -> None:
        self._config = config
        self._loop = asyncio.get_running_loop()
        self.servers: dict[str, RunningServer] = {}
        self.ended: list[str] = []
        self.num_added = 0
        self.is_full = False

    def add_drafter(self, pool: str) -> ReplicaSpec:
        if self.is_full:
            raise UnavailableError("no room")
        self.num_added += 1
        name = f"drafter-{pool}-{self.num_added}"

        async def resolve() -> str:
            if name not in self.servers:
                self.servers[name] = await serve_drafter(self._config)
            return self.servers[name].address

        return ReplicaSpec(name, pool, resolve)

    def end_drafter(self, replica_id: str) -> None:
        self.ended.append(replica_id)
        if server := self.servers.pop(replica_id, None):
            asyncio.run_coroutine_threadsafe(server.stop(0), self._loop).result(30)


class Cluster:
    """A stack, its host and its scaler; `settle` waits until what is wanted serves.

    gate: while it is closed the target stands still, so that no stream ends too early.
    """

    def __init__(
        self, stack: Stack, host: LocalHost, scaler: DrafterScaler, gate: threading.Event
    ) -> None:
        self.stack, self.host, self.scaler, self.gate = stack, host, scaler, gate

    async def let_go(self, num_drafts: int) -> None:
        """Have so many drafts verified, or a few more, and stand still again."""
        engine = self.stack.engine
        goal = engine.status().drafter_pools[0].num_drafts + num_drafts
        self.gate.set()
        reached = engine._changes.until(
            lambda: engine.status().drafter_pools[0].num_drafts >= goal, 60
        )
        assert await reached
        self.gate.clear()

    @property
    def replicas(self) -> dict[str, int]:
        """Sequences by drafter, of those that serve."""
        status = self.stack.engine.status().drafter_pools[0]
        return {r.replica_id: r.num_sequences for r in status.replicas if r.health is Health.READY}

    async def settle(self, num_ready: int) -> None:
        changes = self.stack.engine._changes
        assert await changes.until(lambda: len(self.replicas) == num_ready, 60)

    async def scale(self, replicas: int) -> None:
        self.scaler.scale("copy", replicas)
        await self.settle(replicas)


@pytest.fixture
def target(tiny: TinyFactory) -> Path:
    return tiny("llama", eos_token_id=300)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Set while the target may work."""
    event, verify = threading.Event(), VerifierEngine.verify
    event.set()

    def held(self: VerifierEngine, stream: int, batch: VerifyBatch) -> VerifyResult:
        assert event.wait(60)
        return verify(self, stream, batch)

    monkeypatch.setattr(VerifierEngine, "verify", held)
    yield event
    event.set()


@pytest.fixture
async def running(target: Path, gate: threading.Event) -> AsyncIterator[Cluster]:
    """One drafter, a copy of the target, and a scaler at work."""
    config = pool("copy", "draft_model", target, k=2).model_copy(update={"max_replicas": 4})
    attached = pool("near", "early_exit", k=2, attached=True, options={"num_layers": 1})
    async with contextlib.AsyncExitStack() as cleanup:
        stack = await cleanup.enter_async_context(
            serving(target, [config, attached], default_pool="copy", adaptive_draft_length=False)
        )
        host = LocalHost(config)
        scaler = await cleanup.enter_async_context(
            autoscaling.scaling(stack.engine, host, [config, attached])
        )
        assert scaler is not None
        yield Cluster(stack, host, scaler, gate)
        gate.set()
        for server in host.servers.values():
            await server.stop(0)


async def start_streams(cluster: Cluster, name: str) -> list["asyncio.Task[list[int]]"]:
    """Start streams; returns once each has begun, and holds them there."""
    begun = asyncio.Semaphore(0)

    async def run(index: int) -> list[int]:
        ids: list[int] = []
        request = make_request((index + 1, 7, 9), LENGTH, request_id=f"{name}-{index}")
        async for block in cluster.stack.stream(request):
            if not ids:
                begun.release()
            ids.extend(block.token_ids)
        return ids

    tasks = [asyncio.create_task(run(index)) for index in range(NUM_STREAMS)]
    for _ in tasks:
        await begun.acquire()
    cluster.gate.clear()
    return tasks


async def check(cluster: Cluster, tasks: list["asyncio.Task[list[int]]"], target: Path) -> None:
    """Every stream goes on, and has the target's own tokens."""
    assert not any(task.done() for task in tasks)
    cluster.gate.set()
    for index, task in enumerate(tasks):
        assert await task == greedy_reference(target, (index + 1, 7, 9), LENGTH)


async def test_one_to_four_to_one_under_load(running: Cluster, target: Path) -> None:
    """A stream would fail, change its text, or stay where it was while new drafters stand idle."""
    tasks = await start_streams(running, "scaled")
    await running.scale(4)
    assert sorted(running.replicas.values()) == [1, 1, 2, 2]  # the newcomers took their share
    await running.let_go(5 * NUM_STREAMS)
    await running.scale(1)
    assert sum(running.replicas.values()) == NUM_STREAMS
    await check(running, tasks, target)
    assert len(running.host.ended) == 3 and sum(running.replicas.values()) == 0
    drafted = running.stack.engine.status().drafter_pools[0]
    assert drafted.num_accepted_draft_tokens > 0.8 * drafted.num_draft_tokens


async def test_drained_to_none_and_back(running: Cluster, target: Path) -> None:
    """The last drafter of a pool could not go, or its streams would never draft again."""
    tasks = await start_streams(running, "alone")
    await running.scale(0)
    before = running.stack.engine.status().drafter_pools[0].num_drafts
    await running.scale(1)
    await running.let_go(NUM_STREAMS)
    assert sum(running.replicas.values()) == NUM_STREAMS
    await check(running, tasks, target)
    assert running.stack.engine.status().drafter_pools[0].num_drafts > before + NUM_STREAMS


async def test_drained_drafter_is_ended_once_it_is_empty(running: Cluster, target: Path) -> None:
    """The one the operator named must go, and no other."""
    await running.scale(2)
    tasks = await start_streams(running, "drained")
    assert await running.scaler.drain("copy") == 1
    assert running.host.ended == ["copy"] and list(running.replicas) == ["drafter-copy-1"]
    await check(running, tasks, target)
    with pytest.raises(InvalidRequestError, match="replica_id: there is no drafter 'copy'"):
        await running.scaler.drain("copy")
    with pytest.raises(InvalidRequestError, match="replica_id: there is no drafter 'verifier'"):
        await running.stack.engine.drain_replica("verifier")


async def test_drafter_that_cannot_be_added_is_tried_again(
    running: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One full moment of the cluster would leave the pool too small for ever, or end the task."""
    monkeypatch.setattr(autoscaling, "_RETRY_S", 0.0)
    monkeypatch.setattr(autoscaling, "_TICK_S", 0.01)
    running.host.is_full = True
    running.scaler.scale("copy", 2)
    await running.scaler.step()
    assert len(running.replicas) == 1
    running.host.is_full = False
    await running.settle(2)


async def test_demand_scales_between_its_bounds(target: Path, gate: threading.Event) -> None:
    """min_replicas would be ignored, or a drafter added for a moment of work."""
    config = pool("copy", "draft_model", target, k=2)
    config = config.model_copy(update={"min_replicas": 2, "max_replicas": 3})
    clock = [0.0]
    async with serving(target, [config]) as stack:
        host = LocalHost(config)
        scaler = DrafterScaler(stack.engine, host, [config], clock=lambda: clock[0])
        cluster = Cluster(stack, host, scaler, gate)
        await scaler.step()
        await cluster.settle(2)
        tasks = await start_streams(cluster, "busy")
        stack.engine._drafting.pools["copy"].busy_s += 60.0  # as if they had worked all the time
        clock[0] = 30.0
        await scaler.step()
        await cluster.settle(3)
        await check(cluster, tasks, target)
        for clock[0] in range(100, 2000, 10):
            await scaler.step()
        assert len(cluster.replicas) == 2
        oldest = next(iter(cluster.replicas))  # at the minimum another one comes in its place
        drained = asyncio.create_task(scaler.drain(oldest))
        await asyncio.sleep(0)
        await scaler.step()
        assert await drained == 2
        await cluster.settle(2)
        assert oldest not in cluster.replicas
        for server in host.servers.values():
            await server.stop(0)


async def forerun(*arguments: str) -> str:
    """What the command prints."""
    command = (sys.executable, "-m", "orchestrator.cli", *arguments)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    return out.decode()


async def test_service_and_command_line(running: Cluster, target: Path) -> None:
    """What is wrong must be named by its field; what was asked for must show in the status."""
    stack, config = running.stack, OrchestratorConfig(port=0)
    server = await serve_orchestrator(stack.engine, stack.tokenizer, config, scaler=running.scaler)
    bad = [
        ("nope", 1, "pool: there is no pool of remote drafters 'nope'; there are: copy"),
        ("near", 1, "pool: there is no pool of remote drafters 'near'"),
        ("copy", -1, "replicas: -1 is not between 0 and 4"),
        ("copy", 5, "replicas: 5 is not between 0 and 4"),
    ]
    async with create_channel(server.address) as channel:
        stub = ClusterServiceStub(channel)
        for name, replicas, message in bad:
            asked = cluster_pb2.ScaleDraftersRequest(pool=name, replicas=replicas)
            with pytest.raises(grpc.aio.AioRpcError, match=message) as caught:
                await stub.ScaleDrafters(asked)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        output = await forerun("scale", "copy", "3", "--wait", "60", "--address", server.address)
        assert output == "copy: 1 -> 3 drafters wanted\ncopy: 3 serve\n"
        output = await forerun("drain", "drafter-copy-1", "--address", server.address)
        assert output == "drafter-copy-1: ended; 2 drafters wanted in its pool\n"
        status = await stub.GetStatus(cluster_pb2.GetStatusRequest())
        scale = status.drafter_pools[0].scale
        assert (scale.wanted_replicas, scale.min_replicas, scale.max_replicas) == (2, 0, 4)
        assert not scale.is_autoscaled and not status.drafter_pools[1].HasField("scale")
    await server.stop()


async def test_drafters_found_by_address_cannot_be_scaled(target: Path) -> None:
    """An operator would think it was done."""
    async with serving(target, [pool("ngram", "ngram")]) as stack:
        server = await serve_orchestrator(stack.engine, stack.tokenizer, OrchestratorConfig(port=0))
        async with create_channel(server.address) as channel:
            stub = ClusterServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError, match="forerun serve") as caught:
                await stub.ScaleDrafters(cluster_pb2.ScaleDraftersRequest(pool="ngram", replicas=2))
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        await server.stop()
