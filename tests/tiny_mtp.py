"""Tiny checkpoints with prediction layers, in the format of the real ones.

The prediction layers are decoder layers behind the last one, with their extra weights under the
names that DeepSeek and GLM publish. transformers looks for them at the layer numbers of the real
models (61; 46 and 92), so `at_layer` has it look where a tiny model has them.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.tiny_models import save_tiny

#: kind of tests.tiny_models -> its model class
CLASSES = {"deepseek_v3": "DeepseekV3ForCausalLM", "glm4_moe": "Glm4MoeForCausalLM"}
NUM_LAYERS = 2


def save_tiny_mtp(
    kind: str,
    path: Path,
    num_mtp_layers: int,
    is_tame: bool,
    seed: int = 0,
    num_layers: int = NUM_LAYERS,
    **fields: Any,
) -> Path:
    """Write a checkpoint of `num_layers` layers and `num_mtp_layers` prediction layers.

    is_tame: a token says nearly all of the next one, so that drafts are often right; otherwise
    attention counts and they hardly ever are.
    """
    count = num_layers + num_mtp_layers
    save_tiny(kind, path, seed, num_hidden_layers=count, **fields)
    tensors = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(seed + 1)
    config = json.loads((path / "config.json").read_text())
    size = config["hidden_size"]
    for layer in range(num_layers, count):
        prefix = f"model.layers.{layer}."
        for name in ("enorm", "hnorm", "shared_head.norm"):
            noise = torch.randn(size, generator=generator)
            tensors[f"{prefix}{name}.weight"] = 1 + 0.1 * noise
        mixed = torch.randn(size, 2 * size, generator=generator) * (0.02 if is_tame else 0.2)
        mixed[:, :size] += torch.eye(size)
        tensors[f"{prefix}eh_proj.weight"] = mixed
    for name in tensors:
        if is_tame and name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = tensors[name] * 0.01
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config["num_hidden_layers"] = num_layers
    config["num_nextn_predict_layers"] = num_mtp_layers
    (path / "config.json").write_text(json.dumps(config))
    return path


@contextlib.contextmanager
def at_layer(kind: str) -> Iterator[None]:
    """Have transformers find the prediction layers of these checkpoints."""
    pattern = [rf"model\.layers\.[{NUM_LAYERS}-9].*"]
    model_class = getattr(transformers, CLASSES[kind])
    with mock.patch.object(model_class, "_keys_to_ignore_on_load_unexpected", pattern):
        yield
