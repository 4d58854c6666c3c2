"""q on its way through the orchestrator: checked, cut with its draft, counted where missing."""

from dataclasses import replace

import pytest

from core.config import DrafterPoolConfig
from core.types import (
    Branch,
    DrafterInfo,
    ModelIdentity,
    Plan,
    Rule,
    SamplingParams,
    SparseDistribution,
    Verdict,
)
from orchestrator.branches import usable_branch
from orchestrator.drafting import Drafting
from orchestrator.pipeline import Sequence
from tests.policy import make_sequence

NUM_IDS = 100
Q = tuple(SparseDistribution((t, t + 1), (0.75, 0.25)) for t in (10, 20, 30))
SAMPLED = Branch(0, 5, (10, 21, 30), Q)
CHANCE_RULES = [Rule.REJECTION, Rule.TOKEN_REJECTION, Rule.ENSEMBLE]
ENSEMBLE = SamplingParams(1.0, seed=1, rule=Rule.ENSEMBLE, ensemble_weight=0.5)
REJECTION = SamplingParams(1.0, seed=1, rule=Rule.REJECTION)


@pytest.mark.parametrize("rule", CHANCE_RULES)
def test_a_sound_draft_passes_as_it_is(rule: Rule) -> None:
    """Its distributions are what makes the rule exact; nothing may be done to them."""
    assert usable_branch(SAMPLED, rule, NUM_IDS) == (SAMPLED, "")


@pytest.mark.parametrize("rule", [Rule.GREEDY, Rule.COUPLED])
def test_other_rules_cut_before_an_invalid_id_and_carry_no_q(rule: Rule) -> None:
    """There the text does not depend on the draft; q would only make the message larger."""
    assert usable_branch(SAMPLED, rule, 20) == (Branch(0, 5, (10,)), "invalid_id")


@pytest.mark.parametrize("rule", CHANCE_RULES)
@pytest.mark.parametrize("token", [-1, NUM_IDS])
def test_a_sampled_draft_with_an_invalid_id_is_dropped_whole(rule: Rule, token: int) -> None:
    """Cut where an invalid id was sampled, the draft's length would depend on what was sampled:
    the tokens before it would be followed by p instead of the rule's correction."""
    bad = replace(SAMPLED, draft_token_ids=(10, 21, token))
    assert usable_branch(bad, rule, NUM_IDS) == (Branch(0, 5, ()), "invalid_id")


@pytest.mark.parametrize(
    "wrong",
    [
        Q[:2],
        (*Q, Q[0]),
        (Q[0], Q[1], SparseDistribution((31, 32), (0.75, 0.25))),  # the token is not in it
        (Q[0], Q[1], SparseDistribution((30, 31), (0.0, 1.0))),  # it has no chance
        (Q[0], Q[1], SparseDistribution((30, 31), (1.25, -0.25))),
        (Q[0], Q[1], SparseDistribution((30, 31), (0.75, 0.35))),
        (Q[0], Q[1], SparseDistribution((30, 31), (0.75, float("nan")))),
        (Q[0], Q[1], SparseDistribution((30, 30), (0.75, 0.25))),
        (Q[0], Q[1], SparseDistribution((30, NUM_IDS), (0.75, 0.25))),
        (Q[0], Q[1], SparseDistribution((30, 31), (1.0,))),
        (Q[0], Q[1], SparseDistribution((), ())),
    ],
)
def test_what_a_token_cannot_have_been_sampled_from_ends_here(
    wrong: tuple[SparseDistribution, ...],
) -> None:
    """The verifier refuses such a row, and the client would pay for a drafter's fault."""
    bad = replace(SAMPLED, draft_distributions=wrong)
    expected = (Branch(0, 5, ()), "invalid_distribution")
    assert usable_branch(bad, Rule.REJECTION, NUM_IDS) == expected
    assert usable_branch(bad, Rule.COUPLED, NUM_IDS)[1] == ""


def test_a_deterministic_draft_is_fine_for_rejection_and_refused_by_ensemble() -> None:
    """Prompt lookup has all its mass on one token: an exact q for REJECTION, where cutting it is
    no chance event either; ENSEMBLE would mix nothing into p, and say nothing."""
    bare = Branch(0, 5, (10, 21, NUM_IDS))
    for rule in (Rule.REJECTION, Rule.TOKEN_REJECTION):
        assert usable_branch(bare, rule, NUM_IDS) == (Branch(0, 5, (10, 21)), "invalid_id")
    assert usable_branch(bare, Rule.ENSEMBLE, NUM_IDS) == (Branch(0, 5, ()), "no_distributions")
    assert usable_branch(Branch(0, 5, ()), Rule.ENSEMBLE, NUM_IDS)[1] == ""  # no guess


def _step(sequence: Sequence, verdict: tuple[int, ...], accepted: int, max_draft: int = 9) -> None:
    row = sequence.next_row(100, max_draft)
    position = row.position + len(row.new_token_ids)
    assert sequence.accept(Verdict(1, position, accepted=accepted, token_ids=verdict))
    sequence.commit(verdict, row, accepted)


def _running(sampling: SamplingParams, max_new_tokens: int = 50) -> Sequence:
    """A sequence with a drafter, one token, and the plan `SAMPLED` at hand."""
    sequence = make_sequence(sampling=sampling, max_new_tokens=max_new_tokens)
    sequence.assign_verifier("v")
    sequence.open()
    _step(sequence, (5,), 0)
    opened = sequence.open_drafter("d", 4, 0.0)
    base, known, token = sequence.outcome_key
    plan = Plan(1, opened.generation, base, (replace(SAMPLED, accepted=known, token=token),))
    assert sequence.take_plan(plan, NUM_IDS)
    return sequence


@pytest.mark.parametrize(("max_draft", "max_new", "left"), [(9, 50, 3), (2, 50, 2), (9, 3, 1)])
def test_q_is_cut_with_its_draft(max_draft: int, max_new: int, left: int) -> None:
    """The controller and max_new_tokens shorten drafts; one q too many and the verifier refuses
    the row, the q of a neighbour and the text is biased without a sound."""
    row = _running(REJECTION, max_new).next_row(100, max_draft)
    assert row.draft_token_ids == SAMPLED.draft_token_ids[:left]
    assert row.draft_distributions == Q[:left]


def test_no_q_is_sent_without_a_draft_or_for_rules_that_ignore_it() -> None:
    """64 pairs per token are worth sending only where somebody reads them."""
    assert _running(REJECTION).next_row(100, 0).draft_distributions == ()
    coupled = _running(replace(REJECTION, rule=Rule.COUPLED)).next_row(100, 9)
    assert coupled.draft_token_ids == SAMPLED.draft_token_ids
    assert coupled.draft_distributions == ()


def test_ensemble_counts_the_tokens_that_the_target_drew_alone() -> None:
    """A lost drafter changes the law under ENSEMBLE; the statistics have to say how often."""
    sequence = _running(ENSEMBLE)
    assert sequence.stats.num_tokens_without_distributions == 1  # the prompt's
    _step(sequence, (10, 7), 1)  # the correction is the rule's own
    assert sequence.stats.num_tokens_without_distributions == 1
    _step(sequence, (8,), 0)  # no plan
    assert sequence.stats.num_tokens_without_distributions == 2
    full, stopped = _running(ENSEMBLE), _running(ENSEMBLE)
    _step(full, (10, 21, 30, 6), 3)
    assert full.stats.num_tokens_without_distributions == 2  # the bonus
    _step(stopped, (10, 21), 3)  # a stop cut what was accepted
    assert stopped.stats.num_tokens_without_distributions == 1
    other = _running(REJECTION)
    assert other.stats.num_tokens_without_distributions == 0


def test_ensemble_takes_only_drafters_with_distributions() -> None:
    """Any other draft would have to be dropped, step by step."""
    config = DrafterPoolConfig(name="pool", kind="ngram")
    drafting = Drafting([config], "", "", {}, lambda: 0.0, lambda: None, lambda sequence: None)
    pool = drafting.pools["pool"]
    info = DrafterInfo("ngram", ModelIdentity("ngram", 0), 0, 0, 4, "i")
    ensemble = make_sequence(1, sampling=ENSEMBLE)
    drafting.attach(ensemble)
    assert (ensemble.drafter, ensemble.absence) == (None, "no_drafter")  # nobody is there yet
    pool.add("bare").become_ready("a", info)
    drafting.attach(ensemble)
    assert (ensemble.drafter, ensemble.absence) == (None, "no_distributions")
    ensemble.assign_verifier("v")
    ensemble.open()
    _step(ensemble, (5,), 0)
    ensemble.next_row(9, 9)
    assert ensemble.stats.fallback_steps == {"prompt": 1, "no_distributions": 1}
    rejection = make_sequence(2, sampling=REJECTION)
    drafting.attach(rejection)
    assert rejection.drafter == "bare"
    pool.add("with_q").become_ready("b", replace(info, has_distributions=True))
    drafting.attach(ensemble)
    assert ensemble.drafter == "with_q"
