"""The `forerun` command: what may be typed, and how errors are told.

    forerun serve          everything, with Ray: verifiers, drafters and the orchestrator
    forerun verifier | drafter | orchestrator      one service, without Ray
    forerun generate | status                      the clients
    forerun scale | drain                          more and fewer drafters
    forerun distil         make a drafter for a target
    forerun tune           measure drafters, and recommend one
    forerun trace          run generations, and write down where their time went
    forerun version

An error that forerun knows is one line on stderr and exit code 2, never a traceback. All work is
in `orchestrator.launch` and the `_cli` modules; `--help` imports neither torch nor ray.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from core import __version__
from core.config import Config, load_config
from core.errors import ForerunError
from core.rpc import configure_logging
from orchestrator import client_cli, distil_cli, scale_cli, trace_cli, tune_cli

app = typer.Typer(
    help="Serve a large language model, made fast by drafters that run somewhere else.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(client_cli.generate)
app.command()(client_cli.status)
app.command()(scale_cli.scale)
app.command()(scale_cli.drain)
app.command()(distil_cli.distil)
app.command()(tune_cli.tune)
app.command()(trace_cli.trace)

_ConfigOption = Annotated[Path, typer.Option("--config", "-c", help="The TOML configuration.")]
_PortOption = Annotated[
    int | None, typer.Option(min=0, max=65535, help="Port of the API, instead of the config's.")
]


@app.command()
def serve(
    config: _ConfigOption,
    address: Annotated[
        str, typer.Option(help="Join this Ray cluster (host:port) instead of the config's.")
    ] = "",
    take_over: Annotated[
        bool,
        typer.Option(
            "--take-over",
            help="Own all that runs in the Ray namespace: replace what has another config.",
        ),
    ] = False,
    port: _PortOption = None,
    http: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Serve OpenAI's API and the page at this port, too."),
    ] = None,
) -> None:
    """Bring up everything: Ray (a local one, or a running cluster), services, orchestrator."""
    from orchestrator.launch import run_cluster

    settings = _load(config, port)
    if address:
        ray = settings.ray.model_copy(update={"address": address})
        settings = settings.model_copy(update={"ray": ray})
    if http is not None:
        given = {"enabled": True, "port": http, "page": True}
        settings = settings.model_copy(update={"http": settings.http.model_copy(update=given)})
    run_cluster(settings, take_over)


@app.command()
def verifier(config: _ConfigOption) -> None:
    """Serve the target model, without Ray."""
    from orchestrator.launch import run_verifier

    run_verifier(_load(config))


@app.command()
def drafter(
    config: _ConfigOption,
    pool: Annotated[str, typer.Option(help="Name of the drafter pool to serve for.")],
) -> None:
    """Serve one drafter of a pool, without Ray."""
    from orchestrator.launch import run_drafter

    run_drafter(_load(config), pool)


@app.command()
def orchestrator(config: _ConfigOption, port: _PortOption = None) -> None:
    """Serve the API with running verifiers and drafters, by the addresses in the config."""
    from orchestrator.launch import run_orchestrator

    run_orchestrator(_load(config, port))


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


def _load(path: Path, port: int | None = None) -> Config:
    configure_logging()
    config = load_config(path)
    configure_logging(config.logging.level, json=config.logging.format == "json")
    if port is None:
        return config
    settings = config.orchestrator.model_copy(update={"port": port})
    return config.model_copy(update={"orchestrator": settings})


def main() -> None:
    """Entry point of `forerun`."""
    try:
        app()
    except ForerunError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
