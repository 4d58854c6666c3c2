"""Weights and K/V come to lie on huge pages, with what is in them; only they do."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import core.model
from core.config import ModelConfig
from core.huge_pages import (
    PAGE_BYTES,
    _is_allowed,
    _large_mappings,
    move_to_huge_pages,
    prefer_huge_pages,
)
from core.model import RaggedModel
from core.packing import can_pack
from tests.tiny_models import TinyFactory

on_linux = pytest.mark.skipif(not _is_allowed(), reason="this system grants no huge pages")

MAPS = """\
555500000000-555508000000 rw-p 00000000 00:00 0                          [heap]
7f0000000000-7f0002000000 rw-p 00000000 00:00 0
7f0010000000-7f0012000000 rw-p 00000000 08:01 1234                       /a file/with blanks
7f0020000000-7f0022000000 rw-s 00000000 00:01 99                         /dev/shm/shared
7f0030000000-7f0032000000 ---p 00000000 00:00 0
7f0040000000-7f0040800000 rw-p 00000000 00:00 0
7ffd00000000-7ffd02000000 rw-p 00000000 00:00 0                          [stack]
"""


def test_only_mallocs_large_memory_is_moved() -> None:
    """Breaks when files, shared memory, reserved ranges or stacks are moved, or the heap is not:
    most packed weights lie there."""
    assert [*_large_mappings(MAPS)] == [
        (0x555500000000, 0x555508000000),
        (0x7F0000000000, 0x7F0002000000),
    ]


def huge_bytes(tensor: Tensor) -> int:
    """Bytes on huge pages in the mappings that hold a part of `tensor`."""
    first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    total, is_inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            start, stop = (int(address, 16) for address in name.split("-"))
            is_inside = start < last and first < stop
        elif is_inside and name == "AnonHugePages:":
            total += int(rest[0]) * 1024
    return total


@on_linux
def test_fresh_memory_is_born_on_huge_pages() -> None:
    """Breaks when the advice goes to wrong addresses: K/V would be slow, and nothing would fail."""
    memory = prefer_huge_pages(torch.empty(32 << 20, dtype=torch.uint8)).zero_()
    assert huge_bytes(memory) >= 8 * PAGE_BYTES
    assert not memory.any()


@on_linux
def test_moved_memory_keeps_its_values() -> None:
    """Breaks when memory that is in use is not moved, or is damaged by it."""
    memory = torch.arange(8 << 20, dtype=torch.int32)
    assert move_to_huge_pages() > 0
    assert huge_bytes(memory) >= 8 * PAGE_BYTES
    assert torch.equal(memory, torch.arange(8 << 20, dtype=torch.int32))


@pytest.mark.skipif(not can_pack(), reason="this CPU has no bf16 products in oneDNN")
@pytest.mark.parametrize(("dtype", "is_large"), [("bfloat16", 1), ("bfloat16", 0), ("float32", 1)])
def test_a_large_packed_model_is_moved(
    dtype: str, is_large: int, tiny: TinyFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Breaks when loading forgets to move the packed weights, or takes the time for a tiny model
    or one whose weights are not packed."""
    moves: list[int] = []
    monkeypatch.setattr(core.model, "move_to_huge_pages", lambda: moves.append(1))
    if is_large:
        monkeypatch.setattr(core.model, "MIN_MAPPING_BYTES", 1)
    RaggedModel.load(
        ModelConfig(model=str(tiny("llama")), dtype=dtype, device_map="cpu", max_length=64)
    )
    assert moves == ([1] if is_large and dtype == "bfloat16" else [])
