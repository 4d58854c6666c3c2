"""Structured output, end to end: real services over gRPC, random models that would write anything.

Every text that ends must be in its language, whatever drafts it was made of, and must be the text
that the target alone writes. The target's end token has a bias, so that texts end where they may.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import pytest_asyncio

from core.errors import InvalidRequestError
from core.params import Constraint, ConstraintKind, SamplingParams
from core.types import Rule
from orchestrator.requests import Finished, FinishReason, GenerationRequest
from tests.harness import Stack, pool, serving
from tests.policy import make_request
from tests.tiny_models import EOS, TinyFactory

JSON, REGEX, GRAMMAR = ConstraintKind.JSON_SCHEMA, ConstraintKind.REGEX, ConstraintKind.GRAMMAR
#: White space between tokens is allowed in one of the schemas; it only makes the others long.
COMPACT = {"x-guidance": {"whitespace_flexible": False}}
ADDRESS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
        "city": {"type": "string", "maxLength": 6},
    },
    "required": ["zip", "city"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "nested": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "address": ADDRESS,
        },
        "required": ["name", "age", "address"],
        "additionalProperties": False,
        **COMPACT,
    },
    "enum": {
        "type": "object",
        "properties": {
            "color": {"enum": ["red", "green", "grün", 7, None]},
            "sure": {"type": "boolean"},
        },
        "required": ["color"],
        "additionalProperties": False,
    },
    "array": {
        "type": "array",
        "items": {"anyOf": [{"type": "integer", "minimum": -99, "maximum": 99}, ADDRESS]},
        "minItems": 2,
        "maxItems": 3,
        **COMPACT,
    },
}
PATTERNS = {
    "date": r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9] [A-Zäöü]{2,4}",
    "code": r"(ab|[c-f]{3}){2,5}!?",
}
#: A grammar, and a pattern for the same texts.
SUM = 'start: a ("+" a){1,3}\na: n | "(" n "+" n ")"\nn: /[0-9]{1,2}/'
SUM_PATTERN = r"(\d{1,2}|\(\d{1,2}\+\d{1,2}\))(\+(\d{1,2}|\(\d{1,2}\+\d{1,2}\))){1,3}"

CONSTRAINTS = {
    **{name: Constraint(JSON, json.dumps(schema)) for name, schema in SCHEMAS.items()},
    **{name: Constraint(REGEX, pattern) for name, pattern in PATTERNS.items()},
    "sum": Constraint(GRAMMAR, SUM),
}
PROMPT = tuple(b"write something: ")
SEEDS = (None, 1, 2, 3)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def stack(tiny: TinyFactory) -> AsyncIterator[Stack]:
    target: Path = tiny("llama")
    pools = [pool("copy", "draft_model", target), pool("ngram", "ngram")]
    async with serving(target, pools, adaptive_draft_length=False) as running:
        yield running


def _request(name: str, seed: int | None, drafter: str, **options: Any) -> GenerationRequest:
    """Greedy without a seed, COUPLED with one."""
    sampled = {} if seed is None else {"temperature": 1.0, "seed": seed, "rule": Rule.COUPLED}
    sampling = SamplingParams(
        constraint=CONSTRAINTS[name],
        num_prompt_tokens=len(PROMPT),
        end_token_ids=(EOS,),
        logit_bias=((EOS, 3.0),),
        **sampled,
    )
    return make_request(
        PROMPT,
        200,
        request_id=f"{name}-{seed}-{drafter}",
        sampling=sampling,
        stop_token_ids=frozenset({EOS}),
        drafter=drafter,
        **options,
    )


def _check(name: str, text: str) -> None:
    if name in SCHEMAS:
        jsonschema.validate(json.loads(text), SCHEMAS[name])
    else:
        assert re.fullmatch(PATTERNS.get(name, SUM_PATTERN), text), text


async def _all(stack: Stack, drafter: str, **options: Any) -> list[tuple[str, Finished]]:
    """Text and end of every constraint and seed, eight sequences at once."""
    requests = [_request(n, s, drafter, **options) for n in CONSTRAINTS for s in SEEDS]
    results = await asyncio.gather(*(stack.run(request) for request in requests))
    for request, (_, text, finished) in zip(requests, results, strict=True):
        assert finished.reason is FinishReason.STOP_TOKEN, (request.request_id, text)
        _check(request.request_id.split("-")[0], text)
    return [(text, finished) for _, text, finished in results]


@pytest.mark.asyncio(loop_scope="module")
async def test_every_text_is_valid_and_the_targets_own(stack: Stack) -> None:
    """A draft token that gets past its mask, a parser that keeps a rejected draft, or a mask of
    another position: some text is invalid, or not the one the target writes alone."""
    alone = await _all(stack, "", enabled=False)
    assert len({text for text, _ in alone}) > len(CONSTRAINTS) * len(SEEDS) // 2
    for drafter in ("copy", "ngram"):
        drafted = await _all(stack, drafter)
        assert [text for text, _ in drafted] == [text for text, _ in alone]
        assert sum(finished.stats.num_draft_tokens for _, finished in drafted) > 0
        if drafter == "copy":  # knows the noise, not the constraint: often right all the same
            for _, finished in drafted:
                assert finished.stats.drafter == "copy"
            assert sum(f.stats.num_accepted_draft_tokens for _, f in drafted) > 0


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.TOKEN_REJECTION, Rule.ENSEMBLE])
async def test_rules_of_chance_write_valid_texts(stack: Stack, rule: Rule) -> None:
    """A rule that draws from what is left of p, or mixes q in, must not leave the language."""
    requests = []
    for name in CONSTRAINTS:
        request = _request(name, 5, "copy")
        sampling = replace(request.sampling, rule=rule, ensemble_weight=0.7)
        requests.append(replace(request, sampling=sampling))
    for name, (_, text, finished) in zip(
        CONSTRAINTS, await asyncio.gather(*map(stack.run, requests)), strict=True
    ):
        assert finished.reason is FinishReason.STOP_TOKEN, (name, text)
        _check(name, text)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_bad_schema_fails_its_request_alone(stack: Stack) -> None:
    """One client's mistake that ends the stream would fail everyone's requests."""
    good = [_request(name, 4, "copy") for name in CONSTRAINTS]
    bad = _request("enum", 4, "copy")
    wrong = Constraint(JSON, '{"type": "objekt"}')
    bad = replace(bad, request_id="bad", sampling=replace(bad.sampling, constraint=wrong))
    *results, error = await asyncio.gather(*map(stack.run, [*good, bad]), return_exceptions=True)
    assert isinstance(error, InvalidRequestError) and error.field == "constraint"
    assert "objekt" in str(error)
    for name, result in zip(CONSTRAINTS, results, strict=True):
        assert not isinstance(result, BaseException), result
        _check(name, result[1])
