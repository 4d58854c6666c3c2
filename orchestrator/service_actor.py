"""What runs inside a Ray actor: one verifier or drafter, its gRPC server and its address.

A plain class, without ray: `orchestrator.cluster` makes an actor of it. An actor that Ray restarts
begins again from the constructor's arguments, so all it must know stands in them. Errors at the
start travel as data, not as exceptions: they keep their text and need no unpickling.
"""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from core import __version__
from core.config import Config
from core.errors import ConfigError, ForerunError
from core.rpc import RunningServer, configure_logging

_WILDCARD_HOSTS = ("0.0.0.0", "[::]")

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Started:
    """Where the service serves, or why it does not."""

    address: str = ""
    error: str = ""
    is_config_error: bool = False


class ServiceActor:
    """Runs the drafter of `pool`, or a verifier when `pool` is empty.

    node_address: tells under which address other nodes reach this one.
    """

    def __init__(self, config: Config, pool: str, node_address: Callable[[], str]) -> None:
        configure_logging(config.logging.level, json=config.logging.format == "json")
        self._node_address = node_address
        self._config = config
        self._pool = pool
        self._starting: asyncio.Task[RunningServer] | None = None
        placement = config.pool(pool).placement if pool else config.verifier.placement
        if placement.cpu_affinity:
            _pin_to(set(placement.cpu_affinity))

    @staticmethod
    def description(config: Config, pool: str) -> str:
        """All that decides what the actor of `pool` does; equal for equal actors."""
        any_number = {"replicas": 1, "min_replicas": None, "max_replicas": 1}
        if pool:
            return repr((__version__, config.pool(pool).model_copy(update=any_number)))
        verifier = config.verifier.model_copy(update={"replicas": 1})
        return repr((__version__, config.target, verifier, config.attached_pools))

    async def describe(self) -> str:
        """The description of this actor."""
        return self.description(self._config, self._pool)

    async def start(self) -> Started:
        """Serve, unless it does already, and say where. A failed start is tried again."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._serve())
        try:
            server = await asyncio.shield(self._starting)
        except ForerunError as error:
            self._starting = None
            return Started(error=str(error), is_config_error=isinstance(error, ConfigError))
        host, port = server.address.rsplit(":", 1)
        if host in _WILDCARD_HOSTS:
            host = self._node_address()
        return Started(address=f"{host}:{port}")

    async def _serve(self) -> RunningServer:
        from core.tracing import create_tracer

        config = self._config
        if self._pool:
            from drafter_service.server import serve_drafter

            tracer = create_tracer(config.tracing, "forerun-drafter")
            return await serve_drafter(config.pool(self._pool), tracer=tracer)
        from orchestrator.attaching import attacher
        from verifier_service.server import serve_verifier

        tracer = create_tracer(config.tracing, "forerun-verifier")
        attach = attacher(config.attached_pools)
        return await serve_verifier(config.target, config.verifier, attach=attach, tracer=tracer)


def _pin_to(cores: set[int]) -> None:
    """Keep every thread of this process, and those they start, on these cores.

    Cores that this machine or container lacks are left out; with none left it stays unpinned.
    """
    usable = cores & os.sched_getaffinity(0)
    if not usable:
        _log.warning("not_pinned", cores=sorted(cores), available=sorted(os.sched_getaffinity(0)))
        return
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), usable)
