"""What a trace holds: batches, drafts, waits and gaps, each with its place in time, and their sums.

Made by `orchestrator.placing`, written by `orchestrator.trace_events`, drawn by `trace_picture`.
Knows nothing of clocks, sockets or pictures; all times are nanoseconds of the recorder's clock.
"""

from collections import defaultdict
from dataclasses import dataclass, field

from core.types import DraftPlans, VerifyBatch, VerifyResult

#: Why a verifier stood still: its own hand-overs, the wire, the orchestrator's work, a plan that
#: had not come, or nothing to verify.
CAUSES = ("verifier", "wire", "orchestrator", "plans", "requests")


@dataclass(frozen=True, slots=True)
class Verify:
    """A micro-batch with rows. It kept the verifier's device busy from `begin` to `end`."""

    replica: str
    batch: VerifyBatch
    result: VerifyResult
    sent: int
    arrived: int
    begin: int
    forward_end: int
    rule_end: int
    end: int
    departed: int
    received: int


@dataclass(frozen=True, slots=True)
class Drafted:
    """The drafts of one frame: made from `begin` to `end`; `asked` is None for pushed ones."""

    replica: str
    plans: DraftPlans
    asked: int | None
    begin: int
    end: int
    received: int


@dataclass(frozen=True, slots=True)
class Wait:
    """A sequence without the plan it expected, from its verdict until it came or was given up."""

    sequence: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Gap:
    """A part of the time between two batches of a verifier, and why it stood still."""

    replica: str
    cause: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Use:
    """A row of `verify` carried a draft that `source` made: a drafter, or one beside the target."""

    sequence: int
    source: Drafted | Verify
    verify: Verify


@dataclass(slots=True)
class Timeline:
    """Everything placed. Batches are in the order in which their verdicts came.

    `num_expecting` counts the rows that a remote drafter was to draft for.
    """

    verifies: list[Verify] = field(default_factory=list)
    drafts: list[Drafted] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    num_expecting: int = 0

    @property
    def begin(self) -> int:
        """When the first verifier began its first batch; 0 without any."""
        return min((v.begin for v in self.verifies), default=0)

    @property
    def end(self) -> int:
        """When the last batch was done; 0 without any."""
        return max((v.end for v in self.verifies), default=0)


@dataclass(frozen=True, slots=True)
class Summary:
    """Shares are of the time from the first batch's begin to the last one's end, per replica."""

    num_rounds: int
    num_rows: int
    seconds: float
    verifier_idle: float
    idle_by_cause: dict[str, float]
    drafter_busy: dict[str, float]
    mean_plan_wait_ms: float

    def gap_ms(self, cause: str) -> float:
        """Mean idle time per round for a cause."""
        return self.idle_by_cause[cause] * self.seconds * 1000 / max(1, self.num_rounds)


def summarize(timeline: Timeline) -> Summary:
    """The figures of a timeline; all 0 when nothing was verified."""
    length = max(1, timeline.end - timeline.begin)
    verifiers = {v.replica for v in timeline.verifies}
    whole = length * max(1, len(verifiers))
    by_cause = dict.fromkeys(CAUSES, 0.0)
    for gap in timeline.gaps:
        by_cause[gap.cause] += (gap.end - gap.begin) / whole
    busy = sum(v.end - v.begin for v in timeline.verifies)
    idle = 1 - busy / whole if timeline.verifies else 0.0
    # What no gap explains: a verifier that began later than another, or ended sooner.
    by_cause["requests"] += max(0.0, idle - sum(by_cause.values()))
    drafting: defaultdict[str, int] = defaultdict(int)
    for draft in timeline.drafts:
        drafting[draft.replica] += draft.end - draft.begin
    waited = sum(wait.end - wait.begin for wait in timeline.waits)
    return Summary(
        num_rounds=len(timeline.verifies),
        num_rows=sum(len(v.batch.rows) for v in timeline.verifies),
        seconds=whole / 1e9,
        verifier_idle=idle,
        idle_by_cause=by_cause,
        drafter_busy={replica: ns / length for replica, ns in sorted(drafting.items())},
        mean_plan_wait_ms=waited / max(1, timeline.num_expecting) / 1e6,
    )
