"""Tokenizer: the model's own encode, decode and template, safe from many threads."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from core.errors import InvalidRequestError, ModelError
from core.tokenizer import Tokenizer
from tests.tiny_models import ASSISTANT, BOS, EOS, USER, VOCAB_SIZE, save_tokenizer

TEXT = "Hällo wörld,  日本語 😀\n<eos> end"
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the tiny checkpoints' tokenizer."""
    path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in it."""
    return Tokenizer.load(str(path))


def test_encode_and_decode_are_transformers_own(path: Path, tokenizer: Tokenizer):
    """Other ids for the same text would mean another prompt than the one transformers sees."""
    reference = AutoTokenizer.from_pretrained(path, local_files_only=True)
    ids = tokenizer.encode(TEXT)
    assert ids == reference.encode(TEXT)
    assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    assert tokenizer.decode(ids) == TEXT.replace("<eos>", "")


def test_template_is_transformers_own(path: Path, tokenizer: Tokenizer):
    """A template that is tokenized twice, or with specials added, is another prompt."""
    reference = AutoTokenizer.from_pretrained(path, local_files_only=True)
    expected = reference.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
    ids = tokenizer.apply_chat_template(CHAT)
    assert ids == expected
    assert [ids[0], ids[1], ids[-1]] == [BOS, USER, ASSISTANT]


def test_specials_and_unknown_ids_have_no_text(tokenizer: Tokenizer):
    """Ids of a padded head, or end tokens, must not appear in a client's text."""
    assert tokenizer.size == VOCAB_SIZE
    assert tokenizer.decode([BOS, *tokenizer.encode("a"), EOS, VOCAB_SIZE + 7]) == "a"
    assert EOS not in tokenizer.text_ids and tokenizer.encode("a")[0] in tokenizer.text_ids


def test_fingerprint_follows_the_vocabulary(tokenizer: Tokenizer, tmp_path: Path):
    """A drafter with other ids for the same tokens must be told apart; an equal one must not."""
    save_tokenizer(tmp_path / "same")
    save_tokenizer(tmp_path / "other", other=True)
    assert Tokenizer.load(str(tmp_path / "same")).fingerprint == tokenizer.fingerprint
    assert Tokenizer.load(str(tmp_path / "other")).fingerprint != tokenizer.fingerprint


def test_no_template(tmp_path: Path):
    """A chat on a model without template needs one clear error."""
    save_tokenizer(tmp_path, chat_template=False)
    tokenizer = Tokenizer.load(str(tmp_path))
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequestError, match="chat: the model has no chat template"):
        tokenizer.apply_chat_template(CHAT)


def test_template_that_refuses(tmp_path: Path):
    """What a template raises is the caller's fault, not an internal error."""
    save_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequestError, match=r"chat: refused .*roles must alternate"):
        Tokenizer.load(str(tmp_path)).apply_chat_template(CHAT)


def test_padding_and_truncation_in_the_file_are_ignored(path: Path, tmp_path: Path):
    """Tokenizer files saved after training truncate and pad: a prompt would be cut silently."""
    save_tokenizer(tmp_path)
    file = tmp_path / "tokenizer.json"
    state = json.loads(file.read_text())
    state["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    file.write_text(json.dumps(state))
    assert len(Tokenizer.load(str(tmp_path)).encode("0123456789")) == 10


def test_missing_directory(tmp_path: Path):
    """A path that is not there must not be looked up on a hub."""
    with pytest.raises(ModelError, match="no such directory"):
        Tokenizer.load(str(tmp_path / "nowhere"))


def test_directory_without_tokenizer(tmp_path: Path):
    """The error names the directory."""
    with pytest.raises(ModelError, match=f"{tmp_path.name}: the tokenizer cannot be loaded"):
        Tokenizer.load(str(tmp_path))


def test_many_threads(tokenizer: Tokenizer):
    """The wrapper's own encode fails with "Already borrowed" when threads share it."""
    expected = tokenizer.encode(TEXT), tokenizer.apply_chat_template(CHAT)
    with ThreadPoolExecutor(8) as pool:
        for _ in range(50):
            encoded = pool.submit(tokenizer.encode, TEXT)
            templated = pool.submit(tokenizer.apply_chat_template, CHAT)
            assert (encoded.result(), templated.result()) == expected
