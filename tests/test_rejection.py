"""The rules that accept by chance, through `verdicts`: real noise, real drafts, mixed batches.

Their laws are proven in tests/test_odds.py; here is what lies between them and the logits. The
noise is keyed, so these samples are the same in every run.
"""

import functools
import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from core.noise import argmax_dense, draft_keys
from core.sampling import process_logits
from core.types import Rule, SamplingParams, SparseDistribution
from verifier_service.odds import Chances, Guess, residual
from verifier_service.rejection import _Row, _Trial, own_scores
from verifier_service.rules import Block, Outcome, verdicts

V = 6
EXACT = (Rule.TOKEN_REJECTION, Rule.REJECTION)
CHANCE = (*EXACT, Rule.ENSEMBLE)


@functools.cache
def logits_of(who: int, text: tuple[int, ...]) -> Tensor:
    """A context-dependent model's fp32 logits `[V]`."""
    generator = np.random.default_rng([who, len(text), *text])
    return torch.from_numpy(1.5 * generator.normal(size=V)).float()


def rows_of(draft: tuple[int, ...], text: tuple[int, ...] = (), who: int = 0) -> Tensor:
    return torch.stack([logits_of(who, text + draft[:i]) for i in range(len(draft) + 1)])


def params_of(rule: Rule, seed: int = 0, temperature: float = 1.0, **others) -> SamplingParams:
    if rule is Rule.ENSEMBLE:
        others.setdefault("ensemble_weight", 0.7)
    return SamplingParams(temperature=temperature, seed=seed, rule=rule, **others)


@functools.cache
def law_of(who: int, text: tuple[int, ...], temperature: float, top_k: int, top_p: float):
    """p or q after the request's parameters, fp64 `[V]`."""
    params = SamplingParams(temperature, top_k, top_p, rule=Rule.COUPLED)
    return process_logits(logits_of(who, text)[None], [params])[0].double().softmax(-1)


def sparse(q: Tensor) -> SparseDistribution:
    ids = q.nonzero().squeeze(1).tolist()
    return SparseDistribution(tuple(ids), tuple(q[ids].float().tolist()))


def draft_for(law, params: SamplingParams, position: int, k: int, text=(), reported=None):
    """A block whose draft is sampled from `law(text)`, which it reports unless told otherwise."""
    draft, distributions = (), ()
    for i in range(k):
        q = law((*text, *draft))
        keys = draft_keys([params.seed], [position], [i])
        distributions += (sparse((reported or law)((*text, *draft))),)
        draft += (int(argmax_dense(q.log()[None], keys)),)
    return Block(params, position, draft, distributions)


def texts(params: list[SamplingParams], blocks_of, length: int = 3) -> list[tuple[int, ...]]:
    """Generate for each of the parameters, in one batch, block after block; `length` tokens."""
    done: list[tuple[int, ...]] = [()] * len(params)
    while open_ := [i for i, text in enumerate(done) if len(text) < length]:
        blocks = [blocks_of(i, params[i], 10 + len(done[i]), done[i]) for i in open_]
        rows = [rows_of(b.draft_token_ids, done[i]) for i, b in zip(open_, blocks, strict=True)]
        for i, outcome in zip(open_, verdicts(torch.cat(rows), blocks), strict=True):
            assert not outcome.failure
            done[i] += outcome.token_ids
    return [text[:length] for text in done]


def sigmas(found: list[tuple[int, ...]], law) -> float:
    """Pearson's statistic of whole texts, as standard deviations from its mean."""
    n, statistic, cells, rare, seen_rare = len(found), 0.0, 0, 0.0, 0
    for text in itertools.product(range(V), repeat=len(found[0])):
        chance = math.prod(float(law(text[:i])[x]) for i, x in enumerate(text))
        seen, expected = found.count(text), n * chance
        if expected < 5:
            rare, seen_rare = rare + expected, seen_rare + seen
            continue
        statistic, cells = statistic + (seen - expected) ** 2 / expected, cells + 1
    if rare > 0:
        statistic, cells = statistic + (seen_rare - rare) ** 2 / rare, cells + 1
    return (statistic - (cells - 1)) / math.sqrt(2 * (cells - 1))


# ---------------------------------------------------------------- the law, with real noise


@pytest.mark.parametrize("drafter", ["sampled", "greedy"])
@pytest.mark.parametrize("rule", EXACT)
def test_text_follows_the_target_in_batches_of_four(rule, drafter):
    """Sampled and greedy drafts, top_k and top_p on, another draft in each of four rows.

    transformers#47932 (the reported q is not what was sampled from), 1Cat-vLLM#656 (drafts
    corrupt text only beyond two sequences), LiteRT-LM#3017 (the drafter ignores the request's
    temperature), vllm#6038, #9441 and TensorRT-LLM#17599 (seeds mixed between rows, one stream for
    all): each would move the texts of one of the four kinds of rows away from the target's law.
    """
    choices = [(1.0, 0, 1.0), (0.7, 3, 1.0), (1.3, 0, 0.8), (1.0, 4, 0.9)]
    lengths, n = (3, 1, 2, 4), 400

    def block_of(i, params, position, text):
        law = functools.partial(law_of, 1)
        key = (params.temperature, params.top_k, params.top_p)
        if drafter == "sampled":
            return draft_for(lambda t: law(t, *key), params, position, lengths[i % 4], text)
        draft = ()
        for _ in range(lengths[i % 4]):
            draft += (int(law((*text, *draft), *key).argmax()),)
        return Block(params, position, draft)

    params = [
        SamplingParams(temperature, top_k, top_p, seed, rule)
        for seed, (temperature, top_k, top_p) in enumerate(choices * n)
    ]
    found = texts(params, block_of)
    for kind, choice in enumerate(choices):
        assert sigmas(found[kind::4], lambda text, c=choice: law_of(0, text, *c)) < 4.5


def test_ensemble_follows_its_mixture():
    """Drafted positions follow w p + (1 - w) q, whatever was accepted before."""
    params, w = [params_of(Rule.ENSEMBLE, seed, ensemble_weight=0.4) for seed in range(1200)], 0.4
    p, q = (lambda text, who=who: law_of(who, text, 1.0, 0, 1.0) for who in (0, 1))
    found = texts(params, lambda i, *rest: draft_for(q, *rest[:2], 3, rest[2]), length=2)
    assert sigmas(found, lambda text: w * p(text) + (1 - w) * q(text)) < 4.5
    assert sigmas(found, p) > 8


@pytest.mark.parametrize("rule", EXACT)
def test_a_q_that_was_not_sampled_from_shows(rule):
    """The tests above would be blind otherwise: here q lacks the drafter's temperature."""
    params = [params_of(rule, seed) for seed in range(600)]
    cold, reported = (lambda text, t=t: law_of(1, text, t, 0, 1.0) for t in (0.3, 1.0))
    found = texts(params, lambda i, *rest: draft_for(cold, *rest[:2], 3, rest[2], reported))
    assert sigmas(found, lambda text: law_of(0, text, 1.0, 0, 1.0)) > 8


def test_own_scores_are_the_residual():
    """The sparse, logarithmic form must be the residual that tests/test_odds.py proves right."""
    for scale, same in ((1.0, False), (0.6, False), (0.0, False), (1.0, True)):
        scores = torch.stack([logits_of(0, (i,)).double() for i in range(3)])
        scores -= scores.amax(-1, keepdim=True)
        p = scores[2].softmax(-1).numpy()
        ids = np.arange(V) if same else np.array([4, 1, V + 3, 2])
        q = p if same else np.array([0.5, 0.2, 0.1, 0.2])
        seen = Chances(np.where(ids < V, p[ids % V], 0.0), ids < V)
        guess = Guess(ids, q, 0)
        rows = [_Row(True, 0, float(scores[i].exp().sum())) for i in range(3)]
        block = Block(params_of(Rule.REJECTION), 0, (0, 0))
        trial = _Trial(block, 0, [guess] * 3, [seen] * 3, rows, accepted=2, scale=scale)
        expected = p.copy()
        if scale > 0 and not same:
            expected *= scale
            expected[ids[ids < V]] = residual(guess, seen, scale)[ids < V]
        expected /= expected.sum()
        ours = own_scores([trial], scores)[0].softmax(-1).numpy()
        assert np.abs(ours - expected).max() < 1e-12


# ---------------------------------------------------------------- batches and repeats


def mixed_blocks() -> list[Block]:
    """Every rule, drafts of every length, some without distributions."""
    blocks = []
    for i, rule in enumerate([*Rule] * 4):
        warm = rule is not Rule.GREEDY and (rule is not Rule.ENSEMBLE or i % 2)
        params = params_of(rule, i, 0.8 if warm else 0.0, top_k=4 if i % 3 else 0)
        law = functools.partial(law_of, 1, temperature=1.0, top_k=0, top_p=1.0)
        block = draft_for(law, params, 20 + i, i % 5)
        keep = rule.needs_distributions and (rule is Rule.ENSEMBLE or i % 4)
        blocks.append(block if keep else Block(params, block.position, block.draft_token_ids))
    return blocks


def test_mixed_rules_in_one_batch_equal_blocks_alone():
    """Rows without a draft beside rows with one [vllm#41758], one rule's noise in another's row;
    and a repeated call, as after a lost answer, must give the same verdict."""
    blocks = mixed_blocks()
    rows = [rows_of(block.draft_token_ids) for block in blocks]
    together = verdicts(torch.cat(rows), blocks)
    assert verdicts(torch.cat(rows), blocks) == together
    assert [verdicts(r, [block])[0] for r, block in zip(rows, blocks, strict=True)] == together
    assert verdicts(torch.cat(rows[::-1]), blocks[::-1])[::-1] == together
    for block, outcome in zip(blocks, together, strict=True):
        assert len(outcome.token_ids) == outcome.accepted + 1
        assert outcome.token_ids[:-1] == block.draft_token_ids[: outcome.accepted]
    assert len({outcome.accepted for outcome in together}) > 2


@pytest.mark.parametrize("rule", EXACT)
def test_perfect_and_never_right_drafters(rule):
    """An off-by-one in the row: p = q must be accepted whole, a token of p 0 never."""
    for seed in range(50):
        params = params_of(rule, seed, top_k=3)
        law = functools.partial(law_of, 0, temperature=1.0, top_k=3, top_p=1.0)
        block = draft_for(law, params, 5, 4)
        assert verdicts(rows_of(block.draft_token_ids), [block])[0].accepted == 4
        never = tuple(int(logits_of(0, ()).argmin()) for _ in range(3))
        for distributions in ((), (SparseDistribution((never[0], 0), (0.5, 0.5)),) * 3):
            block = Block(params, 5, never, distributions)
            rows = logits_of(0, ()).expand(4, V)
            assert verdicts(rows, [block])[0].accepted == 0


@pytest.mark.parametrize("weight", [0.2, 0.7])
def test_greedy_ensemble_takes_the_argmax_of_the_mixture(weight):
    """Accepted while the draft is argmax(w p + (1 - w) q), q dense, truncated or tied with p."""
    accepted = 0
    for seed, cut in itertools.product(range(40), (0, 2)):
        params = params_of(Rule.ENSEMBLE, seed, 0.0, ensemble_weight=weight)
        law = functools.partial(law_of, 1, temperature=1.0, top_k=cut, top_p=1.0)
        block = draft_for(law, params, seed, 3, text=(seed % V,))
        expected = ()
        for i, drafted in enumerate((*block.draft_token_ids, -1)):
            text = (seed % V, *block.draft_token_ids[:i])
            v = law_of(0, text, 1.0, 0, 1.0)
            v = weight * v + (1 - weight) * law(text) if drafted >= 0 else v
            expected += (int(v.argmax()),)
            if expected[-1] != drafted:
                break
        (outcome,) = verdicts(rows_of(block.draft_token_ids, (seed % V,)), [block])
        assert outcome == Outcome(len(expected) - 1, expected)
        accepted += outcome.accepted
    assert 0 < accepted < 3 * 80
