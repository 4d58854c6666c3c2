"""A tiny target behind both public edges, gRPC and HTTP, over one engine; for their tests."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx2
import openai
import pytest

from core.config import HttpConfig, OrchestratorConfig
from core.rpc import create_channel
from orchestrator.cluster_api import ClusterApi
from orchestrator.generation_api import GenerationApi
from orchestrator.http_server import serve_http
from orchestrator.server import serve_orchestrator
from protos import generation_pb2_grpc
from tests.harness import Stack, pool, serving

MODEL = "tiny"


@dataclass
class Edges:
    """Clients of the two edges, and what is behind them."""

    stack: Stack
    openai: openai.AsyncOpenAI
    http: httpx2.AsyncClient
    grpc: Any
    channel: grpc.aio.Channel

    async def chat(self, content: str = "hello", **options: Any) -> Any:
        """A chat completion of one turn."""
        messages: Any = [{"role": "user", "content": content}]
        return await self.openai.chat.completions.create(
            model=MODEL, messages=messages, **{"max_tokens": 24, **options}
        )

    async def complete(self, prompt: Any = "hello", **options: Any) -> Any:
        """A text completion."""
        return await self.openai.completions.create(
            model=MODEL, prompt=prompt, **{"max_tokens": 24, **options}
        )


@contextlib.asynccontextmanager
async def edges(
    target: Path,
    scaler: Any = None,
    token: Path | None = None,
    model: dict[str, Any] | None = None,
    **http: Any,
) -> AsyncIterator[Edges]:
    """A target with two drafters that are copies of it, served over gRPC and HTTP."""
    pools = [pool(name, "draft_model", target, k=4) for name in ("copy", "twin")]
    async with serving(target, pools, model=model) as stack:
        options = OrchestratorConfig(port=0, auth_token_file=str(token or ""))
        server = await serve_orchestrator(stack.engine, stack.tokenizer, options, None, scaler)
        secret = token.read_text() if token else ""
        api = GenerationApi(stack.engine, stack.tokenizer)
        config = HttpConfig(port=0, model_name=MODEL, **http)
        gateway = await serve_http(config, api, ClusterApi(stack.engine, scaler), secret)
        base = f"http://{gateway.address}"
        client = openai.AsyncOpenAI(base_url=f"{base}/v1", api_key=secret or "-", max_retries=0)
        async with (
            client,
            httpx2.AsyncClient(base_url=base, trust_env=False) as plain,
            create_channel(server.address) as channel,
        ):
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            yield Edges(stack, client, plain, stub, channel)
        await gateway.stop()
        await server.stop()


async def refused(call: Any, kind: type[openai.APIStatusError] = openai.BadRequestError) -> Any:
    """The body of the error that a call ends with."""
    with pytest.raises(kind) as caught:
        await call
    assert set(caught.value.body) == {"message", "type", "param", "code"}
    return caught.value
