"""Tiny random checkpoints of real model families, made in code and saved like any other.

fp32, deterministic by seed, hidden size 32, a few layers, weights large enough that greedy text
varies. Beside each lies a byte-level tokenizer of 256 bytes and a few special tokens. Nothing is
downloaded. `greedy_reference` is transformers' own `generate`, the truth that tests compare with.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

BOS, EOS, USER, ASSISTANT = 256, 257, 258, 259
VOCAB_SIZE = 260  # ids of the tokenizer; a checkpoint may have more
CHAT_TEMPLATE = (
    "{{ '<bos>' }}{% for message in messages %}"
    "{{ '<user>' if message['role'] != 'assistant' else '<assistant>' }}{{ message['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
_BASE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
}
_GEMMA = {"query_pre_attn_scalar": 8, "sliding_window": 16}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
#: kind -> (config class, what differs from _BASE). The last three cannot be served.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"num_hidden_layers": 3}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": 16}),
    "gemma2": ("Gemma2Config", {**_GEMMA, "num_hidden_layers": 4}),
    "gemma3_text": (
        "Gemma3TextConfig",
        {
            **_GEMMA,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": ("Qwen2MoeConfig", {**_MOE, "shared_expert_intermediate_size": 32}),
    "gpt_oss": (
        "GptOssConfig",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
            "head_dim": None,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "num_hidden_layers": 3,
        },
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
        },
    ),
    "gemma3n_text": (  # the last two layers read the K/V of the first two
        "Gemma3nTextConfig",
        {
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 4,
            "activation_sparsity_pattern": None,
        },
    ),
    "padded": ("LlamaConfig", {"vocab_size": 320}),
    "mamba": ("MambaConfig", {"state_size": 8, "use_mambapy": False}),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            **_MOE,
            "shared_expert_intermediate_size": 32,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
    ),
}
#: Every kind that forerun serves.
SERVED = tuple(kind for kind in KINDS if kind not in ("mamba", "qwen3_next"))


def save_tiny(
    kind: str,
    path: str | Path,
    seed: int = 0,
    *,
    tokenizer: bool | str = True,
    chat_template: bool = True,
    std: float = 0.35,
    **overrides: Any,
) -> Path:
    """Write a checkpoint of `kind` (see KINDS) to the directory `path` and return it.

    `tokenizer`: False writes none, "other" one that does not match the usual one. `overrides` are
    fields of the model's config, e.g. `eos_token_id=300` for a model that never stops by itself.
    """
    name, fields = KINDS[kind]
    config = getattr(transformers, name)(**{**_BASE, **fields, **overrides})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _randomize(model, seed, std)
    model.generation_config.eos_token_id = config.eos_token_id
    model.generation_config.pad_token_id = EOS
    path = Path(path)
    model.save_pretrained(path)
    if tokenizer:
        save_tokenizer(path, chat_template=chat_template, other=tokenizer == "other")
    return path


def _randomize(model: PreTrainedModel, seed: int, std: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2:
                parameter.copy_(noise * std)
            elif "norm" in name or "ln_" in name:
                parameter.add_(noise * 0.1)
            else:
                parameter.copy_(noise * 0.1)


def save_tokenizer(path: Path, *, chat_template: bool = True, other: bool = False) -> None:
    """Write the byte-level tokenizer; `other` gives the same bytes different ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=other)
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    specials = ["<bos>", "<eos>", "<user>", "<assistant>"]
    vocabulary |= {token: len(alphabet) + index for index, token in enumerate(specials)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=["<user>", "<assistant>"],
        clean_up_tokenization_spaces=False,
    )
    if chat_template:
        fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(path)


def load_reference(path: str | Path, **options: Any) -> PreTrainedModel:
    """The stock transformers model of a checkpoint, fp32 on CPU unless told otherwise."""
    options.setdefault("dtype", torch.float32)
    return AutoModelForCausalLM.from_pretrained(path, local_files_only=True, **options).eval()


def greedy_reference(
    path: str | Path | PreTrainedModel,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    **options: Any,
) -> list[int]:
    """The new tokens of transformers' greedy `generate`, an end token included."""
    model = path if isinstance(path, PreTrainedModel) else load_reference(path)
    prompt = torch.tensor([list(prompt_ids)])
    with torch.inference_mode():
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            **options,
        )
    return [int(token) for token in output[0, len(prompt_ids) :]]


TinyFactory = Callable[..., Path]
