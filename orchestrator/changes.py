"""Waiting for a state of the engine: one announces changes, others wait until a condition holds.

Knows nothing of what changes. One event loop uses it.
"""

import asyncio
import contextlib
from collections.abc import Callable


class Changes:
    """Tells those who wait that something changed."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def announce(self) -> None:
        """Something changed: conditions are looked at again."""
        self._changed.set()

    async def until(self, condition: Callable[[], bool], limit_s: float | None = None) -> bool:
        """Wait until a condition holds, for at most `limit_s` seconds; whether it does.

        What the condition raises ends the wait.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        return condition()
