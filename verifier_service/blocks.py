"""What the rules of verification take and give, one of each per sequence and step.

Knows nothing of the rules themselves.
"""

from dataclasses import dataclass

from core.noise import NO_TOKEN
from core.types import SamplingParams, SparseDistribution


@dataclass(frozen=True, slots=True)
class Block:
    """What one verdict is about: k drafted tokens, the first to stand at `position`.

    distributions: what each was sampled from, for the rules that look at it; empty stands for a
    deterministic draft.
    """

    params: SamplingParams
    position: int
    draft_token_ids: tuple[int, ...] = ()
    distributions: tuple[SparseDistribution, ...] = ()

    @property
    def num_rows(self) -> int:
        """Rows of logits that it needs: k + 1."""
        return len(self.draft_token_ids) + 1

    def outcome(self, accepted: int, token: int) -> "Outcome":
        """`accepted` drafted tokens, then `token`; NO_TOKEN there says the logits were unfit."""
        if token == NO_TOKEN:
            where = self.position + accepted
            return Outcome(0, (), f"the target's logits at position {where} have no finite maximum")
        return Outcome(accepted, (*self.draft_token_ids[:accepted], token))


@dataclass(frozen=True, slots=True)
class Outcome:
    """j and the j + 1 tokens to commit; or why there are none, and then 0 and no tokens."""

    accepted: int
    token_ids: tuple[int, ...]
    failure: str = ""
