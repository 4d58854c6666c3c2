"""Several samples of one request: each what it would be alone, over the real wire and services."""

import asyncio
import functools
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from core.config import OrchestratorConfig
from core.errors import OverloadedError
from core.rpc import create_channel
from core.tokenizer import Tokenizer
from orchestrator.requests import Block, Finished, FinishReason, SpeculationStats
from orchestrator.samples import merge
from orchestrator.server import serve_orchestrator
from protos import generation_pb2 as pb
from protos.generation_pb2_grpc import GenerationServiceStub
from tests.echo_engine import EchoEngine
from tests.harness import pool, serving
from tests.tiny_models import TinyFactory, save_tokenizer

END = Finished(FinishReason.LENGTH, 1, 4, 0, SpeculationStats(), 0.0, 0.0)
OUTPUT = {"return_token_ids": True, "logprobs": 2, "prompt_logprobs": True}


@pytest.fixture
def engine() -> EchoEngine:
    """A double that answers each seed differently."""
    engine = EchoEngine()
    engine.is_seeded = True
    return engine


@pytest.fixture
async def stub(engine: EchoEngine, tmp_path: Path) -> AsyncIterator[Any]:
    """The public client of a server over the double."""
    save_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(str(tmp_path))
    server = await serve_orchestrator(engine, tokenizer, OrchestratorConfig(port=0))
    async with create_channel(server.address) as channel:
        yield GenerationServiceStub(channel)
    await server.stop()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def real_stub(tiny: TinyFactory) -> AsyncIterator[Any]:
    """The public client of a real stack: a tiny target and itself as its drafter."""
    target = tiny("llama", eos_token_id=300)
    async with serving(target, [pool("copy", "draft_model", target)]) as stack:
        server = await serve_orchestrator(stack.engine, stack.tokenizer, OrchestratorConfig(port=0))
        async with create_channel(server.address) as channel:
            yield GenerationServiceStub(channel)
        await server.stop()


def ask(seed: int, n: int, prompt: str = "hello world", **fields: Any) -> pb.GenerateRequest:
    """A request for sampled text."""
    sampling = {"seed": seed, "temperature": 0.9}
    return pb.GenerateRequest(request_id="r", prompt=prompt, sampling=sampling, n=n, **fields)


async def collect(call: Any) -> dict[int, list[pb.GenerateResponse]]:
    """The responses of each sample, in their order."""
    samples: dict[int, list[pb.GenerateResponse]] = {}
    async for response in call:
        samples.setdefault(response.sample, []).append(response)
    return samples


def merged(responses: list[pb.GenerateResponse]) -> pb.GenerateResponse:
    """One sample without what depends on timing: cuts into blocks, origins, statistics, cache."""
    whole = pb.GenerateResponse()
    for response in responses:
        whole.MergeFrom(response)  # joins what is repeated
    whole.text = "".join(response.text for response in responses)
    for message, name in (
        (whole, "sample"),
        (whole, "origins"),
        (whole.finished, "time_to_first_token_ms"),
        (whole.finished, "total_ms"),
        (whole.finished, "speculation"),
    ):
        message.ClearField(name)
    whole.finished.usage.ClearField("cached_prompt_tokens")
    return whole


async def test_each_sample_is_the_request_with_its_seed(stub, engine):
    """Seeds go up from the request's, and around at 2^64; ids and ends are of the own sample."""
    seed = 2**64 - 2
    samples = await collect(stub.Generate(ask(seed, 3, output=OUTPUT)))
    assert sorted(samples) == [0, 1, 2]
    assert [samples[i][-1].finished.seed for i in range(3)] == [seed, seed + 1, 0]
    assert len({"".join(r.text for r in samples[i]) for i in range(3)}) == 3
    assert len({request.request_id for request in engine.requests}) == 3
    for i, responses in samples.items():
        assert {response.request_id for response in responses} == {"r"}
        assert [r.HasField("finished") for r in responses] == [False] * 3 + [True]
        alone = await collect(stub.Generate(ask((seed + i) % 2**64, 1, output=OUTPUT)))
        assert merged(responses) == merged(alone[0])


async def test_the_prompt_is_read_once(stub, engine):
    """A prompt that every sample reads for itself costs n times as much."""
    await collect(stub.Generate(ask(5, 4, output=OUTPUT)))
    assert [r.output.prompt_logprobs for r in engine.requests] == [True, False, False, False]


async def test_the_others_start_behind_the_first_block():
    """Started together, none finds the prompt in the cache; one after the other, they take n
    times as long."""
    log: list[str] = []
    gate = asyncio.Event()

    async def sample(name: str) -> AsyncGenerator[Block, None]:
        log.append(name)
        if name == "a":
            yield Block((1,), 0, name)
            await gate.wait()  # the others have to run meanwhile
        for _ in range(2):
            yield Block((1,), 0, name)
        gate.set()
        yield Block((1,), 0, name, END)

    starts = [functools.partial(sample, name) for name in "abc"]
    async for index, block in merge(starts):
        log.append(f"{block.text}{index}")
    assert log[:2] == ["a", "a0"]
    assert sorted(log) == ["a", *["a0"] * 4, "b", *["b1"] * 3, "c", *["c2"] * 3]


async def test_cancelling_ends_all_samples(stub, engine):
    """Those that nobody awaits would keep their slots."""
    engine.hold = asyncio.Event()
    call = stub.Generate(ask(5, 3))
    assert {(await call.read()).sample for _ in range(3)} == {0, 1, 2}
    assert engine.num_running == 3
    call.cancel()
    await asyncio.wait_for(engine.closed.wait(), 30)


async def test_an_error_in_one_sample_ends_the_call(stub, engine):
    """A client would wait for ever for the sample that failed."""
    engine.hold = asyncio.Event()
    engine.error, engine.error_seed = OverloadedError("the queue is full"), 7
    call = stub.Generate(ask(5, 3))
    with pytest.raises(grpc.aio.AioRpcError, match="the queue is full") as caught:
        await collect(call)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await asyncio.wait_for(engine.closed.wait(), 30)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("rule", ["RULE_COUPLED", "RULE_REJECTION"])
async def test_samples_of_a_real_target(real_stub, rule):
    """The same texts and log-probabilities as alone; the prompt copied, not computed again."""
    fields = {"stopping": {"max_new_tokens": 12}, "output": OUTPUT, "speculation": {"rule": rule}}
    prompt = "a prompt that is long enough to be looked for in the cache"
    samples = await collect(real_stub.Generate(ask(8, 3, prompt, **fields)))
    assert len(samples) == 3
    for i, responses in samples.items():
        usage = responses[-1].finished.usage
        assert sum(len(r.token_ids) for r in responses) == usage.completion_tokens == 12
        assert i == 0 or usage.cached_prompt_tokens > usage.prompt_tokens / 2
        if rule == "RULE_COUPLED":
            alone = await collect(real_stub.Generate(ask(8 + i, 1, prompt, **fields)))
            ours, theirs = merged(responses), merged(alone[0])
            for name in ("logprobs", "prompt_logprobs"):  # rounded as the batch has it
                close = [pytest.approx(entry.logprob, abs=1e-4) for entry in getattr(theirs, name)]
                assert [entry.logprob for entry in getattr(ours, name)] == close
                ours.ClearField(name)
                theirs.ClearField(name)
            assert ours == theirs
