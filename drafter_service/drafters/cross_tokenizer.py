"""A language model with another tokenizer than the target's drafts for many sequences at once.

The target's committed tokens are translated for the drafter, its draft is translated back, and only
the target's ids leave this process. Two ways (N. Timor et al., arXiv 2502.05202):

- "tli", token-level intersection: the drafter may say only what is a token on both sides. Its
  logits are moved into the target's columns first, so everything behind them (penalties, noise
  keyed by token, q) is the target's: every rule works, and drafts couple as usual.
- "slem", string-level exact match: the drafter writes text, greedily; the text is encoded with the
  target's tokenizer. Works for any pair, also for bytes, and counts as a deterministic draft.

Both are a `DraftModelDrafter` over the drafter's tokens: its cache, catch-up and batches are used
as they are, and nothing of the model is changed. Text is the business of
`drafter_service.translation`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from core.config import DrafterPoolConfig
from core.embedded import resolve_model
from core.errors import ConfigError
from core.model import RaggedModel
from core.tokenizer import Tokenizer
from core.types import ModelIdentity, SamplingParams
from drafter_service.drafters.base import Draft, DraftJob, read_options
from drafter_service.drafters.draft_model import DraftModelDrafter, DraftModelOptions
from drafter_service.drawing import DraftDrawer, DraftInProgress
from drafter_service.translation import Context, Translator

#: "auto" takes "tli" from this overlap on; see docs/drafters.md for the measurement behind it.
MIN_OVERLAP = 0.8

#: A text draft is given up after so many drafter tokens per token wanted; English has four to five
#: bytes in a token, so that a drafter of bytes just gets there.
_MAX_STEPS_PER_TOKEN = 6


class CrossTokenizerOptions(DraftModelOptions):
    """`[drafter_pools.options]` of kind "cross_tokenizer"; the others as for "draft_model".

    `target`: the target's folder, hub name or `embedded:NAME`; only its tokenizer is loaded.
    `method`: "tli", "slem", or "auto", which chooses by what the vocabularies share.
    """

    target: str = Field(min_length=1)
    method: Literal["auto", "tli", "slem"] = "auto"


class _CrossTokenizerDrafter(DraftModelDrafter):
    """What both ways share: the sequences' texts, and the target's identity."""

    kind = "cross_tokenizer"
    can_draft_ahead = False  # a branch of the target's tokens is none of the drafter's

    def __init__(
        self,
        model: RaggedModel,
        translator: Translator,
        identity: ModelIdentity,
        options: CrossTokenizerOptions,
    ) -> None:
        super().__init__(model, options.prefill_chunk, options.top_q)
        self._translator = translator
        self._identity = identity
        self._contexts: dict[int, Context] = {}

    @property
    def identity(self) -> ModelIdentity:
        """The target's vocabulary, as only its ids are taken and given."""
        return self._identity

    def close(self, sequence: int) -> None:
        """Free a sequence's slot and text."""
        self._contexts.pop(sequence, None)
        super().close(sequence)

    def _translate(self, job: DraftJob) -> DraftJob:
        """The job in the drafter's tokens. It asks for no draft where none can be made: behind
        half a character that the drafter cannot spell, or where its context ends."""
        context = self._contexts.get(job.sequence)
        if context is None or not context.follow(job.token_ids, job.num_unchanged):
            context = self._contexts[job.sequence] = self._translator.begin()
            context.follow(job.token_ids)
        tokens = context.tokens()
        room = self.max_length - len(tokens.token_ids)
        possible = tokens.token_ids and tokens.is_whole and room > 0
        return DraftJob(
            job.sequence,
            tokens.token_ids if room >= 0 else [],
            min(job.num_draft_tokens, room) if possible else 0,
            job.sampling,
            tokens.num_unchanged,
        )


class _SharedDrawer(DraftDrawer):
    """Draws the target's tokens from the drafter's logits: of those both have, and of no others.

    The drafts it is given are in the drafter's tokens; `drafts` are the same in the target's.
    """

    def __init__(self, translator: Translator, top_q: int, device: torch.device) -> None:
        size = translator.target.tokenizer.size
        super().__init__(size, size, top_q)
        self.jobs: dict[int, DraftJob] = {}  # the target's, by sequence
        self.drafts: dict[int, DraftInProgress] = {}
        self._size = size
        self._drafter_id_of = {t: d for d, t in translator.shared.items()}
        pairs = torch.tensor(sorted(translator.shared.items()), device=device)
        self._drafter_ids, self._target_ids = pairs[:, 0], pairs[:, 1]

    def begin(self, job: DraftJob) -> DraftInProgress:
        """See `DraftDrawer.begin`; what parameters look back at are the target's tokens."""
        self.drafts[job.sequence] = super().begin(self.jobs[job.sequence])
        return DraftInProgress(job, None, [], [], job.num_draft_tokens == 0)

    def add(self, logits: Tensor, drafts: Sequence[DraftInProgress]) -> None:
        """See `DraftDrawer.add`; logits `[len(drafts), V]` of the drafter."""
        device = logits.device  # the head's may be another than the inputs'
        scores = logits.new_full((len(drafts), self._size), -torch.inf)
        scores[:, self._target_ids.to(device)] = logits[:, self._drafter_ids.to(device)]
        ours = [self.drafts[draft.job.sequence] for draft in drafts]
        super().add(scores, ours)
        for draft, drawn in zip(drafts, ours, strict=True):
            if len(drawn.token_ids) > len(draft.token_ids):
                draft.add(self._drafter_id_of[drawn.token_ids[-1]])
            draft.is_done |= drawn.is_done


class TokenLevelDrafter(_CrossTokenizerDrafter):
    """Method "tli"."""

    has_distributions = True

    def __init__(
        self,
        model: RaggedModel,
        translator: Translator,
        identity: ModelIdentity,
        options: CrossTokenizerOptions,
    ) -> None:
        super().__init__(model, translator, identity, options)
        self._drawer = self._shared = _SharedDrawer(translator, options.top_q, model.device)

    def draft(self, jobs: Sequence[DraftJob]) -> list[Draft]:
        """See `Drafter.draft`. Raises what the model raises."""
        self._shared.jobs = {job.sequence: job for job in jobs}
        super().draft([self._translate(job) for job in jobs])
        return [self._shared.drafts.pop(job.sequence).end() for job in jobs]


@dataclass(slots=True)
class _Writing:
    """A text draft: the drafter's tokens so far, and the target's `num_wanted` that come of them.

    A token counts as complete once another one stands behind it; `has_ended` makes all of them so.
    """

    job: DraftJob  # in the drafter's tokens
    context: Context
    num_wanted: int
    drafted: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    has_ended: bool = False

    def next_job(self, room: int) -> DraftJob:
        """What the drafter is to do next; at the least it catches up with the text."""
        job, steps = self.job, 0
        if job.num_draft_tokens and not self.has_ended:
            missing = max(1, self.num_wanted + 1 - len(self.token_ids))
            budget = _MAX_STEPS_PER_TOKEN * self.num_wanted
            left = min(room - len(job.token_ids), budget) - len(self.drafted)
            steps = max(0, min(missing, left)) if len(self.token_ids) <= self.num_wanted else 0
        return replace(job, token_ids=[*job.token_ids, *self.drafted], num_draft_tokens=steps)


class StringLevelDrafter(_CrossTokenizerDrafter):
    """Method "slem"."""

    has_distributions = False

    def draft(self, jobs: Sequence[DraftJob]) -> list[Draft]:
        """See `Drafter.draft`. The text is the likeliest one whatever the sampling: how far it goes
        must not depend on chance."""
        writings = []
        for job in jobs:
            ours = replace(self._translate(job), sampling=SamplingParams())
            context = self._contexts[job.sequence]
            writings.append(_Writing(ours, context, job.num_draft_tokens))
        todo = [(writing, writing.next_job(self.max_length)) for writing in writings]
        while todo:
            drafts = super().draft([job for _, job in todo])
            for (writing, job), draft in zip(todo, drafts, strict=True):
                self._take(writing, draft.token_ids, job.num_draft_tokens)
            todo = [(writing, writing.next_job(self.max_length)) for writing, _ in todo]
            todo = [(writing, job) for writing, job in todo if job.num_draft_tokens]
        return [Draft(tuple(each.token_ids[: each.num_wanted])) for each in writings]

    def _take(self, writing: _Writing, drafted: Sequence[int], num_asked: int) -> None:
        """Append what the drafter wrote, up to a special token: it ends the text."""
        special = None
        text_ids = self._translator.drafter.tokenizer.text_ids
        for length, token_id in enumerate(drafted):
            if token_id not in text_ids:
                special, drafted = token_id, drafted[:length]
                break
        writing.has_ended = special is not None or len(drafted) < num_asked
        writing.drafted += drafted
        if drafted:
            writing.token_ids = writing.context.to_target(writing.drafted)
        if special in self._translator.shared:
            writing.token_ids.append(self._translator.shared[special])


def create_cross_tokenizer(config: DrafterPoolConfig) -> _CrossTokenizerDrafter:
    """Load the pool's model and the target's tokenizer.

    Raises ConfigError without a model or where "tli" shares nothing, ModelError for what cannot be
    loaded.
    """
    options = read_options(config, CrossTokenizerOptions)
    where = f"drafter_pools.{config.name}"
    if config.model is None:
        raise ConfigError(f"{where}.model: kind 'cross_tokenizer' needs a model")
    target = Tokenizer.load(resolve_model(options.target))
    model_config = config.model.model_copy(update={"model": resolve_model(config.model.model)})
    model = RaggedModel.load(model_config)
    if model.tokenizer is None:
        raise ConfigError(f"{where}.model: {config.model.model} has no tokenizer to translate")
    translator = Translator(target, model.tokenizer, model.vocab_size)
    method = options.method
    if method == "auto":
        method = "tli" if translator.overlap >= MIN_OVERLAP else "slem"
    if method == "tli" and not translator.shared:
        raise ConfigError(
            f"{where}.options.method: {config.model.model} and {options.target} share no token"
        )
    name = f"{config.model.model} for {options.target}"
    identity = ModelIdentity(name, target.size, target.fingerprint)
    kind = TokenLevelDrafter if method == "tli" else StringLevelDrafter
    return kind(model, translator, identity, options)
