"""The draft length that pays, with costs and chances one can compute by hand."""

import pytest

from orchestrator.controller import Acceptance, Controller, Rate, VerifyCost


def _acceptance(rate: float) -> Acceptance:
    acceptance = Acceptance()
    acceptance.first = acceptance.further = Rate(rate, 1, 1)
    return acceptance


def _controller(costs: dict[int, float]) -> Controller:
    controller = Controller()
    for _ in range(20):  # often enough for the line to lie on the points
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
    [chosen] = controller.allot([(_acceptance(0.8), 8)], num_rows=1, num_tokens=1)
    assert abs(chosen - best) <= 1 and expected[chosen] > 0.99 * expected[best]


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


def test_cost_is_the_line_through_the_measurements() -> None:
    """A wrong slope drafts too much on a device that is busy, or too little on one that waits."""
    cost = VerifyCost()
    for _ in range(50):
        for num_tokens in (1, 9, 17):
            cost.observe(num_tokens, 0.010 + 0.001 * num_tokens)
    assert cost.seconds(13) == pytest.approx(0.023, rel=0.02)


def test_one_hiccup_does_not_end_drafting() -> None:
    """A size that was slow once must not be avoided for ever: it would never be measured again."""
    controller = _controller({1: 0.010, 5: 0.0105})
    controller.cost.observe(5, 3.0)
    for _ in range(60):
        controller.cost.observe(1, 0.010)
    assert controller.allot([(_acceptance(0.7), 4)], 1, 1) == [4]


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
            taken = controller.allot(drafts, num_rows, num_rows)
            round_s = 0.019 + 0.00125 * (num_rows + sum(taken))
            controller.cost.observe(num_rows + sum(taken), round_s)
            seconds += round_s
            for sequence, length in zip(sequences, taken, strict=True):
                sequence.observe(length, 0)
            lengths = controller.allot([(s, 10) for s in sequences], num_rows, num_rows)
        plain = 96 * (0.019 + 0.00125 * num_rows)
        assert plain / seconds > (0.95 if wave else 0.92)
