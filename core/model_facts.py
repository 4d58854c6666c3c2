"""What a model's config says: whether it can be served, how long, and how it samples by default.

Takes the library's config objects as they are and reads attributes only; loads nothing and knows
nothing of tensors. `core.model` asks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from core.attention import AttentionOptions
from core.errors import ModelError
from core.types import Rule, SamplingParams

_SERVED_LAYER_TYPES = ("full_attention", "sliding_attention")


def check_config(config: Any) -> None:
    """Raise ModelError, before any weight is read, for models that cannot be served."""
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"model: {config.model_type} is an encoder-decoder; only decoders are served"
        )
    text = config.get_text_config()
    for layer_type in getattr(text, "layer_types", None) or ():
        if layer_type not in _SERVED_LAYER_TYPES:
            raise ModelError(_unserved(text.model_type, layer_type))


def check_layers(
    model: Any, text: Any, options: Mapping[int, AttentionOptions], num_calls: int
) -> None:
    """Raise ModelError unless every layer called our attention once, as its type says it should.

    `options` are those of the layers that did, by layer index.
    """
    missing = [index for index in range(text.num_hidden_layers) if index not in options]
    if missing:
        kinds = getattr(text, "layers_block_type", None) or getattr(text, "layer_types", None)
        kind = kinds[missing[0]] if kinds else _block_name(model)
        raise ModelError(_unserved(text.model_type, kind))
    if num_calls != text.num_hidden_layers:
        raise ModelError(f"model: {text.model_type} attends more than once in a layer")
    for index, layer_type in enumerate(getattr(text, "layer_types", None) or ()):
        if layer_type == "sliding_attention" and options[index].window is None:
            raise ModelError(
                f"model: layer {index} of {text.model_type} is sliding_attention but does not hand "
                f"its window to attention"
            )


def _unserved(model_type: str, layer_type: str) -> str:
    return (
        f"model: {model_type} has {layer_type} layers, which cannot be served: only attention that "
        f"goes through transformers' attention interface ({', '.join(_SERVED_LAYER_TYPES)}), since "
        f"other state cannot be rolled back"
    )


def _block_name(model: Any) -> str:
    """Class of a model's repeated block, for models that do not name their layer types."""
    names = sorted(getattr(model, "_no_split_modules", None) or ())
    return names[0] if names else type(model).__name__


def max_length(text: Any) -> int:
    """The most tokens for which a token's rotation, and so its K, does not depend on others."""
    limit = getattr(text, "max_position_embeddings", None) or 1 << 30
    rope = getattr(text, "rope_parameters", None) or {}
    for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if part.get("rope_type") == "longrope":  # other factors beyond, for all tokens at once
            limit = min(limit, part.get("original_max_position_embeddings") or limit)
    return int(limit)


def eos_token_ids(text: Any, generation: Any) -> tuple[int, ...]:
    """End tokens: the generation config's, else the model's."""
    ids = generation.eos_token_id if generation is not None else None
    if ids is None:
        ids = text.eos_token_id
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, Sequence) else (int(ids),)


def default_sampling(generation: Any) -> SamplingParams:
    """Sampling as the checkpoint's authors stored it; greedy unless they say `do_sample`.

    Penalties hold for greedy text too, as in transformers.
    """
    if generation is None:
        return SamplingParams()

    def stored(name: str, neutral: float) -> float:
        value = getattr(generation, name, None)
        return neutral if value is None else float(value)

    penalties = SamplingParams(
        repetition_penalty=stored("repetition_penalty", 1.0),
        no_repeat_ngram_size=int(stored("no_repeat_ngram_size", 0)),
    )
    temperature = stored("temperature", 1.0)
    if not generation.do_sample or temperature == 0.0:
        return penalties
    return replace(
        penalties,
        temperature=temperature,
        top_k=int(stored("top_k", 0)),
        top_p=stored("top_p", 1.0),
        min_p=stored("min_p", 0.0),
        typical_p=stored("typical_p", 1.0),
        rule=Rule.COUPLED,
    )
