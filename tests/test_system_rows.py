"""The push model's prediction and what is compared with it, without a clock of its own."""

from collections import Counter

import pytest

from benchmarks.links import Link
from benchmarks.setting import DraftCost, Setting, TargetCost
from benchmarks.simulate import simulate
from benchmarks.system_rows import acceptance_of, expected_tokens, hit_rate, predicted

SETTING = Setting(
    target=TargetCost(base_s=0.03),
    draft=DraftCost(step_s=0.003),
    acceptance=(0.8,),
    guess_hits=(0.3, 0.45, 0.55),
    num_new_tokens=200,
    pool={"max_draft_tokens": 4, "max_branches": 16},
)


def test_the_model_is_what_one_computes_by_hand() -> None:
    """A sum that begins at the wrong power, a link or a step that is left out."""
    assert expected_tokens(0.5, 3) == 1.875 and expected_tokens(1.0, 4) == 5.0
    assert predicted(SETTING, 1.0, 1.0) == pytest.approx(5.0)
    slow = SETTING.model_copy(update={"link": Link(one_way_s=0.02)})
    assert predicted(slow, 1.0, 1.0) == pytest.approx(5.0 * 30 / (15 + 40))
    assert predicted(slow, 1.0, 0.0) == pytest.approx(1.0)


@pytest.mark.parametrize("round_trip_s", [0.0, 0.01])
def test_the_system_reaches_the_model(round_trip_s: float) -> None:
    """A round that waits for what was there, or goes without what would have come at once; without
    the noise of a machine the mark of the row is far."""
    setting = SETTING.model_copy(update={"link": Link(one_way_s=round_trip_s / 2)})
    result = simulate(setting)
    told = predicted(setting, acceptance_of(result, setting), hit_rate(result))
    assert 0.6 < hit_rate(result) < 0.95
    assert result.tokens_per_s * 0.03 >= 0.95 * told


def test_drafting_ahead_beats_drafting_when_the_outcome_is_known() -> None:
    """The same texts with a slow link: what is not hidden costs a third."""
    setting = SETTING.model_copy(update={"link": Link(one_way_s=0.005)})
    waiting = setting.model_copy(update={"pool": {"max_draft_tokens": 4}})
    pushed, waited = simulate(setting), simulate(waiting)
    assert pushed.texts == waited.texts
    assert pushed.tokens_per_s > 1.3 * waited.tokens_per_s
    assert sum((end.stats.plan_misses for end in waited.ends), Counter()) == Counter()
