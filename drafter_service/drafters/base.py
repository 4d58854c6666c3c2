"""The one interface of a drafter, and the registry of kinds.

Knows nothing of streams, plans or the target. A drafter is asked, for a batch of sequences, what
comes next; it may keep a cache per sequence, keyed by the sequence's id, and must find out by
itself (by position) what of that cache is still true: the `token_ids` of a job are the whole
truth. Forgetting everything between two calls must change the speed only.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from core.config import DrafterPoolConfig
from core.errors import ConfigError
from core.types import ModelIdentity, SamplingParams


@dataclass(frozen=True, slots=True)
class DraftJob:
    """One sequence to draft for.

    token_ids: all committed tokens, the list the engine owns (do not change or keep it).
    num_draft_tokens: the most tokens wanted, at least 1; 0 asks to catch up only (prefill).
    """

    sequence: int
    token_ids: Sequence[int]
    num_draft_tokens: int
    sampling: SamplingParams


class Drafter(ABC):
    """Proposes tokens. All methods run in one thread, never at once."""

    kind: ClassVar[str]
    #: What it needs of the target beside token ids ("hidden_states", "kv", ...); data, not types.
    needs: ClassVar[frozenset[str]] = frozenset()
    #: True when drafts come with the distributions they were sampled from.
    has_distributions: ClassVar[bool] = False

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

    @abstractmethod
    def draft(self, jobs: Sequence[DraftJob]) -> list[tuple[int, ...]]:
        """Draft for a batch: per job at most `num_draft_tokens` ids, in the order of the jobs.

        An empty tuple means "no guess". At temperature above 0 the ids are the argmax of
        log q + G with the job's seed (see `core.sampling`), so that they couple with the target.
        """

    def close(self, sequence: int) -> None:  # noqa: B027 - optional
        """Free what is held for a sequence; unknown ones are ignored."""


DrafterFactory = Callable[[DrafterPoolConfig], Drafter]

_FACTORIES: dict[str, DrafterFactory] = {}


def register(kind: str) -> Callable[[DrafterFactory], DrafterFactory]:
    """Decorator: make `kind` known to `create_drafter`."""

    def add(factory: DrafterFactory) -> DrafterFactory:
        _FACTORIES[kind] = factory
        return factory

    return add


def create_drafter(config: DrafterPoolConfig) -> Drafter:
    """Build the drafter a pool asks for. Raises ConfigError that names an unknown kind."""
    if config.kind not in _FACTORIES:
        known = ", ".join(sorted(_FACTORIES))
        raise ConfigError(f"drafter_pools.{config.name}.kind: no drafter {config.kind!r}: {known}")
    return _FACTORIES[config.kind](config)
