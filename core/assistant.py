"""Gemma 4's drafters: small models that attend to K/V their target wrote, at one position.

    x = [embedding of the last token; hidden state behind it], both the target's
    layers attend to the K/V of the target's last layer of their type, of all earlier tokens
    logits, and a hidden state that stands for the target's in the next step

All steps of a draft stand at the position of the last committed token, so such a model has no cache
of its own. The library's modules compute; our attention reads the K/V wherever they lie. Knows
nothing of drafts, sequences or services.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from core import model as model  # registers our attention with the library
from core import model_facts
from core.attention import AttentionOptions, ProbeContext, RaggedContext, Segment
from core.config import ModelConfig
from core.embedded import resolve_model
from core.errors import ConfigError, ModelError
from core.kv_cache import LayerSpec, SlotCache
from core.loading import load_companion
from core.packing import pack_linears, watch_inputs

_KINDS = ("gemma4_assistant", "gemma4_unified_assistant")
#: The families whose K/V and hidden states an assistant can be trained on.
_TARGETS = ("gemma4_text", "gemma4_unified_text")
_FULL, _SLIDING = LAYER_TYPES = ("full_attention", "sliding_attention")
_NO_MASKS = dict.fromkeys(LAYER_TYPES)

Embed = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class SharedLayer:
    """A target's layer that an assistant reads: `[H, T, D]` keys and values."""

    index: int
    num_heads: int
    head_dim: int

    def copy(self, layer: int, device: torch.device, dtype: torch.dtype) -> LayerSpec:
        """For a copy of its keys and values in layer `layer` of another cache."""
        return LayerSpec(self.num_heads, self.head_dim, self.head_dim, device, dtype, layer)


@dataclass(frozen=True, slots=True)
class Target:
    """What an assistant must know of its target: nothing but its config."""

    name: str
    hidden_size: int
    vocab_size: int
    max_length: int
    layers: Mapping[str, SharedLayer]  # by layer type, the last of each

    @classmethod
    def of(cls, name: str, config: Any) -> Self:
        """Raises ConfigError for a model that no assistant can draft for."""
        text = config.get_text_config()
        if text.model_type not in _TARGETS:
            raise ConfigError(
                f"kind 'mtp_assistant' drafts for Gemma 4, and the target {name!r} is a "
                f"{text.model_type}"
            )
        last = {layer_type: index for index, layer_type in enumerate(text.layer_types)}
        each = {layer_type: text.per_layer_config[index] for layer_type, index in last.items()}
        layers = {
            layer_type: SharedLayer(last[layer_type], layer.num_key_value_heads, layer.head_dim)
            for layer_type, layer in each.items()
        }
        sizes = (text.hidden_size, text.vocab_size, model_facts.max_length(text))
        return cls(name, *sizes, layers)


class CrossContext:
    """Lets an assistant's layers read K/V that its target wrote; writes nothing."""

    def __init__(
        self, cache: SlotCache, layers: Sequence[int], segments: Sequence[Segment]
    ) -> None:
        """layers: the cache's layer that each of the assistant's reads. segments: sorted by slot,
        each with the last committed token that has K/V."""
        self._context = RaggedContext(cache, segments)
        self._layers = layers
        self._cache = cache

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """`[1, H * r, T, D]` queries to `[1, T, H * r, D]`; `key` and `value` stand for others."""
        source = self._layers[layer]
        if options.window is not None:
            # The library's mask counts distances up to the window, and the query's own token has
            # no K/V yet: from the last token that has, that is one key more.
            options = replace(options, window=options.window + 1)
        return self._context.read(source, query.to(self._cache.keys[source]), options).to(query)


class Assistant:
    """A loaded assistant.

    Attributes:
        name, vocab_size. hidden_size: of the target it was made for.
        num_draft_tokens: what its authors say is worth drafting, 0 when they do not.
        device, dtype: of its weights.
        layer_types: of its layers, in order.
    """

    def __init__(self, network: Any, name: str, is_packed: bool) -> None:
        """Use `load`. `network` uses our attention function."""
        text = network.config.get_text_config()
        self._network = network
        self._head_weight = network.lm_head.weight
        self.name = name
        self.vocab_size: int = text.vocab_size
        self.hidden_size: int = network.config.backbone_hidden_size
        self.num_draft_tokens: int = network.generation_config.num_assistant_tokens or 0
        self.device: torch.device = self._head_weight.device
        self.dtype: torch.dtype = self._head_weight.dtype
        self.layer_types: tuple[str, ...] = tuple(text.layer_types)
        self._heads = {t: text.per_layer_config[i] for i, t in enumerate(self.layer_types)}
        like = self._head_weight
        nothing = {t: like.new_empty(1, 1, 1, layer.head_dim) for t, layer in self._heads.items()}
        self._unused = {layer_type: (empty, empty) for layer_type, empty in nothing.items()}
        probe = ProbeContext()
        with watch_inputs(network) as groups:
            zeros = like.new_zeros(1, self.hidden_size)
            self.step(zeros, zeros, torch.zeros(1, dtype=torch.long), probe)
        for layer, layer_type in enumerate(self.layer_types):
            assert (probe.options[layer].window is not None) == (layer_type == _SLIDING)
        if is_packed:
            pack_linears(network, groups)

    @classmethod
    def load(cls, config: ModelConfig) -> Self:
        """Load a checkpoint. Raises ConfigError when it is no assistant, ModelError when it cannot
        be loaded."""
        network = load_companion(
            config,
            AutoModelForCausalLM,
            "mtp_assistant",
            _KINDS,
            lambda checkpoint: _share_all_layers(checkpoint.get_text_config()),
        )
        return cls(network, config.model, config.pack_weights)

    def check(self, target: Target) -> None:
        """Raise ConfigError, naming both sides, for a target it was not made for."""
        facts: list[tuple[str, Any, Any]] = [
            ("hidden states", self.hidden_size, target.hidden_size),
            ("token ids", self.vocab_size, target.vocab_size),
        ]
        for layer_type, heads in self._heads.items():
            shared = target.layers.get(layer_type)
            theirs = None if shared is None else (shared.num_heads, shared.head_dim)
            needed = (heads.num_key_value_heads, heads.head_dim)
            facts.append((f"K/V heads and their size, {layer_type},", needed, theirs))
        for what, needed, theirs in facts:
            if needed != theirs:
                raise ConfigError(
                    f"the assistant {self.name!r} does not fit the target {target.name!r}: {what} "
                    f"of {needed} against {theirs}"
                )

    @torch.inference_mode()
    def step(
        self,
        embeddings: Tensor,
        hidden: Tensor,
        positions: Tensor,
        context: CrossContext | ProbeContext,
    ) -> tuple[Tensor, Tensor]:
        """One draft token for each of T rows.

        embeddings, hidden: `[T, hidden_size]` of the last token, drafted or not, and of what came
        before. positions: `[T]` of the last committed tokens, int64 on the CPU. Returns fp32
        logits `[T, vocab_size]` and the next `hidden`.
        """
        inputs = torch.cat([embeddings.to(self._head_weight), hidden.to(self._head_weight)], dim=-1)
        states = self._network.model(
            inputs_embeds=self._network.pre_projection(inputs[None]),
            attention_mask=_NO_MASKS,
            position_ids=positions[None].to(self.device),
            shared_kv_states=self._unused,
            use_cache=False,
            logits_to_keep=positions,  # a tensor: the library drops tokens for a number
            forerun_context=context,
        ).last_hidden_state
        return self._logits(states).float(), self._network.post_projection(states)[0]

    def _logits(self, states: Tensor) -> Tensor:
        """`[1, T, D]` to `[T, vocab_size]`."""
        ordered = self._network.masked_embedding
        if ordered is None:
            logits: Tensor = self._network.lm_head(states)[0]
            return logits
        # A row at a time: tokens left out get the least logit of all rows less one.
        rows = [ordered(row[None, None], self._head_weight)[0, 0] for row in states[0]]
        return torch.stack(rows)


def _share_all_layers(text: Any) -> None:
    """Say that every layer reads the K/V of others.

    transformers 5.23 cannot build any assistant without: its configs look for the layers that write
    among the assistant's own, where there are none, and raise ValueError.
    """
    text.attribute_map = {**text.attribute_map, "kv_sharing_modes": "forerun_sharing_modes"}
    text.forerun_sharing_modes = ["reuse"] * text.num_hidden_layers


def read_target(name: str) -> tuple[Path, Target]:
    """A target's folder and what its config says. Raises ConfigError or ModelError."""
    folder = Path(resolve_model(name)).expanduser()
    try:
        if not folder.is_dir():
            folder = Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"]))
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelError(f"model: the target {name} cannot be read: {error}") from error
    return folder, Target.of(name, config)


def load_embedding(folder: Path, target: Target, device: torch.device, dtype: torch.dtype) -> Embed:
    """The target's input embedding, scaled as the target scales it, and nothing else of it.

    Raises ModelError when the folder does not hold it.
    """
    try:
        weight = _find_embedding(folder).to(device, dtype)
    except (OSError, SafetensorError, KeyError) as error:
        raise ModelError(f"model: no input embedding in {folder}: {error}") from error
    if weight.shape != (target.vocab_size, target.hidden_size):
        raise ModelError(f"model: the embedding in {folder} is {tuple(weight.shape)}")
    scale = torch.tensor(target.hidden_size**0.5).to(dtype)
    return lambda token_ids: F.embedding(token_ids.to(device), weight) * scale


def _find_embedding(folder: Path) -> Tensor:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - not a mapping
                if name.endswith("embed_tokens.weight"):
                    tensor: Tensor = weights.get_tensor(name)
                    return tensor
    raise KeyError("embed_tokens.weight")
