"""Whether a row waits for a draft, and how long drafts pay; numbers one can compute by hand."""

from functools import partial

import pytest

from core.types import Branch, Plan, Verdict
from orchestrator.controller import Acceptance, Rate
from orchestrator.foresight import Foresight
from orchestrator.pipeline import Sequence
from orchestrator.plans import Plans
from orchestrator.scheduler import Scheduler
from tests.policy import make_sequence

ROUND_S = 0.030


def acceptance(rate: float) -> Acceptance:
    known = Acceptance()
    known.first = known.further = Rate(rate, 1, 1)
    return known


def foresight(behind_draft: float, behind_nothing: float, count: int = 1000) -> Foresight:
    """One that has seen so much that its chances are these."""
    known = Foresight(Rate(0.5, 1, 1))
    for i in range(count):
        known.learn(True, 37 * i % 100 < 100 * behind_draft)
        known.learn(False, 37 * i % 100 < 100 * behind_nothing)
    return known


def test_a_draft_is_worth_its_tokens_and_what_follows() -> None:
    """V = E - 1 + (h - h0) V: without the second part a pool whose empty rounds are always foreseen
    would be waited for as if nothing came of them."""
    known = foresight(0.6, 0.6)
    assert known.worth(4.0) == pytest.approx(3.0)
    assert known.tokens_per_round(4.0) == pytest.approx(0.6 * 4 + 0.4, abs=0.05)
    assert foresight(0.2, 1.0).worth(4.0) < known.worth(4.0) < foresight(1.0, 0.2).worth(4.0)


def test_an_outcome_whose_branches_are_late_is_no_miss_of_the_guesses() -> None:
    """Taken for one, a drafter that is too slow would look like one that guesses badly, and drafts
    would not get shorter."""
    known = foresight(0.8, 0.8)
    known.time(0.050, 0.040, 8)
    before = known.best_length(acceptance(0.8), 8, lambda k: ROUND_S)
    for _ in range(50):
        known.learn(True, None)
    assert known.best_length(acceptance(0.8), 8, lambda k: ROUND_S) == before
    assert known.worth(4.0) > 0


@pytest.mark.parametrize(("link_s", "longest"), [(0.0, 8), (0.010, 4)])
def test_drafts_are_as_long_as_there_is_time_for(link_s: float, longest: int) -> None:
    """With certain acceptance and hits every token pays that comes within the round; one more costs
    a wait each time: 4 + 1 steps of 4 ms and 10 ms are 30 ms."""
    known = foresight(1.0, 1.0)
    known.time(link_s + 8 * 0.004, 8 * 0.004, 8)
    best = known.best_length(acceptance(0.5), 16, lambda k: ROUND_S)
    assert best <= longest and best >= longest - 2
    assert Foresight(Rate(0.5, 1, 1)).best_length(acceptance(0.5), 16, lambda k: ROUND_S) == 16


def waiting(wait_s: float, behind_draft: float, behind_nothing: float) -> Sequence:
    """One that was told its outcome at 10.0 and has no draft for it."""
    sequence = make_sequence()
    sequence.assign_verifier("a")
    sequence.open()
    row = sequence.next_row(3, 0)
    assert sequence.accept(Verdict(1, 3, accepted=0, token_ids=(4,)))
    sequence.commit((4,), row, 0)
    sequence.histories.model = acceptance(0.8)
    sequence.open_drafter("d", 4, 10.0, max_branches=8)
    sequence.foresight = foresight(behind_draft, behind_nothing)
    sequence.foresight.time(wait_s, wait_s / 2, 4)
    return sequence


def scheduler() -> Scheduler:
    made = Scheduler(9, 0.25, 64)
    for _ in range(20):
        made.controller.costs.verify.observe(1, 0, ROUND_S)
    return made


def test_a_row_waits_for_what_is_worth_it_and_goes_where_it_is_not() -> None:
    """E = 3.36: a draft in 5 ms brings more than it costs, one in 60 ms does not where the next
    round is foreseen anyway."""
    assert not scheduler().select([waiting(0.005, 0.7, 0.9)], 100, 10.0).rows
    gone = scheduler().select([waiting(0.060, 0.7, 0.9)], 100, 10.0)
    assert [row.draft_token_ids for row in gone.rows] == [()]


def test_a_row_that_was_not_waited_for_is_not_late() -> None:
    """Counted as late, the rule's own choice would look like a lack of drafters."""
    chosen, overdue = waiting(0.060, 0.7, 0.9), waiting(0.005, 0.7, 0.9)
    assert scheduler().select([chosen], 100, 10.0).rows
    assert scheduler().select([overdue], 100, 10.25).rows
    assert chosen.stats.fallback_steps == {"prompt": 1, "not_waited_for": 1}
    assert overdue.stats.fallback_steps == {"prompt": 1, "late": 1}


@pytest.mark.parametrize("answer_s", [0.010, 0.036])
def test_waits_come_back_when_the_drafter_does(
    answer_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where waiting has stopped to pay, what the drafter says of blocks that are at the target, or
    were decided meanwhile, is all that shows that it is fast again."""
    sequence, now = waiting(0.200, 0.7, 0.9), 10.0
    monkeypatch.setattr(sequence.foresight, "learn", lambda **_: None)
    due: list[tuple[float, Plan]] = []
    for _ in range(40):
        if not scheduler().select([sequence], 100, now).rows:
            return
        told, row = sequence.draft_ahead(now), sequence.row
        assert told is not None and row is not None
        branch = Branch(0, 9, (7,) * told.next_draft_tokens)  # for an outcome that does not come
        due.append((now + answer_s, Plan(1, 1, told.base_length, (branch,))))
        now += ROUND_S
        while due and due[0][0] < now:
            at, plan = due.pop(0)
            sequence.plans.time(plan, at, answer_s / 2, sequence.foresight)
            sequence.take_plan(plan, 100)
        assert sequence.accept(Verdict(1, row.position + 1, accepted=0, token_ids=(4,)))
        sequence.commit((4,), row, 0)
        sequence.commit_drafter((4,), now)
    pytest.fail("no row waits any more")


def test_many_rows_do_not_wait_for_one() -> None:
    """What one row gains the others pay for."""
    alone = scheduler().select([waiting(0.010, 0.7, 0.9)], 100, 10.0)
    assert not alone.rows
    rows = [waiting(0.010, 0.7, 0.9), *(waiting(0.010, 0.7, 0.9) for _ in range(7))]
    for sequence in rows[1:]:
        sequence.num_wanted = 0
    assert len(scheduler().select(rows, 100, 10.0).rows) == 8


def test_a_row_that_goes_without_is_drafted_ahead_of() -> None:
    """Else each round without a draft would be followed by another one."""
    sequence = waiting(0.060, 0.7, 0.9)
    assert scheduler().select([sequence], 100, 10.0).rows
    told = sequence.draft_ahead(10.0)
    assert told is not None and told.num_draft_tokens == 0
    assert told.base_length == len(sequence.tokens) and told.next_draft_tokens > 0


def test_the_first_answer_is_timed_and_only_that() -> None:
    """Later branches of the same block come after more steps, those of an older block sooner."""
    plans, known = Plans(), Foresight(Rate(0.5, 1, 1))
    plans.ask(5, 1.0)
    plan = Plan(1, 1, 5, (Branch(0, 4, (6, 7)),))
    plans.time(Plan(1, 1, 4, plan.branches), 1.1, 0.1, known)
    assert not known.is_timed
    plans.time(plan, 1.25, 0.2, known)
    plans.time(plan, 9.0, 0.2, known)
    assert known.wait_s(2) == pytest.approx(0.25) and known.wait_s(4) == pytest.approx(0.45)


def test_behind_a_whole_block_branches_are_late_not_missing() -> None:
    """They are begun last: corrections that are there say nothing about them."""
    known = foresight(0.5, 0.5)
    for accepted, cause in ((2, "late"), (1, "not_enumerated")):
        plans = Plans(is_ahead=True)
        plans.branches[5, 0, 4] = Branch(0, 4, (6,))
        assert plans.decide((5, accepted, 9), 2, known) == [cause]


def test_a_draft_that_is_waited_for_must_pay_for_the_wait() -> None:
    """Without drafting ahead each draft costs its whole way: a slow drafter is left out, whatever
    it gets right, and asked again some time."""
    slow, quick = Foresight(Rate(0.5, 1, 1)), Foresight(Rate(0.5, 1, 1))
    slow.time(0.100, 0.080, 4)
    quick.time(0.004, 0.002, 4)
    length = partial(slow.best_length, acceptance(0.6), 4, lambda k: ROUND_S, is_ahead=False)
    assert length() == 0
    assert quick.best_length(acceptance(0.6), 4, lambda k: ROUND_S, is_ahead=False) == 4
    assert any(length() for _ in range(2000)), "it is never found out that it became fast"
