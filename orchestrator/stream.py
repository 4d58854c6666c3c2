"""What one client receives: committed tokens cut at stops, turned into text, in order.

Knows the stopping criteria and the detokenizer; knows nothing of drafts, verifiers or the wire.
Cutting happens here, behind the verification rule and never before it, so that ids, text, usage,
log-probabilities and finish reason always agree.
"""

import asyncio
import math
from collections.abc import Sequence as TokenIds
from dataclasses import replace
from typing import Protocol

from core.errors import ForerunError, ModelError
from core.types import TokenLogprobs, Verdict, VerifyRow
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


class Detokenizer(Protocol):
    """Turns a growing list of ids into final text and finds stop strings."""

    @property
    def stop_string(self) -> str:
        """The stop string that matched so far, in a push or in the flush; "" without."""

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
        self._admitted_at = math.inf
        self._first_at: float | None = None
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._queue: asyncio.Queue[Block | ForerunError] = asyncio.Queue()

    def admit(self, now: float) -> None:
        """The sequence got its slot; after a loss it gets another, but the first counts."""
        self._admitted_at = min(self._admitted_at, now)

    def read_prompt(self, row: VerifyRow, verdict: Verdict) -> None:
        """Gather what the verdict on a part of the prompt says about the prompt's tokens.

        The first token has no log-probability, so entry i is of token i + 1. A row that is sent
        again, after a loss, replaces what was known from its position on.
        """
        if self.sequence.request.output.prompt_logprobs and self.sequence.is_prompt_pending:
            self._prompt_logprobs[max(0, row.position - 1) :] = verdict.prompt_logprobs

    def cut(self, verdict: Verdict) -> Block:
        """Cut what a verdict brought at the first stop; to be committed, then delivered.

        `deliver` fills in what is known only then: the accepted tokens, times and counts. Raises
        ModelError when log-probabilities are missing: better none than another token's.
        """
        sequence, stopping = self.sequence, self.sequence.request.stopping
        ids = verdict.token_ids[: sequence.num_remaining]
        stop_token = next((t for t in ids if t in stopping.stop_token_ids), None)
        if stop_token is not None:
            ids = ids[: ids.index(stop_token) + 1]
        piece = self._detokenizer.push(ids)
        ids, text = ids[: piece.num_tokens], piece.text
        is_last = stop_token is not None or len(ids) == sequence.num_remaining
        if is_last and not self._detokenizer.stop_string:
            text += self._detokenizer.flush()
        end = None
        if stop_string := self._detokenizer.stop_string:
            end = self._end(FinishReason.STOP_STRING, stop_string=stop_string)
            text += stop_string if stopping.include_stop else ""
        elif stop_token is not None:
            end = self._end(FinishReason.STOP_TOKEN, stop_token_id=stop_token)
        elif is_last:
            end = self._end(FinishReason.LENGTH)
        prompt_logprobs, self._prompt_logprobs = tuple(self._prompt_logprobs), []
        self._check_logprobs(verdict, prompt_logprobs)
        return Block(
            ids,
            0,
            text,
            end,
            verdict.logprobs[: len(ids)],
            prompt_logprobs,
            drafter=sequence.draft_source,
            stats=sequence.stats,
            queue_s=self._admitted_at - self._arrived_at,
        )

    def _check_logprobs(self, verdict: Verdict, prompt_logprobs: tuple[TokenLogprobs, ...]) -> None:
        output = self.sequence.request.output
        wanted = 0 if output.logprobs is None else len(verdict.token_ids)
        if len(verdict.logprobs) != wanted:
            got = f"{len(verdict.logprobs)} log-probabilities for {wanted} tokens"
            raise ModelError(f"the verifier sent {got}")
        is_first = output.prompt_logprobs and self.sequence.is_prompt_pending
        wanted = self.sequence.num_prompt - 1 if is_first else 0
        if len(prompt_logprobs) != wanted:
            got = f"{len(prompt_logprobs)} log-probabilities for {wanted} tokens of the prompt"
            raise ModelError(f"the verifier sent {got}")

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

    def deliver(self, block: Block, accepted: int, now: float) -> None:
        """Hand a committed block to the client; `accepted` of its tokens were drafted."""
        if self._first_at is None:
            self._first_at = now
        end = block.finished
        if end is not None:
            end = replace(
                end,
                completion_tokens=self.sequence.num_generated,
                time_to_first_token_s=self._first_at - self._arrived_at,
                total_s=now - self._arrived_at,
            )
        self._queue.put_nowait(replace(block, accepted=accepted, finished=end))

    def fail(self, error: ForerunError) -> None:
        """End the stream with an error."""
        self._queue.put_nowait(error)

    async def next_block(self) -> Block:
        """The next block; the last has `finished` set. Raises what `fail` was given."""
        item = await self._queue.get()
        if isinstance(item, ForerunError):
            raise item
        return item
