"""The draft length that pays, with costs and chances one can compute by hand."""

import pytest

from orchestrator.controller import Controller, VerifyCost
from orchestrator.pipeline import Acceptance


def _acceptance(rate: float) -> Acceptance:
    acceptance = Acceptance()
    acceptance.rate = rate
    return acceptance


def _controller(costs: dict[int, float]) -> Controller:
    controller = Controller()
    for num_tokens, seconds in costs.items():
        controller.cost.observe(num_tokens, seconds)
    return controller


def test_free_verification_takes_the_whole_draft() -> None:
    """On a device that waits for memory, more tokens cost nothing: draft as much as there is."""
    controller = _controller({1: 0.010, 9: 0.010})
    assert controller.allot([(_acceptance(0.5), 5)], num_rows=1, num_tokens=1) == [5]


def test_draft_is_left_out_where_it_cannot_pay() -> None:
    """Cost in proportion to tokens: a draft token must be accepted always to break even."""
    controller = _controller({1: 0.010, 9: 0.090})
    assert controller.allot([(_acceptance(0.9), 5)], num_rows=1, num_tokens=1) == [0]


def test_length_is_the_one_with_the_best_goodput() -> None:
    """Enumerated: 1 + .8 + .64 + ... tokens over 10 ms + 2 ms per draft token."""
    controller = _controller({1: 0.010, 11: 0.030})
    expected = [sum(0.8**i for i in range(m + 1)) / (0.010 + 0.002 * m) for m in range(9)]
    best = max(range(9), key=lambda m: expected[m])
    assert controller.allot([(_acceptance(0.8), 8)], num_rows=1, num_tokens=1) == [best]


def test_tokens_go_to_the_rows_that_use_them() -> None:
    """A batch shares its budget: a row that is always right gets what a bad one would waste."""
    controller = _controller({2: 0.010, 12: 0.030})
    good, bad = controller.allot([(_acceptance(0.95), 5), (_acceptance(0.1), 5)], 2, 2)
    assert (good, bad) == (5, 0)


def test_switched_off_it_verifies_every_draft_whole() -> None:
    """The plain path stays beside the adaptive one."""
    controller = Controller(is_adaptive=False)
    controller.cost.observe(1, 1.0)
    controller.cost.observe(9, 9.0)
    assert controller.allot([(_acceptance(0.1), 5), (_acceptance(0.1), 0)], 2, 2) == [5, 0]


def test_unknown_costs_try_the_whole_draft() -> None:
    """Before the first measurement nothing speaks against a draft."""
    assert Controller().allot([(_acceptance(0.5), 4)], 1, 1) == [4]


def test_curve_interpolates_and_never_falls() -> None:
    """Noise in the measurements must not make a longer batch look cheaper."""
    cost = VerifyCost()
    cost.observe(2, 0.02)
    cost.observe(4, 0.04)
    cost.observe(6, 0.03)
    assert cost.curve(1, 7) == pytest.approx([0.02, 0.02, 0.03, 0.04, 0.04, 0.04, 0.04])


def test_acceptance_follows_history_and_forgives() -> None:
    """A drafter that was switched off must be tried again some time."""
    acceptance = Acceptance()
    for _ in range(30):
        acceptance.observe(3, 0)
    low = acceptance.rate
    assert low < 0.05
    for _ in range(100):
        acceptance.observe(0, 0)
    assert acceptance.rate > 0.3
    for _ in range(30):
        acceptance.observe(3, 3)
    assert acceptance.chance(3) > 0.9
