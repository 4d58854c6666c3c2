"""The slot cache: one fixed block of K/V memory per live sequence, all of it taken at load.

A live sequence leases a slot; a finished one leaves its tokens behind in its slot as a *retained*
prefix that later sequences may take over or copy, until the slot is needed. The memory itself is in
core/slot_memory.py.

    slot      0     1     2     3     4         live slots are contiguous (`place` sees to it), so
    owner     -    s7    s2    s9     -         a batch attends over views, never over gathers
    tokens  [..]  [...]  [.]  [....]  []        tokens whose K/V are in the slot, from index 0

Behind its tokens a live slot may hold *nodes* (core/tree.py) for a while: tokens side by side, of
which one branch is kept and all others are forgotten.

Knows nothing of models or batches: who calls `write` says which cache index each K/V row has.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from core.errors import ForerunError
from core.slot_memory import LayerSpec as LayerSpec
from core.slot_memory import SlotMemory
from core.tree import Node

#: Shorter matches are not worth the copies (two small ones per layer).
MIN_REUSED_TOKENS = 8


class NoSlotError(ForerunError):
    """All slots are leased to live sequences."""


@dataclass(slots=True)
class _Slot:
    owner: int | None = None
    token_ids: list[int] = field(default_factory=list)
    node_ids: list[int] = field(default_factory=list)  # tokens of the nodes behind `token_ids`
    last_used: int = 0

    @property
    def num_used(self) -> int:
        """Cache indices in use."""
        return len(self.token_ids) + len(self.node_ids)


class SlotCache(SlotMemory):
    """K/V slots, their leases and the token ids in them. Not thread-safe."""

    def __init__(self, layers: Sequence[LayerSpec], max_sequences: int, max_length: int) -> None:
        """Allocate and touch everything. Raises ModelError that says how much was needed."""
        super().__init__(layers, max_sequences, max_length)
        self._slots = [_Slot() for _ in range(max_sequences)]
        self._slot_of: dict[int, int | None] = {}  # None: opened, no slot needed yet
        self._clock = 0

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
            self._slots[index].node_ids.clear()
            self._touch(index)

    def is_open(self, sequence: int) -> bool:
        """Whether the sequence is live."""
        return sequence in self._slot_of

    def token_ids(self, sequence: int) -> Sequence[int]:
        """The cached tokens of a live sequence, without nodes; the cache's own list, do not change
        or keep it."""
        index = self._slot_of[sequence]
        return () if index is None else self._slots[index].token_ids

    def num_used(self, sequence: int) -> int:
        """Cached tokens and nodes of a live sequence: the cache index of the next one."""
        index = self._slot_of[sequence]
        return 0 if index is None else self._slots[index].num_used

    def truncate(self, sequence: int, length: int) -> None:
        """Forget the tokens from `length` on, and all nodes."""
        index = self._slot_of[sequence]
        assert 0 <= length <= len(self.token_ids(sequence)), "cannot truncate to more than there is"
        if index is not None:
            del self._slots[index].token_ids[length:]
            self._slots[index].node_ids.clear()

    def extend(self, sequence: int, token_ids: Sequence[int]) -> None:
        """Note that the K/V of these tokens were written behind the cached ones."""
        index = self._slot_of[sequence]
        assert index is not None, "extend before place"
        slot = self._slots[index]
        assert not slot.node_ids, "nothing goes behind nodes"
        slot.token_ids.extend(token_ids)
        assert slot.num_used <= self.max_length

    def add_nodes(self, sequence: int, token_ids: Sequence[int]) -> None:
        """Note that the K/V of these tokens were written as nodes, behind all there was."""
        index = self._slot_of[sequence]
        assert index is not None, "add_nodes before place"
        self._slots[index].node_ids.extend(token_ids)
        assert self._slots[index].num_used <= self.max_length

    def keep(self, sequence: int, node: Node) -> None:
        """Make `node` and what it stands behind the sequence's tokens, and forget all others."""
        index = self._slot_of[sequence]
        assert index is not None, "there is nothing to keep"
        slot, length = self._slots[index], node.position + 1
        assert node.num_plain <= len(slot.token_ids) <= min(node.path, default=self.max_length)
        kept = [slot.node_ids[i - len(slot.token_ids)] for i in node.path]
        if node.path != tuple(range(node.num_plain, length)):
            self._gather(index, node.path, node.num_plain)
        slot.token_ids[node.num_plain :] = kept
        slot.node_ids.clear()

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
        assert self.num_used(sequence) == len(own), "nothing goes behind nodes"
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

    # ------------------------------------------------------------ moves

    def _swap(self, a: int, b: int) -> None:
        """Exchange two slots, moving only the tokens there are."""
        first, second = self._slots[a], self._slots[b]
        self._exchange(a, first.num_used, b, second.num_used)
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
        assert all(slot.num_used <= self.max_length for slot in self._slots)


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
