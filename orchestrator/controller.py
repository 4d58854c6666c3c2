"""How much of each draft to verify: the lengths with the most expected tokens per second.

Pure policy: knows nothing of clocks or sockets. A draft token costs verify time and pays with the
chance that it is accepted. The cost is learned from measured verify times by batch size, the chance
from each sequence's own history, and lengths (0 included) are chosen for a whole micro-batch at
once. They depend on history only, never on what the draft says.

    goodput(m) = (rows + the m largest chances) / seconds(tokens + m)       take the best m
"""

from collections.abc import Sequence as Rows

#: No draft is longer; what a sequence may ask for before the controller knows better.
MAX_DRAFT_TOKENS = 64
_MIN_CHANCE = 0.02


class Acceptance:
    """How likely a sequence's draft tokens are accepted, from its own recent history.

    Two numbers: the chance of the first draft token, and of each further one when those before it
    were accepted (for prompt lookup they differ much: once a copy is right it stays right). Steps
    without a draft let both drift back to the optimistic start, so that drafting is tried again.
    """

    _START, _WEIGHT, _DRIFT = 0.6, 0.12, 0.01

    def __init__(self) -> None:
        self.first = self._START
        self.further = self._START

    def observe(self, num_draft_tokens: int, accepted: int) -> None:
        """Take in one verdict."""
        if num_draft_tokens == 0:
            self.first += self._DRIFT * (self._START - self.first)
            self.further += self._DRIFT * (self._START - self.further)
            return
        self.first += self._WEIGHT * ((accepted > 0) - self.first)
        for _ in range(accepted - 1):
            self.further += self._WEIGHT * (1.0 - self.further)
        if 0 < accepted < num_draft_tokens:
            self.further -= self._WEIGHT * self.further

    def chance(self, j: int) -> float:
        """Chance that the first `j` (at least 1) draft tokens are all accepted."""
        return float(self.first * self.further ** (j - 1))


class VerifyCost:
    """Seconds a forward takes, by its number of tokens: a line through what was measured lately.

    Old measurements fade, and so does the slope when all batches are of one size: a draft is
    thought free until it is seen to cost. A hiccup of the machine counts as a slow batch at most.
    """

    _KEEP, _MAX_SURPRISE, _RIDGE = 0.98, 2.0, 0.1

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Take in one measured forward of decoding rows."""
        if self._weight > 4:
            seconds = min(seconds, self._MAX_SURPRISE * self.seconds(num_tokens))
        terms = (1.0, num_tokens, seconds, num_tokens**2, num_tokens * seconds)
        known = (self._weight, self._x, self._y, self._xx, self._xy)
        self._weight, self._x, self._y, self._xx, self._xy = (
            self._KEEP * old + new for old, new in zip(known, terms, strict=True)
        )

    def seconds(self, num_tokens: int) -> float:
        """Expected seconds; 1.0 whatever the size while nothing is known."""
        if self._weight == 0:
            return 1.0
        x, y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - x * x
        slope = max(0.0, (self._xy / self._weight - x * y) / (variance + self._RIDGE))
        return max(y + slope * (num_tokens - x), 0.1 * y)


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
                (chance, -j, row)
                for row, (acceptance, length) in enumerate(drafts)
                for j in range(1, length + 1)
                if (chance := acceptance.chance(j)) >= _MIN_CHANCE
            ),
            reverse=True,
        )
        expected, best = float(num_rows), 0
        best_goodput = expected / self.cost.seconds(num_tokens)
        for taken, (gain, _, _) in enumerate(gains, start=1):
            expected += gain
            goodput = expected / self.cost.seconds(num_tokens + taken)
            if goodput > best_goodput:
                best, best_goodput = taken, goodput
        allotted = [0] * len(drafts)
        for _, _, row in gains[:best]:
            allotted[row] += 1
        return allotted
