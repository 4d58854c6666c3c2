"""Drafting ahead: while a block is at the target, drafts for the outcomes it may have.

    Sent ──▶ begin: guesses shared out (fan_out.py) ──step──▶ .. ──step──▶ finished branches: a Plan
    Commit ─▶ decide: one branch stays, all others are forgotten

One step is one forward for all sequences, so that commands are taken in between. Knows the drafter
only as an `Ahead` sees it, and nothing of streams.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import structlog

from core.drafter import Ahead, AheadJob, Drafter
from core.types import Branch, DraftCommit
from drafter_service.fan_out import MAX_GUESSES, FanOut, Pace
from drafter_service.sequences import HeldSequence, Key

#: A sequence that has to read more first does so as others do.
_MAX_LAG = 32

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Work:
    """One block's outcomes in the making."""

    ahead: Ahead
    base_length: int
    block: tuple[int, ...]
    num_branches: int
    started_s: float
    drafts: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)

    def take_finished(self) -> list[Branch]:
        """Branches that were finished since the last call."""
        finished = list(self.ahead.branches[len(self.drafts) :])
        for branch in finished:
            self.drafts[branch.accepted, branch.token] = branch.draft_token_ids
        return finished


class AheadWork:
    """What is drafted ahead, of all sequences. Not thread-safe."""

    def __init__(self, drafter: Drafter, clock: Callable[[], float]) -> None:
        self._drafter = drafter
        self._clock = clock
        self._work: dict[int, _Work] = {}  # by handle
        self._fan_out = FanOut()
        self._pace = Pace()

    def has_work(self, held: HeldSequence) -> bool:
        """Whether `step` would do something for a sequence."""
        work = self._work.get(held.handle)
        return _may_begin(held) or (work is not None and not work.ahead.is_done)

    def step(self, sequences: Iterable[tuple[Key, HeldSequence]]) -> dict[Key, list[Branch]]:
        """Begin what may begin, then one step for all. Returns the branches it finished.

        A drafter that fails loses what it drafted ahead, and forgets the sequences it held.
        """
        busy = {key: held for key, held in sequences if self.has_work(held)}
        try:
            self._begin([held for held in busy.values() if _may_begin(held)])
            work = {key: self._work[held.handle] for key, held in busy.items()}
            going = [each for each in work.values() if not each.ahead.is_done]
            if going:
                started_s = self._clock()
                self._drafter.advance([each.ahead for each in going])
                num_branches = sum(each.num_branches for each in going)
                self._pace.time_step(num_branches, self._clock() - started_s)
            finished = {key: each.take_finished() for key, each in work.items()}
        except Exception:  # the boundary to a drafter: whatever it is, contain it
            _log.exception("draft_ahead_failed", kind=self._drafter.kind, num_sequences=len(busy))
            for held in busy.values():
                self._give_up(held)
            return {}
        return {key: branches for key, branches in finished.items() if branches}

    def decide(self, held: HeldSequence, commit: DraftCommit) -> bool:
        """The outcome of a block, before it is applied: keep its branch. Notes its draft, where it
        is finished, as the one that is known; returns whether the drafter has followed."""
        held.sent, held.known = None, ()
        work = self._work.pop(held.handle, None)
        accepted, token = commit.accepted, commit.token_ids[-1]
        if work is None or commit.base_length != work.base_length:
            return False
        if commit.token_ids[:-1] != work.block[:accepted]:
            return False
        self._pace.time_block(self._clock() - work.started_s)
        self._fan_out.learn(held.handle, len(work.block), accepted, token, work.ahead.guesses)
        try:
            has_followed = work.ahead.keep(accepted, token)
        except Exception:  # as above
            _log.exception("draft_ahead_failed", kind=self._drafter.kind, num_sequences=1)
            self._give_up(held)
            return False
        if has_followed:
            held.known = work.drafts.get((accepted, token), ())
        return has_followed

    def forget(self, handle: int) -> None:
        """A sequence is gone."""
        self._work.pop(handle, None)
        self._fan_out.forget(handle)

    def _begin(self, waiting: list[HeldSequence]) -> None:
        num_sequences = len(self._work) + len(waiting)
        for held in waiting:
            sent, held.sent = held.sent, None
            assert sent is not None
            block, length = held.known[: sent.num_draft_tokens], len(held.token_ids)
            num_steps = sent.next_draft_tokens + 1
            budget = self._pace.budget(held.max_branches, num_sequences, num_steps)
            fan_out = self._fan_out.split(held.handle, len(block), budget)
            job = AheadJob(
                sequence=held.handle,
                token_ids=held.token_ids,
                block=block,
                num_draft_tokens=sent.next_draft_tokens,
                sampling=held.sampling,
                fan_out=fan_out,
                num_unchanged=held.seen,
                num_guesses=min(held.max_branches, MAX_GUESSES),
            )
            ahead = self._drafter.begin_ahead(job)
            self._work[held.handle] = _Work(ahead, length, block, sum(fan_out), self._clock())
            held.seen = length

    def _give_up(self, held: HeldSequence) -> None:
        self._work.pop(held.handle, None)
        self._drafter.close(held.handle)
        held.sent, held.seen = None, 0


def _may_begin(held: HeldSequence) -> bool:
    """Whether a block is at the target, and nothing else has to be done for the sequence first."""
    return held.sent is not None and not held.wanted and held.lag <= _MAX_LAG
