"""The verifier without its wire: one micro-batch of rows in, one verdict per row out.

For each row: truncate the sequence to the row's position, append its new tokens, run them and the
draft through the target, let the rule decide, and keep what was accepted.

    cached          | new_token_ids        | draft_token_ids
    0 .. position-1 | position .. start-1  | start .. start+k-1
                      logits ────────────┘   of the last new token and of every draft token
    afterwards the cache holds start + accepted tokens; the token the target added comes with the
    next row's new_token_ids.

A row that cannot be verified gets a verdict that says why, and never disturbs the others. Nothing
is remembered of a row, so repeating one gives the same verdict. Knows nothing of asyncio, gRPC,
streams' lifetimes or the rule itself; all methods run in one thread.
"""

import itertools
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from core.errors import ForerunError, InvalidRequestError
from core.kv_cache import NoSlotError
from core.model import RaggedModel, Row
from core.types import (
    OpenFailure,
    SamplingParams,
    Verdict,
    VerdictStatus,
    VerifierInfo,
    VerifyBatch,
    VerifyOpen,
    VerifyResult,
    VerifyRow,
    VerifyTimings,
)
from verifier_service.checks import check_open, check_row
from verifier_service.rules import Block, verdicts

#: Fewer new tokens are computed sooner than a prefix is looked for.
_MIN_REUSE_TOKENS: Final = 16


@dataclass(frozen=True, slots=True)
class _Sequence:
    """An open sequence: its id in the model, how it is drawn, how long it may grow."""

    key: int
    sampling: SamplingParams
    max_length: int


@dataclass(slots=True)
class _Work:
    """A sound row on its way through the target; `done` of its tokens are in the cache."""

    row: VerifyRow
    sequence: _Sequence
    tokens: tuple[int, ...]
    cached: int = 0
    done: int = 0
    verdict: Verdict | None = None

    @property
    def num_left(self) -> int:
        return len(self.tokens) - self.done

    @property
    def num_logits(self) -> int:
        return 0 if self.row.partial else len(self.row.draft_token_ids) + 1

    @property
    def start(self) -> int:
        """Where the drawn tokens begin."""
        return self.row.position + len(self.row.new_token_ids)

    def end(self) -> Verdict:
        """The verdict of a work that was run."""
        assert self.verdict is not None
        return self.verdict


@dataclass(slots=True)
class _Clock:
    """Nanoseconds and forwards of the batch in hand."""

    forward_ns: int = 0
    sampling_ns: int = 0
    num_forwards: int = 0


class VerifierEngine:
    """Verifies micro-batches with one target. Sequences belong to the stream that opened them."""

    def __init__(self, model: RaggedModel) -> None:
        self._model = model
        self._streams: dict[int, dict[int, _Sequence]] = {}
        self._keys = itertools.count()
        self.info = VerifierInfo(
            identity=model.identity,
            max_length=model.max_length,
            max_sequences=model.max_sequences,
            max_batch_tokens=model.max_batch_tokens,
            eos_token_ids=model.eos_token_ids,
            default_sampling=model.default_sampling,
            instance_id=secrets.token_hex(8),
            tokenizer_size=model.tokenizer_size,
        )

    @property
    def num_open(self) -> int:
        """Sequences that hold a slot, over all streams."""
        return sum(map(len, self._streams.values()))

    def verify(self, stream: int, batch: VerifyBatch) -> VerifyResult:
        """Apply closes, then opens, then verify the rows, all of them in the fewest forwards."""
        sequences = self._streams.setdefault(stream, {})
        for sequence in batch.closes:
            self._close(sequences, sequence)
        failures = [self._open(sequences, open_) for open_ in batch.opens]
        seen: set[int] = set()
        items = [self._admit(sequences, row, seen) for row in batch.rows]
        clock = _Clock()
        self._run([item for item in items if isinstance(item, _Work)], clock)
        return VerifyResult(
            batch=batch.batch,
            verdicts=tuple([item if isinstance(item, Verdict) else item.end() for item in items]),
            open_failures=tuple([failure for failure in failures if failure is not None]),
            timings=VerifyTimings(0, clock.forward_ns, clock.sampling_ns, clock.num_forwards),
        )

    def close_stream(self, stream: int) -> None:
        """Free everything that a stream opened."""
        for sequence in self._streams.pop(stream, {}).values():
            self._model.close(sequence.key)

    # ------------------------------------------------------------ sequences

    def _close(self, sequences: dict[int, _Sequence], sequence: int) -> None:
        closed = sequences.pop(sequence, None)
        if closed is not None:
            self._model.close(closed.key)

    def _open(self, sequences: dict[int, _Sequence], open_: VerifyOpen) -> OpenFailure | None:
        """Admit a sequence; one that is open already starts again from nothing."""
        known = sequences.get(open_.sequence)
        try:
            check_open(open_, self._model.max_length)
            key = next(self._keys) if known is None else known.key
            if known is None:
                self._model.open(key)
            else:
                self._model.truncate(key, 0)
        except InvalidRequestError as error:
            self._close(sequences, open_.sequence)
            return OpenFailure(open_.sequence, VerdictStatus.INVALID, f"opens.{error}")
        except NoSlotError as error:
            return OpenFailure(open_.sequence, VerdictStatus.NO_SLOT, str(error))
        sequences[open_.sequence] = _Sequence(key, open_.sampling, open_.max_length)
        return None

    def _admit(
        self, sequences: dict[int, _Sequence], row: VerifyRow, seen: set[int]
    ) -> _Work | Verdict:
        """Check a row and ready its sequence; a verdict when it cannot be verified."""
        try:
            check_row(row, seen, self._model.vocab_size, self._model.max_batch_tokens)
            sequence = sequences.get(row.sequence)
            if sequence is None:
                return _refusal(row, VerdictStatus.NEED_PREFIX, "the sequence is not open")
            if row.position + row.num_tokens > sequence.max_length:
                raise InvalidRequestError(
                    "position",
                    f"{row.position} and {row.num_tokens} tokens exceed the sequence's "
                    f"max_length {sequence.max_length}",
                )
        except InvalidRequestError as error:
            return _refusal(row, VerdictStatus.INVALID, f"rows.{error}")
        length = self._model.length(sequence.key)
        if length < row.position:
            message = f"{length} tokens are held, position is {row.position}"
            return _refusal(row, VerdictStatus.NEED_PREFIX, message)
        self._model.truncate(sequence.key, row.position)
        work = _Work(row, sequence, row.new_token_ids + row.draft_token_ids)
        if len(row.new_token_ids) >= _MIN_REUSE_TOKENS:
            work.cached = self._model.reuse_prefix(sequence.key, row.new_token_ids)
            work.done = work.cached
        return work

    # ------------------------------------------------------------ forwards

    def _run(self, works: list[_Work], clock: _Clock) -> None:
        """Set the verdict of every work."""
        # Short rows first: a long prompt is what gets split, and decoding rows ride along.
        pending = sorted(works, key=lambda work: work.num_left)
        while pending:
            self._forward(plan_forward(pending, self._model.max_batch_tokens), clock)
            pending = [work for work in pending if work.verdict is None]

    def _forward(self, chunks: list[tuple[_Work, int]], clock: _Clock) -> None:
        """Run chunks, (work, number of its next tokens) each, and decide the works that end."""
        rows = [
            Row(
                work.sequence.key,
                work.row.position + work.done,
                work.tokens[work.done : work.done + size],
                work.num_logits if size == work.num_left else 0,
            )
            for work, size in chunks
        ]
        failure = ""
        begin = time.perf_counter_ns()
        try:
            logits = self._model.forward(rows)
            if logits.device.type != "cpu":  # or the rule's time would hold the forward's
                torch.accelerator.synchronize(logits.device)
        except (RuntimeError, ForerunError) as error:
            failure = f"the target failed: {error}"
        clock.forward_ns += time.perf_counter_ns() - begin
        clock.num_forwards += 1
        if failure and len(chunks) == 1:
            self._fail(chunks[0][0], failure)
            return
        if failure:  # find the guilty row: the others must not pay for it
            for chunk in chunks:
                self._forward([chunk], clock)
            return
        ended = []
        for work, size in chunks:
            work.done += size
            if work.num_left == 0:
                ended.append(work)
        begin = time.perf_counter_ns()
        self._decide(ended, logits)
        clock.sampling_ns += time.perf_counter_ns() - begin

    def _decide(self, works: list[_Work], logits: Tensor) -> None:
        """Let the rule decide works whose logits `[sum num_logits, V]` are there."""
        for work in works:
            if work.row.partial:
                work.verdict = Verdict(work.row.sequence, work.start, cached_tokens=work.cached)
        drawn = [work for work in works if not work.row.partial]
        blocks = [
            Block(work.sequence.sampling, work.start, work.row.draft_token_ids) for work in drawn
        ]
        outcomes = verdicts(logits, blocks, self._model.tokenizer_size) if drawn else []
        for work, outcome in zip(drawn, outcomes, strict=True):
            if outcome.failure:
                self._fail(work, outcome.failure)
                continue
            self._model.truncate(work.sequence.key, work.start + outcome.accepted)
            work.verdict = Verdict(
                sequence=work.row.sequence,
                position=work.start,
                accepted=outcome.accepted,
                token_ids=outcome.token_ids,
                cached_tokens=work.cached,
            )

    def _fail(self, work: _Work, message: str) -> None:
        self._model.truncate(work.sequence.key, work.row.position)
        work.verdict = _refusal(work.row, VerdictStatus.INVALID, message)


def plan_forward(works: Sequence[_Work], max_tokens: int) -> list[tuple[_Work, int]]:
    """The next forward: works in order, as many of their tokens as fit.

    Only new tokens are ever split: the tokens that logits are wanted of stay together.
    """
    chunks = []
    for work in works:
        fits = work.num_left <= max_tokens
        size = work.num_left if fits else min(max_tokens, work.num_left - work.num_logits)
        if size > 0:
            chunks.append((work, size))
            max_tokens -= size
    return chunks


def _refusal(row: VerifyRow, status: VerdictStatus, message: str) -> Verdict:
    position = row.position + len(row.new_token_ids)
    return Verdict(row.sequence, position, status, message=message)
