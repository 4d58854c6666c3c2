"""What an orchestrator and a drafter tell each other, as frozen dataclasses.

Import them from `core.types`, whose rules they follow. A drafter is told what the target committed
and which block is at the target now, and answers with drafts for the outcomes it foresees:

    Open, Commit ──▶ Plan: one branch, for the known outcome
    Sent         ──▶ Plan: branches for what may come of the block that is being verified
"""

import enum
from dataclasses import dataclass

from core.params import Features, SamplingParams, SparseDistribution


class NeedOpenReason(enum.Enum):
    """Why a drafter cannot go on with a sequence."""

    GAP = "gap"
    TOO_LONG = "too_long"
    FULL = "full"
    INVALID = "invalid"


@dataclass(frozen=True, slots=True)
class DraftOpen:
    """Take up a sequence from its committed tokens; draft `next_draft_tokens` at once.

    max_branches: outcomes that may be drafted for while a block is at the target; 0 for none.
    """

    sequence: int
    generation: int
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    max_draft_tokens: int
    next_draft_tokens: int = 0
    max_branches: int = 0
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class DraftCommit:
    """The target committed `token_ids` behind `base_length`; `accepted` of them were drafted."""

    sequence: int
    generation: int
    base_length: int
    accepted: int
    token_ids: tuple[int, ...]
    next_draft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class DraftSent:
    """A block stands at the target, on `base_length` committed tokens.

    It is the first `num_draft_tokens` tokens of the draft that was given last for the known
    outcome. Drafts of up to `next_draft_tokens` tokens are wanted behind its likely outcomes.
    """

    sequence: int
    generation: int
    base_length: int
    num_draft_tokens: int
    next_draft_tokens: int


@dataclass(frozen=True, slots=True)
class DraftClose:
    """Forget a sequence."""

    sequence: int
    generation: int


@dataclass(frozen=True, slots=True)
class DraftFeatures:
    """The target's features of some committed tokens of a sequence."""

    sequence: int
    generation: int
    features: Features


@dataclass(frozen=True, slots=True)
class DraftCommands:
    """One frame to a drafter. Closes are applied first, then opens, features, commits, sents."""

    opens: tuple[DraftOpen, ...] = ()
    commits: tuple[DraftCommit, ...] = ()
    closes: tuple[DraftClose, ...] = ()
    features: tuple[DraftFeatures, ...] = ()
    sents: tuple[DraftSent, ...] = ()


@dataclass(frozen=True, slots=True)
class Branch:
    """The draft for one outcome: `accepted` draft tokens, then the target's `token`.

    is_copy: a lookup made it, in a kind that has one beside a model: it is right as often as copies
    are, and not as often as the model is.
    """

    accepted: int
    token: int
    draft_token_ids: tuple[int, ...]
    draft_distributions: tuple[SparseDistribution, ...] = ()
    is_copy: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """Drafts for outcomes of the block sent on `base_length` committed tokens.

    After a DraftSent there is a branch for each outcome that was foreseen and drafted for in time.
    After an open of L tokens, and after a commit, the one outcome is the known one:
    base_length + accepted + 1 is then the committed length and `token` its last token.
    """

    sequence: int
    generation: int
    base_length: int
    branches: tuple[Branch, ...]


@dataclass(frozen=True, slots=True)
class NeedOpen:
    """The drafter cannot go on with a sequence."""

    sequence: int
    generation: int
    reason: NeedOpenReason
    message: str = ""


@dataclass(frozen=True, slots=True)
class DraftPlans:
    """One frame from a drafter."""

    plans: tuple[Plan, ...] = ()
    need_opens: tuple[NeedOpen, ...] = ()
    draft_ns: int = 0
    num_queued: int = 0
