"""Which rows of a ragged batch are attended together, and over which keys.

Rows are attended in groups of neighbouring slots, so that K and V are views of the cache:

    tokens   a a a b c c | d d d d d ...          short rows grouped, a long row (prompt) alone
    group 0  slots 2..5: K[2:6, :, :L]            queries padded to the longest row, and to a slot
                                                  that has no row; what padding computes is dropped
n slots of a group, q queries per slot, L keys. A token's cache *index* and its *position* are two
things: position reaches the model only as position_ids; everything here is about indices, and they
differ only for nodes (core/tree.py). Knows nothing of K and V themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from core.stages import to_device
from core.tree import Node

#: Rows of at most this many tokens share a group; longer ones fill a kernel by themselves.
MAX_GROUPED_TOKENS = 32
#: Keys read in vain that cost as much as one more group (measured: ~60 us per layer on a CPU).
GROUP_COST_TOKENS = 1024
#: What a key costs more with each further query (measured: ~13 ns beside ~60 of the first).
QUERY_COST = 0.22
#: What makes oneDNN add up a token's keys in one order, whatever the batch: as many keys as a
#: multiple of KEY_STEP, hidden ones among them; the first at a multiple of WINDOW_STEP; weights and
#: values multiplied in blocks that begin at multiples of KEY_BLOCK. See docs/engine.md.
KEY_STEP = 64
WINDOW_STEP = 512
KEY_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Segment:
    """`count` tokens of a row, at cache indices `start`, `start + 1`, ... of `slot`.

    nodes: what each of them stands behind, where that is not all that lies in front of it.
    """

    slot: int
    start: int
    count: int
    nodes: tuple[Node, ...] = ()

    @property
    def stop(self) -> int:
        """One behind the last cache index; also the number of keys the last token may see."""
        return self.start + self.count

    @property
    def positions(self) -> list[int]:
        """The tokens in front of each of them."""
        return [n.position for n in self.nodes] or list(range(self.start, self.stop))

    @property
    def first_position(self) -> int:
        """The fewest tokens in front of one of them."""
        return min(self.positions) if self.nodes else self.start

    @property
    def is_long(self) -> bool:
        """Whether it is attended alone."""
        return self.count > MAX_GROUPED_TOKENS

    def blocks(self) -> "list[Segment]":
        """Its tokens in segments that are not long."""
        parts = [
            slice(i, min(i + MAX_GROUPED_TOKENS, self.count))
            for i in range(0, self.count, MAX_GROUPED_TOKENS)
        ]
        return [
            Segment(self.slot, self.start + part.start, part.stop - part.start, self.nodes[part])
            for part in parts
        ]


def group_segments(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Split segments, sorted by (is_long, slot), into groups that are cheapest to attend.

    A group costs its slots, gaps included, times the keys of its longest row, more of them with
    more queries, and GROUP_COST_TOKENS.
    """
    num_short = sum(not segment.is_long for segment in segments)
    best = [0.0]  # the cost of the segments before the i-th
    begins = [0]  # where the last group of these begins
    for end in range(1, num_short + 1):
        last_slot, num_keys, num_queries = segments[end - 1].slot, 0, 0
        cost, begin = float("inf"), end - 1
        for i in range(end - 1, -1, -1):
            segment = segments[i]
            num_keys = max(num_keys, segment.stop)
            num_queries = max(num_queries, segment.count)
            num_slots = last_slot - segment.slot + 1
            group = GROUP_COST_TOKENS + num_slots * num_keys * (1 + QUERY_COST * (num_queries - 1))
            if group >= cost:  # it only grows from here
                break
            if best[i] + group < cost:
                cost, begin = best[i] + group, i
        best.append(cost)
        begins.append(begin)
    groups = [[segment] for segment in segments[num_short:]]
    while num_short:
        begin = begins[num_short]
        groups.insert(0, list(segments[begin:num_short]))
        num_short = begin
    return groups


class Group:
    """Rows that are attended by one call per layer. `is_fixed`: with the same bits in any group."""

    def __init__(self, segments: Sequence[Segment], first_token: int, is_fixed: bool) -> None:
        self.is_fixed = is_fixed
        self.tokens = slice(first_token, first_token + sum(s.count for s in segments))
        self.slots = slice(segments[0].slot, segments[-1].slot + 1)
        self.num_slots = self.slots.stop - self.slots.start
        self.num_queries = max(segment.count for segment in segments)
        self.num_keys = max(segment.stop for segment in segments)
        self.min_position = min(segment.first_position for segment in segments)
        self.is_tree = any(segment.nodes for segment in segments)
        self.is_dense = self.num_slots * self.num_queries == self.tokens.stop - first_token
        self.needs_no_mask = self.num_queries == 1 and self.min_position == self.num_keys - 1
        self._masks: dict[tuple[int | None, torch.device], Tensor] = {}
        self._folded_masks: dict[tuple[object, ...], Tensor] = {}
        self._layout(segments)

    def _layout(self, segments: Sequence[Segment]) -> None:
        """Index tensors, on the CPU. Padding repeats a row's last token; a slot without a row
        (its queries are dropped) stands at the last key. `indices` is the last key of those that a
        query sees from the first one on; of a node, `paths` lists what it sees beside them."""
        gather: list[list[int]] = [[0] * self.num_queries for _ in range(self.num_slots)]
        indices = [[self.num_keys - 1] * self.num_queries for _ in range(self.num_slots)]
        positions = [list(lane) for lane in indices] if self.is_tree else indices
        paths: list[tuple[int, int, int, int]] = []  # lane, query, key, how far in front of it
        keep: list[int] = []
        offset = 0
        for segment in segments:
            lane = segment.slot - self.slots.start
            order = [min(i, segment.count - 1) for i in range(self.num_queries)]
            gather[lane] = [offset + i for i in order]
            indices[lane] = [segment.start + i for i in order]
            if self.is_tree:
                own = segment.positions
                positions[lane] = [own[i] for i in order]
            if segment.nodes:
                indices[lane] = [segment.nodes[i].num_plain - 1 for i in order]
                for query, i in enumerate(order):
                    path = segment.nodes[i].path
                    paths += [(lane, query, key, far) for far, key in enumerate(path[::-1])]
            keep += range(lane * self.num_queries, lane * self.num_queries + segment.count)
            offset += segment.count
        self.indices = torch.tensor(indices)
        self.positions = self.indices
        if self.is_tree:
            self.positions, self.paths = torch.tensor(positions), torch.tensor(paths).T  # [4, E]
        self._index = {torch.device("cpu"): (torch.tensor(gather).flatten(), torch.tensor(keep))}

    def gather(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """`[n * q]` token of each padded query, `[T]` padded query of each token."""
        if device not in self._index:
            first, second = self._index[torch.device("cpu")]
            self._index[device] = (to_device(first, device), to_device(second, device))
        return self._index[device]

    def keys(self, window: int | None) -> slice:
        """The keys to read: those that any token sees; more if is_fixed, even beyond the cache."""
        first = 0 if window is None else max(0, self.min_position - window + 1)
        if not self.is_fixed:
            return slice(first, self.num_keys)
        return slice(first // WINDOW_STEP * WINDOW_STEP, -(-self.num_keys // KEY_STEP) * KEY_STEP)

    def mask(self, window: int | None, device: torch.device) -> Tensor:
        """Additive fp32 mask `[n, 1, 1, q, L]`, made once per forward for all equal layers."""
        if (window, device) not in self._masks:
            indices = to_device(self.indices, device)[:, :, None]
            span = self.keys(window)
            keys = torch.arange(span.start, span.stop, device=device)
            hidden = keys > indices
            if window is not None:
                hidden |= keys <= to_device(self.positions, device)[:, :, None] - window
            if self.is_tree:
                self._show_paths(hidden, window, span.start)
            mask = torch.zeros(hidden.shape, device=device)
            self._masks[window, device] = mask.masked_fill_(hidden, float("-inf"))[:, None, None]
        return self._masks[window, device]

    def _show_paths(self, hidden: Tensor, window: int | None, first_key: int) -> None:
        """Let the nodes see what they stand behind, in `[n, q, L]` from `first_key` on."""
        lanes, queries, keys, far = to_device(self.paths, hidden.device)
        seen = far < (self.num_keys if window is None else window)
        hidden[lanes[seen], queries[seen], keys[seen] - first_key] = False

    def folded_mask(self, window: int | None, repeats: int, like: Tensor) -> Tensor | None:
        """The same in the type of `like` as `[n, 1, repeats * q, L]`; None if nothing is hidden."""
        if self.needs_no_mask:
            return None
        key = (window, repeats, like.device, like.dtype)
        if key not in self._folded_masks:
            mask = self.mask(window, like.device)[:, 0].to(like.dtype)
            self._folded_masks[key] = mask.repeat(1, repeats, 1, 1).flatten(1, 2)[:, None]
        return self._folded_masks[key]


def make_groups(segments: Sequence[Segment], is_fixed: bool) -> list[Group]:
    """The groups of a batch; with `is_fixed`, long rows in blocks that need little memory."""
    groups: list[Group] = []
    first = 0
    for members in group_segments(segments):
        is_cut = is_fixed and members[0].is_long
        for part in [[block] for block in members[0].blocks()] if is_cut else [members]:
            groups.append(Group(part, first, is_fixed))
            first = groups[-1].tokens.stop
    return groups
