"""The kinds of drafters there are.

To add one: a module in this folder with a `Drafter` and a factory, and a line in a table: in
`REMOTE` when it can be a process of its own (the factory takes the pool's config), in `ATTACHED`
when it can live beside the target (it takes the loaded target too). The contract suite
(tests/test_drafters.py) then runs over it. A kind's module is imported when a pool asks for it:
prompt lookup starts without torch. See docs/drafters.md.
"""

import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, cast

from core.config import DrafterPoolConfig
from core.drafter import Drafter
from core.errors import ConfigError

if TYPE_CHECKING:
    from core.model import RaggedModel

_Table = Mapping[str, tuple[str, str]]  # kind -> (module, factory)

REMOTE: Final[_Table] = MappingProxyType(
    {
        "cross_tokenizer": ("drafter_service.drafters.cross_tokenizer", "create_cross_tokenizer"),
        "early_exit": ("drafter_service.drafters.early_exit", "create_early_exit"),
        "draft_model": ("drafter_service.drafters.draft_model", "create_draft_model"),
        "hybrid": ("drafter_service.drafters.hybrid", "create_hybrid"),
        "mtp_assistant": ("drafter_service.drafters.mtp_assistant", "create_mtp_assistant"),
        "mtp_layers": ("drafter_service.drafters.mtp_layers", "create_mtp_layers"),
        "ngram": ("drafter_service.drafters.ngram", "NgramDrafter"),
    }
)
ATTACHED: Final[_Table] = MappingProxyType(
    {
        "dflash": ("drafter_service.drafters.dflash", "attach_dflash"),
        "hybrid": ("drafter_service.drafters.hybrid", "attach_hybrid"),
        "early_exit": ("drafter_service.drafters.early_exit", "attach_early_exit"),
        "mtp_assistant": ("drafter_service.drafters.mtp_assistant", "attach_mtp_assistant"),
        "mtp_layers": ("drafter_service.drafters.mtp_layers", "attach_mtp_layers"),
        "ngram": ("drafter_service.drafters.ngram", "attach_ngram"),
    }
)


def create_drafter(config: DrafterPoolConfig) -> Drafter:
    """Build the drafter a pool asks for, as a process of its own.

    Raises ConfigError for an unknown kind or a wrong option, ModelError for a model that cannot be
    loaded.
    """
    return cast(Callable[[DrafterPoolConfig], Drafter], _factory(config, REMOTE))(config)


def attach_drafter(config: DrafterPoolConfig, target: "RaggedModel") -> Drafter:
    """Build the drafter an attached pool asks for, beside the loaded target.

    Raises ConfigError for an unknown kind, a wrong option or a target that does not offer what the
    kind needs, ModelError for a model that cannot be loaded.
    """
    make = cast("Callable[[DrafterPoolConfig, RaggedModel], Drafter]", _factory(config, ATTACHED))
    return make(config, target)


def _factory(config: DrafterPoolConfig, table: _Table) -> Any:
    where = f"drafter_pools.{config.name}"
    if config.kind not in table:
        if config.kind in REMOTE:
            raise ConfigError(f"{where}.attached: kind {config.kind!r} only runs on its own")
        if config.kind in ATTACHED:
            raise ConfigError(f"{where}.attached: kind {config.kind!r} only runs attached")
        known = ", ".join(sorted({*REMOTE, *ATTACHED}))
        raise ConfigError(f"{where}.kind: no drafter {config.kind!r}; there are: {known}")
    module, factory = table[config.kind]
    return getattr(importlib.import_module(module), factory)
