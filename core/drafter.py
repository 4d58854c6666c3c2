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
from core.types import Branch, ModelIdentity, SamplingParams, SparseDistribution

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
    num_guesses: for drafters that draft ahead, how many other tokens to remember at each position.
    num_copy_tokens: the most tokens wanted where a lookup finds them, if that is more.
    """

    sequence: int
    token_ids: Sequence[int]
    num_draft_tokens: int
    sampling: SamplingParams
    num_unchanged: int = 0
    features: TargetFeatures | None = None
    num_guesses: int = 0
    num_copy_tokens: int = 0

    @property
    def num_lookup_tokens(self) -> int:
        """The most tokens wanted of a lookup."""
        return max(self.num_draft_tokens, self.num_copy_tokens)


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens, and what each was sampled from: a distribution per token.

    Without distributions the draft counts as deterministic: all mass on its tokens. `is_copy` as a
    Branch's.
    """

    token_ids: tuple[int, ...] = ()
    distributions: tuple[SparseDistribution, ...] = ()
    is_copy: bool = False

    def cut(self, length: int) -> "Draft":
        """Its first `length` tokens."""
        return Draft(self.token_ids[:length], self.distributions[:length], self.is_copy)


@dataclass(frozen=True, slots=True)
class AheadJob:
    """One sequence whose block is at the target: draft behind the outcomes it may have.

    token_ids, sampling, num_unchanged, num_guesses: as in a DraftJob, without the block.
    block: the draft tokens at the target, m of them, which may be none.
    num_draft_tokens: the most tokens wanted behind each outcome, at least 1.
    fan_out: for each accepted count j from 0 to m, how many of the likeliest tokens the target may
        say there to draft behind. Those below m are corrections: never the block's own token.
    """

    sequence: int
    token_ids: Sequence[int]
    block: Sequence[int]
    num_draft_tokens: int
    sampling: SamplingParams
    fan_out: Sequence[int]
    num_unchanged: int = 0
    num_guesses: int = 0


class Ahead(ABC):
    """Drafts in the making for one block's outcomes; abandoned by forgetting it."""

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """Whether `advance` has nothing left to do."""

    @property
    @abstractmethod
    def branches(self) -> Sequence[Branch]:
        """The finished ones, in the order in which they were finished: it only grows.

        Each is what `Drafter.draft` would answer if its outcome were committed.
        """

    @property
    @abstractmethod
    def guesses(self) -> Sequence[Sequence[int]]:
        """For each accepted count the tokens the target may say there, likeliest first, also those
        that are not drafted for; empty where they are not known yet."""

    @abstractmethod
    def keep(self, accepted: int, token: int) -> bool:
        """The block has this outcome: forget all branches but its own. Ends this Ahead.

        What was computed of that branch is used by the next job of the sequence, whose committed
        tokens end in `token`. Returns whether there was one.
        """


class Drafter(ABC):
    """Proposes tokens. All methods run in one thread, never at once."""

    kind: ClassVar[str]
    #: True when `begin_ahead` and `advance` can be called, for rules that need no distributions.
    can_draft_ahead: ClassVar[bool] = False
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

    def begin_ahead(self, job: AheadJob) -> Ahead:
        """Prepare to draft behind the outcomes of a block; computes nothing yet.

        Until the outcome is told by `Ahead.keep`, or anything else is asked for the sequence, its
        cache belongs to the Ahead.
        """
        raise NotImplementedError(f"{self.kind} cannot draft ahead")

    def advance(self, aheads: Sequence[Ahead]) -> None:
        """Do one short step, a model's forward, for all that are not done, as one batch."""
        raise NotImplementedError(f"{self.kind} cannot draft ahead")

    def close(self, sequence: int) -> None:  # noqa: B027 - optional
        """Free what is held for a sequence; unknown ones are ignored."""
