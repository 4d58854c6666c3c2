"""The example configurations: one per kind of drafter, each of which the code would accept.

The models they name cannot be had here, so the check ends where a model would be loaded.
"""

import importlib
from pathlib import Path

import pytest

from core.config import DrafterPoolConfig, load_config
from core.errors import ConfigError
from drafter_service.drafters import ATTACHED, REMOTE
from drafter_service.drafters.base import DrafterOptions, read_options

ROOT = Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "examples" / "configs").glob("*.toml"))


def check_pool(pool: DrafterPoolConfig) -> None:
    """The kind runs where the config says, and has these options."""
    module, _ = (ATTACHED if pool.attached else REMOTE)[pool.kind]
    names = vars(importlib.import_module(module)).values()
    own = [
        each
        for each in names
        if isinstance(each, type) and issubclass(each, DrafterOptions) and each.__module__ == module
    ]
    wrong = []
    for options in own or [DrafterOptions]:  # attached and remote may differ
        try:
            read_options(pool, options)
        except ConfigError as error:
            wrong.append(error)
    assert len(wrong) < len(own or [DrafterOptions]), wrong


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_an_example_is_accepted(path: Path):
    """A reader who copies it would be told of a key or an option that does not exist."""
    for pool in load_config(path).drafter_pools:
        check_pool(pool)


def test_there_is_an_example_of_every_kind():
    """A kind would be there for those who read the code only."""
    shown = {pool.kind for path in CONFIGS for pool in load_config(path).drafter_pools}
    assert shown == {*REMOTE, *ATTACHED}
