"""When clients get their blocks: once the services have what they need to go on.

Clients take the same core as drafters and the engine's loop: a block that is delivered while a plan
is awaited delays the plan, and with it the target. So it waits for the plan, but only a moment.
Knows nothing of blocks or streams: a delivery is a call.
"""

import asyncio
from collections.abc import Callable

_DELAY_S = 0.003


class Deliveries:
    """Calls to be made soon, in order. One event loop uses it."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []
        self._timer: asyncio.TimerHandle | None = None

    def add(self, deliver: Callable[[], None]) -> None:
        """Have a call made at the next `flush` that is urgent, or a moment after one that isn't."""
        self._waiting.append(deliver)

    def flush(self, is_urgent: bool) -> None:
        """Make the calls that wait: now, or in a moment when a plan may still come."""
        if not is_urgent and self._waiting:
            if self._timer is None:
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(_DELAY_S, self.flush, True)
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, []
        for deliver in waiting:
            deliver()
