"""A smaller language model with the target's tokenizer drafts for many sequences at once.

Knows nothing of the target but its committed tokens. One call catches all sequences up in ragged
forwards (a new prompt, the correction after a rejection, or whatever was missed), then decodes
step by step as one batch, rows dropping out as they reach their own length.

    cached, still true | not yet run through the model | drafted here
    0 ....... agreed   | ...... len(token_ids) - 1     | d1 d2 ... dk-1 | dk

The last drafted token dk has not been run through the model: if the target accepts all k, the next
catch-up is two tokens (dk and the target's own), else one. While a block is at the target, drafts
for its outcomes are decoded as a tree (`drafter_service.branch_tree`); what was drafted behind the
outcome that came is remembered, and the next draft goes on from there.

How tokens are drawn from the logits stands in `drafter_service.drawing`.
"""

from collections.abc import Sequence

import torch
from pydantic import Field

from core.config import DrafterPoolConfig
from core.drafter import Ahead, AheadJob
from core.embedded import resolve_model
from core.errors import ConfigError
from core.model import RaggedModel, Row
from core.prediction_layer import is_prediction_layer
from core.types import ModelIdentity
from drafter_service.branch_tree import BranchTree, Continuation
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
    can_draft_ahead = True

    def __init__(self, model: RaggedModel, prefill_chunk: int = 256, top_q: int = 64) -> None:
        self._model = model
        self._prefill_chunk = prefill_chunk
        self._drawer = DraftDrawer(model.vocab_size, model.tokenizer_size, top_q)
        self._known: dict[int, Continuation] = {}

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
        drafts = [self._begin(job) for job in jobs]
        self._catch_up(drafts)
        while drawing := [draft for draft in drafts if not draft.is_done]:
            for start in range(0, len(drawing), self._model.max_batch_tokens):
                part = drawing[start : start + self._model.max_batch_tokens]
                rows = [
                    Row(draft.job.sequence, self._length(draft.job), draft.token_ids[-1:], 1)
                    for draft in part
                ]
                self._run(rows, part)
        for draft in drafts:
            if draft.job.num_guesses and draft.token_ids and not draft.has_distributions:
                self._known[draft.job.sequence] = Continuation.of(draft)
        return [draft.end() for draft in drafts]

    def begin_ahead(self, job: AheadJob) -> Ahead:
        """See `Drafter.begin_ahead`. A text that was forgotten is read anew with the first step."""
        known = self._known.pop(job.sequence, None)
        if known is not None and not known.fits(job, job.block):
            known = None
        follow = job.block if known is None else known.token_ids
        agreed = self._num_agreed(job, follow)
        if known is not None and agreed < known.length:
            known = None
        num_guessed = 0 if known is None else len(known.token_ids)
        if num_guessed <= len(job.block):  # its last token gives the guesses that are not known
            agreed = min(agreed, len(job.token_ids) + num_guessed - 1)
        self._model.truncate(job.sequence, agreed)
        begun = DraftJob(
            job.sequence,
            job.token_ids,
            job.num_draft_tokens,
            job.sampling,
            job.num_unchanged,
            num_guesses=job.num_guesses,
        )
        return BranchTree(self._model, job, self._drawer.begin(begun), known, self._known)

    @torch.inference_mode()
    def advance(self, aheads: Sequence[Ahead]) -> None:
        """See `Drafter.advance`. Those that do not fit into one forward wait."""
        room = self._model.max_batch_tokens
        rows, trees, drawing = [], [], []
        for tree in aheads:
            assert isinstance(tree, BranchTree)
            if room and not tree.is_done:
                row, drafts = tree.take(room)
                room -= len(row.token_ids)
                rows.append(row)
                trees.append(tree)
                drawing += drafts
        if rows:
            self._run(rows, drawing)
        for tree in trees:
            tree.grow()

    def close(self, sequence: int) -> None:
        """Free a sequence's slot; the model may keep its tokens for others to copy."""
        self._known.pop(sequence, None)
        self._drawer.close(sequence)
        if self._model.cache.is_open(sequence):
            self._model.close(sequence)

    def _length(self, job: DraftJob) -> int:
        return self._model.length(job.sequence)

    def _begin(self, job: DraftJob) -> DraftInProgress:
        """A draft that holds what is known of it already; the cache is cut to what agrees with it
        and leaves a token to run.

        A sequence that lacks many tokens takes those that another one has computed already.
        """
        draft, length = self._drawer.begin(job), len(job.token_ids)
        known = self._known.pop(job.sequence, None)
        if known is None or draft.is_done or not known.fits(job):
            agreed = min(self._num_agreed(job), length - (job.num_draft_tokens > 0))
        else:
            follow = known.token_ids[: job.num_draft_tokens]
            agreed = self._num_agreed(job, follow)
            for i in range(min(agreed - length + 1, len(follow))):  # the last one was not run
                draft.restore(known.token_ids[i], known.guesses[i])
            agreed = min(agreed, length + len(draft.token_ids) - 1)
        self._model.truncate(job.sequence, agreed)
        if length - agreed > _MIN_REUSED_TOKENS:
            self._model.reuse_prefix(job.sequence, job.token_ids[agreed:])
        return draft

    def _num_agreed(self, job: DraftJob | AheadJob, follow: Sequence[int] = ()) -> int:
        """How many cached tokens are the job's committed ones and then those of `follow`."""
        if not self._model.cache.is_open(job.sequence):
            self._model.open(job.sequence)
        cached, size = self._model.cache.token_ids(job.sequence), len(job.token_ids)
        limit = min(len(cached), size)
        agreed = min(job.num_unchanged, limit)
        while agreed < limit and cached[agreed] == job.token_ids[agreed]:
            agreed += 1
        if agreed < size:
            return agreed
        limit = min(len(cached) - size, len(follow))
        return size + next((i for i in range(limit) if cached[size + i] != follow[i]), limit)

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
    if is_prediction_layer(model.model):
        where = f"drafter_pools.{config.name}"
        raise ConfigError(f"{where}: {model.model} is a prediction layer, for kind 'mtp_layers'")
    return RaggedModel.load(model, num_layers)
