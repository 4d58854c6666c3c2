"""What stands between an engine and its services in the tests of drafting ahead.

A Gate holds verdicts back until the drafters have done what a test is about; a Wire delays, drops
and repeats what passes between the engine and its drafters, by a schedule. Neither looks at a
clock.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

from core.types import DraftCommands, DraftPlans, Verdict, VerdictStatus, VerifyResult
from tests.harness import Stack


class Gate:
    """Holds verdicts back.

    With `is_foreseen`, until the branch for each outcome of a result that is drafted ahead for is
    there: for drafters that are never wrong. From the first block on that is drafted ahead of,
    behind `min_tokens` generated tokens, it stays closed until `open`.
    """

    def __init__(self, stack: Stack, is_foreseen: bool, min_tokens: int | None) -> None:
        self.reached = asyncio.Event()
        self._sequences = stack.engine._sequences
        self._is_foreseen, self._min_tokens = is_foreseen, min_tokens
        self._held: deque[VerifyResult] = deque()
        [verifier] = stack.engine._verifying._clients.values()
        self._deliver = verifier._on_message
        verifier._on_message = self._take
        for client in stack.engine._drafting._clients.values():
            client._on_message = self._after(client._on_message)

    @classmethod
    def before(cls, stack: Stack, *, is_foreseen: bool, min_tokens: int | None = None) -> Self:
        """Put one between a stack's engine and its only verifier."""
        return cls(stack, is_foreseen, min_tokens)

    def open(self) -> None:
        """Hold nothing back any more."""
        self._is_foreseen, self._min_tokens = False, None
        self._release()

    def _take(self, result: VerifyResult) -> None:
        self._held.append(result)
        self._release()

    def _after(self, deliver: Callable[[DraftPlans], None]) -> Callable[[DraftPlans], None]:
        def delivered(plans: DraftPlans) -> None:
            deliver(plans)
            self._release()

        return delivered

    def _release(self) -> None:
        while self._held and all(map(self._may_pass, self._held[0].verdicts)):
            if any(map(self._is_last, self._held[0].verdicts)):
                self.reached.set()
                return
            self._deliver(self._held.popleft())

    def _may_pass(self, verdict: Verdict) -> bool:
        sequence = self._sequences.get(verdict.sequence)
        if not self._is_foreseen or sequence is None or not sequence.plans.is_ahead:
            return True
        assert verdict.status is VerdictStatus.OK
        outcome = (len(sequence.tokens), verdict.accepted, verdict.token_ids[-1])
        return outcome in sequence.plans.branches

    def _is_last(self, verdict: Verdict) -> bool:
        sequence = self._sequences.get(verdict.sequence)
        if self._min_tokens is None or sequence is None or not sequence.plans.is_ahead:
            return False
        return sequence.num_generated >= self._min_tokens
