"""The noise: its bits against an independent implementation, its quality, and its argmax.

The reference below is written from docs/noise.md alone, in numpy's unsigned integers.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.noise import (
    CORRECTION_DOMAIN,
    DRAFT_DOMAIN,
    NO_TOKEN,
    accept_uniform,
    argmax_among,
    argmax_dense,
    argmax_noisy,
    block_key,
    correction_keys,
    draft_keys,
    gumbel_noise,
    mix64,
    possible_winners,
    row_key,
    row_keys,
    uniform,
)

VECTORS = json.loads((Path(__file__).parent / "data" / "noise_vectors.json").read_text())
BLOCK_VECTORS = (  # seed, start, index; accept uniform, draft key, correction key
    (0, 0, 0, 0.9778775653335815, 0x975BD37296C879C7, 0x9F219D63599C2102),
    (0, 0, 1, 0.8316226801140089, 0x81855C927386F81A, 0x7AB1750DF684AC4B),
    (1, 0, 0, 0.33970193910159463, 0x1A03665404E1FDD4, 0x87E58E2DBA3E5BD0),
    (42, 17, 3, 0.1846560422225526, 0x626EBF6F0A960CB8, 0x4C66C56854F03A1F),
    (18446744073709551615, 100000, 7, 0.8247573381912506, 0x858B1388632C60FF, 0xDAF87EB8BB0C7882),
)
SEEDS = st.integers(0, 2**64 - 1)


def mix64_numpy(z: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer on uint64."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniform_numpy(seed: int, position: int, vocab_size: int) -> np.ndarray:
    """docs/noise.md in numpy: fp64 `[vocab_size]`."""
    seeds, positions = np.array([seed], np.uint64), np.array([position], np.uint64)
    key = mix64_numpy(mix64_numpy(seeds) + positions * np.uint64(0xD1342543DE82EF95))
    tokens = np.arange(1, vocab_size + 1, dtype=np.uint64)
    bits = mix64_numpy(key + tokens * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(12)
    return (bits.astype(np.float64) + 0.5) * 2.0**-52


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """Pearson's statistic as standard deviations from its mean."""
    statistic = float(((counts - expected) ** 2 / expected).sum())
    freedom = counts.size - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


def test_mix64_is_splitmix64():
    """A typo in a constant would make every published vector a private invention."""
    step = 0x9E3779B97F4A7C15
    outputs = [mix64(1234567 + i * step) for i in (1, 2, 3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: f"{v['seed']}-{v['position']}")
def test_published_vectors(vector):
    """Any change of the noise changes every seeded text ever returned: it must not happen."""
    seed, position, token = int(vector["seed"]), vector["position"], vector["token"]
    assert row_key(seed, position) == int(vector["key"], 16)
    ours = uniform([seed], [position], token + 1)[0, token].item()
    assert ours == float.fromhex(vector["uniform"]) == (vector["bits"] + 0.5) * 2.0**-52
    assert uniform_numpy(seed, position, token + 1)[token] == ours
    noise = gumbel_noise([seed], [position], token + 1)[0, token].item()
    assert math.isclose(noise, vector["gumbel"], rel_tol=1e-14, abs_tol=1e-14)


@given(seed=SEEDS, position=st.integers(0, 2**40), vocab_size=st.integers(1, 300))
def test_torch_and_numpy_have_the_same_bits(seed, position, vocab_size):
    """Signed torch arithmetic that is not the unsigned one would part target and drafter."""
    ours = uniform([seed], [position], vocab_size)[0].numpy()
    assert np.array_equal(ours, uniform_numpy(seed, position, vocab_size))


@pytest.mark.gpu
def test_cuda_has_the_same_bits():
    """A target on CUDA and a drafter on CPU share nothing but these bits."""
    seeds, positions = [0, 1, 2**63, 2**64 - 1] * 8, list(range(32))
    on_cuda = uniform(seeds, positions, 49_157, "cuda")
    assert torch.equal(on_cuda.cpu(), uniform(seeds, positions, 49_157))
    scores = torch.randn(32, 49_157) * 3
    keys = row_keys(seeds, positions, "cpu")
    assert torch.equal(argmax_dense(scores.cuda(), keys.cuda()).cpu(), argmax_dense(scores, keys))


def test_rows_do_not_depend_on_the_call():
    """Noise that depends on batch or vocabulary size changes text with the batch-mates, and
    parts a drafter from a target whose vocabulary is padded further."""
    together = uniform([5, 9], [3, 4], 1000)
    assert torch.equal(together[1:], uniform([9], [4], 1000))
    assert torch.equal(together[:, :10], uniform([5, 9], [3, 4], 10))


def test_uniforms_stay_inside_the_open_interval():
    """U = 0 or 1 would make G infinite and a token of probability 0 could win."""
    low, high = 0.5 * 2.0**-52, (2**52 - 0.5) * 2.0**-52
    assert low > 0.0 and high < 1.0
    assert math.isfinite(-math.log(-math.log(low))) and math.isfinite(-math.log(-math.log(high)))
    assert -math.log(low) / (1 - low) < 40.0, "the bound that pruning relies on"


@pytest.mark.parametrize("axis", ["token", "position", "seed"])
def test_noise_is_uniform_and_independent_along(axis):
    """A weak key schedule would repeat or correlate noise between positions, seeds or tokens."""
    n = 1 << 18
    if axis == "token":
        u = uniform([42], [7], n)[0].numpy()
    elif axis == "position":
        u = uniform([42] * n, list(range(n)), 1)[:, 0].numpy()
    else:
        u = uniform(list(range(n)), [7] * n, 1)[:, 0].numpy()
    cells = np.histogram(u, bins=256, range=(0, 1))[0]
    assert abs(chi_square(cells, np.full(256, n / 256))) < 4
    low_bits = (u * 2**52).astype(np.int64) & 255
    assert abs(chi_square(np.bincount(low_bits, minlength=256), np.full(256, n / 256))) < 4
    for lag in (1, 2, 64):
        pairs = np.histogram2d(u[:-lag], u[lag:], bins=16, range=[[0, 1], [0, 1]])[0]
        assert abs(chi_square(pairs, np.full((16, 16), (n - lag) / 256))) < 4


def test_argmax_follows_the_distribution():
    """The Gumbel trick with wrong noise draws from something else than p."""
    p = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.04, 0.01])
    n = 1 << 18
    keys = row_keys([11] * n, list(range(n)), "cpu")
    ids = argmax_dense(p.log().expand(n, -1), keys)
    counts = torch.bincount(ids, minlength=6).double().numpy()
    assert abs(chi_square(counts, p.double().numpy() * n)) < 4


@settings(deadline=None, max_examples=150)
@given(
    seed=SEEDS,
    vocab_size=st.integers(1, 200),
    scale=st.sampled_from([0.0, 1e-3, 1.0, 5.0, 30.0, 300.0, 1e6]),
    masked=st.floats(0, 0.95),
)
def test_pruned_argmax_equals_the_definition(seed, vocab_size, scale, masked):
    """Pruning that drops a winner changes the text on CPUs only: a drafter on a GPU disagrees."""
    generator = torch.Generator().manual_seed(seed % 2**63)
    scores = torch.randn(4, vocab_size, generator=generator) * scale
    hidden = torch.rand(scores.shape, generator=generator) < masked
    hidden[:, 0] = False
    scores = scores.masked_fill(hidden, -torch.inf)
    keys = row_keys([seed] * 4, [0, 1, 2, 3], "cpu")
    pruned = argmax_among(scores, keys, *possible_winners(scores, keys))
    assert torch.equal(pruned, argmax_dense(scores, keys))


def test_pruned_argmax_at_full_vocabulary():
    """Same as above where the pruning earns its keep, and it must earn it."""
    scores = torch.randn(24, 49_152, generator=torch.Generator().manual_seed(0)) * 2.5
    keys = row_keys(list(range(24)), [100] * 24, "cpu")
    rows, tokens = possible_winners(scores, keys)
    assert len(rows) < 24 * 200
    assert torch.equal(argmax_among(scores, keys, rows, tokens), argmax_dense(scores, keys))


def test_lowest_id_wins_ties_and_empty_rows_have_no_token():
    """Ties broken by the order of the work would differ between devices."""
    keys = row_keys([3, 3], [5, 5], "cpu")
    winner = int(argmax_dense(torch.zeros(2, 9), keys)[0])
    rows, tokens = torch.tensor([0, 0, 0]), torch.tensor([winner, winner, winner])
    assert argmax_among(torch.zeros(2, 9), keys, rows, tokens).tolist() == [winner, NO_TOKEN]
    noise = gumbel_noise([3], [5], 9)[0]
    tied = torch.full((1, 9), -torch.inf, dtype=torch.float64)
    tied[0, [2, 6]] = -noise[[2, 6]]
    assert argmax_among(tied, keys[:1], torch.tensor([0, 0]), torch.tensor([6, 2])).tolist() == [2]
    assert argmax_dense(tied, keys[:1]).tolist() == [2]


# ---------------------------------------------------------------- keyed by block


def block_key_reference(seed: int, domain: bytes, start: int, index: int) -> int:
    """docs/noise.md's definition, in Python's integers."""
    key = mix64(seed) + int.from_bytes(domain, "big")
    key = mix64(mix64(key) + start * 0xD1342543DE82EF95)
    return mix64(key + (index + 1) * 0xA0761D6478BD642F)


@given(seed=SEEDS, start=st.integers(0, 2**40), index=st.integers(0, 64))
def test_block_keys_are_their_definition(seed, start, index):
    """Drafter and verifier would not notice a change; a repeated call after an update would."""
    draft, correction = (
        keys([seed], [start], [index]).item() % 2**64 for keys in (draft_keys, correction_keys)
    )
    assert draft == block_key_reference(seed, b"drafting", start, index)
    assert correction == block_key_reference(seed, b"corrects", start, index)
    bits = mix64(block_key_reference(seed, b"accepted", start, index) + 0x9E3779B97F4A7C15) >> 12
    assert accept_uniform(seed, start, index) == (bits + 0.5) * 2.0**-52


def test_published_block_vectors():
    """Any change of these changes every text that REJECTION ever returned for a seed."""
    for seed, start, index, accept, draft, correction in BLOCK_VECTORS:
        assert accept_uniform(seed, start, index) == accept
        assert draft_keys([seed], [start], [index]).item() % 2**64 == draft
        assert correction_keys([seed], [start], [index]).item() % 2**64 == correction


def test_domains_blocks_and_indices_are_independent():
    """A drafter's noise that leans on the verifier's, or a block's on the last one's, biases."""
    n = 20_000
    families = [
        [accept_uniform(7, i, 0) for i in range(n)],
        [accept_uniform(7, i, 1) for i in range(n)],
        [accept_uniform(7, i + 1, 0) for i in range(n)],
        [accept_uniform(8, i, 0) for i in range(n)],
        uniform([7] * n, list(range(n)), 1)[:, 0].tolist(),
    ]
    for domain in (CORRECTION_DOMAIN, DRAFT_DOMAIN):
        keys = [block_key(7, domain, i, 0) for i in range(n)]
        families.append([mix64(key + 0x9E3779B97F4A7C15) / 2.0**64 for key in keys])
    for i, family in enumerate(families):
        counts = np.histogram(family, bins=64, range=(0, 1))[0]
        assert chi_square(counts, np.full(64, n / 64)) < 4.5
        for other in families[:i]:
            joint = np.histogram2d(family, other, bins=8, range=[[0, 1], [0, 1]])[0]
            assert chi_square(joint.ravel(), np.full(64, n / 64)) < 4.5


@pytest.mark.parametrize("vocab_size", [5, 64, 1000])
def test_argmax_noisy_is_the_definition(vocab_size):
    """Scores of a residual are -inf in most places."""
    scores = torch.randn(20, vocab_size, generator=torch.Generator().manual_seed(0))
    scores[:, ::3] = -torch.inf
    keys = row_keys([5] * 20, list(range(20)), "cpu")
    assert argmax_noisy(scores, keys).tolist() == argmax_dense(scores, keys).tolist()
