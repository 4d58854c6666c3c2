"""What shapes the distribution: each wrong value is named with its range, each right one lands."""

from dataclasses import replace
from pathlib import Path

import pytest

from core.errors import InvalidRequestError
from core.params import Constraint, ConstraintKind, Rule, SamplingParams
from core.tokenizer import Tokenizer
from core.types import VerifierInfo
from orchestrator.requests import GenerationRequest
from orchestrator.validation import build_request
from protos import common_pb2
from protos import generation_pb2 as pb
from tests.test_validation import INFO, POOLS, parse
from tests.tiny_models import EOS, save_tokenizer

ENSEMBLE = "rule: RULE_ENSEMBLE ensemble_weight: 0.7"
SMALL = 'drafter: "small"'
REGEX = 'constraint { kind: CONSTRAINT_KIND_REGEX source: "a+" }'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The tiny checkpoints' tokenizer: one token per byte."""
    path: Path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(path)
    return Tokenizer.load(str(path))


def build(
    tokenizer: Tokenizer,
    message: str | pb.GenerateRequest,
    info: VerifierInfo = INFO,
    pools: dict[str, str] = POOLS,
) -> GenerationRequest:
    """Build a request that has the prompt "hi"."""
    message = parse(message) if isinstance(message, str) else message
    message.prompt = "hi"
    return build_request(message, info, tokenizer, pools)


def sampling(name: str, *values: float | str) -> list[tuple[str, str, str]]:
    """Refused values of one field of the sampling options, all with the same range."""
    *wrong, allowed = values
    return [
        (f"sampling {{ {name}: {value} }}", f"sampling.{name}", f"must be {allowed}, not")
        for value in wrong
    ]


REFUSED = [
    *sampling("min_p", -0.1, 1.1, "nan", "between 0 and 1"),
    *sampling("typical_p", 0, 1.1, "nan", "above 0 and at most 1"),
    *sampling("repetition_penalty", 0, -1, 10.1, "nan", "between 0.01 and 10"),
    *sampling("presence_penalty", -2.1, 2.1, "nan", "between -2 and 2"),
    *sampling("frequency_penalty", -2.1, 2.1, "inf", "between -2 and 2"),
    *sampling("no_repeat_ngram_size", -1, "0 .none. or more"),
    ("sampling { logit_bias { key: 260 value: 1 } }", "sampling.logit_bias", "below 260"),
    (
        "sampling { logit_bias { key: 7 value: 100.5 } }",
        "sampling.logit_bias[7]",
        "between -100 and 100, not 100.5",
    ),
    ("sampling { logit_bias { key: 7 value: nan } }", "sampling.logit_bias[7]", "not nan"),
    ("sampling { bad_words_ids {} }", "sampling.bad_words_ids[0]", "1 to 64 ids, not 0"),
    (
        f"sampling {{ bad_words_ids {{ ids: {[1] * 65} }} }}",
        "sampling.bad_words_ids[0]",
        "not 65",
    ),
    (
        "sampling { bad_words_ids { ids: 1 } bad_words_ids { ids: [1, 260] } }",
        "sampling.bad_words_ids[1]",
        "below 260",
    ),
    (
        "sampling {" + "bad_words_ids { ids: 1 }" * 1025 + "}",
        "sampling.bad_words_ids",
        "at most 1024 lists, not 1025",
    ),
    ("stopping { min_new_tokens: -1 }", "stopping.min_new_tokens", "between 0 .* 30, not -1"),
    (
        "stopping { min_new_tokens: 9 max_new_tokens: 8 }",
        "stopping.min_new_tokens",
        "max_new_tokens, 8, not 9",
    ),
    *[
        (
            f"sampling {{ temperature: 0 }} speculation {{ rule: RULE_{rule} }}",
            "speculation.rule",
            f"{rule} needs temperature above 0, not 0",
        )
        for rule in ("REJECTION", "TOKEN_REJECTION")
    ],
    *[
        (
            f"speculation {{ rule: RULE_ENSEMBLE {SMALL} ensemble_weight: {weight} }}",
            "speculation.ensemble_weight",
            "above 0 and below 1, not",
        )
        for weight in (0, 1, -0.5, "nan")
    ],
    (
        f"speculation {{ rule: RULE_ENSEMBLE {SMALL} }}",
        "speculation.ensemble_weight",
        "must be set with the rule ENSEMBLE",
    ),
    (
        "speculation { ensemble_weight: 0.5 }",
        "speculation.ensemble_weight",
        "needs the rule ENSEMBLE, not COUPLED",
    ),
    (
        f"speculation {{ {ENSEMBLE} {SMALL} enabled: false }}",
        "speculation.enabled",
        "ENSEMBLE needs drafts",
    ),
    (
        f'speculation {{ {ENSEMBLE} drafter: "ngram" }}',
        "speculation.drafter",
        "pool 'ngram' of kind 'ngram' has none; pools that have them: small",
    ),
    (f"speculation {{ {ENSEMBLE} }}", "speculation.drafter", "pool 'ngram' of kind 'ngram'"),
    ('constraint { source: "a" }', "constraint.kind", "CONSTRAINT_KIND_JSON_SCHEMA, .*_GRAMMAR$"),
    ("constraint { kind: CONSTRAINT_KIND_REGEX }", "constraint.source", "1 to 32768 bytes, not 0"),
    (
        f'constraint {{ kind: CONSTRAINT_KIND_REGEX source: "{"é" * 32769}" }}',
        "constraint.source",
        "not 65538",
    ),
    *[
        (f"{REGEX} {options} {{ {name}{value} }}", f"{options}.{name}", "not together with a const")
        for options, name, value in (
            ("sampling", "bad_words_ids", " { ids: 1 }"),
            ("sampling", "no_repeat_ngram_size", ": 2"),
            ("stopping", "min_new_tokens", ": 1"),
            ("stopping", "ignore_eos", ": true"),
        )
    ],
    ("n: 0", "n", "between 1 and 16, not 0"),
    ("n: 17", "n", "between 1 and 16, not 17"),
    ("output { logprobs: 21 }", "output.logprobs", "between 0 and 20, not 21"),
]


@pytest.mark.parametrize(("text", "field", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_refused(tokenizer: Tokenizer, text: str, field: str, message: str):
    """A wrong value or combination would be ignored, or reach a batch shared with others."""
    with pytest.raises(InvalidRequestError, match=message) as caught:
        build(tokenizer, text)
    assert caught.value.field == field


def test_unknown_kind_of_constraint(tokenizer: Tokenizer):
    """A kind from a newer client is refused by name, not an internal error."""
    message = pb.GenerateRequest(constraint=common_pb2.Constraint(source="x"))
    message.constraint.kind = 99  # type: ignore[assignment]
    with pytest.raises(InvalidRequestError, match=r"constraint\.kind"):
        build(tokenizer, message)


def test_too_many_biases(tokenizer: Tokenizer):
    """A bias for each token of the vocabulary would be copied into every batch."""
    message = pb.GenerateRequest(sampling={"logit_bias": dict.fromkeys(range(1025), 1.0)})
    with pytest.raises(InvalidRequestError, match=r"logit_bias: at most 1024 entries, not 1025"):
        build(tokenizer, message)


def test_a_constraint_needs_an_end_token(tokenizer: Tokenizer):
    """Where the constraint allows nothing more, nothing could be drawn."""
    with pytest.raises(InvalidRequestError, match="constraint: the target has no end token"):
        build(tokenizer, REGEX, replace(INFO, eos_token_ids=()))


def test_ensemble_without_pools(tokenizer: Tokenizer):
    """Its law is made of two models."""
    with pytest.raises(InvalidRequestError, match=r"there is no pool; .* have them: none"):
        build(tokenizer, f"speculation {{ {ENSEMBLE} }}", pools={})


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_ensemble(tokenizer: Tokenizer, temperature: float):
    """Allowed greedy and sampling, with a drafter that has distributions, named or by default."""
    text = f"sampling {{ temperature: {temperature} }} speculation {{ {ENSEMBLE}"
    assert build(tokenizer, f"{text} {SMALL} }}").sampling.ensemble_weight == 0.7
    params = build(tokenizer, f"{text} }}", pools={"small": "draft_model", **POOLS}).sampling
    assert (params.rule, params.ensemble_weight) == (Rule.ENSEMBLE, 0.7)


@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.TOKEN_REJECTION])
def test_rejection_takes_any_drafter(tokenizer: Tokenizer, rule: Rule):
    """A draft from no distribution is one of all mass on its token: exact as well."""
    text = f'speculation {{ rule: RULE_{rule.name} drafter: "ngram" }}'
    assert build(tokenizer, text).sampling.rule is rule


def test_everything_set(tokenizer: Tokenizer):
    """Each parameter lands under its own name."""
    params = build(
        tokenizer,
        "sampling { temperature: 0.5 top_k: 9 top_p: 0.8 min_p: 0.1 typical_p: 0.9 seed: 3"
        " repetition_penalty: 1.25 presence_penalty: -2 frequency_penalty: 2"
        " no_repeat_ngram_size: 4 logit_bias { key: 9 value: -100 } logit_bias { key: 7 value: 1 }"
        " bad_words_ids { ids: [5, 6] } bad_words_ids { ids: 7 } }"
        "stopping { min_new_tokens: 8 max_new_tokens: 8 stop_token_ids: [9, 8] }",
    ).sampling
    assert params == SamplingParams(
        temperature=0.5,
        top_k=9,
        top_p=0.8,
        seed=3,
        rule=Rule.COUPLED,
        min_p=0.1,
        typical_p=0.9,
        repetition_penalty=1.25,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        no_repeat_ngram_size=4,
        logit_bias=((7, 1.0), (9, -100.0)),
        bad_words_ids=((5, 6), (7,)),
        min_new_tokens=8,
        end_token_ids=(8, 9, EOS),
        num_prompt_tokens=2,
    )


def test_constraint(tokenizer: Tokenizer):
    """With stop strings, and whatever else forbids no token."""
    text = REGEX + 'stopping { stop: "x" min_new_tokens: 0 } sampling { top_k: 5 min_p: 0.1 }'
    constraint = build(tokenizer, text).sampling.constraint
    assert constraint == Constraint(ConstraintKind.REGEX, "a+")


def test_unset_numbers_are_the_models_own(tokenizer: Tokenizer):
    """A model whose authors ask for a penalty would loop without it; 1 switches it off."""
    own = SamplingParams(0.7, repetition_penalty=1.05, min_p=0.02, no_repeat_ngram_size=3)
    info = replace(INFO, default_sampling=own)
    params = build(tokenizer, "", info).sampling
    assert (params.repetition_penalty, params.min_p, params.no_repeat_ngram_size) == (1.05, 0.02, 3)
    text = "sampling { repetition_penalty: 1 min_p: 0 no_repeat_ngram_size: 0 }"
    params = build(tokenizer, text, info).sampling
    assert (params.repetition_penalty, params.min_p, params.no_repeat_ngram_size) == (1, 0, 0)


def test_continued_tokens_count_as_generated(tokenizer: Tokenizer):
    """Penalties and min_new_tokens would begin again behind a lost connection."""
    text = "continue_from_token_ids: [3, 4, 5] stopping { min_new_tokens: 9 max_new_tokens: 10 }"
    request = build(tokenizer, text)
    assert (request.sampling.num_prompt_tokens, request.sampling.min_new_tokens) == (2, 9)
    assert request.stopping.max_new_tokens == 7
