"""Tiny Gemma 4 targets and their assistants, in the real format, and transformers' own drafts.

Window of 16 tokens, other head sizes in full and sliding layers, untied embeddings (text varies).
transformers 5.23 cannot build an assistant: `repaired` puts back what 5.18 did while the library
builds one for us to save or to compare with; forerun itself is tested without it.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.generation import utils as generation
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

from tests.tiny_models import BOS, EOS, VOCAB_SIZE, _randomize, load_reference, save_tokenizer

WINDOW = 16
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "max_position_embeddings": 512,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "tie_word_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_id": VOCAB_SIZE - 1,
    "pad_token_id": EOS,
}
_PLAIN = {"vocab_size_per_layer_input": 0, "hidden_size_per_layer_input": 0}
_SHARED = {"num_kv_shared_layers": 2}
_SMALL_EARS = {"audio_config": None, "tie_word_embeddings": False}
_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
#: kind -> (config class, fields of the text's config, fields around it)
TARGETS: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "text": (
        "Gemma4TextConfig",
        {
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "hidden_size_per_layer_input": 8,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 30.0,
            **_SHARED,
        },
        None,
    ),
    "unshared": ("Gemma4TextConfig", _PLAIN, None),
    "k_eq_v": (
        "Gemma4TextConfig",
        {**_PLAIN, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
        None,
    ),
    "experts": (
        "Gemma4TextConfig",
        {
            **_PLAIN,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
        None,
    ),
    "unified_text": ("Gemma4UnifiedTextConfig", _SHARED, None),
    "images": (
        "Gemma4Config",
        {"vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 8, **_SHARED},
        {"vision_config": {**_VISION, "num_attention_heads": 2, "num_key_value_heads": 2}},
    ),
    "unified": (
        "Gemma4UnifiedConfig",
        _SHARED,
        {"vision_config": {"mm_embed_dim": 32, "mm_posemb_size": 4, "patch_size": 2}},
    ),
}


def save_target(kind: str, path: Path, seed: int = 0, **overrides: Any) -> Path:
    """Write a target of `kind` (see TARGETS), with a tokenizer."""
    name, fields, around = TARGETS[kind]
    text = {**_TEXT, **fields, **overrides}
    fields = text if around is None else {"text_config": text, **_SMALL_EARS, **around}
    config = getattr(transformers, name)(**fields)
    _save(AutoModelForCausalLM.from_config(config, dtype=torch.float32), path, seed)
    save_tokenizer(path)
    return path


def save_assistant(
    path: Path,
    seed: int = 7,
    *,
    is_unified: bool = False,
    is_ordered: bool = False,
    num_assistant_tokens: int | None = None,
    backbone: int = 32,
    **overrides: Any,
) -> Path:
    """Write an assistant for the targets above: three layers, narrower than they are."""
    prefix = "Gemma4Unified" if is_unified else "Gemma4"
    fields = {
        **_TEXT,
        **({} if is_unified else _PLAIN),
        "hidden_size": 24,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        **overrides,
    }
    config = getattr(transformers, f"{prefix}AssistantConfig")(
        text_config=getattr(transformers, f"{prefix}TextConfig")(**fields),
        backbone_hidden_size=backbone,
        use_ordered_embeddings=is_ordered,
        num_centroids=20,
        centroid_intermediate_top_k=4,
    )
    with repaired():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if is_ordered:
        order = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
        model.masked_embedding.token_ordering.copy_(order)
    model.generation_config.num_assistant_tokens = num_assistant_tokens
    return _save(model, path, seed)


def _save(model: PreTrainedModel, path: Path, seed: int) -> Path:
    _randomize(model, seed, 0.35)
    model.generation_config.eos_token_id = None  # generate to the wanted length
    model.generation_config.pad_token_id = EOS
    model.save_pretrained(path)
    return path


@contextlib.contextmanager
def repaired() -> Iterator[None]:
    """In configs made inside: all layers may share, and the last of each type that does not
    stores, even if no layer reads it."""

    def modes(config: Any) -> list[str | None]:
        types, total = config.layer_types, config.num_hidden_layers
        first = total - config.num_kv_shared_layers
        result: list[str | None] = [None] * first + ["reuse"] * (total - first)
        for index in {t: i for i, t in enumerate(types[:first])}.values():
            result[index] = "store"
        return result

    classes = (transformers.Gemma4TextConfig, transformers.Gemma4UnifiedTextConfig)
    stock = [each.kv_sharing_modes for each in classes]
    for each in classes:
        each.kv_sharing_modes = property(modes)
    try:
        yield
    finally:
        for each, original in zip(classes, stock, strict=True):
            each.kv_sharing_modes = original


def load_repaired(path: Path) -> PreTrainedModel:
    """The library's model, whether it builds it by itself or not."""
    with repaired():
        return load_reference(path)


def reference_draft(
    target: PreTrainedModel, assistant: PreTrainedModel, tokens: Sequence[int], count: int
) -> list[int]:
    """What transformers proposes behind `tokens`, of which the target ran all but the last."""
    assistant.generation_config.num_assistant_tokens = count
    config = target.generation_config
    config.max_length = 512
    embedding = target.get_input_embeddings()
    generator = SinglePositionMultiTokenCandidateGenerator(assistant, embedding, config)
    ids = torch.tensor([list(tokens)])
    with torch.no_grad():
        outputs = target(
            ids[:, :-1], output_hidden_states=True, return_shared_kv_states=True, use_cache=False
        )
        found, _ = generator.get_candidates(
            ids, {"attention_mask": torch.ones_like(ids)}, outputs, False, 0
        )
    return [int(token) for token in found[0, len(tokens) :]]


def generate_assisted(
    target: PreTrainedModel,
    assistant: PreTrainedModel,
    full: Sequence[int],
    start: int,
    accepted: Sequence[int],
    count: int,
    *,
    drop_rejected: bool,
) -> list[tuple[int, list[int]]]:
    """The library's whole assisted `generate`: (length, proposal) of each round.

    It is made to accept so many tokens of each round in turn: its candidates are replaced by those
    of `full`, its own greedy text, up to there. With `drop_rejected` its generator is not shown the
    K/V of tokens that were rejected, which stock transformers leaves in.
    """
    rounds: list[tuple[int, list[int]]] = []

    class Scripted(SinglePositionMultiTokenCandidateGenerator):  # type: ignore[misc]
        def get_candidates(  # type: ignore[no-untyped-def]
            self, input_ids, model_kwargs, model_outputs, is_first_iteration, n_last_matches, **_
        ):
            size = input_ids.shape[1]
            if not is_first_iteration and drop_rejected and rounds:
                stale = count - n_last_matches
                shared = model_outputs.shared_kv_states
                for name, (keys, values) in list(shared.items()):
                    end = keys.shape[2] - int(stale)
                    shared[name] = (keys[:, :, :end], values[:, :, :end])
            found, _ = super().get_candidates(
                input_ids, model_kwargs, model_outputs, is_first_iteration, n_last_matches
            )
            if not is_first_iteration:
                right = accepted[len(rounds) % len(accepted)]
                rounds.append((size, found[0, size:].tolist()))
                script = torch.tensor([list(full[size : size + count])])
                script[:, right:] = (script[:, right:] + 1) % VOCAB_SIZE
                found = torch.cat([input_ids, script], dim=1)
            return found, None

    assistant.generation_config.num_assistant_tokens = count
    stock = generation.SinglePositionMultiTokenCandidateGenerator
    generation.SinglePositionMultiTokenCandidateGenerator = Scripted
    prompt = torch.tensor([list(full[:start])])
    try:
        with torch.no_grad():
            output = target.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                assistant_model=assistant,
                max_length=len(full) - count - 1,
                do_sample=False,
            )
    finally:
        generation.SinglePositionMultiTokenCandidateGenerator = stock
    text = output[0].tolist()
    assert text == list(full[: len(text)]), "the peer's own text is not greedy"
    return [each for each in rounds if len(each[1]) == count]
