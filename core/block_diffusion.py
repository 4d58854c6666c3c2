"""Block-diffusion drafters (DFlash): one forward denoises a whole block of tokens.

    context K/V   projected from hidden states of the target's layers, a token at a time:  0 ... n-2
    block         the last committed token, then mask tokens, embedded by the target:  n-1 ... n-2+B
    states        of the masks, read by the target's head: the next B - 1 tokens, all at once

A block's tokens see each other, and all context before them; their K/V are overwritten by what is
told next. The library's modules compute; our attention keeps the context, in a slot cache of its
own. Knows nothing of drafts or services.
"""

from collections.abc import Sequence
from typing import Any, Final, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModel

from core import model_facts
from core.attention import AttentionOptions, Segment
from core.config import ModelConfig
from core.errors import ConfigError
from core.features import HIDDEN_STATES
from core.grouping import group_segments
from core.kv_cache import LayerSpec, SlotCache
from core.loading import load_companion
from core.model import RaggedModel
from core.packing import pack_linears, watch_inputs

_KIND: Final = "muse_glimmer_assistant"
_NO_MASKS: Final = dict.fromkeys(("full_attention", "sliding_attention"))


class BlockContext:
    """Travels through a drafter's layers: keeps the K/V of what is told, and of the blocks while
    they are attended to."""

    def __init__(
        self, cache: SlotCache, told: Sequence[Segment], blocks: Sequence[Segment]
    ) -> None:
        """told: of context tokens, in any order. blocks: of equal length, sorted by slot."""
        self._cache = cache
        written = [*told, *blocks]
        slots = [segment.slot for segment in written for _ in range(segment.count)]
        indices = [index for segment in written for index in range(segment.start, segment.stop)]
        self._tokens = torch.tensor([slots, indices])
        self._rows: dict[tuple[int, torch.device], Tensor] = {}
        self._groups = [_BlockGroup(group) for group in group_segments(blocks)]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """`[1, H * r, Tb, D]` queries of the blocks to `[1, Tb, H * r, D]`. `[1, H, Tt + Tb, D]`
        keys and values, those of what is told first."""
        assert options.can_fuse
        place = key.shape[1], key.device
        if place not in self._rows:
            slots, indices = self._tokens.to(key.device)
            self._rows[place] = self._cache.row_index(slots, indices, key.shape[1])
        self._cache.write(layer, key[0], value[0], self._rows[place])
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        sizes = [group.num_tokens for group in self._groups]
        outputs = [
            group.attend(part, keys, values, options)
            for group, part in zip(self._groups, torch.split(query[0], sizes, dim=1), strict=True)
        ]
        return torch.cat(outputs)[None]


class _BlockGroup:
    """Blocks of neighbouring slots, attended in one call: each token sees all of its row, or what
    is at most a window away from it. A slot between them that has no block computes in vain."""

    def __init__(self, blocks: Sequence[Segment]) -> None:
        self._slots = slice(blocks[0].slot, blocks[-1].slot + 1)
        self._lanes = [block.slot - blocks[0].slot for block in blocks]
        self._count = blocks[0].count
        self._first = min(block.start for block in blocks)
        self._stop = max(block.stop for block in blocks)
        self._masks: dict[tuple[object, ...], Tensor] = {}
        self._starts = torch.zeros(self._slots.stop - self._slots.start, dtype=torch.long)
        self._starts[self._lanes] = torch.tensor([block.start for block in blocks])
        self.num_tokens = len(blocks) * self._count

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions
    ) -> Tensor:
        """`[H * r, T, D]` queries over a layer of the cache to `[T, H * r, D]`."""
        n, heads, size = len(self._starts), keys.shape[1], query.shape[-1]
        folded = query.new_zeros(n, query.shape[0], self._count, size)
        parts = query.reshape(query.shape[0], -1, self._count, size)
        folded[self._lanes] = parts.transpose(0, 1)
        window = options.window
        span = slice(0 if window is None else max(0, self._first - window), self._stop)
        output = F.scaled_dot_product_attention(
            folded.view(n, heads, -1, size),  # the query heads of a KV head become more queries
            keys[self._slots, :, span],
            values[self._slots, :, span],
            attn_mask=self._mask(window, query.shape[0] // heads, span, query),
            scale=options.scaling,
        )
        output = output.reshape(n, -1, self._count, size)[self._lanes]
        return output.transpose(1, 2).flatten(0, 1)

    def _mask(self, window: int | None, repeats: int, span: slice, like: Tensor) -> Tensor:
        """What is seen, `[n, 1, repeats * count, L]`, made once per forward for all equal layers.
        A window counts the keys on either side of a token."""
        place = window, repeats, like.device
        if place not in self._masks:
            starts = self._starts.to(like.device)[:, None, None]
            keys = torch.arange(span.start, span.stop, device=like.device)
            offsets = torch.arange(self._count, device=like.device)[:, None]
            seen = (keys < starts + self._count).expand(-1, self._count, -1)
            if window is not None:
                seen = seen & ((keys - starts - offsets).abs() <= window)
            self._masks[place] = seen.repeat(1, repeats, 1)[:, None]
        return self._masks[place]


class BlockDrafter:
    """A loaded block-diffusion drafter.

    Attributes:
        name. max_length: of a sequence. block_size: tokens of a block, the committed one included.
        mask_token_id: stands for a token to guess.
        layer_ids: the target's layers whose hidden states it is told of, in order.
        layers: its own, for a cache. no_features: `[0, len(layer_ids) * hidden_size]`, of the type
            and on the device that it computes in.
    """

    def __init__(self, network: Any, name: str, is_packed: bool) -> None:
        """Use `load`. `network` uses our attention function."""
        config = network.config
        self._network = network
        self._hidden_size: int = config.hidden_size
        self._like: Tensor = network.norm.weight
        self.name = name
        self.max_length = model_facts.max_length(config)
        self.block_size: int = config.block_size
        self.mask_token_id: int = config.mask_token_id
        self.layer_ids: tuple[int, ...] = tuple(config.target_layer_ids)
        num_features = config.hidden_size * len(self.layer_ids)
        self.no_features = self._like.new_empty(0, num_features)
        self.layers = [
            LayerSpec(
                config.num_key_value_heads,
                layer.self_attn.head_dim,
                layer.self_attn.head_dim,
                layer.self_attn.k_proj.weight.device,
                self._like.dtype,
                index,
            )
            for index, layer in enumerate(network.layers)
        ]
        if is_packed:
            slot = SlotCache(self.layers, 1, 2)
            told, block = [Segment(0, 0, 1)], [Segment(0, 1, 1)]
            zeros = self._like.new_zeros(1, self._hidden_size)
            features = self._like.new_zeros(1, num_features)
            with watch_inputs(network) as groups:
                self.run(features, zeros, [0, 1], BlockContext(slot, told, block))
            pack_linears(network, groups)

    @classmethod
    def load(cls, config: ModelConfig) -> Self:
        """Load a checkpoint. Raises ConfigError when it is no such drafter, ModelError when it
        cannot be loaded."""
        network = load_companion(config, AutoModel, "dflash", (_KIND,))
        return cls(network, config.model, config.pack_weights)

    def check(self, target: RaggedModel) -> None:
        """Raise ConfigError, naming both sides, for a target it was not made for."""
        size = target.network.config.get_text_config().hidden_size
        problem = ""
        if size != self._hidden_size:
            problem = f"hidden states of {self._hidden_size} against {size}"
        elif not all(0 <= index < target.num_layers for index in self.layer_ids):
            problem = f"layers {list(self.layer_ids)} against {target.num_layers} there are"
        elif self.mask_token_id >= target.vocab_size:
            problem = f"mask token {self.mask_token_id} against {target.vocab_size} token ids"
        if problem:
            raise ConfigError(
                f"the drafter {self.name!r} does not fit the target {target.identity.model!r}: "
                f"{problem}"
            )

    @torch.inference_mode()
    def run(
        self,
        features: Tensor,
        embeddings: Tensor,
        positions: Sequence[int],
        context: BlockContext,
    ) -> Tensor:
        """Take in what is told and denoise some blocks (at least one token), all in one forward.

        features: `[Tt, len(layer_ids) * hidden_size]`. embeddings: `[Tb, hidden_size]`.
        positions: of all Tt + Tb. Returns `[Tb, hidden_size]` for the target's head.
        """
        states: Tensor = self._network(
            noise_embeds=embeddings.to(self._like)[None],
            context_hidden_states=features.to(self._like)[None],
            attention_mask=_NO_MASKS,
            position_ids=torch.tensor([positions]).to(self._like.device),
            use_cache=False,
            forerun_context=context,
        ).last_hidden_state
        return states[0]


class TargetEnds:
    """What a block-diffusion drafter uses of its target: the embedding, the head, the features."""

    def __init__(self, target: RaggedModel) -> None:
        self._network = target.network
        self._device = target.device
        self._num_layers = target.num_layers
        self._text = target.network.config.get_text_config()

    def features(self, layer_ids: Sequence[int]) -> tuple[str, ...]:
        """Names of the hidden states behind these layers. Behind the last one the library, unless
        a config says otherwise, means the normed state."""
        is_tied = getattr(self._text, "tie_last_hidden_states", None) is not False
        last = self._num_layers - 1
        return tuple(
            HIDDEN_STATES if index == last and is_tied else f"{HIDDEN_STATES}:{index}"
            for index in layer_ids
        )

    @torch.inference_mode()
    def embed(self, token_ids: Sequence[int]) -> Tensor:
        """`[T]` ids to `[T, hidden_size]`, without a norm that is part of the target's embedding:
        such drafters are trained without."""
        embedding = self._network.get_input_embeddings()
        ids = torch.tensor(token_ids).to(self._device)
        if getattr(embedding, "embed_norm", None) is not None:
            return nn.Embedding.forward(embedding, ids)
        embeddings: Tensor = embedding(ids)
        return embeddings

    @torch.inference_mode()
    def logits(self, states: Tensor) -> Tensor:
        """`[.., hidden_size]` to fp32 `[.., vocab_size]`, scaled and capped as the target's are."""
        head = self._network.get_output_embeddings()
        logits: Tensor = head(states.to(self._device, self._network.dtype)).float()
        if scale := getattr(self._text, "output_multiplier", None):
            logits = logits * scale
        if cap := getattr(self._text, "final_logit_softcapping", None):
            logits = torch.tanh(logits / cap) * cap
        return logits
