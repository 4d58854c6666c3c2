"""Block diffusion drafts for many sequences at once, beside the target: all tokens of a draft from
one forward.

The drafter keeps K/V that it projects from what the target computed of each committed token, so it
reads no text by itself. A draft costs the same however long it is, up to the block's size:

    features   of the tokens that are new since the last draft  ─▶ K/V, kept
    block      token n-1, mask, mask, ...                       ─▶ logits of n, n + 1, ... at once

No token of a draft sees another's choice: all are guessed at the same time, and then drawn one
after the other, each from the logits of its own place.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from pydantic import Field
from torch import Tensor

from core.attention import Segment
from core.block_diffusion import BlockContext, BlockDrafter, TargetEnds
from core.config import DrafterPoolConfig
from core.errors import ConfigError
from core.kv_cache import SlotCache
from core.model import RaggedModel
from core.types import ModelIdentity
from drafter_service.drafters.base import (
    Draft,
    Drafter,
    DrafterOptions,
    DraftJob,
    MissingFeaturesError,
    read_options,
)
from drafter_service.drawing import DraftDrawer, DraftInProgress


class DflashOptions(DrafterOptions):
    """`[drafter_pools.options]` of kind "dflash".

    `top_q`: most tokens with a chance in the distributions that rules ask for.
    """

    top_q: int = Field(64, ge=1)


class DflashDrafter(Drafter):
    """Drafts with a block-diffusion drafter, beside its target."""

    kind = "dflash"
    has_distributions = True

    def __init__(self, drafter: BlockDrafter, target: RaggedModel, top_q: int = 64) -> None:
        """The cache has room for all that the target's has, and a block behind each."""
        self._drafter = drafter
        self._ends = TargetEnds(target)
        self._identity = replace(target.identity, model=drafter.name)
        self._max_length = min(drafter.max_length, target.max_length)
        self._needs = self._ends.features(drafter.layer_ids)
        length = target.max_length + drafter.block_size
        self._cache = SlotCache(drafter.layers, target.max_sequences, length)
        self._nothing = drafter.no_features
        self._drawer = DraftDrawer(target.vocab_size, target.tokenizer_size, top_q)

    @property
    def identity(self) -> ModelIdentity:
        """The drafter's, with the target's tokenizer."""
        return self._identity

    @property
    def max_length(self) -> int:
        """The target's, or less if the drafter was made for less."""
        return self._max_length

    @property
    def needs(self) -> tuple[str, ...]:
        """Hidden states of the target's layers that the drafter's checkpoint names."""
        return self._needs

    @torch.inference_mode()
    def draft(self, jobs: Sequence[DraftJob]) -> list[Draft]:
        """See `Drafter.draft`. Raises MissingFeaturesError for a sequence with a gap."""
        for job in jobs:
            self._align(job)
        longest = self._drafter.block_size - 1
        drafts = [
            self._drawer.begin(replace(job, num_draft_tokens=min(job.num_draft_tokens, longest)))
            for job in jobs
        ]
        drawing, logits = self._run(drafts)
        rows = [*range(len(drawing))]
        while rows:
            going = [drawing[row] for row in rows]
            self._drawer.add(logits[rows, len(going[0].token_ids)], going)
            rows = [row for row in rows if not drawing[row].is_done]
        return [draft.end() for draft in drafts]

    def close(self, sequence: int) -> None:
        """Forget a sequence."""
        self._drawer.close(sequence)
        self._cache.close(sequence)

    def _align(self, job: DraftJob) -> None:
        """Cut the cache to where the job's features begin. Raises MissingFeaturesError unless it
        knows of all tokens but the last then."""
        if not self._cache.is_open(job.sequence):
            self._cache.open(job.sequence)
        known = len(self._cache.token_ids(job.sequence))
        if job.features is not None and len(job.features.values):
            if job.features.position not in (0, known):
                raise MissingFeaturesError(
                    f"sequence {job.sequence}: told of {job.features.position}, {known} known"
                )
            self._cache.truncate(job.sequence, job.features.position)
            known = job.features.position + len(job.features.values)
        if job.num_draft_tokens and not 0 < known == len(job.token_ids) - 1:
            raise MissingFeaturesError(
                f"sequence {job.sequence}: {known} of {len(job.token_ids) - 1} tokens known"
            )

    def _run(self, drafts: Sequence[DraftInProgress]) -> tuple[list[DraftInProgress], Tensor]:
        """Keep what the jobs were told and run a block for each draft that is wanted.

        Returns those drafts and fp32 logits `[drafts, most wanted, vocab_size]`.
        """
        sequences = [draft.job.sequence for draft in drafts]
        placed = zip(self._cache.place(sequences), drafts, strict=True)
        ordered = sorted(placed, key=lambda pair: pair[0])
        told, features, blocks, token_ids = [], [self._nothing], [], []
        for slot, draft in ordered:
            job, news = draft.job, draft.job.features
            if news is not None and len(news.values):
                told.append(Segment(slot, news.position, len(news.values)))
                features.append(news.values.to(self._nothing))
            if not draft.is_done:
                masks = [self._drafter.mask_token_id] * (self._drafter.block_size - 1)
                blocks.append(Segment(slot, len(job.token_ids) - 1, 1 + len(masks)))
                token_ids += [job.token_ids[-1], *masks]
        drawing = [draft for _, draft in ordered if not draft.is_done]
        if told and not blocks:  # the library's code cannot do without
            blocks.append(Segment(told[0].slot, told[0].stop, 1))
            token_ids.append(self._drafter.mask_token_id)
        if not blocks:
            return [], self._nothing
        positions = [i for part in (*told, *blocks) for i in range(part.start, part.stop)]
        context = BlockContext(self._cache, told, blocks)
        embeddings = self._ends.embed(token_ids)
        states = self._drafter.run(torch.cat(features), embeddings, positions, context)
        for _, draft in ordered:
            if (news := draft.job.features) is not None:
                known = draft.job.token_ids[news.position :][: len(news.values)]
                self._cache.extend(draft.job.sequence, known)
        if not drawing:
            return [], self._nothing
        most = max(draft.job.num_draft_tokens for draft in drawing)
        masked = states.view(len(drawing), self._drafter.block_size, -1)[:, 1 : 1 + most]
        return drawing, self._ends.logits(masked)


def attach_dflash(config: DrafterPoolConfig, target: RaggedModel) -> DflashDrafter:
    """Load the pool's drafter beside its target.

    Raises ConfigError when the two do not fit, ModelError when it cannot be loaded.
    """
    options = read_options(config, DflashOptions)
    where = f"drafter_pools.{config.name}.model"
    if config.model is None:
        raise ConfigError(f"{where}: kind 'dflash' needs a model, the drafter's checkpoint")
    try:
        drafter = BlockDrafter.load(config.model)
        drafter.check(target)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    return DflashDrafter(drafter, target, options.top_q)
