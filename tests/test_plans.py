"""Plans by outcome, and what the pipeline makes of them. No clock, no wire.

A block of the drafts 7 8 9 is sent on `base` committed tokens; outcomes are named by the accepted
count and the target's token.
"""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.types import Branch, DraftSent, Plan, Rule, SamplingParams, SparseDistribution, Verdict
from orchestrator.pipeline import Sequence
from tests.policy import make_sequence

NUM_IDS = 100
BLOCK = (7, 8, 9)


def test_a_branch_for_the_outcome_needs_no_draft() -> None:
    """What was drafted ahead must be the next row's draft at once, and must not be asked for again:
    the drafter would draft it twice, and the row would wait."""
    sequence = _at_target()
    base = len(sequence.tokens)
    _take(sequence, base, Branch(1, 5, (20, 21)), Branch(3, 6, (22, 23, 24)))
    _decide(sequence, 3, 6)
    commit = sequence.commit_drafter((*BLOCK, 6), 0.0)
    assert (commit.base_length, commit.accepted, commit.next_draft_tokens) == (base, 3, 0)
    assert sequence.plan_deadline(1.0) is None
    assert sequence.next_row(10, 10).draft_token_ids == (22, 23, 24)
    assert sequence.draft_ahead(0.0) == DraftSent(1, 1, base + 4, 3, 4)
    assert not sequence.stats.plan_misses and sequence.stats.num_plan_hits == 2


def test_plans_of_one_block_add_up() -> None:
    """Branches come as they are finished, in several plans: a later one must not drive out an
    earlier one, nor any of them the draft that is at the target. Those of other outcomes go."""
    sequence = _at_target()
    base = len(sequence.tokens)
    for accepted, token in ((0, 4), (3, 6), (0, 5)):
        _take(sequence, base, Branch(accepted, token, (accepted, token)))
    assert sequence.draft_ahead(0.0) is not None, "the block's own draft is forgotten"
    _decide(sequence, 0, 4)
    assert sequence.draft_at_hand() == (0, 4)
    assert list(sequence.plans.branches.values()) == [Branch(0, 4, (0, 4))]
    assert sequence.commit_drafter((4,), 0.0).next_draft_tokens == 0


def test_a_plan_that_crossed_the_verdict_is_used() -> None:
    """Until its row is gone a late branch is as good as the one asked for, which comes as well and
    changes nothing; the outcome counts as missed once."""
    sequence = _at_target()
    base = len(sequence.tokens)
    _decide(sequence, 2, 5)
    assert sequence.commit_drafter((7, 8, 5), 0.0).next_draft_tokens == 4
    _take(sequence, base, Branch(0, 4, (30,)))  # finished first, and for nothing
    assert sequence.plan_deadline(1.0) == 1.0
    assert _take(sequence, base, Branch(2, 5, (20, 21)))
    assert sequence.plan_deadline(1.0) is None
    assert sequence.next_row(10, 10).draft_token_ids == (20, 21)
    assert not _take(sequence, base, Branch(2, 5, (20, 21, 22)))
    assert sequence.stats.plan_misses == {"late": 1}


@pytest.mark.parametrize("is_told", [False, True])
def test_an_outcome_is_missed_once(is_told: bool) -> None:
    """One verdict without a branch is one miss, "late" where nothing had come and "not_enumerated"
    where branches of its accepted count had: plans that still come must not be counted again."""
    sequence = _at_target()
    base = len(sequence.tokens)
    if is_told:
        _take(sequence, base, Branch(2, 4, (30,)))
    _decide(sequence, 2, 5)
    expected = {"not_enumerated" if is_told else "late": 1}
    assert sequence.stats.plan_misses == expected
    sequence.commit_drafter((7, 8, 5), 0.0)
    _take(sequence, base, Branch(1, 4, (31,)))
    sequence.next_row(10, 10)  # the row went without its draft
    _take(sequence, base, Branch(3, 4, (32,)))
    _take(sequence, base, Branch(2, 5, (33,)))
    assert sequence.stats.plan_misses == expected
    _decide(sequence, 0, 6)
    _take(sequence, base, Branch(3, 3, (34,)))
    assert sequence.stats.plan_misses == expected
    assert sequence.stats.fallback_steps["not_waited_for"] == 1


def test_a_draft_that_was_asked_for_is_missed_once_too() -> None:
    """Without drafting ahead: the row left, and each frame that still comes is the same miss."""
    sequence = _at_target(max_branches=0)
    base = len(sequence.tokens)
    assert sequence.draft_ahead(0.0) is None
    _decide(sequence, 1, 5)
    assert not sequence.stats.plan_misses, "nothing was asked for, so nothing is missing"
    sequence.commit_drafter((7, 5), 0.0)
    sequence.next_row(10, 10)
    for _ in range(2):
        _take(sequence, base, Branch(1, 5, (20,)))
    assert sequence.stats.plan_misses == {"late": 1}


def test_remains_of_a_block_that_was_foreseen_are_no_miss() -> None:
    """The last branches of a block may arrive when the next one is decided already."""
    sequence = _at_target()
    base = len(sequence.tokens)
    _take(sequence, base, Branch(3, 6, BLOCK))
    _decide(sequence, 3, 6)
    sequence.next_row(10, 10)
    _take(sequence, base, Branch(0, 1, (30,)))
    _decide(sequence, 0, 5)
    _take(sequence, base, Branch(0, 2, (30,)))
    assert not sequence.stats.plan_misses


def test_only_the_drafters_own_block_is_drafted_ahead_of() -> None:
    """The drafter is told of "the first n tokens of your draft": behind a fallback's block its
    branches would be for another text. An empty block is anybody's."""
    sequence = _with_drafter()
    sequence.near.use("near", 4, is_fallback=True)
    sequence.near.branch = Branch(0, 4, (40, 41))
    assert sequence.next_row(10, 10).draft_token_ids == (40, 41)
    assert sequence.draft_ahead(0.0) is None
    _decide(sequence, 0, 5)
    assert not sequence.stats.plan_misses, "nobody was asked to draft ahead"
    sequence.commit_drafter((5,), 0.0)
    assert sequence.next_row(10, 10).draft_token_ids == ()
    assert sequence.draft_ahead(0.0) == DraftSent(1, 1, len(sequence.tokens), 0, 4)
    _take(sequence, len(sequence.tokens), Branch(0, 6, (20,)))
    _decide(sequence, 0, 6)
    assert sequence.draft_at_hand() == (20,)
    assert sequence.stats.fallback_steps == {"prompt": 1, "attached": 1, "not_waited_for": 1}


def test_the_drafters_branch_goes_before_the_fallbacks() -> None:
    """Both are there: the drafter is the better one, and can go on from its own draft only."""
    sequence = _at_target()
    sequence.near.use("near", 4, is_fallback=True)
    _take(sequence, len(sequence.tokens), Branch(0, 5, (20, 21)))
    _decide(sequence, 0, 5)
    sequence.near.branch = Branch(0, 5, (40,))
    assert sequence.next_row(10, 1).draft_token_ids == (20,)
    told = sequence.draft_ahead(0.0)
    assert told is not None and told.num_draft_tokens == 1


def test_what_would_not_be_verified_is_not_drafted_ahead() -> None:
    """Behind the block there must be room for a draft and the target's own token, and it must be
    worth it, or the drafter is busy for nothing."""
    for max_new_tokens, expected in ((5, None), (6, None), (7, 1), (8, 2), (50, 4)):
        sequence = _at_target(max_new_tokens)  # one is there, the block may bring four
        told = sequence.draft_ahead(0.0)
        assert (told and told.next_draft_tokens) == expected
        assert sequence.plans.is_ahead == (told is not None)
        _decide(sequence, 0, 5)
        assert sequence.stats.plan_misses == ({"late": 1} if expected else {})
    sequence = _at_target()
    sequence.num_worthwhile = 0
    assert sequence.draft_ahead(0.0) is None


def test_rules_with_distributions_are_not_drafted_ahead_for() -> None:
    """No drafter does: each block would count as a miss. Their drafts, q included, still go."""
    q = SparseDistribution((7, 8), (0.5, 0.5))
    for rule in (Rule.REJECTION, Rule.TOKEN_REJECTION, Rule.ENSEMBLE):
        sequence = make_sequence(sampling=SamplingParams(temperature=1.0, rule=rule))
        _first_token(sequence)
        assert sequence.open_drafter("d", 4, 0.0, max_branches=4).max_branches == 0
        _take(sequence, len(sequence.tokens) - 1, Branch(0, 4, (7, 8), (q, q)))
        assert sequence.next_row(10, 1).draft_distributions == (q,)
        assert sequence.draft_ahead(0.0) is None
        _decide(sequence, 1, 5)
        assert not sequence.stats.plan_misses


def test_a_row_that_reads_is_no_block() -> None:
    """A target that reads the text anew (its verifier was lost) decides nothing meanwhile: a draft
    that comes, or is asked for, in that time is in time for the row behind it."""
    for is_reopened in (False, True):
        sequence = _at_target()
        _decide(sequence, 1, 5)
        base = sequence.commit_drafter((7, 5), 0.0).base_length
        sequence.forget_verifier()
        sequence.assign_verifier("other")
        sequence.open()
        assert sequence.next_row(3, 10).partial
        assert sequence.draft_ahead(0.0) is None
        if is_reopened:
            opened = sequence.open_drafter("e", 4, 0.0, max_branches=4)
            assert opened.next_draft_tokens == 4
            base = len(sequence.tokens) - 1
        assert _take(sequence, base, Branch(0 if is_reopened else 1, 5, (20, 21)))
        assert sequence.accept(Verdict(1, 3))
        row = sequence.next_row(10, 10)
        assert (row.partial, row.draft_token_ids) == (False, (20, 21))
        assert sequence.draft_ahead(0.0) is not None


def test_a_block_that_is_sent_again_keeps_its_branches() -> None:
    """The verdict was lost with the verifier, the text was not: what is drafted ahead still fits
    the same block's outcome."""
    sequence = _at_target()
    _take(sequence, len(sequence.tokens), Branch(2, 5, (20,)))
    sequence.forget_verifier()
    sequence.assign_verifier("other")
    sequence.open()
    assert sequence.next_row(100, 100).draft_token_ids == BLOCK
    assert sequence.draft_ahead(0.0) is not None
    _decide(sequence, 2, 5)
    assert sequence.draft_at_hand() == (20,)


def test_another_drafters_branches_are_stale() -> None:
    """What a drafter foresaw before it was lost is not the next one's draft: that one is told of
    "your last draft", and has none."""
    sequence = _at_target()
    base = len(sequence.tokens)
    _take(sequence, base, Branch(0, 5, (20,)))
    sequence.forget_drafter()
    assert not _take(sequence, base, Branch(0, 5, (20,)))
    assert sequence.open_drafter("e", 4, 0.0, max_branches=4).next_draft_tokens == 0
    assert not _take(sequence, base, Branch(0, 5, (20,)), generation=1)
    assert sequence.draft_ahead(0.0) is None
    _decide(sequence, 0, 5)
    assert sequence.draft_at_hand() == ()
    assert sequence.stats.plan_misses == {"stale": 2}


def test_ids_that_the_target_lacks_end_a_branch() -> None:
    """Ahead or not, what a broken drafter says must not reach the target."""
    sequence = _at_target()
    _take(sequence, len(sequence.tokens), Branch(0, 5, (20, NUM_IDS, 21)))
    _decide(sequence, 0, 5)
    assert sequence.next_row(10, 10).draft_token_ids == (20,)
    assert sequence.stats.plan_misses == {"invalid_id": 1}


@given(st.data())
def test_any_order_of_plans_gives_one_draft_or_one_miss(data: st.DataObject) -> None:
    """However a block's branches are cut into plans, repeated, and wherever the verdict falls among
    them: the branch of the outcome is there, and where it was not in time that is one miss."""
    keys = [(j, token) for j in range(4) for token in (4, 5, 6)]
    foreseen = data.draw(st.lists(st.sampled_from(keys), unique=True))
    outcome = data.draw(st.sampled_from(keys))
    sequence, verdict_at = _at_target(), data.draw(st.integers(0, len(foreseen)))
    base, misses = len(sequence.tokens), sequence.stats.plan_misses
    for index, key in enumerate([*foreseen, None]):
        if index == verdict_at:
            _decide(sequence, *outcome)
            assert misses.total() == (outcome not in foreseen[:verdict_at])
        for _ in range(data.draw(st.integers(1, 2)) if key else 0):
            _take(sequence, base, Branch(*key, (index,)))
    assert misses.total() == (outcome not in foreseen[:verdict_at])
    expected = (foreseen.index(outcome),) if outcome in foreseen else ()
    assert sequence.draft_at_hand() == expected


def _first_token(sequence: Sequence) -> None:
    sequence.assign_verifier("v")
    sequence.open()
    sequence.next_row(100, 100)
    _decide(sequence, 0, 4)


def _with_drafter(max_new_tokens: int = 50, max_branches: int = 4) -> Sequence:
    """A sequence with one token, 4, whose drafter drafts 4 tokens a time."""
    sequence = make_sequence(max_new_tokens=max_new_tokens)
    _first_token(sequence)
    sequence.open_drafter("d", 4, 0.0, max_branches)
    return sequence


def _at_target(max_new_tokens: int = 50, max_branches: int = 4) -> Sequence:
    """One whose drafter's block is at the target, and which has been asked what comes next."""
    sequence = _with_drafter(max_new_tokens, max_branches)
    _take(sequence, len(sequence.tokens) - 1, Branch(0, 4, BLOCK))
    assert sequence.next_row(10, 10).draft_token_ids == BLOCK[: max_new_tokens - 2]
    sequence.draft_ahead(0.0)
    return sequence


def _take(sequence: Sequence, base: int, *branches: Branch, generation: int = 0) -> bool:
    plan = Plan(1, generation or sequence.generation, base, branches)
    return sequence.take_plan(plan, NUM_IDS)


def _decide(sequence: Sequence, accepted: int, token: int) -> None:
    """The row's verdict arrives and is committed."""
    row = sequence.row
    assert row is not None
    token_ids = (*row.draft_token_ids[:accepted], token)
    verdict = Verdict(1, row.position + len(row.new_token_ids))
    assert sequence.accept(replace(verdict, accepted=accepted, token_ids=token_ids))
    sequence.commit(token_ids, row, accepted)
