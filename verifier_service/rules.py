"""The rules of verification: logits and drafts in, verdicts out. Exactness lives here.

    p   the target's distribution at a position, after every processor, temperature and truncation
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

The other rules look at q and accept by chance; they are in `verifier_service.rejection`.
Knows nothing of models, caches, sequences or messages. See docs/losslessness.md.
"""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from core.errors import InvalidRequestError
from core.sampling import NO_TOKEN, draw
from core.types import Rule, SamplingParams
from verifier_service.blocks import Block, Outcome
from verifier_service.rejection import reject

__all__ = ["Block", "Outcome", "check_sampling", "verdicts"]


def check_sampling(params: SamplingParams) -> None:
    """Raise InvalidRequestError, naming the field, unless `verdicts` can serve these parameters.

    Ids are not compared with a vocabulary here, nor is a constraint compiled.
    """
    _check_numbers(params)
    rule, temperature = params.rule, params.temperature
    if rule is Rule.GREEDY and temperature > 0:
        raise _invalid("rule", f"GREEDY needs temperature 0, not {temperature}")
    if rule in (Rule.REJECTION, Rule.TOKEN_REJECTION) and temperature == 0:
        raise _invalid("rule", f"{rule.name} needs a temperature above 0")
    if rule is Rule.ENSEMBLE and not 0 < params.ensemble_weight < 1:
        raise _invalid("ensemble_weight", f"must be in (0, 1), not {params.ensemble_weight}")


def _check_numbers(params: SamplingParams) -> None:
    """Ranges, one by one. A comparison with NaN is false, so each is put as what must hold."""
    largest = 1e6  # beyond it a sum with logits says nothing any more
    checks = (
        ("temperature", 0 <= params.temperature < math.inf, "at least 0 and finite"),
        ("top_k", params.top_k >= 0, "at least 0"),
        ("top_p", 0 < params.top_p <= 1, "in (0, 1]"),
        ("min_p", 0 <= params.min_p <= 1, "in [0, 1]"),
        ("typical_p", 0 < params.typical_p <= 1, "in (0, 1]"),
        ("seed", 0 <= params.seed < 1 << 64, "in [0, 2^64)"),
        ("repetition_penalty", 0 < params.repetition_penalty < math.inf, "above 0 and finite"),
        ("presence_penalty", abs(params.presence_penalty) <= largest, "finite and modest"),
        ("frequency_penalty", abs(params.frequency_penalty) <= largest, "finite and modest"),
        ("no_repeat_ngram_size", params.no_repeat_ngram_size >= 0, "at least 0"),
        ("min_new_tokens", params.min_new_tokens >= 0, "at least 0"),
        ("num_prompt_tokens", params.num_prompt_tokens >= 0, "at least 0"),
    )
    for name, holds, words in checks:
        if not holds:
            raise _invalid(name, f"must be {words}, not {getattr(params, name)}")
    for token_id, bias in params.logit_bias:
        if token_id < 0 or math.isnan(bias) or bias == math.inf:
            raise _invalid("logit_bias", f"token {token_id} cannot get a bias of {bias}")
    if any(not ids or min(ids) < 0 for ids in params.bad_words_ids):
        raise _invalid("bad_words_ids", "each must have at least one id, and none below 0")


def _invalid(name: str, message: str) -> InvalidRequestError:
    return InvalidRequestError(f"sampling.{name}", message)


def verdicts(
    logits: Tensor, blocks: Sequence[Block], num_valid: int | None = None
) -> list[Outcome]:
    """One outcome per block, in order; the rules may differ.

    logits: `[sum(k + 1), V]`, each block's rows behind those of the block before, processors
    applied (-inf: must not be committed), temperature and truncation not; ids from `num_valid` on
    are padding. Raises InvalidRequestError for parameters it cannot serve, before anything is
    drawn. Logits without a finite maximum fail their own block, and only if they count; so do
    distributions from which the draft cannot have come.
    """
    for block in blocks:
        check_sampling(block.params)
    sizes = [block.num_rows for block in blocks]
    assert sum(sizes) == logits.shape[0], "each block has k + 1 rows of logits"
    logits = logits[:, :num_valid]
    looks = [block.params.rule.needs_distributions for block in blocks]
    if not any(looks):
        return _agree(logits, blocks)
    parts = torch.split(logits, sizes)
    outcomes: dict[int, Outcome] = {}
    for decide, by_chance in ((_agree, False), (reject, True)):
        chosen = [i for i, look in enumerate(looks) if look is by_chance]
        if chosen:
            rows = torch.cat([parts[i] for i in chosen])
            found = decide(rows, [blocks[i] for i in chosen])
            outcomes.update(zip(chosen, found, strict=True))
    return [outcomes[i] for i in range(len(blocks))]


def _agree(logits: Tensor, blocks: Sequence[Block]) -> list[Outcome]:
    """GREEDY and COUPLED: everything is drawn at once and read from the device once."""
    params = [block.params for block in blocks for _ in range(block.num_rows)]
    positions = [block.position + i for block in blocks for i in range(block.num_rows)]
    drawn = iter(draw(logits, params, positions).tolist())
    return [_outcome(block, list(itertools.islice(drawn, block.num_rows))) for block in blocks]


def _outcome(block: Block, drawn: list[int]) -> Outcome:
    """The verdict on a block for whose positions the target drew `drawn`, `[k + 1]`."""
    accepted = 0
    for drafted, token in zip(block.draft_token_ids, drawn, strict=False):
        if drafted != token or token == NO_TOKEN:
            break
        accepted += 1
    return block.outcome(accepted, drawn[accepted])
