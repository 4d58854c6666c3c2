"""Makes checkpoints: GGUF to safetensors, and a shallower copy of a checkpoint.

Beside `core.model` and `core.tokenizer` the only user of transformers. Knows nothing of where
files come from or where they are kept (see `core.embedded`). The target folder must exist; a
failure may leave it half filled, so callers write beside the place they mean and rename.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

_WEIGHTS = "model.safetensors"
_LAYERS = "model.layers."


def convert_gguf(source: Path, gguf_file: str, target: Path) -> None:
    """Write the GGUF checkpoint `source/gguf_file` to `target` as bfloat16 safetensors.

    The tokenizer, its chat template and the generation config (end tokens) come with it.
    """
    quantization = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source, gguf_file=gguf_file, dtype=torch.bfloat16, quantization_config=quantization
    )
    # The weights are plain now; saying "gguf" would make a loader look for packed ones.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, gguf_file=gguf_file)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def keep_layers(source: Path, target: Path, layers: Sequence[int]) -> None:
    """Copy the one-file checkpoint `source` to `target` with only these decoder layers, in order.

    Embeddings, final norm, head and tokenizer stay as they are.
    """
    kept: dict[str, torch.Tensor] = {}
    new_index = {old: new for new, old in enumerate(layers)}
    for name, tensor in load_file(source / _WEIGHTS).items():
        if not name.startswith(_LAYERS):
            kept[name] = tensor
            continue
        index, rest = name.removeprefix(_LAYERS).split(".", 1)
        if int(index) in new_index:
            kept[f"{_LAYERS}{new_index[int(index)]}.{rest}"] = tensor
    save_file(kept, target / _WEIGHTS, metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["num_hidden_layers"] = len(layers)
    (target / "config.json").write_text(json.dumps(config, indent=2))
    for file in source.iterdir():
        if file.name not in (_WEIGHTS, "config.json"):
            shutil.copy(file, target / file.name)
