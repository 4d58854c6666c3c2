"""The best tokens of a draw, against its definition over the whole vocabulary."""

import pytest
import torch

from core.sampling import draw, gumbel_noise, process_logits
from core.types import Rule, SamplingParams
from drafter_service.guesses import best_tokens

GREEDY = SamplingParams()


def coupled(seed: int, **options: float) -> SamplingParams:
    return SamplingParams(temperature=0.8, seed=seed, rule=Rule.COUPLED, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "params",
    [
        [GREEDY] * 3,
        [coupled(1), coupled(2), coupled(3)],
        [coupled(1, top_k=3), GREEDY, coupled(3, top_p=0.5)],
    ],
)
def test_the_best_are_those_of_the_whole_draw(params: list[SamplingParams]) -> None:
    """Breaks when a guess uses another position's noise than the target's draw, or offers a token
    that was cut: the target would hardly ever say it. The first one is the draw itself."""
    torch.manual_seed(0)
    logits, positions = torch.randn(3, 700) * 3, [5, 6, 70]
    noise = gumbel_noise([p.seed for p in params], positions, 700)
    scores = process_logits(logits, params).double()
    for i, p in enumerate(params):
        scores[i] += noise[i] if p.temperature else 0
    found = best_tokens(logits, params, positions, 5)
    for row, ids in zip(scores, found, strict=True):
        count = min(5, int(row.isfinite().sum()))
        assert ids == row.topk(count).indices.tolist()
    assert [ids[0] for ids in found] == draw(logits, params, positions).tolist()


def test_logits_that_are_no_numbers_have_none() -> None:
    """Breaks when a broken head makes guesses, or spoils those of the other rows."""
    logits = torch.randn(2, 50)
    logits[0] = float("nan")
    first, second = best_tokens(logits, [GREEDY, GREEDY], [1, 1], 3)
    assert first == [] and len(second) == 3
