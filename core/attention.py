"""Attention over the slot cache for a ragged batch.

All tokens of all rows lie one behind the other, `[1, T]`, without padding; only attention knows
rows, and attends them in groups (core/grouping.py). Shapes: T tokens, n slots of a group, q queries
per slot, L keys, H KV heads, r query heads per KV head, D head size. For bf16 on a CPU a token gets
the same bits in whatever group it is (`Group.is_fixed`). Knows nothing of transformers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from core.grouping import KEY_BLOCK, MAX_GROUPED_TOKENS, Group, make_groups
from core.grouping import Segment as Segment
from core.kv_cache import LayerSpec, SlotCache
from core.stages import to_device


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What a layer asks of attention. `window`: keys a token sees, itself included."""

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None  # [H * r]: a logit per head that takes probability, adds nothing

    @property
    def can_fuse(self) -> bool:
        """Whether torch's fused attention can do it."""
        return self.softcap is None and self.sinks is None


class RaggedContext:
    """One forward's view of the cache; travels through the model to `attend`."""

    def __init__(self, cache: SlotCache, segments: Sequence[Segment]) -> None:
        """`segments` sorted by (is_long, slot), in the order of the batch's tokens."""
        self._cache = cache
        self._segments = segments
        self._groups: dict[bool, list[Group]] = {}
        slots = [segment.slot for segment in segments for _ in range(segment.count)]
        indices = [index for segment in segments for index in range(segment.start, segment.stop)]
        self._tokens = torch.tensor([slots, indices])
        self._rows: dict[tuple[int, torch.device], Tensor] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Write `[1, H, T, D]` key and value to the cache and attend with `[1, H * r, T, D]`
        queries over everything each row has there. Returns `[1, T, H * r, D]`."""
        if self._cache.layers[layer].source == layer:
            self._write(layer, key[0], value[0])
        return self.read(layer, query, options)

    def read(self, layer: int, query: Tensor, options: AttentionOptions) -> Tensor:
        """Attend over what the cache holds of a layer, without writing; shapes as `attend`."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        is_fixed = keys.dtype == torch.bfloat16 and keys.device.type == "cpu"
        if is_fixed not in self._groups:
            self._groups[is_fixed] = make_groups(self._segments, is_fixed)
        groups = self._groups[is_fixed]
        outputs = [_attend_group(group, query[0], keys, values, options) for group in groups]
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None]

    def _write(self, layer: int, key: Tensor, value: Tensor) -> None:
        if len(self._segments) > 1:
            self._cache.write(layer, key, value, self._row_index(layer, key.device))
            return
        (segment,) = self._segments  # one slice, which is faster than an index
        indices = slice(segment.start, segment.stop)
        self._cache.keys[layer][segment.slot, :, indices] = key
        self._cache.values[layer][segment.slot, :, indices] = value

    def _row_index(self, layer: int, device: torch.device) -> Tensor:
        num_heads = self._cache.layers[layer].num_heads
        if (num_heads, device) not in self._rows:
            slots, indices = to_device(self._tokens, device)
            self._rows[num_heads, device] = self._cache.row_index(slots, indices, num_heads)
        return self._rows[num_heads, device]


def _attend_group(
    group: Group, query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions
) -> Tensor:
    """`[H * r, T, D]` queries of the batch to `[T of the group, H * r, D]`."""
    query = query[:, group.tokens]
    if not group.is_dense:
        gather, keep = group.gather(query.device)
        query = query.index_select(1, gather)
    n, q, heads = group.num_slots, group.num_queries, keys.shape[1]
    repeats, span = query.shape[0] // heads, group.keys(options.window)
    may_fuse = options.can_fuse and not group.is_fixed
    if may_fuse and n == 1 and q > MAX_GROUPED_TOKENS:
        slot = group.slots.start
        return _attend_long(group, query, keys[slot, :, span], values[slot, :, span], options)
    # The query heads of a KV head become more queries: no K or V is repeated.
    if q == 1:
        folded = query.transpose(0, 1).reshape(n * heads, repeats, -1)
    else:
        folded = query.view(heads, repeats, n, q, -1).permute(2, 0, 1, 3, 4)
        folded = folded.reshape(n * heads, repeats * q, -1)
    if may_fuse:
        output = F.scaled_dot_product_attention(
            folded.view(n, heads, repeats * q, -1),
            keys[group.slots, :, span],
            values[group.slots, :, span],
            attn_mask=group.folded_mask(options.window, repeats, query),
            scale=options.scaling,
        )
    else:
        lanes = slice(group.slots.start * heads, group.slots.stop * heads)
        part = [_extend(cache.flatten(0, 1)[lanes, span], span) for cache in (keys, values)]
        output = _attend_by_hand(group, folded, part[0], part[1], options)
    if q == 1:
        output = output.reshape(n, heads * repeats, -1)
    else:
        output = output.view(n, heads, repeats, q, -1).permute(0, 3, 1, 2, 4)
        output = output.reshape(n * q, heads * repeats, -1)
    return output if group.is_dense else output.index_select(0, keep)


def _extend(cached: Tensor, span: slice) -> Tensor:
    """Append zeros to `[.., L, D]` where `span` reaches beyond the end of the cache."""
    missing = span.stop - span.start - cached.shape[1]
    return F.pad(cached, (0, 0, 0, missing)) if missing else cached


def _attend_long(
    group: Group, query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions
) -> Tensor:
    """A prompt's chunk: KV heads are the batch, so that one `[q, L]` mask, or none, will do."""
    heads, num_keys, _ = keys.shape
    repeats, q = query.shape[0] // heads, query.shape[1]
    query = query.reshape(heads, repeats, q, -1)
    is_causal = num_keys == q and (options.window is None or q <= options.window)
    is_causal = is_causal and not group.is_tree
    mask = None if is_causal else group.folded_mask(options.window, 1, query)
    output = F.scaled_dot_product_attention(
        query,
        keys[:, None].expand(-1, repeats, -1, -1),
        values[:, None].expand(-1, repeats, -1, -1),
        attn_mask=mask,
        is_causal=is_causal,
        scale=options.scaling,
    )
    return output.permute(2, 0, 1, 3).flatten(1, 2)


def _attend_by_hand(
    group: Group, query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions
) -> Tensor:
    """What the fused kernels lack, or do otherwise in another batch. `[n * H, r * q, D]` queries,
    `[n * H, L, D]` keys and values. Scores are computed in the model's type, as transformers'
    eager functions do, and then kept in fp32."""
    n, q, num_keys = group.num_slots, group.num_queries, keys.shape[1]
    # K on the left: the other way round, oneDNN re-lays K at each call (5 x the time).
    scores = torch.bmm(keys, query.transpose(1, 2)).transpose(1, 2)
    scores = scores.view(n, keys.shape[0] // n, query.shape[1] // q, q, num_keys)
    mask = group.mask(options.window, query.device)
    logits = torch.empty(scores.shape, dtype=torch.float32, device=query.device)
    if options.softcap is None:
        torch.add(mask, scores, alpha=options.scaling, out=logits)
    else:
        capped = torch.tanh(scores.float() * options.scaling / options.softcap) * options.softcap
        torch.add(mask, capped, out=logits)
    if options.sinks is None:
        weights = torch.softmax(logits, dim=-1)
    else:
        sinks = options.sinks.float().view(1, *scores.shape[1:3], 1, 1)
        logits = torch.cat([logits, sinks.expand(n, -1, -1, q, 1)], dim=-1)
        weights = torch.softmax(logits, dim=-1)[..., :num_keys]
    weights = weights.to(values.dtype).view(-1, query.shape[1], num_keys)
    if num_keys <= KEY_BLOCK or not group.is_fixed:
        return torch.bmm(weights, values)
    total = torch.zeros(())
    first = group.keys(options.window).start
    for start in range(-(first % KEY_BLOCK), num_keys, KEY_BLOCK):
        block = slice(max(start, 0), start + KEY_BLOCK)
        total = total + torch.bmm(weights[..., block], values[:, block]).float()
    return total.to(values.dtype)


class ProbeContext:
    """Stands in for RaggedContext in the first forward after loading: learns the layers."""

    def __init__(self) -> None:
        self._specs: dict[int, LayerSpec] = {}
        self._keys: dict[int, Tensor] = {}
        self.options: dict[int, AttentionOptions] = {}
        self.num_calls = 0

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Record the layer's geometry. Returns zeros `[1, T, H * r, D]`."""
        shared = [index for index, other in self._keys.items() if other is key]
        self._keys[layer] = key
        self.options[layer] = options
        self.num_calls += 1
        self._specs[layer] = LayerSpec(
            num_heads=key.shape[1],
            key_dim=key.shape[3],
            value_dim=value.shape[3],
            device=query.device,
            dtype=key.dtype,
            source=shared[0] if shared else layer,
        )
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    @property
    def layers(self) -> list[LayerSpec]:
        """The layers in order, once a forward has passed."""
        return [self._specs[index] for index in sorted(self._specs)]
