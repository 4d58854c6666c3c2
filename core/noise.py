"""Keyed noise, and the argmax over scores that it perturbs.

The noise of a token is a pure function of (seed, position, token id): the same bits on every
device and in every language. docs/noise.md defines it and publishes test vectors. SplitMix64 runs
over the token ids from a key made of seed and position; torch's int64 wraps around, so signed
arithmetic gives the unsigned bits. Rules that accept by chance draw from three more families of
keys, each a domain of its own and keyed by the block as well.

`argmax_dense` is the definition; `possible_winners` and `argmax_among` are the same argmax for
CPUs, several times cheaper: most tokens are known to lose before any logarithm is taken.

Knows nothing of sampling parameters. Shapes: n rows, V vocabulary, S candidates over all rows.
"""

import functools
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NO_TOKEN = -1
"""In the place of a token id where a row has none to offer."""

_MASK64 = (1 << 64) - 1
_TOKEN_STEP = 0x9E3779B97F4A7C15
_POSITION_STEP = 0xD1342543DE82EF95
_INDEX_STEP = 0xA0761D6478BD642F
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))

ACCEPT_DOMAIN = 0x6163636570746564
"""Whether a drafted token is accepted. The domains are eight letters of ASCII: `accepted`."""

CORRECTION_DOMAIN = 0x636F727265637473
"""What the target commits behind the accepted tokens: `corrects`."""

DRAFT_DOMAIN = 0x6472616674696E67
"""What a drafter samples: `drafting`."""

_PRUNE_FACTOR = 40.0
"""Above the largest value of -log(U) / (1 - U), which is 36.74 at the smallest U, 2^-53."""

_BLOCK = 64
_DENSE_ELEMENTS = 1 << 24


def mix64(value: int) -> int:
    """SplitMix64's finalizer on a Python int, modulo 2^64."""
    value &= _MASK64
    for shift, factor in _ROUNDS:
        value = ((value ^ (value >> shift)) * factor) & _MASK64
    return value ^ (value >> 31)


def row_key(seed: int, position: int) -> int:
    """The 64-bit key under which the tokens of one position get their noise."""
    return mix64(mix64(seed) + position * _POSITION_STEP)


def row_keys(seeds: Sequence[int], positions: Sequence[int], device: torch.device | str) -> Tensor:
    """`row_key` of each row as int64 `[n]`. seeds are in [0, 2^64); positions are absolute."""
    keys = [row_key(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    return _key_tensor(keys, device)


def _key_tensor(keys: Sequence[int], device: torch.device | str) -> Tensor:
    return torch.tensor([_signed(key) for key in keys], dtype=torch.int64, device=device)


def uniform(
    seeds: Sequence[int],
    positions: Sequence[int],
    vocab_size: int,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Uniforms in (0, 1), fp64 `[n, vocab_size]`: odd multiples of 2^-53, so 52 random bits each.

    Bit for bit the same on every device. seeds are in [0, 2^64); positions are absolute.
    """
    keys = row_keys(seeds, positions, device)
    return _to_uniform(_random_bits(_token_steps(vocab_size, keys.device) + keys[:, None]))


def gumbel_noise(
    seeds: Sequence[int],
    positions: Sequence[int],
    vocab_size: int,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Standard Gumbel noise -log(-log U), fp64 `[n, vocab_size]`, from `uniform`."""
    return _to_gumbel(uniform(seeds, positions, vocab_size, device))


def _signed(value: int) -> int:
    """The int64 with the same bits as the uint64 `value`; torch's uint64 lacks most operators."""
    return value - (1 << 64) if value >> 63 else value


@functools.lru_cache(maxsize=8)
def _token_steps(vocab_size: int, device: torch.device) -> Tensor:
    """(t + 1) * _TOKEN_STEP modulo 2^64 for each token t, int64 `[V]`. Never written to."""
    tokens = torch.arange(1, vocab_size + 1, dtype=torch.int64, device=device)
    return tokens.mul_(_signed(_TOKEN_STEP))


def _random_bits(z: Tensor) -> Tensor:
    """52 random bits from each key + token step, in place: SplitMix64's finalizer, then >>> 12."""
    scratch = torch.empty_like(z)
    for shift, factor in _ROUNDS:
        z.bitwise_xor_(_shift_right(z, shift, scratch)).mul_(_signed(factor))
    z.bitwise_xor_(_shift_right(z, 31, scratch))
    return _shift_right(z, 12, z)


def _random_bits_numpy(z: NDArray[np.uint64], scratch: NDArray[np.uint64]) -> None:
    """`_random_bits` on unsigned integers, in place."""
    for shift, factor in _ROUNDS:
        np.right_shift(z, np.uint64(shift), out=scratch)
        np.bitwise_xor(z, scratch, out=z)
        np.multiply(z, np.uint64(factor), out=z)
    np.right_shift(z, np.uint64(31), out=scratch)
    np.bitwise_xor(z, scratch, out=z)
    np.right_shift(z, np.uint64(12), out=z)


def _shift_right(z: Tensor, shift: int, out: Tensor) -> Tensor:
    """The logical shift: torch's is arithmetic, so the copies of the sign bit are masked away."""
    torch.bitwise_right_shift(z, shift, out=out)
    return out.bitwise_and_((1 << (64 - shift)) - 1)


def _to_uniform(bits: Tensor) -> Tensor:
    return bits.to(torch.float64).add_(0.5).mul_(2.0**-52)


def _to_gumbel(u: Tensor) -> Tensor:
    return u.log_().neg_().log_().neg_()


# ---------------------------------------------------------------- keyed by block


def block_key(seed: int, domain: int, start: int, index: int) -> int:
    """The key of one chance within a block: `start` is where the block's first token stands.

    The position alone would not do. Block verification looks at the uniforms of rejected positions
    too; met again by the next block's draft they would no longer be uniform.
    """
    key = row_key((mix64(seed) + domain) & _MASK64, start)
    return mix64(key + (index + 1) * _INDEX_STEP)


def accept_uniform(seed: int, start: int, index: int) -> float:
    """The uniform in (0, 1) that the block's drafted token `index` has to stay below."""
    key = block_key(seed, ACCEPT_DOMAIN, start, index)
    return ((mix64(key + _TOKEN_STEP) >> 12) + 0.5) * 2.0**-52


def correction_keys(
    seeds: Sequence[int],
    starts: Sequence[int],
    indices: Sequence[int],
    device: torch.device | str = "cpu",
) -> Tensor:
    """Keys, int64 `[n]`, for the target's own token behind `indices` accepted ones of a block."""
    return _block_keys(CORRECTION_DOMAIN, seeds, starts, indices, device)


def draft_keys(
    seeds: Sequence[int],
    starts: Sequence[int],
    indices: Sequence[int],
    device: torch.device | str = "cpu",
) -> Tensor:
    """Keys, int64 `[n]`, for a drafter that samples token `indices` of a block from its q."""
    return _block_keys(DRAFT_DOMAIN, seeds, starts, indices, device)


def _block_keys(
    domain: int,
    seeds: Sequence[int],
    starts: Sequence[int],
    indices: Sequence[int],
    device: torch.device | str,
) -> Tensor:
    places = zip(seeds, starts, indices, strict=True)
    return _key_tensor([block_key(seed, domain, *place) for seed, *place in places], device)


# ---------------------------------------------------------------- argmax(scores + G)


def argmax_noisy(scores: Tensor, keys: Tensor) -> Tensor:
    """argmax(scores + G), int64 `[n]`, in the way that is fast on the device of `scores` `[n, V]`.

    Rows must have a finite maximum; what a row without one gets depends on the device.
    """
    if scores.device.type != "cpu":
        return argmax_dense(scores, keys)
    return argmax_among(scores, keys, *possible_winners(scores, keys))


def argmax_dense(scores: Tensor, keys: Tensor) -> Tensor:
    """argmax(scores + G) by its definition, int64 `[n]`; the lowest id wins ties.

    scores: fp32 `[n, V]`; keys: `row_keys`. Needs no host synchronisation: for accelerators.
    """
    steps = _token_steps(scores.shape[1], scores.device)
    num_rows = max(1, _DENSE_ELEMENTS // scores.shape[1])
    ids = torch.empty_like(keys)
    for start in range(0, len(keys), num_rows):
        part = slice(start, start + num_rows)
        noise = _to_gumbel(_to_uniform(_random_bits(steps + keys[part, None])))
        ids[part] = noise.add_(scores[part]).argmax(dim=-1)
    return ids


def noise_of(keys: Tensor, tokens: Tensor) -> Tensor:
    """G of some tokens of each row, fp64 `[n, m]`. keys: `[n]`; tokens: `[n, m]`."""
    steps = (tokens + 1) * _signed(_TOKEN_STEP)
    return _to_gumbel(_to_uniform(_random_bits(steps + keys[:, None])))


def possible_winners(scores: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """A superset of the tokens that can win their row, some 40 a row: rows and ids, `[S]` each.

    The winner minimises E / p with E = -log U, and 1 - U <= E <= 36.74 (1 - U). So whoever has
    p / (1 - U) below 1/40 of the row's largest loses, by a margin far above fp32's rounding.
    A p that underflows cannot win either: G spans 41 nats, fp32's p spans 87. A row with NaN or
    +inf has no candidates. One row at a time, so that all steps stay in the core's cache, and in
    numpy, whose unsigned shifts and products take half of torch's time.
    """
    num_rows, vocab_size = scores.shape
    steps = _token_steps(vocab_size, scores.device).numpy().view(np.uint64)
    unsigned_keys = keys.numpy().view(np.uint64)
    num_blocks = -(-vocab_size // _BLOCK)
    odds = scores.new_empty((num_rows, num_blocks * _BLOCK))
    odds[:, vocab_size:] = 0
    bits, scratch = np.empty_like(steps), np.empty_like(steps)
    complement = scores.new_empty(vocab_size)
    for row in range(num_rows):
        np.add(steps, unsigned_keys[row], out=bits)
        _random_bits_numpy(bits, scratch)
        np.bitwise_xor(bits, np.uint64((1 << 52) - 1), out=bits)
        np.copyto(complement.numpy(), bits, casting="unsafe")
        complement.add_(0.5)  # (1 - U) * 2^52
        torch.div(scores[row].softmax(dim=-1), complement, out=odds[row, :vocab_size])
    blocks = odds.view(num_rows, num_blocks, _BLOCK)
    best = blocks.amax(dim=-1)
    bar = best.amax(dim=-1, keepdim=True) / _PRUNE_FACTOR
    rows, block = (best >= bar).nonzero(as_tuple=True)
    entry, offset = (blocks[rows, block] >= bar[rows]).nonzero(as_tuple=True)
    return rows[entry], block[entry] * _BLOCK + offset


def argmax_among(scores: Tensor, keys: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
    """Each row's argmax(scores + G) among the candidates, int64 `[n]`; the lowest id wins ties.

    scores: `[n, V]`; keys: `[n]`; rows, tokens: `[S]`, the candidates. A row without any gets
    `NO_TOKEN`.
    """
    steps = _token_steps(scores.shape[1], scores.device)
    noise = _to_gumbel(_to_uniform(_random_bits(steps[tokens] + keys[rows])))
    values = noise.add_(scores[rows, tokens])
    best = values.new_full((len(keys),), -torch.inf).scatter_reduce_(0, rows, values, "amax")
    first = values == best[rows]
    ids = torch.full_like(keys, NO_TOKEN)
    return ids.scatter_reduce_(0, rows[first], tokens[first], "amin", include_self=False)
