"""What OpenAI's client is refused, and what becomes of clients that leave; see test_openai.py."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from tests.openai_stack import MODEL, Edges, edges, refused
from tests.tiny_models import EOS, TinyFactory

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def served(tiny: TinyFactory) -> AsyncIterator[Edges]:
    """Both edges over one tiny target that does not end by itself."""
    async with edges(tiny("llama", eos_token_id=EOS)) as running:
        yield running


# ---------------------------------------------------------------- models, errors


async def test_models(served: Edges):
    """Programs ask which models there are before they ask for anything."""
    models = await served.openai.models.list()
    assert [model.id for model in models.data] == [MODEL]
    assert (await served.openai.models.retrieve(MODEL)).id == MODEL
    error = await refused(served.openai.models.retrieve("a/b"), openai.NotFoundError)
    assert error.code == "model_not_found" and error.param == "model"
    other = served.openai.completions.create(model="gpt-4", prompt="x")
    assert (await refused(other, openai.NotFoundError)).code == "model_not_found"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"n": 99}, "n"),
        ({"n": "2"}, "n"),
        ({"max_tokens": 9999}, "max_tokens"),
        ({"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 4}, "max_tokens"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ""}, "stop[0]"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"300": 1}}, "logit_bias"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"extra_body": {"best_off": 2}}, "best_off"),
        ({"extra_body": {"forerun": {"drafter": "nobody"}}}, "forerun.drafter"),
        ({"extra_body": {"forerun": {"rule": "greedy"}}, "temperature": 1}, "forerun.rule"),
        ({"extra_body": {"min_tokens": 99}}, "min_tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("stream", [False, True])
async def test_refusals_name_the_parameter(
    served: Edges, options: dict[str, Any], param: str, stream: bool
):
    """An ignored parameter changes the text without a word; a streamed one must fail as early."""
    error = await refused(served.chat(stream=stream, **options))
    assert error.param == param and error.type == "invalid_request_error"
    assert error.message


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": "x", "name": "bob"}, "messages[0].name"),
    ],
)
async def test_messages_that_are_refused(served: Edges, message: Any, param: str):
    """A part of a conversation that is left out without a word."""
    error = await refused(served.openai.chat.completions.create(model=MODEL, messages=[message]))
    assert error.param == param


async def test_a_reply_may_be_sent_back(served: Edges):
    """The usual loop appends the message it got: fields that are null must not be refused."""
    reply = (await served.chat(temperature=0)).choices[0].message
    turns: Any = [{"role": "user", "content": "hello"}, reply, {"role": "user", "content": "and"}]
    again = await served.openai.chat.completions.create(
        model=MODEL, messages=turns, max_tokens=4, user="u", store=False
    )
    assert again.usage.completion_tokens == 4


@pytest.mark.parametrize(
    ("body", "content_type", "status"),
    [
        (b"{", "application/json", 400),
        (b'{"model": "\\ud800"}', "application/json", 400),
        (b"{}", "text/plain", 415),
        (b" " * (8 * 1024 * 1024 + 1), "application/json", 413),
    ],
)
async def test_bodies_that_are_refused(served: Edges, body: bytes, content_type: str, status: int):
    """What is no request has OpenAI's form of an error too."""
    headers = {"content-type": content_type}
    got = await served.http.post("/v1/chat/completions", content=body, headers=headers)
    assert got.status_code == status and got.json()["error"]["message"]


async def test_unknown_paths_and_methods(served: Edges):
    """Without a page there is none, and errors have one form."""
    for path in ("/", "/forerun/status", "/v1/embeddings"):
        got = await served.http.get(path)
        assert got.status_code == 404 and got.json()["error"]["type"] == "invalid_request_error"
    assert (await served.http.get("/v1/completions")).status_code == 405


# ---------------------------------------------------------------- clients that leave


async def idle(served: Edges) -> None:
    """Wait until nothing runs."""
    while served.stack.engine.status().num_running:
        await asyncio.sleep(0)


async def test_a_client_that_leaves_a_stream_frees_its_sequences(served: Edges):
    """Slots of clients that are gone would be held to the end of their texts."""
    before = served.stack.engine.status().num_completion_tokens
    stream = await served.chat(stream=True, temperature=0, max_tokens=200, n=2)
    await anext(stream)
    assert served.stack.engine.status().num_running > 0
    await stream.close()
    await asyncio.wait_for(idle(served), 30)
    assert served.stack.engine.status().num_completion_tokens - before < 400


async def test_a_client_that_does_not_wait_frees_its_sequences(served: Edges):
    """One that waits for a whole answer and gives up, too."""
    before = served.stack.engine.status().num_completion_tokens
    waiting = asyncio.create_task(served.chat(temperature=0, max_tokens=200, n=2))
    while not served.stack.engine.status().num_running:
        await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await asyncio.wait_for(idle(served), 30)
    assert served.stack.engine.status().num_completion_tokens - before < 400
