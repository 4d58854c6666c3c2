"""What an actor asks of Ray, as Ray's options and in words.

Knows the config's placement; knows nothing of actors, and imports no ray.
"""

from collections.abc import Mapping
from typing import Any

from core.config import PlacementConfig


def placement_options(placement: PlacementConfig) -> dict[str, Any]:
    """The arguments of an actor's `options`."""
    options: dict[str, Any] = {"num_cpus": placement.num_cpus, "num_gpus": placement.num_gpus}
    if placement.accelerator_type:
        options["accelerator_type"] = placement.accelerator_type
    if placement.resources:
        options["resources"] = placement.resources
    if placement.label_selector:
        options["label_selector"] = placement.label_selector
    return options


def describe_placement(placement: PlacementConfig) -> str:
    """What is asked for, in words."""
    wanted = {"CPU": placement.num_cpus, "GPU": placement.num_gpus, **placement.resources}
    text = describe_amounts(wanted)
    if placement.accelerator_type:
        text += f", accelerator_type {placement.accelerator_type}"
    if placement.label_selector:
        text += f", labels {placement.label_selector}"
    return text


def describe_amounts(resources: Mapping[str, float]) -> str:
    """Resources in words, without the ones Ray makes up for itself."""
    named = {
        name: amount
        for name, amount in sorted(resources.items())
        if amount and not name.startswith("node:") and not name.endswith("memory")
    }
    return ", ".join(f"{name} {amount:g}" for name, amount in named.items()) or "nothing"
