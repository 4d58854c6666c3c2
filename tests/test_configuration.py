"""docs/configuration.md and the files in deploy/config say what core/config.py means."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from core import config
from core.config import load_config, parse_config
from core.errors import ConfigError
from drafter_service.drafters.draft_model import DraftModelOptions
from drafter_service.drafters.ngram import NgramOptions

ROOT = Path(__file__).parent.parent
POOL = {"name": "a", "kind": "ngram"}
SECTIONS: dict[str, type[BaseModel]] = {
    "[target]": config.ModelConfig,
    "[verifier]": config.VerifierConfig,
    "[[drafter_pools]]": config.DrafterPoolConfig,
    "options of ngram": NgramOptions,
    "options of draft_model": DraftModelOptions,
    "placement": config.PlacementConfig,
    "[orchestrator]": config.OrchestratorConfig,
    "[http]": config.HttpConfig,
    "[ray]": config.RayConfig,
    "[tracing]": config.TracingConfig,
    "[logging]": config.LoggingConfig,
}


def documented(section: str) -> dict[str, str]:
    """Key and default of each row of the first table below the section's heading."""
    text = (ROOT / "docs" / "configuration.md").read_text()
    body = text.split(f"\n## `{section}`", 1)[1].split("\n## ", 1)[0]
    table = body.split("| key |", 1)[1].split("\n\n", 1)[0]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", table, flags=re.MULTILINE)
    return dict(rows)


def default_of(cell: str) -> Any:
    """The value in a table's cell; words stand for what TOML cannot say."""
    if not cell.startswith("`"):
        return {"none": None}.get(cell, cell)
    return tomllib.loads(f"value = {cell.strip('`')}")["value"]


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_is_documented_with_its_default(section: str) -> None:
    """A reader would rely on a key or a default that is not there."""
    fields = SECTIONS[section].model_fields
    rows = documented(section)
    assert set(rows) == set(fields)
    for key, field in fields.items():
        stated = default_of(rows[key])
        if field.is_required():
            assert stated == "required", key
        elif isinstance(field.default, BaseModel):
            assert stated == "see below", key
        else:
            assert stated == field.default, key


@pytest.mark.parametrize("path", sorted((ROOT / "deploy" / "config").glob("*.toml")), ids=str)
def test_example_files_are_valid(path: Path) -> None:
    """A newcomer's first command would fail."""
    load_config(path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"target": {"model": "x"}, "orchestrater": {}}, "did you mean 'orchestrator'"),
        ({"target": {"model": "x"}, "drafter_pools": [{"nmae": "a"}]}, "did you mean 'name'"),
        ({"target": {"model": ""}}, "target.model"),
        ({"target": {"model": "x"}, "orchestrator": {"default_pool": "a"}}, "no pool 'a'"),
        ({"target": {"model": "x"}, "orchestrator": {"port": 70000}}, "orchestrator.port"),
        (
            {"target": {"model": "x"}, "drafter_pools": [{**POOL, "max_replicas": 0}]},
            "drafter_pools.a.replicas: 1 is not between min_replicas 0 and max_replicas 0",
        ),
        (
            {"target": {"model": "x"}, "drafter_pools": [{**POOL, "min_replicas": 2}]},
            "drafter_pools.a.replicas: 1 is not between min_replicas 2 and",
        ),
        (
            {
                "target": {"model": "x"},
                "drafter_pools": [{**POOL, "attached": True, "min_replicas": 1}],
            },
            "drafter_pools.a.min_replicas: an attached pool",
        ),
        (
            {"target": {"model": "x"}, "drafter_pools": [{**POOL, "max_branches": 4}]},
            "drafter_pools.a.max_branches: kind 'ngram' cannot draft ahead",
        ),
        (
            {
                "target": {"model": "x"},
                "drafter_pools": [
                    {**POOL, "kind": "early_exit", "attached": True, "max_branches": 4}
                ],
            },
            "drafter_pools.a.max_branches: an attached pool cannot draft ahead",
        ),
    ],
)
def test_a_wrong_config_names_the_key(data: dict[str, Any], message: str) -> None:
    """A typo would be ignored, or be an error that does not say where."""
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_config(data)
