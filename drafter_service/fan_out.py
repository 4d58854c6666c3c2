"""How many outcomes of a block to draft for, and which: pure policy, learned from the outcomes.

An outcome is an accepted count j and the target's token there. P(j) is geometric in the chance that
a drafted token is accepted, and the token is one of the drafter's guesses, best first:

    P(j, guess r) = a^j (1 - a) c_r  where a token was rejected (j < m),   a^m b_r  behind them all

a is each sequence's own, as far as it is known, else everyone's; c_r and b_r are everyone's. The
likeliest outcomes share a budget. Knows nothing of models, tokens and streams.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

#: Guesses of one position that are remembered and may be drafted for.
MAX_GUESSES = 8
#: Each observation makes all earlier ones weigh so much less.
_MEMORY = 0.99
#: What is believed before anything was seen, and how many observations that is worth.
_PRIOR_ACCEPTANCE = 0.6
_PRIOR_CORRECTIONS = (0.25, 0.1, 0.06, 0.04, 0.03, 0.02, 0.02, 0.01)
_PRIOR_BONUSES = (0.6, 0.1, 0.05, 0.03, 0.02, 0.02, 0.01, 0.01)
_PRIOR_WEIGHT = 8.0
#: How much one measured time counts against those before.
_PACE_WEIGHT = 0.2


@dataclass(slots=True)
class _Chance:
    """How often something happened, of how often it could have."""

    prior: float
    num_hits: float = 0.0
    num_tries: float = 0.0

    def learn(self, num_hits: int, num_tries: int = 1) -> None:
        """Note some tries; older ones fade."""
        keep = _MEMORY**num_tries
        self.num_hits = self.num_hits * keep + num_hits
        self.num_tries = self.num_tries * keep + num_tries

    def estimate(self, prior: float | None = None) -> float:
        """The chance; `prior` instead of the fixed one."""
        believed = self.prior if prior is None else prior
        return (self.num_hits + _PRIOR_WEIGHT * believed) / (self.num_tries + _PRIOR_WEIGHT)


class FanOut:
    """Chooses branches. Sequences are named by ints; unknown ones begin with everyone's chances."""

    def __init__(self) -> None:
        self._everyone = _Chance(_PRIOR_ACCEPTANCE)
        self._acceptance: dict[int, _Chance] = {}
        self._corrections = [_Chance(prior) for prior in _PRIOR_CORRECTIONS]
        self._bonuses = [_Chance(prior) for prior in _PRIOR_BONUSES]

    def split(self, sequence: int, block_length: int, budget: int) -> list[int]:
        """For each accepted count 0..m, how many guesses to draft for: `budget` in all, or fewer
        where there are not so many guesses."""
        everyone = self._everyone.estimate()
        own = self._acceptance.get(sequence)
        acceptance = everyone if own is None else own.estimate(everyone)
        outcomes: list[tuple[float, int]] = []
        reached = 1.0
        for accepted in range(block_length + 1):
            is_last = accepted == block_length
            here = reached if is_last else reached * (1 - acceptance)
            chances = self._bonuses if is_last else self._corrections
            outcomes += [(here * c, accepted) for c in _descending(chances)]
            reached *= acceptance
        fan_out = [0] * (block_length + 1)
        for _, accepted in sorted(outcomes, reverse=True)[:budget]:
            fan_out[accepted] += 1
        return fan_out

    def learn(
        self,
        sequence: int,
        block_length: int,
        accepted: int,
        token: int,
        guesses: Sequence[Sequence[int]],
    ) -> None:
        """A block had this outcome. `guesses`: by accepted count, as `Ahead.guesses`."""
        num_judged = min(accepted + 1, block_length)
        if num_judged:
            own = self._acceptance.setdefault(sequence, _Chance(_PRIOR_ACCEPTANCE))
            own.learn(accepted, num_judged)
            self._everyone.learn(accepted, num_judged)
        chances = self._bonuses if accepted == block_length else self._corrections
        for chance, guess in zip(chances, guesses[accepted], strict=False):
            chance.learn(guess == token)

    def forget(self, sequence: int) -> None:
        """The sequence ended."""
        self._acceptance.pop(sequence, None)


def _descending(chances: Iterable[_Chance]) -> list[float]:
    """Estimates by rank; a rank that seems better than the one before counts like it."""
    estimates: list[float] = []
    for chance in chances:
        estimates.append(min([chance.estimate(), *estimates[-1:]]))
    return estimates


@dataclass(slots=True)
class Pace:
    """How long steps of how many branches take, and how long a block stays at the target."""

    _steps_s: dict[int, float] = field(default_factory=dict)  # by the bits of the branch count
    _window_s: float = 0.0

    def time_step(self, num_branches: int, seconds: float) -> None:
        """A step of all sequences' branches took so long."""
        size = num_branches.bit_length()
        self._steps_s[size] = _average(self._steps_s.get(size, 0.0), seconds)

    def time_block(self, seconds: float) -> None:
        """From the first step to the outcome there was so much time."""
        self._window_s = _average(self._window_s, seconds)

    def budget(self, max_branches: int, num_sequences: int, num_steps: int) -> int:
        """Branches per sequence, at least 1, so that `num_steps` steps are done in time. Sizes that
        were never tried count as fast as the nearest smaller one, so that they are tried."""
        budget = max_branches
        while budget > 1 and num_steps * self._step_s(budget * num_sequences) > self._window_s > 0:
            budget //= 2
        return budget

    def _step_s(self, num_branches: int) -> float:
        size = num_branches.bit_length()
        known = [s for s in self._steps_s if s <= size]
        return self._steps_s[max(known)] if known else 0.0


def _average(old: float, new: float) -> float:
    return new if not old else old + _PACE_WEIGHT * (new - old)
