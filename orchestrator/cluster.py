"""Ray: starts, places, watches and restarts the services. Beside `local_ray` the only user of ray.

Every verifier and drafter is one named actor that runs its gRPC server inside itself and tells its
address. Not a token passes through Ray: actor calls start a service and find it again.

    RayCluster.start(config)   join or start Ray, start the actors, wait until all serve
    RayCluster.replicas()      how the engine finds each of them, also after a restart
    RayCluster.stop()          end what was started here, nothing else

On a joined cluster actors are detached: they outlive an orchestrator that was killed, and the next
one with the same config finds them by name. Knows nothing of requests.
"""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
import ray.exceptions
import ray.util

from core import __version__
from core.config import Config, PlacementConfig
from core.errors import ConfigError, ModelError, UnavailableError
from orchestrator.local_ray import LocalRay
from orchestrator.requests import ReplicaSpec
from orchestrator.service_actor import ServiceActor, Started

#: A local Ray cannot grow, so what does not fit now never will; a cluster may add nodes.
_LOCAL_PLACEMENT_S = 30.0
_JOINED_PLACEMENT_S = 900.0
_KNOCK_S = 5.0
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

    def __init__(self, config: Config, report: Report) -> None:
        self._config = config
        self._report = report
        self._local: LocalRay | None = None
        self._has_joined = False
        self._actors: list[_Actor] = []

    @classmethod
    def start(cls, config: Config, report: Report = lambda line: None) -> "RayCluster":
        """Bring up everything and wait until every service serves.

        `report` is told each step. A process that has joined a Ray already keeps using that one.
        Raises ConfigError (a service refused its config, or an actor of that name has another),
        ModelError (a service cannot start), UnavailableError (no Ray, or no room for an actor).
        """
        cluster = cls(config, report)
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
        try:
            _knock(settings.address)
            ray.init(
                address=settings.address,
                namespace=settings.namespace,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except (OSError, RuntimeError, ValueError) as error:
            raise UnavailableError(f"no Ray cluster at {settings.address}: {error}") from error
        self._has_joined = True

    def _create_actors(self) -> None:
        config = self._config
        for index in range(config.verifier.replicas):
            self._create_actor(f"verifier-{index}", "", config.verifier.placement)
        for pool in config.remote_pools:
            for index in range(pool.replicas):
                self._create_actor(f"drafter-{pool.name}-{index}", pool.name, pool.placement)

    def _create_actor(self, name: str, pool: str, placement: PlacementConfig) -> None:
        handle = self._find_actor(name, pool)
        is_ours = handle is None
        if is_ours:
            actor_class = ray.remote(ServiceActor)
            handle = actor_class.options(
                name=name,
                namespace=self._config.ray.namespace,
                lifetime="detached" if self._has_joined else None,
                max_restarts=-1,
                max_task_retries=-1,
                **_placement_options(placement),
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
            raise UnavailableError(f"{name} exists but does not answer: {error}") from error
        if running != ServiceActor.description(self._config, pool):
            raise ConfigError(
                f"ray.namespace: {name} already runs in {self._config.ray.namespace!r} with another"
                f" config or version (this is {__version__}); end it or use another namespace"
            )
        self._report(f"{name}: found running")
        return handle

    def _wait_until_placed(self) -> None:
        waiting = {actor.handle.__ray_ready__.remote(): actor for actor in self._actors}
        limit_s = _JOINED_PLACEMENT_S if self._has_joined else _LOCAL_PLACEMENT_S
        give_up_at = time.monotonic() + limit_s
        while waiting:
            done, _ = ray.wait(list(waiting), timeout=_POLL_S)
            for reference in done:
                _get(waiting.pop(reference), reference)
            if not done and time.monotonic() > give_up_at:
                lines = [_asked_for(actor) for actor in waiting.values()]
                raise UnavailableError(
                    f"no room after {limit_s:.0f} s for {'; '.join(lines)}. "
                    f"The cluster has {_amounts(ray.cluster_resources())}, "
                    f"of it free {_amounts(ray.available_resources())}"
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


def _knock(address: str) -> None:
    """Raise OSError when nothing listens there: Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit():  # not "auto"
        socket.create_connection((host, int(port)), timeout=_KNOCK_S).close()


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


def _placement_options(placement: PlacementConfig) -> dict[str, Any]:
    options: dict[str, Any] = {"num_cpus": placement.num_cpus, "num_gpus": placement.num_gpus}
    if placement.accelerator_type:
        options["accelerator_type"] = placement.accelerator_type
    if placement.resources:
        options["resources"] = placement.resources
    if placement.label_selector:
        options["label_selector"] = placement.label_selector
    return options


def _asked_for(actor: _Actor) -> str:
    placement = actor.placement
    wanted = {"CPU": placement.num_cpus, "GPU": placement.num_gpus, **placement.resources}
    text = f"{actor.name} ({_amounts(wanted)}"
    if placement.accelerator_type:
        text += f", accelerator_type {placement.accelerator_type}"
    if placement.label_selector:
        text += f", labels {placement.label_selector}"
    return text + ")"


def _amounts(resources: dict[str, float]) -> str:
    """Resources in words, without the ones Ray makes up for itself."""
    named = {
        name: amount
        for name, amount in sorted(resources.items())
        if amount and not name.startswith("node:") and not name.endswith("memory")
    }
    return ", ".join(f"{name} {amount:g}" for name, amount in named.items()) or "nothing"
