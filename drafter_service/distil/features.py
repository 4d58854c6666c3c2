"""What the target computes of the texts beside its tokens, kept on disk for training.

A shard of features lies under the name of its shard of texts: of every text all tokens but the
last, one behind the other, in the target's type. It is computed once and then mapped, not read: an
epoch touches each page once. Knows nothing of drafters but the names of what they need.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from core.errors import ModelError
from core.features import FeatureTap
from core.model import RaggedModel, Row
from drafter_service.distil.generate import Text, load_texts

_NAME = "features"


def write_features(
    model: RaggedModel,
    needs: Sequence[str],
    shards: Sequence[Path],
    folder: Path,
    on_shard: Callable[[int], None] = lambda done: None,
) -> list[Path]:
    """Compute `needs` (as core/features.py names them) of the texts of all shards that lack them.

    Returns the shards of features, in order. Calls `on_shard` with how many there are.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / shard.name for shard in shards]
    tap = FeatureTap(model, needs)
    try:
        for done, (path, shard) in enumerate(zip(paths, shards, strict=True)):
            on_shard(done)
            if not path.exists():
                unfinished = path.with_suffix(f".{os.getpid()}")
                values = _features(model, tap, list(load_texts([shard])))
                save_file({_NAME: torch.cat(values).cpu()}, unfinished)
                unfinished.rename(path)
    finally:
        tap.close()
    return paths


def with_features(shards: Sequence[Path], folder: Path) -> Iterator[Text]:
    """The texts of shards together with their features. Raises ModelError for a damaged file."""
    for shard in shards:
        try:
            values = load_file(folder / shard.name)[_NAME]
        except (OSError, KeyError, SafetensorError) as error:
            raise ModelError(f"{folder / shard.name}: not a shard of features: {error}") from error
        start = 0
        for text in load_texts([shard]):
            stop = start + len(text.prompt_ids) + len(text.answer_ids) - 1
            yield replace(text, features=values[start:stop])
            start = stop


def _features(model: RaggedModel, tap: FeatureTap, texts: Sequence[Text]) -> list[torch.Tensor]:
    """`[n, F]` per text; texts of like length run together."""
    ids = [[*text.prompt_ids, *text.answer_ids[:-1]] for text in texts]
    found: dict[int, torch.Tensor] = {}
    waiting = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    while waiting:
        batch: list[int] = []
        room = model.max_batch_tokens
        while waiting and len(batch) < model.max_sequences and len(ids[waiting[0]]) <= room:
            room -= len(ids[waiting[0]])
            batch.append(waiting.pop(0))
        for i in batch:
            model.open(i)
        model.forward([Row(i, 0, ids[i], 0) for i in batch])
        found |= dict(zip(batch, tap.read(batch), strict=True))
        for i in batch:
            model.truncate(i, 0)
            model.close(i)
    return [found[i] for i in range(len(ids))]
