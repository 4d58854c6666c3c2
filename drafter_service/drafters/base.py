"""What every drafter of this service shares: the interface, and options from the config.

The interface itself stands in `core.drafter`, because the verifier runs attached drafters too.
Knows nothing of a kind's options but that they are a frozen model.
"""

import difflib
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from core.config import DrafterPoolConfig
from core.drafter import Draft as Draft
from core.drafter import Drafter as Drafter
from core.drafter import DraftJob as DraftJob
from core.drafter import MissingFeaturesError as MissingFeaturesError
from core.drafter import TargetFeatures as TargetFeatures
from core.errors import ConfigError


class DrafterOptions(BaseModel):
    """Base of a kind's `options` in the config: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


_Options = TypeVar("_Options", bound=DrafterOptions)


def read_options(config: DrafterPoolConfig, kind: type[_Options]) -> _Options:
    """The pool's options, checked. Raises ConfigError that names the key and the nearest valid."""
    try:
        return kind.model_validate(config.options)
    except ValidationError as error:
        lines = []
        for item in error.errors():
            key = ".".join(str(part) for part in item["loc"])
            message = item["msg"].removeprefix("Value error, ")
            if item["type"] == "extra_forbidden":
                valid = list(kind.model_fields)
                [nearest] = difflib.get_close_matches(key, valid, n=1, cutoff=0.0) or ["nothing"]
                message = f"unknown option; did you mean {nearest!r}? Valid: {', '.join(valid)}"
            where = f"drafter_pools.{config.name}.options"
            lines.append(f"{where}.{key}: {message}" if key else f"{where}: {message}")
        raise ConfigError("; ".join(lines)) from error
