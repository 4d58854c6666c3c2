"""Prompt lookup: what followed the last tokens when they stood here before.

Needs no model and fits any vocabulary. Knows nothing of the request but its tokens: the draft is
the continuation of the most recent earlier occurrence of the last n tokens, n as long as possible
(the idea is A. Saxena's prompt lookup decoding, 2023).

Each sequence has an index that grows with it: n-gram -> where it was last followed by something,
for every n up to `max_ngram`. A token costs a few dictionary writes once, a draft at most
`max_ngram` reads, whatever the length of the context. Positions are only ever added, so tokens
that were taken back mean a new index; that happens after a failover, not after a rejection.

How far a guess is trusted depends on the evidence: see `NgramOptions` and docs/drafters.md.
"""

from collections.abc import Sequence
from typing import Self

from pydantic import Field, model_validator

from core.config import DrafterPoolConfig
from core.types import ModelIdentity
from drafter_service.drafters.base import Draft, Drafter, DrafterOptions, DraftJob, read_options


class NgramOptions(DrafterOptions):
    """`[drafter_pools.options]` of kind "ngram".

    A match of `max_ngram` tokens drafts all that is wanted; a shorter one of n tokens at most
    n * draft_per_match. A match below `min_ngram` tokens drafts nothing.
    """

    max_ngram: int = Field(4, ge=1, le=16)
    min_ngram: int = Field(1, ge=1)
    draft_per_match: int = Field(2, ge=1)

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram {self.min_ngram} is above max_ngram {self.max_ngram}")
        return self


class _Index:
    """The tokens of a sequence and where each of their n-grams was last followed by a token."""

    __slots__ = ("_max_ngram", "_next", "token_ids")

    def __init__(self, max_ngram: int) -> None:
        self._max_ngram = max_ngram
        self._next: dict[tuple[int, ...], int] = {}
        self.token_ids: list[int] = []

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens. The n-grams that end with the last one are not in the index yet."""
        tokens = self.token_ids
        start = max(len(tokens), 1)
        tokens.extend(token_ids)
        for end in range(start, len(tokens)):
            for begin in range(max(0, end - self._max_ngram), end):
                self._next[tuple(tokens[begin:end])] = end

    def find(self, min_ngram: int) -> tuple[int, int]:
        """(n, end): the longest n-gram that ends the sequence and the last place it ended before.

        (0, 0) when there is none of at least `min_ngram` tokens.
        """
        tokens = self.token_ids
        for n in range(min(self._max_ngram, len(tokens)), min_ngram - 1, -1):
            end = self._next.get(tuple(tokens[-n:]))
            if end is not None:
                return n, end
        return 0, 0


class NgramDrafter(Drafter):
    """Drafts by looking the last tokens up in the sequence itself."""

    kind = "ngram"
    runs_inline = True

    def __init__(self, config: DrafterPoolConfig) -> None:
        """Raises ConfigError for options that do not exist or are out of range."""
        self._options = read_options(config, NgramOptions)
        self._indexes: dict[int, _Index] = {}

    @property
    def identity(self) -> ModelIdentity:
        """Any target fits."""
        return ModelIdentity(model="ngram", vocab_size=0)

    @property
    def prefill_chunk(self) -> int:
        """A millisecond or two of indexing, as it runs on the event loop."""
        return 1024

    def draft(self, jobs: Sequence[DraftJob]) -> list[Draft]:
        """See `Drafter.draft`. Sampling makes no difference: the guess is deterministic."""
        return [self._draft(job) for job in jobs]

    def close(self, sequence: int) -> None:
        """Free a sequence's index."""
        self._indexes.pop(sequence, None)

    def _draft(self, job: DraftJob) -> Draft:
        index = self._up_to_date(job)
        if job.num_draft_tokens == 0:
            return Draft()
        n, end = index.find(self._options.min_ngram)
        if n == 0:
            return Draft()
        limit = job.num_draft_tokens
        if n < self._options.max_ngram:
            limit = min(limit, n * self._options.draft_per_match)
        # A continuation that reaches the end of the sequence goes on with the draft itself: a loop.
        continuation = index.token_ids[end : end + limit]
        for i in range(limit - len(continuation)):
            continuation.append(continuation[i])
        return Draft(tuple(continuation))

    def _up_to_date(self, job: DraftJob) -> _Index:
        index = self._indexes.get(job.sequence)
        if index is not None:
            held = len(index.token_ids)
            unchanged = min(job.num_unchanged, held)
            if list(job.token_ids[unchanged:held]) != index.token_ids[unchanged:]:
                index = None
        if index is None:
            index = self._indexes[job.sequence] = _Index(self._options.max_ngram)
        index.extend(job.token_ids[len(index.token_ids) :])
        return index


def attach_ngram(config: DrafterPoolConfig, target: object) -> Drafter:
    """The same beside a target: what it drafts costs no round trip."""
    return NgramDrafter(config)
