"""The table for people and the JSON for machines."""

import json
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

from benchmarks.registry import Outcome
from core import __version__


def machine() -> dict[str, Any]:
    """What the figures were measured on and with."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "forerun": __version__,
    }


def write_json(outcomes: Sequence[Outcome], facts: dict[str, Any], path: Path) -> None:
    """Write build/bench.json."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"machine": facts, "rows": [outcome.as_json() for outcome in outcomes]}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def print_table(outcomes: Sequence[Outcome], facts: dict[str, Any], console: Console) -> None:
    """The rows, then what they have to say beside their figures."""
    table = Table(title=f"forerun {facts['forerun']} against transformers {facts['transformers']}")
    table.add_column("row", no_wrap=True)
    for name in ("ours", "peer", "unit", "ratio", "spread", "mark", "holds", "s"):
        table.add_column(name, justify="left" if name == "unit" else "right", no_wrap=True)
    for outcome in outcomes:
        table.add_row(*_cells(outcome))
    console.print(table)
    console.print(f"{facts['cpu']}, {facts['cores']} cores, torch {facts['torch']}")
    for outcome in outcomes:
        notes = outcome.measurement.notes if outcome.measurement else [outcome.error]
        for note in notes:
            console.print(f"  [bold]{outcome.row.name}[/]: ", end="")
            console.print(note, markup=False, highlight=False)


def _cells(outcome: Outcome) -> list[str]:
    row, measured = outcome.row, outcome.measurement
    mark = f"<= {row.at_most:.2f}" if row.at_most is not None else ""
    if row.at_least is not None:
        mark = f"{row.at_least:.2f} .. {row.at_most:.2f}" if mark else f">= {row.at_least:.2f}"
    holds = {None: "", True: "[green]yes[/]", False: "[red]no[/]"}[outcome.holds]
    seconds = f"{outcome.seconds:.0f}"
    if measured is None:
        return [row.name, "", "", row.unit, "[red]failed[/]", "", mark, holds, seconds]
    low, high = measured.spread
    return [
        row.name,
        f"{statistics.median(measured.ours):.2f}",
        f"{statistics.median(measured.peer):.2f}",
        row.unit,
        f"{measured.ratio:.2f}",
        f"{low:.2f} .. {high:.2f}",
        mark,
        holds,
        seconds,
    ]
