"""What speculation did in one verify step, for the request's statistics.

Pure policy; reads a sequence's state at the moment its row is formed, changes its statistics only.
"""

from typing import TYPE_CHECKING

from core.types import Branch, Rule, VerifyRow

if TYPE_CHECKING:
    from orchestrator.pipeline import Sequence


def count_step(sequence: "Sequence", draft: tuple[int, ...], branch: Branch | None) -> None:
    """Count the step that verifies `draft`, the part that is worth it of `branch`.

    A row that had a plan to come and goes with another drafter's draft, or with none, is a fallback
    step, under the cause of it.
    """
    stats = sequence.stats
    stats.num_verify_steps += 1
    near = sequence.near
    is_fallback = branch is not None and branch is near.branch and near.is_fallback
    if branch is not None and not is_fallback:
        stats.num_plan_hits += 1
    if draft:
        stats.num_spec_steps += 1
    if is_fallback:
        stats.fallback_steps["attached"] += 1
    elif not draft:
        stats.fallback_steps[_fallback_cause(sequence, branch)] += 1


def count_verdict(sequence: "Sequence", row: VerifyRow, num_committed: int, delivered: int) -> None:
    """Count what a row's verdict committed; `delivered` of these tokens were drafted."""
    stats = sequence.stats
    if sequence.request.sampling.rule is Rule.ENSEMBLE:
        num_alone = max(0, num_committed - len(row.draft_distributions))
        stats.num_tokens_without_distributions += num_alone
    if row.draft_token_ids:
        histogram = stats.acceptance_histogram
        histogram.extend([0] * (delivered + 1 - len(histogram)))
        histogram[delivered] += 1
        stats.num_accepted_draft_tokens += delivered


def _fallback_cause(sequence: "Sequence", branch: Branch | None) -> str:
    """Why a step has no draft."""
    if sequence.is_prompt_pending:
        return "prompt"
    if sequence.no_draft_cause:
        return sequence.no_draft_cause
    if not sequence.has_drafter:
        return sequence.absence
    if branch is not None:
        return "not_worth_it" if branch.draft_token_ids else "no_guess"
    if sequence.num_wanted:  # patience that ends is followed by impatient rounds
        return "late" if sequence.impatient_rounds else "not_waited_for"
    return "not_worth_it" if sequence.num_worthwhile == 0 else "last_token"
