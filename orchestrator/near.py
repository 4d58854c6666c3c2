"""The drafter beside the target, as one sequence sees it: whose drafts come with its verdicts.

Pure policy; knows nothing of clocks, sockets or the pools. Either it is the sequence's own drafter,
or the fallback of a remote one, whose plan may be late. Its draft is for the known outcome only.
"""

from dataclasses import dataclass

from core.types import Branch, Rule, Verdict
from orchestrator.branches import usable_branch


@dataclass(slots=True)
class NearDrafter:
    """No drafter while `pool` is empty. `branch` is the draft that came with the last verdict."""

    pool: str = ""
    limit: int = 0
    is_fallback: bool = False
    branch: Branch | None = None

    @property
    def is_own(self) -> bool:
        """Whether it is the sequence's drafter, not a fallback."""
        return bool(self.pool) and not self.is_fallback

    def use(self, pool: str, limit: int, is_fallback: bool) -> None:
        """Draft up to `limit` tokens a time with the drafter of `pool`."""
        self.pool, self.limit, self.is_fallback = pool, limit, is_fallback

    def take(self, verdict: Verdict, last_token: int, rule: Rule, num_ids: int) -> str:
        """Keep the draft that came with the verdict just committed; what of it is wrong, or "".

        A commit that was cut at a stop ends with another token, and needs no draft.
        """
        if not self.pool or verdict.token_ids[-1:] != (last_token,):
            return ""
        branch = Branch(
            verdict.accepted,
            last_token,
            verdict.next_draft_token_ids,
            verdict.next_draft_distributions,
            verdict.next_draft_is_copy,
        )
        self.branch, cause = usable_branch(branch, rule, num_ids)
        return cause
