"""The public edge over a real channel: blocks out, errors as statuses, nothing left behind.

The engine is the double of tests/echo_engine.py: it answers with the request's own prompt.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from core.config import OrchestratorConfig
from core.errors import ConfigError, InvalidRequestError, OverloadedError
from core.rpc import RunningServer, bearer_metadata, create_channel
from core.tokenizer import Tokenizer
from orchestrator.server import serve_orchestrator
from protos import cluster_pb2, cluster_pb2_grpc, generation_pb2, generation_pb2_grpc
from tests.echo_engine import EchoEngine
from tests.tiny_models import EOS, save_tokenizer


@pytest.fixture
def engine() -> EchoEngine:
    """A fresh engine double."""
    return EchoEngine()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The tiny checkpoints' tokenizer: one token per byte."""
    path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(path)
    return Tokenizer.load(str(path))


@pytest.fixture
async def server(engine: EchoEngine, tokenizer: Tokenizer) -> AsyncIterator[RunningServer]:
    """The edge over the double, on a free port."""
    running = await serve_orchestrator(engine, tokenizer, OrchestratorConfig(port=0))
    yield running
    await running.stop()


@pytest.fixture
async def channel(server: RunningServer) -> AsyncIterator[grpc.aio.Channel]:
    """A real channel to it."""
    async with create_channel(server.address) as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> Any:
    """The public client."""
    return generation_pb2_grpc.GenerationServiceStub(channel)


def ask(prompt: str = "hello wörld", **fields: Any) -> generation_pb2.GenerateRequest:
    """A request for greedy text."""
    return generation_pb2.GenerateRequest(prompt=prompt, **fields)


async def collect(call: Any) -> list[generation_pb2.GenerateResponse]:
    """All responses of a call."""
    return [response async for response in call]


async def status_of(call: Any) -> tuple[grpc.StatusCode, str]:
    """How a call fails."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call)
    return caught.value.code(), caught.value.details() or ""


async def test_text_and_end(stub):
    """Text would be lost or the end's numbers land in the wrong fields."""
    responses = await collect(stub.Generate(ask(request_id="r", sampling={"seed": 7})))
    assert "".join(response.text for response in responses) == "hello wörld"
    assert {response.request_id for response in responses} == {"r"}
    assert [response.HasField("finished") for response in responses] == [False] * 3 + [True]
    finished = responses[-1].finished
    assert finished.reason == generation_pb2.FINISH_REASON_STOP_TOKEN
    assert (finished.stop_token_id, finished.stop_string, finished.seed) == (EOS, "", 7)
    usage = finished.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_prompt_tokens) == (12, 12, 2)
    assert (finished.time_to_first_token_ms, finished.total_ms) == (500, 1500)
    speculation = finished.speculation
    assert (speculation.mean_acceptance_length, speculation.draft_acceptance_rate) == (4.0, 0.75)
    assert list(speculation.acceptance_histogram) == [0, 0, 1, 0, 1]
    assert dict(speculation.plan_misses) == {"late": 2}
    assert dict(speculation.fallback_steps) == {"disabled": 1}
    assert (speculation.num_verify_steps, speculation.drafter) == (4, "ngram")
    assert speculation.num_tokens_without_distributions == 5


async def test_token_ids_only_when_asked_for(stub):
    """Ids nobody asked for double the traffic; asked for, each has its origin and text."""
    plain = await collect(stub.Generate(ask()))
    assert not any(r.token_ids or r.origins or r.token_texts for r in plain)
    full = await collect(stub.Generate(ask(output={"return_token_ids": True})))
    assert [len(response.token_ids) for response in full] == [5, 5, 2, 1]
    draft, target = 1, 2
    assert list(full[0].origins) == [draft] * 4 + [target]
    assert list(full[3].origins) == [target]
    assert "".join(text for r in full for text in r.token_texts) == "hello wörld"
    assert all(len(r.token_ids) == len(r.token_texts) for r in full)


async def test_logprobs_only_when_asked_for(stub):
    """Each token of each block, the end token too, has its own; the prompt's come first."""
    plain = await collect(stub.Generate(ask()))
    assert not any(r.logprobs or r.prompt_logprobs for r in plain)
    output = {"logprobs": 2, "prompt_logprobs": True, "return_token_ids": True}
    full = await collect(stub.Generate(ask("hello world", output=output)))
    for response in full:
        assert [entry.logprob for entry in response.logprobs] == [-t for t in response.token_ids]
        for token, entry in zip(response.token_ids, response.logprobs, strict=True):
            assert list(entry.top_token_ids) == [0, 1]
            assert list(entry.top_logprobs) == [-token - 1, -token - 2]
    ids = [token for response in full[:-1] for token in response.token_ids]
    assert [entry.logprob for entry in full[0].prompt_logprobs] == [-t for t in ids[1:]]
    assert not any(response.prompt_logprobs for response in full[1:])


async def test_a_drawn_seed_is_returned(stub, engine):
    """Without it a client can never repeat an unseeded text."""
    responses = await collect(stub.Generate(ask()))
    assert responses[-1].finished.seed == engine.requests[0].sampling.seed


async def test_continuation_brings_only_what_is_new(stub, engine, tokenizer):
    """A code point cut by the first call's end must neither be repeated nor lost."""
    ids = tokenizer.encode("wörld")
    engine.answer = tuple(ids[2:])  # the first call ended inside the ö
    request = ask("ab", continue_from_token_ids=ids[:2], output={"return_token_ids": True})
    responses = await collect(stub.Generate(request))
    assert engine.requests[0].prompt_token_ids == (*tokenizer.encode("ab"), *ids[:2])
    assert "".join(response.text for response in responses) == "örld"
    assert responses[0].token_texts[0] == "ö"


async def test_continuation_behind_a_stop_string(stub, tokenizer):
    """A text that has ended must not go on."""
    ids = tokenizer.encode("xEND")
    request = ask(continue_from_token_ids=ids, stopping={"stop": ["END"]})
    code, details = await status_of(stub.Generate(request))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "continue_from_token_ids: the text has ended: 'END'" in details


async def test_long_prompt(stub, engine):
    """Prompts tokenized in a thread arrive like the others."""
    await collect(stub.Generate(ask("x" * 10_000)))
    assert len(engine.requests[0].prompt_token_ids) == 10_000


async def test_invalid_request_names_the_field(stub, engine):
    """The status that clients and their retry policies go by."""
    code, details = await status_of(stub.Generate(ask(sampling={"temperature": -1})))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith("sampling.temperature: must be")
    assert not engine.requests


async def test_errors_of_the_engine(stub, engine):
    """A full queue, a taken id and no verifier each have their own status."""
    engine.error = OverloadedError("the queue is full", retry_after_s=2)
    call = stub.Generate(ask())
    assert (await status_of(call))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert ("retry-after-ms", "2000") in list(await call.trailing_metadata())
    engine.error = InvalidRequestError("request_id", "is running already")
    assert (await status_of(stub.Generate(ask())))[0] is grpc.StatusCode.INVALID_ARGUMENT
    engine.info = None
    assert (await status_of(stub.Generate(ask())))[0] is grpc.StatusCode.UNAVAILABLE


@pytest.mark.filterwarnings("default")
async def test_unforeseen_error_says_nothing_but_an_id(stub, engine):
    """Internals of the server must not reach a client."""
    engine.error = RuntimeError("secret")
    code, details = await status_of(stub.Generate(ask()))
    assert code is grpc.StatusCode.INTERNAL and "secret" not in details


async def test_cancel_closes_the_engine(stub, engine):
    """A client that leaves would keep its slots on every service."""
    engine.hold = asyncio.Event()
    call = stub.Generate(ask())
    assert (await call.read()).text == "hello"
    call.cancel()
    await asyncio.wait_for(engine.closed.wait(), 30)


async def test_deadline_closes_the_engine(stub, engine):
    """So would a client whose deadline passes."""
    engine.hold = asyncio.Event()
    call = stub.Generate(ask(), timeout=2)
    assert (await call.read()).text == "hello"
    assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.wait_for(engine.closed.wait(), 30)


async def test_lost_connection_closes_the_engine(server, engine):
    """And a client that dies."""
    engine.hold = asyncio.Event()
    async with create_channel(server.address) as channel:
        call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(ask())
        await call.read()
    await asyncio.wait_for(engine.closed.wait(), 30)


async def test_status(channel):
    """What `forerun status` shows."""
    stub = cluster_pb2_grpc.ClusterServiceStub(channel)
    status = await stub.GetStatus(cluster_pb2.GetStatusRequest())
    assert (status.model, status.num_waiting, status.num_running) == ("tiny", 1, 2)
    assert (status.num_finished, status.num_completion_tokens, status.uptime_s) == (3, 4, 5.5)
    replica = status.drafter_pools[0].replicas[0]
    assert replica == status.verifiers[0]
    assert replica.health == cluster_pb2.REPLICA_HEALTH_LOST
    assert (replica.message, replica.max_sequences, replica.num_losses) == ("gone", 8, 3)
    pool = status.drafter_pools[0]
    assert (pool.num_drafts, pool.num_draft_tokens, pool.num_accepted_draft_tokens) == (1, 2, 3)


async def test_health_and_reflection(server, channel):
    """Kubernetes probes and reflection clients need no generated code of ours."""
    health = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service="forerun.v1.GenerationService")
    assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.SERVING

    def describe() -> list[str]:
        with grpc.insecure_channel(server.address) as plain:
            database = ProtoReflectionDescriptorDatabase(plain)
            pool = DescriptorPool(database)
            service = pool.FindServiceByName("forerun.v1.GenerationService")
            return [method.name for method in service.methods]

    assert await asyncio.to_thread(describe) == ["Generate"]


async def test_token(engine: EchoEngine, tokenizer: Tokenizer, tmp_path: Path):
    """With a token configured, nobody generates without it."""
    file = tmp_path / "token"
    file.write_text("s3cret\n")
    config = OrchestratorConfig(port=0, auth_token_file=str(file))
    server = await serve_orchestrator(engine, tokenizer, config)
    async with create_channel(server.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        assert (await status_of(stub.Generate(ask())))[0] is grpc.StatusCode.UNAUTHENTICATED
        assert await collect(stub.Generate(ask(), metadata=bearer_metadata("s3cret")))
    await server.stop()


@pytest.mark.parametrize("content", [None, " \n"])
async def test_unusable_token_file(engine, tokenizer, tmp_path: Path, content: str | None):
    """A missing or empty file must not mean an open server."""
    file = tmp_path / "token"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match="auth token file"):
        await serve_orchestrator(engine, tokenizer, OrchestratorConfig(auth_token_file=str(file)))
