"""`forerun tune`: what may be typed, and how a drafter is named on the command line.

    --drafter ngram
    --drafter draft_model:model=PATH
    --drafter early_exit:attached=true,num_layers=20
    --drafter hybrid:model=PATH,min_match=2,drafter.top_q=16

A kind, then keys of the pool (`name`, `model`, `attached`); all others are the kind's options. The
work is in `orchestrator.tuning`. `--help` imports no torch.
"""

import sys
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from core.config import DrafterPoolConfig, ModelConfig, load_config, parse_config
from core.errors import ConfigError
from core.rpc import configure_logging

_POOL_KEYS = ("name", "model", "attached")
_WIDTH = 100


def tune(
    target: Annotated[str, typer.Option(help="The target's directory, or embedded:NAME.")] = "",
    drafter: Annotated[
        list[str] | None, typer.Option(help="KIND[:KEY=VALUE,...]; may be given again.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="Target and pools, instead of the above.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Prompts, one a line, instead of 40 built-in ones.")
    ] = None,
    clients: Annotated[int, typer.Option(min=1, help="Clients at a time, beside one.")] = 8,
    longest: Annotated[int, typer.Option(min=1, max=32, help="Longest draft to look at.")] = 6,
    max_new_tokens: Annotated[int, typer.Option(min=8, help="Of each answer.")] = 64,
    dtype: Annotated[str, typer.Option(help="With --target: of all models.")] = "auto",
    threads: Annotated[int, typer.Option(min=0, help="With --target: of torch; 0: its own.")] = 0,
) -> None:
    """Measure drafters on your prompts; recommend one, its draft length and its replicas."""
    configure_logging("WARNING")
    model, pools = _settings(config, target, drafter or [], {"dtype": dtype, "threads": threads})
    from drafter_service.distil.prompts import HELD_OUT, read_prompts
    from orchestrator.tuning.run import TuneOptions
    from orchestrator.tuning.run import tune as run
    from orchestrator.tuning.tables import print_report

    texts = read_prompts(prompts) if prompts else list(HELD_OUT)
    options = TuneOptions(model, pools, max_new_tokens, longest, clients)
    with Console(stderr=True).status("starting") as status:
        report = run(options, texts, status.update)
    console = Console()
    if not sys.stdout.isatty():  # wide enough for every column, into a file too
        console.width = max(_WIDTH + 8 * longest, console.width)
    print_report(report, pools, console)


def _settings(
    config: Path | None, target: str, drafters: list[str], model: dict[str, Any]
) -> tuple[ModelConfig, list[DrafterPoolConfig]]:
    """Target and pools, from a file or from the command line. Raises ConfigError."""
    if (config is None) == (not target) or (config is not None and drafters):
        raise ConfigError("give either --config, or --target and --drafter")
    if config is not None:
        settings = load_config(config)
    else:
        pools = [parse_drafter(spec, model) for spec in drafters]
        whole = {"target": {"model": target, **model}, "drafter_pools": pools}
        settings = parse_config(whole, source="--drafter")
    if not settings.drafter_pools:
        raise ConfigError("there is no drafter to measure")
    return settings.target, settings.drafter_pools


def parse_drafter(spec: str, model: dict[str, Any]) -> dict[str, Any]:
    """A pool as it would stand in the configuration; `model`: how models are held.

    Raises ConfigError for what is not KIND[:KEY=VALUE,...].
    """
    kind, _, rest = spec.partition(":")
    lines = []
    for item in filter(None, rest.split(",")):
        key, separator, value = item.partition("=")
        if not separator:
            raise ConfigError(f"--drafter {spec}: {item!r} is not KEY=VALUE")
        lines.append(f"{key} = {_toml(value)}")
    try:
        options = tomllib.loads("\n".join(lines))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--drafter {spec}: {error}") from error
    pool = {key: options.pop(key) for key in _POOL_KEYS if key in options}
    if "model" in pool:
        pool["model"] = {"model": pool["model"], **model}
    return {"name": kind, "kind": kind, **pool, "options": options}


def _toml(value: str) -> str:
    """A TOML value: what is none by itself is a string."""
    try:
        tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        return "'" + value.replace("'", "") + "'"
    return value
