"""Who answers the prompts and computes the hidden states: this process, or others in its place.

What a writer leaves are the shards of `generate` and `features`; they are the same whoever wrote
them. Knows nothing of training.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, Protocol

from core.config import ModelConfig
from core.embedded import resolve_model
from core.model import RaggedModel
from drafter_service.distil.features import write_features
from drafter_service.distil.generate import GenerationOptions, generate


class Writer(Protocol):
    """Writes shards; those that are there already are not written again."""

    def texts(
        self,
        prompts: Sequence[str],
        folder: Path,
        options: GenerationOptions,
        num_tokens: int,
        on_tokens: Callable[[int], None] = lambda total: None,
    ) -> list[Path]:
        """See `generate`."""

    def features(
        self,
        needs: Sequence[str],
        shards: Sequence[Path],
        folder: Path,
        on_shard: Callable[[int], None] = lambda done: None,
    ) -> None:
        """See `write_features`."""

    def close(self) -> None:
        """Nothing more is to be written: give memory and machines back."""


class LocalWriter:
    """The writer with a target in this process."""

    def __init__(self, target: RaggedModel) -> None:
        self._target = target

    def texts(
        self,
        prompts: Sequence[str],
        folder: Path,
        options: GenerationOptions,
        num_tokens: int,
        on_tokens: Callable[[int], None] = lambda total: None,
    ) -> list[Path]:
        """See `Writer`."""
        return generate(self._target, prompts, folder, options, num_tokens, on_tokens)

    def features(
        self,
        needs: Sequence[str],
        shards: Sequence[Path],
        folder: Path,
        on_shard: Callable[[int], None] = lambda done: None,
    ) -> None:
        """See `Writer`."""
        write_features(self._target, needs, shards, folder, on_shard)

    def close(self) -> None:
        """The target is the caller's."""


def load_target(
    target: str,
    *,
    rows: int,
    max_new_tokens: int,
    threads: int = 0,
    dtype: Literal["auto", "float32"] = "auto",
    device_map: str = "auto",
) -> RaggedModel:
    """The target (a directory or `embedded:NAME`), to write `rows` answers of up to
    `max_new_tokens` tokens at a time; in fp32, to be cut down and trained. Raises ModelError."""
    return RaggedModel.load(
        ModelConfig(
            model=resolve_model(target),
            dtype=dtype,
            device_map=device_map,
            max_sequences=rows,
            max_length=max(512, 2 * max_new_tokens),
            max_batch_tokens=max(1024, 16 * rows),
            threads=threads,
            pack_weights=dtype != "float32",
        )
    )
