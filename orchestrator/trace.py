"""What one engine sent and received, and when: the raw material of a timeline.

A Recorder is handed to `Engine.record`; from then on every message to and from a verifier or a
drafter is noted with the time at which the engine handed it over or was handed it. Nothing is
computed and nothing is copied meanwhile. `orchestrator.timeline` makes sense of the records.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from core.types import DraftCommands, DraftPlans, VerifyBatch, VerifyResult

Message = VerifyBatch | VerifyResult | DraftCommands | DraftPlans


@dataclass(frozen=True, slots=True)
class Record:
    """A message and when it passed, in nanoseconds of the recorder's clock.

    The message's type says whether it came or went, and whether `replica` is a verifier.
    """

    at_ns: int
    replica: str
    message: Message


class Recorder:
    """Notes messages in the order in which they pass."""

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.records: list[Record] = []
        self._clock = clock

    def note(self, replica: str, message: Message) -> None:
        """A message went to the replica, or came from it."""
        self.records.append(Record(self._clock(), replica, message))


class CpuClock:
    """CPU time of this thread and of the whole process since it was made, in seconds.

    Made and read in the event loop's thread. The rest of the process is gRPC's own threads.
    """

    def __init__(self) -> None:
        self._thread_ns, self._process_ns = time.thread_time_ns(), time.process_time_ns()

    @property
    def thread_s(self) -> float:
        """Of the calling thread."""
        return (time.thread_time_ns() - self._thread_ns) / 1e9

    @property
    def process_s(self) -> float:
        """Of all threads."""
        return (time.process_time_ns() - self._process_ns) / 1e9
