"""q: what a draft reports is exactly what it was sampled from. Seeds are fixed; no test is random.

A chi-square statistic is compared with the value that one honest sampler in 10,000 exceeds.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, RepetitionPenaltyLogitsProcessor

from core.config import ModelConfig
from core.model import RaggedModel
from core.noise import argmax_dense, draft_keys
from core.sampling import draw, process_logits
from core.types import Rule, SamplingParams, SparseDistribution
from core.wire_common import distributions_from_proto, distributions_to_proto
from drafter_service.distributions import Distributions
from drafter_service.drafters.base import Draft, DraftJob
from drafter_service.drafters.draft_model import DraftModelDrafter
from tests.tiny_models import VOCAB_SIZE, load_reference

#: degrees of freedom -> the 1 - 1e-4 quantile of chi-square
CHI2 = {3: 21.1, 7: 29.9, 63: 113.7}
TEXTS = {1: [10, 20, 30], 2: [7] * 20, 3: [1, 2, 3, 1, 2], 4: [200, 100]}


def sampling(seed: int, temperature: float = 1.0, top_k: int = 0, **more: Any) -> SamplingParams:
    return SamplingParams(temperature, top_k, seed=seed, rule=Rule.REJECTION, **more)


def make(path: Path, num_sequences: int = 4, top_q: int = 64) -> DraftModelDrafter:
    limits = {"max_length": 64, "max_sequences": num_sequences, "max_batch_tokens": 256}
    return DraftModelDrafter(RaggedModel.load(ModelConfig(model=str(path), **limits)), top_q=top_q)


@pytest.fixture(scope="module")
def reference(tiny_llama: Path) -> PreTrainedModel:
    return load_reference(tiny_llama)


def scores_of(count: int = 10, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def chi2(counts: Counter[int], expected: dict[int, float]) -> float:
    assert set(counts) <= set(expected)
    total = counts.total()
    return sum((counts[x] - total * q) ** 2 / (total * q) for x, q in expected.items())


def as_dict(distribution: SparseDistribution) -> dict[int, float]:
    return dict(zip(distribution.token_ids, distribution.probabilities, strict=True))


# ---------------------------------------------------------------- by hand


def test_frequencies_are_the_reported_ones_behind_the_cut() -> None:
    """Sampling first and cutting q to its top 8 afterwards would give tokens that q calls
    impossible, and frequencies of the whole distribution for the others."""
    size, scores = 8_000, scores_of(50)
    qs = Distributions.of(scores.repeat(size, 1), top_q=8)
    [q, *others] = qs.sparse()
    assert len(q.token_ids) == 8 and set(others) == {q}
    whole = scores.softmax(dim=-1)[list(q.token_ids)].double()
    assert q.probabilities == pytest.approx((whole / whole.sum()).tolist(), abs=1e-6)
    counts = Counter(qs.sample(range(size), [5] * size, [0] * size).tolist())
    assert chi2(counts, as_dict(q)) < CHI2[7]
    assert chi2(counts, {x: 1 / 8 for x in q.token_ids}) > CHI2[7]  # it would notice


def test_what_the_wire_carries_is_enough_to_draw_the_draft_again() -> None:
    """q rounded after sampling is another q. Here the draft is drawn again from what arrives:
    fp32 chances, whose law is argmax(log q + G) with the published noise of drafters."""
    size = 300
    seeds, starts, indices = range(size), [9] * size, [i % 4 for i in range(size)]
    qs = Distributions.of(3 * torch.stack([scores_of(40, i) for i in range(size)]), top_q=16)
    sent = qs.sparse()
    arrived = distributions_from_proto(distributions_to_proto(sent))
    assert list(arrived) == sent
    scores = torch.full((size, 40), -torch.inf, dtype=torch.float64)
    for row, q in enumerate(arrived):
        assert abs(sum(q.probabilities) - 1) < 1e-6 and min(q.probabilities) > 0
        assert list(q.token_ids) == sorted(q.token_ids)
        scores[row, list(q.token_ids)] = torch.tensor(q.probabilities).double().log()
    again = argmax_dense(scores, draft_keys(seeds, starts, indices))
    assert qs.sample(seeds, starts, indices).tolist() == again.tolist()


@pytest.mark.parametrize(("start", "index"), [(11, 0), (10, 0), (10, 2)])
def test_each_block_and_each_place_in_it_has_noise_of_its_own(start: int, index: int) -> None:
    """A rejected position is drafted again by the next block. With the noise of the position
    alone (block 10, token 1 is block 11, token 0) the token that was rejected would come again."""
    size = 6_400
    qs = Distributions.of(torch.zeros(size, 8), top_q=8)
    first = qs.sample(range(size), [10] * size, [1] * size)
    second = qs.sample(range(size), [start] * size, [index] * size)
    pairs = Counter((first * 8 + second).tolist())
    assert chi2(pairs, dict.fromkeys(range(64), 1 / 64)) < CHI2[63]
    assert first.tolist() == qs.sample(range(size), [10] * size, [1] * size).tolist()


def test_the_drafters_noise_is_not_the_targets() -> None:
    """Accepted with chance min(1, p/q) a draft is exact only if the verifier's draws do not know
    it: the coupled noise of the same seed and position must not show in it."""
    size = 6_400
    qs = Distributions.of(torch.zeros(size, 8), top_q=8)
    drafted = qs.sample(range(size), [10] * size, [1] * size)
    params = [SamplingParams(1.0, seed=seed, rule=Rule.COUPLED) for seed in range(size)]
    target = draw(torch.zeros(size, 8), params, [11] * size)
    pairs = Counter((drafted * 8 + target).tolist())
    assert chi2(pairs, dict.fromkeys(range(64), 1 / 64)) < CHI2[63]


def test_rows_without_numbers_have_no_token_and_leave_the_others_alone() -> None:
    """One broken head must not take the batch with it."""
    scores = torch.stack([scores_of(), torch.full((10,), torch.nan), scores_of(seed=2)])
    qs = Distributions.of(scores, top_q=4)
    sampled = qs.sample([1, 1, 1], [5, 5, 5], [0, 0, 0]).tolist()
    assert sampled[1] == -1 and qs.likeliest().tolist()[1] == -1
    assert min(sampled[0], sampled[2]) >= 0
    assert qs.likeliest().tolist()[::2] == [int(scores[0].argmax()), int(scores[2].argmax())]


# ---------------------------------------------------------------- by the model


@torch.inference_mode()
def expected_q(reference: PreTrainedModel, prefix: Sequence[int], params: SamplingParams) -> Tensor:
    """The stock model's distribution behind `prefix`, after the parameters, `[V]`."""
    tokens = torch.tensor([list(prefix)])
    logits = reference(tokens).logits[:, -1].float()[:, :VOCAB_SIZE]
    if params.repetition_penalty != 1:
        logits = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(tokens, logits)
    return process_logits(logits, [params])[0].double().softmax(dim=-1)


def check(draft: Draft, reference: PreTrainedModel, job: DraftJob) -> None:
    assert len(draft.distributions) == len(draft.token_ids) == job.num_draft_tokens
    for i, (token, q) in enumerate(zip(draft.token_ids, draft.distributions, strict=True)):
        assert token in q.token_ids
        prefix = [*job.token_ids, *draft.token_ids[:i]]
        expected = expected_q(reference, prefix, job.sampling)
        got = torch.zeros(VOCAB_SIZE, dtype=torch.float64)
        got[list(q.token_ids)] = torch.tensor(q.probabilities, dtype=torch.float64)
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-5)


def test_q_is_the_processed_distribution_of_its_own_row_and_prefix(
    tiny_llama: Path, reference: PreTrainedModel
) -> None:
    """Raw logits reported as q (transformers#47932), the request's temperature forgotten
    (LiteRT-LM#3017), rows mixed beyond two sequences (1Cat-vLLM#656), penalties that do not see
    the drafted tokens: all would show against the stock model, each row by itself."""
    params = [
        sampling(1, 0.5, 20),
        sampling(2, 1.5),
        sampling(3, 1.0, top_p=0.8, repetition_penalty=3.0),
        sampling(4, 0.8, min_p=0.05),
    ]
    drafter = make(tiny_llama, top_q=VOCAB_SIZE)
    texts = {sequence: list(tokens) for sequence, tokens in TEXTS.items()}
    for accepted in (4, 0, 2, 1):
        jobs = [
            DraftJob(s, tokens, 4, p) for (s, tokens), p in zip(texts.items(), params, strict=True)
        ]
        for job, draft in zip(jobs, drafter.draft(jobs), strict=True):
            check(draft, reference, job)
            texts[job.sequence] += [*draft.token_ids[:accepted], 9]


def test_frequencies_over_seeds_are_the_reported_q(tiny_llama: Path) -> None:
    """The whole way through the model (transformers#47932): how often each pair of tokens is
    drafted over 4,096 seeds, against the product of what the drafts report."""
    drafter, size = make(tiny_llama, num_sequences=64), 64
    pairs: Counter[tuple[int, int]] = Counter()
    expected: dict[tuple[int, int], float] = {}
    for first_seed in range(0, 4096, size):
        jobs = [DraftJob(i, [10, 20, 30], 2, sampling(first_seed + i, 0.9, 2)) for i in range(size)]
        for draft in drafter.draft(jobs):
            first, second = draft.token_ids
            pairs[first, second] += 1
            for token, chance in as_dict(draft.distributions[1]).items():
                first_chance = as_dict(draft.distributions[0])[first]
                expected[first, token] = first_chance * chance
    assert len(expected) == 4 and sum(expected.values()) == pytest.approx(1, abs=1e-5)
    total = pairs.total()
    statistic = sum((pairs[x] - total * q) ** 2 / (total * q) for x, q in expected.items())
    assert statistic < CHI2[3]


def test_a_repeated_job_gives_the_same_draft(tiny_llama: Path) -> None:
    """A draft made again after a failover draws nothing new, whatever is cached by then and
    whoever shares the batch; q may differ in its last bits, and comes with each."""
    drafter = make(tiny_llama)
    jobs = [DraftJob(s, tokens, 5, sampling(s)) for s, tokens in TEXTS.items()]
    first = drafter.draft(jobs)
    again = drafter.draft(jobs)
    alone = make(tiny_llama).draft(jobs[2:3])
    for ours, theirs in zip([*first, first[2]], [*again, *alone], strict=True):
        assert ours.token_ids == theirs.token_ids
        for q, other in zip(ours.distributions, theirs.distributions, strict=True):
            assert as_dict(q) == pytest.approx(as_dict(other), rel=1e-3)


def test_each_block_of_a_text_is_drafted_with_new_noise(tiny_llama: Path) -> None:
    """At a temperature that makes all tokens alike, noise that is used again in the next block
    would draft the same tokens again."""
    drafter, tokens, drafted = make(tiny_llama, top_q=VOCAB_SIZE), [10, 20, 30], []
    for _ in range(10):
        [draft] = drafter.draft([DraftJob(1, tokens, 3, sampling(1, 1e9))])
        drafted += draft.token_ids
        tokens = [*tokens, *draft.token_ids[:1]]
    assert len(set(drafted)) > 20  # of 30; 28 on average


def test_top_q_bounds_what_travels(tiny_llama: Path, reference: PreTrainedModel) -> None:
    """A whole vocabulary per token would be a megabyte a row; what stays is normalised again."""
    [draft] = make(tiny_llama, top_q=3).draft([DraftJob(1, TEXTS[1], 4, sampling(1))])
    for i, (token, q) in enumerate(zip(draft.token_ids, draft.distributions, strict=True)):
        full = expected_q(reference, [*TEXTS[1], *draft.token_ids[:i]], sampling(1))
        best = full.topk(3)
        assert token in q.token_ids and set(q.token_ids) == set(best.indices.tolist())
        scaled = sorted(q.probabilities, reverse=True)
        assert scaled == pytest.approx((best.values / best.values.sum()).tolist(), rel=1e-3)


def test_rules_in_one_batch_and_the_drafts_that_have_no_q(
    tiny_llama: Path, reference: PreTrainedModel
) -> None:
    """GREEDY and COUPLED draft as before beside rows with q; at temperature 0 a draft is its
    argmax, which needs no q, except for ENSEMBLE: there q at temperature 1 travels."""
    ensemble = SamplingParams(rule=Rule.ENSEMBLE, ensemble_weight=0.7)
    coupled = SamplingParams(0.9, seed=5, rule=Rule.COUPLED)
    tokens, greedy = TEXTS[3], SamplingParams()
    params = [greedy, coupled, SamplingParams(rule=Rule.REJECTION), ensemble]
    drafts = make(tiny_llama, top_q=VOCAB_SIZE).draft(
        [DraftJob(i, tokens, 4, p) for i, p in enumerate(params)]
    )
    assert [bool(draft.distributions) for draft in drafts] == [False, False, False, True]
    assert drafts[0].token_ids == drafts[2].token_ids == drafts[3].token_ids
    assert drafts[:2] == make(tiny_llama).draft([DraftJob(i, tokens, 4, params[i]) for i in (0, 1)])
    check(drafts[3], reference, DraftJob(0, tokens, 4, ensemble))
