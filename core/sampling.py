"""From logits to tokens: temperature and the truncations, then the draw.

A draw is a pure function of logits, parameters, seed and position (its noise is `core.noise`), so
a repeated, reordered or rebatched call draws the same token. Every row is computed by itself: its
result never depends on its batch-mates.

There are two ways through: on accelerators whole tensors and no host synchronisation, on CPUs row
by row within the core's cache, touching only the tokens that matter. Tests hold them equal.

Knows nothing of drafts, verdicts, models or requests. Shapes: n rows, V vocabulary.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from core.noise import (
    NO_TOKEN,
    argmax_among,
    argmax_dense,
    gumbel_noise,
    possible_winners,
    row_keys,
    uniform,
)
from core.types import SamplingParams

__all__ = ["NO_TOKEN", "draw", "gumbel_noise", "process_logits", "uniform"]

_MIN_TEMPERATURE = 1e-30
"""Below it only exact ties are left to chance anyway, and the quotient would overflow fp32."""

_SAFETY = 0.9
_BLOCK = 256

_SLACK = 1e-6
"""Above what fp32 can round a mass by."""

_RADII = (1.0, 2.0, 4.0, 8.0)
"""In nats: where `_typical` looks first, most distributions of language models are done by 4."""

_GROUP = 8
"""Rows that a CPU works on at once: buffers this small are reused, larger ones fault in anew."""


def process_logits(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Temperature, top_k, top_p, min_p, typical_p in this order, each row with its own; greedy
    rows stay as they are.

    logits: fp32 `[n, V]`, not changed. Returns fp32 `[n, V]`: scaled logits, -inf where a token
    was cut. The meaning is that of transformers' warpers: top_k keeps every token that ties with
    the k-th; top_p always keeps one token, and of those that tie at its border cuts the lowest ids
    (transformers leaves this choice to an unstable sort); typical_p keeps all that tie there.
    """
    scores = _scale(logits, params)
    cut = [i for i, p in enumerate(params) if _is_cut(p, logits.shape[1])]
    if scores.device.type != "cpu":
        return _cut_batch(scores, params) if cut else scores
    for i in cut:
        row, kept = scores[i], _kept_tokens(scores[i], params[i])
        values = row[kept]
        row.fill_(-torch.inf)
        row[kept] = values
    return scores


def draw(
    logits: Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    num_valid: int | None = None,
) -> Tensor:
    """The token of each row, int64 `[n]` on the logits' device.

    A row with temperature 0 takes its argmax, any other argmax(processed + G); the lowest id wins
    ties. logits: `[n, V]`; positions: the absolute index of the token being drawn; ids from
    `num_valid` on are padding and never drawn. A row whose logits have no finite maximum (NaN,
    +inf, nothing but -inf) gets `NO_TOKEN`, and no other row notices.
    """
    assert logits.shape[0] == len(params) == len(positions)
    logits = logits[:, :num_valid].float()
    ids = torch.full((len(params),), NO_TOKEN, device=logits.device)
    greedy = [i for i, p in enumerate(params) if _is_greedy(p)]
    if greedy:
        rows = _row_index(greedy, logits)
        best, tokens = _argmax(logits[rows])
        ids[rows] = tokens.where(best.isfinite(), NO_TOKEN)
    sampled = [i for i, p in enumerate(params) if not _is_greedy(p)]
    if sampled:
        rows = _row_index(sampled, logits)
        chosen = [params[i] for i in sampled]
        keys = row_keys([p.seed for p in chosen], [positions[i] for i in sampled], logits.device)
        ids[rows] = _sample(logits[rows], chosen, keys)
    return ids


def _argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Greatest value and its lowest id, per row `[n, V]`. NaN counts as the greatest.

    In two steps, the best block and the best in it: on CPUs torch finds a maximum at the speed of
    memory, but where it is ten times more slowly.
    """
    whole = logits.shape[1] // _BLOCK * _BLOCK
    if logits.device.type != "cpu" or not whole:
        best, tokens = logits.max(dim=-1)
        return best, tokens
    blocks = logits[:, :whole].view(len(logits), -1, _BLOCK)
    block = blocks.amax(dim=-1).argmax(dim=-1)
    best, inside = blocks[torch.arange(len(logits)), block].max(dim=-1)
    tokens = block * _BLOCK + inside
    if whole < logits.shape[1]:
        rest, position = logits[:, whole:].max(dim=-1)
        is_rest = (rest > best) | (rest.isnan() & ~best.isnan())
        best, tokens = rest.where(is_rest, best), (position + whole).where(is_rest, tokens)
    return best, tokens


def _sample(logits: Tensor, params: Sequence[SamplingParams], keys: Tensor) -> Tensor:
    if logits.device.type != "cpu":
        scores = process_logits(logits, params)
        return argmax_dense(scores, keys).where(scores.amax(dim=-1).isfinite(), NO_TOKEN)
    ids = torch.empty_like(keys)
    for start in range(0, len(params), _GROUP):
        part = slice(start, start + _GROUP)
        scores = logits[part]
        if any(p.temperature != 1.0 for p in params[part]):
            scores = _scale(scores, params[part])
        candidates = _candidates(scores, params[part], keys[part])
        tokens = argmax_among(scores, keys[part], *candidates)
        ids[part] = tokens.where(scores.amax(dim=-1).isfinite(), NO_TOKEN)
    return ids


def _candidates(
    scores: Tensor, params: Sequence[SamplingParams], keys: Tensor
) -> tuple[Tensor, Tensor]:
    """The tokens that can be drawn: rows and ids. What a row's truncation cut gets no noise."""
    rows, tokens = [], []
    whole = [i for i, p in enumerate(params) if not _is_cut(p, scores.shape[1])]
    if whole:
        index = _row_index(whole, scores)
        row, token = possible_winners(scores[index], keys[index])
        rows.append(torch.tensor(whole)[row])
        tokens.append(token)
    for i, p in enumerate(params):
        if _is_cut(p, scores.shape[1]):
            tokens.append(_kept_tokens(scores[i], p))
            rows.append(torch.full_like(tokens[-1], i))
    return torch.cat(rows), torch.cat(tokens)


def _is_greedy(params: SamplingParams) -> bool:
    return params.temperature == 0.0


def _is_cut(params: SamplingParams, vocab_size: int) -> bool:
    """Whether truncation can take any token from the row."""
    return not _is_greedy(params) and any(True for _ in _cuts(params, vocab_size))


def _row_index(rows: list[int], like: Tensor) -> Tensor | slice:
    """An index of `rows`; all of them are a slice, which copies nothing."""
    if len(rows) == like.shape[0]:
        return slice(None)
    return torch.tensor(rows, device=like.device)


def _scale(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    by = [1.0 if _is_greedy(p) else max(p.temperature, _MIN_TEMPERATURE) for p in params]
    return logits / logits.new_tensor(by)[:, None]


def _kept_tokens(scores: Tensor, params: SamplingParams) -> Tensor:
    """The tokens of one row `[V]` that its truncations leave, in the order of their ids."""
    kept = None
    for cut in _cuts(params, len(scores)):
        chosen = cut(scores)
        scores = scores[chosen]
        kept = chosen if kept is None else kept[chosen]
        if not len(kept):  # of garbage
            break
    assert kept is not None
    return kept


def _cuts(params: SamplingParams, vocab_size: int) -> Iterator[Callable[[Tensor], Tensor]]:
    """The truncations that take anything, in order: from the scores of one row, what stays."""
    if 0 < params.top_k < vocab_size:
        yield lambda scores: _indices(scores >= scores.topk(params.top_k).values[-1])
    if params.top_p < 1.0:
        yield lambda scores: _nucleus(scores, 1.0 - params.top_p)
    if params.min_p > 0.0:
        yield lambda scores: _indices(~_is_unlikely(scores, _log_bar(params)))
    if params.typical_p < 1.0:
        yield lambda scores: _indices(_typical(scores, params.typical_p))


def _indices(mask: Tensor) -> Tensor:
    return mask.nonzero().squeeze(1)


def _log_bar(params: SamplingParams) -> float:
    """How far below the likeliest token's score a score may be under min_p, as a number <= 0."""
    return math.log(params.min_p) if params.min_p > 0 and not _is_greedy(params) else -math.inf


def _is_unlikely(scores: Tensor, log_bar: Tensor | float) -> Tensor:
    """Which tokens min_p cuts; of scores instead of probabilities, so that no sum is rounded."""
    return scores - scores.amax(dim=-1, keepdim=True) < log_bar


def _surprise_gap(scores: Tensor) -> Tensor:
    """How far each token's -log p is from the entropy of its row."""
    log_probs = scores.log_softmax(dim=-1)
    entropy = -(log_probs.exp() * log_probs).nansum(dim=-1, keepdim=True)
    return (log_probs + entropy).abs_()


def _typical(scores: Tensor, mass: float) -> Tensor:
    """Which tokens of one row stay: those nearest to its entropy, until `mass` is reached.

    Only tokens within a radius that holds the mass are sorted. What NaN makes stays.
    """
    probs, gaps = scores.softmax(dim=-1), _surprise_gap(scores)
    for radius in (*_RADII, math.inf):
        near = ~(gaps > radius)
        if probs.where(near, 0.0).sum(dtype=torch.float64) > mass + _SLACK:
            break
    ascending, order = gaps[near].sort()
    last = (_mass(probs[near][order]) < mass).sum().clamp(max=len(order) - 1)
    return ~(gaps > ascending[last])


def _nucleus(scores: Tensor, budget: float) -> Tensor:
    """The tokens of one row that stay when the least likely ones of mass `budget` go; ascending.

    Only tokens that can stay are sorted. Those below budget / V go in whatever order the others
    come; and with what they leave of the budget, the same is true once more of the rest.
    """
    probs = scores.softmax(dim=-1)
    tokens = (probs >= _SAFETY * budget / max(1, len(probs))).nonzero().squeeze(1)
    probs64 = probs[tokens].double()
    tail = float(probs.sum(dtype=torch.float64) - probs64.sum())
    strong = probs64 >= _SAFETY * (budget - tail) / max(1, len(tokens))
    tail += float(probs64.where(~strong, 0.0).sum())
    tokens, probs64 = tokens[strong], probs64[strong]
    order = scores[tokens].sort(stable=True).indices
    kept = _mass(probs64[order], tail) > scores.new_tensor(budget)
    kept[-1:] = True
    return tokens[order[kept].sort().values]


def _mass(probs: Tensor, tail: float = 0.0) -> Tensor:
    """The mass up to each of the ascending probabilities: summed in fp64, rounded to fp32 once."""
    return probs.cumsum(dim=-1, dtype=torch.float64).add_(tail).float()


def _cut_batch(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """All truncations over all rows at once; neutral values where a row has none."""
    vocab_size = scores.shape[1]
    top_k = [p.top_k if p.top_k and not _is_greedy(p) else vocab_size for p in params]
    if min(top_k) < vocab_size:
        top_k = [min(k, vocab_size) for k in top_k]
        num_best = max(k for k in top_k if k < vocab_size)
        best = scores.topk(num_best, dim=-1).values
        index = torch.tensor(top_k, device=scores.device)[:, None]
        last = best.gather(1, index.clamp(max=num_best) - 1)
        scores = scores.masked_fill((scores < last) & (index < vocab_size), -torch.inf)
    top_p = [1.0 if _is_greedy(p) else p.top_p for p in params]
    if min(top_p) < 1.0:
        # A row with top_p 1 keeps even the tokens whose probability underflows to 0.
        budget = scores.new_tensor([1.0 - p if p < 1.0 else -1.0 for p in top_p])[:, None]
        ascending, order = scores.sort(dim=-1, stable=True)
        removed = _mass(ascending.softmax(dim=-1)) <= budget
        removed[:, -1] = False
        scores = scores.masked_fill(removed.scatter(1, order, removed), -torch.inf)
    return _cut_batch_further(scores, params)


def _cut_batch_further(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """min_p and typical_p, the end of `_cut_batch`."""
    log_bar = [_log_bar(p) for p in params]
    if max(log_bar) > -math.inf:
        unlikely = _is_unlikely(scores, scores.new_tensor(log_bar)[:, None])
        scores = scores.masked_fill(unlikely, -torch.inf)
    # No mass reaches 2, so that row's border is its last token.
    typical_p = [2.0 if _is_greedy(p) or p.typical_p == 1.0 else p.typical_p for p in params]
    if min(typical_p) < 1.0:
        gaps = _surprise_gap(scores)
        ascending, order = gaps.sort(dim=-1)
        probs = scores.softmax(dim=-1).gather(1, order)
        last = (_mass(probs) < scores.new_tensor(typical_p)[:, None]).sum(dim=-1, keepdim=True)
        border = ascending.gather(1, last.clamp_(max=scores.shape[1] - 1))
        scores = scores.masked_fill(gaps > border, -torch.inf)
    return scores
