"""What a sequence's remote drafter has drafted, by the outcome each draft is for.

Pure policy; knows nothing of clocks, sockets or the sequence. An outcome is a key: base length of
the block, tokens accepted, the target's token behind them. While no block is at the target, the
last one's outcome is known, and the drafter is asked for what comes next; while one is, it may
draft ahead for those outcomes that are likely. What is found there costs no time at all.
"""

from dataclasses import dataclass, field

from core.types import Branch, Plan, Rule
from orchestrator.branches import usable_branch
from orchestrator.foresight import Foresight

Key = tuple[int, int, int]


@dataclass(slots=True)
class Outcome:
    """A verdict, as plans name it: `accepted` draft tokens, then the last token."""

    base_length: int
    accepted: int


@dataclass(slots=True)
class Plans:
    """The branches at hand. `is_ahead`: the drafter was asked to draft ahead of the block that is
    at the target. `settled`: outcomes up to this base length were foreseen, or have been counted as
    missed: each is missed once, however many plans come for it. `asked_for`: the base length that
    the drafter was asked last to draft for, -1 where that was not foreseen; `asked_at`: when.
    `overdue`: the same of what had no answer at the last verdict."""

    branches: dict[Key, Branch] = field(default_factory=dict)
    is_ahead: bool = False
    settled: int = -1
    asked_for: int = -1
    asked_at: float = 0.0
    is_answered: bool = False
    overdue: dict[int, float] = field(default_factory=dict)

    def ask(self, base_length: int, now: float, is_ahead: bool = False) -> None:
        """The drafter is asked; what it is at already is not asked for again."""
        self.is_ahead = is_ahead
        if self.asked_for != base_length:
            self.asked_for, self.asked_at, self.is_answered = base_length, now, False

    def time(self, plan: Plan, now: float, draft_s: float, foresight: Foresight) -> None:
        """Let `foresight` know how long the first answer to what was asked took, and drafting alone
        (`draft_s`), if it is this one and has a draft. Also to what nobody waits for any more: else
        a drafter that was slow once would never be waited for again."""
        asked_at = self.overdue.pop(plan.base_length, None)
        if self.asked_for == plan.base_length and not self.is_answered:
            self.is_answered, asked_at = True, self.asked_at
        num_tokens = max((len(each.draft_token_ids) for each in plan.branches), default=0)
        if asked_at is not None and num_tokens:
            foresight.time(now - asked_at, draft_s, num_tokens)

    def take(
        self, plan: Plan, known: Key, block: int | None, rule: Rule, num_ids: int
    ) -> list[str]:
        """Keep the branches of a plan for `known`, the last outcome, or for the block at the
        target, which has base length `block` (None: there is none).

        Returns why something of it cannot be used: as `usable_branch`; "late" when its block was
        decided; "not_enumerated" when the known outcome is not among its branches.
        """
        if plan.base_length < known[0] or (block is not None and plan.base_length < block):
            return [] if known in self.branches else self._miss("late", plan.base_length)
        causes = []
        for branch in plan.branches:
            usable, cause = usable_branch(branch, rule, num_ids)
            causes += [cause] if cause else []
            self.branches[plan.base_length, branch.accepted, branch.token] = usable
        if plan.base_length == known[0] and known not in self.branches:
            causes += self._miss("not_enumerated", known[0])
        return causes

    def decide(self, outcome: Key, num_draft_tokens: int, foresight: Foresight) -> list[str]:
        """The block at the target, so many draft tokens, has this outcome: keep what was drafted
        for it, and let `foresight` know. Returns why there is nothing although the drafter was
        asked to draft ahead; else nothing. What comes behind a whole block is drafted last."""
        self.overdue = {} if self.is_answered else {self.asked_for: self.asked_at}
        known = 2 if outcome[1] == num_draft_tokens else 1
        num_ahead = sum(key[:known] == outcome[:known] for key in self.branches)
        self.branches = {key: each for key, each in self.branches.items() if key == outcome}
        was_ahead, self.is_ahead = self.is_ahead, False
        if was_ahead:
            is_hit = bool(self.branches) if num_ahead else None
            foresight.learn(had_draft=num_draft_tokens > 0, is_hit=is_hit)
        if self.branches:
            self.settled = outcome[0]
            return []
        if not was_ahead:
            return []
        if num_ahead:
            self.asked_for = -1
        return self._miss("not_enumerated" if num_ahead else "late", outcome[0])

    def clear(self) -> None:
        """The drafter is another one, or gone."""
        self.branches, self.is_ahead, self.settled, self.asked_for = {}, False, -1, -1
        self.overdue.clear()

    def _miss(self, cause: str, base_length: int) -> list[str]:
        """The cause, unless the outcome is settled; it is from now on."""
        if base_length <= self.settled:
            return []
        self.settled = base_length
        return [cause]
