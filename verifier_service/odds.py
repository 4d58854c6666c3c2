"""The rules that accept by chance, in numbers alone: no draw is made here.

A block of k drafted tokens d_0 .. d_k-1, each sampled from its q_i, meets the target's p_0 .. p_k.
What a rule then does is fixed by numbers that no chance enters, its `Odds`:

    thresholds h_0 .. h_k-1   token i passes when its uniform in [0, 1) is below h_i
    scales     s_0 .. s_k-1   behind j < k accepted tokens the target's own token is drawn from the
                              normalised positive part of s_j p_j - q_j; behind k from p_k

                     h_i                                s_i            j
    TOKEN_REJECTION  min(1, p/q)                        1              tokens before the first fail
    ENSEMBLE         min(1, 1 - w + w p/q)              1              the same
    REJECTION        S / (S + 1 - s_i+1); last: s_k     see below      last token that passes, + 1

    p/q is at d_i; s_0 = 1, s_i+1 = min(1, s_i p/q); S is the mass of the positive part of
    s_i+1 p_i+1 - q_i+1. Under ENSEMBLE, h is 0 for tokens that the target forbids.

From arXiv 2211.17192 (algorithm 1), 2403.10444 (block verification, algorithm 2) and 2604.07622
(static ensemble). Knows nothing of logits, noise or sequences. q is sparse; p is asked where q is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from core.errors import InvalidRequestError
from core.types import Rule, SparseDistribution

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: fp32 rounding of a whole vocabulary stays below it, a distribution cut but not rescaled above.
_SUM_TOLERANCE: Final = 1e-4


@dataclass(frozen=True, slots=True, eq=False)
class Guess:
    """One drafted token: q over the `[S]` tokens it was sampled from, and its place in them."""

    token_ids: Ints
    q: Floats
    drafted: int


@dataclass(frozen=True, slots=True, eq=False)
class Chances:
    """What the target says of a guess's `[S]` tokens: p, and whether it may commit them at all.

    A token may have p 0 and still be allowed (top_k cut it). Forbidden is what no vocabulary has or
    what a processor took away: a token outside the grammar must not come in by way of q.
    """

    p: Floats
    allowed: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Odds:
    """All that a rule makes of a draft before any chance: `[k]` each, see the module's head."""

    thresholds: tuple[float, ...]
    scales: tuple[float, ...]


def read_guesses(
    draft_token_ids: Sequence[int], distributions: Sequence[SparseDistribution]
) -> list[Guess]:
    """The draft as the rules take it; without distributions, all mass on the drafted tokens.

    q is rescaled in fp64 to sum to 1. Raises InvalidRequestError for what cannot be what the draft
    was sampled from: whatever a rule then did, the text would not follow the target's law.
    """
    if not distributions:
        return [Guess(np.array([x]), np.ones(1), 0) for x in draft_token_ids]
    if len(distributions) != len(draft_token_ids):
        message = f"{len(distributions)} for {len(draft_token_ids)} draft tokens"
        raise InvalidRequestError("draft_distributions", message)
    return [
        _read_guess(f"draft_distributions[{i}]", *pair)
        for i, pair in enumerate(zip(draft_token_ids, distributions, strict=True))
    ]


def _read_guess(field: str, drafted: int, distribution: SparseDistribution) -> Guess:
    token_ids = np.array(distribution.token_ids, np.int64)
    q = np.array(distribution.probabilities, np.float64)
    if token_ids.shape != q.shape:
        raise InvalidRequestError(field, f"{q.size} probabilities for {token_ids.size} tokens")
    total = float(q.sum())
    if not (np.all(q >= 0) and abs(total - 1) <= _SUM_TOLERANCE):  # NaN fails it too
        raise InvalidRequestError(field, f"probabilities from 0 on sum to {total}, not to 1")
    if np.unique(token_ids).size < token_ids.size:
        raise InvalidRequestError(field, "a token is named twice")
    places = np.flatnonzero((token_ids == drafted) & (q > 0))
    if not places.size:
        raise InvalidRequestError(field, f"token {drafted} cannot be sampled from it")
    return Guess(token_ids, q / total, int(places[0]))


def odds(
    rule: Rule, guesses: Sequence[Guess], chances: Sequence[Chances], weight: float = 1.0
) -> Odds:
    """What `rule` makes of a draft. chances: of p_0 .. p_k-1, finite; weight: ENSEMBLE's w."""
    pairs = [
        (float(seen.p[guess.drafted]), float(guess.q[guess.drafted]))
        for guess, seen in zip(guesses, chances, strict=True)
    ]
    ones = (1.0,) * len(pairs)
    if rule is Rule.REJECTION:
        return _block_odds(pairs, guesses, chances)
    if rule is Rule.ENSEMBLE:
        allowed = [bool(c.allowed[g.drafted]) for g, c in zip(guesses, chances, strict=True)]
        ratios = [1.0 - weight + weight * p / q for p, q in pairs]
        kept = [min(1.0, r) if ok else 0.0 for r, ok in zip(ratios, allowed, strict=True)]
        return Odds(tuple(kept), ones)
    return Odds(tuple([min(1.0, p / q) for p, q in pairs]), ones)


def _block_odds(
    pairs: Sequence[tuple[float, float]], guesses: Sequence[Guess], chances: Sequence[Chances]
) -> Odds:
    """Block verification. pairs: p and q of each drafted token."""
    scales = [1.0]
    for p, q in pairs:
        scales.append(min(1.0, scales[-1] * p / q))
    thresholds = []
    for scale, guess, seen in zip(scales[1:], guesses[1:], chances[1:], strict=False):
        surplus = float(residual(guess, seen, scale).sum())
        surplus += scale * max(0.0, 1.0 - float(seen.p.sum()))  # where q is 0
        whole = surplus + (1.0 - scale)
        # Nothing on either side: s_i+1 is 1 and p_i+1 is q_i+1, so what follows passes by itself.
        thresholds.append(surplus / whole if whole > 0 else 1.0)
    thresholds += scales[len(thresholds) + 1 :]  # s_k, if there is a draft
    return Odds(tuple(thresholds), tuple(scales[:-1]))


def count_accepted(rule: Rule, thresholds: Sequence[float], uniforms: Sequence[float]) -> int:
    """j, from one uniform in [0, 1) per threshold. A threshold of 0 never passes, 1 always."""
    passes = [u < h for u, h in zip(uniforms, thresholds, strict=True)]
    if rule is Rule.REJECTION:
        return max((i + 1 for i, passed in enumerate(passes) if passed), default=0)
    return passes.index(False) if False in passes else len(passes)


def residual(guess: Guess, seen: Chances, scale: float) -> Floats:
    """The positive part of `scale` p - q at the guess's tokens, `[S]`; elsewhere it is scale p."""
    return np.maximum(scale * seen.p - guess.q, 0.0)


def likeliest(
    guess: Guess, seen: Chances, weight: float, best_token: int, best_chance: float
) -> int:
    """argmax(w p + (1 - w) q) of the allowed tokens, the lowest id of those that tie.

    best_token: the argmax of p, and `best_chance` its p. Of the tokens where q is 0 no other can
    win.
    """
    best_id, best = best_token, weight * best_chance
    mixture = weight * seen.p + (1.0 - weight) * guess.q
    for token, value in zip(guess.token_ids[seen.allowed], mixture[seen.allowed], strict=True):
        if value > best or (value == best and token < best_id):
            best_id, best = int(token), float(value)
    return best_id
