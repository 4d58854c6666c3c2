"""Loading and running a model: facts it reports, placement, prefixes, and every refusal."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import core.attention
from core.errors import InvalidRequestError, ModelError
from core.kv_cache import NoSlotError
from core.model import RaggedModel, Row
from core.model_facts import default_sampling, eos_token_ids, max_length
from core.types import Rule, SamplingParams
from tests.test_families import TOLERANCE, load, truth
from tests.tiny_gguf import FILE_NAME, save_gguf
from tests.tiny_models import EOS, KINDS, VOCAB_SIZE, TinyFactory, load_reference, save_tiny

SPLIT = {
    "model.embed_tokens": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.layers.2": "cpu",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "disk",
}
TEXT = [(37 * i * i + 11 * i) % 251 for i in range(120)]


def prefill(model: RaggedModel, sequence: int, token_ids: list[int]) -> torch.Tensor:
    """Open a sequence, reuse what can be, compute the rest; the last token's logits."""
    model.open(sequence)
    known = model.reuse_prefix(sequence, token_ids)
    return model.forward([Row(sequence, known, token_ids[known:], 1)])


def test_a_model_says_what_it_is(tiny_llama: Path) -> None:
    """Breaks when handshakes would compare wrong facts."""
    model = load(tiny_llama, max_length=10_000)
    assert model.vocab_size == model.tokenizer_size == VOCAB_SIZE
    assert model.max_length == 512  # of the model, not of the config
    assert model.eos_token_ids == (EOS,)
    assert model.default_sampling == SamplingParams()
    assert model.identity.tokenizer_fingerprint


def test_a_checkpoint_without_tokenizer_serves_ids(tiny: TinyFactory) -> None:
    """Breaks when a model that is driven by ids alone cannot be loaded."""
    model = load(tiny("llama", tokenizer=False))
    assert model.identity.tokenizer_fingerprint == ""
    assert model.tokenizer_size == model.vocab_size


@pytest.mark.parametrize("kind", ["llama", "mistral", "deepseek_v3"])
def test_reused_prefixes_give_the_same_logits(kind: str, tiny: TinyFactory) -> None:
    """Breaks when K/V copied from a live sequence, or taken over from a finished one, are not
    those that would have been computed, or change with their source."""
    path = tiny(kind)
    model, expected = load(path, max_sequences=3), truth(load_reference(path))
    prefill(model, 1, TEXT[:50])
    second = [*TEXT[:40], 9, 9]
    assert (prefill(model, 2, second) - expected(second, 1)).abs().max() < TOLERANCE
    model.forward([Row(1, 10, [3] * 20, 0)])  # the source changes its mind
    model.close(1)
    more = model.forward([Row(2, 42, TEXT[:5], 5)])
    assert (more - expected([*second, *TEXT[:5]], 5)).abs().max() < TOLERANCE
    model.close(2)
    model.open(3)
    third = [*second, *TEXT[:5], 7, 8]
    assert model.reuse_prefix(3, third) == 47
    got = model.forward([Row(3, 47, [7, 8], 2)])
    assert (got - expected(third, 2)).abs().max() < TOLERANCE
    model.cache.check()


def test_slots_run_out_and_come_back(tiny_llama: Path) -> None:
    """Breaks when admission is not refused at the limit or a closed sequence keeps its slot."""
    model = load(tiny_llama, max_sequences=2)
    model.open(1)
    model.open(2)
    with pytest.raises(NoSlotError):
        model.open(3)
    model.close(1)
    model.close(99)
    model.open(3)
    assert model.length(3) == 0


@pytest.mark.parametrize(
    ("row", "field"),
    [
        (Row(5, 0, [1], 1), r"rows\[5\]"),
        (Row(0, 4, [1], 1), r"rows\[0\].position"),
        (Row(0, 3, [], 0), r"rows\[0\].token_ids"),
        (Row(0, 3, [1] * 158, 1), r"rows\[0\].token_ids"),
        (Row(0, 3, [260], 1), r"rows\[0\].token_ids"),
        (Row(0, 3, [-1], 1), r"rows\[0\].token_ids"),
        (Row(0, 3, [1], 2), r"rows\[0\].num_logits"),
        (Row(1, 0, [1], 1), "rows"),
    ],
)
def test_a_wrong_row_is_refused_and_changes_nothing(row: Row, field: str, tiny_llama: Path) -> None:
    """Breaks when bad input reaches the device (an index error there ends the process) or cuts
    the good rows of its batch."""
    model = load(tiny_llama)
    model.open(0)
    model.open(1)
    model.forward([Row(0, 0, [1, 2, 3], 0), Row(1, 0, [4, 5], 0)])
    with pytest.raises(InvalidRequestError, match=field):
        model.forward([Row(1, 1, [6], 1), row])
    assert (model.length(0), model.length(1)) == (3, 2)


def test_a_batch_over_the_limit_is_refused(tiny_llama: Path) -> None:
    """Breaks when a forward may be larger than what was rehearsed at load."""
    model = load(tiny_llama, max_batch_tokens=16)
    model.open(0)
    with pytest.raises(InvalidRequestError, match="more than 16 tokens"):
        model.forward([Row(0, 0, [1] * 17, 1)])


def test_a_sequence_can_fill_its_context_exactly(tiny_llama: Path) -> None:
    """Breaks at the last token of the context."""
    model, expected = load(tiny_llama, max_length=64), truth(load_reference(tiny_llama))
    model.open(0)
    model.forward([Row(0, 0, TEXT[:60], 0)])
    got = model.forward([Row(0, 60, TEXT[60:64], 4)])
    assert (got - expected(TEXT[:64], 4)).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    "device_map",
    [
        "auto",
        {"": "cpu"},
        SPLIT,
    ],
)
def test_any_device_map_gives_the_same_logits(
    device_map: Any, tiny_llama: Path, tmp_path: Path
) -> None:
    """Breaks when offloaded layers lose their weights, their cache or their context keyword."""
    options = {"device_map": device_map, "offload_folder": str(tmp_path)}
    model, expected = load(tiny_llama, **options), truth(load_reference(tiny_llama))
    got = prefill(model, 0, TEXT[:40])
    assert (got - expected(TEXT[:40], 1)).abs().max() < TOLERANCE
    got = model.forward([Row(0, 40, TEXT[40:43], 3)])
    assert (got - expected(TEXT[:43], 3)).abs().max() < TOLERANCE


@pytest.mark.parametrize(("quantized", "tolerance"), [(False, TOLERANCE), (True, 1.5)])
def test_a_gguf_file_loads(
    quantized: bool, tolerance: float, tiny: TinyFactory, tmp_path: Path
) -> None:
    """Breaks when GGUF weights, their quantised blocks or their tokenizer are misread."""
    source = tiny("padded")
    reference = load_reference(source)
    path = save_gguf(reference, source, tmp_path / "gguf", quantized)
    model = load(path, gguf_file=FILE_NAME)
    difference = (prefill(model, 0, TEXT[:40]) - truth(reference)(TEXT[:40], 1)).abs().max()
    assert difference < tolerance
    assert (difference > TOLERANCE) == quantized
    assert model.eos_token_ids == (EOS,)
    assert model.identity.tokenizer_fingerprint


@pytest.mark.parametrize("kind", ["mamba", "qwen3_next"])
def test_models_that_cannot_roll_back_are_refused(kind: str, tiny: TinyFactory) -> None:
    """Breaks when a recurrent model is served: a rejected draft would corrupt its text
    (transformers#49036)."""
    with pytest.raises(ModelError, match=f"{kind} has linear_attention layers"):
        load(tiny(kind))


def test_a_layer_that_shares_kv_takes_no_memory(tiny: TinyFactory) -> None:
    """Breaks when K/V that two layers share are stored twice, or its owner is not found."""
    model = load(tiny("gemma3n_text"))
    assert [layer.source for layer in model.cache.layers] == [0, 1, 0, 1]
    assert model.cache.keys[2] is model.cache.keys[0]


def test_attention_that_is_not_the_librarys_is_refused(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Breaks when model code that does more around attention than we see is served wrongly: a
    wrong scale stands for it, and loading must notice."""
    right = core.attention.F.scaled_dot_product_attention

    def wrong(*tensors: torch.Tensor, scale: float, **options: Any) -> torch.Tensor:
        return right(*tensors, scale=scale * 3, **options)

    monkeypatch.setattr(core.attention.F, "scaled_dot_product_attention", wrong)
    with pytest.raises(ModelError, match="more around attention"):
        load(tiny_llama)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("StableLmConfig", "does not pass keywords on"),
        ("GPTJConfig", "its attention cannot be replaced"),
        ("BloomConfig", "BloomBlock layers"),
        ("MptConfig", "mpt does not run"),
        ("DiffLlamaConfig", "attends more than once"),
        ("Llama4TextConfig", "chunked_attention layers"),
        ("DogeConfig", "builds its own attention mask"),
    ],
)
def test_other_attention_is_refused_by_name(
    kind: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Breaks when model code that goes around our attention is served, or fails obscurely."""
    sizes = {
        "GPTJConfig": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
        "BloomConfig": {"n_layer": 2, "n_head": 4},
        "MptConfig": {"d_model": 32, "n_heads": 4, "n_layers": 2},
        "Llama4TextConfig": {"num_local_experts": 2, "intermediate_size_mlp": 64},
    }
    monkeypatch.setitem(KINDS, kind, (kind, sizes.get(kind, {})))
    with pytest.raises(ModelError, match=message):
        load(save_tiny(kind, tmp_path, tokenizer=False))


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    """Breaks when a model that needs an encoder is taken for a decoder."""
    from transformers import T5Config

    T5Config(vocab_size=32, d_model=16).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="t5 is an encoder-decoder"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["/no/such/model", "./no-such-model", "nobody/no-such-model"])
def test_a_missing_model_is_one_clear_error(name: str) -> None:
    """Breaks when a typo in the config is not named, or waits for a network."""
    with pytest.raises(ModelError, match=name):
        load(name)


def test_a_directory_without_weights_is_one_clear_error(tmp_path: Path, tiny_llama: Path) -> None:
    """Breaks when an incomplete checkpoint ends in a traceback of the library."""
    (tmp_path / "config.json").write_text((tiny_llama / "config.json").read_text())
    with pytest.raises(ModelError, match=str(tmp_path)):
        load(tmp_path)


def test_a_cache_that_cannot_fit_is_refused_at_load(tmp_path: Path) -> None:
    """Breaks when max_sequences x max_length is found out to be too much in mid-flight."""
    save_tiny("llama", tmp_path, max_position_embeddings=1 << 40)
    with pytest.raises(ModelError, match="lower one of the two"):
        load(tmp_path, max_length=1 << 40)


def test_generation_config_gives_the_defaults(tiny_llama: Path) -> None:
    """Breaks when a checkpoint's own sampling, or its second end token, is ignored."""
    text = load_reference(tiny_llama).config
    stored = GenerationConfig(do_sample=True, temperature=0.5, top_p=0.9, eos_token_id=[3, 4])
    assert default_sampling(stored) == SamplingParams(0.5, 0, 0.9, 0, Rule.COUPLED)
    assert eos_token_ids(text, stored) == (3, 4)
    assert eos_token_ids(text, GenerationConfig()) == (EOS,)
    assert default_sampling(GenerationConfig(temperature=0.5)) == SamplingParams()


def test_rotations_that_depend_on_the_longest_row_are_not_reached(tiny_llama: Path) -> None:
    """Breaks when one long row would change the rotation, and so the text, of its batch-mates."""
    text = load_reference(tiny_llama).config
    text.rope_parameters = {"rope_type": "longrope", "original_max_position_embeddings": 128}
    assert max_length(text) == 128
