"""Shared by all tests: one torch thread, no network, tiny checkpoints made once per session.

`tiny("llama", seed=1, ...)` returns the directory of a checkpoint (see tests/tiny_models.py);
equal arguments share one directory. Nothing here starts a process.
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

torch.set_num_threads(1)

from tests.tiny_models import TinyFactory, save_tiny  # noqa: E402 - after the environment is set


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A test that changes torch's thread count changes it for itself only."""
    yield
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyFactory:
    """Makes tiny checkpoints, each once per session: `tiny(kind, seed=0, **overrides) -> Path`."""
    made: dict[str, Path] = {}

    def make(kind: str, seed: int = 0, **overrides: Any) -> Path:
        key = repr((kind, seed, sorted(overrides.items())))
        if key not in made:
            made[key] = save_tiny(kind, tmp_path_factory.mktemp(kind), seed, **overrides)
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny_llama(tiny: TinyFactory) -> Path:
    """The checkpoint most tests use as a target."""
    return tiny("llama")


@pytest.fixture(scope="session")
def tiny_drafter(tiny: TinyFactory) -> Path:
    """A smaller checkpoint with the same tokenizer that disagrees with `tiny_llama`."""
    return tiny("llama", seed=7, num_hidden_layers=1)
