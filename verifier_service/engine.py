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

from core.constraints import ConstraintCompiler
from core.errors import ForerunError, InvalidRequestError
from core.kv_cache import NoSlotError
from core.model import RaggedModel, Row
from core.params import TokenLogprobs
from core.types import (
    OpenFailure,
    Verdict,
    VerdictStatus,
    VerifierInfo,
    VerifyBatch,
    VerifyOpen,
    VerifyResult,
    VerifyRow,
    VerifyTimings,
)
from verifier_service.attached import AttachedDrafters
from verifier_service.checks import check_open, check_row
from verifier_service.drawing import Draw, Drawer, PromptReader, decide
from verifier_service.rules import Outcome
from verifier_service.work import OpenSequence, Work, plan_forward, refusal

#: Fewer new tokens are computed sooner than a prefix is looked for.
_MIN_REUSE_TOKENS: Final = 16


@dataclass(slots=True)
class _Clock:
    """Nanoseconds and forwards of the batch in hand."""

    forward_ns: int = 0
    sampling_ns: int = 0
    num_forwards: int = 0


class VerifierEngine:
    """Verifies micro-batches with one target. Sequences belong to the stream that opened them."""

    def __init__(
        self,
        model: RaggedModel,
        compiler: ConstraintCompiler | None = None,
        attached: AttachedDrafters | None = None,
    ) -> None:
        """`compiler` makes constraints of the target's tokenizer; without it they are refused."""
        self._model = model
        self._compiler = compiler
        self._attached = attached or AttachedDrafters(model)
        self._streams: dict[int, dict[int, OpenSequence]] = {}
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
            attached=self._attached.infos,
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
        works = [item for item in items if isinstance(item, Work)]
        self._run(works, clock)
        draft_ns = self._attached.finish(works)
        return VerifyResult(
            batch=batch.batch,
            verdicts=tuple([item if isinstance(item, Verdict) else item.end() for item in items]),
            open_failures=tuple([failure for failure in failures if failure is not None]),
            timings=VerifyTimings(
                0, clock.forward_ns, clock.sampling_ns, clock.num_forwards, draft_ns
            ),
        )

    def close_stream(self, stream: int) -> None:
        """Free everything that a stream opened."""
        sequences = self._streams.pop(stream, {})
        for sequence in list(sequences):
            self._close(sequences, sequence)

    # ------------------------------------------------------------ sequences

    def _close(self, sequences: dict[int, OpenSequence], sequence: int) -> None:
        closed = sequences.pop(sequence, None)
        if closed is not None:
            self._attached.close(closed)
            self._model.close(closed.key)

    def _open(self, sequences: dict[int, OpenSequence], open_: VerifyOpen) -> OpenFailure | None:
        """Admit a sequence; one that is open already starts again from nothing."""
        known = sequences.get(open_.sequence)
        try:
            check_open(open_, self._model.max_length)
            key = next(self._keys) if known is None else known.key
            opened = OpenSequence(key, open_.max_length, *self._drawing(open_))
            self._attached.open(opened, open_.attached, open_.features)
            if known is None:
                self._model.open(key)
            else:
                self._attached.close(known)
                self._model.truncate(key, 0)
        except InvalidRequestError as error:
            self._close(sequences, open_.sequence)
            return OpenFailure(open_.sequence, VerdictStatus.INVALID, f"opens.{error}")
        except NoSlotError as error:
            return OpenFailure(open_.sequence, VerdictStatus.NO_SLOT, str(error))
        sequences[open_.sequence] = opened
        return None

    def _drawing(self, open_: VerifyOpen) -> tuple[Drawer, PromptReader | None]:
        """What a sequence is drawn with. Raises InvalidRequestError."""
        if open_.sampling.constraint is not None and self._compiler is None:
            raise InvalidRequestError("sampling.constraint", "the target has no tokenizer")
        size = self._model.vocab_size
        drawer = Drawer(open_.sampling, size, open_.logprobs, self._compiler)
        return drawer, PromptReader(open_.logprobs or 0) if open_.prompt_logprobs else None

    def _admit(
        self, sequences: dict[int, OpenSequence], row: VerifyRow, seen: set[int]
    ) -> Work | Verdict:
        """Check a row and ready its sequence; a verdict when it cannot be verified."""
        try:
            check_row(row, seen, self._model.vocab_size, self._model.max_batch_tokens)
            sequence = sequences.get(row.sequence)
            if sequence is None:
                return refusal(row, VerdictStatus.NEED_PREFIX, "the sequence is not open")
            if row.position + row.num_tokens > sequence.max_length:
                raise InvalidRequestError(
                    "position",
                    f"{row.position} and {row.num_tokens} tokens exceed the sequence's "
                    f"max_length {sequence.max_length}",
                )
        except InvalidRequestError as error:
            return refusal(row, VerdictStatus.INVALID, f"rows.{error}")
        length = self._model.length(sequence.key)
        if length < row.position:
            message = f"{length} tokens are held, position is {row.position}"
            return refusal(row, VerdictStatus.NEED_PREFIX, message)
        self._model.truncate(sequence.key, row.position)
        work = Work(row, sequence, row.new_token_ids + row.draft_token_ids)
        if len(row.new_token_ids) >= _MIN_REUSE_TOKENS and not sequence.needs_every_token:
            work.cached = self._model.reuse_prefix(sequence.key, row.new_token_ids)
            work.done = work.cached
        return work

    # ------------------------------------------------------------ forwards

    def _run(self, works: list[Work], clock: _Clock) -> None:
        """Set the verdict of every work."""
        # Short rows first: a long prompt is what gets split, and decoding rows ride along.
        pending = sorted(works, key=lambda work: work.num_left)
        while pending:
            self._forward(plan_forward(pending, self._model.max_batch_tokens), clock)
            pending = [work for work in pending if work.verdict is None]

    def _forward(self, chunks: list[tuple[Work, int]], clock: _Clock) -> None:
        """Run chunks, (work, number of its next tokens) each, and decide the works that end."""
        rows = [
            Row(
                work.sequence.key,
                work.row.position + work.done,
                work.tokens[work.done : work.done + size],
                work.num_logits(size),
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
        begin = time.perf_counter_ns()
        with torch.inference_mode():
            self._attached.read([work for work, _ in chunks])
            self._decide(chunks, self._read(chunks, logits))
        clock.sampling_ns += time.perf_counter_ns() - begin

    def _read(self, chunks: list[tuple[Work, int]], logits: Tensor) -> Tensor:
        """Report the prompts that are read, and count every chunk as done.

        Returns the logits the rule needs: all that there are, when no prompt is reported.
        """
        kept = []
        first = 0
        for work, size in chunks:
            rows = logits[first : first + work.num_logits(size)]
            first += len(rows)
            reader, new = work.sequence.reader, work.row.new_token_ids[work.done :][:size]
            if reader is not None:
                valid = rows[: len(new), : self._model.tokenizer_size]
                work.prompt_logprobs += reader.read(valid, new)
            if size == work.num_left:
                kept.append(rows[len(rows) - work.num_drawn :])
            work.done += size
        whole = sum(map(len, kept)) == len(logits)
        return logits if whole else torch.cat(kept or [logits[:0]])

    def _decide(self, chunks: list[tuple[Work, int]], logits: Tensor) -> None:
        """End the works that are done: let the rule decide those that draw."""
        ended = [work for work, _ in chunks if work.num_left == 0]
        drawn = [work for work in ended if not work.row.partial]
        for work in ended:
            if work.row.partial:
                work.verdict = self._verdict(work, 0, (), ())
        for work, (outcome, report) in zip(drawn, self._draw(drawn, logits), strict=True):
            if outcome.failure:
                self._fail(work, outcome.failure)
                continue
            self._model.truncate(work.sequence.key, work.start + outcome.accepted)
            work.verdict = self._verdict(work, outcome.accepted, outcome.token_ids, report)
            work.sequence.reader = None

    def _draw(
        self, works: list[Work], logits: Tensor
    ) -> list[tuple[Outcome, tuple[TokenLogprobs, ...]]]:
        draws = []
        for work in works:
            drawer, row = work.sequence.drawer, work.row
            prefix: Sequence[int] = ()
            if drawer.needs_prefix:
                prefix = self._model.cache.token_ids(work.sequence.key)[: work.start]
                drawer.sync(prefix, row.position)
            draws.append(
                Draw(drawer, work.start, row.draft_token_ids, row.draft_distributions, prefix)
            )
        return decide(logits, draws, self._model.tokenizer_size) if draws else []

    def _verdict(
        self,
        work: Work,
        accepted: int,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
    ) -> Verdict:
        return Verdict(
            sequence=work.row.sequence,
            position=work.start,
            accepted=accepted,
            token_ids=token_ids,
            cached_tokens=work.cached,
            logprobs=logprobs,
            prompt_logprobs=work.prompt_logprobs,
        )

    def _fail(self, work: Work, message: str) -> None:
        self._model.truncate(work.sequence.key, work.row.position)
        work.verdict = refusal(work.row, VerdictStatus.INVALID, message)
