"""The log of a running stack: every line about a request says which."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog

from core.config import OrchestratorConfig
from core.rpc import configure_logging, create_channel
from orchestrator.server import serve_orchestrator
from protos import generation_pb2
from protos.generation_pb2_grpc import GenerationServiceStub
from tests.harness import Stack, pool, serving


@contextlib.contextmanager
def logging(capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    """The log as a machine reads it: gives a call for the events since the last time.

    Not a fixture: pytest changes stderr between a fixture's start and the test.
    """
    before = structlog.get_config()
    configure_logging(json=True)

    def read() -> list[dict[str, Any]]:
        lines = capsys.readouterr().err.splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    try:
        yield read
    finally:
        structlog.configure(**before)


@contextlib.asynccontextmanager
async def served(target: Path) -> AsyncIterator[tuple[Stack, GenerationServiceStub]]:
    """A stack whose drafter holds 24 tokens at most, behind the public API."""
    short = pool("short", "draft_model", target)
    assert short.model is not None
    model = short.model.model_copy(update={"max_length": 24})
    async with serving(target, [short.model_copy(update={"model": model})]) as stack:
        config = OrchestratorConfig(port=0)
        server = await serve_orchestrator(stack.engine, stack.tokenizer, config)
        try:
            async with create_channel(server.address) as channel:
                yield stack, GenerationServiceStub(channel)
        finally:
            await server.stop()


def message(request_id: str, num_tokens: int, **fields: Any) -> generation_pb2.GenerateRequest:
    """A request of exactly so many tokens."""
    stopping = generation_pb2.StoppingOptions(max_new_tokens=num_tokens, ignore_eos=True)
    return generation_pb2.GenerateRequest(
        request_id=request_id, prompt="abc", stopping=stopping, **fields
    )


async def drain(call: Any) -> None:
    """Read a stream to its end."""
    async for _ in call:
        pass


async def provoke(target: Path, log: Any, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What is logged of requests at once, one that outgrows its drafter, a cancelled one and one
    that meets an unforeseen error."""
    async with served(target) as (stack, client):
        log()  # what is said at the start
        calls = (message("long", 60), message("short", 10), message("many", 4, n=3))
        await asyncio.gather(*(drain(client.Generate(call)) for call in calls))
        cancelled = client.Generate(message("cancelled", 200))
        await cancelled.read()
        cancelled.cancel()
        while stack.engine.status().num_running:
            await asyncio.sleep(0)

        async def broken(*arguments: Any) -> AsyncIterator[Any]:
            raise RuntimeError("unforeseen")
            yield

        monkeypatch.setattr(stack.engine, "generate", broken)
        with pytest.raises(grpc.aio.AioRpcError):
            await drain(client.Generate(message("broken", 4)))
        return log()


async def test_every_line_of_a_request_carries_its_id(
    tiny_llama: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a hundred requests at once, a line without an id belongs to none of them."""
    with logging(capsys) as log:
        events = await provoke(tiny_llama, log, monkeypatch)
    assert all(event.get("request_id") for event in events), events
    ends = {event["request_id"]: event for event in events if event["event"] == "request ended"}
    outcomes = {name: event["outcome"] for name, event in ends.items()}
    assert outcomes == {
        **dict.fromkeys(("long", "short", "many", "many#1", "many#2"), "length"),
        "cancelled": "cancelled",
        "broken": "internal_error",
    }
    assert ends["long"]["completion_tokens"] == 60
    assert ends["long"]["first_token_ms"] <= ends["long"]["total_ms"]
    assert ends["broken"]["first_token_ms"] is None
    others = {(e["event"], e["request_id"]) for e in events if e["event"] != "request ended"}
    assert {("drafting ended", "long"), ("call_failed", "broken")} <= others
    assert ("drafting ended", "short") not in others
