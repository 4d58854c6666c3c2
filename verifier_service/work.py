"""Open sequences, rows and batches under way: the verifier engine's bookkeeping, and how a batch is
split.

Knows nothing of models, forwards or rules.
"""

import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from core.params import TokenLogprobs
from core.types import OpenFailure, Verdict, VerdictStatus, VerifyBatch, VerifyResult, VerifyRow
from verifier_service.drawing import Drawer, PromptReader

if TYPE_CHECKING:
    from torch import Event, Tensor

    from core.features import FeatureTap


@dataclass(slots=True)
class OpenSequence:
    """An open sequence: its id in the model, how long it may grow, how it is drawn.

    `reader` reports the prompt's tokens; None when not asked for, or once a token was drawn.
    `features` reads what its remote drafter needs, `tap` what its attached one does, to which the
    first `num_told` positions have been told, and which has seen the first `num_seen` tokens.
    """

    key: int
    max_length: int
    drawer: Drawer
    reader: PromptReader | None = None
    features: "FeatureTap | None" = None
    attached: str = ""
    tap: "FeatureTap | None" = None
    num_told: int = 0
    num_seen: int = 0

    @property
    def needs_every_token(self) -> bool:
        """Whether every token must be run: nothing can be told of a copied prefix."""
        taps = (self.features, self.tap, self.reader)
        return any(each is not None for each in taps)


@dataclass(slots=True)
class Work:
    """A sound row on its way through the target; `done` of its tokens are in the cache.

    values: what its taps read, of the `num_read` forwards that have been looked at.
    """

    row: VerifyRow
    sequence: OpenSequence
    tokens: tuple[int, ...]
    cached: int = 0
    done: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    verdict: Verdict | None = None
    values: "dict[FeatureTap, list[Tensor]]" = field(default_factory=dict)
    num_read: int = 0

    @property
    def num_left(self) -> int:
        """Tokens that have not been run."""
        return len(self.tokens) - self.done

    @property
    def num_drawn(self) -> int:
        """Logits the rule needs: of the last new token and of every draft token."""
        return 0 if self.row.partial else len(self.row.draft_token_ids) + 1

    def num_logits(self, size: int) -> int:
        """Logits wanted of the next `size` tokens."""
        if self.sequence.reader is not None:
            return size
        return self.num_drawn if size == self.num_left else 0

    @property
    def start(self) -> int:
        """Where the drawn tokens begin."""
        return self.row.position + len(self.row.new_token_ids)

    def end(self) -> Verdict:
        """The verdict of a work that was run."""
        assert self.verdict is not None
        return self.verdict


@dataclass(slots=True)
class Launch:
    """A forward that was submitted to the devices: of chunks, (work, number of its next tokens).

    logits: what comes out, None if it failed at once. end: when it has; None where that is now.
    """

    chunks: list[tuple[Work, int]]
    begin_ns: int
    logits: "Tensor | None" = None
    failure: str = ""
    end: "Event | None" = None
    end_ns: int = 0

    def wait(self) -> None:
        """Return when the devices are through with it; in any thread. Raises RuntimeError when
        they fail."""
        if self.end is not None:
            self.end.synchronize()
        self.end_ns = self.end_ns or time.perf_counter_ns()


@dataclass(slots=True, eq=False)
class Submission:
    """A batch whose first forward was submitted; `result` has what came of it.

    items: for each row its work, or the verdict that it cannot be verified.
    """

    stream: int
    batch: VerifyBatch
    items: list[Work | Verdict]
    open_failures: tuple[OpenFailure, ...]
    launch: Launch | None
    result: "Future[VerifyResult]" = field(default_factory=Future)

    @property
    def works(self) -> list[Work]:
        """The rows that are verified."""
        return [item for item in self.items if isinstance(item, Work)]

    def touches(self, stream: int, sequences: set[int]) -> bool:
        """Whether it has to do with one of these sequences of a stream."""
        return stream == self.stream and not sequences.isdisjoint(sequences_of(self.batch))

    def wait(self) -> None:
        """Return when the devices are through with the first forward, or failed; in any thread."""
        if self.launch is not None:
            with contextlib.suppress(RuntimeError):  # who completes it will meet it again
                self.launch.wait()


def sequences_of(batch: VerifyBatch) -> set[int]:
    """All sequences that a batch has to do with."""
    rows = {row.sequence for row in batch.rows}
    return rows.union(batch.closes, (open_.sequence for open_ in batch.opens))


def plan_forward(works: Sequence[Work], max_tokens: int) -> list[tuple[Work, int]]:
    """The next forward: works in order, as many of their tokens as fit.

    Only new tokens are ever split: the tokens that the rule needs logits of stay together.
    """
    chunks = []
    for work in works:
        fits = work.num_left <= max_tokens
        size = work.num_left if fits else min(max_tokens, work.num_left - work.num_drawn)
        if size > 0:
            chunks.append((work, size))
            max_tokens -= size
    return chunks


def refusal(row: VerifyRow, status: VerdictStatus, message: str) -> Verdict:
    """The verdict on a row that is not verified."""
    position = row.position + len(row.new_token_ids)
    return Verdict(row.sequence, position, status, message=message)
