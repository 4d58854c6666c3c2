"""The HTTP edge when something goes wrong, over the engine double: errors, tokens, the end."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from core.config import HttpConfig
from core.errors import ConfigError, ModelError, OverloadedError
from core.tokenizer import Tokenizer
from orchestrator.cluster_api import ClusterApi
from orchestrator.generation_api import GenerationApi
from orchestrator.http_server import RunningHttpServer, serve_http
from tests.echo_engine import EchoEngine
from tests.tiny_models import save_tokenizer

Serve = Callable[..., AbstractAsyncContextManager[tuple[RunningHttpServer, openai.AsyncOpenAI]]]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The tiny checkpoints' tokenizer: one token per byte."""
    path: Path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(path)
    return Tokenizer.load(str(path))


@pytest.fixture
def engine() -> EchoEngine:
    """A fresh engine double."""
    return EchoEngine()


@pytest.fixture
def serve(engine: EchoEngine, tokenizer: Tokenizer) -> Serve:
    """Starts a server over the double; gives it and a client."""

    @asynccontextmanager
    async def start(
        token: str = "", key: str = "-", **config: Any
    ) -> AsyncIterator[tuple[RunningHttpServer, openai.AsyncOpenAI]]:
        settings = HttpConfig(**{"port": 0, **config})
        api = GenerationApi(engine, tokenizer)
        server = await serve_http(settings, api, ClusterApi(engine), token)
        base = f"http://{server.address}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key=key, max_retries=0) as client:
            yield server, client
        await server.stop()

    return start


async def complete(client: openai.AsyncOpenAI, **options: Any) -> Any:
    """A completion that echoes its prompt."""
    return await client.completions.create(model="tiny", prompt="hello", **options)


async def test_a_client_is_told_when_to_come_again(engine: EchoEngine, serve: Serve):
    """OpenAI's client waits as long as it is told, and tries again by itself."""
    engine.error = OverloadedError("no room", 2.5)
    async with serve() as (_, client):
        with pytest.raises(openai.RateLimitError) as caught:
            await complete(client)
        assert caught.value.response.headers["retry-after"] == "3"
        assert caught.value.response.headers["retry-after-ms"] == "2500"
        engine.info = None
        with pytest.raises(openai.InternalServerError) as caught_too:
            await complete(client)
        assert caught_too.value.status_code == 503


async def test_unforeseen_errors_say_nothing_but_an_id(
    engine: EchoEngine, serve: Serve, capsys: pytest.CaptureFixture[str]
):
    """Internals must not reach a client; without the id nobody finds them in the log."""
    engine.error = RuntimeError("secret")
    async with serve() as (_, client):
        with pytest.raises(openai.InternalServerError) as caught:
            await complete(client)
    assert "secret" not in caught.value.message
    error_id = caught.value.message.split("internal error ")[1].split(";")[0]
    log = "".join(capsys.readouterr())
    assert error_id in log and "secret" in log


async def test_an_error_in_a_stream_ends_it(engine: EchoEngine, serve: Serve):
    """The status is out by then: a stream that just stops would pass for a whole answer."""
    engine.error, engine.error_seed = ModelError("the target is gone"), 8
    async with serve() as (_, client):
        stream = await complete(client, stream=True, n=2, seed=7)
        with pytest.raises(openai.APIError, match="the target is gone"):
            async for _ in stream:
                pass
        assert engine.num_running == 0


async def test_token(engine: EchoEngine, serve: Serve):
    """With a token configured nobody generates without it."""
    async with serve("s3cret", key="wrong") as (_, client):
        with pytest.raises(openai.AuthenticationError) as caught:
            await complete(client)
        assert caught.value.code == "invalid_api_key"
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
        assert not engine.requests
    async with serve("s3cret", key="s3cret") as (_, client):
        assert (await complete(client)).choices[0].text == "hello"


async def test_name_of_the_model(engine: EchoEngine, serve: Serve):
    """The target's own name, or the configured one, for programs that ask for one."""
    async with serve() as (_, client):
        assert [model.id for model in (await client.models.list()).data] == ["tiny"]
    async with serve(model_name="gpt") as (_, client):
        assert (await client.completions.create(model="gpt", prompt="x")).model == "gpt"
        with pytest.raises(openai.NotFoundError):
            await complete(client)


async def test_scaling_where_drafters_were_given(serve: Serve):
    """A control that does nothing must say so."""
    async with serve(page=True) as (_, client):
        body = {"pool": "small", "replicas": 2}
        url = str(client.base_url).replace("/v1/", "/forerun/scale")
        with pytest.raises(openai.InternalServerError) as caught:
            await client.post(url, body=body, cast_to=object)
        assert caught.value.status_code == 501 and "forerun serve" in caught.value.message


async def test_stop_drains(engine: EchoEngine, serve: Serve):
    """A running answer may end; new connections are refused meanwhile."""
    engine.hold = asyncio.Event()
    async with serve() as (server, client):
        stream = await complete(client, stream=True)
        assert (await anext(stream)).choices[0].text == "hello"
        stopping = asyncio.create_task(server.stop(60))
        with pytest.raises(openai.APIConnectionError):
            while not stopping.done():
                await client.models.list()
        engine.hold.set()
        rest = [chunk async for chunk in stream]
        assert rest[-1].choices[0].finish_reason == "stop"
        await stopping


async def test_stop_ends_what_does_not(engine: EchoEngine, serve: Serve):
    """Past the time for draining the engine's iterators are closed, and the client is told."""
    engine.hold = asyncio.Event()
    async with serve() as (server, client):
        stream = await complete(client, stream=True)
        await anext(stream)
        waiting = asyncio.create_task(complete(client))
        while engine.num_running < 2:
            await asyncio.sleep(0)
        await server.stop(0)
        assert engine.num_running == 0
        with pytest.raises(openai.APIError, match="is shutting down"):
            async for _ in stream:
                pass
        with pytest.raises(openai.InternalServerError, match="is shutting down"):
            await waiting


async def test_taken_port(serve: Serve):
    """Two servers on one port would share its clients by chance."""
    async with serve() as (server, _):
        port = int(server.address.rsplit(":", 1)[1])
        with pytest.raises(ConfigError, match=f"http: cannot listen on 127.0.0.1:{port}"):
            async with serve(port=port):
                pass
