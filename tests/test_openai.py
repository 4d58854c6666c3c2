"""OpenAI's own client against the HTTP edge: existing programs need a new base URL, nothing else.

A real tiny target with real drafters, gRPC beside HTTP. The server is started once.
"""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from protos import generation_pb2 as pb
from tests.openai_stack import MODEL, Edges, edges, refused
from tests.tiny_models import EOS, TinyFactory

pytestmark = pytest.mark.asyncio(loop_scope="module")
SAMPLED = {"temperature": 0.9, "seed": 7}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def served(tiny: TinyFactory) -> AsyncIterator[Edges]:
    """Both edges over one tiny target that does not end by itself."""
    async with edges(tiny("llama", eos_token_id=EOS)) as running:
        yield running


async def over_grpc(served: Edges, **fields: Any) -> tuple[str, pb.Finished]:
    """The text of a request to our own API, and its end."""
    text, finished = "", pb.Finished()
    async for response in served.grpc.Generate(pb.GenerateRequest(**fields)):
        text += response.text
        finished = response.finished
    return text, finished


# ---------------------------------------------------------------- the same text


@pytest.mark.parametrize("sampling", [{"temperature": 0}, SAMPLED], ids=["greedy", "sampled"])
async def test_chat_is_what_grpc_says(served: Edges, sampling: dict[str, Any]):
    """Two edges that do not agree: somewhere a parameter is lost or a default differs."""
    turns = [pb.ChatMessage(role="system", content="be"), pb.ChatMessage(role="user", content="hi")]
    text, finished = await over_grpc(
        served, chat=pb.Chat(messages=turns), sampling=sampling, stopping={"max_new_tokens": 24}
    )
    parts: Any = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    got = await served.openai.chat.completions.create(
        model=MODEL,
        messages=[{"role": "developer", "content": "be"}, {"role": "user", "content": parts}],
        max_completion_tokens=24,
        **sampling,
    )
    (choice,) = got.choices
    assert (choice.message.role, choice.message.content) == ("assistant", text)
    assert choice.finish_reason == {1: "stop", 2: "stop", 3: "length"}[finished.reason]
    usage = finished.usage
    assert got.usage.prompt_tokens == usage.prompt_tokens
    assert got.usage.completion_tokens == usage.completion_tokens
    assert got.usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert (got.object, got.model) == ("chat.completion", MODEL)
    assert got.id.startswith("chatcmpl-") and got._request_id == got.id


async def test_every_parameter_reaches_the_target(served: Edges):
    """A parameter that is taken and ignored changes nothing, and nobody notices."""
    plain = await served.complete(**SAMPLED)
    changes: dict[str, tuple[Any, dict[str, Any]]] = {
        "top_p": (0.1, {"sampling": {"top_p": 0.1}}),
        "presence_penalty": (2.0, {"sampling": {"presence_penalty": 2.0}}),
        "frequency_penalty": (2.0, {"sampling": {"frequency_penalty": 2.0}}),
        "logit_bias": ({"65": 100}, {"sampling": {"logit_bias": {65: 100.0}}}),
        "seed": (-1, {"sampling": {"seed": 2**64 - 1}}),
        "top_k": (2, {"sampling": {"top_k": 2}}),
        "min_p": (0.3, {"sampling": {"min_p": 0.3}}),
        "repetition_penalty": (2.0, {"sampling": {"repetition_penalty": 2.0}}),
        "stop_token_ids": ([101], {"stopping": {"stop_token_ids": [101]}}),
    }
    own = {"top_k", "min_p", "repetition_penalty", "stop_token_ids"}
    num_changed = 0
    for name, (value, fields) in changes.items():
        options = {name: value} if name not in own else {"extra_body": {name: value}}
        got = await served.complete(**{**SAMPLED, **options})
        sampling = {**SAMPLED, **fields.get("sampling", {})}
        stopping = {"max_new_tokens": 24, **fields.get("stopping", {})}
        text, _ = await over_grpc(served, prompt="hello", sampling=sampling, stopping=stopping)
        assert got.choices[0].text == text, name
        num_changed += text != plain.choices[0].text
    assert num_changed >= len(changes) - 1, "the parameters are too weak to show"


async def test_streaming_says_the_same(served: Edges):
    """A stream that drops or doubles a part; a choice without its role or its end."""
    options = {"n": 2, "logprobs": True, "top_logprobs": 2, **SAMPLED}
    whole = await served.chat(**options)
    texts, entries, reasons = {0: "", 1: ""}, {0: [], 1: []}, {}
    roles: list[int] = []
    usage = None
    stream = await served.chat(stream=True, stream_options={"include_usage": True}, **options)
    async for chunk in stream:
        assert chunk.object == "chat.completion.chunk"
        usage = chunk.usage
        for choice in chunk.choices:
            if choice.delta.role:
                roles.append(choice.index)
                assert not texts[choice.index]
            texts[choice.index] += choice.delta.content or ""
            entries[choice.index] += choice.logprobs.content if choice.logprobs else []
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert sorted(roles) == [0, 1]
    assert usage.total_tokens == whole.usage.total_tokens > 48
    for choice in whole.choices:
        assert texts[choice.index] == choice.message.content
        pairs = list(zip(entries[choice.index], choice.logprobs.content, strict=True))
        assert len(pairs) == 24
        for streamed, other in pairs:  # the last bits depend on what else is computed
            assert (streamed.token, streamed.bytes) == (other.token, other.bytes)
            assert streamed.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert len(streamed.top_logprobs) == 2
        assert reasons[choice.index] == choice.finish_reason


async def test_stream_comes_in_parts(served: Edges):
    """Sent at the end all at once, a stream is of no use; usage is for those who ask."""
    stream = await served.complete(stream=True, temperature=0)
    chunks = [chunk async for chunk in stream]
    assert len([chunk for chunk in chunks if chunk.choices[0].text]) > 2
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in chunks)
    whole = await served.complete(temperature=0)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"


async def test_samples_have_seeds_of_their_own(served: Edges):
    """Choices that are copies of each other, or that come in the wrong order."""
    both = await served.complete(n=2, **SAMPLED)
    assert [choice.index for choice in both.choices] == [0, 1]
    for choice in both.choices:
        alone = await served.complete(**{**SAMPLED, "seed": 7 + choice.index})
        assert alone.choices[0].text == choice.text
    assert both.choices[0].text != both.choices[1].text
    assert both.usage.prompt_tokens == 5 and both.usage.completion_tokens == 48


async def test_many_prompts(served: Edges):
    """Text and ids, as evaluation programs send them: each choice belongs to its prompt."""
    prompts = ["hello", "other"]
    got = await served.complete(prompts, n=2, **SAMPLED)
    assert [choice.index for choice in got.choices] == [0, 1, 2, 3]
    for index, prompt in enumerate(prompts):
        alone = await served.complete(prompt, n=2, **SAMPLED)
        for sample in (0, 1):
            assert got.choices[2 * index + sample].text == alone.choices[sample].text
    assert got.usage.prompt_tokens == 10
    ids = served.stack.tokenizer.encode("hello")
    for prompt in (ids, [ids]):
        alone = await served.complete(prompt, **SAMPLED)
        assert alone.choices[0].text == got.choices[0].text


async def test_stop(served: Edges):
    """The stop string in the text, a wrong reason, or a list where there was a string."""
    text = (await served.complete(temperature=0)).choices[0].text
    stop = text[8:10]
    expected = text[: text.index(stop)]
    for given in (stop, [stop], ["\0", stop]):
        (choice,) = (await served.complete(temperature=0, stop=given)).choices
        assert (choice.text, choice.finish_reason) == (expected, "stop")


async def test_completions_default_to_sixteen_tokens(served: Edges):
    """Programs that rely on OpenAI's default would fill the context."""
    got = await served.openai.completions.create(model=MODEL, prompt="hello", temperature=0)
    assert got.usage.completion_tokens == 16


# ---------------------------------------------------------------- log-probabilities


async def test_chat_logprobs(served: Edges):
    """Entries of other tokens than those of the text, or without their alternatives."""
    got = await served.chat(temperature=0, logprobs=True, top_logprobs=3)
    (choice,) = got.choices
    entries = choice.logprobs.content
    assert bytes(b for entry in entries for b in entry.bytes).decode(errors="replace") == (
        choice.message.content
    )
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        best = entry.top_logprobs[0]  # greedy: the chosen token is the likeliest
        assert (best.token, best.logprob, best.bytes) == (entry.token, entry.logprob, entry.bytes)
        assert 0 > best.logprob >= entry.top_logprobs[1].logprob
    without = await served.chat(temperature=0, logprobs=True)
    again = [entry.logprob for entry in without.choices[0].logprobs.content]
    assert again == pytest.approx([entry.logprob for entry in entries], abs=1e-4)
    assert not without.choices[0].logprobs.content[0].top_logprobs
    assert (await served.chat(temperature=0)).choices[0].logprobs is None


async def test_completion_logprobs(served: Edges):
    """The older form: four lists of one length, offsets where the tokens begin."""
    got = await served.complete(logprobs=2, **SAMPLED)
    (choice,) = got.choices
    logprobs = choice.logprobs
    assert len(logprobs.tokens) == got.usage.completion_tokens == 24
    for token, logprob, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert top[token] == logprob and 2 <= len(top) <= 3
    offsets = logprobs.text_offset
    assert offsets[0] == 0 and offsets == sorted(offsets)
    for token, begin in zip(logprobs.tokens, offsets, strict=True):
        if not token.startswith("bytes:"):
            assert choice.text.startswith(token, begin)


async def test_the_end_token_is_no_part_of_the_text(served: Edges):
    """Its entry would be one more than the text has tokens."""
    bias = {str(EOS): 100}
    got = await served.chat(logprobs=True, temperature=0, logit_bias=bias)
    assert got.choices[0].finish_reason == "stop"
    assert got.choices[0].logprobs.content == [] and got.choices[0].message.content == ""
    assert got.usage.completion_tokens == 1


# ---------------------------------------------------------------- structured output, speculation


async def test_response_format(served: Edges):
    """A schema that is not followed to the letter."""
    schema = {"type": "object", "properties": {"a": {"enum": [1, None]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    got = await served.chat(temperature=0, response_format=form, max_tokens=100)
    assert json.loads(got.choices[0].message.content)["a"] in (1, None)
    got = await served.chat(
        temperature=0,
        response_format={"type": "json_object"},
        max_tokens=40,
        logit_bias={"92": 100, "90": 50},
    )
    assert got.choices[0].message.content.startswith("{")
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
    error = await refused(served.chat(response_format=bad))
    assert error.param == "response_format"


@pytest.mark.parametrize("stream", [False, True])
async def test_forerun_field(served: Edges, stream: bool):
    """Who drafts can be chosen and is reported; nothing of it shows unless it was asked for."""
    runs = {}
    for drafter in ("copy", "twin", ""):
        options = {"drafter": drafter, "max_draft_tokens": 3, "enabled": bool(drafter)}
        got = await served.chat(
            temperature=0, stream=stream, extra_body={"forerun": options if drafter else {}}
        )
        last = [chunk async for chunk in got][-1] if stream else got
        runs[drafter] = last.choices[0].forerun
    assert runs["copy"]["speculation"]["drafter"] == "copy"
    assert runs["copy"]["speculation"]["draft_acceptance_rate"] == 1
    assert runs["twin"]["speculation"]["drafter"] == "twin"
    assert runs[""]["seed"] >= 0 and runs[""]["total_ms"] > 0
    off = await served.chat(temperature=0, extra_body={"forerun": {"enabled": False}})
    assert off.choices[0].forerun["speculation"]["num_draft_tokens"] == 0
    plain = await served.chat(temperature=0)
    assert "forerun" not in plain.choices[0].model_extra
    rule = {"forerun": {"rule": "rejection", "drafter": "copy"}}
    assert (await served.chat(extra_body=rule, **SAMPLED)).choices[0].message.content
