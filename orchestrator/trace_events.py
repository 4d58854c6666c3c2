"""A timeline in the trace event format of Chrome: opens in ui.perfetto.dev and chrome://tracing.

    verifiers   a track per replica with what its device did, one with why it stood still
    drafters    a track per replica with its batches of drafts
    sequences   a track per request: its rows at the verifier, its waits for plans; arrows come
                from the batch of drafts that a row carried
    wire        messages on their way, and batches that wait in a verifier's queue

Knows nothing of where a timeline comes from.
"""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from orchestrator.timeline import CAUSES, Drafted, Summary, Timeline, Use, Verify

Event = dict[str, Any]

_VERIFIERS, _DRAFTERS, _SEQUENCES, _WIRE = 1, 2, 3, 4
_PROCESSES = {
    _VERIFIERS: "verifiers",
    _DRAFTERS: "drafters",
    _SEQUENCES: "sequences",
    _WIRE: "wire",
}


def trace_events(timeline: Timeline, summary: Summary) -> dict[str, Any]:
    """The trace as a JSON object; its times are microseconds from the first message on."""
    return {
        "traceEvents": _Writer(timeline).events,
        "displayTimeUnit": "ms",
        "otherData": asdict(summary),
    }


class _Writer:
    def __init__(self, timeline: Timeline) -> None:
        self._zero = min((v.sent for v in timeline.verifies), default=0)
        self._tracks: dict[tuple[int, str], int] = {}
        self._num_async = 0
        self.events: list[Event] = []
        for pid, name in _PROCESSES.items():
            self._meta("process_name", pid, 0, name)
        for verify in timeline.verifies:
            self._verify(verify)
        for gap in timeline.gaps:
            track = self._track(_VERIFIERS, f"{gap.replica} idle")
            self._slice(_VERIFIERS, track, f"idle: {gap.cause}", gap.begin, gap.end)
        for draft in timeline.drafts:
            self._draft(draft)
        for wait in timeline.waits:
            track = self._track(_SEQUENCES, f"sequence {wait.sequence}")
            self._slice(_SEQUENCES, track, "waits for its plan", wait.begin, wait.end)
        for number, use in enumerate(timeline.uses, start=1):
            self._arrow(number, use)
        self._count_waiting(timeline)

    # ------------------------------------------------------------ what is shown

    def _verify(self, verify: Verify) -> None:
        rows, replica = verify.batch.rows, verify.replica
        told = {
            "batch": verify.batch.batch,
            "rows": len(rows),
            "tokens": sum(row.num_tokens for row in rows),
            "draft tokens": sum(len(row.draft_token_ids) for row in rows),
            "accepted": sum(verdict.accepted for verdict in verify.result.verdicts),
        }
        track = self._track(_VERIFIERS, replica)
        self._slice(_VERIFIERS, track, "forward", verify.begin, verify.forward_end, told)
        self._slice(_VERIFIERS, track, "rule", verify.forward_end, verify.rule_end)
        self._slice(_VERIFIERS, track, "draft", verify.rule_end, verify.end)
        for row, verdict in zip(rows, verify.result.verdicts, strict=True):
            told = {
                "batch": verify.batch.batch,
                "position": row.position,
                "new": len(row.new_token_ids),
                "drafted": len(row.draft_token_ids),
                "accepted": verdict.accepted,
            }
            name = f"verify {len(row.draft_token_ids)} + 1" if not row.partial else "prompt"
            track = self._track(_SEQUENCES, f"sequence {row.sequence}")
            self._slice(_SEQUENCES, track, name, verify.sent, verify.received, told)
        self._async(f"to {replica}", verify.sent, verify.arrived)
        self._async(f"queue of {replica}", verify.arrived, verify.begin)
        self._async(f"from {replica}", verify.departed, verify.received)

    def _draft(self, draft: Drafted) -> None:
        lengths = [len(b.draft_token_ids) for plan in draft.plans.plans for b in plan.branches]
        told = {
            "sequences": len(draft.plans.plans),
            "branches": len(lengths),
            "tokens": sum(lengths),
            "pushed": draft.asked is None,
        }
        track = self._track(_DRAFTERS, draft.replica)
        self._slice(_DRAFTERS, track, "draft", draft.begin, draft.end, told)
        if draft.asked is not None:
            self._async(f"to {draft.replica}, and its queue", draft.asked, draft.begin)
        self._async(f"from {draft.replica}", draft.end, draft.received)

    def _arrow(self, number: int, use: Use) -> None:
        if isinstance(use.source, Drafted):
            place, begin = (_DRAFTERS, use.source.replica), use.source.begin
        else:
            place, begin = (_VERIFIERS, use.source.replica), use.source.rule_end
        ends = {"cat": "draft", "name": "draft", "id": number}
        target = self._track(_SEQUENCES, f"sequence {use.sequence}")
        self.events.append(
            ends | {"ph": "s", "pid": place[0], "tid": self._track(*place), "ts": self._us(begin)}
        )
        at = {"pid": _SEQUENCES, "tid": target, "ts": self._us(use.verify.sent)}
        self.events.append(ends | {"ph": "f", "bp": "e"} | at)

    def _count_waiting(self, timeline: Timeline) -> None:
        changes = [(wait.begin, 1) for wait in timeline.waits]
        changes += [(wait.end, -1) for wait in timeline.waits]
        waiting = 0
        for at, change in sorted(changes):
            waiting += change
            told = {"pid": _SEQUENCES, "ts": self._us(at), "args": {"rows": waiting}}
            self.events.append({"ph": "C", "name": "rows waiting for plans"} | told)

    # ------------------------------------------------------------ the format

    def _us(self, at: int) -> float:
        return round((at - self._zero) / 1000, 3)

    def _track(self, pid: int, name: str) -> int:
        """The track of that name, new or known."""
        if (pid, name) not in self._tracks:
            self._tracks[pid, name] = tid = len(self._tracks) + 1
            self._meta("thread_name", pid, tid, name)
        return self._tracks[pid, name]

    def _meta(self, kind: str, pid: int, tid: int, name: str) -> None:
        self.events.append(
            {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
        )

    def _slice(
        self, pid: int, tid: int, name: str, begin: int, end: int, args: Event | None = None
    ) -> None:
        if end > begin:
            times = {"ts": self._us(begin), "dur": round((end - begin) / 1000, 3)}
            place = {"ph": "X", "name": name, "pid": pid, "tid": tid}
            self.events.append(place | times | {"args": args or {}})

    def _async(self, name: str, begin: int, end: int) -> None:
        """A slice that may overlap others of its track."""
        if end > begin:
            self._num_async += 1
            place = {"cat": "wire", "name": name, "id": self._num_async, "pid": _WIRE, "tid": 0}
            self.events.append(place | {"ph": "b", "ts": self._us(begin)})
            self.events.append(place | {"ph": "e", "ts": self._us(end)})


def describe(summary: Summary) -> Iterator[str]:
    """The figures in words, a line each."""
    rounds = max(1, summary.num_rounds)
    yield (
        f"{summary.num_rounds} verify rounds, {summary.num_rows / rounds:.1f} rows each, "
        f"{summary.seconds * 1000 / rounds:.2f} ms each"
    )
    causes = ", ".join(f"{cause} {summary.gap_ms(cause):.2f}" for cause in CAUSES)
    yield f"verifier idle {summary.verifier_idle:.1%}; ms per round by cause: {causes}"
    for replica, share in summary.drafter_busy.items():
        yield f"{replica} busy {share:.1%}"
    yield f"mean wait for a plan {summary.mean_plan_wait_ms:.2f} ms"
