"""Tokens that stand side by side in a slot: what may follow the same committed text.

    cache index    0 1 2 3 4 | 5  6  7  8       a slot's plain tokens, one behind the other,
    token          a b c d e | x  y  z  x'      and its nodes: x and y behind c, z behind e,
    position       0 1 2 3 4 | 3  3  5  4       x' behind x

A token's cache *index* is where its K/V are, its *position* how many tokens it stands behind; for
plain tokens they are one. A node sees the plain tokens and the nodes that it stands behind, and
nothing of what lies beside it. Knows nothing of tensors and models.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Node:
    """A place in a tree: behind the first `num_plain` tokens, and then at the cache indices `path`.

    The last token of both is the node itself.
    """

    num_plain: int
    path: tuple[int, ...] = ()

    @property
    def index(self) -> int:
        """Its cache index; -1 where nothing stands yet."""
        return self.path[-1] if self.path else self.num_plain - 1

    @property
    def position(self) -> int:
        """The tokens in front of it."""
        return self.num_plain + len(self.path) - 1

    def child(self, index: int) -> Self:
        """The node at cache index `index` that stands behind this one."""
        return type(self)(self.num_plain, (*self.path, index))


def tree_problem(nodes: Sequence[Node], num_plain: int, first_index: int) -> str:
    """What is wrong with nodes at cache indices `first_index`, `first_index + 1`, ... of a slot
    with `num_plain` plain tokens; empty if nothing is."""
    for index, node in enumerate(nodes, first_index):
        if not (node.path and node.path[-1] == index):
            return f"the node at cache index {index} is at another"
        if not 0 <= node.num_plain <= num_plain or node.path[0] < num_plain:
            return f"the node at cache index {index} stands behind plain tokens that are not there"
        if any(a >= b for a, b in zip(node.path, node.path[1:], strict=False)):
            return f"the node at cache index {index} stands behind a later one"
    return ""
