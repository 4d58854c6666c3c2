"""The rules of verification: logits and drafts in, verdicts out. Exactness lives here.

Vocabulary, the same everywhere:

    p   the target's distribution at a position, after temperature, top_k and top_p
    q   the drafter's
    k   draft length: a block of k drafted tokens has k + 1 rows of logits
    j   accepted count, 0..k: the verdict commits j drafted tokens and one of the target's own

    position      P      P+1    ...   P+k-1   P+k
    draft         d_0    d_1    ...   d_k-1
    logits row    0      1      ...   k-1     k       row i has seen the prefix and d_0 .. d_i-1
    target draws  t_0    t_1    ...   t_k-1   t_k

GREEDY and COUPLED are one rule: t_i = argmax p, or argmax(log p + G) with the noise that belongs
to seed and position; j is the length of the common prefix of d and t; t_0 .. t_j is committed.
Row i counts only while d_0 .. d_i-1 equals t_0 .. t_i-1, and then its logits are those of the
committed text. So what is committed is what the target alone would draw, whatever the draft.

Knows nothing of models, caches, sequences or messages. See docs/losslessness.md.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from core.errors import InvalidRequestError
from core.sampling import NO_TOKEN, draw
from core.types import Rule, SamplingParams


@dataclass(frozen=True, slots=True)
class Block:
    """What one verdict is about: k drafted tokens, the first to stand at `position`."""

    params: SamplingParams
    position: int
    draft_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """j and the j + 1 tokens to commit; or why there are none, and then 0 and no tokens."""

    accepted: int
    token_ids: tuple[int, ...]
    failure: str = ""


def check_sampling(params: SamplingParams) -> None:
    """Raise InvalidRequestError, naming the field, unless `verdicts` can serve these parameters."""
    if not (math.isfinite(params.temperature) and params.temperature >= 0):
        raise _invalid("temperature", f"must be at least 0 and finite, not {params.temperature}")
    if params.top_k < 0:
        raise _invalid("top_k", f"must be at least 0, not {params.top_k}")
    if not 0 < params.top_p <= 1:
        raise _invalid("top_p", f"must be in (0, 1], not {params.top_p}")
    if not 0 <= params.seed < 1 << 64:
        raise _invalid("seed", f"must be in [0, 2^64), not {params.seed}")
    if params.rule not in (Rule.GREEDY, Rule.COUPLED):
        raise _invalid("rule", f"{params.rule.name} is not built yet; use GREEDY or COUPLED")
    if params.rule is Rule.GREEDY and params.temperature > 0:
        raise _invalid("rule", f"GREEDY needs temperature 0, not {params.temperature}")


def _invalid(name: str, message: str) -> InvalidRequestError:
    return InvalidRequestError(f"sampling.{name}", message)


def verdicts(
    logits: Tensor, blocks: Sequence[Block], num_valid: int | None = None
) -> list[Outcome]:
    """One outcome per block, in order.

    logits: `[sum(k + 1), V]`, each block's rows behind those of the block before; ids from
    `num_valid` on are padding. Raises InvalidRequestError for parameters it cannot serve, before
    anything is drawn. Logits without a finite maximum fail their own block, and only if they count.
    Everything is drawn at once and read from the device once.
    """
    for block in blocks:
        check_sampling(block.params)
    sizes = [len(block.draft_token_ids) + 1 for block in blocks]
    assert sum(sizes) == logits.shape[0], "each block has k + 1 rows of logits"
    params = [b.params for b, size in zip(blocks, sizes, strict=True) for _ in range(size)]
    positions = [b.position + i for b, size in zip(blocks, sizes, strict=True) for i in range(size)]
    drawn = iter(draw(logits, params, positions, num_valid).tolist())
    return [
        _outcome(block, [next(drawn) for _ in range(size)])
        for block, size in zip(blocks, sizes, strict=True)
    ]


def _outcome(block: Block, drawn: list[int]) -> Outcome:
    """The verdict on a block for whose positions the target drew `drawn`, `[k + 1]`."""
    accepted = 0
    for drafted, token in zip(block.draft_token_ids, drawn, strict=False):
        if drafted != token or token == NO_TOKEN:
            break
        accepted += 1
    if drawn[accepted] == NO_TOKEN:
        where = block.position + accepted
        return Outcome(0, (), f"the target's logits at position {where} have no finite maximum")
    return Outcome(accepted, tuple(drawn[: accepted + 1]))
