"""A tiny Llama checkpoint written as a GGUF file, with its tokenizer inside, in code.

GGUF orders the rotary halves of Q and K differently from transformers; the writer permutes them as
llama.cpp's converter does. One merge ("ab") is added, since a GGUF tokenizer needs merges.
"""

from pathlib import Path

import gguf
import numpy as np
from transformers import AutoTokenizer, PreTrainedModel

from tests.tiny_models import BOS, EOS

FILE_NAME = "model.gguf"


def save_gguf(model: PreTrainedModel, tokenizer_path: Path, path: Path, quantized: bool) -> Path:
    """Write `model` (a Llama with more ids than the tokenizer) to the new directory `path`, in
    fp32 or with all matrices in Q8_0 blocks."""
    path.mkdir()
    writer = gguf.GGUFWriter(str(path / FILE_NAME), "llama")
    _write_config(writer, model.config)
    vocabulary = AutoTokenizer.from_pretrained(tokenizer_path, local_files_only=True).get_vocab()
    tokens = [*sorted(vocabulary, key=vocabulary.__getitem__), "ab"]
    special = [
        gguf.TokenType.CONTROL if t.startswith("<") and len(t) > 1 else gguf.TokenType.NORMAL
        for t in tokens
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types(special)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, model.config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        heads = {
            "q_proj": model.config.num_attention_heads,
            "k_proj": model.config.num_key_value_heads,
        }
        array = tensor.float().numpy()
        for part, count in heads.items():
            if part in name:
                halves = array.reshape(count, 2, -1, array.shape[1])
                array = halves.swapaxes(1, 2).reshape(array.shape)
        target = names.get_name(name, try_suffixes=(".weight",))
        if quantized and array.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(target, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(target, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_config(writer: gguf.GGUFWriter, config: object) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
