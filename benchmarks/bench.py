"""`make bench`: measures forerun against transformers, prints a table, writes build/bench.json.

    python benchmarks/bench.py [--rows PATTERN] [--config FILE] [--output FILE] [--quick]

Rows are listed by the modules in `ROWS`; to add one, write a function with `@row` in one of them
(or in a new module) and put it into the module's own `ROWS`. A missed mark is told, not punished:
the exit code is 0 unless a row could not be measured. See docs/benchmarks.md.
"""

import argparse
import asyncio
import fnmatch
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # run as a file: the folder of this file is no place to import from

from rich.console import Console  # noqa: E402 - the path comes first

from benchmarks import (  # noqa: E402
    distilled_rows,
    engine_rows,
    kind_rows,
    overhead_rows,
    pair_rows,
    parameter_rows,
    serving_rows,
    simulation_rows,
    system_rows,
    trace_rows,
    tune_rows,
)
from benchmarks.context import QUICK, Bench, Scale  # noqa: E402
from benchmarks.processes import BenchError  # noqa: E402
from benchmarks.registry import Outcome, Row  # noqa: E402
from benchmarks.report import machine, print_table, write_json  # noqa: E402
from core.config import Config, load_config  # noqa: E402
from core.errors import ForerunError  # noqa: E402

ROWS = (
    *engine_rows.ROWS,
    *serving_rows.ROWS,
    *overhead_rows.ROWS,
    *parameter_rows.ROWS,
    *distilled_rows.ROWS,
    *kind_rows.ROWS,
    *trace_rows.ROWS,
    *tune_rows.ROWS,
    *simulation_rows.ROWS,
    *system_rows.ROWS,
    *pair_rows.ROWS,
)


def select(pattern: str) -> list[Row]:
    """Rows whose name holds the pattern (which may have wildcards). Raises BenchError."""
    rows = [row for row in ROWS if fnmatch.fnmatch(row.name, f"*{pattern}*")]
    if not rows:
        raise BenchError(
            f"no row matches {pattern!r}; there are: {', '.join(r.name for r in ROWS)}"
        )
    return rows


async def run(config: Config, rows: Sequence[Row], scale: Scale, console: Console) -> list[Outcome]:
    """Measure rows one after the other; one that fails does not keep the others from it."""
    outcomes = []
    async with Bench(config, scale, lambda line: console.print(f"[dim]{line}[/]")) as bench:
        for number, row in enumerate(rows, start=1):
            console.print(f"[dim]{number}/{len(rows)}[/] {row.name}", highlight=False)
            begin = time.monotonic()
            measurement, error = None, ""
            try:
                measurement = await row.measure(bench)
            except BenchError as failure:
                error = str(failure)
            outcomes.append(Outcome(row, measurement, error, time.monotonic() - begin))
        console.print("[dim]stopping everything[/]")
    return outcomes


async def _until_signal(
    config: Config, rows: Sequence[Row], scale: Scale, console: Console
) -> list[Outcome]:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await run(config, rows, scale, console)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="", help="only rows whose name holds this pattern")
    parser.add_argument("--config", type=Path, default=ROOT / "deploy" / "config" / "local.toml")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "bench.json")
    parser.add_argument("--quick", action="store_true", help="try every path, measure nothing")
    options = parser.parse_args()
    console = Console(stderr=True)
    try:
        rows = select(options.rows)
        config = load_config(options.config)
        scale = QUICK if options.quick else Scale()
        outcomes = asyncio.run(_until_signal(config, rows, scale, console))
    except (BenchError, ForerunError) as error:
        sys.exit(f"bench: {error}")
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit("bench: interrupted; everything is stopped")
    facts = machine()
    write_json(outcomes, facts, options.output)
    # Wide enough for every column, into a file too.
    print_table(outcomes, facts, Console(width=max(110, console.width)))
    sys.exit(1 if any(outcome.measurement is None for outcome in outcomes) else 0)


if __name__ == "__main__":
    main()
