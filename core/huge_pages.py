"""Huge pages under memory that every forward reads: weights and K/V on a CPU.

A forward of few tokens is little more than one pass over all weights, and with 4 KiB pages a tenth
of it goes into looking up where they are. Fresh memory is asked for before it is touched, which
costs nothing; oneDNN's buffers have no address that could be asked for, so that all large memory of
the process is moved once the weights are packed. Where the system lacks or forbids huge pages
nothing happens. Knows nothing of models.
"""

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

PAGE_BYTES = 2 << 20
#: Smaller mappings are stacks and the like, mostly untouched.
MIN_MAPPING_BYTES = 16 << 20
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25  # Linux's


def prefer_huge_pages(fresh: Tensor) -> Tensor:
    """Ask for huge pages under a CPU tensor that was not written yet; returns it."""
    if fresh.device.type == "cpu" and _is_allowed():
        _advise(fresh.data_ptr(), fresh.data_ptr() + fresh.nbytes, _MADV_HUGEPAGE)
    return fresh


def move_to_huge_pages() -> int:
    """Move this process's large memory, some 500 MB in a second. Returns the bytes on huge pages,
    counting only what could be moved as a whole."""
    if not _is_allowed():
        return 0
    moved = 0
    for start, stop in _large_mappings(Path("/proc/self/maps").read_text()):
        _advise(start, stop, _MADV_HUGEPAGE)  # for what follows; the next line works by itself
        moved += _advise(start, stop, _MADV_COLLAPSE)
    return moved


def _is_allowed() -> bool:
    """Whether this is Linux, and its operator lets programs ask (collapsing works regardless)."""
    with contextlib.suppress(OSError):
        mode = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
        return "[never]" not in mode
    return False


def _advise(start: int, stop: int, advice: int) -> int:
    """madvise for the whole huge pages in `[start, stop)`; returns their bytes, 0 if it failed."""
    first, last = -(-start // PAGE_BYTES) * PAGE_BYTES, stop // PAGE_BYTES * PAGE_BYTES
    if first >= last:
        return 0
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return last - first if madvise(first, last - first, advice) == 0 else 0


def _large_mappings(maps: str) -> Iterator[tuple[int, int]]:
    """Where /proc/self/maps has large, private, writable memory without a file: malloc's heap and
    its large blocks."""
    for line in maps.splitlines():
        span, access, _, _, inode, *name = line.split()
        start, stop = (int(address, 16) for address in span.split("-"))
        is_malloc = access == "rw-p" and inode == "0" and name in ([], ["[heap]"])
        if is_malloc and stop - start >= MIN_MAPPING_BYTES:
            yield start, stop
