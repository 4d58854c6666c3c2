"""REJECTION, TOKEN_REJECTION and ENSEMBLE on a batch: logits in, verdicts out.

`verifier_service.odds` says what each rule makes of p and q; here p is read from the logits, the
uniforms are compared, and the target's own token is drawn. The device is read twice, whatever the
number of blocks: for p at the tokens that q names, and for the tokens drawn.

Every chance is keyed by seed, start of the block and index in it (`core.noise`), so a repeated call
gives the same verdict. Knows nothing of caches, sequences or messages.

Shapes: n rows of logits, V vocabulary, S tokens that all q's together name, B blocks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from core.errors import InvalidRequestError
from core.noise import NO_TOKEN, accept_uniform, argmax_noisy, correction_keys
from core.sampling import process_logits
from core.types import Rule
from verifier_service.blocks import Block, Outcome
from verifier_service.odds import (
    Chances,
    Guess,
    count_accepted,
    likeliest,
    odds,
    read_guesses,
    residual,
)


@dataclass(frozen=True, slots=True)
class _Row:
    """One row of scores: whether its maximum is finite, where it is, sum(exp(score - maximum))."""

    fit: bool
    best_token: int
    total: float


@dataclass(slots=True)
class _Trial:
    """A block on its way to a verdict. `start` is its first row of logits."""

    block: Block
    start: int
    guesses: list[Guess]
    chances: list[Chances] = field(default_factory=list)
    rows: list[_Row] = field(default_factory=list)
    accepted: int = 0
    scale: float = 0.0
    """A token is drawn behind a rejected one, from max(scale p - q, 0); 0: drawn from p."""
    token: int = NO_TOKEN


def reject(logits: Tensor, blocks: Sequence[Block]) -> list[Outcome]:
    """One outcome per block, in order. logits: `[sum(k + 1), V]`, -inf for forbidden tokens."""
    outcomes: dict[int, Outcome] = {}
    trials: dict[int, _Trial] = {}
    start = 0
    for i, block in enumerate(blocks):
        try:
            trials[i] = _Trial(block, start, _guesses(block))
        except InvalidRequestError as error:
            outcomes[i] = Outcome(0, (), str(error))
        start += block.num_rows
    if trials:
        params = [block.params for block in blocks for _ in range(block.num_rows)]
        _try(list(trials.values()), logits, process_logits(logits.float(), params))
    for i, trial in trials.items():
        outcomes[i] = trial.block.outcome(trial.accepted, trial.token)
    return [outcomes[i] for i in range(len(blocks))]


def _guesses(block: Block) -> list[Guess]:
    if block.params.rule is Rule.ENSEMBLE and block.draft_token_ids and not block.distributions:
        raise InvalidRequestError("draft_distributions", "ENSEMBLE needs them with every draft")
    return read_guesses(block.draft_token_ids, block.distributions)


def _try(trials: Sequence[_Trial], logits: Tensor, scores: Tensor) -> None:
    """Set what is accepted of each draft, and the target's own token behind it."""
    best, tokens = scores.max(dim=-1, keepdim=True)
    scores -= best  # ours: process_logits copies
    _look(trials, logits, scores, torch.cat([best.isfinite(), tokens], dim=1))
    for trial in trials:
        if trial.block.params.temperature > 0:
            _decide(trial)
        else:
            _decide_greedy(trial)
    drawing = [t for t in trials if t.block.params.temperature > 0 and t.rows[t.accepted].fit]
    if drawing:
        tokens = argmax_noisy(own_scores(drawing, scores), _keys(drawing, scores.device))
        for trial, token in zip(drawing, tokens.tolist(), strict=True):
            trial.token = token


def _look(trials: Sequence[_Trial], logits: Tensor, scores: Tensor, best: Tensor) -> None:
    """Set the trials' rows and chances.

    scores: `[n, V]`, less each row's largest; best: `[n, 2]`, whether that is finite and its token.
    """
    guesses = [(t.start + i, guess) for t in trials for i, guess in enumerate(t.guesses)]
    sizes = [guess.q.size for _, guess in guesses]
    ids = np.concatenate([np.zeros(0, np.int64), *[guess.token_ids for _, guess in guesses]])
    known = (ids >= 0) & (ids < scores.shape[1])
    index = np.stack([np.repeat([row for row, _ in guesses], sizes), np.where(known, ids, 0)])
    rows, tokens = torch.from_numpy(index.astype(np.int64)).to(scores.device)
    # fp32 exponentials are good to 1e-7 each; their sum over a vocabulary is better kept in fp64.
    # Row by row: on CPUs a temporary of all rows costs more than the exponentials.
    total = torch.stack([row.exp().sum(dtype=torch.float64) for row in scores])
    p = scores[rows, tokens].double().exp() / total[rows]
    allowed = logits[rows, tokens] > -torch.inf
    facts = torch.cat([best.T.flatten(), total, p, allowed]).cpu().numpy()
    n = len(scores)
    *by_row, p_known, may = np.split(facts, [n, 2 * n, 3 * n, 3 * n + len(ids)])
    views = [_Row(bool(a), int(b), float(c)) for a, b, c in zip(*by_row, strict=True)]
    cuts = np.cumsum(sizes)[:-1]
    chances = map(
        Chances, np.split(np.where(known, p_known, 0.0), cuts), np.split(known & (may > 0), cuts)
    )
    for trial in trials:
        trial.rows = views[trial.start : trial.start + trial.block.num_rows]
        trial.chances = [next(chances) for _ in trial.guesses]


def _end_of_fit(trial: _Trial) -> int:
    """Draft tokens that can be judged: an unfit row ends the draft, as if it had been shorter.

    That is no choice by p or by what was drafted there, so it favours nothing.
    """
    return next((i for i, row in enumerate(trial.rows[:-1]) if not row.fit), len(trial.guesses))


def _decide(trial: _Trial) -> None:
    """Compare the uniforms with what they have to stay below."""
    params, end = trial.block.params, _end_of_fit(trial)
    found = odds(params.rule, trial.guesses[:end], trial.chances[:end], params.ensemble_weight)
    uniforms = [accept_uniform(params.seed, trial.block.position, i) for i in range(end)]
    trial.accepted = count_accepted(params.rule, found.thresholds, uniforms)
    if trial.accepted < end:
        trial.scale = found.scales[trial.accepted]


def _decide_greedy(trial: _Trial) -> None:
    """ENSEMBLE at temperature 0: accept while the draft is the argmax of the mixture."""
    end = _end_of_fit(trial)
    for i, drafted in enumerate(trial.block.draft_token_ids[:end]):
        row, weight = trial.rows[i], trial.block.params.ensemble_weight
        guess, seen = trial.guesses[i], trial.chances[i]
        trial.token = likeliest(guess, seen, weight, row.best_token, 1.0 / row.total)
        trial.accepted = i
        if trial.token != drafted:
            return
    trial.accepted = end
    trial.token = trial.rows[end].best_token if trial.rows[end].fit else NO_TOKEN


def own_scores(trials: Sequence[_Trial], scores: Tensor) -> Tensor:
    """Logarithms, up to a constant per row, of what each trial's own token is drawn from: `[B, V]`.

    Off q's tokens the positive part of scale p - q is proportional to p, so only q's are written.
    Where all of it vanishes, p = q up to rounding, and p is drawn from.
    """
    plain = scores[[trial.start + trial.accepted for trial in trials]]
    rows, ids, values = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0)]
    for i, trial in enumerate(trials):
        if trial.scale == 0.0:
            continue
        guess, seen = trial.guesses[trial.accepted], trial.chances[trial.accepted]
        known = (guess.token_ids >= 0) & (guess.token_ids < scores.shape[1])
        shift = math.log(trial.rows[trial.accepted].total) - math.log(trial.scale)
        with np.errstate(divide="ignore"):
            values.append(np.log(residual(guess, seen, trial.scale)[known]) + shift)
        ids.append(guess.token_ids[known])
        rows.append(np.full(ids[-1].size, i))
    index = torch.from_numpy(np.stack([np.concatenate(rows), np.concatenate(ids)]))
    corrected = plain.clone()
    corrected[*index.to(scores.device)] = torch.from_numpy(np.concatenate(values)).to(scores)
    return corrected.where(corrected.amax(dim=-1, keepdim=True) > -torch.inf, plain)


def _keys(trials: Sequence[_Trial], device: torch.device) -> Tensor:
    seeds = [trial.block.params.seed for trial in trials]
    starts = [trial.block.position for trial in trials]
    return correction_keys(seeds, starts, [trial.accepted for trial in trials], device)
