"""The one interface of a drafter, wherever it runs: a service of its own, or beside the target.

Knows nothing of streams, plans or the target; the kinds there are stand in
`drafter_service.drafters`. A drafter is asked, for a batch of sequences, what comes next; it may
keep a cache per sequence, keyed by the sequence's id, and must find out by itself (by position)
what of that cache is still true: the `token_ids` of a job are the whole truth. Forgetting
everything between two calls must change the speed only. (A drafter with `needs` that forgot raises
`MissingFeaturesError`: its sequences are then told everything again.)
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from core.errors import ForerunError
from core.types import ModelIdentity, SamplingParams, SparseDistribution

if TYPE_CHECKING:  # prompt lookup starts without torch
    from torch import Tensor


class MissingFeaturesError(ForerunError):
    """A sequence's features do not follow those the drafter holds: begin again from position 0."""


@dataclass(frozen=True, slots=True)
class TargetFeatures:
    """What the target computed of consecutive committed tokens, from `position` on.

    values: `[n, F]`, one row per token, the drafter's `needs` side by side in their order. The last
    committed token has none yet: the target runs it with the next block. Values of a position are
    given once, in order; a `position` of 0 begins the sequence anew.
    """

    position: int
    values: "Tensor"


@dataclass(frozen=True, slots=True)
class DraftJob:
    """One sequence to draft for.

    token_ids: all committed tokens, the list the engine owns (do not change or keep it).
    num_draft_tokens: the most tokens wanted, at least 1; 0 asks to catch up only (prefill).
    num_unchanged: so many first tokens are those of this sequence's last job, so that a cache
        need not compare them again; 0 when that is not known.
    features: for drafters with `needs`, what the target computed of the committed tokens that
        the drafter was told nothing of yet; see `TargetFeatures`.
    """

    sequence: int
    token_ids: Sequence[int]
    num_draft_tokens: int
    sampling: SamplingParams
    num_unchanged: int = 0
    features: TargetFeatures | None = None


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens, and what each was sampled from: a distribution per token.

    Without distributions the draft counts as deterministic: all mass on its tokens.
    """

    token_ids: tuple[int, ...] = ()
    distributions: tuple[SparseDistribution, ...] = ()

    def cut(self, length: int) -> "Draft":
        """Its first `length` tokens."""
        return Draft(self.token_ids[:length], self.distributions[:length])


class Drafter(ABC):
    """Proposes tokens. All methods run in one thread, never at once."""

    kind: ClassVar[str]
    #: True when drafts come with distributions wherever the job's rule needs them.
    has_distributions: bool = False
    #: True when `draft` takes microseconds, so that the server may call it on its event loop.
    runs_inline: ClassVar[bool] = False

    @property
    @abstractmethod
    def identity(self) -> ModelIdentity:
        """The handshake's facts. An empty fingerprint fits every target."""

    @property
    def max_length(self) -> int:
        """Longest sequence it can draft for; 0 is unlimited."""
        return 0

    @property
    def max_sequences(self) -> int:
        """Sequences it holds at once; 0 is unlimited."""
        return 0

    @property
    def prefill_chunk(self) -> int:
        """Most tokens to catch up with in one job without a draft; 0 is unlimited.

        The engine cuts long prompts by it, so that they do not hold up the drafts of others.
        """
        return 0

    @property
    def needs(self) -> tuple[str, ...]:
        """What it needs of the target for each committed token beside its id, in this order.

        Names as in `core.features`: "hidden_states", "hidden_states:LAYER", "kv:LAYER". The values
        arrive in `DraftJob.features`, attached and remote alike.
        """
        return ()

    @abstractmethod
    def draft(self, jobs: Sequence[DraftJob]) -> list[Draft]:
        """Draft for a batch: per job at most `num_draft_tokens` tokens, in the order of the jobs.

        An empty draft means "no guess". At temperature above 0 the tokens are the argmax of
        log q + G with the job's seed (see `core.sampling`), so that they couple with the target;
        or, for rules that need distributions, sampled from exactly the distributions returned,
        with noise of their own. How many there are must not depend on what they are.
        """

    def close(self, sequence: int) -> None:  # noqa: B027 - optional
        """Free what is held for a sequence; unknown ones are ignored."""
