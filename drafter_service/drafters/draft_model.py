"""A smaller language model with the target's tokenizer drafts for many sequences at once.

Knows nothing of the target but its committed tokens. One call catches all sequences up in ragged
forwards (a new prompt, the correction after a rejection, or whatever was missed), then decodes
step by step as one batch, rows dropping out as they reach their own length.

    cached, still true | not yet run through the model | drafted here
    0 ....... agreed   | ...... len(token_ids) - 1     | d1 d2 ... dk-1 | dk

The last drafted token dk has not been run through the model: if the target accepts all k, the next
catch-up is two tokens (dk and the target's own), else one.

How tokens are drawn from the logits stands in `drafter_service.drawing`.
"""

from collections.abc import Sequence

import torch
from pydantic import Field

from core.config import DrafterPoolConfig
from core.embedded import resolve_model
from core.errors import ConfigError
from core.model import RaggedModel, Row
from core.types import ModelIdentity
from drafter_service.drafters.base import Draft, Drafter, DrafterOptions, DraftJob, read_options
from drafter_service.drawing import DraftDrawer, DraftInProgress

#: Looking for a prefix to copy is for prompts, not for the few tokens of a catch-up.
_MIN_REUSED_TOKENS = 32


class DraftModelOptions(DrafterOptions):
    """`[drafter_pools.options]` of kind "draft_model".

    `prefill_chunk`: prompt tokens read at a time while the drafts of others wait.
    `top_q`: most tokens with a chance in the distributions that rules ask for.
    """

    prefill_chunk: int = Field(256, ge=1)
    top_q: int = Field(64, ge=1)


class DraftModelDrafter(Drafter):
    """Drafts with a RaggedModel: greedy, coupled with the target through shared noise, or sampled
    from distributions that come with the draft."""

    kind = "draft_model"
    has_distributions = True

    def __init__(self, model: RaggedModel, prefill_chunk: int = 256, top_q: int = 64) -> None:
        self._model = model
        self._prefill_chunk = prefill_chunk
        self._drawer = DraftDrawer(model.vocab_size, model.tokenizer_size, top_q)

    @property
    def identity(self) -> ModelIdentity:
        """The model's."""
        return self._model.identity

    @property
    def max_length(self) -> int:
        """The model's context, or what the config allows of it."""
        return self._model.max_length

    @property
    def max_sequences(self) -> int:
        """The model's cache slots."""
        return self._model.max_sequences

    @property
    def prefill_chunk(self) -> int:
        """See `DraftModelOptions`."""
        return self._prefill_chunk

    @torch.inference_mode()
    def draft(self, jobs: Sequence[DraftJob]) -> list[Draft]:
        """See `Drafter.draft`. Raises what the model raises."""
        for job in jobs:
            self._align(job)
        drafts = [self._drawer.begin(job) for job in jobs]
        self._catch_up(drafts)
        while drawing := [draft for draft in drafts if not draft.is_done]:
            for start in range(0, len(drawing), self._model.max_batch_tokens):
                part = drawing[start : start + self._model.max_batch_tokens]
                rows = [
                    Row(draft.job.sequence, self._length(draft.job), draft.token_ids[-1:], 1)
                    for draft in part
                ]
                self._run(rows, part)
        return [draft.end() for draft in drafts]

    def close(self, sequence: int) -> None:
        """Free a sequence's slot; the model may keep its tokens for others to copy."""
        self._drawer.close(sequence)
        if self._model.cache.is_open(sequence):
            self._model.close(sequence)

    def _length(self, job: DraftJob) -> int:
        return self._model.length(job.sequence)

    def _align(self, job: DraftJob) -> None:
        """Cut the cache to what agrees with the job and leaves a token to run for a draft.

        A sequence that lacks many tokens takes those that another one has computed already.
        """
        if not self._model.cache.is_open(job.sequence):
            self._model.open(job.sequence)
        cached = self._model.cache.token_ids(job.sequence)
        limit = min(len(cached), len(job.token_ids) - (job.num_draft_tokens > 0))
        agreed = min(job.num_unchanged, limit)
        while agreed < limit and cached[agreed] == job.token_ids[agreed]:
            agreed += 1
        self._model.truncate(job.sequence, agreed)
        if len(job.token_ids) - agreed > _MIN_REUSED_TOKENS:
            self._model.reuse_prefix(job.sequence, job.token_ids[agreed:])

    def _catch_up(self, drafts: Sequence[DraftInProgress]) -> None:
        """Run every job's missing tokens, in as few forwards as `max_batch_tokens` allows, and
        draw the first token of each draft."""
        while behind := [d for d in drafts if self._length(d.job) < len(d.job.token_ids)]:
            room = self._model.max_batch_tokens
            rows, drawing = [], []
            for draft in behind:
                job, position = draft.job, self._length(draft.job)
                token_ids = job.token_ids[position : position + room]
                room -= len(token_ids)
                draws = position + len(token_ids) == len(job.token_ids) and not draft.is_done
                rows.append(Row(job.sequence, position, token_ids, int(draws)))
                if draws:
                    drawing.append(draft)
                if room == 0:
                    break
            self._run(rows, drawing)

    def _run(self, rows: Sequence[Row], drawing: Sequence[DraftInProgress]) -> None:
        """One forward; every `drawing` draft, in the order of the rows, gets its next token."""
        logits = self._model.forward(rows)  # [len(drawing), vocab_size]
        if drawing:
            self._drawer.add(logits, drawing)


def create_draft_model(config: DrafterPoolConfig) -> DraftModelDrafter:
    """Load the pool's model. Raises ConfigError without one, ModelError if it cannot be served."""
    options = read_options(config, DraftModelOptions)
    return DraftModelDrafter(load_draft_model(config), options.prefill_chunk, options.top_q)


def load_draft_model(config: DrafterPoolConfig, num_layers: int = 0) -> RaggedModel:
    """The pool's model, or only its first layers. Raises as `create_draft_model` does, and
    ConfigError when there are not that many layers and at least one more."""
    if config.model is None:
        raise ConfigError(f"drafter_pools.{config.name}.model: kind {config.kind!r} needs a model")
    model = config.model.model_copy(update={"model": resolve_model(config.model.model)})
    return RaggedModel.load(model, num_layers)
