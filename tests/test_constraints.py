"""Structured output on its own: masks of real grammars over three kinds of tokenizer."""

import json
import re
from collections.abc import Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models

from core import constraints
from core.constraints import ConstraintCompiler, apply_masks
from core.errors import InvalidRequestError
from core.params import Constraint, ConstraintKind
from tests.constrained import Target, generate, save_merged, save_sentencepiece_like
from tests.tiny_models import EOS, save_tokenizer

JSON, REGEX, GRAMMAR = ConstraintKind.JSON_SCHEMA, ConstraintKind.REGEX, ConstraintKind.GRAMMAR
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "score": {"type": "number"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "grün"]}, "maxItems": 3},
        "address": {
            "type": "object",
            "properties": {
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
                "x": {"type": "null"},
            },
            "required": ["zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
WORDS = Tokenizer(models.WordLevel({"a": 0}, "a")).to_str()  # bytes are not what it is made of
SUM = 'start: term ("+" term)*\nterm: /[0-9]{1,3}/ | "(" start ")"'
SUM_GBNF = 'root ::= term ("+" term)*\nterm ::= [0-9]{1,3} | "(" root ")"'
DATE = r"(19|20)[0-9]{2}-(0[1-9]|1[0-2]) [A-Zäöü]{2,4}"


@pytest.fixture(scope="module", params=["bytes", "merged", "sentencepiece"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    path = tmp_path_factory.mktemp(request.param)
    if request.param == "bytes":
        save_tokenizer(path)
        return Target(path, EOS)
    save = save_merged if request.param == "merged" else save_sentencepiece_like
    return Target(path, save(path))


@pytest.fixture(scope="module")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    path = tmp_path_factory.mktemp("tiny")
    save_tokenizer(path)
    return Target(path, EOS)


@pytest.mark.parametrize("seed", range(6))
def test_json_is_always_valid(target: Target, seed: int) -> None:
    """A mask that lets one wrong token through, alone or behind a draft, gives invalid JSON."""
    tokens, accepted = generate(target, target.compile(JSON, json.dumps(PERSON)), seed)
    jsonschema.validate(json.loads(target.tokenizer.decode(tokens)), PERSON)
    assert accepted > 0


@pytest.mark.parametrize("seed", range(4))
def test_regex_and_grammars_are_always_matched(target: Target, seed: int) -> None:
    """As for JSON; Lark and GBNF are two spellings of one grammar."""
    tokens, _ = generate(target, target.compile(REGEX, DATE), seed)
    assert re.fullmatch(DATE, target.tokenizer.decode(tokens))
    for source in (SUM, SUM_GBNF):
        tokens, _ = generate(target, target.compile(GRAMMAR, source), seed)
        text = target.tokenizer.decode(tokens)
        assert re.fullmatch(r"[0-9+()]+", text)
        eval(re.sub(r"\b0+(?=\d)", "", text), {})  # parentheses and operands fit


def test_draft_masks_equal_masks_step_by_step(target: Target) -> None:
    """Masks behind a draft must be those that committing it would give, and leave no trace."""
    text = '{"name": "Ann ü", "age": 12, "tags": ["red"], "address": {"zip": "10115"}}'
    tokens = [*target.encode(text), target.end]
    schema = json.dumps(PERSON)
    alone = target.compile(JSON, schema)
    rows = [alone.masks(tokens[:index])[0] for index in range(len(tokens) + 1)]
    state = target.compile(JSON, schema)
    for start in range(0, len(tokens), 3):
        draft = tokens[start : start + 5]
        for _ in range(2):  # a draft that was kept would show in the second call
            masks = state.masks(tokens[:start], draft)
            np.testing.assert_array_equal(masks, rows[start : start + len(draft) + 1])
        np.testing.assert_array_equal(state.masks(tokens[:start], draft[:1])[:1], masks[:1])
    for index, token in enumerate(tokens):
        assert token in target.allowed(rows[index][None])[0]


def test_masks_end_at_the_first_forbidden_draft_token(tiny_target: Target) -> None:
    """The number of rows says how much of a draft can be accepted at most."""
    state = tiny_target.compile(REGEX, "abc")
    a, b, c, x = tiny_target.encode("abcx")
    for draft, rows in [([a, b, c], 4), ([a, x, c], 2), ([x, a], 1), ([], 1)]:
        assert len(state.masks([], draft)) == rows
    padding = tiny_target.vocab_size - 1
    assert len(state.masks([], [padding, a])) == 1
    assert tiny_target.allowed(state.masks([], [a, b])) == [{a}, {b}, {c}]


def test_a_finished_text_allows_end_tokens_only(tiny_target: Target) -> None:
    """Text behind the end would be invalid, and an empty row would give NaN. ignore_eos and drafts
    may go on behind the end: then it comes again and again."""
    state = tiny_target.compile(REGEX, "a+b?")
    a, b = tiny_target.encode("ab")
    end = tiny_target.end
    assert tiny_target.allowed(state.masks([a], [a, b, end, end])) == [
        {a, b, end},
        {a, b, end},
        {end},
        {end},
        {end},
    ]
    assert tiny_target.allowed(state.masks([a, b, end, end], [end])) == [{end}, {end}]
    assert len(state.masks([a, end], [a])) == 1  # an end token where more was possible ends it too
    assert tiny_target.allowed(state.masks([a, a])) == [{a, b, end}]  # and that was undone


def test_truncation_and_change_are_followed(target: Target) -> None:
    """A verifier truncates by position, and rows may come again with other tokens."""
    ones, other = target.encode("(1+(1"), target.encode("1+11")
    state = target.compile(GRAMMAR, SUM)
    for tokens in (ones, ones[:2], [], other, ones, other[:3], [*other, target.end], other):
        fresh = target.compile(GRAMMAR, SUM)
        np.testing.assert_array_equal(state.masks(tokens, ones), fresh.masks(tokens, ones))


def test_generated_tokens_that_break_it_are_refused(tiny_target: Target) -> None:
    """A continuation that was not made under the constraint must not be masked as if it was."""
    state = tiny_target.compile(REGEX, "ab+")
    a, b = tiny_target.encode("ab")
    for bad in ([a, a], [a, tiny_target.end], [a, b, tiny_target.end, b], [a, 300]):
        with pytest.raises(InvalidRequestError, match=r"sampling\.constraint: generated token "):
            state.masks(bad)
        assert tiny_target.allowed(state.masks([a])) == [{b}]


def test_specials_and_padding_are_never_allowed(target: Target) -> None:
    """A grammar of any text must still give text, in the target's own vocabulary."""
    allowed = target.allowed(target.compile(REGEX, r"(?s:.)*").masks([]))[0]
    assert target.end in allowed
    assert allowed - {target.end} <= target.tokenizer.text_ids


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        (JSON, '{"type": ', "bad json schema: Expecting value"),
        (JSON, "[1]", "an object or true"),
        (JSON, '{"type": "text"}', "Invalid type: text"),
        (JSON, '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        (JSON, '{"x-guidance": {"lenient": true}, "if": {}}', 'Unimplemented keys: ["if"]'),
        (JSON, '{"$ref": "#"}', "no text fits it"),
        (JSON, '{"enum": []}', "Unsatisfiable schema"),
        (JSON, '{"items":' * 5000, "longer than 32768 characters"),
        (JSON, "[" * 20_000, "recursion"),
        (REGEX, "(a", "unclosed group"),
        (REGEX, "(?=a)b", "look-around"),
        (REGEX, r"[^\x00-\x{10FFFF}]", "bad regex: no text fits it"),
        (GRAMMAR, "start: x", 'unknown name: "x"'),
        (GRAMMAR, "root ::= (", "Expected ')'"),
        (GRAMMAR, "start: start", "bad grammar: no text fits it"),
    ],
)
def test_bad_sources_are_one_clear_error(
    tiny_target: Target, kind: ConstraintKind, source: str, message: str
) -> None:
    """The caller must learn what is wrong, in a line; nothing may be accepted and ignored."""
    with pytest.raises(InvalidRequestError) as caught:
        tiny_target.compile(kind, source)
    assert caught.value.field == "sampling.constraint"
    assert message in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_deep_sources_do_not_end_the_process(tiny_target: Target) -> None:
    """The library recurses through rules: on an ordinary stack these are a segmentation fault."""
    rules = "".join(f"r{index}:r{index + 1}\n" for index in range(2700))
    state = tiny_target.compile(GRAMMAR, f'start: r0\n{rules}r2700: "a"')
    assert tiny_target.allowed(state.masks([])) == [set(tiny_target.encode("a"))]
    deep: Any = {"type": "null"}
    for _ in range(40):
        deep = {"type": "array", "items": deep, "minItems": 1}
    tiny_target.compile(JSON, json.dumps(deep))


def test_a_dead_end_in_a_grammar_is_an_error(tiny_target: Target) -> None:
    """Where a grammar allows nothing, not even the end, the row must fail and not draw from NaN."""
    state = tiny_target.compile(GRAMMAR, 'start: "a" B\nB: /b/ & /c/')
    (a,) = tiny_target.encode("a")
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match=r"sampling\.constraint: no text fits it"):
            state.masks([a])


def test_white_space_between_json_tokens_is_bounded(tiny_target: Target) -> None:
    """A model that repeats itself would emit white space until max_new_tokens."""
    state = tiny_target.compile(JSON, '{"type": "array", "items": true}')
    (space,) = tiny_target.encode(" ")
    assert len(state.masks(tiny_target.encode("["), [space] * 40)) == 33
    state = tiny_target.compile(JSON, '{"type":"array","x-guidance":{"whitespace_flexible":false}}')
    assert len(state.masks(tiny_target.encode("["), [space])) == 1


def test_constraints_are_compiled_once_and_kept_within_a_bound(
    tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiling each time would stall the verifier; keeping all would fill its memory."""
    compiler = ConstraintCompiler(tiny_target.text, [EOS], max_compiled=2)
    built: list[Constraint] = []
    build = constraints._build

    def count(tokenizer: Any, constraint: Constraint) -> Any:
        built.append(constraint)
        return build(tokenizer, constraint)

    monkeypatch.setattr("core.constraints._build", count)
    a, b, c = (Constraint(REGEX, source) for source in "abc")
    first, second = compiler.compile(a), compiler.compile(a)
    assert built == [a]
    first.masks(tiny_target.encode("a"))  # states of one constraint do not share where they are
    assert tiny_target.allowed(second.masks([])) == [set(tiny_target.encode("a"))]
    for constraint in (b, a, c, a, b):
        compiler.compile(constraint)
    assert built == [a, b, c, b]


def test_apply_masks_touches_only_its_rows(tiny_target: Target) -> None:
    """Rows of other sequences share the logits, and go through unchanged."""
    logits = torch.randn(7, tiny_target.vocab_size)
    before = logits.clone()
    a, b = tiny_target.encode("ab")
    mask = tiny_target.compile(REGEX, "ab").masks([], [a])
    apply_masks(logits, [(4, mask), (1, mask[:1])])
    for row, token in [(4, a), (5, b), (1, a)]:
        assert logits[row].isfinite().nonzero().flatten().tolist() == [token]
        assert logits[row, token] == before[row, token]
    for row in (0, 2, 3, 6):
        assert torch.equal(logits[row], before[row])
    apply_masks(logits, [])
    narrow = torch.zeros(2, 200)  # a head that is smaller than its tokenizer
    apply_masks(narrow, [(0, mask)])
    assert narrow.shape == (2, 200)


@pytest.mark.parametrize(
    ("text", "ends", "message"),
    [
        ("", [1], "the target has no tokenizer"),
        ("{}", [], "the target has no end token"),
        (WORDS, [0], "the target's tokenizer: "),
    ],
)
def test_targets_that_cannot_be_constrained_say_so(
    text: str, ends: Sequence[int], message: str
) -> None:
    """Such a verifier must start and serve, and refuse constraints by name."""
    compiler = ConstraintCompiler(text, ends)
    with pytest.raises(InvalidRequestError, match=rf"^sampling\.constraint: .*{message}"):
        compiler.compile(Constraint(REGEX, "a"))
