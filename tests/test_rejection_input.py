"""Bad input to the rules that look at q: nothing of it may bias a text, or reach a neighbour."""

import math

import pytest
import torch

from core.types import Rule, SparseDistribution
from tests.test_rejection import CHANCE, EXACT, V, draft_for, law_of, params_of, rows_of, sparse
from verifier_service.rules import Block, Outcome, verdicts

GOOD = SparseDistribution((0, 1, 2), (0.5, 0.25, 0.25))


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (SparseDistribution((1, 2), (0.5, 0.5)), "token 0 cannot be sampled from it"),
        (SparseDistribution((0, 1), (0.0, 1.0)), "token 0 cannot be sampled from it"),
        (SparseDistribution((0, 1), (0.5, 0.3)), "sum to 0.8"),
        (SparseDistribution((0, 1), (1.5, -0.5)), "from 0 on"),
        (SparseDistribution((0, 1), (0.5, math.nan)), "nan"),
        (SparseDistribution((0, 1), (math.inf, 0.5)), "inf"),
        (SparseDistribution((0, 1, 0), (0.25, 0.5, 0.25)), "named twice"),
        (SparseDistribution((0, 1), (1.0,)), "1 probabilities for 2 tokens"),
        (SparseDistribution((), ()), "sum to 0.0"),
    ],
)
@pytest.mark.parametrize("rule", CHANCE)
def test_a_q_that_cannot_be_fails_its_block_by_name(rule, bad, words):
    """A draft that cannot have come from its q has no unbiased verdict: say so, and disturb no
    neighbour. Quietly doing without the draft would hide a broken drafter and bias the text."""
    params = params_of(rule)
    good = Block(params, 4, (0, 0), (GOOD, GOOD))
    rows = torch.cat([rows_of((0, 0))] * 3)
    first, second, third = verdicts(rows, [good, Block(params, 4, (0, 0), (GOOD, bad)), good])
    assert second.token_ids == () and second.accepted == 0
    assert second.failure.startswith("draft_distributions[1]: ") and words in second.failure
    assert first == third == verdicts(rows[:3], [good])[0]


def test_distributions_must_match_the_draft():
    """One too few would judge a token by its neighbour's q."""
    block = Block(params_of(Rule.REJECTION), 4, (0, 0), (GOOD,))
    (outcome,) = verdicts(rows_of((0, 0)), [block])
    assert outcome.failure == "draft_distributions: 1 for 2 draft tokens"


def test_ensemble_refuses_drafts_without_q():
    """Its law has q in it: a one-point q made up here would give another. No draft is fine."""
    for temperature in (0.0, 1.0):
        params = params_of(Rule.ENSEMBLE, temperature=temperature)
        bare, none = verdicts(
            rows_of((0,)).repeat(2, 1)[:3], [Block(params, 4, (0,)), Block(params, 4)]
        )
        assert bare.failure == "draft_distributions: ENSEMBLE needs them with every draft"
        assert none.accepted == 0 and len(none.token_ids) == 1


def test_exact_rules_of_agreement_do_not_look_at_q():
    """GREEDY and COUPLED are exact with any draft: a q, even a wrong one, changes nothing."""
    for rule, temperature in ((Rule.GREEDY, 0.0), (Rule.COUPLED, 1.0)):
        params, wrong = params_of(rule, 3, temperature), SparseDistribution((7,), (0.1,))
        blocks = [Block(params, 4, (0, 1), q) for q in ((), (wrong, wrong))]
        first, second = verdicts(rows_of((0, 1)).repeat(2, 1), blocks)
        assert first == second and not first.failure


@pytest.mark.parametrize("rule", CHANCE)
@pytest.mark.parametrize("alien", [V, V + 1, 2**31, -1])
def test_ids_outside_the_vocabulary_are_never_committed(rule, alien):
    """Padded vocabularies differ within a family [vllm#5203, #7252]: a drafter's padded id is one
    that the target gives no chance, though the head has a row for it."""
    q = SparseDistribution((alien, 1, 2), (0.5, 0.25, 0.25))
    rows = torch.cat([rows_of((0,)), torch.full((2, 2), 50.0)], dim=1)  # V + 2 columns
    for seed in range(40):
        for temperature in (0.0, 1.0) if rule is Rule.ENSEMBLE else (1.0,):
            params = params_of(rule, seed, temperature, ensemble_weight=0.01)
            (outcome,) = verdicts(rows, [Block(params, 4, (alien,), (q,))], V)
            assert not outcome.failure and outcome.accepted == 0
            assert 0 <= outcome.token_ids[0] < V


@pytest.mark.parametrize("rule", CHANCE)
def test_what_processors_took_away_is_never_committed(rule):
    """Bad words, a grammar's mask, min_new_tokens: -inf in the logits holds under ENSEMBLE too,
    where a drafter that knows nothing of them has a say."""
    rows = rows_of((0,))
    rows[:, [0, 3]] = -torch.inf
    for seed in range(40):
        for temperature in (0.0, 1.0) if rule is Rule.ENSEMBLE else (1.0,):
            params = params_of(rule, seed, temperature, ensemble_weight=0.01)
            (outcome,) = verdicts(rows, [Block(params, 4, (0,), (GOOD,))])
            assert outcome.accepted == 0 and outcome.token_ids[0] not in (0, 3)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rule", CHANCE)
def test_garbage_logits_fail_their_block_only_and_only_if_they_count(rule, bad):
    """A NaN compares as false, and a min() with it may be 1: either would pass for a verdict."""

    def law(text):
        return law_of(0, text, 1.0, 0, 1.0)  # the target's own: all is accepted

    params = params_of(rule, 3)
    block = draft_for(law, params, 30, 3)
    one_point = sparse(torch.eye(V)[5].double())
    wrong = Block(params, 30, (5, 5, 5), (one_point,) * 3)
    rows = torch.cat([rows_of(b.draft_token_ids) for b in (block, wrong, block)])
    rows[0, 5] = rows[4, 5] = rows[8, 5] = -torch.inf  # `wrong` fails with its first token
    rows[2], rows[6] = bad, bad
    first, second, third = verdicts(rows, [block, wrong, block])
    assert first == Outcome(0, (), "the target's logits at position 32 have no finite maximum")
    assert second.accepted == 0 and len(second.token_ids) == 1
    assert third.accepted == 3 or rule is not Rule.TOKEN_REJECTION
    assert verdicts(rows[8:], [block]) == [third]


def test_tiny_temperature_is_greedy_and_finite():
    """Scores of 1e30 must not swallow the residual, nor become NaN."""
    for rule in EXACT:
        params = params_of(rule, 1, 1e-30)
        q = SparseDistribution(tuple(range(V)), (1 / V,) * V)
        for drafted in range(V):
            rows = rows_of((drafted,))
            (outcome,) = verdicts(rows, [Block(params, 4, (drafted,), (q,))])
            assert list(outcome.token_ids) == rows.argmax(-1)[: outcome.accepted + 1].tolist()
            assert outcome.accepted == int(drafted == int(rows[0].argmax()))
