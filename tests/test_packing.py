"""Weights packed for oneDNN give the bits of the plain product."""

from pathlib import Path

import pytest
import torch
from torch import nn

from core.config import ModelConfig
from core.model import RaggedModel, Row
from core.packing import PackedLinear, can_pack, pack_linears
from tests.tiny_models import TinyFactory, save_tiny

pytestmark = pytest.mark.skipif(not can_pack(), reason="this CPU has no bf16 products in oneDNN")


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 17, 40, 64, 300])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_product_is_bitwise_the_plain_one(rows: int, bias: bool) -> None:
    """Breaks when packing changes any bit: the text would depend on a speed switch."""
    generator = torch.Generator().manual_seed(rows)
    linear = nn.Linear(192, 576, bias=bias, dtype=torch.bfloat16)
    with torch.inference_mode():
        linear.weight.copy_(torch.randn(576, 192, generator=generator))
        x = torch.randn(1, rows, 192, generator=generator).bfloat16()
        packed = PackedLinear(linear)
        assert torch.equal(packed(x), linear(x))


def test_only_plain_bf16_linears_are_packed() -> None:
    """Breaks when a subclass (quantised layers are) or an fp32 layer is replaced."""

    class Quantised(nn.Linear):
        pass

    model = nn.Sequential(
        nn.Linear(32, 32, dtype=torch.bfloat16),
        Quantised(32, 32, dtype=torch.bfloat16),
        nn.Linear(32, 32),
    )
    assert pack_linears(model) == 1
    assert [type(module) for module in model] == [PackedLinear, Quantised, nn.Linear]


@pytest.mark.parametrize("tied", [False, True])
def test_a_packed_model_says_the_same(tied: bool, tmp_path: Path, tiny: TinyFactory) -> None:
    """Breaks when packing loses a tied embedding or a layer: bf16 logits, bit for bit."""
    path = (
        save_tiny("llama", tmp_path / "tied", tie_word_embeddings=True) if tied else tiny("llama")
    )
    results = []
    for pack in (True, False):
        config = ModelConfig(
            model=str(path), dtype="bfloat16", device_map="cpu", max_length=64, pack_weights=pack
        )
        model = RaggedModel.load(config)
        model.open(0)
        model.open(1)
        first = model.forward([Row(0, 0, list(range(40)), 40), Row(1, 0, [5, 6, 7], 3)])
        second = model.forward([Row(1, 3, [9], 1), Row(0, 40, [1, 2], 2)])
        results.append(torch.cat([first, second]))
    assert torch.equal(*results)
