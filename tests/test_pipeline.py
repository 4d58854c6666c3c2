"""One sequence's pipeline, by hand: rows, verdicts, plans, losses. No clock, no wire."""

from core.types import Branch, Plan, Verdict, VerifyRow
from orchestrator.pipeline import Sequence
from tests.policy import make_request, make_sequence

NUM_IDS = 100


def test_prompt_is_sent_in_chunks_and_drawn_from_only_once() -> None:
    """A chunk that is not the last must not draw a token, or the text begins too early."""
    sequence = make_sequence(prompt=(1, 2, 3, 4, 5))
    sequence.assign_verifier("v")
    sequence.open()
    first = sequence.next_row(3, 3)
    assert (first.position, first.new_token_ids, first.partial) == (0, (1, 2, 3), True)
    assert sequence.accept(Verdict(1, 3))
    second = sequence.next_row(3, 3)
    assert (second.position, second.new_token_ids, second.partial) == (3, (4, 5), False)


def test_position_advances_by_the_accepted_count() -> None:
    """Advancing by one instead (transformers#30042) would verify at the wrong positions."""
    sequence = _running(accepted=2, draft=(7, 8, 9), verdict=(7, 8, 5))
    assert sequence.tokens[-3:] == [7, 8, 5]
    assert sequence.verified == len(sequence.tokens) - 1
    row = sequence.next_row(10, 10)
    assert (row.position, row.new_token_ids) == (len(sequence.tokens) - 1, (5,))


def test_plan_is_usable_only_for_its_own_outcome() -> None:
    """A branch for another outcome would be verified as if it were this one's draft."""
    sequence = _running(accepted=1, draft=(7, 8), verdict=(7, 5))
    commit = sequence.commit_drafter((7, 5), 0.0)
    wrong = [
        Branch(0, 5, (1,)),  # another accepted count
        Branch(1, 6, (1,)),  # another token
    ]
    assert not sequence.take_plan(Plan(1, 1, commit.base_length, tuple(wrong)), NUM_IDS)
    assert sequence.stats.plan_misses["not_enumerated"] == 1
    right = Branch(1, 5, (20, 21))
    assert sequence.take_plan(Plan(1, 1, commit.base_length, (right,)), NUM_IDS)
    assert sequence.next_row(10, 10).draft_token_ids == (20, 21)


def test_stale_and_late_plans_are_dropped_and_counted() -> None:
    """A plan of an earlier open or an earlier block must never be used."""
    sequence = _running(accepted=0, draft=(7,), verdict=(5,))
    commit = sequence.commit_drafter((5,), 0.0)
    assert not sequence.take_plan(Plan(1, 9, commit.base_length, (Branch(0, 5, (1,)),)), NUM_IDS)
    assert not sequence.take_plan(
        Plan(1, 1, commit.base_length - 1, (Branch(0, 5, (1,)),)), NUM_IDS
    )
    sequence.next_row(10, 10)
    assert not sequence.take_plan(Plan(1, 1, commit.base_length, (Branch(0, 5, (1,)),)), NUM_IDS)
    assert sequence.stats.plan_misses == {"stale": 1, "late": 2}
    assert sequence.stats.fallback_steps["not_waited_for"] == 1


def test_ids_outside_the_vocabulary_never_reach_the_target() -> None:
    """A drafter's invalid id ends its draft; the ids before it are still good."""
    sequence = _running(accepted=0, draft=(7,), verdict=(5,))
    commit = sequence.commit_drafter((5,), 0.0)
    plan = Plan(1, 1, commit.base_length, (Branch(0, 5, (1, NUM_IDS, 2)),))
    sequence.take_plan(plan, NUM_IDS)
    assert sequence.next_row(10, 10).draft_token_ids == (1,)
    assert sequence.stats.plan_misses["invalid_id"] == 1


def test_draft_never_exceeds_what_may_still_be_committed() -> None:
    """k drafts commit up to k + 1 tokens: one more would pass max_new_tokens."""
    for wish, expected in ((0, 2), (1, 1)):
        sequence = make_sequence(max_new_tokens=4, max_draft_tokens=wish)
        _first_token(sequence)
        sequence.open_drafter("d", 8, 0.0)
        assert sequence.num_draft_tokens == expected


def test_draft_that_would_not_be_verified_is_not_waited_for() -> None:
    """Waiting for a draft that the controller leaves out costs a round trip and buys nothing."""
    sequence = _running(accepted=0, draft=(7,), verdict=(5,))
    sequence.num_worthwhile = 0
    assert sequence.commit_drafter((5,), 0.0).next_draft_tokens == 0
    assert sequence.plan_deadline(1.0) is None
    sequence.next_row(10, 10)
    assert sequence.stats.fallback_steps["not_worth_it"] == 1


def test_lost_verifier_is_rebuilt_from_the_committed_tokens() -> None:
    """Whatever was in flight is forgotten; the next row carries everything committed."""
    sequence = _running(accepted=1, draft=(7, 8), verdict=(7, 5))
    sequence.next_row(10, 10)
    sequence.forget_verifier()
    sequence.assign_verifier("other")
    sequence.open()
    row = sequence.next_row(100, 100)
    assert (row.position, list(row.new_token_ids)) == (0, sequence.tokens)


def test_verdict_on_another_row_changes_nothing() -> None:
    """A late verdict (vllm#49620) must not be applied to the row that is in flight now."""
    sequence = _running(accepted=0, draft=(), verdict=(5,))
    sequence.next_row(10, 10)
    before = list(sequence.tokens)
    assert not sequence.accept(Verdict(1, 99, accepted=0, token_ids=(3,)))
    assert sequence.tokens == before and sequence.row is not None


def test_patience_halves_its_trust_each_time_a_plan_does_not_come() -> None:
    """Waiting the full patience every round for a frozen drafter would stall the stream."""
    sequence = _running(accepted=0, draft=(), verdict=(5,))
    waits = 0
    for _ in range(40):
        sequence.commit_drafter((5,), now=0.0)
        if sequence.plan_deadline(0.25) is not None:
            waits += 1
            sequence.give_up_plan()
        _round(sequence, (), (5,), 0)
    assert waits == 6  # after pauses of 1, 2, 4, 8, 16 rounds
    assert sequence.stats.fallback_steps["late"] == 6 + 31 + 3


def test_last_token_asks_for_no_draft() -> None:
    """With one token to go a draft is wasted, and waiting for it would be too."""
    sequence = make_sequence(max_new_tokens=2)
    _first_token(sequence)
    sequence.open_drafter("d", 4, 0.0)
    assert sequence.num_wanted == 0 and sequence.plan_deadline(1.0) is None


def test_reopened_drafter_learns_everything_and_names_the_known_outcome() -> None:
    """After a gap the drafter starts from the committed tokens, in a new generation."""
    sequence = _running(accepted=1, draft=(7, 8), verdict=(7, 5))
    opened = sequence.open_drafter("other", 4, 0.0)
    assert opened.generation == 2 and list(opened.token_ids) == sequence.tokens
    assert sequence.outcome_key == (len(sequence.tokens) - 1, 0, 5)


def test_statistics_identity() -> None:
    """mean_acceptance_length = 1 + accepted / steps that carried a draft."""
    sequence = _running(accepted=2, draft=(7, 8, 9), verdict=(7, 8, 5))
    _round(sequence, (), (6,), 0)
    stats = sequence.stats
    assert (stats.num_draft_tokens, stats.num_accepted_draft_tokens) == (3, 2)
    assert stats.mean_acceptance_length == 1 + 2 / stats.num_spec_steps
    assert stats.acceptance_histogram == [0, 0, 1]


def _first_token(sequence: Sequence) -> None:
    sequence.assign_verifier("v")
    sequence.open()
    _round(sequence, (), (4,), 0)


def _running(accepted: int, draft: tuple[int, ...], verdict: tuple[int, ...]) -> Sequence:
    """A sequence with a drafter, one token, and one verified block behind it."""
    sequence = make_sequence()
    _first_token(sequence)
    sequence.open_drafter("d", 4, 0.0)
    _round(sequence, draft, verdict, accepted)
    return sequence


def _round(
    sequence: Sequence, draft: tuple[int, ...], verdict: tuple[int, ...], accepted: int
) -> VerifyRow:
    base, known, token = sequence.outcome_key
    if draft:
        sequence.take_plan(Plan(1, 1, base, (Branch(known, token, draft),)), NUM_IDS)
    row = sequence.next_row(100, 100)
    position = row.position + len(row.new_token_ids)
    assert sequence.accept(Verdict(1, position, accepted=accepted, token_ids=verdict))
    sequence.commit(verdict, row, accepted)
    return row


def test_disabled_speculation_is_counted_as_such() -> None:
    """A request that wants no drafts must not be reported as a lost drafter."""
    sequence = Sequence(1, make_request(enabled=False))
    _first_token(sequence)
    sequence.next_row(10, 10)
    assert sequence.stats.fallback_steps == {"prompt": 1, "disabled": 1}
