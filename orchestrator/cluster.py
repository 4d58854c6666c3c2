"""Ray: starts, places, watches and restarts the services. With `local_ray` and `distil_ray` the
only user of ray.

Every verifier and drafter is one named actor that runs its gRPC server inside itself and tells its
address. Not a token passes through Ray: actor calls start a service and find it again.

    RayCluster.start(config)   join or start Ray, start the actors, wait until all serve
    RayCluster.replicas()      how the engine finds each of them, also after a restart
    RayCluster.add_drafter(), end_drafter()      more and fewer, while all the others serve
    RayCluster.stop()          end what was started here, nothing else

On a joined cluster actors are detached: they outlive an orchestrator that was killed, and the next
one with the same config finds them by name, also those added later. Knows nothing of requests.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
import ray.exceptions
import ray.util

from core import __version__
from core.config import Config, DrafterPoolConfig, PlacementConfig
from core.errors import ConfigError, ModelError, UnavailableError
from orchestrator.local_ray import LocalRay, join_ray
from orchestrator.ray_options import describe_amounts, describe_placement, placement_options
from orchestrator.requests import ReplicaSpec
from orchestrator.service_actor import ServiceActor, Started

#: A local Ray cannot grow, so what does not fit now never will; a cluster may add nodes.
_LOCAL_PLACEMENT_S = 30.0
_JOINED_PLACEMENT_S = 900.0
_LOOKUP_S = 30.0
_RESOLVE_S = 10.0
_POLL_S = 1.0

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _Actor:
    name: str
    pool: str
    placement: PlacementConfig
    handle: Any
    is_ours: bool


class RayCluster:
    """The actors of one config. Use as `with RayCluster.start(config) as cluster`."""

    def __init__(self, config: Config, report: Report, takes_over: bool = False) -> None:
        self._config = config
        self._report = report
        self._takes_over = takes_over
        self._local: LocalRay | None = None
        self._has_joined = False
        self._actors: list[_Actor] = []
        self._next_index: dict[str, int] = {}

    @classmethod
    def start(
        cls, config: Config, report: Report = lambda line: None, takes_over: bool = False
    ) -> "RayCluster":
        """Bring up everything and wait until every service serves.

        `report` is told each step. A process that has joined a Ray already keeps using that one.
        takes_over: actors that were found end with this one; those that have another config or do
        not answer are started anew, and those that the config does not ask for are ended.
        Raises ConfigError (a service refused its config, or an actor of that name has another),
        ModelError (a service cannot start), UnavailableError (no Ray, or no room for an actor).
        """
        cluster = cls(config, report, takes_over)
        try:
            cluster._connect()
            cluster._create_actors()
            cluster._wait_until_placed()
            cluster._wait_until_serving()
        except BaseException:  # also Ctrl-C: whatever was started must end
            cluster.stop()
            raise
        return cluster

    def __enter__(self) -> "RayCluster":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def replicas(self) -> list[ReplicaSpec]:
        """One per actor. `resolve` asks it for its address at this moment."""
        return [_replica(actor) for actor in self._actors]

    def add_drafter(self, pool: str) -> ReplicaSpec:
        """One more drafter in a pool, without waiting for it: Ray places it as soon as it can.

        Raises UnavailableError, and ConfigError as `start` does.
        """
        name = f"drafter-{pool}-{self._next_index[pool]}"
        self._next_index[pool] += 1  # no name twice: an actor that was ended lives on for a moment
        try:
            self._create_actor(name, pool, self._config.pool(pool).placement)
        except (ray.exceptions.RayError, ValueError, ConnectionError) as error:
            raise UnavailableError(f"{name}: {error}") from error
        return _replica(self._actors[-1])

    def end_drafter(self, replica_id: str) -> None:
        """End a drafter for good, also one that was found running."""
        for actor in self._actors:
            if actor.name == replica_id:
                self._actors.remove(actor)
                with contextlib.suppress(ray.exceptions.RayError):
                    ray.kill(actor.handle, no_restart=True)
                return

    def stop(self) -> None:
        """End the actors that were started here, and the Ray that was; safe to call again."""
        actors, self._actors = self._actors, []
        for actor in actors:
            if actor.is_ours:
                with contextlib.suppress(ray.exceptions.RayError):
                    ray.kill(actor.handle, no_restart=True)
        if self._local is not None:
            self._local.stop()
            self._local = None
        elif self._has_joined:
            ray.shutdown()
        self._has_joined = False

    def kill(self) -> None:
        """End a local Ray without waiting; actors on a joined cluster are left running."""
        if self._local is not None:
            self._local.kill()

    # ------------------------------------------------------------ start-up

    def _connect(self) -> None:
        settings = self._config.ray
        if ray.is_initialized():
            return
        if not settings.address:
            self._report("starting a local Ray")
            self._local = LocalRay(settings)
            return
        self._report(f"joining Ray at {settings.address}")
        join_ray(settings.address, settings.namespace)
        self._has_joined = True

    def _create_actors(self) -> None:
        config = self._config
        running = {
            each["name"]
            for each in ray.util.list_named_actors(all_namespaces=True)
            if each["namespace"] == config.ray.namespace
        }
        placement = config.verifier.placement
        wanted = [(f"verifier-{i}", "", placement) for i in range(config.verifier.replicas)]
        for pool in config.remote_pools:
            indices = _indices(pool, running)
            self._next_index[pool.name] = max(indices, default=-1) + 1
            wanted += [(f"drafter-{pool.name}-{i}", pool.name, pool.placement) for i in indices]
        if self._takes_over:  # first: what is started needs the room of what nobody asks for
            for name in sorted(running - {name for name, _, _ in wanted}):
                if name.startswith(("verifier-", "drafter-")):
                    self._end_found(name, "no longer in the config")
        for name, pool_name, placement in wanted:
            self._create_actor(name, pool_name, placement)

    def _create_actor(self, name: str, pool: str, placement: PlacementConfig) -> None:
        handle = self._find_actor(name, pool)
        is_ours = handle is None or self._takes_over
        if handle is None:
            actor_class = ray.remote(ServiceActor)
            handle = actor_class.options(
                name=name,
                namespace=self._config.ray.namespace,
                lifetime="detached" if self._has_joined else None,
                max_restarts=-1,
                max_task_retries=-1,
                **placement_options(placement),
            ).remote(self._config, pool, ray.util.get_node_ip_address)
        self._actors.append(_Actor(name, pool, placement, handle, is_ours))

    def _find_actor(self, name: str, pool: str) -> Any:
        try:
            handle = ray.get_actor(name, namespace=self._config.ray.namespace)
        except ValueError:
            return None
        try:
            running = ray.get(handle.describe.remote(), timeout=_LOOKUP_S)
        except ray.exceptions.RayError as error:
            if self._takes_over:
                return self._end_found(name, "does not answer")
            raise UnavailableError(f"{name} exists but does not answer: {error}") from error
        if running != ServiceActor.description(self._config, pool):
            if self._takes_over:
                return self._end_found(name, "has another config or version")
            raise ConfigError(
                f"ray.namespace: {name} already runs in {self._config.ray.namespace!r} with another"
                f" config or version (this is {__version__}); --take-over ends and replaces it,"
                " another namespace leaves it alone"
            )
        self._report(f"{name}: found running")
        return handle

    def _end_found(self, name: str, why: str) -> None:
        """End an actor that another orchestrator started; returns when its name is free."""
        self._report(f"{name}: {why}; ending it")
        with contextlib.suppress(ValueError):  # it is gone
            while True:
                ray.kill(ray.get_actor(name, self._config.ray.namespace), no_restart=True)
                time.sleep(_POLL_S / 10)

    def _wait_until_placed(self) -> None:
        waiting = {actor.handle.__ray_ready__.remote(): actor for actor in self._actors}
        limit_s = _JOINED_PLACEMENT_S if self._has_joined else _LOCAL_PLACEMENT_S
        give_up_at = time.monotonic() + limit_s
        while waiting:
            done, _ = ray.wait(list(waiting), timeout=_POLL_S)
            for reference in done:
                _get(waiting.pop(reference), reference)
            if not done and time.monotonic() > give_up_at:
                lines = [
                    f"{each.name} ({describe_placement(each.placement)})"
                    for each in waiting.values()
                ]
                raise UnavailableError(
                    f"no room after {limit_s:.0f} s for {'; '.join(lines)}. "
                    f"The cluster has {describe_amounts(ray.cluster_resources())}, "
                    f"of it free {describe_amounts(ray.available_resources())}"
                )

    def _wait_until_serving(self) -> None:
        # Without retries: a process that dies while it loads a model would do so for ever.
        waiting = {
            actor.handle.start.options(max_task_retries=0).remote(): actor for actor in self._actors
        }
        started_at = time.monotonic()
        while waiting:
            done, _ = ray.wait(list(waiting), timeout=None)
            for reference in done:
                actor = waiting.pop(reference)
                started: Started = _get(actor, reference)
                if started.error:
                    kind = ConfigError if started.is_config_error else ModelError
                    raise kind(f"{actor.name}: {started.error}")
                elapsed_s = time.monotonic() - started_at
                self._report(f"{actor.name}: serves at {started.address} ({elapsed_s:.1f} s)")


def _indices(pool: DrafterPoolConfig, running: set[str]) -> list[int]:
    """The numbers of a pool's drafters: of those that run, and new ones if they are too few."""
    names = [name.rpartition("-") for name in running]
    found = {int(i) for base, _, i in names if base == f"drafter-{pool.name}" and i.isdecimal()}
    kept = sorted(found)[: pool.max_replicas]
    unused = (index for index in itertools.count() if index not in found)
    num_missing = max(pool.replicas, pool.min_replicas or 0) - len(kept)
    return sorted([*kept, *itertools.islice(unused, max(0, num_missing))])


def _get(actor: _Actor, reference: Any) -> Any:
    try:
        return ray.get(reference)
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None)
        # Ray's own text is a traceback of the other process: its last line says it all.
        reason = f"{type(cause).__name__}: {cause}" if cause else str(error).splitlines()[0]
        raise ModelError(f"{actor.name}: cannot start: {reason}") from error


def _replica(actor: _Actor) -> ReplicaSpec:
    async def resolve() -> str:
        # While the actor restarts Ray holds the call back and sends it to the new process.
        future = asyncio.wrap_future(actor.handle.start.remote().future())
        try:
            async with asyncio.timeout(_RESOLVE_S):
                started: Started = await asyncio.shield(future)
        except TimeoutError:
            future.add_done_callback(_ignore_late)
            raise UnavailableError(f"{actor.name} does not answer; Ray may be restarting it") from (
                None
            )
        except ray.exceptions.RayError as error:
            raise UnavailableError(f"{actor.name}: {error}") from error
        if started.error:
            raise UnavailableError(f"{actor.name}: {started.error}")
        return started.address

    return ReplicaSpec(actor.name, actor.pool, resolve)


def _ignore_late(future: "asyncio.Future[Any]") -> None:
    if not future.cancelled():
        future.exception()
