"""From a drafter's logits to its next tokens: what every kind with a model has in common.

A draft in the making grows token by token; its logits pass the same processors as the target's,
except for a constraint, so that it is likely to say what the target may say. Where the rule needs
distributions, `drafter_service.distributions` samples and reports them; elsewhere tokens are drawn
as the target draws them, with the noise of their position. Knows nothing of models and caches.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from core.drafter import Draft, DraftJob
from core.processors import History, HistoryRow, apply_history
from core.sampling import NO_TOKEN, draw, process_logits
from core.types import Rule, SparseDistribution
from drafter_service.distributions import Distributions
from drafter_service.guesses import best_tokens


@dataclass(slots=True)
class DraftInProgress:
    """A draft in the making; `is_done` when nothing more is to be drawn for it.

    behind: tokens between the job's committed ones and the draft, where it is for an outcome that
        is only foreseen.
    guesses: for each drafted token the others that might have been drawn, likeliest first.
    """

    job: DraftJob
    history: History | None
    token_ids: list[int]
    distributions: list[SparseDistribution]
    is_done: bool
    behind: tuple[int, ...] = ()
    guesses: list[tuple[int, ...]] = field(default_factory=list)

    def fork(self, behind: Sequence[int], num_draft_tokens: int) -> "DraftInProgress":
        """An empty draft behind tokens that may follow this one's job."""
        job = replace(self.job, num_draft_tokens=num_draft_tokens)
        return DraftInProgress(job, self.history, [], [], False, tuple(behind))

    @property
    def position(self) -> int:
        """Where the next token of the draft will stand."""
        return len(self.job.token_ids) + len(self.behind) + len(self.token_ids)

    @property
    def has_distributions(self) -> bool:
        """Whether the rule looks at them. At temperature 0 a draft is deterministic, and only
        ENSEMBLE mixes the distribution at temperature 1 with the target's, as transformers does."""
        sampling = self.job.sampling
        needed = sampling.rule.needs_distributions
        return needed and (sampling.temperature > 0 or sampling.rule is Rule.ENSEMBLE)

    def add(self, token_id: int, distribution: SparseDistribution | None = None) -> None:
        """Append what was drawn; NO_TOKEN (logits that are not numbers) ends the draft early."""
        self.is_done = token_id == NO_TOKEN or len(self.token_ids) + 1 >= self.job.num_draft_tokens
        if token_id == NO_TOKEN:
            return
        self.token_ids.append(token_id)
        if distribution is not None:
            self.distributions.append(distribution)

    def restore(self, token_id: int, guesses: tuple[int, ...]) -> None:
        """Append what was drawn before, and the others that might have been."""
        self.add(token_id)
        self.guesses.append(guesses)

    def guess(self, token_id: int, best: Sequence[int]) -> None:
        """Remember the likeliest tokens beside the one that was drawn last."""
        if token_id != NO_TOKEN:
            others = [token for token in best if token != token_id]
            self.guesses.append(tuple(others[: self.job.num_guesses]))

    def end(self) -> Draft:
        """The draft."""
        return Draft(tuple(self.token_ids), tuple(self.distributions))


class DraftDrawer:
    """Draws tokens for drafts in the making.

    vocab_size: columns of the logits. num_valid: ids from here on are padding and never drawn.
    top_q: most tokens with a chance in the distributions that rules ask for.
    """

    def __init__(self, vocab_size: int, num_valid: int, top_q: int = 64) -> None:
        self._vocab_size = vocab_size
        self._num_valid = num_valid
        self._top_q = top_q
        self._histories: dict[int, History] = {}

    def begin(self, job: DraftJob) -> DraftInProgress:
        """An empty draft for a job."""
        return DraftInProgress(job, self._history(job), [], [], job.num_draft_tokens == 0)

    def close(self, sequence: int) -> None:
        """Forget what parameters look back at; unknown sequences are ignored."""
        self._histories.pop(sequence, None)

    def add(self, logits: Tensor, drafts: Sequence[DraftInProgress]) -> None:
        """Give each draft its next token, from its row of `[len(drafts), vocab_size]` fp32 logits,
        which are changed in place."""
        looking_back = [
            HistoryRow(draft.history, row, prefix=(*draft.behind, *draft.token_ids))
            for row, draft in enumerate(drafts)
            if draft.history is not None
        ]
        apply_history(logits, looking_back)
        logits = logits[:, : self._num_valid]
        drawn = [i for i, draft in enumerate(drafts) if not draft.has_distributions]
        if drawn:
            self._draw(_rows(logits, drawn), [drafts[i] for i in drawn])
        sampled = [i for i, draft in enumerate(drafts) if draft.has_distributions]
        if sampled:
            self._sample(_rows(logits, sampled), [drafts[i] for i in sampled])

    def _history(self, job: DraftJob) -> History | None:
        """What the job's parameters look back at, if they do: exactly the job's tokens."""
        if not History.needed(job.sampling):
            return None
        history = self._histories.get(job.sequence)
        if history is None or history.params != job.sampling:
            history = History(job.sampling, self._vocab_size)
            self._histories[job.sequence] = history
        agreed = min(job.num_unchanged, len(history), len(job.token_ids))
        history.truncate(agreed)
        history.extend(job.token_ids[agreed:])
        return history

    def _draw(self, logits: Tensor, drafts: Sequence[DraftInProgress]) -> None:
        """Each draft's next token as the target would draw it."""
        params = [draft.job.sampling for draft in drafts]
        positions = [draft.position for draft in drafts]
        drawn = draw(logits, params, positions).tolist()
        for draft, token_id in zip(drafts, drawn, strict=True):
            draft.add(token_id)
        guessing = [i for i, draft in enumerate(drafts) if draft.job.num_guesses]
        if guessing:
            count = 1 + max(drafts[i].job.num_guesses for i in guessing)
            chosen = [params[i] for i in guessing], [positions[i] for i in guessing]
            for i, best in zip(
                guessing, best_tokens(_rows(logits, guessing), *chosen, count), strict=True
            ):
                drafts[i].guess(drawn[i], best)

    def _sample(self, logits: Tensor, drafts: Sequence[DraftInProgress]) -> None:
        """Each draft's next token from its own distribution, which is kept beside it."""
        params = [draft.job.sampling for draft in drafts]
        distributions = Distributions.of(process_logits(logits, params), self._top_q)
        sampled = distributions.sample(
            [each.seed for each in params],
            [len(draft.job.token_ids) for draft in drafts],
            [len(draft.token_ids) for draft in drafts],
        ).tolist()
        likeliest = distributions.likeliest().tolist()
        for i, (draft, distribution) in enumerate(zip(drafts, distributions.sparse(), strict=True)):
            draft.add(sampled[i] if params[i].temperature > 0 else likeliest[i], distribution)


def _rows(logits: Tensor, rows: list[int]) -> Tensor:
    """Some rows of `[n, V]`; all of them without a copy."""
    return logits if len(rows) == len(logits) else logits[torch.tensor(rows, device=logits.device)]
