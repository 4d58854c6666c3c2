"""Who runs, and what goes into the next micro-batch.

Pure policy: knows nothing of clocks, sockets or models; time is passed in. Requests wait in
arrival order for a verifier slot. A micro-batch takes every row that can go: rows whose plan has
come, rows that expect none, rows that waited long enough, and chunks of prompts in the room that
is left. While a row may still get its plan in time, the batch waits for it: a merged batch costs
less than two. A target over several devices gets a micro-batch for each instead: decoding rows are
divided evenly, and a batch waits for plans only until it has its share of rows.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from core.errors import OverloadedError
from core.types import VerifyRow
from orchestrator.affinity import PrefixAffinity
from orchestrator.controller import Controller
from orchestrator.pipeline import Sequence
from orchestrator.pool import Pool


@dataclass(frozen=True, slots=True)
class Selection:
    """The rows to send now, or (with no rows) the time at which to look again, if any."""

    rows: tuple[VerifyRow, ...] = ()
    wake_at: float | None = None


class Scheduler:
    """Admission in arrival order, micro-batches by readiness.

    max_queue: requests that may wait for a slot.
    patience_s: how long a row waits for its plan.
    max_prefill_tokens: prompt tokens beside decoding rows in one batch.
    max_prefill_slowdown: how many times as long as without them such a batch may take from a
        prompt's second chunk on, where the prompts that wait are no more than the streams that run;
        more prompts may take more. The first chunk finds out how much of a prompt is cached.
    controller: chooses how much of each draft is verified.
    """

    def __init__(
        self,
        max_queue: int,
        patience_s: float,
        max_prefill_tokens: int,
        max_prefill_slowdown: float = 2.5,
        controller: Controller | None = None,
    ) -> None:
        self.controller = controller or Controller()
        self.max_queue = max_queue
        self.patience_s = patience_s
        self.max_prefill_tokens = max_prefill_tokens
        self.max_prefill_slowdown = max_prefill_slowdown
        self.waiting: deque[Sequence] = deque()
        self._affinity = PrefixAffinity()

    def enqueue(self, sequence: Sequence, num_free_slots: int) -> None:
        """Queue a new request. Raises OverloadedError when slots and queue are full."""
        if len(self.waiting) >= num_free_slots + self.max_queue:
            raise OverloadedError(
                f"the queue is full: {len(self.waiting)} requests wait for a slot"
                f" (orchestrator.max_queue = {self.max_queue})"
            )
        self.waiting.append(sequence)

    def requeue(self, sequences: Iterable[Sequence]) -> None:
        """Put running sequences that lost their slot back in front, in their order of arrival."""
        for sequence in sorted(sequences, key=lambda s: s.id, reverse=True):
            self.waiting.appendleft(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Take a sequence out of the queue, if it waits there."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)

    def admit(self, verifiers: Pool) -> list[Sequence]:
        """Give waiting sequences the free slots, oldest first, least loaded verifier first, or one
        that is hardly fuller and has read the same beginning before."""
        admitted = []
        while self.waiting:
            replica = self._affinity.choose(verifiers, self.waiting[0].tokens)
            if replica is None:
                break
            sequence = self.waiting.popleft()
            replica.take(sequence.id)
            sequence.assign_verifier(replica.replica_id)
            admitted.append(sequence)
        return admitted

    def select(
        self, sequences: Iterable[Sequence], budget: int, now: float, num_parts: int = 1
    ) -> Selection:
        """Form the next micro-batch of one verifier, at most `budget` tokens long, with a share of
        its decoding rows if it works on `num_parts` batches side by side."""
        running = list(sequences)
        idle = [s for s in running if s.row is None]
        waiting, ready, deadlines = [], [], []
        for sequence in idle:
            deadline = sequence.plan_deadline(self.patience_s)
            if deadline is not None and deadline > now:
                waiting.append(sequence)
                deadlines.append(deadline)
                continue
            ready.append(sequence)
            if deadline is not None:
                sequence.give_up_plan()
        num_decoding = sum(s.num_unverified == 1 for s in running)
        share = -(-num_decoding // num_parts)
        if waiting and num_parts > 1 and sum(s.num_unverified == 1 for s in ready) >= share:
            idle = ready
        elif waiting and self._pays(waiting, idle, now):
            return Selection(wake_at=min(deadlines))
        return Selection(self._fill(idle, budget, share, num_decoding))

    def _pays(self, waiting: list[Sequence], idle: list[Sequence], now: float) -> bool:
        """Whether the drafts that some wait for bring more than all lose by it; always where nobody
        drafts ahead of a row that goes without."""
        if not all(s.max_branches for s in waiting):
            return True
        rates = sum(s.foresight.tokens_per_round(_tokens_with_draft(s)) for s in idle)
        rates /= self.controller.costs.seconds(len(idle), 0)
        gain = sum(s.foresight.worth(_tokens_with_draft(s)) for s in waiting)
        return gain > rates * max(_plan_wait_s(s, now) for s in waiting)

    def _fill(
        self, idle: list[Sequence], budget: int, share: int, num_streams: int
    ) -> tuple[VerifyRow, ...]:
        """Rows in the order of importance: decoding (at most `share`), their drafts, then chunks of
        prompts. `num_streams`: rows that decode, here or in other batches."""
        decoding = [s for s in idle if s.num_unverified == 1][: min(budget, share)]
        prompts = [s for s in idle if s.num_unverified > 1]
        room = budget - len(decoding)
        chunks: list[tuple[Sequence, int]] = []
        prefill = bounded = room
        if num_streams:
            prefill = min(room, self.max_prefill_tokens)
            bounded = min(prefill, self._chunk(num_streams, len(prompts)))
        for sequence in prompts:
            limit = prefill if sequence.is_unread else min(prefill, bounded)
            size = min(limit, sequence.num_unverified)
            if size > 0:
                chunks.append((sequence, size))
                prefill, bounded, room = prefill - size, bounded - size, room - size
        drafts = [(s.acceptance, len(s.draft_at_hand())) for s in decoding]
        lengths = self.controller.allot(drafts, len(decoding), sum(size for _, size in chunks))
        ending = [s for s, size in chunks if size == s.num_unverified]
        self._judge(decoding + ending)
        rows = []
        for sequence, length in zip(decoding, lengths, strict=True):
            rows.append(sequence.next_row(1, min(length, room)))
            room -= len(rows[-1].draft_token_ids)
        for sequence, size in chunks:
            rows.append(sequence.next_row(size, room))
            room -= len(rows[-1].draft_token_ids)
        return tuple(rows)

    def _chunk(self, num_streams: int, num_prompts: int) -> int:
        """Tokens of long prompts beside streams that run: the time that each stream loses is
        weighed against the prompts that wait."""
        slowdown = 1 + (self.max_prefill_slowdown - 1) * max(1.0, num_prompts / num_streams)
        chunk = self.controller.costs.chunk(num_streams, slowdown)
        return self.max_prefill_tokens if chunk is None else min(self.max_prefill_tokens, chunk)

    def _judge(self, decoding: list[Sequence]) -> None:
        """Note for each row how long a draft would be worth verifying, if it had one."""
        if self.controller.is_adaptive:
            is_near = [bool(s.near.pool) for s in decoding]
            longest = [
                (s.histories.model if near else s.histories.best, s.longest_draft)
                for s, near in zip(decoding, is_near, strict=True)
            ]
            worthwhile = self.controller.allot(longest, len(decoding), is_near=is_near)
            for sequence, length in zip(decoding, worthwhile, strict=True):
                sequence.num_worthwhile = length
                if sequence.max_branches or (sequence.drafter and not sequence.near.pool):
                    sequence.num_worthwhile = sequence.foresight.best_length(
                        sequence.histories.best,
                        length,
                        lambda k: self.controller.costs.seconds(len(decoding), k),
                        bool(sequence.max_branches),
                    )


def _tokens_with_draft(sequence: Sequence) -> float:
    """Tokens expected of a round that has a draft."""
    return sequence.histories.model.tokens(sequence.num_draft_tokens)


def _plan_wait_s(sequence: Sequence, now: float) -> float:
    """How much longer until the plan is expected that a row waits for. One that was asked for
    before the outcome was known may lack it: when it is overdue, another is made since then."""
    asked_at, wait_s = sequence.plans.asked_at, sequence.foresight.wait_s
    is_ahead = asked_at < sequence.wanted_at
    due_at = asked_at + wait_s(sequence.num_wanted + is_ahead)
    if is_ahead and due_at < now:
        due_at = sequence.wanted_at + wait_s(sequence.num_wanted)
    return due_at - now
