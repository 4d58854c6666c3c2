"""From logits to verdicts: log-probabilities, processors, constraint, rule, in this order.

A `Drawer` is what one open sequence needs for it: its parameters and what they remember of the
committed tokens. Everything remembered is brought to the row's own prefix first, so repeating a
row gives the same verdict, and nothing of a draft stays behind. Log-probabilities are the target's
own, before any processor. Knows nothing of caches, forwards, streams or messages.

    logits [sum(k + 1), V], a block of k + 1 rows per drawing row, position by position
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from core.constraints import ConstraintCompiler, ConstraintState, apply_masks
from core.errors import InvalidRequestError
from core.params import SamplingParams, SparseDistribution, TokenLogprobs
from core.processors import History, HistoryRow, apply_history
from verifier_service.rules import Block, Outcome, verdicts


class Drawer:
    """Draws for one open sequence. `logprobs`: likeliest tokens to report, None for no report."""

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        logprobs: int | None,
        compiler: ConstraintCompiler | None,
    ) -> None:
        """Raises InvalidRequestError that names a parameter that cannot be honoured."""
        self.params = params
        self.logprobs = logprobs
        self.history = History(params, vocab_size) if History.needed(params) else None
        self.constraint: ConstraintState | None = None
        if params.constraint is not None:
            assert compiler is not None
            self.constraint = compiler.compile(params.constraint)

    @property
    def needs_prefix(self) -> bool:
        """Whether drawing looks at the committed tokens."""
        return self.history is not None or self.constraint is not None

    def sync(self, prefix: Sequence[int], position: int) -> None:
        """Remember exactly `prefix`, whose first `position` tokens have not changed."""
        if self.history is not None:
            self.history.truncate(min(len(self.history), position))
            self.history.extend(prefix[len(self.history) :])


@dataclass(frozen=True, slots=True)
class Draw:
    """A row to decide: where the drawn tokens begin, the draft, and what it was sampled from.

    `prefix`: all committed tokens, where the drawer (in sync with them) needs them.
    """

    drawer: Drawer
    position: int
    draft_token_ids: tuple[int, ...]
    distributions: tuple[SparseDistribution, ...] = ()
    prefix: Sequence[int] = ()

    @property
    def num_rows(self) -> int:
        """Rows of logits."""
        return len(self.draft_token_ids) + 1


@torch.inference_mode()
def decide(
    logits: Tensor, draws: Sequence[Draw], num_valid: int
) -> list[tuple[Outcome, tuple[TokenLogprobs, ...]]]:
    """The outcome of each row, and a report per token where its drawer wants one.

    logits: fp32 `[sum num_rows, V]`, changed in place; ids from `num_valid` on are padding.
    """
    firsts = itertools.accumulate((draw.num_rows for draw in draws), initial=0)
    placed = list(zip(firsts, draws, strict=False))  # the last sum is the end of them all
    reported = {
        index: logits[first : first + draw.num_rows, :num_valid].log_softmax(dim=-1)
        for index, (first, draw) in enumerate(placed)
        if draw.drawer.logprobs is not None
    }
    histories = [
        HistoryRow(draw.drawer.history, first, draw.draft_token_ids)
        for first, draw in placed
        if draw.drawer.history is not None
    ]
    if histories:
        apply_history(logits, histories)
    broken = _constrain(logits, placed)
    blocks = [
        Block(draw.drawer.params, draw.position, draw.draft_token_ids, draw.distributions)
        for draw in draws
    ]
    results = []
    for index, outcome in enumerate(verdicts(logits, blocks, num_valid)):
        report: tuple[TokenLogprobs, ...] = ()
        if index in broken:
            outcome = Outcome(0, (), broken[index])
        if index in reported and not outcome.failure:
            num_top = draws[index].drawer.logprobs or 0
            rows = reported[index][: len(outcome.token_ids)]
            report = token_logprobs(rows, outcome.token_ids, num_top)
        results.append((outcome, report))
    return results


def _constrain(logits: Tensor, placed: Sequence[tuple[int, Draw]]) -> dict[int, str]:
    """Mask what the constraints forbid; returns what is wrong, by the number of the draw."""
    masks, broken = [], {}
    for index, (first, draw) in enumerate(placed):
        if draw.drawer.constraint is not None:
            generated = draw.prefix[draw.drawer.params.num_prompt_tokens :]
            try:
                masks.append((first, draw.drawer.constraint.masks(generated, draw.draft_token_ids)))
            except InvalidRequestError as error:
                broken[index] = str(error)
    apply_masks(logits, masks)
    return broken


def token_logprobs(
    rows: Tensor, token_ids: Sequence[int], num_top: int
) -> tuple[TokenLogprobs, ...]:
    """Reports from log-softmax rows `[n, V]`, one per token."""
    chosen = rows.gather(1, torch.tensor(token_ids, device=rows.device)[:, None])[:, 0].tolist()
    best = rows.topk(num_top, dim=-1)
    ids, values = best.indices.tolist(), best.values.tolist()
    return tuple(
        [TokenLogprobs(c, tuple(i), tuple(v)) for c, i, v in zip(chosen, ids, values, strict=True)]
    )


class PromptReader:
    """Reports the prompt's tokens as they are read: each from the logits of the one before it."""

    def __init__(self, num_top: int) -> None:
        self._num_top = num_top
        self._last: Tensor | None = None  # the row that speaks of the next token to be read

    def read(self, logits: Tensor, token_ids: Sequence[int]) -> tuple[TokenLogprobs, ...]:
        """Read tokens with their logits `[n, V]`; the sequence's very first has no report."""
        rows = logits.log_softmax(dim=-1)
        known = rows[:-1] if self._last is None else torch.cat([self._last, rows[:-1]])
        self._last = rows[-1:]
        return token_logprobs(known, token_ids[len(token_ids) - len(known) :], self._num_top)
