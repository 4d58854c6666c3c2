"""The laws of TOKEN_REJECTION, REJECTION and ENSEMBLE, by enumeration: no chance is sampled here.

A rule's thresholds cut each uniform's [0, 1) into two pieces; one uniform from each piece, weighted
with its length, is all there is. Drafts are enumerated too. p and q depend on the whole text so
far, V <= 4, k <= 4.
"""

import functools
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import utils as generation

from core.types import Rule
from verifier_service.odds import Chances, Guess, count_accepted, odds, residual

Text = tuple[int, ...]
EXACT = (Rule.TOKEN_REJECTION, Rule.REJECTION)
KINDS = ("full", "truncated", "one_point", "disjoint", "same", "both_truncated", "mixed")


class Pair:
    """A target and a drafter over V tokens; their laws at a text are fp64 `[V]`."""

    def __init__(self, kind: str, vocab_size: int, seed: int = 0, scale: float = 1.5) -> None:
        self.kind, self.vocab_size, self.seed, self.scale = kind, vocab_size, seed, scale
        self.p, self.q = functools.cache(self._p), functools.cache(self._q)

    def _law(self, who: int, text: Text) -> np.ndarray:
        generator = np.random.default_rng([self.seed, who, len(text), *text])
        weights = np.exp(self.scale * generator.normal(size=self.vocab_size))
        return weights / weights.sum()

    def _p(self, text: Text) -> np.ndarray:
        p = self._law(0, text)
        if self.kind == "disjoint":
            p = p * (np.arange(len(p)) % 2 == 0)
        if self.kind == "both_truncated":
            p = p * (p >= np.sort(p)[-2])
        return p / p.sum()

    def _q(self, text: Text) -> np.ndarray:
        kind = self.kind
        if kind == "mixed":
            kind = ("full", "one_point", "same", "truncated")[(sum(text) + len(text)) % 4]
        if kind == "same":
            return self.p(text)
        q = self._law(1, text)
        if kind == "disjoint":
            q = q * (np.arange(len(q)) % 2 == 1)
        if kind in ("truncated", "both_truncated"):
            q = q * (q >= np.sort(q)[-2])
        if kind == "one_point":
            q = q * (q == q.max())
        return q / q.sum()


def see(guess: Guess, p: np.ndarray, forbidden: Text = ()) -> Chances:
    return Chances(p[guess.token_ids], ~np.isin(guess.token_ids, forbidden))


def verdict_laws(rule: Rule, pair: Pair, k: int, weight: float, forbidden: Text = ()):
    """Every draft, every piece of every uniform: probability, what was committed, j."""
    for draft in itertools.product(range(pair.vocab_size), repeat=k):
        qs = [pair.q(draft[:i]) for i in range(k)]
        chance = math.prod(q[x] for q, x in zip(qs, draft, strict=True))
        if chance == 0:
            continue
        guesses = []
        for q, x in zip(qs, draft, strict=True):
            ids = np.flatnonzero(q)
            guesses.append(Guess(ids, q[ids], int(np.flatnonzero(ids == x)[0])))
        seen = [see(guess, pair.p(draft[:i]), forbidden) for i, guess in enumerate(guesses)]
        found = odds(rule, guesses, seen, weight)
        assert all(0 <= x <= 1 for x in (*found.thresholds, *found.scales))
        for piece in itertools.product((True, False), repeat=k):
            cuts = list(zip(piece, found.thresholds, strict=True))
            length = math.prod(h if below else 1 - h for below, h in cuts)
            if length == 0:
                continue
            uniforms = [h / 2 if below else (1 + h) / 2 for below, h in cuts]
            j = count_accepted(rule, found.thresholds, uniforms)
            own = pair.p(draft[:j])
            if j < k:
                rest = found.scales[j] * own
                rest[guesses[j].token_ids] = residual(guesses[j], seen[j], found.scales[j])
                own = rest / rest.sum() if rest.sum() > 0 else own
            for token in np.flatnonzero(own):
                yield chance * length * own[token], (*draft[:j], int(token)), j


def text_law(rule: Rule, pair: Pair, k: int, then, weight: float = 1.0, forbidden: Text = ()):
    """The law of the k + 1 tokens of a block that is filled up from `then`; and E[j]."""
    committed: dict[Text, float] = {}
    mean = 0.0
    for chance, text, j in verdict_laws(rule, pair, k, weight, forbidden):
        committed[text] = committed.get(text, 0.0) + chance
        mean += chance * j
    law = {}
    for text in itertools.product(range(pair.vocab_size), repeat=k + 1):
        law[text] = sum(
            committed.get(text[:m], 0.0)
            * math.prod(then(text[:i])[text[i]] for i in range(m, k + 1))
            for m in range(1, k + 2)
        )
    return law, mean


def error(law: dict[Text, float], expected) -> float:
    """Largest difference to the law that draws token i from expected(tokens before it)."""
    return max(
        abs(mass - math.prod(expected(text[:i])[x] for i, x in enumerate(text)))
        for text, mass in law.items()
    )


# ---------------------------------------------------------------- exact rules


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", EXACT)
@pytest.mark.parametrize(("vocab_size", "k"), [(2, 4), (3, 3), (4, 2), (4, 1)])
def test_text_follows_the_targets_law(rule, kind, vocab_size, k):
    """Any bias of a rule, whatever q covers of p; p where p - q vanishes; q 0 where p is not."""
    for seed in range(3):
        pair = Pair(kind, vocab_size, seed)
        law, _ = text_law(rule, pair, k, pair.p)
        assert error(law, pair.p) < 1e-12


@pytest.mark.parametrize("rule", EXACT)
def test_text_follows_the_targets_law_at_the_largest_size(rule):
    """V = 4 and k = 4: a slip that shows only behind three tokens."""
    pair = Pair("mixed", 4, seed=9)
    law, _ = text_law(rule, pair, 4, pair.p)
    assert error(law, pair.p) < 1e-12


def test_accepted_counts_of_like_and_unlike_pairs():
    """p = q must be accepted always, disjoint supports never: the first token's off-by-one."""
    for rule in EXACT:
        for kind, mean in (("same", 3), ("disjoint", 0)):
            pair = Pair(kind, 4, seed=1)
            assert abs(text_law(rule, pair, 3, pair.p)[1] - mean) < 1e-12


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(KINDS), st.integers(2, 3), st.integers(1, 3), st.integers(0, 999))
def test_block_accepts_at_least_as_much_as_token_level(kind, vocab_size, k, seed):
    """Its only reason to be there. With one token the two are the same rule."""
    pair = Pair(kind, vocab_size, seed, scale=1.0)
    token, block = (text_law(rule, pair, k, pair.p)[1] for rule in EXACT)
    assert block >= token - 1e-12
    if k == 1:
        assert abs(block - token) < 1e-12


def test_block_accepts_more_where_it_can():
    """The example of the paper's introduction: E[j] is 10/9 token by token and 11/9 by block."""
    p, q = np.array([1 / 3, 2 / 3]), np.array([2 / 3, 1 / 3])
    pair = Pair("full", 2)
    pair.p, pair.q = (lambda text: p.copy()), (lambda text: q.copy())
    token, block = (text_law(rule, pair, 2, pair.p)[1] for rule in EXACT)
    assert abs(token - 10 / 9) < 1e-12 and abs(block - 11 / 9) < 1e-12


def test_uniforms_keyed_by_position_would_bias_block_verification():
    """Why noise is keyed by block. The two tokens behind a block of 2 and, where its first token
    failed, a block of 1: its uniform fresh, or the one the first block had at that position."""
    pair = Pair("full", 3, seed=4)
    errors = []
    for reused in (False, True):
        law = dict.fromkeys(itertools.product(range(3), repeat=2), 0.0)
        for draft in itertools.product(range(3), repeat=2):
            chance = pair.q(())[draft[0]] * pair.q(draft[:1])[draft[1]]
            guesses = [Guess(np.arange(3), pair.q(draft[:i]), draft[i]) for i in range(2)]
            seen = [see(guess, pair.p(draft[:i])) for i, guess in enumerate(guesses)]
            found = odds(Rule.REJECTION, guesses, seen)
            h0, h1 = found.thresholds
            law[draft] += chance * h1
            rest = [residual(g, c, s) for g, c, s in zip(guesses, seen, found.scales, strict=True)]
            for x in np.flatnonzero(rest[1]):
                law[draft[0], x] += chance * h0 * (1 - h1) * rest[1][x] / rest[1].sum()
            for first, x in itertools.product(np.flatnonzero(rest[0]), range(3)):
                mass = chance * (1 - h0) * (1 - h1) * rest[0][first] / rest[0].sum()
                guess = Guess(np.arange(3), pair.q((first,)), x)
                chances = see(guess, pair.p((first,)))
                h = odds(Rule.REJECTION, [guess], [chances]).thresholds[0]
                if reused and h1 < 1:  # the uniform was found to be at least h1
                    h = max(0.0, h - h1) / (1 - h1)
                law[first, x] += mass * guess.q[x] * h
                left = residual(guess, chances, 1.0)
                for y in np.flatnonzero(left):
                    law[first, y] += mass * guess.q[x] * (1 - h) * left[y] / left.sum()
        errors.append(error(law, pair.p))
    assert errors[0] < 1e-12 and errors[1] > 1e-2


# ---------------------------------------------------------------- ENSEMBLE


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weight", [0.1, 0.7])
def test_ensemble_draws_from_the_mixture_and_its_bonus_from_p(kind, weight):
    """Its law: w p + (1 - w) q at each of the k positions that were drafted, p behind them."""
    pair, k = Pair(kind, 3, seed=5), 3

    def mixture(text: Text) -> np.ndarray:
        p, q = pair.p(text), pair.q(text)
        return weight * p + (1 - weight) * q if len(text) < k else p

    law, mean = text_law(Rule.ENSEMBLE, pair, k, mixture, weight)
    assert error(law, mixture) < 1e-12
    assert mean >= text_law(Rule.TOKEN_REJECTION, pair, k, pair.p)[1] - 1e-12


def test_ensemble_never_commits_what_the_target_forbids():
    """A token outside the grammar, or of a padded vocabulary, must not come in by way of q.

    The law is w p + (1 - w) q', where q' moves q's forbidden mass to the residual.
    """
    pair, weight = Pair("full", 4, seed=6), 0.6
    p, q = pair.p(()) * [1, 1, 0, 1], pair.q(())
    p /= p.sum()
    pair.p = lambda text: p.copy()
    law, _ = text_law(Rule.ENSEMBLE, pair, 1, pair.p, weight, forbidden=(2,))
    excess = np.maximum(p - q, 0)
    moved = q * [1, 1, 0, 1] + q[2] * excess / excess.sum()
    assert error(law, lambda text: p if text else weight * p + (1 - weight) * moved) < 1e-12


@pytest.mark.parametrize("weight", [None, 0.3, 0.8])
def test_transformers_accepts_and_corrects_alike(monkeypatch, weight):
    """The published implementations: _speculative_sampling with and without a weight must accept
    just below our thresholds, reject just above, and correct from our residual."""
    pair, draft, drawn = Pair("full", 4, seed=3), (2, 0, 3), []
    monkeypatch.setattr(
        torch, "multinomial", lambda p, **_: (drawn.append(p), torch.zeros(1, 1, dtype=int))[1]
    )
    texts = [draft[:i] for i in range(4)]
    p, q = ([law(text) for text in texts] for law in (pair.p, pair.q))
    guesses = [Guess(np.arange(4), q[i], draft[i]) for i in range(3)]
    seen = [see(guess, p[i]) for i, guess in enumerate(guesses)]
    rule = Rule.TOKEN_REJECTION if weight is None else Rule.ENSEMBLE
    found = odds(rule, guesses, seen, weight or 1.0)
    assert min(found.thresholds) < 1
    logits = [torch.tensor(np.array(law)).log()[None] for law in (q[:3], p)]
    for j, h in enumerate(found.thresholds):
        for uniform, accepted in ((h - 1e-9, j + 1), (h + 1e-9, j)):
            uniforms = np.array([0.0] * j + [uniform] + [1e9] * (2 - j))
            monkeypatch.setattr(torch, "rand_like", lambda _, u=uniforms: torch.from_numpy(u))
            _, matches = generation._speculative_sampling(
                torch.tensor([draft]), logits[0], 3, logits[1], assistant_ensemble_weight=weight
            )
            assert int(matches) == (accepted if h < 1 else j + 1)
            if matches < 3:
                own = residual(guesses[matches], seen[matches], found.scales[matches])
                assert np.abs(drawn[-1][0].numpy() - own / own.sum()).max() < 1e-12


def bias_table() -> list[str]:
    """docs/losslessness.md's table: what ENSEMBLE gains and costs on one pair, by enumeration."""
    pair, k = Pair("full", 4, seed=0, scale=1.0), 3
    lines = []
    for weight in (0.1, 0.3, 0.5, 0.7, 0.9, 1.0):

        def mixture(text: Text, w: float = weight) -> np.ndarray:
            return w * pair.p(text) + (1 - w) * pair.q(text) if len(text) < k else pair.p(text)

        law, mean = text_law(Rule.ENSEMBLE, pair, k, mixture, weight)
        first, block = np.zeros(4), 0.0
        for text, mass in law.items():
            first[text[0]] += mass
            block += abs(mass - math.prod(pair.p(text[:i])[x] for i, x in enumerate(text))) / 2
        token = np.abs(first - pair.p(())).sum() / 2
        lines.append(f"| {weight} | {token:.4f} | {block:.4f} | {mean:.3f} |")
    return lines


def test_bias_table_of_the_docs():
    """A published table that the code no longer gives. TV of one token is (1 - w) TV(p, q)."""
    docs = (Path(__file__).parent.parent / "docs" / "losslessness.md").read_text()
    for line in bias_table():
        assert line in docs
