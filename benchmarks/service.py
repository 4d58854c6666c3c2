"""One forerun service for the bench, as a process of its own.

    python -m benchmarks.service verifier | drafter:POOL | orchestrator | traced

The configuration comes as one line of JSON on stdin; the address goes out as the last word of a
line on stdout. The services are those of `forerun verifier`, `drafter` and `orchestrator`; the
verifier's line also ends with the address of its metrics, which say where its time goes.
"""

import asyncio
import sys

from benchmarks.worker import end_with_stdin, read_line
from core.config import Config
from core.rpc import configure_logging


def main() -> None:
    """Serve until a signal, or until stdin ends."""
    config = Config.model_validate_json(read_line())
    if sys.argv[1] == "traced":  # it goes on reading stdin
        from benchmarks.traced import serve

        configure_logging()
        asyncio.run(serve(config))
        return
    end_with_stdin()
    configure_logging()
    role, _, pool = sys.argv[1].partition(":")
    if role == "verifier":
        asyncio.run(_verifier(config))
    elif role == "drafter":
        asyncio.run(_drafter(config, pool))
    else:
        from orchestrator.launch import run_orchestrator

        run_orchestrator(config)


async def _verifier(config: Config) -> None:
    from prometheus_client import CollectorRegistry

    from core.metrics import MetricsServer
    from orchestrator.attaching import attacher
    from verifier_service.server import serve_verifier

    registry = CollectorRegistry()
    attach = attacher(config.attached_pools)
    server = await serve_verifier(config.target, config.verifier, registry, attach)
    metrics = MetricsServer(registry, 0)
    print(metrics.address, server.address, flush=True)
    await server.wait()


async def _drafter(config: Config, pool: str) -> None:
    from drafter_service.server import serve_drafter

    server = await serve_drafter(config.pool(pool))
    print(server.address, flush=True)
    await server.wait()


if __name__ == "__main__":
    main()
