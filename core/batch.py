"""A batch of rows and how its tokens are laid out for one ragged forward.

A row is one sequence's part: cut it to a position, append tokens, give the last logits. The tokens
of all rows lie one behind the other in the order that attention wants. Knows nothing of models or
tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from core.attention import Segment
from core.errors import InvalidRequestError
from core.kv_cache import SlotCache
from core.tree import Node, tree_problem


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's part of a forward: cut it to `position`, append `token_ids` (at least one),
    and give the logits behind the last `num_logits` of them.

    With `nodes` nothing is cut, `position` is the cache index behind all that the sequence has, and
    the tokens become nodes: each stands behind what its node says.
    """

    sequence: int
    position: int
    token_ids: Sequence[int]
    num_logits: int
    nodes: Sequence[Node] = ()


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What a forward may hold: tokens in all, tokens of a sequence, ids of the vocabulary."""

    max_batch_tokens: int
    max_length: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """The tokens of a batch, `[T]` each, and the indices among them of the wanted logits."""

    token_ids: list[int]
    positions: list[int]
    segments: list[Segment]
    logit_indices: list[int]
    spans: dict[int, "Span"]


@dataclass(frozen=True, slots=True)
class Span:
    """Where a row's tokens are: among the batch's, and in the cache at `indices` of `slot`."""

    tokens: slice
    slot: int
    indices: slice


def check_rows(rows: Sequence[Row], cache: SlotCache, limits: BatchLimits) -> None:
    """Raise InvalidRequestError, naming the row, unless all rows can be run together."""
    if len({row.sequence for row in rows}) < len(rows):
        raise InvalidRequestError("rows", "a sequence appears twice")
    if sum(len(row.token_ids) for row in rows) > limits.max_batch_tokens:
        raise InvalidRequestError("rows", f"more than {limits.max_batch_tokens} tokens in all")
    for row in rows:
        name, count = f"rows[{row.sequence}]", len(row.token_ids)
        if not cache.is_open(row.sequence):
            raise InvalidRequestError(name, "the sequence is not open")
        cached = len(cache.token_ids(row.sequence))
        if row.nodes:
            _check_nodes(row, cached, cache.num_used(row.sequence))
        elif not 0 <= row.position <= cached:
            raise InvalidRequestError(
                f"{name}.position", f"{row.position} is beyond the {cached} cached tokens"
            )
        if not 1 <= count <= limits.max_length - row.position:
            raise InvalidRequestError(
                f"{name}.token_ids",
                f"{count} tokens at position {row.position}; the context has {limits.max_length}",
            )
        if min(row.token_ids) < 0 or max(row.token_ids) >= limits.vocab_size:
            raise InvalidRequestError(
                f"{name}.token_ids", f"ids must be in 0..{limits.vocab_size - 1}"
            )
        if not 0 <= row.num_logits <= count:
            raise InvalidRequestError(f"{name}.num_logits", f"must be in 0..{count}")


def _check_nodes(row: Row, num_plain: int, num_used: int) -> None:
    name = f"rows[{row.sequence}]"
    if row.position != num_used:
        raise InvalidRequestError(
            f"{name}.position", f"{row.position} is not behind all {num_used} cached tokens"
        )
    if len(row.nodes) != len(row.token_ids):
        raise InvalidRequestError(f"{name}.nodes", f"{len(row.token_ids)} tokens have as many")
    if problem := tree_problem(row.nodes, num_plain, row.position):
        raise InvalidRequestError(f"{name}.nodes", problem)


def lay_out(rows: Sequence[Row], slots: Sequence[int]) -> BatchLayout:
    """Order the rows, in these `slots`, by length class and slot, as RaggedContext needs them.

    `logit_indices` keep the order of `rows`.
    """
    segments = [
        Segment(slot, row.position, len(row.token_ids), tuple(row.nodes))
        for slot, row in zip(slots, rows, strict=True)
    ]
    order = sorted(range(len(rows)), key=lambda i: (segments[i].is_long, segments[i].slot))
    token_ids: list[int] = []
    positions: list[int] = []
    ends = [0] * len(rows)
    spans: dict[int, Span] = {}
    for i in order:
        token_ids += rows[i].token_ids
        positions += segments[i].positions
        ends[i] = len(token_ids)
        segment, tokens = segments[i], slice(ends[i] - len(rows[i].token_ids), ends[i])
        indices = slice(segment.start, segment.stop)
        spans[rows[i].sequence] = Span(tokens, segment.slot, indices)
    logit_indices = [
        index
        for end, row in zip(ends, rows, strict=True)
        for index in range(end - row.num_logits, end)
    ]
    return BatchLayout(token_ids, positions, [segments[i] for i in order], logit_indices, spans)
