"""What a sequence's remote drafter has drafted, by the outcome each draft is for.

Pure policy; knows nothing of clocks, sockets or the sequence. An outcome is a key: base length of
the block, tokens accepted, the target's token behind them. While no block is at the target, the
last one's outcome is known, and the drafter is asked for what comes next; while one is, it may
draft ahead for those outcomes that are likely. What is found there costs no time at all.
"""

from dataclasses import dataclass, field

from core.types import Branch, Plan, Rule
from orchestrator.branches import usable_branch

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
    missed: each is missed once, however many plans come for it. `asked`: the base length that the
    drafter was asked last to draft for and when; None once it has answered."""

    branches: dict[Key, Branch] = field(default_factory=dict)
    is_ahead: bool = False
    settled: int = -1
    asked: tuple[int, float] | None = None

    def ask(self, base_length: int, now: float) -> None:
        """The drafter is asked; what it is at already is not asked for again."""
        if self.asked is None or self.asked[0] != base_length:
            self.asked = base_length, now

    def answered(self, plan: Plan, now: float) -> float:
        """The drafter answers; seconds since it was asked for that, or 0.0 if it was not."""
        if self.asked is None or self.asked[0] != plan.base_length:
            return 0.0
        asked_at, self.asked = self.asked[1], None
        return now - asked_at

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

    def decide(self, outcome: Key) -> list[str]:
        """The block at the target has this outcome: keep what was drafted for it. Returns why there
        is nothing although the drafter was asked to draft ahead; else nothing."""
        num_ahead = sum(key[0] == outcome[0] for key in self.branches)
        self.branches = {key: each for key, each in self.branches.items() if key == outcome}
        was_ahead, self.is_ahead = self.is_ahead, False
        if self.branches:
            self.settled = outcome[0]
            return []
        if not was_ahead:
            return []
        return self._miss("not_enumerated" if num_ahead else "late", outcome[0])

    def clear(self) -> None:
        """The drafter is another one, or gone."""
        self.branches, self.is_ahead, self.settled, self.asked = {}, False, -1, None

    def _miss(self, cause: str, base_length: int) -> list[str]:
        """The cause, unless the outcome is settled; it is from now on."""
        if base_length <= self.settled:
            return []
        self.settled = base_length
        return [cause]
