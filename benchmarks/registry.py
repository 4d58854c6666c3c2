"""What a row of the benchmark is: a name, a mark to reach, and a function that measures.

    @row("plain_8_clients", unit="tokens/s", at_least=1.4)
    async def plain_8_clients(bench: Bench) -> Measurement: ...

    ROWS = (plain_8_clients,)

The decorator makes a Row of the function; a module of rows ends with the tuple of its own, and
`benchmarks.bench` runs the modules it lists. The function gives runs of ours and of the peer,
taken in turns, one pair per run. Knows nothing of how anything is measured.
"""

import math
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.context import Bench


@dataclass(frozen=True, slots=True)
class Measurement:
    """Runs of ours and of the peer in the row's unit, run i of one beside run i of the other."""

    ours: Sequence[float]
    peer: Sequence[float]
    notes: Sequence[str] = ()

    @property
    def ratio(self) -> float:
        """Median of ours over median of the peer."""
        return statistics.median(self.ours) / statistics.median(self.peer)

    @property
    def spread(self) -> tuple[float, float]:
        """Smallest and largest ratio of one pair of runs."""
        ratios = [ours / peer for ours, peer in zip(self.ours, self.peer, strict=True)]
        return min(ratios), max(ratios)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. `at_most` and `at_least` are marks of the ratio; both may be None."""

    name: str
    unit: str
    measure: Callable[["Bench"], Awaitable[Measurement]]
    at_most: float | None = None
    at_least: float | None = None

    def holds(self, ratio: float) -> bool | None:
        """Whether the marks are met; None without any."""
        if self.at_most is None and self.at_least is None:
            return None
        low = -math.inf if self.at_least is None else self.at_least
        return low <= ratio <= (math.inf if self.at_most is None else self.at_most)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A measured row, or the error that kept it from being measured."""

    row: Row
    measurement: Measurement | None
    error: str = ""
    seconds: float = field(default=0.0, compare=False)

    @property
    def holds(self) -> bool | None:
        """Whether the mark is reached; an unmeasured row with a mark has missed it."""
        if self.measurement is None:
            return None if self.row.at_most is None and self.row.at_least is None else False
        return self.row.holds(self.measurement.ratio)

    @property
    def _better(self) -> str:
        if self.row.at_most is None:
            return "higher"
        return "lower" if self.row.at_least is None else "nearer to 1"

    def as_json(self) -> dict[str, Any]:
        """The row as it stands in build/bench.json."""
        measured = self.measurement
        mark = self.row.at_most if self.row.at_most is not None else self.row.at_least
        return {
            "name": self.row.name,
            "ours": statistics.median(measured.ours) if measured else None,
            "peer": statistics.median(measured.peer) if measured else None,
            "unit": self.row.unit,
            "ratio": measured.ratio if measured else None,
            "mark": mark,
            "better": self._better,
            "holds": self.holds,
            "spread": list(measured.spread) if measured else None,
            "notes": list(measured.notes) if measured else [self.error],
        }


def row(
    name: str, unit: str, *, at_most: float | None = None, at_least: float | None = None
) -> Callable[[Callable[["Bench"], Awaitable[Measurement]]], Row]:
    """Make a Row of a measuring function."""

    def decorate(measure: Callable[["Bench"], Awaitable[Measurement]]) -> Row:
        return Row(name, unit, measure, at_most, at_least)

    return decorate
