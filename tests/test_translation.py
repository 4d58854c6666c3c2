"""Translation between tokenizers: what it returns, that it never raises, and that it is a function
of the tokens alone."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.tokenizer import Tokenizer
from drafter_service.translation import Context, Translator
from tests.tiny_tokenizers import BUILDERS, CORPUS

PAIRS = list(itertools.permutations(BUILDERS, 2))
TEXTS = (
    "The harbour was built in 1821, when the old landing place had silted up by the pier. " * 3,
    "def load(path):\n    for line in file:\n\t\tif  line:   # two  spaces\n            return\n\n",
    " leading space, trailing space ",
    "春眠不觉晓。处处闻啼鸟。吾輩は猫である。 Привет, как дела? süße Äpfel",
    "smile 😀👩‍👩‍👧 flags 🇸🇪 zero\u200bwidth e\u0301 \ufffd \x00\x7f <s> </s> <0x0A> ▁ Ġ",
)
Get = Callable[[str], Tokenizer]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Get:
    """The tokenizers of tests/tiny_tokenizers.py by name, loaded as a service loads them."""
    loaded: dict[str, Tokenizer] = {}

    def get(name: str) -> Tokenizer:
        if name not in loaded:
            path = tmp_path_factory.mktemp(name)
            BUILDERS[name]().save_pretrained(path)
            loaded[name] = Tokenizer.load(str(path))
        return loaded[name]

    return get


@pytest.fixture(scope="module")
def translators(tokenizer: Get) -> list[Translator]:
    """One for every ordered pair."""
    return [translator(tokenizer, *pair) for pair in PAIRS]


def translator(tokenizer: Get, target: str, drafter: str) -> Translator:
    ours = tokenizer(drafter)
    return Translator(tokenizer(target), ours, ours.size)


def plain(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, special_tokens=False)


def context(translator: Translator, token_ids: list[int]) -> Context:
    made = translator.begin()
    assert made.follow(token_ids)
    return made


@pytest.mark.parametrize("name", BUILDERS)
def test_token_bytes_spell_the_text(tokenizer: Get, name: str) -> None:
    """Everything rests on it: a token that spells something else would be drafted for it."""
    ours = tokenizer(name)
    spelled = ours.token_bytes()
    for text in TEXTS[:4]:
        joined = b"".join(spelled[i] for i in plain(ours, text)).decode()
        assert joined == (" " + text if name == "metaspace" else joined[: -len(text)] + text)
    assert all(not spelled[i] for i in ours.special_ids.values())


@pytest.mark.parametrize("pair", PAIRS, ids="<-".join)
def test_the_drafter_reads_what_it_would_have_been_given(
    tokenizer: Get, pair: tuple[str, str]
) -> None:
    """The drafter must see its own spelling of the text, as in training: a seam between segments
    that cuts a word, or a space too many, makes its drafts worse and nobody would notice."""
    target, drafter = map(tokenizer, pair)
    for text in TEXTS[:4]:
        tokens = context(translator(tokenizer, *pair), plain(target, text)).tokens()
        assert tokens.is_whole and tokens.token_ids == drafter.encode(
            target.decode(plain(target, text))
        )


@pytest.mark.parametrize("pair", PAIRS, ids="<-".join)
def test_a_text_comes_back_in_the_targets_tokens(tokenizer: Get, pair: tuple[str, str]) -> None:
    """A drafter that writes on what the target would write must be accepted in full, also from
    within a word, indentation, or half an emoji."""
    target, drafter = map(tokenizer, pair)
    made = translator(tokenizer, *pair)
    for text in TEXTS[:4]:
        ids, theirs = plain(target, text), drafter.encode(target.decode(plain(target, text)))
        num_exact = 0
        for cut in range(3, len(ids)):
            begun = context(made, ids[:cut])
            tokens = begun.tokens()
            if tokens.is_whole and theirs[: len(tokens.token_ids)] == tokens.token_ids:
                assert begun.to_target(theirs[len(tokens.token_ids) :]) == ids[cut:]
                num_exact += 1
        assert num_exact > 0.3 * len(ids)


@given(data=st.data(), text=st.text(max_size=80), draft=st.text(max_size=20))
@settings(max_examples=150, deadline=None)
def test_any_text_and_any_ids_translate(
    translators: list[Translator], data: st.DataObject, text: str, draft: str
) -> None:
    """Unicode of every kind, then arbitrary ids on both sides: nothing raises, every id is one of
    the tokenizer it is for, and what comes back spells no more than what was written."""
    made = data.draw(st.sampled_from(translators))
    target, drafter = made.target, made.drafter
    any_target = st.lists(st.integers(0, target.limit + 3), max_size=8)
    any_drafter = st.lists(st.integers(0, drafter.limit - 1), max_size=8)
    ids = plain(target.tokenizer, text) + data.draw(any_target)
    begun = context(made, ids)
    read = begun.tokens().token_ids
    assert all(0 <= token_id < drafter.limit for token_id in read)
    for drafted in (plain(drafter.tokenizer, draft), data.draw(any_drafter)):
        found = begun.to_target(drafted)
        assert all(0 <= token_id < target.limit for token_id in found)
        assert drafter.spell(drafted).startswith(target.spell(found))


@given(data=st.data(), text=st.text(alphabet="ab é😀\n", max_size=250))
@settings(max_examples=60, deadline=None)
def test_pieces_are_worth_the_whole(
    translators: list[Translator], data: st.DataObject, text: str
) -> None:
    """A drafter that was restarted must draft the same: its tokens cannot depend on the rounds in
    which the target's came. And what it is told not to compare must indeed be unchanged."""
    made = data.draw(st.sampled_from(translators))
    noise = data.draw(st.lists(st.integers(0, made.target.limit - 1), max_size=30))
    ids = plain(made.target.tokenizer, text) + noise
    ids += plain(made.target.tokenizer, text[::-1])
    grown, before = made.begin(), []
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=6))
    for end in sorted([*cuts, len(ids)]):
        assert grown.follow(ids[:end])
        tokens = grown.tokens()
        assert tokens.token_ids == context(made, ids[:end]).tokens().token_ids
        assert tokens.token_ids[: tokens.num_unchanged] == before[: tokens.num_unchanged]
        before = tokens.token_ids


def test_a_long_text_is_not_encoded_again_and_again(tokenizer: Get) -> None:
    """Encoding the whole text in every round costs more than drafting, with a long one."""
    made = translator(tokenizer, "byte_level", "metaspace")
    ids = plain(tokenizer("byte_level"), CORPUS * 5)
    begun = context(made, ids)
    begun.tokens()
    assert begun.follow([*ids, ids[0]], len(ids))
    tokens = begun.tokens()
    assert len(tokens.token_ids) - tokens.num_unchanged < 100 < len(tokens.token_ids)


def test_other_tokens_than_before_are_noticed(tokenizer: Get) -> None:
    """A rewound sequence would be drafted for with the text of the old one."""
    begun = context(translator(tokenizer, "bytes", "metaspace"), [50, 51, 52])
    assert not begun.follow([50, 51])
    assert not begun.follow([50, 51, 53, 54], 2)
    assert begun.follow([50, 51, 52, 53], 3)


def test_special_tokens_cross_by_their_name(tokenizer: Get) -> None:
    """A turn's end that both know must not become text, nor one that only one side knows; and a
    text must not begin twice."""
    made = translator(tokenizer, "metaspace", "bytes")  # "</s>" is 2 there and 1 here
    assert made.shared[1] == 2
    ids = [1, *plain(tokenizer("metaspace"), "Hi"), 2]
    assert context(made, ids).tokens().token_ids == [*plain(tokenizer("bytes"), "Hi"), 1]
    both = translator(tokenizer, "byte_level", "byte_level_bos")
    hi = plain(tokenizer("byte_level_bos"), "Hi")
    ids = [0, *plain(tokenizer("byte_level"), "Hi"), 1]
    assert context(both, ids).tokens().token_ids == [0, *hi, 1]


def test_half_a_character(tokenizer: Get) -> None:
    """Behind the first bytes of an emoji the drafter writes the others, and nothing else fits."""
    made = translator(tokenizer, "bytes", "metaspace")
    ids = plain(tokenizer("bytes"), "a😀b")
    begun = context(made, ids[:3])
    tokens = begun.tokens()
    fallback = sorted(tokenizer("metaspace").byte_ids)
    face = "😀".encode()
    assert tokens.is_whole and tokens.token_ids[-2:] == [fallback[face[0]], fallback[face[1]]]
    rest = [fallback[face[2]], fallback[face[3]]]
    assert begun.to_target(rest) == ids[3:5]
    assert begun.to_target(rest[:1]) == []  # not a character yet
    assert begun.to_target(plain(tokenizer("metaspace"), "b")) == []  # broken


def test_overlap_tells_pairs_apart(tokenizer: Get) -> None:
    """ "auto" rests on it: bytes are in every vocabulary, and yet no drafter of bytes may be told
    to draft token by token."""
    assert translator(tokenizer, "byte_level", "bytes").overlap == 0
    assert translator(tokenizer, "byte_level_bos", "byte_level").overlap == pytest.approx(1)
    between = translator(tokenizer, "byte_level", "metaspace")
    assert 0.3 < between.overlap < 0.9
    assert len(set(between.shared.values())) == len(between.shared)
    spelled = {between.drafter.token_bytes[d] for d in between.shared} - {b""}
    assert len(spelled) == len(between.shared) - len(between.special_of)


def test_ids_beyond_the_drafters_head_do_not_exist(tokenizer: Get) -> None:
    """Some tokenizers know tokens that their model has no row for: an error in mid-stream."""
    ours = tokenizer("byte_level")
    made = Translator(tokenizer("metaspace"), ours, 300)
    ids = plain(tokenizer("metaspace"), CORPUS)
    assert max(context(made, ids).tokens().token_ids) < 300 <= max(plain(ours, CORPUS))
    assert max(made.shared) < 300


def test_a_draft_may_go_on_where_the_target_would_not_part(tokenizer: Get) -> None:
    """The target committed a space by itself, or half a word. Its own tokens for the whole text do
    not part there; the draft is then spelled by itself, without a space that nobody wrote."""
    made = translator(tokenizer, "metaspace", "bytes")
    target, written = tokenizer("metaspace"), plain(tokenizer("bytes"), "tools of")
    for begin in ("The", "The mus"):
        ids = [*plain(target, begin), *plain(target, "x ")[-1:]][: None if begin == "The" else -1]
        found = context(made, ids).to_target(written)
        assert made.target.spell(found) == b"tools of"
    assert target.decode(plain(target, "The ")) == "The "


@pytest.mark.parametrize("name", ["byte_level", "metaspace"])
def test_a_target_needs_no_model_here(tmp_path: Path, name: str) -> None:
    """It is large, and its folder may hold nothing but a tokenizer; translating to itself is
    possible, and changes nothing."""
    BUILDERS[name]().save_pretrained(tmp_path)
    ours = Tokenizer.load(str(tmp_path))
    made = Translator(ours, ours, ours.size)
    assert all(drafter_id == target_id for drafter_id, target_id in made.shared.items())
    assert made.overlap == pytest.approx(1)
    ids = ours.encode(TEXTS[1])
    assert context(made, ids).tokens().token_ids == ids
