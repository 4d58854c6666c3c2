"""Writes what `forerun distil` leaves: a checkpoint directory that a kind of drafter loads.

Its weights are those that the target's checkpoint lacks (see `core.shared_weights`), in bf16;
beside them lie the recipe, the training curve and a model card with what was measured. A directory
appears by a rename. Knows nothing of how the drafter was trained.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.errors import InvalidRequestError
from core.prediction_layer import SHAPE
from core.shared_weights import write_shared
from drafter_service.distil.curve import draw_curve
from drafter_service.distil.measure import Report
from drafter_service.distil.train import Point

CURVE, CARD = "curve.svg", "README.md"


def check_free(folder: Path) -> None:
    """Raise InvalidRequestError for a directory that holds something already."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidRequestError("out", f"{folder} is there already")


def write_checkpoint(
    folder: Path,
    network: Any,
    weights: Mapping[str, Tensor],
    draft_token_ids: Sequence[int],
    manifest: Mapping[str, Any],
) -> None:
    """Write the directory. `weights`: the trained ones, by their names in `network`; `manifest`
    names the "target" as `forerun.json` does, and may tell more. Raises ModelError."""
    check_free(folder)
    text = network.config.get_text_config()
    whole = len(draft_token_ids) == text.vocab_size
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
    unfinished.mkdir(parents=True)
    try:
        text.dtype = network.config.dtype = torch.bfloat16
        network.config.save_pretrained(unfinished)
        network.generation_config.save_pretrained(unfinished)
        write_shared(
            unfinished,
            {name: weight.to("cpu", torch.bfloat16) for name, weight in weights.items()},
            None if whole else draft_token_ids,
            dict(manifest),
        )
        if folder.exists():
            folder.rmdir()
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def write_card(
    folder: Path, manifest: Mapping[str, Any], history: Sequence[Point], measured: Report
) -> None:
    """Write the model card, and the curve that it shows."""
    if history:
        title = f"{folder.name}: distilled from {manifest['target']}"
        (folder / CURVE).write_text(draw_curve(history, title), encoding="utf-8")
    (folder / CARD).write_text(_card(folder, manifest, measured), encoding="utf-8")


def _card(folder: Path, manifest: Mapping[str, Any], measured: Report) -> str:
    size = sum(file.stat().st_size for file in folder.iterdir())
    recipe = "\n".join(f"| {key} | {_shown(value)} |" for key, value in manifest.items())
    longest = measured.acceptance[-1]
    positions = longest.by_position
    numbers = " | ".join(str(k) for k in range(1, len(positions) + 1))
    shares = " | ".join(f"{share:.3f}" for share in positions)
    drafter_ms, target_ms = measured.step_s * 1e3, measured.target_s[0] * 1e3
    is_attached = manifest["shape"] == SHAPE
    kind, attached = ("mtp_layers", "\nattached = true") if is_attached else ("draft_model", "")
    lengths = "\n".join(
        f"| {k} | {each.mean:.3f} | {each.tokens_per_step:.2f} | {measured.speedup(k):.2f} |"
        for k, each in enumerate(measured.acceptance, start=1)
    )
    return f"""# {folder.name}

A drafter for `{manifest["target"]}`, made from it by `forerun distil`. Its {size / 1e6:.1f} MB hold
the layers; embedding and head are the target's own and are read from its checkpoint. Use it with

```toml
[[drafter_pools]]
name = "distilled"
kind = "{kind}"{attached}
max_draft_tokens = {measured.best_length}
model = {{ model = "{folder}" }}
```

## Measured

Greedy, on prompts that were not trained on. Acceptance by position of the draft (of the tokens
drafted there behind accepted ones, the share accepted):

| position | {numbers} | mean |
|---|{"---|" * len(positions)}---|
| accepted | {shares} | {longest.mean:.3f} |

On the machine that made it, one more token in a draft takes the drafter {drafter_ms:.2f} ms and a
step takes the target {target_ms:.2f} ms: {measured.step_ratio:.3f} of it. What that promises one
client if draft and verification take turns and nothing else takes time, tokens per step x T(1) /
(T(k + 1) + the draft's time):

| draft length k | mean acceptance | tokens per verify step | expected speed-up |
|---|---|---|---|
{lengths}

![loss and acceptance over the steps]({CURVE})

## Recipe

| | |
|---|---|
{recipe}
"""


def _shown(value: Any) -> str:
    return str(value).replace("|", "\\|")
