"""The slot cache: one fixed block of K/V memory per live sequence, all of it taken at load.

Per layer, K and V are `[S, H, M, D]` (S slots, H KV heads, M tokens, D head size) on the device
that layer runs on. A live sequence leases a slot; a finished one leaves its tokens behind in its
slot as a *retained* prefix that later sequences may take over or copy, until the slot is needed.

    slot      0     1     2     3     4         live slots are contiguous (`place` sees to it), so
    owner     -    s7    s2    s9     -         a batch attends over views, never over gathers
    tokens  [..]  [...]  [.]  [....]  []        tokens whose K/V are in the slot, from index 0

Knows nothing of models or batches: who calls `write` says which cache index each K/V row has.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from core.errors import ForerunError, ModelError
from core.huge_pages import prefer_huge_pages

#: Shorter matches are not worth the copies (two small ones per layer).
MIN_REUSED_TOKENS = 8


class NoSlotError(ForerunError):
    """All slots are leased to live sequences."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """K/V geometry of one layer, from its first call. `source` is the layer whose K/V it reads:
    itself, or an earlier one where a model shares them between layers."""

    num_heads: int
    key_dim: int
    value_dim: int
    device: torch.device
    dtype: torch.dtype
    source: int


@dataclass(slots=True)
class _Slot:
    owner: int | None = None
    token_ids: list[int] = field(default_factory=list)
    last_used: int = 0


class SlotCache:
    """K/V slots, their leases and the token ids in them. Not thread-safe."""

    def __init__(self, layers: Sequence[LayerSpec], max_sequences: int, max_length: int) -> None:
        """Allocate and touch everything. Raises ModelError that says how much was needed."""
        self.layers = tuple(layers)
        self.max_sequences = max_sequences
        self.max_length = max_length
        self._slots = [_Slot() for _ in range(max_sequences)]
        self._slot_of: dict[int, int | None] = {}  # None: opened, no slot needed yet
        self._clock = 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        on_host = [layer for layer in self.layers if layer.device.type == "cpu"]
        if self.num_bytes * len(on_host) > _available_bytes() * len(self.layers):
            raise self._no_room(torch.device("cpu"))  # Linux would grant it, and kill us later
        for index, layer in enumerate(self.layers):
            if layer.source == index:
                self.keys.append(self._allocate(layer, layer.key_dim))
                self.values.append(self._allocate(layer, layer.value_dim))
            else:
                self.keys.append(self.keys[layer.source])
                self.values.append(self.values[layer.source])
        self._storage = [
            tensor
            for index, layer in enumerate(self.layers)
            if layer.source == index
            for tensor in (self.keys[index], self.values[index])
        ]

    def _allocate(self, layer: LayerSpec, dim: int) -> Tensor:
        shape = (self.max_sequences, layer.num_heads, self.max_length, dim)
        try:
            # Not torch.zeros: its pages would be taken only when first written, in mid-flight.
            memory = torch.empty(shape, dtype=layer.dtype, device=layer.device)
            return prefer_huge_pages(memory).zero_()
        except (RuntimeError, MemoryError) as error:  # includes torch's OutOfMemoryError
            raise self._no_room(layer.device) from error

    def _no_room(self, device: torch.device) -> ModelError:
        return ModelError(
            f"the K/V cache needs {self.num_bytes} bytes (max_sequences {self.max_sequences} x "
            f"max_length {self.max_length}) and {device} has no room for it: lower one of the two"
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots of all layers."""
        per_token = sum(
            layer.num_heads * (layer.key_dim + layer.value_dim) * layer.dtype.itemsize
            for index, layer in enumerate(self.layers)
            if layer.source == index
        )
        return per_token * self.max_sequences * self.max_length

    @property
    def num_live(self) -> int:
        """Open sequences."""
        return len(self._slot_of)

    # ------------------------------------------------------------ leases

    def open(self, sequence: int) -> None:
        """Lease room for a new sequence. Raises NoSlotError when there is none."""
        assert sequence not in self._slot_of, f"sequence {sequence} is already open"
        if len(self._slot_of) >= self.max_sequences:
            raise NoSlotError(f"all {self.max_sequences} sequences are in use")
        self._slot_of[sequence] = None

    def close(self, sequence: int) -> None:
        """End a lease; the tokens stay as a retained prefix. Unknown sequences are ignored."""
        index = self._slot_of.pop(sequence, None)
        if index is not None:
            self._slots[index].owner = None
            self._touch(index)

    def is_open(self, sequence: int) -> bool:
        """Whether the sequence is live."""
        return sequence in self._slot_of

    def token_ids(self, sequence: int) -> Sequence[int]:
        """The cached tokens of a live sequence; the cache's own list, do not change or keep it."""
        index = self._slot_of[sequence]
        return () if index is None else self._slots[index].token_ids

    def truncate(self, sequence: int, length: int) -> None:
        """Forget the tokens from `length` on."""
        index = self._slot_of[sequence]
        assert 0 <= length <= len(self.token_ids(sequence)), "cannot truncate to more than there is"
        if index is not None:
            del self._slots[index].token_ids[length:]

    def extend(self, sequence: int, token_ids: Sequence[int]) -> None:
        """Note that the K/V of these tokens were written behind the cached ones."""
        index = self._slot_of[sequence]
        assert index is not None, "extend before place"
        self._slots[index].token_ids.extend(token_ids)
        assert len(self._slots[index].token_ids) <= self.max_length

    def place(self, sequences: Sequence[int]) -> list[int]:
        """Slots of live sequences, given to those that have none, after closing every gap between
        live slots. A slot number is good until the next call of this class."""
        for sequence in sequences:
            if self._slot_of[sequence] is None:
                self._take(self._coldest(), sequence)
        self._compact()
        slots = [self._slot_of[sequence] for sequence in sequences]
        return [slot for slot in slots if slot is not None]

    # ------------------------------------------------------------ prefixes

    def reuse_prefix(self, sequence: int, token_ids: Sequence[int]) -> int:
        """Get K/V of tokens that follow the cached ones from any slot that has them.

        The longest match wins; at least one of `token_ids` is left to be computed. A retained
        slot that holds little else is taken over, otherwise K/V are copied. Returns the number of
        tokens gained.
        """
        own = list(self.token_ids(sequence))
        wanted = own + list(token_ids[:-1])
        index = self._slot_of[sequence]
        source, match = -1, 0
        for other, slot in enumerate(self._slots):
            length = _common_prefix(slot.token_ids, wanted)
            if other != index and length > match:
                source, match = other, length
        if match < len(own) + MIN_REUSED_TOKENS:
            return 0
        slot = self._slots[source]
        if index is None and slot.owner is None and 2 * match >= len(slot.token_ids):
            self._take(source, sequence, keep=match)
            return match
        if index is None:
            index = self._coldest(spare=source)
            self._take(index, sequence)
        self._copy(source, index, len(own), match)
        self._slots[index].token_ids[:] = wanted[:match]
        self._touch(source)
        return match - len(own)

    def _take(self, index: int, sequence: int, keep: int = 0) -> None:
        slot = self._slots[index]
        assert slot.owner is None
        slot.owner = sequence
        del slot.token_ids[keep:]
        self._slot_of[sequence] = index
        self._touch(index)

    def _touch(self, index: int) -> None:
        self._clock += 1
        self._slots[index].last_used = self._clock

    def _coldest(self, spare: int = -1) -> int:
        """The free slot that is missed least: an empty one, else the least recently used; of
        those the one nearest to the live slots. `spare` is used only if it is the only one."""
        live = [index for index in self._slot_of.values() if index is not None]
        center = sum(live) // len(live) if live else 0

        def cost(index: int) -> tuple[bool, int, int]:
            slot = self._slots[index]
            age = slot.last_used if slot.token_ids else 0
            return index == spare, age, abs(index - center)

        return min((i for i, slot in enumerate(self._slots) if slot.owner is None), key=cost)

    # ------------------------------------------------------------ memory

    def write(self, layer: int, keys: Tensor, values: Tensor, rows: Tensor) -> None:
        """Store `[H, T, D]` keys and values of one layer at `rows` `[T * H]`: indices into the
        cache seen as `[S * H * M, D]`, token by token (see `row_index`)."""
        for cache, new in ((self.keys[layer], keys), (self.values[layer], values)):
            dim = new.shape[2]
            cache.view(-1, dim).index_copy_(0, rows, new.transpose(0, 1).reshape(-1, dim))

    def row_index(self, slots: Tensor, indices: Tensor, num_heads: int) -> Tensor:
        """`rows` of `write` for tokens `[T]` at cache index `indices` of `slots`."""
        heads = torch.arange(num_heads, device=slots.device)
        lanes = slots[:, None] * num_heads + heads
        return (lanes * self.max_length + indices[:, None]).flatten()

    def _copy(self, source: int, target: int, start: int, stop: int) -> None:
        for tensor in self._storage:
            tensor[target, :, start:stop] = tensor[source, :, start:stop]

    def _swap(self, a: int, b: int) -> None:
        """Exchange two slots, moving only the tokens there are."""
        first, second = self._slots[a], self._slots[b]
        num_first, num_second = len(first.token_ids), len(second.token_ids)
        for tensor in self._storage:
            saved = tensor[a, :, :num_first].clone()
            tensor[a, :, :num_second] = tensor[b, :, :num_second]
            tensor[b, :, :num_first] = saved
        self._slots[a], self._slots[b] = second, first
        for index in (a, b):
            owner = self._slots[index].owner
            if owner is not None:
                self._slot_of[owner] = index

    def _compact(self) -> None:
        """Move the shorter of the outermost live sequences into a gap until there is no gap."""
        while True:
            live = sorted(index for index in self._slot_of.values() if index is not None)
            gaps = set(range(live[0], live[-1] + 1)) - set(live) if live else set()
            if not gaps:
                return
            outer = min(live[0], live[-1], key=lambda index: len(self._slots[index].token_ids))
            gap = min(gaps, key=lambda index: len(self._slots[index].token_ids))
            self._swap(outer, gap)

    def check(self) -> None:
        """Assert that leases and slots agree; for tests."""
        owners = {slot.owner: i for i, slot in enumerate(self._slots) if slot.owner is not None}
        leased = {sequence: i for sequence, i in self._slot_of.items() if i is not None}
        assert owners == leased, f"{owners} is not {leased}"
        assert len(self._slot_of) <= self.max_sequences
        assert all(len(slot.token_ids) <= self.max_length for slot in self._slots)


def _available_bytes() -> int:
    """Host memory that may still be taken, within this container's limit; no limit off Linux."""
    limit = 1 << 62
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        limit = next(int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable"))
        group = Path("/sys/fs/cgroup")
        stat = dict(x.split() for x in (group / "memory.stat").read_text().splitlines())
        in_use = int((group / "memory.current").read_text()) - int(stat["inactive_file"])
        limit = min(limit, int((group / "memory.max").read_text()) - in_use)
    except (OSError, ValueError, KeyError, StopIteration):
        pass  # no such files, or the limit is "max"
    return limit


def _common_prefix(a: list[int], b: list[int]) -> int:
    """Length of the longest common prefix; by bisection, since comparing slices is fast."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while low < high:  # a[:low] equals b[:low], a[:high] differs or is one longer than known
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
