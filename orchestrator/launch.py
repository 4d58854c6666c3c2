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
from typing import TYPE_CHECKING, Any

from core.config import Config
from core.embedded import resolve_model
from core.errors import ConfigError
from core.rpc import RunningServer
from core.types import ModelIdentity
from orchestrator.autoscaling import DrafterHost, DrafterScaler, scaling
from orchestrator.local_ray import prepare_environment
from orchestrator.requests import ReplicaSpec

if TYPE_CHECKING:
    from core.tokenizer import Tokenizer
    from orchestrator.engine import Engine
    from orchestrator.telemetry import Telemetry

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def say(line: str) -> None:
    """Tell the person at the terminal what is being done; stdout is left for results."""
    print(line, file=sys.stderr, flush=True)


# ------------------------------------------------------------ one service, without Ray


def run_verifier(config: Config) -> None:
    """Serve the target until a signal. Raises ConfigError or ModelError when it cannot start."""
    from core.tracing import create_tracer
    from orchestrator.attaching import attacher
    from verifier_service.server import serve_verifier

    say(f"verifier: loading {config.target.model}")
    attach = attacher(config.attached_pools)
    tracer = create_tracer(config.tracing, "forerun-verifier")
    start = serve_verifier(config.target, config.verifier, attach=attach, tracer=tracer)
    asyncio.run(_serve("verifier", start, config.orchestrator.drain_timeout_s))


def run_drafter(config: Config, pool: str) -> None:
    """Serve one drafter of `pool` until a signal. Raises ConfigError or ModelError."""
    from core.tracing import create_tracer
    from drafter_service.server import serve_drafter

    settings = config.pool(pool)
    if settings.attached:
        raise ConfigError(f"drafter_pools.{pool}.attached: it runs in the verifier's process")
    model = f" with {settings.model.model}" if settings.model else ""
    say(f"drafter {pool}: starting kind {settings.kind}{model}")
    # A drafter is a cache: whoever uses it goes on without, so it need not drain.
    tracer = create_tracer(config.tracing, "forerun-drafter")
    start = serve_drafter(settings, tracer=tracer)
    asyncio.run(_serve(f"drafter {pool}", start, drain_timeout_s=0))


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
    asyncio.run(_orchestrate(config, running_replicas(config)))


def running_replicas(config: Config) -> list[ReplicaSpec]:
    """The services whose addresses the config gives. Raises ConfigError without a verifier."""
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
    return replicas


def run_cluster(config: Config, takes_over: bool = False) -> None:
    """Bring up Ray, every service and the orchestrator in this process; end them all after it.

    takes_over: on a running Ray, treat what is left of another orchestrator as one's own.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    _resolve_models(config)
    if not config.ray.address:
        prepare_environment()
    from orchestrator.cluster import RayCluster  # imports ray: a second, and it wants the above

    with RayCluster.start(config, say, takes_over) as cluster:
        asyncio.run(_orchestrate(config, cluster.replicas(), cluster.kill, cluster))
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
    config: Config,
    replicas: list[ReplicaSpec],
    abandon: Callable[[], None] = lambda: None,
    host: DrafterHost | None = None,
) -> None:
    from prometheus_client import CollectorRegistry

    from core.metrics import MetricsServer
    from core.tokenizer import Tokenizer
    from core.tracing import create_tracer
    from orchestrator.engine import Engine
    from orchestrator.metrics import EngineCollector, RequestMetrics
    from orchestrator.telemetry import Telemetry

    target, settings = config.target, config.orchestrator
    with _shutdown_event(abandon) as shutdown, contextlib.ExitStack() as cleanup:
        say("orchestrator: loading the tokenizer")
        model = resolve_model(target.model)
        tokenizer = Tokenizer.load(model, target.gguf_file, target.trust_remote_code)
        registry = CollectorRegistry()
        tracer = create_tracer(config.tracing, "forerun-orchestrator")
        telemetry = Telemetry(RequestMetrics(registry), tracer)
        expected = ModelIdentity(target.model, tokenizer.size, tokenizer.fingerprint)
        engine = Engine(settings, config.drafter_pools, replicas, expected)
        try:
            say("orchestrator: waiting for the verifiers")
            if not await _unless(shutdown, engine.start()):
                return
            if settings.metrics_port is not None:
                registry.register(EngineCollector(engine.status))
                metrics = MetricsServer(registry, settings.metrics_port, settings.host)
                cleanup.callback(metrics.stop)
                say(f"orchestrator: metrics at http://{metrics.address}/metrics")
            async with scaling(engine, host, config.drafter_pools) as scaler:
                await _serve_edges(config, engine, tokenizer, telemetry, scaler, shutdown)
        finally:
            await engine.stop()


async def _serve_edges(
    config: Config,
    engine: "Engine",
    tokenizer: "Tokenizer",
    telemetry: "Telemetry",
    scaler: DrafterScaler | None,
    shutdown: asyncio.Event,
) -> None:
    """Serve the API over gRPC, and over HTTP if wanted, until the shutdown; then drain both."""
    from orchestrator.server import read_token, serve_orchestrator

    settings = config.orchestrator
    server = await serve_orchestrator(engine, tokenizer, settings, telemetry, scaler)
    stops = [server.stop]
    if config.http.enabled:
        from orchestrator.cluster_api import ClusterApi
        from orchestrator.generation_api import GenerationApi
        from orchestrator.http_server import serve_http

        generation = GenerationApi(engine, tokenizer, telemetry)
        token = read_token(settings.auth_token_file)
        name = config.http.model_name or config.target.model
        http = config.http.model_copy(update={"model_name": name})
        gateway = await serve_http(http, generation, ClusterApi(engine, scaler), token)
        stops.append(gateway.stop)
        print(f"OpenAI's API is at http://{gateway.address}/v1", flush=True)
        if config.http.page:
            print(f"the page is at http://{gateway.address}/", flush=True)
    print(f"forerun is ready at {server.address}", flush=True)
    await shutdown.wait()
    say(f"draining for at most {settings.drain_timeout_s:g} s; once more ends at once")
    await asyncio.gather(*(stop(settings.drain_timeout_s) for stop in stops))


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
