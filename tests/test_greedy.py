"""core.sampling.draw at temperature 0: a maximum found in two steps, over ties and broken rows."""

import pytest
import torch

from core.sampling import NO_TOKEN, draw
from core.types import SamplingParams


@pytest.mark.parametrize("vocab_size", [7, 256, 300, 1024, 49_152])
def test_greedy_takes_the_lowest_id_of_the_greatest(vocab_size: int) -> None:
    """The argmax goes by blocks: a tie over a border, or a best in the rest, must not be lost."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randint(0, 9, (40, vocab_size), generator=generator).float()  # full of ties
    logits[1, -1] = 99.0
    logits[2, 0] = 99.0
    drawn = draw(logits, [SamplingParams()] * 40, range(40))
    assert drawn.tolist() == [int((row == row.max()).nonzero()[0]) for row in logits]
    logits[3, vocab_size // 2] = torch.nan
    logits[4, -1] = torch.nan
    broken = draw(logits, [SamplingParams()] * 40, range(40))
    assert broken[3:5].tolist() == [NO_TOKEN] * 2
    assert broken[5:].tolist() == drawn[5:].tolist()
