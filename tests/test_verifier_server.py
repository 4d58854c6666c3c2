"""verifier_service.server over real gRPC: what streams add to the engine, and what they must not.

Each test talks to a real server with a tiny target. To look at what runs beside what, a test holds
the target's forward on an event instead of sleeping.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from prometheus_client import CollectorRegistry

from core import wire
from core.config import VerifierConfig
from core.errors import ModelError
from core.model import RaggedModel
from core.rpc import RunningServer, create_channel
from core.types import VerdictStatus, VerifyBatch, VerifyOpen, VerifyResult, VerifyRow
from protos import verifier_pb2
from protos.verifier_pb2_grpc import VerifierServiceStub
from tests.tiny_models import VOCAB_SIZE, greedy_reference
from tests.verifying import (
    COUPLED,
    GREEDY,
    NUM_NEW,
    Driver,
    drafters,
    make_prompts,
    model_config,
)
from verifier_service.server import serve_verifier

PROMPT = (10, 20, 30, 40)


@pytest.fixture(scope="module")
def target(tiny) -> Path:
    return tiny("llama", eos_token_id=VOCAB_SIZE - 1)


@pytest.fixture(scope="module")
def answer(target) -> list[int]:
    return greedy_reference(target, PROMPT, 8, eos_token_id=None)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
async def server(target, registry) -> AsyncIterator[RunningServer]:
    running = await serve_verifier(model_config(target), VerifierConfig(), registry)
    yield running
    await running.stop()


@pytest.fixture
async def stub(server) -> AsyncIterator[VerifierServiceStub]:
    async with create_channel(server.address) as channel:
        yield VerifierServiceStub(channel)


class Stream:
    """One Verify stream in dataclasses."""

    def __init__(self, stub: VerifierServiceStub) -> None:
        self.call = stub.Verify()

    async def send(self, batch: VerifyBatch) -> None:
        await self.call.write(wire.verify_batch_to_proto(batch))

    async def receive(self) -> VerifyResult:
        return wire.verify_result_from_proto(await self.call.read())

    async def verify(self, batch: VerifyBatch) -> VerifyResult:
        await self.send(batch)
        return await self.receive()


def prompt_batch(number: int = 0, sequence: int = 1) -> VerifyBatch:
    """Opens a sequence and sends its prompt."""
    rows = (VerifyRow(sequence, 0, PROMPT),)
    return VerifyBatch(number, rows, (VerifyOpen(sequence, GREEDY, 64),))


@contextmanager
def held_target(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[int], threading.Event]]:
    """Forwards wait for the event; the list holds the number of rows of those that began."""
    begun: list[int] = []
    go_on = threading.Event()
    forward = RaggedModel.forward

    def held(self, rows):
        begun.append(len(rows))
        assert go_on.wait(60)
        return forward(self, rows)

    with monkeypatch.context() as patch:
        patch.setattr(RaggedModel, "forward", held)
        try:
            yield begun, go_on
        finally:
            go_on.set()


async def until(registry: CollectorRegistry, name: str, value: float) -> None:
    """Return when a metric has the value; the test's timeout is the limit."""
    while registry.get_sample_value(name) != value:
        await asyncio.sleep(0.005)


async def test_the_handshake_says_what_is_served(stub, target):
    """The orchestrator sizes its batches and stops at end tokens by these numbers."""
    response = await stub.DescribeVerifier(verifier_pb2.DescribeVerifierRequest())
    info = wire.verifier_info_from_proto(response)
    assert (info.max_length, info.max_sequences, info.max_batch_tokens) == (128, 4, 64)
    assert (info.identity.vocab_size, info.tokenizer_size) == (VOCAB_SIZE, VOCAB_SIZE)
    assert info.eos_token_ids == (VOCAB_SIZE - 1,)
    assert len(info.identity.tokenizer_fingerprint) == 64 and info.instance_id


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED])
async def test_text_over_the_wire_is_the_targets_own(stub, target, sampling):
    """Ragged batches with prompts, drafts and rows without, in dataclasses, over the socket."""
    prompts = make_prompts()
    stream = Stream(stub)
    texts: list[list[list[int]]] = []
    for kinds in (["never right"] * 4, ["perfect", "random", "half right", "garbage"]):
        known = texts[0] if texts else prompts
        drivers = [
            Driver(i, prompt, drafters(kinds[i], prompt + known[i], i), 5 if texts else 0)
            for i, prompt in enumerate(prompts)
        ]
        opens = tuple(VerifyOpen(driver.sequence, sampling, 128) for driver in drivers)
        while active := [driver for driver in drivers if len(driver.generated) < NUM_NEW]:
            rows = tuple(driver.row() for driver in active)
            result = await stream.verify(VerifyBatch(0, rows, opens))
            opens = ()
            for driver, row, verdict in zip(active, rows, result.verdicts, strict=True):
                driver.apply(row, verdict)
        await stream.verify(VerifyBatch(0, closes=(0, 1, 2, 3)))
        texts.append([driver.generated[:NUM_NEW] for driver in drivers])
    assert texts[0] == texts[1]
    assert drivers[0].accepted[:2] == [5, 5]
    if sampling is GREEDY:
        expected = [greedy_reference(target, p, NUM_NEW, eos_token_id=None) for p in prompts]
        assert texts[0] == expected


async def test_one_batch_runs_and_one_is_queued(stub, answer, monkeypatch):
    """The target must find its next batch waiting, and results must keep the order."""
    stream = Stream(stub)
    with held_target(monkeypatch) as (begun, go_on):
        await stream.send(prompt_batch(1))
        await stream.send(VerifyBatch(2, (VerifyRow(1, 4, (answer[0],), tuple(answer[1:3])),)))
        await stream.send(VerifyBatch(3, (VerifyRow(1, 4, (answer[0],)),)))
        while not begun:
            await asyncio.sleep(0.005)
        go_on.set()
        results = [await stream.receive() for _ in range(3)]
    assert [result.batch for result in results] == [1, 2, 3]
    assert [result.verdicts[0].token_ids for result in results] == [
        (answer[0],),
        tuple(answer[1:4]),
        (answer[1],),
    ]
    assert all(result.timings.forward_ns > 0 for result in results)
    assert results[1].timings.queue_ns > 0


async def test_the_loop_answers_while_the_target_runs(stub, monkeypatch):
    """A forward in the event loop would stop health checks, keepalive and every other stream."""
    stream = Stream(stub)
    with held_target(monkeypatch) as (begun, _):
        await stream.send(prompt_batch())
        while not begun:
            await asyncio.sleep(0.005)
        await stub.DescribeVerifier(verifier_pb2.DescribeVerifierRequest())
    assert (await stream.receive()).verdicts[0].status is VerdictStatus.OK


async def test_streams_with_the_same_ids_are_isolated(stub, answer):
    """Two orchestrators number their sequences alike."""
    first, second = Stream(stub), Stream(stub)
    assert (await first.verify(prompt_batch())).verdicts[0].token_ids == (answer[0],)
    unknown = await second.verify(VerifyBatch(1, (VerifyRow(1, 4, (answer[0],)),)))
    assert unknown.verdicts[0].status is VerdictStatus.NEED_PREFIX
    await second.verify(VerifyBatch(2, (VerifyRow(1, 0, (9,)),), (VerifyOpen(1, COUPLED, 9),)))
    await second.verify(VerifyBatch(3, closes=(1,)))
    result = await first.verify(VerifyBatch(4, (VerifyRow(1, 4, (answer[0],)),)))
    assert result.verdicts[0].token_ids == (answer[1],)


@pytest.mark.parametrize("how", ["cancel", "half-close", "connection"])
async def test_a_stream_frees_its_slots_however_it_ends(server, stub, registry, how):
    """Sequences of an orchestrator that is gone would fill the verifier for ever."""
    async with create_channel(server.address) as channel:
        stream = Stream(VerifierServiceStub(channel))
        for sequence in range(4):
            await stream.verify(prompt_batch(sequence=sequence))
        full = (await Stream(stub).verify(prompt_batch())).open_failures
        assert full[0].status is VerdictStatus.NO_SLOT
        if how == "cancel":
            stream.call.cancel()
        elif how == "half-close":
            await stream.call.done_writing()
            assert await stream.call.read() is grpc.aio.EOF
    await until(registry, "forerun_verifier_open_sequences", 0)
    assert not (await Stream(stub).verify(prompt_batch())).open_failures


async def test_a_stream_cancelled_with_work_under_way_ends_behind_it(stub, registry, monkeypatch):
    """vllm#49620: what still ran for a cancelled stream must not touch what comes after it."""
    stream = Stream(stub)
    with held_target(monkeypatch) as (begun, _):
        await stream.send(prompt_batch(1, sequence=1))
        await stream.send(prompt_batch(2, sequence=2))
        while not begun:
            await asyncio.sleep(0.005)
        stream.call.cancel()
        other = Stream(stub)
        await other.send(prompt_batch(3))
    assert (await other.receive()).verdicts[0].status is VerdictStatus.OK
    await until(registry, "forerun_verifier_open_sequences", 1)


async def test_a_malformed_message_ends_its_own_stream_only(stub, answer):
    """A peer of a newer version must be told what is not understood, and bother nobody."""
    good, bad = Stream(stub), Stream(stub)
    await good.verify(prompt_batch())
    message = wire.verify_batch_to_proto(prompt_batch())
    message.opens[0].sampling.rule = 99
    await bad.call.write(message)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await bad.receive()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "opens.sampling.rule" in caught.value.details()
    result = await good.verify(VerifyBatch(4, (VerifyRow(1, 4, (answer[0],)),)))
    assert result.verdicts[0].token_ids == (answer[1],)


async def test_metrics_count_what_was_verified(stub, registry, answer):
    """Dashboards and the acceptance shown to users come from these."""
    stream = Stream(stub)
    await stream.verify(prompt_batch())
    draft = (answer[1], answer[2], (answer[3] + 1) % VOCAB_SIZE)
    await stream.verify(
        VerifyBatch(1, (VerifyRow(1, 4, (answer[0],), draft), VerifyRow(9, 0, (1,))))
    )
    await until(registry, "forerun_verifier_batches_total", 2)
    for name, labels, value in [
        ("verifier_tokens", {}, 8),
        ("verifier_rows", {"status": "ok"}, 2),
        ("verifier_rows", {"status": "need_prefix"}, 1),
        ("verifier_drafts", {}, 1),
        ("verifier_draft_tokens", {}, 3),
        ("verifier_accepted_tokens", {}, 2),
    ]:
        assert registry.get_sample_value(f"forerun_{name}_total", labels) == value, name


async def test_stop_ends_streams_and_leaves_nothing(target, registry, monkeypatch):
    """Ctrl-C while a forward runs: the stream ends, the forward finishes, the thread goes."""
    running = await serve_verifier(model_config(target), VerifierConfig(), registry)
    async with create_channel(running.address) as channel:
        stream = Stream(VerifierServiceStub(channel))
        with held_target(monkeypatch) as (begun, _):
            await stream.send(prompt_batch())
            while not begun:
                await asyncio.sleep(0.005)
            stop = asyncio.create_task(running.stop())
            with pytest.raises(grpc.aio.AioRpcError):
                await stream.receive()
        await stop
    assert registry.get_sample_value("forerun_verifier_open_sequences") == 0
    check_no_worker_lives()


def check_no_worker_lives() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("verifier"):
            thread.join(30)
            assert not thread.is_alive()


async def test_a_missing_model_is_one_clear_error(tmp_path):
    """`forerun verifier` must say what is wrong with the path, and leave no thread behind."""
    with pytest.raises(ModelError, match="no-such-model"):
        await serve_verifier(model_config(tmp_path / "no-such-model"), VerifierConfig())
    check_no_worker_lives()
