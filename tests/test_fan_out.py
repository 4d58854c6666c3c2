"""Which outcomes are drafted for: the policy alone."""

import pytest

from drafter_service.fan_out import MAX_GUESSES, FanOut, Pace

GUESSES = [[10, 11, 12], [20, 21, 22], [30, 31, 32]]  # of a block of two


def taught(accepted: int, token: int, times: int = 200) -> FanOut:
    """A policy that has seen one outcome again and again, of sequence 1."""
    fan_out = FanOut()
    for _ in range(times):
        fan_out.learn(1, 2, accepted, token, GUESSES)
    return fan_out


def test_a_budget_is_spent_on_the_likeliest_outcomes() -> None:
    """Breaks when branches are spread evenly: most would be for outcomes that never come."""
    fan_out = FanOut()
    assert fan_out.split(1, 2, 1) == [0, 0, 1]  # full acceptance, the drafter's own choice
    assert [sum(fan_out.split(1, 4, budget)) for budget in (0, 3, 9)] == [0, 3, 9]
    split = fan_out.split(1, 4, 12)
    assert split[:4] == sorted(split[:4], reverse=True)  # early rejections are likelier
    assert fan_out.split(1, 0, 64) == [MAX_GUESSES]


def test_the_split_follows_acceptance() -> None:
    """Breaks when a drafter that is nearly always wrong gets branches for full acceptance, or one
    that is nearly always right gets them for rejections."""
    wrong, right = taught(0, 10).split(1, 2, 6), taught(2, 30).split(1, 2, 6)
    assert wrong[0] > 2 * wrong[2] and right[2] > 2 * right[0]


def test_a_sequence_has_its_own_chances_and_begins_with_everyones() -> None:
    """Breaks when a text that is hard to draft drags the others down, or a new one starts from
    nothing although the drafter is known."""
    fan_out = taught(2, 30)
    for _ in range(30):
        fan_out.learn(2, 2, 0, 10, GUESSES)
    assert fan_out.split(1, 2, 2)[2] > fan_out.split(2, 2, 2)[2]
    fan_out.forget(2)
    assert fan_out.split(2, 2, 6) == fan_out.split(3, 2, 6)


def test_ranks_are_learned_where_they_were_right() -> None:
    """Breaks when the third guess, which never hits, is drafted for at each rejected position
    before the first one at the next."""
    first = taught(0, 10)
    for _ in range(200):
        first.learn(1, 2, 1, 20, GUESSES)
    assert first.split(1, 2, 2)[:2] == [1, 1]
    third = taught(0, 12)
    assert third.split(1, 2, 3)[0] == 3  # a worse rank implies the better ones


def test_unknown_guesses_teach_nothing_about_ranks() -> None:
    """The last position's guesses may not have been computed when the outcome came."""
    splits = []
    for bonuses in ([], [30, 31, 32]):
        fan_out = FanOut()
        for _ in range(100):
            fan_out.learn(1, 2, 0, 10, GUESSES)
            fan_out.learn(1, 2, 2, 77, [[10], [20], bonuses])
        splits.append(fan_out.split(1, 2, 6))
    assert splits[0][2] > splits[1][2]


@pytest.mark.parametrize(("window_s", "expected"), [(1.0, 16), (0.35, 8), (0.17, 4), (0.01, 1)])
def test_the_budget_is_what_can_be_done_in_time(window_s: float, expected: int) -> None:
    """Breaks when a CPU drafter starts more branches than it can finish before the outcome, or
    when it stops altogether."""
    pace = Pace()
    for _ in range(50):
        for num_branches in (1, 2, 4, 8, 16):
            pace.time_step(2 * num_branches, 0.01 * num_branches)
        pace.time_block(window_s)
    assert pace.budget(16, num_sequences=2, num_steps=4) == expected


def test_sizes_that_were_never_tried_are_tried() -> None:
    """Breaks when a drafter that began with few branches never finds out that more are free."""
    pace = Pace()
    assert pace.budget(64, 1, 4) == 64
    pace.time_step(2, 0.01)
    pace.time_block(0.1)
    assert pace.budget(64, 1, 4) == 64
    pace.time_step(64, 0.1)
    assert pace.budget(64, 1, 4) == 32
