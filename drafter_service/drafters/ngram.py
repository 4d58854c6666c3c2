"""Prompt lookup: what followed the last tokens when they stood here before.

Needs no model and fits any vocabulary. Knows nothing of the request but its tokens: the draft is
the continuation of the most recent earlier occurrence of the last n tokens, n as long as possible
(the idea is A. Saxena's prompt lookup decoding, 2023).

Each sequence has an index that grows with it: n-gram -> where it was last followed by something,
for every n up to `max_ngram`. A token costs a few dictionary writes once, a draft at most
`max_ngram` reads, whatever the length of the context. Positions are only ever added, so tokens
that were taken back mean a new index; that happens after a failover, not after a rejection.

How far a guess is trusted depends on the evidence: the length of the match, and whether what was
found was always followed by the same token. What such evidence is worth in a text is learned from
each of its tokens, drafted or not; a draft goes on while all of it is likely enough. So a draft is
a function of the tokens alone.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple, Self

from pydantic import Field, model_validator

from core.config import DrafterPoolConfig
from core.types import ModelIdentity
from drafter_service.drafters.base import Draft, Drafter, DrafterOptions, DraftJob, read_options

#: Chance that the next token is right, by the length of the match (the last: and above), before
#: the sequence itself has shown anything; half of it behind n-grams that different tokens followed.
#: Measured on the benchmark's prompts with its target.
_CHANCES: Final = (0.25, 0.5, 0.65, 0.75, 0.8, 0.8, 0.85, 0.9)
_LONGEST: Final = len(_CHANCES)
#: So many observations weigh as much as `_CHANCES`.
_PRIOR_WEIGHT: Final = 8


class NgramOptions(DrafterOptions):
    """`[drafter_pools.options]` of kind "ngram".

    A match below `min_ngram` tokens drafts nothing; runs of up to `max_ngram` are indexed. A token
    is drafted if it and all before it are right with a chance of at least `min_chance`; 0 drafts
    all that is wanted.
    """

    max_ngram: int = Field(4, ge=1, le=16)
    min_ngram: int = Field(1, ge=1)
    min_chance: float = Field(0.15, ge=0, le=1)

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram {self.min_ngram} is above max_ngram {self.max_ngram}")
        return self


class _Match(NamedTuple):
    """The last `length` tokens (at most `_LONGEST` are told apart) ended before at `end`.

    is_unanimous: the same token always followed the n-gram that was found.
    """

    length: int
    end: int
    is_unanimous: bool


class _Index:
    """The tokens of a sequence, where each of their n-grams was last followed by a token, and how
    often a match was right."""

    __slots__ = ("_contested", "_max_ngram", "_min_ngram", "_next", "_seen", "token_ids")

    def __init__(self, options: NgramOptions) -> None:
        self._min_ngram, self._max_ngram = options.min_ngram, options.max_ngram
        self._next: dict[tuple[int, ...], int] = {}
        self._contested: set[tuple[int, ...]] = set()
        self._seen: dict[tuple[int, bool], tuple[int, int]] = {}  # (right, all)
        self.token_ids: list[int] = []

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens. The n-grams that end with the last one are not in the index yet."""
        tokens = self.token_ids
        for token in token_ids:
            if (match := self.find()) is not None:
                key = match.length, match.is_unanimous
                right, count = self._seen.get(key, (0, 0))
                self._seen[key] = right + (tokens[match.end] == token), count + 1
            end = len(tokens)
            for begin in range(max(0, end - self._max_ngram), end):
                ngram = tuple(tokens[begin:end])
                before = self._next.get(ngram)
                if before is not None and tokens[before] != token:
                    self._contested.add(ngram)
                self._next[ngram] = end
            tokens.append(token)

    def find(self) -> _Match | None:
        """The longest n-gram that ends the sequence and the last place it ended before."""
        tokens = self.token_ids
        for n in range(min(self._max_ngram, len(tokens)), self._min_ngram - 1, -1):
            ngram = tuple(tokens[-n:])
            end = self._next.get(ngram)
            if end is not None:
                length = n
                while n == self._max_ngram and length < min(end, _LONGEST):
                    if tokens[end - 1 - length] != tokens[-1 - length]:
                        break
                    length += 1
                return _Match(min(length, _LONGEST), end, ngram not in self._contested)
        return None

    def num_likely(self, match: _Match, limit: int, bar: float) -> int:
        """Tokens, at most `limit`, that are all right with a chance of at least `bar`."""
        chance = self._chance(match.length, match.is_unanimous)
        length = 0
        while length < limit and chance >= bar:
            length += 1
            chance *= self._chance(min(match.length + length, _LONGEST), True)
        return length

    def _chance(self, length: int, is_unanimous: bool) -> float:
        """Chance that a match of this kind is followed by what followed it before."""
        known = _CHANCES[length - 1] * (1.0 if is_unanimous else 0.5)
        right, count = self._seen.get((length, is_unanimous), (0, 0))
        return (right + _PRIOR_WEIGHT * known) / (count + _PRIOR_WEIGHT)


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
        match = index.find()
        if match is None:
            return Draft()
        length = index.num_likely(match, job.num_draft_tokens, self._options.min_chance)
        # A continuation that reaches the end of the sequence goes on with the draft itself: a loop.
        continuation = index.token_ids[match.end : match.end + length]
        for i in range(length - len(continuation)):
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
            index = self._indexes[job.sequence] = _Index(self._options)
        index.extend(job.token_ids[len(index.token_ids) :])
        return index


def attach_ngram(config: DrafterPoolConfig, target: object) -> Drafter:
    """The same beside a target: what it drafts costs no round trip."""
    return NgramDrafter(config)
