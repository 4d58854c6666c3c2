"""The memory of K/V slots: one fixed block per layer, all of it taken and touched at load.

Per layer, K and V are `[S, H, M, D]` (S slots, H KV heads, M tokens, D head size) on the device
that layer runs on. Knows nothing of whose slot is whose or which tokens are in it: who calls
`write` says which cache index each K/V row has.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from core.errors import ModelError
from core.huge_pages import prefer_huge_pages


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


class SlotMemory:
    """K and V of all layers. keys, values: per layer `[S, H, M, D]`."""

    def __init__(self, layers: Sequence[LayerSpec], max_sequences: int, max_length: int) -> None:
        """Allocate and touch everything. Raises ModelError that says how much was needed."""
        self.layers = tuple(layers)
        self.max_sequences = max_sequences
        self.max_length = max_length
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

    def _gather(self, slot: int, indices: Sequence[int], start: int) -> None:
        """Put the K/V at `indices` of a slot side by side, from `start` on."""
        devices = {tensor.device for tensor in self._storage}
        index = {device: torch.tensor(indices, device=device) for device in devices}
        for tensor in self._storage:
            rows = tensor[slot].index_select(1, index[tensor.device])
            tensor[slot, :, start : start + len(indices)] = rows

    def _exchange(self, a: int, num_a: int, b: int, num_b: int) -> None:
        """Swap the first `num_a` indices of slot a and the first `num_b` of slot b."""
        for tensor in self._storage:
            saved = tensor[a, :, :num_a].clone()
            tensor[a, :, :num_b] = tensor[b, :, :num_b]
            tensor[b, :, :num_a] = saved


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
