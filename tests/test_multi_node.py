"""A Ray cluster of four nodes on this machine: scaled under load, and nodes that vanish.

One head without room for actors, one node for the target, two for drafters, told apart by custom
resources. Every stream of every test must have the tokens of transformers' own `generate`.
"""

import asyncio
import contextlib
import itertools
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest

os.environ["RAY_AUTH_MODE"] = "disabled"  # read when ray is imported; only loopback talks here
import ray
from ray.cluster_utils import Cluster

from core.config import Config, parse_config
from core.tokenizer import Tokenizer
from orchestrator import autoscaling
from orchestrator.autoscaling import DrafterScaler
from orchestrator.cluster import RayCluster
from orchestrator.detokenizer import Detokenizer
from orchestrator.engine import Engine
from orchestrator.requests import Finished, Health, ReplicaStatus
from tests.harness import MODEL
from tests.policy import make_request
from tests.tiny_models import TinyFactory, greedy_reference

pytestmark = pytest.mark.timeout(600)  # four nodes and a dozen processes, maybe on one core

NUM_CLIENTS = 4
THINK_S = 0.05
LENGTH = 60
TARGET, DRAFTER = {"forerun_target": 2}, {"forerun_drafter": 3}
#: A node that vanished is noticed in 1.5 s instead of 16.
SOON = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 2,
}


class Nodes:
    """The cluster's nodes. Killing one takes its workers too, as a machine that fails does."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="forerun-")  # short: Ray's sockets lie inside it
        shared = {"object_store_memory": 80_000_000, "include_dashboard": False}
        self._cluster = Cluster()
        self._add = lambda **extra: self._cluster.add_node(**{**shared, **extra})
        # Nobody else's Ray shall find this one by the file of addresses.
        with mock.patch.object(ray._private.utils, "write_ray_address"):
            self._add(num_cpus=0, temp_dir=self.folder, _system_config=SOON)
        self.address: str = self._cluster.address
        self.target = self.add(TARGET)
        self.drafters = [self.add(DRAFTER), self.add(DRAFTER)]

    def add(self, resources: dict[str, float]) -> Any:
        return self._add(num_cpus=1, resources=resources)

    def kill(self, node: Any) -> None:
        workers = _raylet(node).children(recursive=True)
        self._cluster.remove_node(node, allow_graceful=False)
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.kill()

    def stop(self) -> None:
        for node in self._cluster.list_all_nodes()[::-1]:
            self.kill(node)
        shutil.rmtree(self.folder, ignore_errors=True)


def _raylet(node: Any) -> psutil.Process:
    return psutil.Process(node.all_processes["raylet"][0].process.pid)


def node_of(address: str, nodes: list[Any]) -> Any:
    """The node, one of `nodes`, whose worker listens at an address; None when it is another's."""
    port = int(address.rpartition(":")[2])
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
            raylets = {process.pid for process in psutil.Process(connection.pid).parents()}
            return next((node for node in nodes if _raylet(node).pid in raylets), None)
    raise AssertionError(f"nobody listens at {address}")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    running = Nodes()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def target(tiny: TinyFactory) -> Path:
    return tiny("llama", eos_token_id=300)


@pytest.fixture(scope="module")
def config(nodes: Nodes, target: Path) -> Config:
    """Two verifiers, which must share the target's node, and prompt lookup: it starts fast."""

    def on(resource: str) -> dict[str, Any]:
        return {"num_cpus": 0.1, "resources": {resource: 1}}

    pool = {"name": "ngram", "kind": "ngram", "max_replicas": 4, "options": {"min_chance": 0.0}}
    return parse_config(
        {
            "target": {"model": str(target), **MODEL},
            "verifier": {"replicas": 2, "placement": on("forerun_target")},
            "drafter_pools": [{**pool, "placement": on("forerun_drafter")}],
            "ray": {"address": nodes.address, "namespace": "nodes"},
        }
    )


@pytest.fixture(scope="module")
def cluster(config: Config) -> Iterator[RayCluster]:
    with RayCluster.start(config) as running:
        yield running


class Stack:
    """An orchestrator on the cluster, and clients that keep it busy."""

    def __init__(self, engine: Engine, scaler: DrafterScaler, tokenizer: Tokenizer) -> None:
        self.engine, self.scaler, self.tokenizer = engine, scaler, tokenizer
        self._numbers = itertools.count()
        self.outputs: list[tuple[tuple[int, ...], list[int]]] = []

    async def run(self, prompt: tuple[int, ...], length: int = LENGTH) -> Finished:
        """One request to its end; its output is kept."""
        request = make_request(prompt, length, request_id=str(next(self._numbers)))
        ids: list[int] = []
        finished = None
        async for block in self.engine.generate(request, Detokenizer(self.tokenizer)):
            ids.extend(block.token_ids)
            finished = block.finished
        assert finished is not None
        self.outputs.append((prompt, ids))
        return finished

    @contextlib.asynccontextmanager
    async def load(self) -> AsyncIterator[None]:
        """Clients that send one request after the other; at the end none of them has failed."""
        is_over = asyncio.Event()

        async def client(index: int) -> None:
            while not is_over.is_set():
                await self.run((index + 1, 7, 9))
                await asyncio.sleep(THINK_S)  # the core is needed by what is being started

        async with asyncio.TaskGroup() as clients:
            for index in range(NUM_CLIENTS):
                clients.create_task(client(index))
            yield
            is_over.set()

    async def served(self, num_requests: int) -> None:
        """Wait until so many more requests have ended."""
        goal = len(self.outputs) + num_requests
        await self.until(lambda: len(self.outputs) >= goal)

    async def until(self, condition: Any) -> None:
        while not condition():
            await asyncio.sleep(0.05)

    def drafters(self) -> dict[str, ReplicaStatus]:
        """Those that serve."""
        replicas = self.engine.status().drafter_pools[0].replicas
        return {r.replica_id: r for r in replicas if r.health is Health.READY}

    def verifiers(self) -> dict[str, ReplicaStatus]:
        """Those that serve."""
        replicas = self.engine.status().verifiers
        return {r.replica_id: r for r in replicas if r.health is Health.READY}

    def check(self, target: Path) -> None:
        """Every output is the target's own."""
        prompts = {prompt for prompt, _ in self.outputs}
        expected = {prompt: greedy_reference(target, prompt, LENGTH) for prompt in prompts}
        for prompt, ids in self.outputs:
            assert ids == expected[prompt][: len(ids)] and len(ids) == LENGTH


@pytest.fixture
async def stack(cluster: RayCluster, config: Config, target: Path) -> AsyncIterator[Stack]:
    engine = Engine(config.orchestrator, config.drafter_pools, cluster.replicas())
    await engine.start()
    async with autoscaling.scaling(engine, cluster, config.drafter_pools) as scaler:
        assert scaler is not None
        running = Stack(engine, scaler, Tokenizer.load(str(target)))
        await running.until(lambda: (len(running.verifiers()), len(running.drafters())) == (2, 1))
        yield running
    await engine.stop()


async def test_every_actor_is_where_its_resource_is(nodes: Nodes, stack: Stack) -> None:
    """A drafter on the target's node would take its GPU."""
    verifiers, drafters = stack.verifiers().values(), stack.drafters().values()
    assert [node_of(each.address, [nodes.target]) for each in verifiers] == 2 * [nodes.target]
    assert [node_of(each.address, nodes.drafters) in nodes.drafters for each in drafters] == [True]


async def test_one_to_four_to_one_under_load(
    nodes: Nodes, stack: Stack, cluster: RayCluster, config: Config, target: Path
) -> None:
    """Streams would fail or change, new drafters stay idle, or ended ones stay in Ray."""
    held: Counter[str] = Counter()
    async with stack.load():
        await stack.served(2)
        stack.scaler.scale("ngram", 4)
        await stack.until(lambda: len(stack.drafters()) == 4)
        hosts = [node_of(each.address, nodes.drafters) for each in stack.drafters().values()]
        assert set(hosts) == set(nodes.drafters)  # one node has room for three
        lines: list[str] = []  # an orchestrator that comes back finds all of them
        await asyncio.to_thread(RayCluster.start, config, lines.append)
        assert sum("drafter-ngram" in line and "found running" in line for line in lines) == 4

        def all_have_drafted() -> bool:
            held.update({n: r.num_sequences for n, r in stack.drafters().items()})
            return all(held[name] for name in stack.drafters())

        await stack.until(all_have_drafted)
        await stack.served(NUM_CLIENTS)
        stack.scaler.scale("ngram", 1)
        await stack.until(lambda: len(stack.engine.status().drafter_pools[0].replicas) == 1)
        await stack.served(NUM_CLIENTS)
    stack.check(target)
    left = [spec.replica_id for spec in cluster.replicas() if spec.pool]
    assert left == list(stack.drafters())
    running = {each["name"] for each in ray.util.list_named_actors(all_namespaces=True)}
    assert running == {"verifier-0", "verifier-1", *left}


async def test_verifiers_share_the_load(stack: Stack, target: Path) -> None:
    """The first verifier would work and the second stand by."""
    before = {r.replica_id: r.busy_s for r in stack.verifiers().values()}
    taken = stack.engine._verifying.pool.replicas
    async with stack.load():
        await stack.served(4 * NUM_CLIENTS)
    stack.check(target)
    requests = [replica.num_taken for replica in taken.values()]
    assert max(requests) - min(requests) <= 0.2 * max(requests)
    assert all(r.busy_s > before[r.replica_id] for r in stack.verifiers().values())


async def test_next_turn_goes_to_the_verifier_that_has_read_the_last(stack: Stack) -> None:
    """A conversation would be read anew at every turn, by whoever is free."""
    talks = [tuple(range(begin, begin + 70)) for begin in (10, 90, 170)]
    for talk in talks:
        assert (await stack.run(talk, 5)).cached_prompt_tokens == 0
    for talk in talks:
        assert (await stack.run((*talk, 5, 6, 7), 5)).cached_prompt_tokens > 60


async def test_drafter_node_vanishes(nodes: Nodes, stack: Stack, target: Path) -> None:
    """Its streams would hang or change; its drafter would not come back on another node."""
    async with stack.load():
        await stack.served(2)
        [drafter] = stack.drafters().values()
        lost = node_of(drafter.address, nodes.drafters)
        nodes.drafters.remove(lost)
        await asyncio.to_thread(nodes.kill, lost)
        await stack.until(lambda: any(r.num_losses for r in stack.drafters().values()))
        await stack.served(NUM_CLIENTS)
    stack.check(target)
    [drafter] = stack.drafters().values()
    assert node_of(drafter.address, nodes.drafters) is nodes.drafters[0]


async def test_target_node_vanishes_and_another_comes(
    nodes: Nodes, stack: Stack, target: Path
) -> None:
    """What was generated would be lost with the verifiers, or generated twice."""
    async with stack.load():
        await stack.served(2)
        await asyncio.to_thread(nodes.kill, nodes.target)
        await stack.until(lambda: not stack.verifiers())
        nodes.target = nodes.add(TARGET)  # not in a thread: it installs signal handlers
        await stack.until(lambda: len(stack.verifiers()) == 2)
        await stack.served(NUM_CLIENTS)
    stack.check(target)
    assert all(r.num_losses == 1 for r in stack.verifiers().values())
    assert {node_of(r.address, [nodes.target]) for r in stack.verifiers().values()} == {
        nodes.target
    }
