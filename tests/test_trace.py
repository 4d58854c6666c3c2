"""Timelines: where work is put, why a verifier stood still, and whose draft a row carried."""

import itertools
import json
import xml.etree.ElementTree as ET
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from core.config import parse_config
from core.types import (
    Branch,
    DraftCommands,
    DraftCommit,
    DraftPlans,
    DraftSent,
    Plan,
    Verdict,
    VerifyBatch,
    VerifyResult,
    VerifyRow,
    VerifyTimings,
)
from orchestrator.cli import app
from orchestrator.launch import running_replicas
from orchestrator.placing import build
from orchestrator.timeline import Drafted, Timeline, Verify, summarize
from orchestrator.trace import CpuClock, Message, Record, Recorder
from orchestrator.trace_cli import run_traced
from orchestrator.trace_events import describe, trace_events
from orchestrator.trace_picture import draw_timeline
from protos import generation_pb2 as pb
from tests.harness import MODEL, Stack, pool, serving
from tests.policy import make_request
from tests.tiny_models import TinyFactory


def _row(position: int, new: int = 9, draft: tuple[int, ...] = ()) -> VerifyRow:
    return VerifyRow(1, position, (new,), draft)


def _result(batch: int, position: int, ids: tuple[int, ...], **timings: int) -> VerifyResult:
    verdict = Verdict(1, position, accepted=len(ids) - 1, token_ids=ids)
    return VerifyResult(batch, (verdict,), timings=VerifyTimings(**timings))


def _commit(base: int, accepted: int, ids: tuple[int, ...]) -> DraftCommands:
    return DraftCommands(commits=(DraftCommit(1, 1, base, accepted, ids, next_draft_tokens=2),))


def _plan(base: int, accepted: int, token: int, draft: tuple[int, ...], ns: int) -> DraftPlans:
    plan = Plan(1, 1, base, (Branch(accepted, token, draft),))
    return DraftPlans(plans=(plan,), draft_ns=ns)


def _records(*events: tuple[int, str, Message]) -> list[Record]:
    return [Record(*event) for event in events]


#: One sequence, one drafter: a batch without a draft, a wait for the plan, a batch with it. The
#: first is at the device from 25 to 75, the second from 270 to 330.
ROUNDS = _records(
    (0, "v", VerifyBatch(1, (_row(4, new=5),))),
    (
        100,
        "v",
        _result(1, 5, (7,), queue_ns=10, forward_ns=40, sampling_ns=10, draft_ns=0, total_ns=70),
    ),
    (110, "d", _commit(5, 0, (7,))),
    (200, "d", _plan(5, 0, 7, (8, 9), ns=50)),
    (240, "v", VerifyBatch(2, (_row(5, new=7, draft=(8, 9)),))),
    (
        350,
        "v",
        _result(2, 6, (8, 3), queue_ns=15, forward_ns=50, sampling_ns=10, total_ns=80),
    ),
)


def test_work_is_placed_between_sending_and_verdict() -> None:
    """Work outside its interval, a wire that goes one way only, or a queue behind the work."""
    first, second = build(ROUNDS).verifies
    assert (first.sent, first.arrived, first.begin) == (0, 15, 25)
    assert (first.forward_end, first.rule_end, first.end) == (65, 75, 75)
    assert (first.departed, first.received) == (85, 100)
    assert (second.arrived, second.begin, second.end, second.departed) == (255, 270, 330, 335)


def test_a_gap_is_told_by_cause() -> None:
    """The time between two batches is told whole, and blamed on the right one."""
    timeline = build(ROUNDS)
    assert [(gap.cause, gap.begin, gap.end) for gap in timeline.gaps] == [
        ("verifier", 75, 85),
        ("wire", 85, 100),
        ("plans", 100, 200),
        ("orchestrator", 200, 240),
        ("wire", 240, 255),
        ("verifier", 255, 270),
    ]
    summary = summarize(timeline)
    assert summary.verifier_idle == pytest.approx(1 - 110 / 305)
    assert sum(summary.idle_by_cause.values()) == pytest.approx(summary.verifier_idle)
    assert summary.gap_ms("plans") == pytest.approx(100 / 2 / 1e6)
    assert summary.mean_plan_wait_ms == pytest.approx(100 / 1e6)
    assert summary.drafter_busy == {"d": pytest.approx(50 / 305)}


def test_a_draft_is_joined_to_the_row_that_carried_it() -> None:
    """An arrow from the wrong drafts, or none, or one for a row that went without a draft."""
    timeline = build(ROUNDS)
    [use] = timeline.uses
    assert use.verify.batch.batch == 2
    assert isinstance(use.source, Drafted)
    # 90 from the question to the answer, 50 of it drafting: 20 on the wire, each way.
    assert (use.source.begin, use.source.end, use.source.received) == (130, 180, 200)
    other = [r for r in ROUNDS if not isinstance(r.message, VerifyBatch) or r.message.batch == 1]
    without = build([*other, Record(240, "v", VerifyBatch(2, (_row(5, new=7, draft=(1,)),)))])
    assert without.uses == []


def test_a_pushed_plan_makes_nobody_wait() -> None:
    """A plan made during the verification it is for: no wait, and it need not be asked for."""
    pushed = Record(60, "d", _plan(5, 0, 7, (8, 9), ns=50))
    records = [r for r in ROUNDS if not isinstance(r.message, DraftPlans)]
    timeline = build(sorted([*records, pushed], key=lambda r: r.at_ns))
    assert timeline.waits == []
    assert timeline.num_expecting == 1
    [use] = timeline.uses
    assert isinstance(use.source, Drafted) and use.source.asked is None
    assert (use.source.begin, use.source.end) == (10, 60)
    assert {gap.cause for gap in timeline.gaps} == {"verifier", "wire", "orchestrator"}


def test_a_plan_asked_for_ahead_and_missed_is_asked_for_again() -> None:
    """A question before the verdict makes nobody wait; the one behind a miss does."""
    ahead = DraftCommands(sents=(DraftSent(1, 1, 5, 0, 2),))
    missed = _plan(5, 0, 99, (8,), ns=20)
    records = [*ROUNDS, Record(2, "d", ahead), Record(60, "d", missed)]
    timeline = build(sorted(records, key=lambda r: r.at_ns))
    assert [draft.asked for draft in timeline.drafts] == [2, 110]
    assert [(wait.begin, wait.end) for wait in timeline.waits] == [(100, 200)]
    silent = [r for r in records if not isinstance(r.message, DraftCommands) or r.at_ns == 2]
    silent = [r for r in silent if not isinstance(r.message, DraftPlans)]
    assert build(sorted(silent, key=lambda r: r.at_ns)).waits == []


def test_a_plan_that_never_comes_is_waited_for_until_the_row_goes() -> None:
    """A wait that nobody ended would vanish from the mean and from the idle time's causes."""
    records = [r for r in ROUNDS if not isinstance(r.message, DraftPlans)]
    timeline = build(records)
    assert [(wait.begin, wait.end) for wait in timeline.waits] == [(100, 240)]
    assert summarize(timeline).gap_ms("orchestrator") == 0


def test_a_second_batch_under_way_waits_in_the_queue() -> None:
    """Two batches at one device at once, or idle time while a batch was there to begin."""
    records = _records(
        (0, "v", VerifyBatch(1, (_row(4),))),
        (5, "v", VerifyBatch(2, (_row(5),))),
        (100, "v", _result(1, 5, (7,), queue_ns=5, forward_ns=80, total_ns=90)),
        (185, "v", _result(2, 6, (7,), queue_ns=80, forward_ns=80, total_ns=170)),
    )
    first, second = build(records).verifies
    assert first.end <= second.begin
    assert {gap.cause for gap in build(records).gaps} <= {"verifier"}


def test_a_new_request_is_not_waited_for_by_the_orchestrator() -> None:
    """Idle time for want of work must not look like anybody's fault."""
    new = VerifyBatch(2, (VerifyRow(2, 0, (1, 2, 3)),))
    verdict = Verdict(2, 3, token_ids=(4,))
    done = VerifyResult(2, (verdict,), timings=VerifyTimings(forward_ns=50))
    records = [*ROUNDS[:2], *_records((500, "v", new), (600, "v", done))]
    assert [g.end - g.begin for g in build(records).gaps if g.cause == "requests"] == [400]


def test_what_was_lost_is_left_out_and_impossible_times_are_bounded() -> None:
    """A verifier that dies, and durations longer than the interval they must fit in."""
    assert build(ROUNDS[:1]).verifies == []
    assert summarize(Timeline()).verifier_idle == 0
    told = _result(1, 5, (7,), queue_ns=500, forward_ns=900, total_ns=5)
    [verify] = build([ROUNDS[0], Record(100, "v", told)]).verifies
    edges = [verify.sent, verify.arrived, verify.begin, verify.end, verify.departed]
    assert edges == sorted(edges) and verify.departed <= verify.received == 100


def _check_tracks(trace: dict[str, Any]) -> None:
    """Slices of a track must not overlap, and every arrow must begin and end in a slice."""
    slices = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            track = slices[event["pid"], event["tid"]]
            track.append((event["ts"], event["ts"] + event["dur"]))
    for track in slices.values():
        track.sort()
        for (_, end), (begin, _) in itertools.pairwise(track):
            assert begin >= end - 0.0015
    ids = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] in "sf":
            ids[event["id"]].append(event)
            places = slices[event["pid"], event["tid"]]
            assert any(begin <= event["ts"] <= end for begin, end in places), event
    for begin, end in ids.values():
        assert (begin["ph"], end["ph"]) == ("s", "f") and begin["ts"] <= end["ts"]


async def _recorded(stack: Stack, pool_name: str) -> list[Record]:
    recorder = Recorder()
    stack.engine.record(recorder)
    for number in range(2):
        prompt = tuple(range(10, 18)) * 3
        request = make_request(prompt, 30, request_id=str(number), drafter=pool_name)
        await stack.run(request)
    stack.engine.record(None)
    return recorder.records


async def test_real_services(tiny: TinyFactory, tmp_path: Path) -> None:
    """A service that stops telling a duration, a hook that is lost, a format nobody can open."""
    target = tiny("llama", eos_token_id=300)
    pools = [pool("small", "draft_model", target, k=4), pool("near", "ngram", attached=True)]
    async with serving(target, pools, adaptive_draft_length=False) as stack:
        cpu = CpuClock()
        records = await _recorded(stack, "small")
        near = build(await _recorded(stack, "near"))
        before = len(records)
        await stack.run(make_request(request_id="unseen"))
        assert len(records) == before
        assert 0 < cpu.thread_s <= cpu.process_s
    timeline = build(records)
    answers = [r.message for r in records if isinstance(r.message, VerifyResult)]
    assert all(0 < a.timings.forward_ns < a.timings.total_ns for a in answers if a.verdicts)
    num_drafted = sum(1 for v in timeline.verifies for row in v.batch.rows if row.draft_token_ids)
    assert len(timeline.uses) == num_drafted > 5
    assert all(isinstance(use.source, Drafted) for use in timeline.uses)
    assert near.uses and all(isinstance(use.source, Verify) for use in near.uses)
    summary = summarize(timeline)
    assert 0 < summary.verifier_idle < 1 and 0 < summary.drafter_busy["small"] < 1
    assert sum(summary.idle_by_cause.values()) == pytest.approx(summary.verifier_idle)
    assert summary.mean_plan_wait_ms > 0
    for each in (timeline, near):
        trace = json.loads(json.dumps(trace_events(each, summarize(each))))
        _check_tracks(trace)
        assert any(event["ph"] == "s" for event in trace["traceEvents"])
        assert ET.fromstring(draw_timeline(each, "a < b")).tag.endswith("svg")
    assert any("verifier idle" in line for line in describe(summary))


async def test_an_orchestrator_of_its_own(tiny: TinyFactory) -> None:
    """`forerun trace` beside services that another orchestrator uses meanwhile."""
    target = tiny("llama", eos_token_id=300)
    async with serving(target, [pool("lookup", "ngram")]) as stack:
        config = parse_config(
            {
                "target": {"model": str(target), **MODEL},
                "drafter_pools": [
                    {
                        "name": "lookup",
                        "kind": "ngram",
                        "addresses": [stack.addresses["lookup"]],
                    }
                ],
                "orchestrator": {"verifier_addresses": [stack.addresses["verifier"]]},
            }
        )
        messages = [
            pb.GenerateRequest(
                prompt="a b c a b c a b", stopping=pb.StoppingOptions(max_new_tokens=12)
            )
            for _ in range(3)
        ]
        traced = await run_traced(config, running_replicas(config), messages, 2)
    rows = [row for v in traced.timeline.verifies for row in v.batch.rows]
    assert len({row.sequence for row in rows}) == 3
    assert max(len(v.batch.rows) for v in traced.timeline.verifies) == 2
    assert 0 < traced.thread_s <= traced.process_s


def test_what_cannot_be_traced_is_said(tmp_path: Path) -> None:
    """A command that starts a cluster by mistake, or ends with a traceback."""
    run = CliRunner().invoke
    out = ["trace", "--out", str(tmp_path / "t.json")]
    assert "give one of the two" in run(app, out).output
    assert "give one of the two" in run(app, [*out, "--config", "a", "--address", "b"]).output
    result = run(app, [*out, "--address", "127.0.0.1:1"])
    assert "127.0.0.1:1" in str(result.exception)
