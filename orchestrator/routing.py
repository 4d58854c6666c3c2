"""Which pool drafts for a request that names none: the fastest lately for its kind of traffic.

Pure policy: knows nothing of pools but their names, nothing of clocks or sockets, and draws no
random numbers. Per kind of traffic it is a bandit with a floor:

    1. a pool with fewer than three requests of this kind behind it goes first;
    2. a pool that is due gets the request: each one earns every available pool `floor` of a
       turn, so that a pool that became better, or fits again, is noticed;
    3. else the pool with the most committed tokens per second, of several the first in order.

What was observed lies at different times, and a rush slows all pools alike. So a speed is two
factors, the moment's, common to all, and the pool's, and each observation corrects both:

    log(tokens / second) = load + log_speed[traffic, pool]
"""

import math
from bisect import bisect
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from orchestrator.requests import GenerationRequest

_NUM_TRIALS: Final = 3
#: A surprise is half believed after so many tokens. This part of it is laid to the pool, the rest
#: to the load, which all requests correct and a pool only its own.
_HALF_LIFE_TOKENS: Final = 170
_OWN_PART: Final = 1 / 3
#: A request that hung weighs as one that was slower by this factor (a logarithm), not by its hours.
_MAX_SURPRISE: Final = 1.0
#: Prompt lengths at which another class begins: prompt lookup lives on long ones.
_PROMPT_CLASSES: Final = (256, 1024)


class Traffic(NamedTuple):
    """A kind of request, as far as it decides which drafter is fast: a bandit for each of them."""

    is_greedy: bool
    needs_distributions: bool
    is_constrained: bool
    prompt_class: int


def traffic_of(request: GenerationRequest) -> Traffic:
    """The kind of a request, one of two dozen."""
    return Traffic(
        is_greedy=request.sampling.temperature == 0,
        needs_distributions=request.sampling.rule.needs_distributions,
        is_constrained=request.sampling.constraint is not None,
        prompt_class=bisect(_PROMPT_CLASSES, len(request.prompt_token_ids)),
    )


@dataclass(slots=True)
class _Arm:
    """One pool under one kind of traffic. `turns`: how far it is due, a whole one is a request."""

    num_chosen: int = 0
    turns: float = 0.0
    log_speed: float = -math.inf  # nothing was observed yet

    def choose(self) -> None:
        """It gets a request. One that is chosen anyway saves up no turns and owes none."""
        self.num_chosen += 1
        self.turns = max(0.0, self.turns - 1)


class Router:
    """Picks a pool per request and learns from what became of it.

    pools: their names in order of preference, the configured default first. A name may stand for
    not drafting at all. floor: the share of the requests of each kind that every available pool
    gets at least, cut to what all of them can have.
    """

    def __init__(self, pools: Sequence[str], floor: float = 0.05) -> None:
        self.pools = tuple(pools)
        self._floor = min(floor, 1 / max(1, len(pools)))
        self._arms: dict[Hashable, dict[str, _Arm]] = {}
        self._load = 0.0  # the higher, the faster everything

    def choose(self, traffic: Hashable, available: Collection[str]) -> str:
        """The pool for the next request of this kind, one of `available`.

        At least one of the router's pools must be available. Those that are not earn no turns: a
        pool that comes back is not flooded with what it missed.
        """
        arms = {name: arm for name, arm in self._of(traffic).items() if name in available}
        assert arms, "a pool is chosen only where there is one"
        for arm in arms.values():
            arm.turns += self._floor
        chosen = _next(arms)
        arms[chosen].choose()
        return chosen

    def observe(self, traffic: Hashable, pool: str, num_tokens: int, seconds: float) -> None:
        """Take in what a request of this kind, finished or not, got with this pool since it was
        last reported: committed tokens and the seconds they took. Unknown pools are ignored."""
        arm = self._of(traffic).get(pool)
        if arm is None or seconds <= 0:
            return
        num_tokens = max(1, num_tokens)
        log_rate = math.log(num_tokens / seconds)
        if arm.log_speed == -math.inf:
            arm.log_speed = log_rate - self._load
            return
        surprise = max(-_MAX_SURPRISE, log_rate - self._load - arm.log_speed)
        believed = 1 - 0.5 ** (num_tokens / _HALF_LIFE_TOKENS)
        arm.log_speed += _OWN_PART * believed * surprise
        self._load += (1 - _OWN_PART) * believed * min(_MAX_SURPRISE, surprise)

    def speed(self, traffic: Hashable, pool: str) -> float:
        """Tokens per second expected now of a pool of this router; 0 while unknown."""
        return math.exp(self._load + self._of(traffic)[pool].log_speed)

    def _of(self, traffic: Hashable) -> dict[str, _Arm]:
        if traffic not in self._arms:
            self._arms[traffic] = {name: _Arm() for name in self.pools}
        return self._arms[traffic]


def _next(arms: dict[str, _Arm]) -> str:
    """The three steps of the module's head. `min` and `max` take the first of equals."""
    rarest = min(arms, key=lambda name: arms[name].num_chosen)
    if arms[rarest].num_chosen < _NUM_TRIALS:
        return rarest
    most_due = max(arms, key=lambda name: arms[name].turns)
    if arms[most_due].turns >= 1:
        return most_due
    return max(arms, key=lambda name: arms[name].log_speed)
