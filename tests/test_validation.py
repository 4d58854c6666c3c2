"""Validation: each wrong field is named with what is allowed, each right one arrives resolved."""

import inspect
from pathlib import Path

import pytest
from google.protobuf import text_format

from core.errors import InvalidRequestError
from core.tokenizer import Tokenizer
from core.types import ModelIdentity, Rule, SamplingParams, VerifierInfo
from orchestrator import generation_api, messages, sampling_options, validation
from orchestrator.requests import GenerationRequest, Output, Speculation, Stopping
from orchestrator.validation import build_request, is_long
from protos import generation_pb2 as pb
from tests.tiny_models import ASSISTANT, BOS, EOS, USER, VOCAB_SIZE, save_tokenizer

INFO = VerifierInfo(
    identity=ModelIdentity("tiny", 320),
    max_length=32,
    max_sequences=4,
    max_batch_tokens=64,
    eos_token_ids=(EOS,),
    default_sampling=SamplingParams(0.7, 40, 0.9, 0, Rule.COUPLED),
    instance_id="i",
    tokenizer_size=VOCAB_SIZE,
)
POOLS = {"ngram": "ngram", "small": "draft_model"}
OPTIONS = ("Sampling", "Stopping", "Speculation", "Output")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The tiny checkpoints' tokenizer: one token per byte."""
    path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(path)
    return Tokenizer.load(str(path))


def parse(text: str) -> pb.GenerateRequest:
    """A request in protobuf's text format."""
    return text_format.Parse(text, pb.GenerateRequest())


def build(tokenizer: Tokenizer, text: str) -> GenerationRequest:
    """Build a request that has the prompt "hi" unless it says otherwise."""
    message = parse(text)
    if message.WhichOneof("input") is None:
        message.prompt = "hi"
    return build_request(message, INFO, tokenizer, POOLS)


REFUSED = [
    ('prompt: ""', "prompt", "must not be empty"),
    ("prompt_token_ids {}", "prompt_token_ids.ids", "must not be empty"),
    ("chat {}", "chat", "must not be empty"),
    ('chat { messages { content: "x" } }', "chat.messages[0].role", "must not be empty"),
    ("prompt_token_ids { ids: [1, 260] }", "prompt_token_ids.ids", "below 260.*; 260 is not"),
    (f'prompt: "{"x" * 32}"', "prompt", "has 32 tokens; at most 31 fit the context of 32"),
    (f"prompt_token_ids {{ ids: {[1] * 40} }}", "prompt_token_ids.ids", "has 40 tokens"),
    (f'request_id: "{"x" * 129}"', "request_id", "at most 128"),
    ("sampling { temperature: -1 }", "sampling.temperature", "between 0.001 and 100, not -1"),
    ("sampling { temperature: nan }", "sampling.temperature", "not nan"),
    ("sampling { temperature: inf }", "sampling.temperature", "not inf"),
    ("sampling { temperature: 1e-9 }", "sampling.temperature", "not 1e-09"),
    ("sampling { top_k: -1 }", "sampling.top_k", "0 .all. or more, not -1"),
    ("sampling { top_p: 0 }", "sampling.top_p", "above 0 and at most 1, not 0"),
    ("sampling { top_p: 1.1 }", "sampling.top_p", "not 1.1"),
    ("sampling { top_p: nan }", "sampling.top_p", "not nan"),
    ("stopping { max_new_tokens: 0 }", "stopping.max_new_tokens", "between 1 and 30, not 0"),
    ("stopping { max_new_tokens: -3 }", "stopping.max_new_tokens", "not -3"),
    (
        "stopping { max_new_tokens: 31 }",
        "stopping.max_new_tokens",
        "not 31: the context holds 32 tokens and the prompt has 2",
    ),
    ('stopping { stop: "a" stop: "" }', "stopping.stop[1]", "1 to 128 characters, not 0"),
    (f'stopping {{ stop: "{"x" * 129}" }}', "stopping.stop[0]", "not 129"),
    ("stopping {" + 'stop: "a" ' * 17 + "}", "stopping.stop", "at most 16 strings, not 17"),
    ("stopping { stop_token_ids: 999 }", "stopping.stop_token_ids", "below 260"),
    ('speculation { drafter: "big" }', "speculation.drafter", "'big'; there are: ngram, small"),
    ("speculation { max_draft_tokens: -1 }", "speculation.max_draft_tokens", "0 .* and 64, not -1"),
    ("speculation { max_draft_tokens: 65 }", "speculation.max_draft_tokens", "not 65"),
    ("speculation { rule: RULE_GREEDY }", "speculation.rule", "GREEDY needs temperature 0"),
    (
        "sampling { temperature: 0 } speculation { rule: RULE_COUPLED }",
        "speculation.rule",
        "COUPLED needs temperature above 0, not 0",
    ),
    ("continue_from_token_ids: 260", "continue_from_token_ids", "below 260"),
    (f"continue_from_token_ids: {EOS}", "continue_from_token_ids", "257 is an end token"),
    (
        "continue_from_token_ids: [5, 6] stopping { max_new_tokens: 2 }",
        "continue_from_token_ids",
        "fewer tokens than may be generated in all, 2, not 2",
    ),
]


@pytest.mark.parametrize(("text", "field", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_refused(tokenizer: Tokenizer, text: str, field: str, message: str):
    """A wrong parameter would be ignored, or reach a batch shared with others."""
    with pytest.raises(InvalidRequestError, match=message) as caught:
        build(tokenizer, text)
    assert caught.value.field == field


def test_no_input(tokenizer: Tokenizer):
    """A request without any prompt names the three forms."""
    with pytest.raises(InvalidRequestError, match="prompt, prompt_token_ids and chat"):
        build_request(pb.GenerateRequest(), INFO, tokenizer, POOLS)


def test_unknown_rule(tokenizer: Tokenizer):
    """A rule from a newer client is refused, not taken for unset."""
    message = parse('prompt: "hi"')
    message.speculation.rule = 99  # type: ignore[assignment]
    with pytest.raises(InvalidRequestError, match=r"speculation\.rule"):
        build_request(message, INFO, tokenizer, POOLS)


def test_every_field_is_read():
    """A field added to the API that neither validation nor server reads is silently ignored."""
    source = "".join(
        map(inspect.getsource, (validation, sampling_options, messages, generation_api))
    )
    for name in ("GenerateRequest", *(f"{n}Options" for n in OPTIONS)):
        for field in pb.DESCRIPTOR.message_types_by_name[name].fields:
            assert field.name in source, f"{name}.{field.name}"


def test_defaults(tokenizer: Tokenizer):
    """Unset fields take the model's own generation config, as its users expect."""
    request = build(tokenizer, "")
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.7, 40, 0.9)
    assert sampling.rule is Rule.COUPLED
    assert request.stopping.max_new_tokens == INFO.max_length - 2
    assert request.stopping.stop_token_ids == {EOS}
    assert request.speculation.enabled


def test_explicit_zero_temperature_is_greedy(tokenizer: Tokenizer):
    """Proto3 loses an explicit zero where a field is not optional: it would sample."""
    sampling = build(tokenizer, "sampling { temperature: 0 }").sampling
    assert (sampling.temperature, sampling.rule) == (0.0, Rule.GREEDY)


def test_everything_set(tokenizer: Tokenizer):
    """Each field lands where the engine reads it."""
    request = build(
        tokenizer,
        'request_id: "r" prompt_token_ids { ids: [1, 2] } n: 3 '
        "sampling { temperature: 1.5 top_k: 3 top_p: 1 seed: 18446744073709551615 }"
        'stopping { max_new_tokens: 30 stop: "a" stop_token_ids: 9 ignore_eos: true'
        " include_stop: true } output { logprobs: 20 prompt_logprobs: true }"
        'speculation { enabled: false max_draft_tokens: 64 drafter: "small" rule: RULE_COUPLED }',
    )
    assert (request.request_id, request.prompt_token_ids) == ("r", (1, 2))
    assert request.sampling == SamplingParams(
        1.5, 3, 1.0, 2**64 - 1, Rule.COUPLED, end_token_ids=(9,), num_prompt_tokens=2
    )
    assert request.stopping == Stopping(30, ("a",), frozenset({9}), True)
    assert request.speculation == Speculation(False, 64, "small")
    assert request.output == Output(20, True)


def test_made_seeds_and_ids_differ(tokenizer: Tokenizer):
    """One seed for all unseeded requests makes their texts equal."""
    first, second = build(tokenizer, ""), build(tokenizer, "")
    assert first.request_id != second.request_id
    assert first.sampling.seed != second.sampling.seed


def test_prompt_that_fills_the_context_but_one(tokenizer: Tokenizer):
    """The longest prompt that is allowed leaves exactly one token."""
    request = build(tokenizer, f'prompt: "{"x" * 31}"')
    assert request.stopping.max_new_tokens == 1


def test_chat(tokenizer: Tokenizer):
    """A conversation goes through the template and ends where the assistant begins."""
    ids = build(tokenizer, 'chat { messages { role: "user" content: "hi" } }').prompt_token_ids
    assert ids == (BOS, USER, *tokenizer.encode("hi"), ASSISTANT)


def test_chat_without_template(tmp_path: Path):
    """One clear error instead of a guess at the format."""
    save_tokenizer(tmp_path, chat_template=False)
    with pytest.raises(InvalidRequestError, match="no chat template"):
        build(Tokenizer.load(str(tmp_path)), 'chat { messages { role: "user" content: "x" } }')


def test_continuation_is_the_same_sequence(tokenizer: Tokenizer):
    """The engine must see the positions that the first call would have reached."""
    text = "prompt_token_ids { ids: [1, 2] } continue_from_token_ids: [3, 4, 5] "
    request = build(tokenizer, text + "stopping { max_new_tokens: 10 }")
    assert request.prompt_token_ids == (1, 2, 3, 4, 5)
    assert request.stopping.max_new_tokens == 7
    assert request.sampling.num_prompt_tokens == 2
    assert build(tokenizer, text).stopping.max_new_tokens == INFO.max_length - 5


def test_long_prompts_are_told_apart():
    """A long prompt tokenized on the event loop stalls every other client."""
    assert not is_long(parse('prompt: "hi"'))
    assert is_long(pb.GenerateRequest(prompt="x" * 10_000))
