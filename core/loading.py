"""Loads checkpoints through transformers, so that their attention calls ours.

A model comes as its checkpoint says, spread over devices as the config says; what cannot be served
is refused with a reason. Knows nothing of how a model is run.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GgufConfig,
)

from core import model_facts
from core.config import ModelConfig
from core.embedded import resolve_model
from core.errors import ConfigError, ModelError
from core.shared_weights import SharedCheckpoint, target_of
from core.tokenizer import Tokenizer

#: The name under which `core.model` registers its attention with the library.
ATTENTION: Final = "forerun"
#: Decoders that the library lists beside their vision only.
_BESIDE_VISION: Final = ("muse_glimmer",)


def load_network(config: ModelConfig, num_layers: int = 0) -> Any:
    """The transformers model, or one of only the first `num_layers` layers of the checkpoint.

    Raises ModelError that names what is wrong.
    """
    path, options = _source(config)
    try:
        model_config = AutoConfig.from_pretrained(path, **options)
        model_facts.check_config(model_config)
        if num_layers:
            _keep_first(model_config.get_text_config(), num_layers, config.model)
        placement: dict[str, Any] = {"device_map": config.device_map}
        if config.max_memory:  # TOML keys are text, accelerate names GPUs by number
            memory = {int(k) if k.isdigit() else k: v for k, v in config.max_memory.items()}
            placement["max_memory"] = memory
        if config.offload_folder:
            placement["offload_folder"] = config.offload_folder
        if config.gguf_file:  # packed GGUF products need kernels from the network
            placement["quantization_config"] = GgufConfig(dequantize=True)
        how = {"dtype": config.dtype, "attn_implementation": ATTENTION}
        beside_vision = model_config.model_type in _BESIDE_VISION
        auto: Any = AutoModelForImageTextToText if beside_vision else AutoModelForCausalLM
        if shared := SharedCheckpoint.read(path):
            how["dtype"] = model_config.dtype if config.dtype == "auto" else config.dtype
            model = auto.from_config(model_config, **how)
            shared.complete(model, config.device_map)
        else:
            model = auto.from_pretrained(path, config=model_config, **how, **placement, **options)
    except KeyError as error:  # old model code picks its attention from a list of its own
        reason = "its attention cannot be replaced" if ATTENTION in error.args else repr(error)
        raise ModelError(f"model: {config.model} cannot be loaded: {reason}") from error
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise ModelError(f"model: {config.model} cannot be loaded: {error}") from error
    model.eval()
    hook = getattr(model, "_hf_hook", None)
    if hook is not None:  # the head may be on another device than the inputs
        hook.skip_keys = [*_as_list(hook.skip_keys), "logits_to_keep"]
        hook.io_same_device = False  # a copy to the first device would make it wait for the last
    return model


def _source(config: ModelConfig) -> tuple[str, dict[str, Any]]:
    """Where to load from, and the options that loading the config and the weights share."""
    path = os.path.expanduser(config.model)
    is_path = path.startswith(("/", ".")) or os.path.exists(path)
    if is_path and not os.path.isdir(path):
        raise ModelError(f"model: {config.model}: no such directory")
    options: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    if is_path:  # never ask a network about a path; for names, HF_HUB_OFFLINE says
        options["local_files_only"] = True
    if config.gguf_file:
        options["gguf_file"] = config.gguf_file
    return path, options


def load_companion(
    config: ModelConfig,
    auto: Any,
    kind: str,
    model_types: Sequence[str],
    prepare: Callable[[Any], None] = lambda checkpoint: None,
) -> Any:
    """The network of a drafter that was made for a target: a checkpoint of one of `model_types`.

    auto: the library's class that loads it. kind: of drafter, for the error. prepare: called with
    the checkpoint's config first. Raises ConfigError for another checkpoint, ModelError for one
    that cannot be loaded.
    """
    name = resolve_model(config.model)
    options: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    if (folder := Path(name).expanduser()).is_dir():
        name, options["local_files_only"] = str(folder), True
    try:
        checkpoint = AutoConfig.from_pretrained(name, **options)
        if checkpoint.model_type not in model_types:
            raise ConfigError(
                f"kind {kind!r} needs a checkpoint of {' or '.join(model_types)}, and "
                f"{config.model!r} is a {checkpoint.model_type}"
            )
        prepare(checkpoint)
        network = auto.from_pretrained(
            name,
            config=checkpoint,
            dtype=config.dtype,
            device_map=config.device_map,
            attn_implementation=ATTENTION,
            **options,
        )
    except (OSError, ValueError, ImportError, RuntimeError, KeyError) as error:
        raise ModelError(f"model: {config.model} cannot be loaded: {error}") from error
    return network.eval()


def load_tokenizer(config: ModelConfig) -> Tokenizer | None:
    """The checkpoint's tokenizer; None for a directory that has none."""
    path = os.path.expanduser(config.model)
    if target := target_of(path):  # of a drafter with its target's embeddings
        return load_tokenizer(config.model_copy(update={"model": str(target)}))
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    has_files = any(os.path.exists(os.path.join(path, name)) for name in names)
    if os.path.isdir(path) and not config.gguf_file and not has_files:
        return None
    return Tokenizer.load(config.model, config.gguf_file, config.trust_remote_code)


def _as_list(keys: str | list[str] | None) -> list[str]:
    return [keys] if isinstance(keys, str) else list(keys or ())


def _keep_first(text: Any, num_layers: int, name: str) -> None:
    """Have a config describe only the first layers: the others' weights are not read then."""
    count = text.num_hidden_layers
    if num_layers >= count:
        raise ModelError(
            f"model: {name} has {count} layers: the first {num_layers} are no part of it"
        )
    text.num_hidden_layers = num_layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:num_layers]
