"""Ray: actors start, are placed, restarted, found again and ended. One local Ray for the module."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

os.environ["RAY_AUTH_MODE"] = "disabled"  # read when ray is imported; only loopback talks here
import ray

from core.config import Config, RayConfig, parse_config
from core.errors import ConfigError, ModelError, UnavailableError
from core.rpc import create_channel
from orchestrator import cluster as cluster_module
from orchestrator.cluster import RayCluster
from orchestrator.local_ray import LocalRay
from orchestrator.requests import ReplicaSpec

LOCAL = {"num_cpus": 0.1}


def make_config(model: Path | str, namespace: str, **ngram: Any) -> Config:
    """One verifier and an n-gram pool, both told to be small."""
    target = {"model": str(model), "device_map": "cpu", "threads": 1, "max_length": 64}
    pool = {"name": "ngram", "kind": "ngram", "placement": LOCAL, **ngram}
    return parse_config(
        {
            "target": target,
            "verifier": {"placement": LOCAL},
            "drafter_pools": [pool],
            "ray": {"namespace": namespace},
        }
    )


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    """A local Ray, this process its driver; clusters of this module use it as it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        running = LocalRay(RayConfig(), resources={"forerun_drafter": 1.0})
        yield
        running.stop()


@pytest.fixture(scope="module")
def config(tiny_llama: Path) -> Config:
    """What `cluster` runs."""
    return make_config(
        tiny_llama, "shared", placement={"num_cpus": 0, "resources": {"forerun_drafter": 1}}
    )


@pytest.fixture(scope="module")
def cluster(local_ray: None, config: Config) -> Iterator[RayCluster]:
    """One running cluster for the tests that change nothing or heal."""
    with RayCluster.start(config) as running:
        yield running


def replica(cluster: RayCluster, name: str) -> ReplicaSpec:
    """The replica of that name."""
    return next(spec for spec in cluster.replicas() if spec.replica_id == name)


def process_at(address: str) -> psutil.Process:
    """The process of this Ray that listens at an address."""
    port = int(address.rsplit(":", 1)[1])
    for process in psutil.Process().children(recursive=True):
        connections = process.net_connections("tcp")
        if any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in connections):
            return process
    raise AssertionError(f"no process of this test listens at {address}")


async def is_serving(address: str) -> bool:
    """Ask the health service."""
    async with create_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=30)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def test_every_actor_serves_at_its_address(cluster: RayCluster) -> None:
    """The orchestrator would find no service, or one of the wrong pool."""
    specs = cluster.replicas()
    assert [(s.replica_id, s.pool) for s in specs] == [
        ("verifier-0", ""),
        ("drafter-ngram-0", "ngram"),
    ]
    for spec in specs:
        assert await is_serving(await spec.resolve())


async def test_killed_drafter_is_restarted_and_found(cluster: RayCluster) -> None:
    """A drafter that dies would stay lost, or be looked for where it no longer is."""
    spec = replica(cluster, "drafter-ngram-0")
    killed = process_at(await spec.resolve())
    killed.kill()
    killed.wait(30)
    address = await spec.resolve()  # Ray holds the call back until the new process is there
    assert await is_serving(address)
    assert process_at(address).pid != killed.pid


async def test_unanswering_actor_is_unavailable(
    cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The orchestrator would wait for a frozen actor instead of going on without it."""
    spec = replica(cluster, "drafter-ngram-0")
    frozen = process_at(await spec.resolve())
    monkeypatch.setattr(cluster_module, "_RESOLVE_S", 0.2)
    frozen.suspend()
    try:
        with pytest.raises(UnavailableError, match="drafter-ngram-0 does not answer"):
            await spec.resolve()
    finally:
        frozen.resume()
    monkeypatch.undo()
    assert await is_serving(await spec.resolve())


def test_second_start_finds_the_actors(cluster: RayCluster, config: Config) -> None:
    """An orchestrator that comes back would load every model a second time, or end the first."""
    lines: list[str] = []
    with RayCluster.start(config, lines.append):
        assert [line for line in lines if "found running" in line] == [
            "verifier-0: found running",
            "drafter-ngram-0: found running",
        ]
    assert ray.get_actor("verifier-0", namespace="shared")  # not ended by the one that found it


def test_actor_with_another_config_is_refused(cluster: RayCluster, tiny_llama: Path) -> None:
    """A changed config would be ignored because an old actor runs."""
    with pytest.raises(ConfigError, match="drafter-ngram-0 already runs in 'shared' with another"):
        RayCluster.start(make_config(tiny_llama, "shared", max_draft_tokens=7))


def test_taking_over_replaces_and_ends_what_was_left(local_ray: None, tiny_llama: Path) -> None:
    """After a kill and a change of config the next start would fail until somebody ends the old
    actors by hand, and those of a pool that is gone would hold their GPUs for ever."""

    def names() -> set[str]:
        actors = ray.util.list_named_actors(all_namespaces=True)
        return {each["name"] for each in actors if each["namespace"] == "taken"}

    old = RayCluster.start(make_config(tiny_llama, "taken", replicas=2, max_replicas=2))
    changed = make_config(tiny_llama, "taken", max_replicas=1, max_draft_tokens=7)
    lines: list[str] = []
    with RayCluster.start(changed, lines.append, takes_over=True) as cluster:
        assert lines[:3] == [
            "drafter-ngram-1: no longer in the config; ending it",
            "verifier-0: found running",
            "drafter-ngram-0: has another config or version; ending it",
        ]
        assert names() == {spec.replica_id for spec in cluster.replicas()}
        assert names() == {"verifier-0", "drafter-ngram-0"}
        with RayCluster.start(changed, lines.append):
            assert "drafter-ngram-0: found running" in lines
    assert names() == set()
    old.stop()


def test_missing_model_is_one_clear_error(local_ray: None, tmp_path: Path) -> None:
    """The start would hang, retry for ever, show Ray's traceback, or leave the other actors."""
    missing = tmp_path / "no-model"
    with pytest.raises(ModelError, match=f"verifier-0: .*{missing}") as raised:
        RayCluster.start(make_config(missing, "missing"))
    assert "Traceback" not in str(raised.value)
    with pytest.raises(ValueError, match="drafter-ngram-0"):
        ray.get_actor("drafter-ngram-0", namespace="missing")


def test_bad_drafter_option_names_the_key(local_ray: None, tiny_llama: Path) -> None:
    """A wrong option of a pool would look like a failed process."""
    with pytest.raises(ConfigError, match=r"drafter-ngram-0: .*max_ngrm"):
        RayCluster.start(make_config(tiny_llama, "options", options={"max_ngrm": 3}))


def test_impossible_placement_names_what_was_asked(
    cluster: RayCluster, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Custom resources would not reach Ray, or their lack would be an endless wait.

    The one `forerun_drafter` there is was taken by the drafter of `cluster`.
    """
    monkeypatch.setattr(cluster_module, "_LOCAL_PLACEMENT_S", 5.0)
    placement = {"num_cpus": 0, "resources": {"forerun_drafter": 1}}
    with pytest.raises(UnavailableError) as raised:
        RayCluster.start(make_config(tiny_llama, "no-room", placement=placement))
    message = str(raised.value)
    assert "no room after 5 s for drafter-ngram-0 (forerun_drafter 1). " in message
    has, free = message.split(", of it free ")
    assert "forerun_drafter 1" in has.split("The cluster has ")[1]
    assert "forerun_drafter" not in free


async def test_stop_leaves_no_process(local_ray: None, tiny_llama: Path) -> None:
    """Model processes would hold GPUs after the end."""
    config = make_config(tiny_llama, "stopped", placement={**LOCAL, "cpu_affinity": [0]})
    cluster = RayCluster.start(config)
    processes = [process_at(await spec.resolve()) for spec in cluster.replicas()]
    cores = set(processes[1].cpu_affinity())
    assert cores == {0} or 0 not in os.sched_getaffinity(0)
    cluster.stop()
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert alive == []
    cluster.stop()  # harmless
    assert cluster.replicas() == []
