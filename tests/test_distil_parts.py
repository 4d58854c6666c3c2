"""The parts of `forerun distil` alone: writing, measuring, the loss, the order of batches."""

from pathlib import Path

import pytest
import torch

from core.config import ModelConfig
from core.model import RaggedModel
from drafter_service.distil.batches import endless, make_batch
from drafter_service.distil.generate import GenerationOptions, Text, generate, load_texts
from drafter_service.distil.measure import acceptance
from drafter_service.distil.prompts import HELD_OUT, built_in, whole_words
from drafter_service.distil.shapes import choose_layers, choose_vocabulary
from drafter_service.distil.train import distillation_loss
from tests.tiny_models import EOS, VOCAB_SIZE


def test_built_in_prompts_are_many_and_never_held_out() -> None:
    """Acceptance on a prompt that was trained on would flatter; a repeated one would be wasted."""
    words = whole_words([" Paris", " river", "stone", " a", " lantern", " x1"])
    assert words == ["river", "lantern"]
    prompts = [prompt for prompt, _ in zip(built_in(words), range(2000), strict=False)]
    assert len(set(prompts)) == 2000
    assert not set(prompts) & set(HELD_OUT) and len(set(HELD_OUT)) == 40
    assert not [prompt for prompt in prompts if "{" in prompt]
    assert sum("lantern" in prompt for prompt in prompts) > 100
    assert prompts[:100] == [p for p, _ in zip(built_in(), range(100), strict=False)]


def test_answers_do_not_depend_on_their_batch(tiny_llama: Path, tmp_path: Path) -> None:
    """Greedy and sampled, of several lengths: one at a time and many at once give the same."""
    prompts = [f"{i}" * (i % 5 + 1) for i in range(20)]
    written = []
    for rows in (1, 7):
        target = RaggedModel.load(
            ModelConfig(model=str(tiny_llama), max_sequences=rows, max_length=64)
        )
        options = GenerationOptions(max_new_tokens=12, top_n=4)
        paths = generate(target, prompts, tmp_path / str(rows), options, 1 << 30)
        written.append([text.answer_ids for text in load_texts(paths)])
    assert written[0] == written[1]
    assert {len(answer) for answer in written[0] if answer[-1] != EOS} <= {12}


def test_acceptance_counts_positions_behind_accepted_ones() -> None:
    """Of 4 drafts: right-right-wrong, wrong, right-wrong, right (cut by the end)."""
    yes, no = True, False
    found = acceptance([[[yes, yes, no, no, yes, no, yes]]], 3)
    assert found.by_position == (3 / 4, 1 / 2, 0.0)
    assert found.tokens_per_step == 7 / 4
    assert found.agreement == 4 / 7


def test_acceptance_of_places_that_differ() -> None:
    """A drafter that knows less of its own second token: what counts is the draft that was begun
    there, not what another draft said of the same token."""
    first, second = [True, True, False, True], [False, True, True]
    found = acceptance([[first, second]], 2)  # right-wrong, wrong, right (cut by the end)
    assert found.by_position == (2 / 3, 0.0)
    assert found.tokens_per_step == 4 / 3


def test_loss_is_zero_for_the_target_itself_and_ignores_unknown_tokens() -> None:
    """A drafter that says exactly what the target does has nothing left to learn."""
    probabilities = torch.tensor([[0.5, 0.25, 0.125]])
    text = Text([1, 2], [3], torch.tensor([[3, 5, 7]]), probabilities.log().half())
    columns = torch.full((10,), -1)
    columns[torch.tensor([3, 5, 7, 8])] = torch.arange(4)
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    batch = make_batch([text], columns)
    assert [batch.rows.tolist(), batch.places.tolist(), batch.ordinals.tolist()] == [[0], [2], [0]]
    every = torch.tensor([0])
    assert float(distillation_loss(logits, batch, every, 0.0)) == pytest.approx(0.0, abs=1e-3)
    assert float(distillation_loss(logits.roll(1, 1), batch, every, 0.0)) > 0.1
    columns[3] = -1
    outside = make_batch([text], columns)
    assert torch.isfinite(distillation_loss(logits, outside, every, 0.5))


def test_order_is_the_same_from_any_step() -> None:
    """Resuming must meet the batches that the uninterrupted run would have met."""
    lengths = [i % 13 for i in range(50)]
    whole = endless(lengths, 8, seed=1, first_step=0)
    batches = [next(whole) for _ in range(20)]
    for step in (0, 3, 6, 13):
        later = endless(lengths, 8, seed=1, first_step=step)
        assert [next(later) for _ in range(20 - step)] == batches[step:]
    assert sorted(i for batch in batches[:6] for i in batch) != list(range(48))


def test_choices_by_default() -> None:
    """Both ends are kept, the frequent tokens, and those that end a text."""
    assert choose_layers(30, 4) == (0, 10, 20, 29)
    assert choose_layers(3, 1) == (0,)
    ids = choose_vocabulary([[9, 9, 8], [9, 250]], 5, VOCAB_SIZE, [EOS])
    assert ids == [0, 8, 9, 250, EOS]
