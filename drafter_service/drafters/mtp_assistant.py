"""Gemma 4's assistants draft for many sequences at once, on their target's K/V and hidden states.

Beside the target they read the K/V where it lies; as a process of its own, the drafter keeps a copy
of the two layers it needs, which grows by what comes with each verdict. Neither reads a prompt: the
first draft costs as much as any other.

    tokens     0 ................... n-2 | n-1            committed
    K/V        of the target, all of them| none yet
    step 1     embedding of token n-1, hidden state of n-2    ─▶ d1, and a hidden state
    step i     embedding of d(i-1), hidden state of step i-1  ─▶ di

Only tokens that were committed are attended to. (transformers' generator also sees K/V of drafts
that were just rejected: the first of them, or all of them in layers with a sliding window.)
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from pydantic import Field
from torch import Tensor

from core.assistant import Assistant, CrossContext, Embed, Target, load_embedding, read_target
from core.attention import Segment
from core.config import DrafterPoolConfig, ModelConfig
from core.errors import ConfigError
from core.kv_cache import SlotCache
from core.loading import load_tokenizer
from core.model import RaggedModel
from core.types import ModelIdentity
from drafter_service.drafters.base import (
    Draft,
    Drafter,
    DrafterOptions,
    DraftJob,
    MissingFeaturesError,
    TargetFeatures,
    read_options,
)
from drafter_service.drawing import DraftDrawer, DraftInProgress


class MtpAssistantOptions(DrafterOptions):
    """`[drafter_pools.options]` of kind "mtp_assistant".

    `num_assistant_tokens`: longest draft; 0 is what the checkpoint's generation config says, or as
    many as are wanted.
    `top_q`: most tokens with a chance in the distributions that rules ask for.
    """

    num_assistant_tokens: int = Field(0, ge=0)
    top_q: int = Field(64, ge=1)


class RemoteMtpAssistantOptions(MtpAssistantOptions):
    """`target`: the target's checkpoint, of which the config, the embedding and the tokenizer are
    read."""

    target: str = Field(min_length=1)


@dataclass(frozen=True, slots=True)
class _Told:
    """Of the sequence's first `count` tokens the target has told; `hidden` `[D]` of the last."""

    count: int
    hidden: Tensor


class MtpAssistantDrafter(Drafter):
    """Drafts with an assistant over K/V in the target's own cache."""

    kind = "mtp_assistant"
    has_distributions = True

    def __init__(
        self,
        assistant: Assistant,
        embed: Embed,
        cache: SlotCache,
        layers: Mapping[str, int],
        identity: ModelIdentity,
        num_valid: int,
        options: MtpAssistantOptions,
    ) -> None:
        """`cache` holds the target's K/V of each layer type at `layers`."""
        self._assistant = assistant
        self._embed = embed
        self._cache = cache
        self._layers = [layers[layer_type] for layer_type in assistant.layer_types]
        self._identity = identity
        self._limit = options.num_assistant_tokens or assistant.num_draft_tokens or 1 << 30
        self._drawer = DraftDrawer(assistant.vocab_size, num_valid, options.top_q)
        self._told: dict[int, _Told] = {}

    @property
    def identity(self) -> ModelIdentity:
        """The assistant's, with the target's tokenizer."""
        return self._identity

    @property
    def max_length(self) -> int:
        """The cache's."""
        return self._cache.max_length

    @property
    def max_sequences(self) -> int:
        """The cache's slots."""
        return self._cache.max_sequences

    @property
    def needs(self) -> tuple[str, ...]:
        """See `Drafter.needs`."""
        return ("hidden_states",)

    @torch.inference_mode()
    def draft(self, jobs: Sequence[DraftJob]) -> list[Draft]:
        """See `Drafter.draft`. Raises MissingFeaturesError for a sequence with a gap."""
        for job in jobs:
            self._listen(job)
        drafts = [self._drawer.begin(self._limited(job)) for job in jobs]
        if drawing := [draft for draft in drafts if not draft.is_done]:
            self._run(drawing)
        return [draft.end() for draft in drafts]

    def close(self, sequence: int) -> None:
        """Forget a sequence."""
        self._told.pop(sequence, None)
        self._drawer.close(sequence)

    def _limited(self, job: DraftJob) -> DraftJob:
        if job.num_draft_tokens <= self._limit:
            return job
        return replace(job, num_draft_tokens=self._limit)

    def _listen(self, job: DraftJob) -> None:
        """Take in what the target told. Raises MissingFeaturesError unless it is all there is."""
        features = job.features
        if features is not None and len(features.values):
            told = self._told.pop(job.sequence, None)
            if features.position not in (0, told.count if told else 0):
                raise MissingFeaturesError(f"sequence {job.sequence}: {features.position} is new")
            self._keep(job, features)
            hidden = features.values[-1, : self._assistant.hidden_size].clone()
            count = features.position + len(features.values)
            self._told[job.sequence] = _Told(count, hidden)
        told = self._told.get(job.sequence)
        count = told.count if told else 0
        if job.num_draft_tokens and not 0 < count == len(job.token_ids) - 1:
            raise MissingFeaturesError(
                f"sequence {job.sequence}: {count} of {len(job.token_ids) - 1} tokens were told of"
            )

    def _keep(self, job: DraftJob, features: TargetFeatures) -> None:
        """Store the K/V among the features; the target's cache has them already."""

    def _run(self, drawing: list[DraftInProgress]) -> None:
        """All steps of some drafts; a row that has its tokens drops out."""
        slots = self._cache.place([draft.job.sequence for draft in drawing])
        ordered = sorted(zip(slots, drawing, strict=True), key=lambda pair: pair[0])
        drawing = [draft for _, draft in ordered]
        # Position and, one before it, the last token with K/V.
        positions = torch.tensor([len(draft.job.token_ids) - 1 for draft in drawing])
        segments = [Segment(slot, len(draft.job.token_ids) - 2, 1) for slot, draft in ordered]
        hidden = torch.stack([self._told[draft.job.sequence].hidden for draft in drawing])
        token_ids = [draft.job.token_ids[-1] for draft in drawing]
        context = CrossContext(self._cache, self._layers, segments)
        while drawing:
            embeddings = self._embed(torch.tensor(token_ids))
            logits, hidden = self._assistant.step(embeddings, hidden, positions, context)
            self._drawer.add(logits, drawing)
            going = [row for row, draft in enumerate(drawing) if not draft.is_done]
            if len(going) < len(drawing):
                drawing, segments = [drawing[i] for i in going], [segments[i] for i in going]
                positions, hidden = positions[going], hidden[going]
                context = CrossContext(self._cache, self._layers, segments)
            token_ids = [draft.token_ids[-1] for draft in drawing]


class RemoteMtpAssistantDrafter(MtpAssistantDrafter):
    """Drafts with an assistant over a copy of the target's K/V, told increment by increment."""

    def __init__(
        self,
        assistant: Assistant,
        embed: Embed,
        target: Target,
        config: ModelConfig,
        identity: ModelIdentity,
        num_valid: int,
        options: MtpAssistantOptions,
    ) -> None:
        """`config` says how many sequences and tokens there is room for."""
        device, dtype = assistant.device, assistant.dtype
        self._shared = list(target.layers.values())
        layers = [shared.copy(i, device, dtype) for i, shared in enumerate(self._shared)]
        length = min(config.max_length, target.max_length)
        cache = SlotCache(layers, config.max_sequences, length)
        places = {layer_type: i for i, layer_type in enumerate(target.layers)}
        super().__init__(assistant, embed, cache, places, identity, num_valid, options)

    @property
    def needs(self) -> tuple[str, ...]:
        """The hidden state, then keys and values of the target's layers that are shared."""
        return ("hidden_states", *(f"kv:{shared.index}" for shared in self._shared))

    def close(self, sequence: int) -> None:
        """Forget a sequence and free its slot."""
        super().close(sequence)
        self._cache.close(sequence)

    def _keep(self, job: DraftJob, features: TargetFeatures) -> None:
        start, stop = features.position, features.position + len(features.values)
        if not self._cache.is_open(job.sequence):
            self._cache.open(job.sequence)
        if start == 0:
            self._cache.truncate(job.sequence, 0)
        if stop > self.max_length:
            raise MissingFeaturesError(f"sequence {job.sequence}: no room for {stop} tokens")
        [slot] = self._cache.place([job.sequence])
        slots = torch.full((stop - start,), slot, device=self._assistant.device)
        indices = torch.arange(start, stop, device=self._assistant.device)
        values = features.values[:, self._assistant.hidden_size :]
        values = values.to(self._assistant.device, self._assistant.dtype)
        for layer, shared in enumerate(self._shared):
            size = 2 * shared.num_heads * shared.head_dim
            part, values = values[:, :size], values[:, size:]
            keys, each = part.reshape(len(part), 2, shared.num_heads, -1).permute(1, 2, 0, 3)
            rows = self._cache.row_index(slots, indices, shared.num_heads)
            self._cache.write(layer, keys, each, rows)
        self._cache.extend(job.sequence, job.token_ids[start:stop])


def attach_mtp_assistant(config: DrafterPoolConfig, target: RaggedModel) -> MtpAssistantDrafter:
    """Load the pool's assistant beside its target.

    Raises ConfigError when the two do not fit, ModelError when it cannot be loaded.
    """
    options = read_options(config, MtpAssistantOptions)
    with _naming(config):
        facts = Target.of(target.identity.model, target.network.config)
        assistant = _load_assistant(config, facts)
    identity = replace(target.identity, model=assistant.name)
    return MtpAssistantDrafter(
        assistant,
        target.network.get_input_embeddings(),
        target.cache,
        {layer_type: shared.index for layer_type, shared in facts.layers.items()},
        identity,
        target.tokenizer_size,
        options,
    )


def create_mtp_assistant(config: DrafterPoolConfig) -> RemoteMtpAssistantDrafter:
    """Load the pool's assistant, and what it needs of the checkpoint of its target.

    Raises ConfigError when the two do not fit, ModelError when one of them cannot be loaded.
    """
    options = read_options(config, RemoteMtpAssistantOptions)
    with _naming(config):
        folder, facts = read_target(options.target)
        assistant = _load_assistant(config, facts)
    assert config.model is not None
    embed = load_embedding(folder, facts, assistant.device, assistant.dtype)
    tokenizer = load_tokenizer(ModelConfig(model=str(folder)))
    fingerprint = tokenizer.fingerprint if tokenizer else ""
    return RemoteMtpAssistantDrafter(
        assistant,
        embed,
        facts,
        config.model,
        ModelIdentity(assistant.name, assistant.vocab_size, fingerprint),
        min(assistant.vocab_size, tokenizer.size if tokenizer else assistant.vocab_size),
        options,
    )


def _load_assistant(config: DrafterPoolConfig, target: Target) -> Assistant:
    if config.model is None:
        raise ConfigError("kind 'mtp_assistant' needs a model, the assistant's checkpoint")
    assistant = Assistant.load(config.model)
    assistant.check(target)
    return assistant


@contextlib.contextmanager
def _naming(config: DrafterPoolConfig) -> Iterator[None]:
    """Say in errors of the config whose model it is about."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"drafter_pools.{config.name}.model: {error}") from error
