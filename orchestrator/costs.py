"""What rounds cost a target: learned from what each micro-batch took.

Pure policy: knows nothing of clocks or sockets. Three parts that are paid for by different choices:
verifying (by tokens), the drafters beside the target (by the tokens they draft), and prompts read
beside running streams (by their tokens).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from core.types import VerifyBatch, VerifyResult

_PROMPT_WEIGHT = 0.3
_MIN_CHUNK = 8


class Cost:
    """Seconds as a plane over two counts, through what was measured lately.

    Old measurements fade, and so does a slope when all are alike in its count: what is asked for is
    thought free until it is seen to cost. A hiccup of the machine counts as a slow round at most.
    """

    _KEEP, _MAX_SURPRISE, _RIDGE = 0.98, 2.0, 0.1

    def __init__(self) -> None:
        self._sums = [0.0] * 9
        self._plane: tuple[float, float, float, float] | None = None

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return self._sums[0] > 0

    def observe(self, a: int, b: int, seconds: float) -> None:
        """Take in one measurement."""
        if self._sums[0] > 4:
            seconds = min(seconds, self._MAX_SURPRISE * self.seconds(a, b))
        terms = (1.0, a, b, seconds, a * a, a * b, b * b, a * seconds, b * seconds)
        self._sums = [self._KEEP * old + new for old, new in zip(self._sums, terms, strict=True)]
        self._plane = None

    def seconds(self, a: int, b: int) -> float:
        """Expected seconds; 1.0 whatever the counts while nothing is known."""
        if self._plane is None:
            self._plane = self._fit()
        start, slope_a, slope_b, least = self._plane
        return max(start + slope_a * a + slope_b * b, least)

    def _fit(self) -> tuple[float, float, float, float]:
        """Seconds at the origin, the two slopes, and the least that is believed."""
        weight = self._sums[0]
        if weight == 0:
            return 1.0, 0.0, 0.0, 0.0
        mean_a, mean_b, mean, aa, ab, bb, ay, by = (total / weight for total in self._sums[1:])
        aa, bb = aa - mean_a**2 + self._RIDGE, bb - mean_b**2 + self._RIDGE
        ab, ay, by = ab - mean_a * mean_b, ay - mean_a * mean, by - mean_b * mean
        determinant = aa * bb - ab * ab
        slope_a = max(0.0, (ay * bb - by * ab) / determinant)
        slope_b = max(0.0, (by * aa - ay * ab) / determinant)
        return mean - slope_a * mean_a - slope_b * mean_b, slope_a, slope_b, 0.1 * mean


class VerifyCost(Cost):
    """Of a forward of decoding rows, by its rows and its draft tokens: a token behind others of its
    row costs less than a row."""


class DraftCost(Cost):
    """That the drafters beside the target add to a round, by the steps they take one after the
    other and the tokens they draft in all. Copies of a lookup are free, and not counted."""

    _WEIGHT = 0.1

    def __init__(self) -> None:
        super().__init__()
        self._idle_s = 0.0

    def learn(self, lengths: Sequence[int], seconds: float) -> None:
        """Take in one measured round of decoding rows, and how much was drafted for each."""
        if any(lengths):
            self.observe(max(lengths), sum(lengths), seconds)
        else:
            self._idle_s += self._WEIGHT * (seconds - self._idle_s)

    def added(self, steps: int, tokens: int) -> float:
        """Expected seconds more than a round takes in which none are drafted; free until seen."""
        if tokens == 0 or not self.is_known:
            return 0.0
        return max(0.0, self.seconds(steps, tokens) - self._idle_s)


@dataclass(frozen=True, slots=True)
class BatchWork:
    """What is in a batch: decoding rows, draft tokens, tokens of prompts (or rows built anew)."""

    num_rows: int
    num_drafts: int
    num_prompt: int

    @classmethod
    def of(cls, batch: VerifyBatch) -> "BatchWork":
        """That of a batch."""
        prompts = [len(r.new_token_ids) for r in batch.rows if len(r.new_token_ids) > 1]
        drafts = sum(len(row.draft_token_ids) for row in batch.rows)
        return cls(len(batch.rows) - len(prompts), drafts, sum(prompts))


class RoundCosts:
    """All three, of verifiers that are alike."""

    def __init__(self) -> None:
        self.verify = VerifyCost()
        self.draft = DraftCost()
        self._prompt_token_s = 0.0

    def observe(self, work: BatchWork, result: VerifyResult) -> None:
        """Take in what a batch took. One that was run in parts tells nothing."""
        timings = result.timings
        if timings.num_forwards != 1:
            return
        verify_s = (timings.forward_ns + timings.sampling_ns) / 1e9
        draft_s = timings.draft_ns / 1e9
        if work.num_prompt == 0:
            drafted = [
                len(v.next_draft_token_ids) for v in result.verdicts if not v.next_draft_is_copy
            ]
            self.verify.observe(work.num_rows, work.num_drafts, verify_s)
            self.draft.learn(drafted, draft_s)
            return
        num_read = work.num_prompt - sum(verdict.cached_tokens for verdict in result.verdicts)
        if num_read >= _MIN_CHUNK:
            decoding = work.num_rows, work.num_drafts
            alone_s = (
                self.verify.seconds(*decoding) if self.verify.is_known and any(decoding) else 0.0
            )
            token_s = max(0.0, verify_s + draft_s - alone_s) / num_read
            weight = _PROMPT_WEIGHT if self._prompt_token_s else 1.0
            self._prompt_token_s += weight * (token_s - self._prompt_token_s)

    def seconds(self, num_rows: int, num_drafts: int, num_prompt: int = 0) -> float:
        """Of a round, without what is drafted in it."""
        return self.verify.seconds(num_rows, num_drafts) + num_prompt * self._prompt_token_s

    def chunk(self, num_streams: int, slowdown: float) -> int | None:
        """Prompt tokens, at least a few, that a round of so many streams can take in while it takes
        at most `slowdown` times as long as without; None while that is not known."""
        if not self.verify.is_known or self._prompt_token_s <= 0:
            return None
        spare_s = (slowdown - 1) * self.verify.seconds(num_streams, 0)
        return max(_MIN_CHUNK, int(spare_s / self._prompt_token_s))
