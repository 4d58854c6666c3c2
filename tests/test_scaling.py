"""The autoscaler on a virtual clock: it follows demand, does not flutter, and learns from pain.

Drafters are a formula here: queues with one server and equal jobs, whose waiting times are known.
"""

import itertools
import math
from dataclasses import dataclass, field

import numpy as np
import pytest

from orchestrator.demand import PoolLoad
from orchestrator.requests import Health, ReplicaStatus
from orchestrator.scaling import Autoscaler, ScalingRules, choose_to_drain

DAY_S = 86_400
PLANS_PER_S = 12.0  # of one sequence
PATIENCE_S = 0.05
TICK_S = 2.0


@dataclass
class World:
    """Drafters and requests. `draft_s`: seconds per draft; `start_s`: until a new drafter serves.

    Requests come at random and last 20 s on average, so demand is noisy by itself.
    """

    draft_s: float = 0.008
    start_s: float = 40.0
    max_sequences: int = 16
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))
    num_sequences: int = 0
    busy_s: float = 0.0
    num_steps: int = 0
    num_late: int = 0
    ready_at: list[float] = field(default_factory=lambda: [0.0])

    def load(self, now: float) -> PoolLoad:
        """What the autoscaler sees."""
        return PoolLoad(
            num_ready=self.num_ready(now),
            num_sequences=self.num_sequences,
            max_sequences=self.max_sequences,
            busy_s=self.busy_s,
            num_steps=self.num_steps,
            num_late=self.num_late,
        )

    def num_ready(self, now: float) -> int:
        """Drafters that serve."""
        return sum(each <= now for each in self.ready_at)

    def scale(self, wanted: int, now: float) -> None:
        """Start drafters, or end them: those that start yet first."""
        while len(self.ready_at) < wanted:
            self.ready_at.append(now + self.start_s * self.rng.uniform(0.5, 1.5))
        self.ready_at = sorted(self.ready_at)[:wanted]

    def late_share(self, num_ready: int) -> float:
        """The share of plans that wait longer than the patience: M/D/1, heavy traffic."""
        if not num_ready:
            return 1.0
        use = self.num_sequences / num_ready * PLANS_PER_S * self.draft_s
        if use >= 1:
            return 1 - 0.9 / use
        return min(1.0, math.exp(-2 * (1 - use) * PATIENCE_S / (use * self.draft_s + 1e-9)))

    def run(self, arrivals_per_s: float, now: float, seconds: float) -> None:
        """Let time pass."""
        ended = self.rng.binomial(self.num_sequences, 1 - math.exp(-seconds / 20))
        self.num_sequences += int(self.rng.poisson(arrivals_per_s * seconds) - ended)
        num_plans = int(self.rng.poisson(self.num_sequences * PLANS_PER_S * seconds))
        num_ready = self.num_ready(now)
        self.num_steps += num_plans
        self.num_late += int(self.rng.binomial(num_plans, self.late_share(num_ready)))
        self.busy_s += min(num_ready * seconds, num_plans * self.draft_s)


def demand(now: float) -> float:
    """Requests per second: 0.2 at night, ten times that at noon, with bursts of a minute."""
    day = 0.5 - 0.5 * math.cos(2 * math.pi * now / DAY_S)
    burst = 1.5 if now % 3600 < 60 else 1.0
    return 0.2 * (1 + 9 * day**2) * burst


def live(
    world: World, scaler: Autoscaler, end: float, arrivals: float | None = None, begin: float = 0
) -> tuple[list[int], np.ndarray]:
    """Run until `end`; returns the wanted numbers and the shares of late plans, tick by tick.

    arrivals: requests per second, or None for the day's `demand`.
    """
    wanted, late = [], []
    for now in np.arange(begin, end, TICK_S):
        steps, num_late = world.num_steps, world.num_late
        world.run(demand(now) if arrivals is None else arrivals, now, TICK_S)
        world.scale(scaler.decide(world.load(now), now), now)
        wanted.append(scaler.wanted)
        late.append((world.num_late - num_late) / max(1, world.num_steps - steps))
    return wanted, np.array(late)


def turns(wanted: list[int]) -> tuple[int, int]:
    """How often the number changed, and how often it changed its direction."""
    changes = [b - a for a, b in itertools.pairwise(wanted) if a != b]
    return len(changes), sum((a > 0) != (b > 0) for a, b in itertools.pairwise(changes))


@pytest.mark.parametrize("seed", [1, 2])
def test_day_with_ten_times_the_demand_and_back(seed: int) -> None:
    """Drafters would be missing at noon, stay for the night, or come and go all the time.

    Steps up may take several drafters, steps down take one: 1 -> 12 -> 1 is 15 changes at least,
    and each of the 24 bursts may cost one turn up and one down.
    """
    world, scaler = World(rng=np.random.default_rng(seed)), Autoscaler(1, 12, 1)
    wanted, late = live(world, scaler, DAY_S)
    night, noon = wanted[-1800:], wanted[len(wanted) // 2 - 900 : len(wanted) // 2 + 900]
    assert min(noon) >= 5 and max(night) <= 4
    num_changes, num_reversals = turns(wanted)
    assert num_changes <= 60 and num_reversals <= 30
    by_minute = late.reshape(-1, 30).mean(axis=1)
    assert by_minute.mean() < 0.002
    assert (by_minute > 0.02).mean() < 0.01  # bursts that find too few drafters


def test_without_damping_the_same_demand_makes_it_flutter() -> None:
    """The bounds above would hold for any policy, and prove nothing."""
    damped, jumpy = (
        Autoscaler(1, 12, 4),
        Autoscaler(
            1, 12, 4, ScalingRules(margin=0.0, memory_s=2.0, settle_s=0.0, calm_s=0.0, down_s=0.0)
        ),
    )
    few, many = (turns(live(World(), each, 7200, arrivals=1.5)[0])[0] for each in (damped, jumpy))
    assert few <= 8 and many > 50 * few / 4


def test_late_plans_teach_a_lower_target() -> None:
    """Long drafts leave less room for queues: at 60 % busy every thirtieth plan would be late."""
    world, scaler = World(draft_s=0.02), Autoscaler(1, 20, 8)
    wanted, late = live(world, scaler, 4 * 3600, arrivals=1.0)
    half = len(late) // 2
    assert scaler.busy_target < 0.55
    assert late[half:].mean() < 0.02
    assert turns(wanted[half:])[0] <= 12


def test_lateness_that_more_drafters_cannot_cure_does_not_buy_them() -> None:
    """A slow network makes plans late whatever the number: it would go to the maximum and stay."""

    class SlowNetwork(World):
        def late_share(self, num_ready: int) -> float:
            return 0.3

    scaler = Autoscaler(1, 20, 1)
    wanted, _ = live(SlowNetwork(), scaler, 2 * 3600, arrivals=1.0)  # busy 1.9 drafters' time
    assert max(wanted) < 15  # not 20
    assert turns(wanted[len(wanted) // 2 :])[0] <= 10


def test_verifiers_that_wait_for_drafts_count_as_late_plans_do() -> None:
    """A target that stands still half the time would be thought well served."""
    scaler = Autoscaler(1, 8, 2)
    for now in range(300):  # half busy, all plans in time, and the target waits for them
        load = PoolLoad(2, 16, 0, busy_s=now, num_steps=100 * now, idle_s=0.5 * now)
        scaler.decide(load, now)
    assert scaler.wanted == 3


def test_room_is_counted_before_drafters_are_busy() -> None:
    """Sequences that no drafter can hold draft nothing, so nobody would look busy."""
    scaler = Autoscaler(1, 8, 1)
    assert scaler.decide(PoolLoad(1, num_sequences=40, max_sequences=16), 0.0) == 3


def test_empty_pool_goes_to_none_and_comes_back() -> None:
    """A pool with min_replicas 0 would never end its last drafter, or never start one again."""
    world, scaler = World(), Autoscaler(0, 4, 1)
    live(world, scaler, 1200, arrivals=0.0)
    assert scaler.wanted == 0
    world.num_sequences = 1
    assert scaler.decide(world.load(1201.0), 1201.0) == 1


def test_number_set_by_hand_is_gone_on_from() -> None:
    """An operator's step would be taken back at once, by needs from before it."""
    world, scaler = World(), Autoscaler(1, 8, 1)
    live(world, scaler, 900, arrivals=0.1)
    scaler.hold(5, 900.0)
    wanted, _ = live(world, scaler, 900 + 590, arrivals=0.1, begin=900.0)
    assert set(wanted) == {5}
    wanted, _ = live(world, scaler, 900 + 1800, arrivals=0.1, begin=900.0 + 590)
    assert wanted[-1] == 1


def test_those_that_do_not_serve_go_first_then_the_emptiest() -> None:
    """Draining the fullest drafter would move the most sequences for nothing."""

    def status(index: int, health: Health, num_sequences: int) -> ReplicaStatus:
        return ReplicaStatus(f"drafter-d-{index}", "", health, "", num_sequences, 0, 0)

    replicas = [
        status(0, Health.READY, 1),
        status(1, Health.READY, 1),
        status(2, Health.READY, 9),
        status(10, Health.LOST, 0),
    ]
    names = ["drafter-d-10", "drafter-d-1", "drafter-d-0", "drafter-d-2"]
    for num_excess in range(-1, 5):
        assert choose_to_drain(replicas, num_excess) == names[: max(0, num_excess)]
