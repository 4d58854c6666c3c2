"""What stands between an engine and its services in the tests of drafting ahead.

A Gate holds verdicts back until the drafters have done what a test is about; a Wire delays, drops
and repeats what passes, by a schedule. Neither looks at a clock. Put them there before the first
request; they stay until the stack is gone, or until they are taken away.
"""

import asyncio
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from core.types import DraftCommands, DraftPlans, Verdict, VerifyResult
from orchestrator import pipeline
from tests.harness import Stack


class Gate:
    """Holds verdicts back.

    is_foreseen: until there is a branch for the outcome of each sequence that is drafted ahead for;
        only with drafters that are never wrong.
    stop: from the first result on that has a sequence of which this is true; `reached` is set.
    """

    def __init__(
        self,
        stack: Stack,
        is_foreseen: bool = True,
        stop: Callable[[pipeline.Sequence], bool] = lambda sequence: False,
    ) -> None:
        self.reached = asyncio.Event()
        self._sequences = stack.engine._sequences
        self._is_foreseen, self._stop = is_foreseen, stop
        self._held: deque[VerifyResult] = deque()
        [verifier] = stack.engine._verifying._clients.values()
        self._deliver = verifier._on_message
        verifier._on_message = self._take
        for client in stack.engine._drafting._clients.values():
            client._on_message = self._then_release(client._on_message)

    def open(self) -> None:
        """Hold nothing back any more."""
        self._is_foreseen, self._stop = False, lambda sequence: False
        self._release()

    def _take(self, result: VerifyResult) -> None:
        self._held.append(result)
        self._release()

    def _then_release(self, deliver: Callable[[DraftPlans], None]) -> Callable[[DraftPlans], None]:
        def delivered(plans: DraftPlans) -> None:
            deliver(plans)
            self._release()

        return delivered

    def _release(self) -> None:
        while self._held and all(map(self._may_pass, self._held[0].verdicts)):
            self._deliver(self._held.popleft())

    def _may_pass(self, verdict: Verdict) -> bool:
        sequence = self._sequences.get(verdict.sequence)
        if sequence is None:
            return True
        outcome = (len(sequence.tokens), verdict.accepted, *verdict.token_ids[-1:])
        is_awaited = self._is_foreseen and sequence.plans.is_ahead
        if is_awaited and outcome not in sequence.plans.branches:
            return False
        if self._stop(sequence):
            self.reached.set()
            return False
        return True


#: What may happen to a message: its copies, and after how many turns of the event loop each comes.
FATES: tuple[tuple[int, ...], ...] = ((0,), (0,), (0,), (1,), (20,), (200,), (0, 0), (0, 50), ())

#: A drafter may need as many turns as this to answer one that a message takes.
_VERDICT_TURNS = 10


class Wire:
    """Every message of one sequence is a message of its own and has the fate that comes next.

    What is late makes what follows for the same sequence late too; a copy comes on its own. A close
    and a verdict get there once, as they would: slots would never be free again.
    """

    def __init__(self, stack: Stack, fates: Sequence[int]) -> None:
        self._fates = itertools.cycle(fates)
        self._lanes: defaultdict[Any, deque[list[Any]]] = defaultdict(deque)
        self._is_turning = False
        self._loop = asyncio.get_running_loop()
        [verifier] = stack.engine._verifying._clients.values()
        self._restore = [(verifier, "_on_message", verifier._on_message)]
        verifier._on_message = self._verdicts(verifier._on_message)
        for name, client in stack.engine._drafting._clients.items():
            self._restore.append((client, "_on_message", client._on_message))
            client._on_message = self._split(client._on_message, (name, "plans"))
            client.send = self._split(client.send, (name, "commands"))  # type: ignore[method-assign]
            self._restore.append((client, "send", None))

    def remove(self) -> None:
        """Deliver what is on its way; from now on the wire is as good as any."""
        for client, name, method in self._restore:
            delattr(client, name) if method is None else setattr(client, name, method)
        while any(self._lanes.values()):
            self._turn()

    def _split(self, deliver: Callable[[Any], None], lane: tuple[str, str]) -> Callable[..., None]:
        def send(message: DraftCommands | DraftPlans) -> None:
            for sequence, part in _by_sequence(message):
                is_close = isinstance(part, DraftCommands) and bool(part.closes)
                self._put((*lane, sequence), deliver, part, is_kept=is_close)

        return send

    def _verdicts(self, deliver: Callable[[Any], None]) -> Callable[[VerifyResult], None]:
        def received(result: VerifyResult) -> None:
            self._put("verdicts", deliver, result, is_kept=True)

        return received

    def _put(self, lane: Any, deliver: Callable[[Any], None], message: Any, is_kept: bool) -> None:
        fate = FATES[next(self._fates)]
        copies = fate[:1] or (0,) if is_kept else fate
        if lane == "verdicts":
            copies = (_VERDICT_TURNS * copies[0],)
        for index, turns in enumerate(copies):
            self._lanes[lane, index].append([turns, deliver, message])
        if not self._is_turning:
            self._is_turning = True
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._turn()
        self._is_turning = any(self._lanes.values())
        if self._is_turning:
            self._loop.call_soon(self._go_on)

    def _turn(self) -> None:
        for lane in list(self._lanes.values()):
            while lane and lane[0][0] == 0:
                _, deliver, message = lane.popleft()
                deliver(message)
            if lane:
                lane[0][0] -= 1


def _by_sequence(message: Any) -> Iterator[tuple[int, Any]]:
    """A frame as frames of one sequence each; of commands and plans alike."""
    kinds = ("opens", "commits", "closes", "features", "sents", "plans", "need_opens")
    parts: defaultdict[int, defaultdict[str, tuple[Any, ...]]] = defaultdict(
        lambda: defaultdict(tuple)
    )
    for kind in kinds:
        for each in getattr(message, kind, ()):
            parts[each.sequence][kind] += (each,)
    for sequence, fields in parts.items():
        yield sequence, type(message)(**fields)
