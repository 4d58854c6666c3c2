"""The choice of a pool in worlds one can compute: speeds that are known, and that change."""

import itertools
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace

import pytest

from core.params import Constraint, ConstraintKind, Rule, SamplingParams
from orchestrator.routing import Router, Traffic, traffic_of
from tests.policy import make_request

POOLS = ("model", "lookup", "head")
CHAT, CODE = "chat", "code"
#: Tokens per second.
SPEEDS = {
    CHAT: {"model": 30.0, "lookup": 22.0, "head": 40.0},
    CODE: {"model": 30.0, "lookup": 60.0, "head": 45.0},
}
Speed = Callable[[str, str], float]


class World:
    """Requests of 20 to 300 tokens whose speed scatters by a quarter; `in_flight` others are
    chosen for before it is known what became of one. `hindsight`: seconds if each request had
    had the pool that is best for it, `seconds`: what they took."""

    def __init__(self, router: Router, seed: int = 0, in_flight: int = 0) -> None:
        self.router = router
        self.speed: Speed = lambda traffic, pool: SPEEDS[traffic][pool]
        self.available: tuple[str, ...] = POOLS
        self.seconds = self.hindsight = 0.0
        self._rng = random.Random(seed)
        self._running: deque[tuple[str, str, int, float]] = deque()
        self._in_flight = in_flight

    def run(self, num_requests: int, kinds: tuple[str, ...] = (CHAT, CODE)) -> Counter[object]:
        """Requests of random kinds; how many each (kind, pool) got."""
        chosen: Counter[object] = Counter()
        for _ in range(num_requests):
            traffic = self._rng.choice(kinds)
            pool = self.router.choose(traffic, self.available)
            chosen[traffic, pool] += 1
            num_tokens = self._rng.randrange(20, 300)
            speed = self.speed(traffic, pool)
            seconds = num_tokens / (speed * self._rng.uniform(0.57, 1.43))  # a deviation of 1/4
            self.seconds += num_tokens / speed
            self.hindsight += num_tokens / max(self.speed(traffic, p) for p in self.available)
            self._running.append((traffic, pool, num_tokens, seconds))
            if len(self._running) > self._in_flight:
                self.router.observe(*self._running.popleft())
        return chosen


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("in_flight", [0, 16])
def test_each_kind_of_traffic_gets_the_pool_that_is_best_for_it(seed: int, in_flight: int) -> None:
    """One table for all traffic would send code and chat to the same pool. A burst before the
    first answers must not settle it either."""
    world = World(Router(POOLS), seed, in_flight)
    world.run(150)
    chosen = world.run(400)
    for traffic, best in ((CHAT, "head"), (CODE, "lookup")):
        total = sum(chosen[traffic, pool] for pool in POOLS)
        assert chosen[traffic, best] > 0.75 * total


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("in_flight", [0, 16])
def test_choosing_costs_little_against_always_having_the_best(seed: int, in_flight: int) -> None:
    """The price is the floor's, 5 % of requests for each other pool, and some noise: here the
    others take a third to twice as long, so about 6 % more time in all. It must not grow."""
    world = World(Router(POOLS), seed, in_flight)
    world.run(1000)
    assert world.seconds < 1.10 * world.hindsight
    early = world.seconds, world.hindsight
    world.run(1000)
    assert world.seconds - early[0] < 1.10 * (world.hindsight - early[1])


def test_without_a_floor_and_noise_nothing_is_lost_after_the_trials() -> None:
    """What exploring costs is the floor's alone: a policy that dithers would lose here too."""
    world = World(Router(POOLS, floor=0.0))
    world.run(200)
    seconds, hindsight = world.seconds, world.hindsight
    world.run(200)
    assert world.seconds - seconds < 1.02 * (world.hindsight - hindsight)


@pytest.mark.parametrize("floor", [0.02, 0.05, 0.2, 1.0])
def test_every_pool_keeps_its_floor_in_every_stretch(floor: int) -> None:
    """A pool that is never asked again cannot show that it became the best. A floor that the pools
    cannot have together is what they can have: a turn each."""
    router = Router(POOLS, floor)
    period = 1 / min(floor, 1 / 3)
    picks = []
    for _ in range(600):
        picks.append(router.choose(CHAT, POOLS))
        router.observe(CHAT, picks[-1], 100, 100 / SPEEDS[CHAT][picks[-1]])
    for pool in POOLS:
        places = [i for i, pick in enumerate(picks) if pick == pool]
        assert places[0] < 3
        assert max(b - a for a, b in itertools.pairwise([*places, 600])) <= period + 3
    assert Counter(picks)["head"] == max(Counter(picks).values())


def test_a_world_that_changes_is_noticed() -> None:
    """A pool that slows down is left at once; one that became better is found by its floor."""
    world = World(Router(POOLS))
    world.run(300, (CHAT,))
    slower = {**SPEEDS[CHAT], "head": 10.0}
    world.speed = lambda traffic, pool: slower[pool]
    world.run(15, (CHAT,))
    assert world.run(200, (CHAT,))[CHAT, "model"] > 140
    better = {**slower, "lookup": 90.0}
    world.speed = lambda traffic, pool: better[pool]
    world.run(80, (CHAT,))
    assert world.run(200, (CHAT,))[CHAT, "lookup"] > 170


@pytest.mark.parametrize("in_flight", [0, 8, 32])
def test_a_load_that_slows_all_alike_changes_nothing(in_flight: int) -> None:
    """The others' speeds are of quieter times when a rush begins: taken as they are, they would
    look better than the best and be paid for (by 12 to 26 % in this world instead of 8)."""
    world = World(Router(POOLS), in_flight=in_flight)
    world.run(200)
    seconds, hindsight = world.seconds, world.hindsight
    for load in (3.0, 1.0) * 10:
        world.speed = lambda traffic, pool, load=load: SPEEDS[traffic][pool] / load  # type: ignore[misc]
        world.run(100)
    assert world.seconds - seconds < 1.10 * (world.hindsight - hindsight)


def test_a_pool_that_is_new_in_a_rush_is_measured_by_the_rush() -> None:
    """It would look slower than those that were measured when there was nothing to do."""
    router = Router(POOLS)
    for load in (1.0, 3.0):
        for _ in range(30):
            router.observe(CHAT, "model", 100, load * 100 / 30)
    router.observe(CHAT, "head", 100, 3.0 * 100 / 40)
    assert router.speed(CHAT, "head") == pytest.approx(40 / 3)
    assert router.speed(CHAT, "model") == pytest.approx(30 / 3, rel=0.01)


def test_a_lost_pool_is_not_chosen_and_not_flooded_when_it_is_back() -> None:
    """Requests would run without drafts; afterwards, all turns that were missed would come at
    once to a pool that has just started."""
    world = World(Router(POOLS))
    world.run(200, (CHAT,))
    world.available = ("model", "lookup")
    chosen = world.run(300, (CHAT,))
    assert chosen[CHAT, "head"] == 0 and chosen[CHAT, "model"] > 250
    world.available = ("head", "model", "lookup")
    world.speed = lambda traffic, pool: {"head": 5.0, "model": 30.0, "lookup": 22.0}[pool]
    assert world.run(100, (CHAT,))[CHAT, "head"] < 15
    world.available = ("lookup",)
    assert world.run(5, (CHAT,)) == {(CHAT, "lookup"): 5}


def test_a_floor_beyond_what_there_is_starves_nobody() -> None:
    """Three pools cannot have all requests each: turns nobody can have would pile up, and
    a pool that comes back would wait behind them."""
    router = Router(POOLS, floor=1.0)
    for _ in range(200):
        router.choose(CHAT, ("model", "lookup"))
    assert Counter(router.choose(CHAT, POOLS) for _ in range(30))["head"] >= 9


def test_what_is_untried_goes_first_and_ties_go_to_the_default() -> None:
    """A new pool must not wait for its floor; equals must not be shuffled about."""
    router = Router(POOLS)
    picks = [router.choose(CHAT, set(POOLS)) for _ in range(9)]
    assert picks == [*POOLS] * 3
    assert [router.choose(CHAT, POOLS) for _ in range(5)] == ["model"] * 5  # nothing is known yet
    for pool in POOLS:
        router.observe(CHAT, pool, 50, 1.0)
    assert router.choose(CHAT, POOLS) == "model"
    assert router.choose(CODE, ("head", "lookup")) == "lookup"


def test_one_request_that_hung_does_not_condemn_a_pool() -> None:
    """Tokens over seconds, summed, would take hundreds of requests to forget an hour."""
    router = Router(POOLS)
    for pool in POOLS:
        for _ in range(10):
            router.observe(CHAT, pool, 100, 100 / SPEEDS[CHAT][pool])
    assert router.speed(CHAT, "head") == pytest.approx(40)
    router.observe(CHAT, "head", 100, 3600.0)
    assert 20 < router.speed(CHAT, "head") < 40
    assert router.speed(CHAT, "head") > router.speed(CHAT, "model")
    known = router.speed(CHAT, "head")
    router.observe(CHAT, "head", 20, 0.0)  # a clock that stood still says nothing
    router.observe(CHAT, "unknown", 20, 1.0)
    assert router.speed(CHAT, "head") == known


def test_nor_does_it_when_it_was_the_first() -> None:
    """Then there is nothing to compare it with: the next ones have to lift the pool at once, and
    not everything else with it."""
    router = Router(POOLS)
    router.observe(CHAT, "head", 100, 3600.0)
    router.observe(CHAT, "model", 150, 150 / 30)
    router.observe(CHAT, "head", 150, 150 / 40)
    assert 30 < router.speed(CHAT, "model") < 60
    for _ in range(20):
        for pool in POOLS:
            router.observe(CHAT, pool, 150, 150 / SPEEDS[CHAT][pool])
    assert max(POOLS, key=lambda pool: router.speed(CHAT, pool)) == "head"


def test_a_stretch_counts_by_its_tokens() -> None:
    """Reports of running requests, cut as one likes, must be worth about the whole; a long one
    must not be believed twice, by pool and load, and overshoot."""
    whole, cut = Router(POOLS), Router(POOLS)
    for speed in (40.0, 20.0):
        whole.observe(CHAT, "head", 240, 240 / speed)
        for _ in range(24):
            cut.observe(CHAT, "head", 10, 10 / speed)
    assert whole.speed(CHAT, "head") == pytest.approx(cut.speed(CHAT, "head"), rel=0.15)
    assert 20 <= whole.speed(CHAT, "head") < 30
    cut.observe(CHAT, "head", 0, 5.0)  # no token yet: slow, and little is known
    assert 20 < cut.speed(CHAT, "head") < 30
    whole.observe(CHAT, "head", 5000, 5000 / 40)
    assert whole.speed(CHAT, "head") == pytest.approx(40)


def test_the_same_history_chooses_the_same() -> None:
    """There is no noise of its own: what happened can be replayed."""
    runs = [World(Router(POOLS), seed=3, in_flight=4).run(500) for _ in range(2)]
    assert runs[0] == runs[1]


def test_traffic_is_told_apart_by_what_decides_the_drafter() -> None:
    """A kind per request would never learn; one kind for all would never tell them apart."""
    plain = make_request(tuple(range(100)))
    assert traffic_of(plain) == Traffic(True, False, False, 0)
    lengths = [traffic_of(replace(plain, prompt_token_ids=(1,) * n)).prompt_class for n in
               (1, 255, 256, 1023, 1024, 9000)]  # fmt: skip
    assert lengths == [0, 0, 1, 1, 2, 2]
    sampled = SamplingParams(temperature=0.7, rule=Rule.COUPLED)
    rejected = replace(sampled, rule=Rule.REJECTION)
    constrained = SamplingParams(constraint=Constraint(ConstraintKind.REGEX, "a+"))
    kinds = [traffic_of(replace(plain, sampling=s)) for s in (sampled, rejected, constrained)]
    assert kinds == [(False, False, False, 0), (False, True, False, 0), (True, False, True, 0)]
    assert traffic_of(replace(plain, request_id="other")) == traffic_of(plain)
