"""How much of each draft to verify: the lengths with the most expected tokens per second.

Pure policy: knows nothing of clocks or sockets. A draft token costs verify time and pays with the
chance that it is accepted. The cost is learned from measured verify times by batch size, the chance
from each sequence's own history, and lengths (0 included) are chosen for a whole micro-batch at
once. They depend on history only, never on what the draft says.

    goodput(m) = (rows + the m largest chances) / time(tokens + m)       take the best m
"""

from collections.abc import Sequence as Rows

from orchestrator.pipeline import Acceptance

_SMOOTHING = 0.15
_MIN_CHANCE = 0.02


class VerifyCost:
    """Seconds a forward takes, by its number of tokens: measured points, straight lines between."""

    def __init__(self) -> None:
        self._points: dict[int, float] = {}

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Take in one measured forward."""
        bucket = _bucket(num_tokens)
        known = self._points.get(bucket, seconds)
        self._points[bucket] = known + _SMOOTHING * (seconds - known)

    def curve(self, first: int, last: int) -> list[float]:
        """Expected seconds for `first` to `last` tokens; never falling. All 1.0 when unknown.

        Flat beyond the largest measured size: a draft is thought free until it is seen to cost.
        """
        points = sorted(self._points.items())
        if not points:
            return [1.0] * (last - first + 1)
        costs: list[float] = []
        for num_tokens in range(first, last + 1):
            cost = _interpolate(points, num_tokens)
            costs.append(max(cost, costs[-1]) if costs else cost)
        return costs


def _interpolate(points: list[tuple[int, float]], num_tokens: int) -> float:
    below = [p for p in points if p[0] <= num_tokens]
    above = [p for p in points if p[0] > num_tokens]
    if not below:
        return above[0][1]
    if not above:
        return below[-1][1]
    (x0, y0), (x1, y1) = below[-1], above[0]
    return y0 + (y1 - y0) * (num_tokens - x0) / (x1 - x0)


def _bucket(num_tokens: int) -> int:
    """Sizes below 16 stand alone; larger ones are rounded to about a tenth of their size."""
    step = max(1, 1 << max(0, num_tokens.bit_length() - 4))
    return (num_tokens + step // 2) // step * step


class Controller:
    """Chooses draft lengths. With `is_adaptive` off every draft is verified whole."""

    def __init__(self, is_adaptive: bool = True) -> None:
        self.is_adaptive = is_adaptive
        self.cost = VerifyCost()

    def allot(
        self, drafts: Rows[tuple[Acceptance, int]], num_rows: int, num_tokens: int
    ) -> list[int]:
        """Draft tokens to verify per row.

        drafts: (acceptance history, length of the draft at hand) of each row that has a draft.
        num_rows: rows of the batch, with or without. num_tokens: its tokens without any draft.
        """
        lengths = [length for _, length in drafts]
        if not self.is_adaptive or not any(lengths):
            return lengths
        gains = sorted(
            (
                (acceptance.chance(j), -j, row)
                for row, (acceptance, length) in enumerate(drafts)
                for j in range(1, length + 1)
                if acceptance.chance(j) >= _MIN_CHANCE
            ),
            reverse=True,
        )
        costs = self.cost.curve(num_tokens, num_tokens + len(gains))
        expected, best, best_goodput = float(num_rows), 0, num_rows / costs[0]
        for taken, (gain, _, _) in enumerate(gains, start=1):
            expected += gain
            if expected / costs[taken] > best_goodput:
                best, best_goodput = taken, expected / costs[taken]
        allotted = [0] * len(drafts)
        for _, _, row in gains[:best]:
            allotted[row] += 1
        return allotted
