"""The rules by enumeration: every draft, every class of noise, on targets a person can compute.

A toy target is a table: its distribution at each position depends on all tokens before it.
"""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from core.errors import InvalidRequestError
from core.noise import argmax_dense, row_keys
from core.sampling import draw
from core.types import Rule, SamplingParams
from verifier_service.rules import Block, Outcome, _outcome, check_sampling, verdicts

Prefix = tuple[int, ...]


class Toy:
    """A context-dependent model over V tokens: `law(prefix)` is fp64 `[V]`, always the same."""

    def __init__(self, vocab_size: int, seed: int, scale: float = 1.5) -> None:
        self.vocab_size, self.seed, self.scale = vocab_size, seed, scale
        self._logits: dict[Prefix, Tensor] = {}

    def logits(self, prefix: Prefix) -> Tensor:
        if prefix not in self._logits:
            seed = hash((self.seed, *prefix)) % 2**63
            generator = torch.Generator().manual_seed(seed)
            row = torch.randn(self.vocab_size, generator=generator) * self.scale
            self._logits[prefix] = row
        return self._logits[prefix]

    def law(self, prefix: Prefix) -> list[float]:
        return self.logits(prefix).double().softmax(-1).tolist()

    def rows(self, draft: Prefix) -> Tensor:
        """What a forward over the draft returns: `[k + 1, V]`."""
        return torch.stack([self.logits(draft[:i]) for i in range(len(draft) + 1)])

    def alone(self, params: SamplingParams, position: int, length: int) -> Prefix:
        """What it draws one token at a time, without any draft."""
        text: Prefix = ()
        for i in range(length):
            token = draw(self.logits(text)[None], [params], [position + i])
            text += (int(token),)
        return text


def coupled(seed: int = 0, temperature: float = 1.0, **others) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=seed, rule=Rule.COUPLED, **others)


def overlap(draft: Prefix, text: Prefix) -> int:
    """Length of the common prefix."""
    return next(
        (i for i, (a, b) in enumerate(zip(draft, text, strict=False)) if a != b), len(draft)
    )


def joint_law(p: list[float], q: list[float]) -> list[list[float]]:
    """P(target draws a, drafter draws b) when both add the same Gumbel noise, exactly.

    With exponentials E_c, a wins p when E_c >= E_a p_c / p_a for all c, and b wins q likewise.
    For a = b integrate E_a out. For a != b also integrate the ratio E_b = r E_a: the others'
    bounds are max(p_c / p_a, r q_c / q_b), linear in r between breakpoints, so each piece of
    the integral of (1 + r + sum of bounds)^-2 has a closed form.
    """
    tokens = range(len(p))
    law = [[0.0] * len(p) for _ in tokens]
    for a, b in itertools.product(tokens, tokens):
        if a == b:
            law[a][a] = 1 / sum(max(p[c] / p[a], q[c] / q[a]) for c in tokens)
            continue
        low, high = p[b] / p[a], q[b] / q[a]
        others = [(p[c] / p[a], q[c] / q[b]) for c in tokens if c not in (a, b)]
        cuts = sorted({low, high, *(x / y for x, y in others if low < x / y < high)})
        for start, end in itertools.pairwise(c for c in cuts if low <= c <= high):
            middle = (start + end) / 2
            constant = 1 + sum(x for x, y in others if x >= middle * y)
            slope = 1 + sum(y for x, y in others if x < middle * y)
            law[a][b] += (1 / (constant + slope * start) - 1 / (constant + slope * end)) / slope
    return law


# ---------------------------------------------------------------- exactness


@pytest.mark.parametrize(("vocab_size", "k"), [(2, 4), (3, 3), (4, 2)])
def test_coupled_law_by_enumeration_over_noise_classes(vocab_size, k):
    """A rule that biased its tokens by the draft, anywhere in the block, would show here.

    A class of noise is what the target and the drafter draw with it at each position along the
    draft. Sum over all classes: the rule's verdict, then the target alone to length k + 1.
    """
    target, drafter = Toy(vocab_size, seed=1), Toy(vocab_size, seed=2)
    law: dict[Prefix, float] = {}

    def go_on(text: Prefix, weight: float) -> None:
        if len(text) == k + 1:
            law[text] = law.get(text, 0.0) + weight
            return
        for token, p in enumerate(target.law(text)):
            go_on((*text, token), weight * p)

    def enumerate_classes(draft: Prefix, drawn: Prefix, weight: float) -> None:
        if len(draft) < k:
            joint = joint_law(target.law(draft), drafter.law(draft))
            for a, b in itertools.product(range(vocab_size), repeat=2):
                enumerate_classes((*draft, b), (*drawn, a), weight * joint[a][b])
            return
        for token, p in enumerate(target.law(draft)):
            outcome = _outcome(Block(coupled(), 0, draft), [*drawn, token])
            go_on(outcome.token_ids, weight * p)

    enumerate_classes((), (), 1.0)
    for text in itertools.product(range(vocab_size), repeat=k + 1):
        expected = math.prod(target.law(text[:i])[token] for i, token in enumerate(text))
        assert abs(law[text] - expected) < 1e-12


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
@pytest.mark.parametrize(("vocab_size", "k"), [(2, 3), (3, 3), (4, 3), (4, 1)])
def test_every_draft_gives_the_same_text(vocab_size, k, temperature):
    """The output depends on the draft, or the accepted count on anything but agreement.

    All V^k drafts, context-dependent target: accepted is the common prefix with what the target
    draws alone, the tokens are the target's own. No id of a draft is ever committed unseen.
    """
    target = Toy(vocab_size, seed=3)
    drafts = list(itertools.product(range(vocab_size), repeat=k))
    rows = torch.cat([target.rows(draft) for draft in drafts])
    for seed in range(12):
        params = coupled(seed, temperature, top_p=0.95 if seed % 2 else 1.0)
        text = target.alone(params, position=50, length=k + 1)
        for draft, outcome in zip(
            drafts, verdicts(rows, [Block(params, 50, d) for d in drafts]), strict=True
        ):
            accepted = overlap(draft, text)
            assert outcome == Outcome(accepted, text[: accepted + 1])


@pytest.mark.parametrize("params", [SamplingParams(), coupled(5), coupled(6, 0.4, top_k=3)])
def test_perfect_and_never_right_drafters(params):
    """First draft token never checked, an off-by-one in the logits row: a never-right drafter
    must be accepted exactly 0 times [lattice#243]; a perfect one exactly k times. Rounds where
    everything is rejected index -1 [vllm#50021]."""
    target = Toy(8, seed=4)
    for position, k in itertools.product((0, 9, 1000), (1, 2, 3, 5, 8)):
        text = target.alone(params, position, k + 1)
        wrong = tuple((token + 1) % 8 for token in text[:k])
        blocks = [Block(params, position, text[:k]), Block(params, position, wrong)]
        perfect, never = verdicts(
            torch.cat([target.rows(b.draft_token_ids) for b in blocks]), blocks
        )
        assert perfect == Outcome(k, text)
        assert never == Outcome(0, text[:1])


def test_text_does_not_depend_on_where_blocks_begin():
    """Noise keyed by anything but the absolute position: another k, a retry after a crash or a
    drafter that came back stale would change the text."""
    target, params = Toy(4, seed=5), coupled(77)
    text = target.alone(params, 20, 12)
    for k in (0, 1, 2, 3, 5):
        got: Prefix = ()
        while len(got) < 12:
            draft = text[len(got) : len(got) + k]
            rows = torch.stack([target.logits(got + draft[:i]) for i in range(len(draft) + 1)])
            (outcome,) = verdicts(rows, [Block(params, 20 + len(got), draft)])
            (again,) = verdicts(rows, [Block(params, 20 + len(got), draft)])
            assert again == outcome, "one draw, one verdict"
            got += outcome.token_ids
        assert got[:12] == text


def test_ragged_batch_of_mixed_rows_equals_rows_alone():
    """Rows without a draft beside rows with one change each other's text [vllm#41758]."""
    target = Toy(16, seed=6)
    choices = [SamplingParams(), coupled(1), coupled(2, 0.5, top_k=4), coupled(3, 1.5, top_p=0.8)]
    blocks = []
    for i, k in enumerate([3, 0, 1, 5, 0, 2, 8, 1, 0, 4, 4, 4]):
        params = choices[i % 4]
        text = target.alone(params, 10 * i, k)
        draft = text if i % 3 else tuple(reversed(text))
        blocks.append(Block(params, 10 * i, draft))
    together = verdicts(torch.cat([target.rows(b.draft_token_ids) for b in blocks]), blocks)
    for block, outcome in zip(blocks, together, strict=True):
        assert verdicts(target.rows(block.draft_token_ids), [block]) == [outcome]
        assert len(outcome.token_ids) == outcome.accepted + 1


@settings(deadline=None, max_examples=100)
@given(data=st.data(), vocab_size=st.integers(2, 6))
def test_agreement_is_at_least_the_bound(data, vocab_size):
    """Coupled acceptance below (1 - TV) / (1 + TV) would mean that the noise is not shared."""
    weights = st.lists(st.floats(1e-3, 1.0), min_size=vocab_size, max_size=vocab_size)
    p, q = ([w / sum(ws) for w in ws] for ws in (data.draw(weights), data.draw(weights)))
    joint = joint_law(p, q)
    for a in range(vocab_size):
        assert abs(sum(joint[a]) - p[a]) < 1e-12
        assert abs(sum(row[a] for row in joint) - q[a]) < 1e-12
    distance = sum(abs(x - y) for x, y in zip(p, q, strict=True)) / 2
    agreement = sum(joint[a][a] for a in range(vocab_size))
    assert (1 - distance) / (1 + distance) - 1e-12 <= agreement <= 1 - distance + 1e-12


def test_real_noise_follows_the_joint_law():
    """The enumeration above stands on this law: the noise that is really drawn must follow it."""
    n, p, q = 200_000, [0.5, 0.3, 0.15, 0.05], [0.2, 0.2, 0.5, 0.1]
    keys = row_keys([13] * n, list(range(n)), "cpu")
    ours, theirs = (argmax_dense(torch.tensor(x).log().expand(n, -1), keys) for x in (p, q))
    counts = torch.bincount(ours * 4 + theirs, minlength=16).double() / n
    law = torch.tensor(joint_law(p, q), dtype=torch.float64).flatten()
    sigma = (law * (1 - law) / n).sqrt()
    assert ((counts - law).abs() <= 4 * sigma + 1e-12).all()


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_garbage_logits_fail_their_block_only_and_only_if_they_count(bad):
    """A NaN must not become an id, nor end the batch-mates, nor a block that never got so far."""
    target, params = Toy(8, seed=7), coupled(3)
    text = target.alone(params, 30, 4)
    wrong = (text[0], (text[1] + 1) % 8, text[2])
    blocks = [Block(params, 30, draft) for draft in (text[:3], wrong, text[:3])]
    rows = torch.cat([target.rows(b.draft_token_ids) for b in blocks])
    rows[2], rows[6] = bad, bad  # behind two drafted tokens, of which `wrong` gets one right
    first, second, third = verdicts(rows, blocks)
    assert first == Outcome(0, (), "the target's logits at position 32 have no finite maximum")
    assert second == Outcome(1, text[:2])
    assert third == Outcome(3, text)


def test_ids_outside_the_vocabulary_are_never_committed():
    """A drafter's padded or negative id must be rejected even where the logits are garbage."""
    params = SamplingParams()
    rows = torch.zeros(2, 10)
    rows[:, 9] = 5.0
    for drafted in (9, 10, 2**31, -1):
        assert verdicts(rows, [Block(params, 0, (drafted,))], 9) == [Outcome(0, (0,))]
    (outcome,) = verdicts(rows * math.nan, [Block(params, 0, (-1,))], 9)
    assert outcome.token_ids == () and "position 0" in outcome.failure


@pytest.mark.parametrize(
    ("params", "field", "words"),
    [
        (SamplingParams(rule=Rule.REJECTION), "rule", "REJECTION needs a temperature above 0"),
        (SamplingParams(rule=Rule.TOKEN_REJECTION), "rule", "TOKEN_REJECTION needs a temperature"),
        (SamplingParams(rule=Rule.ENSEMBLE), "ensemble_weight", "(0, 1)"),
        (SamplingParams(rule=Rule.ENSEMBLE, ensemble_weight=0.0), "ensemble_weight", "(0, 1)"),
        (SamplingParams(rule=Rule.ENSEMBLE, ensemble_weight=math.nan), "ensemble_weight", "nan"),
        (SamplingParams(temperature=0.5), "rule", "GREEDY needs temperature 0"),
        (coupled(min_p=1.1), "min_p", "[0, 1]"),
        (coupled(typical_p=0.0), "typical_p", "(0, 1]"),
        (coupled(repetition_penalty=0.0), "repetition_penalty", "above 0"),
        (coupled(presence_penalty=math.nan), "presence_penalty", "finite"),
        (coupled(frequency_penalty=math.inf), "frequency_penalty", "finite"),
        (coupled(no_repeat_ngram_size=-1), "no_repeat_ngram_size", "at least 0"),
        (coupled(min_new_tokens=-1), "min_new_tokens", "at least 0"),
        (coupled(logit_bias=((3, math.inf),)), "logit_bias", "token 3"),
        (coupled(logit_bias=((-1, 0.0),)), "logit_bias", "token -1"),
        (coupled(bad_words_ids=((),)), "bad_words_ids", "at least one"),
        (coupled(temperature=-1.0), "temperature", "at least 0"),
        (coupled(temperature=math.nan), "temperature", "finite"),
        (coupled(top_k=-1), "top_k", "at least 0"),
        (coupled(top_p=0.0), "top_p", "(0, 1]"),
        (coupled(seed=2**64), "seed", "2^64"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(params, field, words):
    """A parameter that is accepted and ignored gives another text than was asked for."""
    for call in (
        lambda: check_sampling(params),
        lambda: verdicts(torch.zeros(1, 4), [Block(params, 0)]),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            call()
        assert caught.value.field == f"sampling.{field}"
        assert words in str(caught.value)
