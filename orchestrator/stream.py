"""What one client receives: committed tokens cut at stops, turned into text, in order.

Knows the stopping criteria and the detokenizer; knows nothing of drafts, verifiers or the wire.
Cutting happens here, behind the verification rule and never before it, so that ids, text, usage
and finish reason always agree.
"""

import asyncio
from collections.abc import Sequence as TokenIds
from typing import Protocol

from core.errors import ForerunError
from orchestrator.pipeline import Sequence
from orchestrator.requests import Block, Finished, FinishReason


class Piece(Protocol):
    """What a detokenizer makes of some tokens; see `orchestrator.detokenizer`."""

    @property
    def text(self) -> str:
        """Text that became final."""

    @property
    def num_tokens(self) -> int:
        """Tokens used: all of them, or up to the one that completes a stop string."""

    @property
    def stop_string(self) -> str | None:
        """The stop string that matched, if any."""


class Detokenizer(Protocol):
    """Turns a growing list of ids into final text and finds stop strings."""

    def push(self, token_ids: TokenIds[int]) -> Piece:
        """Take the next tokens."""

    def flush(self) -> str:
        """The text held back so far, at the end."""


class Stream:
    """Collects the blocks of one sequence; the client side awaits `next_block()`."""

    def __init__(self, sequence: Sequence, detokenizer: Detokenizer, arrived_at: float) -> None:
        self.sequence = sequence
        self._detokenizer = detokenizer
        self._arrived_at = arrived_at
        self._first_at: float | None = None
        self._queue: asyncio.Queue[Block | ForerunError] = asyncio.Queue()

    def cut(self, token_ids: tuple[int, ...]) -> tuple[tuple[int, ...], str, Finished | None]:
        """Cut what a verdict brought at the first stop.

        Returns the ids to commit, the text that became final, and the end without its times and
        counts (`deliver` fills them in), or None when the sequence goes on.
        """
        stopping = self.sequence.request.stopping
        ids = token_ids[: self.sequence.num_remaining]
        stop_token = next((t for t in ids if t in stopping.stop_token_ids), None)
        if stop_token is not None:
            ids = ids[: ids.index(stop_token) + 1]
        piece = self._detokenizer.push(ids)
        if piece.stop_string:
            end = self._end(FinishReason.STOP_STRING, stop_string=piece.stop_string)
            return ids[: piece.num_tokens], piece.text, end
        if stop_token is not None:
            end = self._end(FinishReason.STOP_TOKEN, stop_token_id=stop_token)
        elif len(ids) == self.sequence.num_remaining:
            end = self._end(FinishReason.LENGTH)
        else:
            return ids, piece.text, None
        return ids, piece.text + self._detokenizer.flush(), end

    def _end(
        self, reason: FinishReason, stop_string: str = "", stop_token_id: int | None = None
    ) -> Finished:
        sequence = self.sequence
        return Finished(
            reason,
            prompt_tokens=sequence.num_prompt,
            completion_tokens=0,
            cached_prompt_tokens=sequence.cached_prompt_tokens,
            stats=sequence.stats,
            time_to_first_token_s=0.0,
            total_s=0.0,
            stop_string=stop_string,
            stop_token_id=stop_token_id,
        )

    def deliver(
        self, ids: tuple[int, ...], accepted: int, text: str, end: Finished | None, now: float
    ) -> None:
        """Hand a committed block to the client."""
        if self._first_at is None:
            self._first_at = now
        if end is not None:
            end = Finished(
                end.reason,
                end.prompt_tokens,
                self.sequence.num_generated,
                end.cached_prompt_tokens,
                end.stats,
                self._first_at - self._arrived_at,
                now - self._arrived_at,
                end.stop_string,
                end.stop_token_id,
            )
        self._queue.put_nowait(Block(ids, accepted, text, end))

    def fail(self, error: ForerunError) -> None:
        """End the stream with an error."""
        self._queue.put_nowait(error)

    async def next_block(self) -> Block:
        """The next block; the last has `finished` set. Raises what `fail` was given."""
        item = await self._queue.get()
        if isinstance(item, ForerunError):
            raise item
        return item
