"""Attention over the slot cache for a ragged batch: the plan of one forward, and its execution.

All tokens of all rows lie one behind the other, `[1, T]`, without padding; only attention knows
rows. Rows are attended in groups of neighbouring slots, so that K and V are views of the cache:

    tokens   a a a b c c | d d d d d ...          short rows grouped, a long row (prompt) alone
    group 0  slots 2..5: K[2:6, :, :L]            queries padded to the longest row, and to a slot
                                                  that has no row; what padding computes is dropped
Shapes: T tokens, n slots of a group, q queries per slot, L keys, H KV heads, r query heads per KV
head, D head size. A token's cache *index* and its *position* are two things: position reaches the
model only as position_ids; everything here is about indices. Knows nothing of transformers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from core.kv_cache import LayerSpec, SlotCache

#: Rows of at most this many tokens share a group; longer ones fill a kernel by themselves.
MAX_GROUPED_TOKENS = 32
#: Keys read in vain that cost as much as one more group (measured: ~60 us per layer on a CPU).
GROUP_COST_TOKENS = 1024
#: For bf16 on a CPU torch's fused attention takes twice as long as two products with a softmax
#: between them, once a group has many keys (slots x heads x length) and few queries per head.
MIN_HAND_KEYS = 2048
MAX_HAND_QUERIES = 32


@dataclass(frozen=True, slots=True)
class Segment:
    """`count` tokens of a row, at cache indices `start`, `start + 1`, ... of `slot`."""

    slot: int
    start: int
    count: int

    @property
    def stop(self) -> int:
        """One behind the last cache index; also the number of keys the last token sees."""
        return self.start + self.count

    @property
    def is_long(self) -> bool:
        """Whether it is attended alone."""
        return self.count > MAX_GROUPED_TOKENS


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


def group_segments(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Split segments, sorted by (is_long, slot), into groups that are cheapest to attend.

    A group costs its slots times its longest row, gaps included, and GROUP_COST_TOKENS.
    """

    def cost(group: Sequence[Segment]) -> int:
        return (group[-1].slot - group[0].slot + 1) * max(segment.stop for segment in group)

    groups: list[list[Segment]] = []
    for segment in segments:
        last = groups[-1] if groups else []
        alone = not last or segment.is_long or last[-1].is_long
        if alone or cost([*last, segment]) > cost(last) + cost([segment]) + GROUP_COST_TOKENS:
            groups.append([segment])
        else:
            last.append(segment)
    return groups


class _Group:
    """Rows that are attended by one call per layer."""

    def __init__(self, segments: Sequence[Segment], first_token: int) -> None:
        self.tokens = slice(first_token, first_token + sum(s.count for s in segments))
        self.slots = slice(segments[0].slot, segments[-1].slot + 1)
        self.num_slots = self.slots.stop - self.slots.start
        self.num_queries = max(segment.count for segment in segments)
        self.num_keys = max(segment.stop for segment in segments)
        self.min_index = min(segment.start for segment in segments)
        self.is_dense = self.num_slots * self.num_queries == self.tokens.stop - first_token
        self.needs_no_mask = self.num_queries == 1 and self.min_index == self.num_keys - 1
        self._masks: dict[tuple[object, ...], Tensor] = {}
        self._layout(segments)

    def _layout(self, segments: Sequence[Segment]) -> None:
        """Index tensors, on the CPU. Padding repeats a row's last token; a slot without a row
        (its queries are dropped) stands at the last key."""
        gather: list[list[int]] = [[0] * self.num_queries for _ in range(self.num_slots)]
        indices = [[self.num_keys - 1] * self.num_queries for _ in range(self.num_slots)]
        keep: list[int] = []
        offset = 0
        for segment in segments:
            lane = segment.slot - self.slots.start
            order = [min(i, segment.count - 1) for i in range(self.num_queries)]
            gather[lane] = [offset + i for i in order]
            indices[lane] = [segment.start + i for i in order]
            keep += range(lane * self.num_queries, lane * self.num_queries + segment.count)
            offset += segment.count
        self.indices = torch.tensor(indices)
        self._index = {torch.device("cpu"): (torch.tensor(gather).flatten(), torch.tensor(keep))}

    def gather(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """`[n * q]` token of each padded query, `[T]` padded query of each token."""
        if device not in self._index:
            first, second = self._index[torch.device("cpu")]
            self._index[device] = (first.to(device), second.to(device))
        return self._index[device]

    def first_key(self, window: int | None) -> int:
        """First key that any token sees."""
        return 0 if window is None else max(0, self.min_index - window + 1)

    def mask(self, window: int | None, repeats: int, like: Tensor) -> Tensor | None:
        """Additive mask `[n, 1, repeats * q, L]`, made once per forward for all equal layers."""
        if self.needs_no_mask:
            return None
        key = (window, repeats, like.device, like.dtype)
        if key not in self._masks:
            indices = self.indices.to(like.device)[:, :, None]
            keys = torch.arange(self.first_key(window), self.num_keys, device=like.device)
            hidden = keys > indices
            if window is not None:
                hidden |= keys <= indices - window
            mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
            mask.masked_fill_(hidden, float("-inf"))
            self._masks[key] = mask.repeat(1, repeats, 1)[:, None]
        return self._masks[key]


class RaggedContext:
    """One forward's view of the cache; travels through the model to `attend`."""

    def __init__(self, cache: SlotCache, segments: Sequence[Segment]) -> None:
        """`segments` sorted by (is_long, slot), in the order of the batch's tokens."""
        self._cache = cache
        self._groups: list[_Group] = []
        first = 0
        for members in group_segments(segments):
            self._groups.append(_Group(members, first))
            first = self._groups[-1].tokens.stop
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
            self._cache.write(layer, key[0], value[0], self._row_index(layer, query.device))
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        outputs = [_attend_group(group, query[0], keys, values, options) for group in self._groups]
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None]

    def _row_index(self, layer: int, device: torch.device) -> Tensor:
        num_heads = self._cache.layers[layer].num_heads
        if (num_heads, device) not in self._rows:
            slots, indices = self._tokens.to(device)
            self._rows[num_heads, device] = self._cache.row_index(slots, indices, num_heads)
        return self._rows[num_heads, device]


def _attend_group(
    group: _Group, query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions
) -> Tensor:
    """`[H * r, T, D]` queries of the batch to `[T of the group, H * r, D]`."""
    query = query[:, group.tokens]
    if not group.is_dense:
        gather, keep = group.gather(query.device)
        query = query.index_select(1, gather)
    window = slice(group.first_key(options.window), group.num_keys)
    keys, values = keys[group.slots, :, window], values[group.slots, :, window]
    if options.can_fuse and group.num_slots == 1 and group.num_queries > MAX_GROUPED_TOKENS:
        return _attend_long(group, query, keys[0], values[0], options)
    n, q, heads = group.num_slots, group.num_queries, keys.shape[1]
    repeats = query.shape[0] // heads
    # The query heads of a KV head become more queries: no K or V is repeated.
    folded = query.view(heads, repeats, n, q, -1).permute(2, 0, 1, 3, 4)
    folded = folded.reshape(n, heads, repeats * q, -1)
    mask = group.mask(options.window, repeats, query)
    by_hand = (
        query.dtype == torch.bfloat16
        and query.device.type == "cpu"
        and repeats * q <= MAX_HAND_QUERIES
        and n * heads * keys.shape[2] >= MIN_HAND_KEYS
    )
    if options.can_fuse and not by_hand:
        output = F.scaled_dot_product_attention(
            folded, keys, values, attn_mask=mask, scale=options.scaling
        )
    else:
        output = _attend_by_hand(folded, keys, values, mask, options)
    output = output.view(n, heads, repeats, q, -1).permute(0, 3, 1, 2, 4)
    output = output.reshape(n * q, heads * repeats, -1)
    return output if group.is_dense else output.index_select(0, keep)


def _attend_long(
    group: _Group, query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions
) -> Tensor:
    """A prompt's chunk: KV heads are the batch, so that one `[q, L]` mask, or none, will do."""
    heads, num_keys, _ = keys.shape
    repeats, q = query.shape[0] // heads, query.shape[1]
    query = query.reshape(heads, repeats, q, -1)
    is_causal = num_keys == q and (options.window is None or q <= options.window)
    mask = None if is_causal else group.mask(options.window, 1, query)
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
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, options: AttentionOptions
) -> Tensor:
    """What the fused kernels lack, or are slow at. Scores are computed in the model's type, as
    transformers' eager functions do, and then kept in fp32."""
    # K on the left: the other way round, oneDNN re-lays K at each call (5 x the time).
    scores = torch.matmul(keys, query.transpose(2, 3)).transpose(2, 3).float()
    scores *= options.scaling
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if mask is not None:
        scores += mask
    if options.sinks is not None:
        sinks = options.sinks.float().view(1, keys.shape[1], -1, 1)
        sinks = sinks.repeat_interleave(scores.shape[2] // sinks.shape[2], dim=2)
        scores = torch.cat([scores, sinks.expand(scores.shape[0], -1, -1, 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : keys.shape[2]]
    return torch.matmul(weights.to(values.dtype), values)


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
