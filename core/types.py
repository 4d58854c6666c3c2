"""The values that travel between forerun's parts, as frozen dataclasses.

Knows nothing of protobuf (see `core.wire`), torch, asyncio or any service. Token ids are plain
ints in the target's vocabulary; lengths and positions count tokens. A *position* is an index into
a sequence's committed tokens: every message that changes state says at which position it begins,
and the receiver truncates to it, so repeating a message is always safe.

    committed tokens   0 ........ position | new_token_ids | draft_token_ids
                       already cached      | committed     | to be verified
"""

import enum
from dataclasses import dataclass, field

from core.draft_types import Branch as Branch
from core.draft_types import DraftClose as DraftClose
from core.draft_types import DraftCommands as DraftCommands
from core.draft_types import DraftCommit as DraftCommit
from core.draft_types import DraftFeatures as DraftFeatures
from core.draft_types import DraftOpen as DraftOpen
from core.draft_types import DraftPlans as DraftPlans
from core.draft_types import DraftSent as DraftSent
from core.draft_types import NeedOpen as NeedOpen
from core.draft_types import NeedOpenReason as NeedOpenReason
from core.draft_types import Plan as Plan
from core.params import Features as Features
from core.params import Rule as Rule
from core.params import SamplingParams as SamplingParams
from core.params import SparseDistribution as SparseDistribution
from core.params import TokenLogprobs as TokenLogprobs


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """What two services must agree on; `tokenizer_fingerprint` is empty for any-id services."""

    model: str
    vocab_size: int
    tokenizer_fingerprint: str = ""


# ---------------------------------------------------------------- verifier
class VerdictStatus(enum.Enum):
    """What became of a row or an open."""

    OK = "ok"
    NEED_PREFIX = "need_prefix"
    NO_SLOT = "no_slot"
    INVALID = "invalid"


@dataclass(frozen=True, slots=True)
class AttachedInfo:
    """A drafter that lives in the verifier's process; `pool` is its name in the config."""

    pool: str
    kind: str
    max_draft_tokens: int
    has_distributions: bool = False


@dataclass(frozen=True, slots=True)
class VerifierInfo:
    """A verifier's limits and its model's defaults, from the handshake.

    num_stages: micro-batches that its devices can work on side by side, one per device; 0 where
    a verifier of an earlier build does not tell.
    """

    identity: ModelIdentity
    max_length: int
    max_sequences: int
    max_batch_tokens: int
    eos_token_ids: tuple[int, ...]
    default_sampling: SamplingParams
    instance_id: str
    tokenizer_size: int
    attached: tuple[AttachedInfo, ...] = ()
    num_stages: int = 1


@dataclass(frozen=True, slots=True)
class VerifyOpen:
    """Admit `sequence`; it may grow to `max_length` tokens.

    logprobs: likeliest tokens to report per drawn token (0: the drawn one only); None for none.
    prompt_logprobs: report the prompt's tokens too, in the verdicts that read them.
    features: what a remote drafter needs of each token ("hidden_states", "kv:3"), for the verdicts.
    attached: pool of the attached drafter that drafts for it, "" for none.
    traceparent: W3C trace context of the request, "" without tracing.
    """

    sequence: int
    sampling: SamplingParams
    max_length: int
    logprobs: int | None = None
    prompt_logprobs: bool = False
    features: tuple[str, ...] = ()
    attached: str = ""
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class VerifyRow:
    """Append `new_token_ids` (at least one) behind `position`, check the draft behind them.

    A `partial` row is a chunk of a prompt that is not its last: cached, nothing is drawn.
    draft_distributions: what each draft token was sampled from, for rules that need it; empty
    stands for a deterministic draft (all mass on the token).
    next_draft_tokens: how many tokens the attached drafter is to draft behind the outcome;
    next_copy_tokens: how many where a lookup finds them, for kinds that have one beside a model.
    """

    sequence: int
    position: int
    new_token_ids: tuple[int, ...]
    draft_token_ids: tuple[int, ...] = ()
    partial: bool = False
    draft_distributions: tuple[SparseDistribution, ...] = ()
    next_draft_tokens: int = 0
    next_copy_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens this row sends through the target."""
        return len(self.new_token_ids) + len(self.draft_token_ids)


@dataclass(frozen=True, slots=True)
class VerifyBatch:
    """One micro-batch. Closes are applied first, then opens, then rows."""

    batch: int
    rows: tuple[VerifyRow, ...] = ()
    opens: tuple[VerifyOpen, ...] = ()
    closes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on one row.

    `position` is where `token_ids` begin (the row's position plus its new tokens).
    `token_ids` are the accepted draft tokens and the one token the target adds: accepted + 1
    ids, or none for a partial row or a status other than OK. `logprobs` has one entry per id when
    the open asked for them; `prompt_logprobs` one per new token behind the sequence's first;
    `features` one row per token the row committed to the cache. The `next_draft_` fields hold what
    the attached drafter proposes behind `token_ids`; `next_draft_is_copy` as a Branch's `is_copy`.
    """

    sequence: int
    position: int
    status: VerdictStatus = VerdictStatus.OK
    accepted: int = 0
    token_ids: tuple[int, ...] = ()
    cached_tokens: int = 0
    message: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    features: Features | None = None
    next_draft_token_ids: tuple[int, ...] = ()
    next_draft_distributions: tuple[SparseDistribution, ...] = ()
    next_draft_is_copy: bool = False


@dataclass(frozen=True, slots=True)
class OpenFailure:
    """An open that was not admitted; the sequence is unknown to the verifier."""

    sequence: int
    status: VerdictStatus
    message: str


@dataclass(frozen=True, slots=True)
class VerifyTimings:
    """Nanoseconds spent on one micro-batch."""

    queue_ns: int = 0
    forward_ns: int = 0
    sampling_ns: int = 0
    num_forwards: int = 0
    draft_ns: int = 0
    total_ns: int = 0


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """One verdict per row of the batch, in its order."""

    batch: int
    verdicts: tuple[Verdict, ...]
    open_failures: tuple[OpenFailure, ...] = ()
    timings: VerifyTimings = field(default_factory=VerifyTimings)


# ---------------------------------------------------------------- drafter
@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """What a drafter is and can hold, from the handshake. 0 means unlimited.

    needs: what the target must tell of each committed token beside its id, in this order.
    can_draft_ahead: whether it drafts for the outcomes of a block that is at the target.
    """

    kind: str
    identity: ModelIdentity
    max_length: int
    max_sequences: int
    max_draft_tokens: int
    instance_id: str
    has_distributions: bool = False
    needs: tuple[str, ...] = ()
    can_draft_ahead: bool = False
