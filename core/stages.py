"""A model spread over devices, one behind the other: each can work on another forward.

    submitted   device 0   device 1      A device runs what it is given in the order of submission.
    A           A                        Nothing may make it wait for a later device, or the host
    B           B          A             for any, or the forwards stand in one line again.
    C           C          B

So what comes from the host is copied out of pinned memory, what every layer gets is handed on from
device to device, and the logits stay where the head is. Knows nothing of caches and rows.
"""

import contextlib
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of a host's tensor, for which the host does not wait; itself if it stays there."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def count_stages(devices: Iterable[torch.device]) -> int:
    """Devices that can work side by side, by the way of a forward through them; 1 where it comes
    back to one (a head that shares the embedding's weights): the next must wait there."""
    order = [device for device, _ in itertools.groupby(devices)]
    return len(order) if len(set(order)) == len(order) else 1


@contextlib.contextmanager
def watch_output(module: nn.Module) -> Iterator[list[torch.device]]:
    """The devices on which a module's first output comes to lie, call by call."""
    devices: list[torch.device] = []

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        devices.append((output if isinstance(output, Tensor) else output[0]).device)

    hook = module.register_forward_hook(note)
    try:
        yield devices
    finally:
        hook.remove()


class Relay:
    """Hands the tensors that all layers get on from one layer's device to the next one's, once.

    The library fetches them from the first device for each layer, and a copy makes both wait.
    """

    def __init__(self, layers: Sequence[nn.Module], devices: Sequence[torch.device]) -> None:
        """`devices`: where each of the layers runs."""
        self._latest: dict[int, tuple[Tensor, Tensor]] = {}  # id -> the tensor, its last copy
        for layer, device in zip(layers, devices, strict=True):
            move = functools.partial(self._move, device)
            layer.register_forward_pre_hook(move, with_kwargs=True)

    def forget(self) -> None:
        """The forward is over: its tensors may go."""
        self._latest.clear()

    def _move(self, device: torch.device, module: nn.Module, *given: Any) -> Any:
        return tree_map_only(Tensor, lambda tensor: self._at(tensor, device), given)

    def _at(self, tensor: Tensor, device: torch.device) -> Tensor:
        if tensor.device == device:
            return tensor
        latest = self._latest.get(id(tensor), (tensor, tensor))[1]
        if latest.device != device:
            latest = latest.to(device, non_blocking=True)
            self._latest[id(tensor)] = (tensor, latest)
        return latest
