"""Rows through the target and the rule, in two steps that another batch may come between.

    launch   the forward is submitted to the devices; nothing is read from them
    finish   wait for it, let the rule decide the rows that end; rows that do not fit in one
             forward go through the next ones

On a sharded target the rule has a stream of its own: on the head's device the forwards that were
submitted later stand in front of it else. A forward that fails, at once or later, is repeated row
by row: the guilty one gets a verdict that says why, the others do not notice. Knows nothing of
streams, opens or messages.
"""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from core.errors import ForerunError
from core.model import RaggedModel, Row
from core.params import TokenLogprobs
from core.types import Verdict, VerdictStatus
from verifier_service.attached import AttachedDrafters
from verifier_service.drawing import Draw, decide
from verifier_service.rules import Outcome
from verifier_service.work import Launch, Work, plan_forward, refusal


@dataclass(slots=True)
class Clock:
    """Nanoseconds and forwards of the batch in hand."""

    forward_ns: int = 0
    sampling_ns: int = 0
    num_forwards: int = 0


class Forwards:
    """The target's, and what is read of them."""

    def __init__(self, model: RaggedModel, attached: AttachedDrafters) -> None:
        self._model = model
        self._attached = attached
        self._rule_stream: torch.Stream | None = None

    def launch(self, works: Sequence[Work]) -> Launch | None:
        """Submit the next forward of these works; None when there is nothing to run."""
        # Short rows first: a long prompt is what gets split, and decoding rows ride along.
        pending = sorted((w for w in works if w.verdict is None), key=lambda w: w.num_left)
        if not pending:
            return None
        return self._launch(plan_forward(pending, self._model.max_batch_tokens))

    def finish(self, launch: Launch | None, works: Sequence[Work], clock: Clock) -> None:
        """Set the verdict of every work; `launch` is their first forward."""
        while launch is not None:
            self._finish(launch, clock)
            launch = self.launch(works)

    def _launch(self, chunks: list[tuple[Work, int]]) -> Launch:
        rows = [
            Row(
                work.sequence.key,
                work.row.position + work.done,
                work.tokens[work.done : work.done + size],
                work.num_logits(size),
            )
            for work, size in chunks
        ]
        launch = Launch(chunks, time.perf_counter_ns())
        try:
            launch.logits = self._model.forward(rows)
            self._read_features(chunks)
            launch.end = self._end_of(launch.logits)
        except (RuntimeError, ForerunError) as error:
            launch.failure = f"the target failed: {error}"
        if launch.end is None:
            launch.end_ns = time.perf_counter_ns()
        return launch

    def _end_of(self, logits: Tensor) -> torch.Event | None:
        """What tells when all that was submitted is done; waits itself on a target that does one
        thing at a time (or the rule's time would hold the forward's)."""
        if logits.device.type == "cpu":
            return None
        if self._model.num_stages == 1:
            torch.accelerator.synchronize(logits.device)
            return None
        end = torch.Event(device=logits.device)
        end.record(torch.accelerator.current_stream(logits.device))
        return end

    @torch.inference_mode()
    def _read_features(self, chunks: list[tuple[Work, int]]) -> None:
        for work, _ in chunks:
            for values in work.values.values():
                del values[work.num_read :]  # of a forward that failed
        self._attached.read([work for work, _ in chunks])

    def _finish(self, launch: Launch, clock: Clock) -> None:
        """Decide the works that end with a forward."""
        chunks, failure = launch.chunks, launch.failure
        try:
            launch.wait()
        except RuntimeError as error:
            failure = f"the target failed: {error}"
        clock.forward_ns += max(launch.end_ns - launch.begin_ns, 0)
        clock.num_forwards += 1
        if failure and len(chunks) == 1:
            self._fail(chunks[0][0], failure)
            return
        if failure:  # find the guilty row: the others must not pay for it
            for chunk in chunks:
                self._finish(self._launch([chunk]), clock)
            return
        assert launch.logits is not None
        begin = time.perf_counter_ns()
        with torch.inference_mode(), self._beside_forwards(launch.logits.device):
            self._decide(chunks, self._read(chunks, launch.logits))
            if self._rule_stream is not None:  # the logits' memory belongs to the forwards' stream
                self._rule_stream.synchronize()
        clock.sampling_ns += time.perf_counter_ns() - begin

    def _beside_forwards(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        if self._model.num_stages == 1 or device.type == "cpu":
            return contextlib.nullcontext()
        if self._rule_stream is None:
            self._rule_stream = torch.Stream(device=device)
        return self._rule_stream

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
            work.num_read += 1
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
