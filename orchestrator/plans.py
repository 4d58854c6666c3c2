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
    at the target."""

    branches: dict[Key, Branch] = field(default_factory=dict)
    is_ahead: bool = False

    def take(
        self, plan: Plan, known: Key, block: int | None, rule: Rule, num_ids: int
    ) -> list[str]:
        """Keep the branches of a plan for `known`, the last outcome, or for the block at the
        target, which has base length `block` (None: there is none).

        Returns why something of it cannot be used: as `usable_branch`; "late" when its block was
        decided; "not_enumerated" when the known outcome is not among its branches.
        """
        if plan.base_length < known[0] or (block is not None and plan.base_length < block):
            return [] if known in self.branches else ["late"]
        causes = []
        for branch in plan.branches:
            usable, cause = usable_branch(branch, rule, num_ids)
            causes += [cause] if cause else []
            self.branches[plan.base_length, branch.accepted, branch.token] = usable
        if block is None and known not in self.branches:
            causes.append("not_enumerated")
        return causes

    def decide(self, outcome: Key) -> str:
        """The block at the target has this outcome: keep what was drafted for it. Returns why there
        is nothing although the drafter was asked to draft ahead, or ""."""
        num_ahead = sum(key[0] == outcome[0] for key in self.branches)
        self.branches = {key: each for key, each in self.branches.items() if key == outcome}
        was_ahead, self.is_ahead = self.is_ahead, False
        if self.branches or not was_ahead:
            return ""
        return "not_enumerated" if num_ahead else "late"

    def clear(self) -> None:
        """The drafter is another one, or gone."""
        self.branches, self.is_ahead = {}, False
