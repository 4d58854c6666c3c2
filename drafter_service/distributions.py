"""q: what a draft token is sampled from, in the form in which it travels.

The order is what makes the verifier's rule exact: processed scores are cut to the likeliest
tokens, normalised and rounded to fp32 first, and only then is a token sampled, from the numbers
that are reported. They sum to 1 but for that rounding: q is each of them over their sum, which
argmax(log q + G) need not know.

The noise is the drafter's own, independent of what the verifier draws, and keyed by the block in
which the token stands (`core.noise`): a repeated job draws the same draft, the next block another.

Knows nothing of models, jobs or rules. Shapes: n rows, V vocabulary, S tokens with a chance.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from core.noise import NO_TOKEN, argmax_among, draft_keys
from core.types import SparseDistribution


@dataclass(frozen=True, slots=True)
class Distributions:
    """One q per row: ids, ascending, `[n, S]`, and their probabilities, fp32 `[n, S]`.

    A row whose scores have no finite maximum has NaN for probabilities.
    """

    token_ids: Tensor
    probabilities: Tensor
    vocab_size: int

    @classmethod
    def of(cls, scores: Tensor, top_q: int) -> "Distributions":
        """Of processed scores `[n, V]`, -inf for no chance: at most `top_q` tokens a row."""
        best = scores.topk(min(top_q, scores.shape[1]), dim=-1)
        token_ids, order = best.indices.sort(dim=-1)
        probabilities = best.values.gather(1, order).double().softmax(dim=-1).float()
        return cls(token_ids, probabilities, scores.shape[1])

    def likeliest(self) -> Tensor:
        """The likeliest token of each row, int64 `[n]`, or NO_TOKEN."""
        best, index = self.probabilities.max(dim=-1)
        return self.token_ids.gather(1, index[:, None])[:, 0].where(best.isfinite(), NO_TOKEN)

    def sample(self, seeds: Sequence[int], starts: Sequence[int], indices: Sequence[int]) -> Tensor:
        """A token per row, int64 `[n]`, or NO_TOKEN: argmax(log q + G) with the noise of token
        `indices` in the block at `starts`."""
        size, device = self.token_ids.shape, self.token_ids.device
        keys = draft_keys(seeds, starts, indices, device)
        scores = torch.full((size[0], self.vocab_size), -torch.inf, device=device).double()
        scores.scatter_(1, self.token_ids, self.probabilities.double().log())
        rows = torch.arange(size[0], device=device).repeat_interleave(size[1])
        return argmax_among(scores, keys, rows, self.token_ids.flatten())

    def sparse(self) -> list[SparseDistribution]:
        """Row by row as they travel: the tokens with a chance."""
        rows = zip(self.token_ids.tolist(), self.probabilities.tolist(), strict=True)
        return [_sparse(*row) for row in rows]


def _sparse(token_ids: list[int], probabilities: list[float]) -> SparseDistribution:
    pairs = [pair for pair in zip(token_ids, probabilities, strict=True) if pair[1] > 0]
    return SparseDistribution(tuple([t for t, _ in pairs]), tuple([p for _, p in pairs]))
