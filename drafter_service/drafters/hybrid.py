"""Prompt lookup where it has a long match, else another kind: usually a model.

A long match is a better guess than a small model's and costs nothing, but most tokens of most
texts have none. Which of the two drafts follows from the committed tokens alone, so a draft of the
lookup is deterministic given the text, and every rule stays exact; where a rule looks at
distributions, all mass stands on the drafted token. ENSEMBLE mixes the model's distribution into
the text itself, so there the model always drafts.

While the lookup drafts, the model need not run. The tokens it has not seen are owed to it:

    seen by the inner kind | owed                | wanted
    0 ........ unchanged   | ... len(token_ids)  | drafted by the lookup

They are paid when it runs next, for this sequence or for others of the batch, or when they have
become many. Knows nothing of the inner kind but the interface.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Self

from pydantic import Field, model_validator

from core.config import DrafterPoolConfig
from core.errors import ConfigError
from core.types import ModelIdentity, Rule, SparseDistribution
from drafter_service.drafters import attach_drafter, create_drafter
from drafter_service.drafters.base import Draft, Drafter, DrafterOptions, DraftJob, read_options
from drafter_service.drafters.ngram import NgramDrafter, NgramOptions

#: Some forwards' worth of one sequence: more would hold up the drafts of others when it is paid.
_MAX_OWED_TOKENS = 64


class HybridOptions(DrafterOptions):
    """`[drafter_pools.options]` of kind "hybrid".

    `min_match`: the lookup drafts where it finds at least so many of the last tokens.
    `kind`: who drafts elsewhere, with the pool's `model`; `max_inner_tokens` at a time at most (0:
    as many as the pool), since a copy that goes on is long and cheap, and a model's draft neither.
    `lookup`, `drafter`: the options of kind "ngram", but for `min_ngram`, and of that `kind`.
    """

    min_match: int = Field(3, ge=1, le=16)
    kind: str = Field("draft_model", min_length=1)
    max_inner_tokens: int = Field(0, ge=0)
    lookup: dict[str, Any] = Field({})
    drafter: dict[str, Any] = Field({})

    @model_validator(mode="after")
    def _check(self) -> Self:
        if "min_ngram" in self.lookup:
            raise ValueError("lookup.min_ngram is called min_match here")
        if self.kind == "hybrid":
            raise ValueError("kind 'hybrid' cannot be its own inner kind")
        return self


class HybridDrafter(Drafter):
    """Asks the lookup first and the inner drafter where that has no match.

    lookup: drafts where its match is long enough, and nothing elsewhere. max_inner_tokens: of a
    draft of `inner`; 0 for as many as are asked for.
    """

    kind = "hybrid"

    def __init__(self, lookup: Drafter, inner: Drafter, max_inner_tokens: int = 0) -> None:
        self._lookup = lookup
        self._inner = inner
        self._max_inner_tokens = max_inner_tokens
        self._unchanged: dict[int, int] = {}  # first tokens that are those of the inner's last job
        # What a class says of itself elsewhere depends on the config here.
        self.has_distributions = inner.has_distributions

    @property
    def identity(self) -> ModelIdentity:
        """The inner kind's: the lookup fits any target."""
        return self._inner.identity

    @property
    def max_length(self) -> int:
        """The inner kind's."""
        return self._inner.max_length

    @property
    def max_sequences(self) -> int:
        """The inner kind's."""
        return self._inner.max_sequences

    @property
    def prefill_chunk(self) -> int:
        """What the slower of the two reads at a time."""
        chunks = (self._lookup.prefill_chunk, self._inner.prefill_chunk)
        return min((chunk for chunk in chunks if chunk), default=0)

    @property
    def needs(self) -> tuple[str, ...]:
        """The inner kind's."""
        return self._inner.needs

    def draft(self, jobs: Sequence[DraftJob]) -> list[Draft]:
        """See `Drafter.draft`. Raises what the inner kind raises."""
        found = self._lookup.draft([_for_lookup(job) for job in jobs])
        drafts = [self._as_asked(job, draft) for job, draft in zip(jobs, found, strict=True)]
        asked = [self._for_inner(job, draft) for job, draft in zip(jobs, drafts, strict=True)]
        if not any(map(_is_due, jobs, asked, drafts)):
            self._unchanged.update((job.sequence, job.num_unchanged) for job in asked)
            return drafts
        made = self._inner.draft(asked)
        self._unchanged.update((job.sequence, len(job.token_ids)) for job in asked)
        return [draft if draft.token_ids else own for draft, own in zip(drafts, made, strict=True)]

    def close(self, sequence: int) -> None:
        """Free what both hold for a sequence."""
        self._unchanged.pop(sequence, None)
        self._lookup.close(sequence)
        self._inner.close(sequence)

    def _as_asked(self, job: DraftJob, draft: Draft) -> Draft:
        """The lookup's draft as the job's rule takes it; empty where the inner kind drafts."""
        rule = job.sampling.rule
        if rule is Rule.ENSEMBLE or not draft.token_ids:
            return Draft()
        certain: tuple[SparseDistribution, ...] = ()
        if self.has_distributions and rule.needs_distributions:
            certain = tuple([SparseDistribution((token,), (1.0,)) for token in draft.token_ids])
        return Draft(draft.token_ids, certain, is_copy=True)

    def _for_inner(self, job: DraftJob, draft: Draft) -> DraftJob:
        """The job as the inner kind gets it: to catch up only, where the lookup has drafted."""
        wanted = min(job.num_draft_tokens, self._max_inner_tokens or job.num_draft_tokens)
        return replace(
            job,
            num_draft_tokens=0 if draft.token_ids else wanted,
            num_unchanged=min(job.num_unchanged, self._unchanged.get(job.sequence, 0)),
        )


def _for_lookup(job: DraftJob) -> DraftJob:
    return replace(job, num_draft_tokens=job.num_lookup_tokens)


def _is_due(job: DraftJob, asked: DraftJob, copy: Draft) -> bool:
    """Whether the inner kind must run for a job: to draft, to read a prompt when the engine wants
    it read, to hear what it is told once only, or because too much is owed to it."""
    num_owed = len(asked.token_ids) - asked.num_unchanged
    is_only_reading = job.num_lookup_tokens == 0
    is_due = asked.num_draft_tokens > 0 or is_only_reading or num_owed > _MAX_OWED_TOKENS
    return is_due or asked.features is not None


def create_hybrid(config: DrafterPoolConfig) -> HybridDrafter:
    """Build both parts for a process of its own. Raises ConfigError that names the option, and
    what the inner kind raises."""
    return _hybrid(config, create_drafter)


def attach_hybrid(config: DrafterPoolConfig, target: Any) -> HybridDrafter:
    """The same beside a target, for an inner kind that can be attached to it."""
    return _hybrid(config, lambda inner: attach_drafter(inner, target))


def _hybrid(
    config: DrafterPoolConfig, make_inner: Callable[[DrafterPoolConfig], Drafter]
) -> HybridDrafter:
    options = read_options(config, HybridOptions)
    longest = max(NgramOptions().max_ngram, options.min_match)
    lookup = {"max_ngram": longest, **options.lookup, "min_ngram": options.min_match}
    return HybridDrafter(
        _part(config, "lookup", "ngram", lookup, NgramDrafter),
        _part(config, "drafter", options.kind, options.drafter, make_inner),
        options.max_inner_tokens,
    )


def _part(
    config: DrafterPoolConfig,
    name: str,
    kind: str,
    options: dict[str, Any],
    make: Callable[[DrafterPoolConfig], Drafter],
) -> Drafter:
    """One of the two, from its own options. Its errors name them as they stand in the config."""
    part = config.model_copy(update={"kind": kind, "options": options})
    where = f"drafter_pools.{config.name}"
    try:
        return make(part)
    except ConfigError as error:
        message = str(error).replace(f"{where}.options", f"{where}.options.{name}")
        raise ConfigError(message.replace(f"{where}.kind", f"{where}.options.kind")) from error
