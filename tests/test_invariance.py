"""bf16 on a CPU: a token's logits have the same bits whatever else is in the forward.

Each family's text is read once token by token, alone; every other way to read it must give those
bits. The checkpoints are tiny but for what the sums' order depends on: an intermediate size beyond
1024, more than a window's step of tokens, and in one test more than a block of keys.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from core.config import ModelConfig
from core.model import RaggedModel, Row
from core.packing import can_pack
from tests.tiny_models import TinyFactory

pytestmark = pytest.mark.skipif(not can_pack(), reason="this CPU has no bf16 products in oneDNN")

LENGTH = 600
WIDE = {
    "hidden_size": 128,
    "intermediate_size": 1536,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "std": 0.1,
}
KINDS = {
    "llama": WIDE,
    "mistral": WIDE,  # a window of 16 tokens
    "qwen3": WIDE,
    "gemma2": WIDE | {"intermediate_size": 512},  # soft caps, and a window in every other layer
    "gpt2": {"hidden_size": 128, "n_inner": 1024, "max_position_embeddings": 2048, "std": 0.1},
}
Known = tuple[str, RaggedModel, list[int], Tensor]


def text_of(seed: int, length: int = LENGTH) -> list[int]:
    """Random ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (length,), generator=generator).tolist()


def load(kind: str, tiny: TinyFactory) -> RaggedModel:
    """A fresh engine."""
    config = ModelConfig(
        model=str(tiny(kind, **KINDS[kind])),
        dtype="bfloat16",
        device_map="cpu",
        max_sequences=10,
        max_length=1300,
        max_batch_tokens=4096,
    )
    return RaggedModel.load(config)


def read(model: RaggedModel, sequence: int, text: Sequence[int], parts: Sequence[int]) -> Tensor:
    """All logits of `text` behind what is cached, read in `parts`, the last of them repeated."""
    logits, at, turn, start = [], 0, 0, model.length(sequence)
    while at < len(text):
        part = text[at : at + parts[min(turn, len(parts) - 1)]]
        logits.append(model.forward([Row(sequence, start + at, part, len(part))]))
        at, turn = at + len(part), turn + 1
    return torch.cat(logits)


@pytest.fixture(scope="module", params=KINDS)
def known(request: pytest.FixtureRequest, tiny: TinyFactory) -> Known:
    """A family, its engine, a text, and its logits read token by token, alone."""
    model, text = load(request.param, tiny), text_of(1)
    model.open(0)
    logits = read(model, 0, text, [1])
    model.truncate(0, 0)
    model.close(0)
    return request.param, model, text, logits


@pytest.fixture
def engine(known: Known) -> RaggedModel:
    """The engine with nothing open and nothing retained."""
    model = known[1]
    for sequence in range(10):
        model.close(sequence)
    for sequence in range(10):
        model.open(sequence)
        model.forward([Row(sequence, 0, [0], 0)])
    for sequence in range(10):
        model.truncate(sequence, 0)
        model.close(sequence)
    return model


@pytest.mark.parametrize(
    "parts",
    [[2], [3], [6], [8], [LENGTH], [1, LENGTH], [33, LENGTH], [32, 31, 1, 257, 5, LENGTH]],
    ids=str,
)
def test_how_a_text_is_cut_does_not_show(
    engine: RaggedModel, known: Known, parts: list[int]
) -> None:
    """Breaks when a draft, a chunk of a prompt, or a text read again after a failure gets other
    logits than tokens that are generated one by one."""
    engine.open(0)
    assert torch.equal(read(engine, 0, known[2], parts), known[3])


@pytest.mark.parametrize("num_mates", [1, 7])
def test_batch_mates_do_not_show(engine: RaggedModel, known: Known, num_mates: int) -> None:
    """Breaks when a request's text depends on who is served with it: mates of other lengths,
    with single tokens, drafts and prompts."""
    _, _, text, expected = known
    at, counts = 0, [40, 1, 1, 6, 20, 1, 3, 100, 1, 2, 300, 8, 1, 1]
    for sequence in range(1 + num_mates):
        engine.open(sequence)
    for turn, count in enumerate(counts):
        rows = [Row(0, at, text[at : at + count], count)]
        for mate in range(1, 1 + num_mates):
            size = 50 + 60 * mate if turn == 0 else 1 + (mate * turn) % 7 + 40 * (mate == turn)
            rows.append(Row(mate, engine.length(mate), text_of(mate, size), 1))
        got = engine.forward(rows if turn % 2 else rows[::-1])
        got = got[:count] if turn % 2 else got[-count:]
        assert torch.equal(got, expected[at : at + count]), (turn, at)
        at += count


def test_a_reused_prefix_does_not_show(engine: RaggedModel, known: Known) -> None:
    """Breaks when K/V that another sequence computed, in other parts, differ from one's own."""
    _, _, text, expected = known
    engine.open(0)
    read(engine, 0, [*text[:523], 7, 7, 7], [100, 6])
    engine.open(1)
    reused = engine.reuse_prefix(1, text)
    assert reused == 523
    got = read(engine, 1, text[reused:], [1, 9])
    assert torch.equal(got, expected[reused:])


def test_after_a_rollback_nothing_shows(engine: RaggedModel, known: Known) -> None:
    """Breaks when the K/V of rejected tokens, which stay behind the cut, leak into a sum."""
    _, _, text, expected = known
    engine.open(0)
    for start in range(0, 120, 4):
        row = [*text[start : start + 4], *text_of(start, 5)]
        assert torch.equal(engine.forward([Row(0, start, row, 9)])[:4], expected[start : start + 4])


def test_the_first_tokens_of_many_texts(engine: RaggedModel, known: Known) -> None:
    """Breaks when few keys are summed by other kernels than many: each text alone, token by token,
    and then all of them at once."""
    texts = [text_of(seed, 24) for seed in range(10, 20)]
    expected = []
    for text in texts:
        engine.open(0)
        expected.append(read(engine, 0, text, [1]))
        engine.truncate(0, 0)
        engine.close(0)
    for sequence in range(10):
        engine.open(sequence)
    got = engine.forward([Row(i, 0, text, 24) for i, text in enumerate(texts)])
    assert torch.equal(got, torch.cat(expected))


def test_another_engine_says_the_same(known: Known, tiny: TinyFactory) -> None:
    """Breaks when a verifier that takes a stream over reads generated text with other bits."""
    kind, _, text, expected = known
    model = load(kind, tiny)
    model.open(5)
    assert torch.equal(read(model, 5, text, [LENGTH]), expected)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_long_contexts(kind: str, tiny: TinyFactory) -> None:
    """Breaks when the keys beyond the first block, or up to the very end of the cache, are added
    up in an order that depends on how many there are or on the number of queries."""
    model, text = load(kind, tiny), text_of(3, 1300)
    for sequence in range(3):
        model.open(sequence)
    expected = read(model, 0, text, [990, 1])
    assert torch.equal(read(model, 1, text, [1030, 6, 3, 90, 8]), expected)
    model.truncate(1, 1100)
    read(model, 2, text_of(4, 200), [200])
    rows = [Row(2, 200, [1, 2, 3], 0), Row(1, 1100, text[1100:], 200), Row(0, 1299, text[1299:], 1)]
    got = model.forward(rows)
    assert torch.equal(got[:200], expected[1100:])
    assert torch.equal(got[200:], expected[1299:])
