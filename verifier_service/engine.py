"""The verifier without its wire: one micro-batch of rows in, one verdict per row out.

For each row: truncate the sequence to the row's position, append its new tokens, run them and the
draft through the target, let the rule decide, and keep what was accepted.

    cached          | new_token_ids        | draft_token_ids
    0 .. position-1 | position .. start-1  | start .. start+k-1
                      logits ────────────┘   of the last new token and of every draft token
    afterwards the cache holds start + accepted tokens; the token the target added comes with the
    next row's new_token_ids.

A row that cannot be verified gets a verdict that says why, and never disturbs the others. Nothing
is remembered of a row, so repeating one gives the same verdict. On a target over several devices
the next batches are submitted while one is under way (`submit`, `complete`). Knows nothing of
asyncio, gRPC, streams' lifetimes or the rule itself; all methods run in one thread.
"""

import itertools
import secrets
from collections import deque
from typing import Final

from core.constraints import ConstraintCompiler
from core.errors import InvalidRequestError
from core.kv_cache import NoSlotError
from core.model import RaggedModel
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
from verifier_service.drawing import Drawer, PromptReader
from verifier_service.forwards import Clock, Forwards
from verifier_service.work import OpenSequence, Submission, Work, refusal, sequences_of

#: Fewer new tokens are computed sooner than a prefix is looked for.
_MIN_REUSE_TOKENS: Final = 16


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
        self._forwards = Forwards(model, self._attached)
        self._submitted: deque[Submission] = deque()
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
            num_stages=model.num_stages,
        )

    @property
    def num_open(self) -> int:
        """Sequences that hold a slot, over all streams."""
        return sum(map(len, self._streams.values()))

    def verify(self, stream: int, batch: VerifyBatch) -> VerifyResult:
        """Apply closes, then opens, then verify the rows, all of them in the fewest forwards."""
        return self.complete(self.submit(stream, batch))

    def submit(self, stream: int, batch: VerifyBatch) -> Submission:
        """Begin to verify a batch: nothing is read from the devices, so that they can work on it
        and on batches submitted before. These are completed first where there are as many as the
        target has stages, or where they have to do with the same sequences."""
        touched = sequences_of(batch)
        while len(self._submitted) >= self._model.num_stages or any(
            each.touches(stream, touched) for each in self._submitted
        ):
            self._complete_oldest()
        sequences = self._streams.setdefault(stream, {})
        for sequence in batch.closes:
            self._close(sequences, sequence)
        failures = [self._open(sequences, open_) for open_ in batch.opens]
        seen: set[int] = set()
        items = [self._admit(sequences, row, seen) for row in batch.rows]
        launch = self._forwards.launch([item for item in items if isinstance(item, Work)])
        known = tuple([failure for failure in failures if failure is not None])
        self._submitted.append(submission := Submission(stream, batch, items, known, launch))
        return submission

    def complete(self, submission: Submission) -> VerifyResult:
        """The verdicts on a submitted batch; those submitted before it are completed first."""
        while not submission.result.done():
            self._complete_oldest()
        return submission.result.result()

    def close_stream(self, stream: int) -> None:
        """Free everything that a stream opened."""
        while any(each.stream == stream for each in self._submitted):
            self._complete_oldest()
        sequences = self._streams.pop(stream, {})
        for sequence in list(sequences):
            self._close(sequences, sequence)

    def _complete_oldest(self) -> None:
        submission = self._submitted.popleft()
        try:
            submission.result.set_result(self._complete(submission))
        except Exception as error:  # the boundary to a batch: who asks for this one gets it
            submission.result.set_exception(error)

    def _complete(self, submission: Submission) -> VerifyResult:
        clock, works = Clock(), submission.works
        self._forwards.finish(submission.launch, works, clock)
        draft_ns = self._attached.finish(works)
        spent = (clock.forward_ns, clock.sampling_ns, clock.num_forwards, draft_ns)
        return VerifyResult(
            batch=submission.batch.batch,
            verdicts=tuple([i if isinstance(i, Verdict) else i.end() for i in submission.items]),
            open_failures=submission.open_failures,
            timings=VerifyTimings(0, *spent),
        )

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
