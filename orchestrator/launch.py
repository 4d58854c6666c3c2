"""Brings the parts together and runs them until a signal: the composition root behind the CLI.

Three phases each: start (a signal ends it), serve, drain (new requests are refused, running ones
may end; a second signal ends the process at once). Knows every part and nothing of how one works;
imports torch and ray only in the commands that need them.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

from core.config import Config
from core.embedded import resolve_model
from core.errors import ConfigError
from core.rpc import RunningServer
from core.types import ModelIdentity
from orchestrator.local_ray import prepare_environment
from orchestrator.requests import ReplicaSpec

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def say(line: str) -> None:
    """Tell the person at the terminal what is being done; stdout is left for results."""
    print(line, file=sys.stderr, flush=True)


# ------------------------------------------------------------ one service, without Ray


def run_verifier(config: Config) -> None:
    """Serve the target until a signal. Raises ConfigError or ModelError when it cannot start."""
    from orchestrator.attaching import attacher
    from verifier_service.server import serve_verifier

    say(f"verifier: loading {config.target.model}")
    attach = attacher(config.attached_pools)
    start = serve_verifier(config.target, config.verifier, attach=attach)
    asyncio.run(_serve("verifier", start, config.orchestrator.drain_timeout_s))


def run_drafter(config: Config, pool: str) -> None:
    """Serve one drafter of `pool` until a signal. Raises ConfigError or ModelError."""
    from drafter_service.server import serve_drafter

    settings = config.pool(pool)
    if settings.attached:
        raise ConfigError(f"drafter_pools.{pool}.attached: it runs in the verifier's process")
    model = f" with {settings.model.model}" if settings.model else ""
    say(f"drafter {pool}: starting kind {settings.kind}{model}")
    # A drafter is a cache: whoever uses it goes on without, so it need not drain.
    asyncio.run(_serve(f"drafter {pool}", serve_drafter(settings), drain_timeout_s=0))


async def _serve(
    name: str, start: Coroutine[Any, Any, RunningServer], drain_timeout_s: float
) -> None:
    # Loading a model may hold the event loop for minutes: until it serves there is nothing to
    # drain, and a signal does what it does to any process.
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    server = await start
    with _shutdown_event() as shutdown:
        say(f"{name}: serving at {server.address}")
        await shutdown.wait()
        say(f"{name}: stopping")
        await server.stop(drain_timeout_s)


# ------------------------------------------------------------ the orchestrator


def run_orchestrator(config: Config) -> None:
    """Serve the public API with the services whose addresses the config gives."""
    verifiers = config.orchestrator.verifier_addresses
    if not verifiers:
        raise ConfigError(
            "orchestrator.verifier_addresses: empty; give the addresses of running verifiers,"
            " or use `forerun serve`, which starts them"
        )
    replicas = [_fixed(f"verifier-{i}", "", address) for i, address in enumerate(verifiers)]
    for pool in config.remote_pools:
        for i, address in enumerate(pool.addresses):
            replicas.append(_fixed(f"drafter-{pool.name}-{i}", pool.name, address))
    asyncio.run(_orchestrate(config, replicas))


def run_cluster(config: Config) -> None:
    """Bring up Ray, every service and the orchestrator in this process; end them all after it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    _resolve_models(config)
    if not config.ray.address:
        prepare_environment()
    from orchestrator.cluster import RayCluster  # imports ray: a second, and it wants the above

    with RayCluster.start(config, say) as cluster:
        asyncio.run(_orchestrate(config, cluster.replicas(), cluster.kill))
        say("stopping the services")
    say("stopped")


def _resolve_models(config: Config) -> None:
    """Make embedded models now, where progress is seen, rather than in an actor."""
    for model in (config.target, *(pool.model for pool in config.drafter_pools)):
        if model is not None:
            resolve_model(model.model)


def _fixed(replica_id: str, pool: str, address: str) -> ReplicaSpec:
    async def resolve() -> str:
        return address

    return ReplicaSpec(replica_id, pool, resolve)


async def _orchestrate(
    config: Config, replicas: list[ReplicaSpec], abandon: Callable[[], None] = lambda: None
) -> None:
    from core.metrics import MetricsServer
    from core.tokenizer import Tokenizer
    from orchestrator.engine import Engine
    from orchestrator.metrics import engine_registry
    from orchestrator.server import serve_orchestrator

    target, settings = config.target, config.orchestrator
    with _shutdown_event(abandon) as shutdown, contextlib.ExitStack() as cleanup:
        say("orchestrator: loading the tokenizer")
        model = resolve_model(target.model)
        tokenizer = Tokenizer.load(model, target.gguf_file, target.trust_remote_code)
        expected = ModelIdentity(target.model, tokenizer.size, tokenizer.fingerprint)
        engine = Engine(settings, config.drafter_pools, replicas, expected)
        try:
            say("orchestrator: waiting for the verifiers")
            if not await _unless(shutdown, engine.start()):
                return
            if settings.metrics_port is not None:
                registry = engine_registry(engine.status)
                metrics = MetricsServer(registry, settings.metrics_port, settings.host)
                cleanup.callback(metrics.stop)
                say(f"orchestrator: metrics at http://{metrics.address}/metrics")
            server = await serve_orchestrator(engine, tokenizer, settings)
            print(f"forerun is ready at {server.address}", flush=True)
            await shutdown.wait()
            say(f"draining for at most {settings.drain_timeout_s:g} s; once more ends at once")
            await server.stop(settings.drain_timeout_s)
        finally:
            await engine.stop()


# ------------------------------------------------------------ signals


@contextlib.contextmanager
def _shutdown_event(abandon: Callable[[], None] = lambda: None) -> Iterator[asyncio.Event]:
    """An event that the first SIGINT or SIGTERM sets; the second abandons all and exits."""
    requested = asyncio.Event()

    def on_signal(number: int) -> None:
        if requested.is_set():
            abandon()
            os._exit(128 + number)
        requested.set()

    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield requested
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


async def _unless(shutdown: asyncio.Event, work: Awaitable[None]) -> bool:
    """Do the work; False when the shutdown came first and the work was cancelled."""
    doing = asyncio.ensure_future(work)
    waiting = asyncio.ensure_future(shutdown.wait())
    try:
        await asyncio.wait({doing, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            return False
        await doing
        return True
    finally:
        for task in (doing, waiting):
            task.cancel()
        await asyncio.gather(doing, waiting, return_exceptions=True)
