"""Which tokens a target may say at a position, from a drafter's logits: the best few of the draw.

The target says the argmax of its own scores; with the shared noise added where it samples, the
drafter's best are the likeliest. Knows nothing of drafts, blocks and branches. Shapes: n rows,
V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from core.noise import noise_of, row_keys
from core.sampling import process_logits
from core.types import SamplingParams

#: A token that is less likely than so many others is no guess, whatever its noise is.
_NUM_CANDIDATES = 256


def best_tokens(
    logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int], count: int
) -> list[list[int]]:
    """Per row at most `count` tokens, best first; fewer where the others have no chance.

    logits: fp32 `[n, V]`, not changed; positions: where the tokens stand. A row whose logits are
    no numbers has none.
    """
    scores = process_logits(logits, params)
    is_greedy = torch.tensor([p.temperature == 0 for p in params], device=logits.device)
    num_candidates = count if bool(is_greedy.all()) else max(count, _NUM_CANDIDATES)
    values, tokens = scores.topk(min(num_candidates, scores.shape[1]), dim=-1)
    values = values.double()
    if num_candidates > count:
        keys = row_keys([p.seed for p in params], positions, logits.device)
        values += noise_of(keys, tokens).masked_fill_(is_greedy[:, None], 0.0)
        order = values.topk(min(count, values.shape[1]), dim=-1).indices
        values, tokens = values.gather(1, order), tokens.gather(1, order)
    pairs = zip(tokens.tolist(), values.isfinite().tolist(), strict=True)
    return [[token for token, has_chance in zip(*row, strict=True) if has_chance] for row in pairs]
