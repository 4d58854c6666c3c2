"""What a synthetic target says, and other numbers that depend on seed and position alone.

So a text, and whether a draft is right, never depends on time, batches or what was asked before.
"""

import random
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from core.types import ModelIdentity

VOCAB_SIZE: Final = 32_000
IDENTITY: Final = ModelIdentity("synthetic", VOCAB_SIZE)


class Luck:
    """Numbers in [0, 1) that are a function of (seed, position): a stream of them per seed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._streams: dict[int, tuple[random.Random, list[float]]] = {}

    def at(self, seed: int, position: int) -> float:
        """The number."""
        if seed not in self._streams:
            self._streams[seed] = random.Random(f"{self._name} {seed}"), []
        source, values = self._streams[seed]
        while len(values) <= position:
            values.append(source.random())
        return values[position]


class Text:
    """What the target says. `recorded` are texts by seed, prompts included, as they were once
    generated; where there are none the text is random."""

    def __init__(self, recorded: Mapping[int, Sequence[int]] = MappingProxyType({})) -> None:
        self._recorded = recorded
        self._luck = Luck("text")

    def token(self, seed: int, position: int) -> int:
        """The token at a position of the text of `seed`."""
        known = self._recorded.get(seed, ())
        if position < len(known):
            return known[position]
        return int(self._luck.at(seed, position) * VOCAB_SIZE)
