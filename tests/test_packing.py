"""Weights packed for oneDNN give the bits of the plain product."""

from pathlib import Path

import pytest
import torch
from torch import nn

from core.config import ModelConfig
from core.model import RaggedModel, Row
from core.packing import PackedLinear, can_pack, pack_linears, watch_inputs
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


@pytest.mark.parametrize("rows", [1, 2, 5, 8, 40, 300])
def test_layers_that_share_an_input_are_one_product_bit_for_bit(rows: int) -> None:
    """Breaks when fusing changes a bit, mixes the parts up, or serves an old input's output."""
    generator = torch.Generator().manual_seed(rows)
    model = nn.ModuleList(nn.Linear(192, size, dtype=torch.bfloat16) for size in (576, 192, 64))
    with torch.inference_mode():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        inputs = [torch.randn(1, rows, 192, generator=generator).bfloat16() for _ in range(2)]
        expected = [[layer(x) for layer in model] for x in inputs]
        with watch_inputs(model) as groups:
            for layer in model:
                layer(inputs[0])
        assert [len(group) for group in groups] == [3]
        assert pack_linears(model, groups) == 2 * 192 * (576 + 192 + 64)
        for x, outputs in zip(inputs, expected, strict=True):
            assert all(torch.equal(layer(x), y) for layer, y in zip(model, outputs, strict=True))
        # Out of order, and with inputs that differ: each must still get its own.
        assert torch.equal(model[1](inputs[0]), expected[0][1])
        assert torch.equal(model[0](inputs[1]), expected[1][0])
        assert torch.equal(model[2](inputs[0]), expected[0][2])


@pytest.mark.parametrize("size", [576, 1024, 1025, 1536, 4096])
def test_a_row_has_the_same_product_in_any_number_of_rows(size: int) -> None:
    """Breaks when oneDNN sums the values of a single row in another order than those of several:
    a token's logits would then depend on whether others are computed with it."""
    generator = torch.Generator().manual_seed(size)
    linear = nn.Linear(size, 960, bias=False, dtype=torch.bfloat16)
    with torch.inference_mode():
        linear.weight.copy_(torch.randn(960, size, generator=generator))
        x = torch.randn(1, 128, size, generator=generator).bfloat16()
        packed = PackedLinear(linear)
        every = packed(x)
        assert every.shape == (1, 128, 960)
        for rows in (1, 2, 3, 7, 8, 33):
            parts = torch.cat([packed(part) for part in x.split(rows, dim=1)], dim=1)
            assert torch.equal(parts, every)


def test_only_plain_bf16_linears_are_packed() -> None:
    """Breaks when a subclass (quantised layers are) or an fp32 layer is replaced."""

    class Quantised(nn.Linear):
        pass

    model = nn.Sequential(
        nn.Linear(32, 32, dtype=torch.bfloat16),
        Quantised(32, 32, dtype=torch.bfloat16),
        nn.Linear(32, 32),
    )
    assert pack_linears(model) == 2 * 32 * 32
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
