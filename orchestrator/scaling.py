"""How many drafters a pool should have: a number that follows demand and does not flutter.

Pure policy: knows nothing of clocks, sockets or Ray; time is passed in, and whoever asks creates
and ends drafters. Two looks at a pool's totals say what happened in between. What is needed is the
larger of

    by work      ready * busy / target       busy: share of their time that drafters draft
    by room      sequences / (0.9 * what one drafter can hold)

Up goes at once what is needed by a clear margin, then the pool is given time to start. Down goes
what was not needed at any moment of the last ten minutes, one drafter at a time. How busy drafters
may be without harm depends on model and traffic, so the target is learned: it falls when plans come
late or verifiers stand still though there is work to share, and creeps back over hours.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from orchestrator.demand import PoolLoad
from orchestrator.requests import Health, ReplicaStatus


@dataclass(frozen=True, slots=True)
class ScalingRules:
    """The numbers behind an autoscaler. Shares are of time or of plans, between 0 and 1."""

    busy_target: float = 0.6  # at first
    least_target: float = 0.3  # drafters less busy than this have no work to share
    margin: float = 0.25  # up when busier than the target by this part of it
    room_target: float = 0.9
    max_late: float = 0.01  # plans
    max_idle: float = 0.1  # the verifiers' time
    memory_s: float = 20.0  # how far the averages look back
    settle_s: float = 30.0  # between two steps up
    calm_s: float = 600.0  # not needed for so long: down
    down_s: float = 60.0  # between two steps down
    forget_s: float = 6 * 3600.0  # the target creeps back in about this time


class _Mean:
    """A mean over about the last `memory_s` seconds."""

    def __init__(self, memory_s: float) -> None:
        self._memory_s = memory_s
        self._sum = self._weight = 0.0

    def observe(self, amount: float, weight: float, seconds: float) -> None:
        """Take in an amount per weight, observed over some seconds; older ones fade."""
        kept = math.exp(-seconds / self._memory_s)
        self._sum = kept * self._sum + amount
        self._weight = kept * self._weight + weight

    @property
    def value(self) -> float:
        """The mean; 0 when nothing was observed."""
        return self._sum / self._weight if self._weight > 0 else 0.0


class Autoscaler:
    """The wanted number of drafters of one pool, between `least` and `most`.

    Call `decide` every second or so. `wanted` may be set from outside: it goes on from there.
    """

    def __init__(
        self, least: int, most: int, wanted: int, rules: ScalingRules | None = None
    ) -> None:
        self.least, self.most = least, most
        self.wanted = wanted
        self._rules = rules or ScalingRules()
        self._last: tuple[float, PoolLoad] | None = None
        self._busy = _Mean(self._rules.memory_s)
        self._late = _Mean(self._rules.memory_s)
        self._idle = _Mean(self._rules.memory_s)
        self._needs: deque[tuple[float, int]] = deque()
        self._target = self._rules.busy_target
        self._up_at = self._down_at = self._joined_at = -math.inf

    @property
    def late_share(self) -> float:
        """Share of the verify steps that went without their plan, lately."""
        return self._late.value

    @property
    def busy_target(self) -> float:
        """How busy the drafters are to be, as far as is known."""
        return self._target

    def hold(self, wanted: int, now: float) -> None:
        """Somebody else has set the number: go on from there, as after a step up."""
        self.wanted, self._up_at = wanted, now
        self._needs.clear()

    def decide(self, load: PoolLoad, now: float) -> int:
        """Take in the pool's load at `now`, in seconds of any clock; returns the wanted number."""
        rules = self._rules
        if self._last is not None and now > self._last[0]:
            self._observe(*self._last, load, now)
        self._last = (now, load)
        need = min(self.most, max(self.least, self._need(load)))
        self._needs.append((now, need))
        while self._needs[0][0] < now - rules.calm_s:
            self._needs.popleft()
        if need > self.wanted and now >= self._up_at + rules.settle_s:
            self.wanted, self._up_at = need, now
        elif max(each for _, each in self._needs) < self.wanted:
            calm_at = max(self._up_at + rules.calm_s, self._down_at + rules.down_s)
            if now >= calm_at:
                self.wanted, self._down_at = self.wanted - 1, now
        return self.wanted

    def _observe(self, then: float, before: PoolLoad, load: PoolLoad, now: float) -> None:
        """Follow the averages, and learn from them how busy is too busy."""
        rules, seconds = self._rules, now - then
        num_steps = max(0, load.num_steps - before.num_steps)
        self._busy.observe(
            max(0.0, load.busy_s - before.busy_s), seconds * max(1, before.num_ready), seconds
        )
        self._late.observe(max(0, load.num_late - before.num_late), num_steps, seconds)
        self._idle.observe(max(0.0, load.idle_s - before.idle_s), seconds, seconds)
        if load.num_ready != before.num_ready:
            self._joined_at = now  # the averages are of another pool
        is_settled = now > self._joined_at + 2 * rules.memory_s and load.num_ready >= self.wanted
        is_painful = self._late.value > rules.max_late or self._idle.value > rules.max_idle
        can_share = load.num_sequences > load.num_ready > 0
        if is_settled and is_painful and can_share:
            too_busy = min(1.0, self._busy.value) / (1 + rules.margin)
            self._target = max(rules.least_target, min(self._target, 0.99 * too_busy))
        else:
            self._target += (rules.busy_target - self._target) * seconds / rules.forget_s

    def _need(self, load: PoolLoad) -> int:
        """Drafters needed at this moment, before any bounds."""
        rules, busy = self._rules, min(1.0, self._busy.value)
        by_room = int(load.num_sequences > 0)
        if load.max_sequences:
            by_room = math.ceil(load.num_sequences / (rules.room_target * load.max_sequences))
        by_work = math.ceil(load.num_ready * busy / self._target - 1e-9)
        if by_work > self.wanted and busy <= self._target * (1 + rules.margin):
            by_work = self.wanted  # not by a clear margin
        return max(by_room, by_work)


def choose_to_drain(replicas: Iterable[ReplicaStatus], num_excess: int) -> list[str]:
    """The drafters to let go: those that do not serve, then those with the least to move, then the
    youngest (by the number that ends their name)."""
    order = sorted(
        replicas,
        key=lambda r: (r.health is Health.READY, r.num_sequences, -index_of(r.replica_id)),
    )
    return [replica.replica_id for replica in order[: max(0, num_excess)]]


def index_of(replica_id: str) -> int:
    """The number that ends a replica's name; -1 without one."""
    tail = replica_id.rpartition("-")[2]
    return int(tail) if tail.isdecimal() else -1
