"""What of a drafter's branch may go to the target: a drafter is another process and may be wrong.

Pure policy; knows nothing of sequences. For most rules every draft is safe whose ids exist, and it
is cut before the first that does not. Rules that accept by chance are exact only if the draft's
length does not depend on what was sampled: a sampled draft is taken whole or not at all. (To drop
it is no loss: a drafter that samples ids the target lacks is broken.) Later cuts are blind: the
request's own limits and the controller's lengths know the past only.
"""

import itertools
import math
from dataclasses import replace

from core.params import Rule, SparseDistribution
from core.types import Branch

_SUM_TOLERANCE = 1e-4  # fp32 rounding stays far below


def usable_branch(branch: Branch, rule: Rule, num_ids: int) -> tuple[Branch, str]:
    """The part of a branch that can be verified under `rule`, and why the rest cannot, or "".

    num_ids: ids the target has. The causes are "invalid_id"; "invalid_distribution": not what its
    token can have been sampled from; "no_distributions": ENSEMBLE cannot do without.
    """
    ids, distributions = branch.draft_token_ids, branch.draft_distributions
    draft = tuple(itertools.takewhile(lambda token_id: 0 <= token_id < num_ids, ids))
    cause = "invalid_id" if len(draft) < len(ids) else ""
    if not rule.needs_distributions:
        return replace(branch, draft_token_ids=draft, draft_distributions=()), cause
    if not distributions:  # deterministic, and so is where it is cut
        if rule is Rule.ENSEMBLE and ids:
            draft, cause = (), "no_distributions"
        return replace(branch, draft_token_ids=draft), cause
    if not cause and not _fit(ids, distributions, num_ids):
        cause = "invalid_distribution"
    if cause:
        return replace(branch, draft_token_ids=(), draft_distributions=()), cause
    return branch, ""


def _fit(ids: tuple[int, ...], distributions: tuple[SparseDistribution, ...], num_ids: int) -> bool:
    """Whether each token can have been sampled from its distribution, over ids that exist."""
    if len(ids) != len(distributions):
        return False
    for token_id, distribution in zip(ids, distributions, strict=True):
        chances = dict(zip(distribution.token_ids, distribution.probabilities, strict=False))
        if not len(chances) == len(distribution.token_ids) == len(distribution.probabilities):
            return False
        if not (chances.get(token_id, 0.0) > 0 and min(chances.values()) >= 0):
            return False
        if not (min(chances) >= 0 and max(chances) < num_ids):
            return False
        if not abs(math.fsum(distribution.probabilities) - 1) <= _SUM_TOLERANCE:  # NaN fails it
            return False
    return True
