"""Several processes that train one drafter together, as `torchrun` starts them.

Each takes its part of every batch, and what they find is added up, so that all make the same step.
Texts and checkpoints lie where all can read them; the first process alone writes and reports. In a
process that torchrun did not start everything here does nothing. Knows nothing of drafters.

Small numbers travel over gloo also where gradients travel over nccl: waiting costs no GPU.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

#: The others wait while the first writes text, which can take days. torchrun ends those whose
#: companion died.
_PATIENCE = timedelta(days=30)

_Item = TypeVar("_Item")


@contextlib.contextmanager
def joined() -> Iterator[None]:
    """Find the other processes, if torchrun started this one, and leave them at the end.

    Once in a process: whoever is inside already stays so. gloo cannot find them a second time.
    """
    if not dist.is_torchelastic_launched() or dist.is_initialized():
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(timeout=_PATIENCE)  # gloo for the CPU's tensors, nccl for CUDA's
    try:
        yield
    finally:
        dist.destroy_process_group()


def count() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_first() -> bool:
    """Whether this process is the one that writes and reports."""
    return not dist.is_initialized() or dist.get_rank() == 0


def device_map() -> str:
    """Where this process holds its models: all devices, or its own among several processes."""
    if count() == 1 or not torch.cuda.is_available():
        return "auto"
    return f"cuda:{torch.cuda.current_device()}"


@contextlib.contextmanager
def first_before_others() -> Iterator[None]:
    """The first process does what is inside; then the others do, and find its files."""
    if not is_first():
        total([0.0])
    yield
    if is_first():
        total([0.0])


def part(items: Sequence[_Item]) -> Sequence[_Item]:
    """This process's share of the items; neighbours, which are alike, go to different ones."""
    return items[dist.get_rank() :: count()] if count() > 1 else items


def total(values: Sequence[float]) -> list[float]:
    """The sum of each value over the processes."""
    if count() == 1:
        return list(values)
    sums = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(sums)
    return sums.tolist()


def gathered(items: list[_Item]) -> list[_Item]:
    """The items of all processes."""
    if count() == 1:
        return items
    parts: list[Any] = [None] * count()
    dist.all_gather_object(parts, items)
    return [item for each in parts for item in each]


def add_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replace the gradients by their sums over the processes."""
    if count() == 1:
        return
    parameters = list(parameters)
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    sums = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(sums)
    parts = torch.split(sums, [p.numel() for p in parameters])
    for p, each in zip(parameters, parts, strict=True):
        p.grad = each.view_as(p)
