"""Detokenizer: pieces join to the tokenizer's own decode, and no stop string slips through."""

import os
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from core.tokenizer import Tokenizer
from orchestrator.detokenizer import Detokenizer
from tests.tiny_models import EOS, save_tokenizer

PATIENT = settings(deadline=None)  # never fail on time
CUTS = st.lists(st.integers(0, 60), max_size=8)
# Beginnings, middles, ends and never-legal bytes of code points.
AWKWARD_BYTES = [0x41, 0x80, 0x98, 0x9F, 0xBD, 0xA0, 0xE4, 0xED, 0xEF, 0xBF, 0xF0, 0xF4, 0xFF]
EMOJI = [0xF0, 0x9F, 0x98, 0x80]
PIECES = ["▁a", "b", "▁", "▁▁", "\ufffd"]  # ids from 256 in the byte-fallback vocabulary


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The tiny checkpoints' tokenizer: one token per byte."""
    path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(path)
    return Tokenizer.load(str(path))


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    """A sentencepiece-like tokenizer: pieces with "▁" for a space, single bytes for the rest."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary |= {piece: 256 + index for index, piece in enumerate(PIECES)}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"))


@cache
def token_of_byte(byte: int) -> int:
    """Id of one byte in the byte-level tokenizer."""
    return sorted(pre_tokenizers.ByteLevel.alphabet()).index(bytes_to_unicode()[byte])


def stream(detokenizer: Detokenizer, ids: list[int], cuts: list[int]) -> tuple[str, str, int]:
    """Push `ids` in blocks that end at `cuts`: the text, the stop string, the tokens used."""
    text, used = "", 0
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    for begin, end in pairwise(edges):
        piece = detokenizer.push(ids[begin:end])
        assert "".join(piece.token_texts) == piece.text
        assert len(piece.token_texts) == piece.num_tokens
        text, used = text + piece.text, used + piece.num_tokens
        if piece.stop_string:
            return text, piece.stop_string, used
    return text + detokenizer.flush(), "", used


@PATIENT
@given(ids=st.lists(st.integers(0, 270), max_size=60), cuts=CUTS)
def test_random_ids_join_to_decode(byte_level: Tokenizer, ids: list[int], cuts: list[int]):
    """Broken UTF-8, specials and padding ids in any mix would lose or double characters."""
    assert stream(Detokenizer(byte_level), ids, cuts)[0] == byte_level.decode(ids)


@PATIENT
@given(data=st.lists(st.sampled_from(AWKWARD_BYTES), max_size=60), cuts=CUTS)
def test_broken_bytes_join_to_decode(byte_level: Tokenizer, data: list[int], cuts: list[int]):
    """Code points that begin and never end are where a window is cut in the wrong place."""
    ids = [token_of_byte(byte) for byte in data]
    assert stream(Detokenizer(byte_level), ids, cuts)[0] == byte_level.decode(ids)


@PATIENT
@given(
    ids=st.lists(
        st.one_of(st.integers(256, 263), st.sampled_from(AWKWARD_BYTES), st.integers(0, 265)),
        max_size=60,
    ),
    cuts=CUTS,
)
def test_byte_fallback_joins_to_decode(byte_fallback: Tokenizer, ids: list[int], cuts: list[int]):
    """One illegal byte turns a whole run of byte tokens into replacement characters: text given
    out before the run ends would be wrong; and a window would lose or add a leading space."""
    assert stream(Detokenizer(byte_fallback), ids, cuts)[0] == byte_fallback.decode(ids)


@PATIENT
@given(text=st.text(max_size=60), cuts=CUTS)
def test_any_text_comes_back(byte_level: Tokenizer, text: str, cuts: list[int]):
    """Text of any script, cut anywhere, must arrive as it was."""
    ids = byte_level.encode(text)
    assert stream(Detokenizer(byte_level), ids, cuts)[0] == text


@PATIENT
@given(text=st.text(max_size=60), extra=st.lists(st.integers(0, 49151), max_size=20), cuts=CUTS)
def test_real_vocabulary_joins_to_decode(text: str, extra: list[int], cuts: list[int]):
    """Merged tokens that end inside a code point and begin the next exist in real vocabularies."""
    tokenizer = real_tokenizer()
    ids = tokenizer.encode(text) + extra
    assert stream(Detokenizer(tokenizer), ids, cuts)[0] == tokenizer.decode(ids)


@cache
def real_tokenizer() -> Tokenizer:
    """The tokenizer in the directory FORERUN_TEST_TOKENIZER, e.g. the embedded model's."""
    path = Path(os.environ.get("FORERUN_TEST_TOKENIZER", "/nonexistent"))
    if not path.is_dir():
        pytest.skip("FORERUN_TEST_TOKENIZER names no directory")
    return Tokenizer.load(str(path))


def test_only_complete_code_points_are_given_out(byte_level: Tokenizer):
    """A client would print a replacement character in the middle of an emoji."""
    ids = [token_of_byte(byte) for byte in EMOJI]
    detokenizer = Detokenizer(byte_level)
    assert [detokenizer.push([token]).text for token in ids] == ["", "", "", "😀"]
    assert detokenizer.flush() == ""


def test_text_before_an_incomplete_code_point_is_given_out(byte_level: Tokenizer):
    """A client would wait for text that is already final."""
    detokenizer = Detokenizer(byte_level)
    assert detokenizer.push([*byte_level.encode("hi"), token_of_byte(0xF0)]).text == "hi"
    assert detokenizer.flush() == "\ufffd"


@pytest.mark.parametrize("byte", [0x41, 0xFF, 0x80])
def test_the_window_stays_small(byte_level: Tokenizer, byte: int):
    """A window that grows (text, or nothing but broken bytes) makes long texts quadratic."""
    decoded: list[int] = []

    class Counting(Detokenizer):
        def _decode(self, token_id: int) -> str:
            decoded.append(len(self._ids))
            return super()._decode(token_id)

    Counting(byte_level).push([token_of_byte(byte)] * 200)
    assert max(decoded) <= 4


def reference_stop(text: str, stops: tuple[str, ...]) -> tuple[str, str]:
    """What a reader of one character after the other stops at."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, ""


@PATIENT
@given(
    text=st.text(alphabet="abé", max_size=40),
    stops=st.lists(st.text(alphabet="abé", min_size=1, max_size=5), max_size=3),
    cuts=CUTS,
)
def test_stop_strings(byte_level: Tokenizer, text: str, stops: list[str], cuts: list[int]):
    """A stop string over two blocks, or completed inside one, would be missed or leak."""
    expected, stop = reference_stop(text, tuple(stops))
    got, matched, used = stream(
        Detokenizer(byte_level, tuple(stops)), byte_level.encode(text), cuts
    )
    assert (got, matched) == (expected, stop)
    consumed = expected + stop if stop else text
    assert used == len(byte_level.encode(consumed))


def test_a_stop_inside_a_block_uses_no_token_behind_it(byte_level: Tokenizer):
    """Tokens behind the stop string would be counted and sent."""
    piece = Detokenizer(byte_level, ("END",)).push(byte_level.encode("abENDcd"))
    assert (piece.text, piece.num_tokens, piece.stop_string) == ("ab", 5, "END")


def test_a_false_beginning_is_given_out_again(byte_level: Tokenizer):
    """Text held back for a stop string that does not come must not be lost."""
    detokenizer = Detokenizer(byte_level, ("END",))
    assert detokenizer.push(byte_level.encode("aEN")).text == "a"
    assert detokenizer.push(byte_level.encode("E")).text == "EN"
    assert detokenizer.push([EOS]).text == ""
    assert detokenizer.flush() == "E"


def test_flush_cuts_a_stop_string_too(byte_fallback: Tokenizer):
    """Bytes that wait for their run's end may hold a stop string when the tokens end."""
    detokenizer = Detokenizer(byte_fallback, ("😀",))
    assert detokenizer.push([257, *EMOJI]).text == "b"
    assert detokenizer.flush() == ""
