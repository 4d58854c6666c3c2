"""The kinds of drafters there are.

To add one: a module in this folder with a `Drafter` and a factory that takes the pool's config,
and a line in the table. The contract suite (tests/test_drafters.py) then runs over it. A kind's
module is imported when a pool asks for it: prompt lookup starts without torch.
"""

import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, cast

from core.config import DrafterPoolConfig
from core.errors import ConfigError
from drafter_service.drafters.base import Drafter

DrafterFactory = Callable[[DrafterPoolConfig], Drafter]

#: kind -> (module, factory)
DRAFTERS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "draft_model": ("drafter_service.drafters.draft_model", "create_draft_model"),
        "ngram": ("drafter_service.drafters.ngram", "NgramDrafter"),
    }
)


def create_drafter(config: DrafterPoolConfig) -> Drafter:
    """Build the drafter a pool asks for.

    Raises ConfigError for an unknown kind or a wrong option, ModelError for a model that cannot be
    loaded.
    """
    if config.kind not in DRAFTERS:
        known = ", ".join(sorted(DRAFTERS))
        raise ConfigError(
            f"drafter_pools.{config.name}.kind: no drafter {config.kind!r}; there are: {known}"
        )
    module, factory = DRAFTERS[config.kind]
    return cast(DrafterFactory, getattr(importlib.import_module(module), factory))(config)
