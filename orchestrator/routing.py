"""Which pool drafts for a request that names none: the fastest lately for its kind of traffic.

Pure policy: knows nothing of pools but their names, nothing of clocks or sockets, and draws no
random numbers. Per kind of traffic it is a bandit with a floor:

    1. a pool with fewer than three requests of this kind behind it goes first;
    2. a pool that is due gets the request: each one earns every available pool `floor` of a
       turn, so that a pool that became better, or fits again, is noticed;
    3. else the pool with the most committed tokens per second, of several the first in order.

Speeds are means of what was observed, by tokens, and fade: a change is half believed after
256 tokens. A request that hung weighs as one slow request, however long it took.
"""

from bisect import bisect
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from orchestrator.requests import GenerationRequest

_NUM_TRIALS: Final = 3
_HALF_LIFE_TOKENS: Final = 256
#: Prompt lengths at which another class begins: prompt lookup lives on long ones.
_PROMPT_CLASSES: Final = (256, 1024)


class Traffic(NamedTuple):
    """A kind of request, as far as it decides which drafter is fast: a bandit for each of them."""

    is_greedy: bool
    needs_distributions: bool
    is_constrained: bool
    prompt_class: int


def traffic_of(request: GenerationRequest) -> Traffic:
    """The kind of a request; of two dozen at most."""
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
    _sum: float = 0.0
    _weight: float = 0.0

    @property
    def speed(self) -> float:
        """Tokens per second; 0 while nothing was observed."""
        return self._sum / self._weight if self._weight else 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Fade what is known by what is new; the first observations count in full."""
        keep = 0.5 ** (max(1, num_tokens) / _HALF_LIFE_TOKENS)
        self._sum = keep * self._sum + (1 - keep) * num_tokens / seconds
        self._weight = keep * self._weight + (1 - keep)

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
        self._pools = tuple(pools)
        self._floor = min(floor, 1 / max(1, len(pools)))
        self._arms: dict[Hashable, dict[str, _Arm]] = {}

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
        if arm is not None and seconds > 0:
            arm.observe(num_tokens, seconds)

    def speed(self, traffic: Hashable, pool: str) -> float:
        """Tokens per second expected of a pool of this router; 0 while unknown."""
        return self._of(traffic)[pool].speed

    def _of(self, traffic: Hashable) -> dict[str, _Arm]:
        if traffic not in self._arms:
            self._arms[traffic] = {name: _Arm() for name in self._pools}
        return self._arms[traffic]


def _next(arms: dict[str, _Arm]) -> str:
    """The three steps of the module's head. `min` and `max` take the first of equals."""
    rarest = min(arms, key=lambda name: arms[name].num_chosen)
    if arms[rarest].num_chosen < _NUM_TRIALS:
        return rarest
    most_due = max(arms, key=lambda name: arms[name].turns)
    if arms[most_due].turns >= 1:
        return most_due
    return max(arms, key=lambda name: arms[name].speed)
