"""The draft length that pays, with costs and chances one can compute by hand."""

import pytest

from core.types import VerifyResult, VerifyTimings
from orchestrator.controller import Acceptance, Controller, Rate
from orchestrator.costs import BatchWork, DraftCost, RoundCosts, VerifyCost


def _acceptance(rate: float) -> Acceptance:
    acceptance = Acceptance()
    acceptance.first = acceptance.further = Rate(rate, 1, 1)
    return acceptance


def _controller(costs: dict[tuple[int, int], float]) -> Controller:
    controller = Controller()
    for _ in range(20):  # often enough for the plane to lie on the points
        for (num_rows, num_drafts), seconds in costs.items():
            controller.costs.verify.observe(num_rows, num_drafts, seconds)
    return controller


def test_free_verification_takes_the_whole_draft() -> None:
    """On a device that waits for memory, more tokens cost nothing: draft as much as there is."""
    controller = _controller({(1, 0): 0.010, (1, 8): 0.010})
    assert controller.allot([(_acceptance(0.5), 5)], num_rows=1) == [5]


def test_draft_is_left_out_where_it_cannot_pay() -> None:
    """Cost in proportion to tokens: a draft token must be accepted always to break even."""
    controller = _controller({(1, 0): 0.010, (1, 8): 0.090})
    assert controller.allot([(_acceptance(0.9), 5)], num_rows=1) == [0]


def test_length_is_the_one_with_the_best_goodput() -> None:
    """Enumerated: 1 + .8 + .64 + ... tokens over 10 ms + 2 ms per draft token."""
    controller = _controller({(1, 0): 0.010, (1, 10): 0.030})
    expected = [sum(0.8**i for i in range(m + 1)) / (0.010 + 0.002 * m) for m in range(9)]
    best = max(range(9), key=lambda m: expected[m])
    [chosen] = controller.allot([(_acceptance(0.8), 8)], num_rows=1)
    assert abs(chosen - best) <= 1 and expected[chosen] > 0.99 * expected[best]


def test_tokens_go_to_the_rows_that_use_them() -> None:
    """A batch shares its budget: a row that is always right gets what a bad one would waste."""
    controller = _controller({(2, 0): 0.010, (2, 10): 0.030})
    good, bad = controller.allot([(_acceptance(0.95), 5), (_acceptance(0.1), 5)], 2)
    assert (good, bad) == (5, 0)


def test_switched_off_it_verifies_every_draft_whole() -> None:
    """The plain path stays beside the adaptive one."""
    controller = Controller(is_adaptive=False)
    controller.costs.verify.observe(1, 0, 1.0)
    controller.costs.verify.observe(1, 8, 9.0)
    assert controller.allot([(_acceptance(0.1), 5), (_acceptance(0.1), 0)], 2) == [5, 0]


def test_unknown_costs_try_the_whole_draft() -> None:
    """Before the first measurement nothing speaks against a draft."""
    assert Controller().allot([(_acceptance(0.5), 4)], 1) == [4]


def test_cost_is_the_plane_through_the_measurements() -> None:
    """A wrong slope drafts too much on a device that is busy, or too little on one that waits."""
    cost = VerifyCost()
    for _ in range(50):
        for rows, drafts in ((1, 0), (1, 8), (4, 0), (4, 16)):
            cost.observe(rows, drafts, 0.010 + 0.002 * rows + 0.001 * drafts)
    assert cost.seconds(2, 5) == pytest.approx(0.019, rel=0.02)
    assert cost.seconds(8, 0) == pytest.approx(0.026, rel=0.03)


def test_one_hiccup_does_not_end_drafting() -> None:
    """A size that was slow once must not be avoided for ever: it would never be measured again."""
    controller = _controller({(1, 0): 0.010, (1, 4): 0.0105})
    controller.costs.verify.observe(1, 4, 3.0)
    for _ in range(60):
        controller.costs.verify.observe(1, 0, 0.010)
    assert controller.allot([(_acceptance(0.7), 4)], 1) == [4]


def test_acceptance_follows_history_and_forgives() -> None:
    """A drafter that was switched off must be tried again some time."""
    acceptance = Acceptance()
    for _ in range(30):
        acceptance.observe(3, 0)
    assert acceptance.chance(1) < 0.1
    for _ in range(200):
        acceptance.observe(0, 0)
    assert acceptance.chance(1) > 0.25
    for _ in range(30):
        acceptance.observe(3, 3)
    assert acceptance.chance(3) > 0.8


def test_first_token_and_the_rest_are_told_apart() -> None:
    """Prompt lookup is often wrong at once, but once right it is right for long."""
    acceptance = Acceptance()
    for step in range(200):
        acceptance.observe(5, 5 if step % 3 == 0 else 0)
    assert acceptance.chance(1) < 0.45
    assert acceptance.chance(5) > 0.75 * acceptance.chance(1)


def test_sequence_starts_where_its_pool_is_and_tells_it() -> None:
    """Each new request of a pool that is never right would pay for finding it out again."""
    pool = Acceptance.of_pool()
    for _ in range(20):
        sequence = Acceptance(pool)
        for _ in range(10):
            sequence.observe(3, 0)
    assert pool.chance(1) < 0.05 and Acceptance(pool).chance(1) == pool.chance(1)
    for _ in range(20):
        Acceptance(pool).observe(3, 3)
    assert pool.chance(1) > 0.15
    before = pool.chance(1)
    for _ in range(10_000):  # nobody drafts any more: tried again some time
        pool.observe(0, 0)
    assert pool.chance(1) > before + 0.2


def test_sequence_that_is_better_than_its_pool_is_believed() -> None:
    """One answer that copies among many that do not must keep its drafts."""
    pool = Acceptance.of_pool()
    for _ in range(200):
        pool.observe(3, 0)
    assert Acceptance(pool).chance(1) < 0.1
    copying = Acceptance(pool)
    for _ in range(30):
        copying.observe(3, 3)
    assert copying.chance(3) > 0.6


@pytest.mark.parametrize("num_rows", [1, 8, 32])
def test_drafts_that_are_never_right_cost_next_to_nothing(num_rows: int) -> None:
    """Never more than 5 % below plain decoding, once a pool's first requests have found it out.

    A CPU's costs, where verification is dear; 96 tokens a request, up to 10 draft tokens.
    """
    controller, pool = Controller(), Acceptance.of_pool()
    for wave in range(4):
        sequences = [Acceptance(pool) for _ in range(num_rows)]
        lengths = [10] * num_rows
        seconds = 0.0
        for _ in range(96):
            drafts = list(zip(sequences, lengths, strict=True))
            taken = controller.allot(drafts, num_rows)
            round_s = 0.019 + 0.00125 * (num_rows + sum(taken))
            controller.costs.verify.observe(num_rows, sum(taken), round_s)
            seconds += round_s
            for sequence, length in zip(sequences, taken, strict=True):
                sequence.observe(length, 0)
            lengths = controller.allot([(s, 10) for s in sequences], num_rows)
        plain = 96 * (0.019 + 0.00125 * num_rows)
        assert plain / seconds > (0.95 if wave else 0.92)


def test_drafts_beside_the_target_are_asked_for_while_they_pay() -> None:
    """They take the target's time: free to verify, but not to make."""
    controller = _controller({(1, 0): 0.010, (1, 8): 0.010})
    wish = [(_acceptance(0.6), 5)]
    assert controller.allot(wish, 1, is_near=[True]) == [5], "free until seen"
    for _ in range(20):
        controller.costs.draft.learn([0], 0.001)
        controller.costs.draft.learn([5], 0.031)
        controller.costs.draft.learn([1], 0.007)
    assert controller.allot(wish, 1, is_near=[True]) == [0], "0.6 tokens more in 6 ms more"
    assert controller.allot(wish, 1, is_near=[False]) == [5], "a remote one has time of its own"


def test_one_step_for_many_rows_costs_less_than_many_for_one() -> None:
    """Steps are sequential: two times eight tokens must not look like sixteen times one."""
    cost = DraftCost()
    for _ in range(50):
        for steps, rows in ((1, 1), (3, 1), (1, 8), (2, 8)):
            cost.learn([steps] * rows, 0.0015 * steps + 0.0002 * steps * rows)
    assert cost.added(1, 8) == pytest.approx(0.0031, rel=0.05)
    assert cost.added(3, 3) == pytest.approx(0.0051, rel=0.05)


def test_long_prompts_are_read_in_chunks_that_streams_can_bear() -> None:
    """A chunk takes at most what the slowdown leaves; at first nothing is known of prompts."""
    costs = RoundCosts()
    decoding, reading = BatchWork(4, 0, 0), BatchWork(4, 0, 100)
    assert costs.chunk(4, 2.0) is None
    for _ in range(10):
        costs.observe(decoding, _took(0.020))
    costs.observe(reading, _took(0.120))
    assert costs.chunk(4, 2.0) == pytest.approx(20, abs=1)
    assert costs.chunk(4, 3.0) == pytest.approx(40, abs=2)


def _took(seconds: float) -> VerifyResult:
    return VerifyResult(1, (), timings=VerifyTimings(forward_ns=int(1e9 * seconds), num_forwards=1))
