"""Every served model family, ragged, against the stock transformers model in fp32 on CPU.

Windows are 16 tokens, so prompts, drafts and rollbacks cross them.
"""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from core.config import ModelConfig
from core.model import RaggedModel, Row
from tests.tiny_models import SERVED, VOCAB_SIZE, TinyFactory, greedy_reference, load_reference

TOLERANCE = 3e-5  # fp32 noise of other batch shapes, on logits of up to 10


def load(path: object, **options: object) -> RaggedModel:
    """A tiny model held for tests."""
    defaults = {"dtype": "float32", "device_map": "cpu", "max_length": 160, "max_sequences": 4}
    return RaggedModel.load(ModelConfig(model=str(path), **{**defaults, **options}))


def truth(reference: PreTrainedModel) -> Callable[[list[int], int], Tensor]:
    """Logits behind the last `count` of some tokens, computed from nothing by the stock model."""

    def logits(token_ids: list[int], count: int) -> Tensor:
        with torch.inference_mode():
            return reference(torch.tensor([token_ids])).logits[0, len(token_ids) - count :]

    return logits


@pytest.mark.parametrize("kind", SERVED)
def test_ragged_forwards_equal_the_stock_model(kind: str, tiny: TinyFactory) -> None:
    """Breaks when any row sees another row's tokens, a rolled-back draft, a wrong position, or a
    wrong window: prompts in chunks, single tokens and drafts of other lengths share forwards."""
    path = tiny(kind)
    model, expected = load(path), truth(load_reference(path))
    rng = random.Random(5)
    texts = {s: [rng.randrange(VOCAB_SIZE) for _ in range(150)] for s in range(3)}
    cached = dict.fromkeys(texts, 0)

    def step(wanted: dict[int, int], wrong: int = 0) -> None:
        """Forward `count` tokens of each sequence, the last `wrong` of them not its text's."""
        rows, logits = [], []
        for sequence, count in wanted.items():
            start = cached[sequence]
            tokens = texts[sequence][start : start + count - wrong]
            tokens += [rng.randrange(VOCAB_SIZE) for _ in range(wrong)]
            rows.append(Row(sequence, start, tokens, count))
            logits.append(expected(texts[sequence][:start] + tokens, count))
            cached[sequence] = start + count - wrong
        difference = (model.forward(rows) - torch.cat(logits)).abs().max().item()
        assert difference < TOLERANCE

    for sequence in texts:
        model.open(sequence)
    step({0: 40, 1: 14})
    step({1: 1, 0: 37, 2: 5})
    step({2: 9, 0: 3, 1: 6}, wrong=2)
    step({0: 1, 1: 1, 2: 1})
    step({1: 33, 2: 12}, wrong=11)
    step({0: 8, 2: 2}, wrong=1)
    step({2: 34, 1: 6, 0: 4})
    model.cache.check()


@pytest.mark.parametrize("kind", SERVED)
def test_greedy_decoding_equals_generate(kind: str, tiny: TinyFactory) -> None:
    """Breaks when sequences that join and leave a batch change each other's text."""
    path = tiny(kind)
    model, reference = load(path), load_reference(path)
    rng = random.Random(1)
    waiting = [[rng.randrange(250) for _ in range(rng.randrange(1, 60))] for _ in range(6)]
    running: dict[int, list[int]] = {}
    prompts: dict[int, list[int]] = {}
    finished: dict[int, list[int]] = {}
    while waiting or running:
        while waiting and len(running) < model.max_sequences:
            sequence = len(prompts)
            prompts[sequence] = waiting.pop()
            running[sequence] = list(prompts[sequence])
            model.open(sequence)
        rows = [
            Row(sequence, model.length(sequence), tokens[model.length(sequence) :], 1)
            for sequence, tokens in running.items()
        ]
        drawn = model.forward(rows).argmax(dim=-1).tolist()
        for (sequence, tokens), token in zip(list(running.items()), drawn, strict=True):
            tokens.append(token)
            new = tokens[len(prompts[sequence]) :]
            if token in model.eos_token_ids or len(new) == 20 + 3 * sequence:
                finished[sequence] = new
                model.close(sequence)
                del running[sequence]
    for sequence, new in finished.items():
        assert new == greedy_reference(reference, prompts[sequence], 20 + 3 * sequence)


def test_a_padded_vocabulary_keeps_its_width(tiny: TinyFactory) -> None:
    """Breaks when logits are cut or mis-shaped for a head larger than the tokenizer."""
    model = load(tiny("padded"))
    assert (model.vocab_size, model.tokenizer_size) == (320, VOCAB_SIZE)
    assert model.identity.vocab_size == 320
    model.open(0)
    assert model.forward([Row(0, 0, [319, 5], 2)]).shape == (2, 320)
