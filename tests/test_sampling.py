"""Processing against transformers' warpers, and the draw: exact, row by row, safe on garbage."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from core.noise import gumbel_noise
from core.sampling import NO_TOKEN, _cut_batch, _scale, draw, process_logits
from core.types import Rule, SamplingParams

INF = float("inf")


def params(temperature: float = 1.0, **others) -> SamplingParams:
    return SamplingParams(temperature=temperature, rule=Rule.COUPLED, **others)


def warp(row: Tensor, p: SamplingParams) -> Tensor:
    """What transformers' generate makes of one row `[V]`, in its order and with its conditions."""
    scores = row[None]
    if p.temperature == 0:
        return row
    scores = TemperatureLogitsWarper(float(p.temperature))(None, scores)
    if p.top_k:
        scores = TopKLogitsWarper(p.top_k)(None, scores)
    if p.top_p < 1.0:
        scores = TopPLogitsWarper(p.top_p)(None, scores)
    if p.min_p:
        scores = MinPLogitsWarper(p.min_p)(None, scores)
    if p.typical_p < 1.0:
        scores = TypicalLogitsWarper(p.typical_p)(None, scores)
    return scores[0]


def at_border(row: Tensor, p: SamplingParams) -> bool:
    """Whether fp32's rounding decides what is kept: a mass or a distance is at its limit, almost.

    transformers sums the softmax of the sorted row and we that of the row as it is; their last
    bits differ.
    """
    scores = warp(row, params(p.temperature, top_k=p.top_k))
    mass = scores.sort().values.double().softmax(-1).cumsum(-1)
    at_top_p = p.top_p < 1 and ((mass - (1 - p.top_p)).abs() < 1e-6).any()
    scores = warp(row, params(p.temperature, top_k=p.top_k, top_p=p.top_p))
    at_min_p = p.min_p and ((scores - scores.max() - math.log(p.min_p)).abs() < 1e-5).any()
    return bool(at_top_p or at_min_p or at_typical_border(row, p))


def at_typical_border(row: Tensor, p: SamplingParams) -> bool:
    if p.typical_p == 1.0:
        return False
    untyped = params(p.temperature, top_k=p.top_k, top_p=p.top_p, min_p=p.min_p)
    log_probs = warp(row, untyped).double().log_softmax(-1)
    gaps = (log_probs - (log_probs.exp() * log_probs).nansum()).abs()
    order = gaps.argsort()
    mass = log_probs.exp()[order].cumsum(-1)
    last = order[min(int((mass < p.typical_p).sum()), len(row) - 1)]
    rounding = 5e-7 * (1 - float(log_probs[log_probs.isfinite()].min()))
    rivals = ((gaps - gaps[last]).abs() < rounding) & (log_probs != log_probs[last])
    return bool(((mass - p.typical_p).abs() < 1e-6).any() or rivals.any())


def same_but_for_ties(ours: Tensor, theirs: Tensor, scaled: Tensor) -> bool:
    """Equal, except for which of several equal logits at top_p's border went: transformers sorts
    unstably, so it leaves that to chance; we cut the lowest ids."""
    kept = ours.isfinite()
    return torch.equal(ours.sort().values, theirs.sort().values) and torch.equal(
        ours[kept], scaled[kept]
    )


def random_rows(seed: int, num_rows: int, vocab_size: int, scale: float, tied: bool) -> Tensor:
    rows = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale
    return (rows * 2).round() / 2 if tied else rows


PARAMS = st.builds(
    params,
    temperature=st.sampled_from([0.0, 0.05, 0.3, 0.7, 1.0, 1.7, 10.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 50, 10_000]),
    top_p=st.sampled_from([1e-9, 0.01, 0.3, 0.5, 0.9, 0.95, 0.999, 1.0, 1.0, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 1e-9, 0.02, 0.3, 1.0]),
    typical_p=st.sampled_from([0.01, 0.2, 0.7, 0.95, 0.9999, 1.0, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)
ROWS = st.builds(
    random_rows,
    seed=st.integers(0, 2**32),
    num_rows=st.just(4),
    vocab_size=st.sampled_from([1, 2, 3, 7, 64, 129, 500]),
    scale=st.sampled_from([0.0, 0.1, 1.0, 4.0, 40.0]),
    tied=st.booleans(),
)


@settings(deadline=None, max_examples=300)
@given(rows=ROWS, chosen=st.lists(PARAMS, min_size=4, max_size=4))
def test_processing_equals_transformers(rows, chosen):
    """Any other order, tie or border would be another distribution than the user's own stack."""
    ours = process_logits(rows, chosen)
    scaled = _scale(rows, chosen)
    batch = _cut_batch(scaled, chosen)
    for i, p in enumerate(chosen):
        if at_border(rows[i], p):
            continue
        assert same_but_for_ties(ours[i], warp(rows[i], p), scaled[i]), p
        assert torch.equal(batch[i], ours[i]), p


def test_processing_equals_transformers_at_full_vocabulary():
    """The shortcuts of the CPU path matter at real sizes, where small rows cannot test them."""
    rows = random_rows(0, 8, 49_152, 3.0, tied=False).bfloat16().float()
    for p in (
        params(top_p=0.9),
        params(0.5, top_p=0.95),
        params(1.3, top_k=50, top_p=0.8),
        params(min_p=0.05),
        params(0.4, typical_p=0.9),
        params(0.7, top_k=500, top_p=0.95, min_p=0.01, typical_p=0.6),
    ):
        ours = process_logits(rows, [p] * 8)
        scaled = _scale(rows, [p] * 8)
        batch = _cut_batch(scaled, [p] * 8)
        clear = [i for i in range(8) if not at_border(rows[i], p)]
        assert clear
        for i in clear:
            assert same_but_for_ties(ours[i], warp(rows[i], p), scaled[i])
            assert torch.equal(batch[i], ours[i])


@pytest.mark.parametrize(("top_p", "num_kept"), [(0.75, 3), (0.5, 2), (0.51, 3), (0.25, 1)])
def test_top_p_cuts_ties_at_its_border_from_the_lowest_id(top_p, num_kept):
    """Four tokens of exactly 1/4: a tail of exactly 1 - top_p goes, and which of the ties go is
    fixed, or the text would depend on the sort."""
    p = params(top_p=top_p)
    for row in (torch.zeros(4), torch.cat([torch.zeros(4), torch.full((252,), -200.0)])):
        ours = process_logits(row[None], [p])[0]
        assert ours.isfinite()[:4].tolist() == [False] * (4 - num_kept) + [True] * num_kept
        assert torch.equal(_cut_batch(row[None], [p])[0], ours)
        assert same_but_for_ties(ours, warp(row, p), row)


def test_top_k_keeps_ties():
    """top_k that counted to k among ties would depend on the sort as well."""
    row = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    kept = process_logits(row, [params(top_k=2)])[0].isfinite()
    assert kept.tolist() == [False, True, True, True, True, False]


def test_min_p_and_typical_p_follow_temperature_and_each_other():
    """Taken of the unscaled logits, or in another order, they would keep other tokens."""
    row = torch.tensor([[4.0, 3.9, 3.0, 1.0, -2.0]])
    cold, hot = process_logits(row.expand(2, -1), [params(0.25, min_p=0.1), params(4.0, min_p=0.1)])
    assert cold.isfinite().tolist() == [True, True, False, False, False]
    assert hot.isfinite().tolist() == [True] * 5
    # Among all five tokens the third is nearest to the entropy, among what min_p leaves the second.
    row = torch.tensor([[0.0, 5.0, 4.0, 3.0, 2.0]])
    both = process_logits(row, [params(min_p=0.1, typical_p=0.2)])[0]
    assert both.isfinite().tolist() == [False, True, False, False, False]
    alone = process_logits(row, [params(typical_p=0.2)])[0]
    assert alone.isfinite().tolist() == [False, False, True, False, False]


def test_top_k_beyond_the_vocabulary_and_tiny_top_p():
    """The two ends of the ranges: nothing cut, and all but one cut."""
    rows = random_rows(3, 1, 50, 2.0, tied=False)
    assert torch.equal(process_logits(rows, [params(top_k=51)]), rows)
    assert torch.equal(process_logits(rows, [params(top_p=1.0)]), rows)
    kept = process_logits(rows, [params(top_p=1e-300)])[0].isfinite()
    assert kept.nonzero().tolist() == [[int(rows.argmax())]]


@pytest.mark.parametrize("temperature", [1e-3, 1e-20, 1e-38, 5e-324])
def test_tiny_temperature_is_greedy_and_finite(temperature):
    """Dividing by a temperature that underflows to 0 gives NaN for every token."""
    rows = random_rows(4, 6, 1000, 3.0, tied=False)
    chosen = [params(temperature, seed=i, top_p=0.9 if i % 2 else 1.0) for i in range(6)]
    assert draw(rows, chosen, [0] * 6).tolist() == rows.argmax(-1).tolist()


@settings(deadline=None, max_examples=100)
@given(rows=ROWS, chosen=st.lists(PARAMS, min_size=4, max_size=4), position=st.integers(0, 10**6))
def test_draw_is_its_definition_and_rows_are_alone(rows, chosen, position):
    """Rows with other parameters beside a row change its text [vllm#41758]; seeds mixed between
    rows or one stream of noise for all [vllm#6038, vllm#9441, TensorRT-LLM#17599]."""
    positions = [position + i for i in range(4)]
    together = draw(rows, chosen, positions)
    for i, p in enumerate(chosen):
        assert draw(rows[i : i + 1], [p], positions[i : i + 1]).item() == together[i]
        scores = process_logits(rows[i : i + 1], [p]).double()
        if p.temperature:
            scores += gumbel_noise([p.seed], [positions[i]], rows.shape[1])
        assert scores.argmax(-1).item() == together[i]
    backwards = draw(rows.flip(0), chosen[::-1], positions[::-1])
    assert torch.equal(backwards.flip(0), together)


def test_draw_repeats_itself_and_follows_seed_and_position():
    """One draw, one verdict: a repeated call must give the same token, another seed or position
    another draw (ignored seeds: vllm#6038)."""
    rows = torch.zeros(64, 1000)
    first = draw(rows, [params(seed=1)] * 64, list(range(64)))
    assert torch.equal(first, draw(rows, [params(seed=1)] * 64, list(range(64))))
    other_seed = draw(rows, [params(seed=2)] * 64, list(range(64)))
    assert (first == other_seed).sum() < 4
    assert first.unique().numel() > 56


def test_sampled_law_with_temperature_and_truncation():
    """The whole path through `draw` must follow the distribution that transformers would use."""
    row = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])
    n = 6000
    for p in (params(0.8, seed=1), params(1.5, top_k=4, seed=2), params(1.0, top_p=0.8, seed=3)):
        law = warp(row, p).double().softmax(-1)
        ids = draw(row.expand(n, -1), [p] * n, list(range(n)))
        counts = torch.bincount(ids, minlength=6)
        assert counts[law == 0].sum() == 0
        assert (((counts - n * law) ** 2)[law > 0] / (n * law)[law > 0]).sum() < 25


def test_greedy_takes_the_lowest_of_tied_ids_also_in_bf16():
    """bf16 logits tie often; another tie than torch.argmax's is another text than generate's."""
    rows = random_rows(5, 64, 5000, 0.5, tied=False).bfloat16()
    assert (rows == rows.amax(-1, keepdim=True)).sum(-1).max() > 1
    greedy = draw(rows, [params(0.0)] * 64, [0] * 64)
    assert torch.equal(greedy, rows.float().argmax(-1))
    best = rows.amax(-1, keepdim=True)
    assert greedy.tolist() == [
        int((row == b).nonzero()[0]) for row, b in zip(rows, best, strict=True)
    ]


def test_padded_ids_are_never_drawn():
    """A padded vocabulary's extra ids crash the detokenizer [vllm#5203, vllm#7252], and their
    noise or mass must not change the draw among the others either."""
    rows = random_rows(6, 40, 130, 1.0, tied=False)
    rows[:, 100:] = 50.0
    for p in (params(0.0), params(seed=1), params(seed=1, top_k=7), params(seed=1, top_p=0.5)):
        ids = draw(rows, [p] * 40, list(range(40)), num_valid=100)
        assert ids.max() < 100
        assert torch.equal(ids, draw(rows[:, :100], [p] * 40, list(range(40))))


@pytest.mark.parametrize("garbage", [math.nan, INF, "all -inf", "one nan"])
def test_garbage_fails_its_row_only(garbage):
    """NaN logits must neither crash the batch nor become an id out of range."""
    cuts = [
        *({}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}, {"typical_p": 0.5}),
        {"top_k": 3, "top_p": 0.5, "min_p": 0.1, "typical_p": 0.9},
    ]
    chosen = [params(0.0), *(params(**cut) for cut in cuts)]
    n = len(chosen)
    rows = random_rows(7, 2 * n, 100, 1.0, tied=False)
    clean = draw(rows, chosen * 2, list(range(2 * n)))
    if garbage == "all -inf":
        rows[:n] = -INF
    elif garbage == "one nan":
        rows[:n, 17] = math.nan
    else:
        rows[:n] = garbage
    ids = draw(rows, chosen * 2, list(range(2 * n)))
    assert ids[:n].tolist() == [NO_TOKEN] * n
    assert torch.equal(ids[n:], clean[n:])


def test_masked_tokens_are_never_drawn():
    """A processor's -inf must survive every path."""
    rows = random_rows(8, 200, 40, 0.1, tied=False)
    rows[:, ::2] = -INF
    for p in (
        params(0.0),
        params(),
        params(top_k=30),
        params(top_p=0.999),
        params(top_k=1),
        params(typical_p=0.9),
    ):
        assert (draw(rows, [p] * 200, list(range(200))) % 2 == 1).all()


@pytest.mark.gpu
def test_cuda_draws_what_the_cpu_draws():
    """The two ways through `draw` are one function."""
    rows = random_rows(9, 32, 49_152, 3.0, tied=False)
    chosen = [params(0.0), params(seed=1), params(seed=2, top_k=50), params(0.7, top_p=0.9)] * 8
    chosen[::5] = [params(seed=3, min_p=0.02), params(seed=4, typical_p=0.8)] * 3 + [params(0.0)]
    on_cuda = draw(rows.cuda(), chosen, list(range(32))).cpu()
    assert torch.equal(on_cuda, draw(rows, chosen, list(range(32))))
