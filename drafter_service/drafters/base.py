"""The one interface of a drafter. The kinds there are stand in `drafter_service.drafters`.

Knows nothing of streams, plans or the target. A drafter is asked, for a batch of sequences, what
comes next; it may keep a cache per sequence, keyed by the sequence's id, and must find out by
itself (by position) what of that cache is still true: the `token_ids` of a job are the whole
truth. Forgetting everything between two calls must change the speed only.
"""

import difflib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from core.config import DrafterPoolConfig
from core.errors import ConfigError
from core.types import ModelIdentity, SamplingParams, SparseDistribution


@dataclass(frozen=True, slots=True)
class DraftJob:
    """One sequence to draft for.

    token_ids: all committed tokens, the list the engine owns (do not change or keep it).
    num_draft_tokens: the most tokens wanted, at least 1; 0 asks to catch up only (prefill).
    num_unchanged: so many first tokens are those of this sequence's last job, so that a cache
        need not compare them again; 0 when that is not known.
    """

    sequence: int
    token_ids: Sequence[int]
    num_draft_tokens: int
    sampling: SamplingParams
    num_unchanged: int = 0


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
    #: What it needs of the target beside token ids ("hidden_states", "kv", ...); data, not types.
    needs: ClassVar[frozenset[str]] = frozenset()
    #: True when drafts come with distributions wherever the job's rule needs them.
    has_distributions: ClassVar[bool] = False
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


class DrafterOptions(BaseModel):
    """Base of a kind's `options` in the config: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


_Options = TypeVar("_Options", bound=DrafterOptions)


def read_options(config: DrafterPoolConfig, kind: type[_Options]) -> _Options:
    """The pool's options, checked. Raises ConfigError that names the key and the nearest valid."""
    try:
        return kind.model_validate(config.options)
    except ValidationError as error:
        lines = []
        for item in error.errors():
            key = ".".join(str(part) for part in item["loc"])
            message = item["msg"].removeprefix("Value error, ")
            if item["type"] == "extra_forbidden":
                valid = list(kind.model_fields)
                [nearest] = difflib.get_close_matches(key, valid, n=1, cutoff=0.0) or ["nothing"]
                message = f"unknown option; did you mean {nearest!r}? Valid: {', '.join(valid)}"
            where = f"drafter_pools.{config.name}.options"
            lines.append(f"{where}.{key}: {message}" if key else f"{where}: {message}")
        raise ConfigError("; ".join(lines)) from error
