"""A verifier over several devices on the wire: what runs side by side, and in which order; and an
orchestrator before it.

The count of devices is false, and their work ends when a test says so; the rest is real.
"""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from core import wire
from core.config import VerifierConfig
from core.rpc import create_channel
from core.types import VerifyBatch, VerifyOpen, VerifyRow
from orchestrator.verifying import Verifying
from protos import verifier_pb2
from protos.verifier_pb2_grpc import VerifierServiceStub
from tests.harness import pool, serving
from tests.policy import make_request
from tests.test_verifier_server import PROMPT, Stream, until
from tests.tiny_models import VOCAB_SIZE, greedy_reference
from tests.verifying import GREEDY, model_config
from verifier_service.forwards import Forwards
from verifier_service.server import serve_verifier


class Devices:
    """Two of them: forwards that were submitted, in order, and the end of all of them."""

    def __init__(self) -> None:
        self.num_submitted = 0
        self.num_waiting = 0
        self.go_on = threading.Event()

    def end_of(self, forwards: Forwards, logits: object) -> "Devices":
        self.num_submitted += 1
        return self

    def synchronize(self) -> None:
        self.num_waiting += 1
        assert self.go_on.wait(60)


@pytest.fixture(scope="module")
def target(tiny) -> Path:
    return tiny("llama", eos_token_id=VOCAB_SIZE - 1)


@pytest.fixture
def devices(monkeypatch) -> Devices:
    devices = Devices()
    monkeypatch.setattr("core.model.count_stages", lambda passed: 2)
    monkeypatch.setattr(Forwards, "_end_of", lambda *given: devices.end_of(*given))
    return devices


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
async def stub(target, devices, registry) -> AsyncIterator[VerifierServiceStub]:
    server = await serve_verifier(model_config(target), VerifierConfig(), registry)
    async with create_channel(server.address) as channel:
        yield VerifierServiceStub(channel)
    devices.go_on.set()
    await server.stop()


def batch(number: int) -> VerifyBatch:
    """Opens a sequence of its own and sends a prompt."""
    rows = (VerifyRow(number, 0, PROMPT),)
    return VerifyBatch(number, rows, (VerifyOpen(number, GREEDY, 64),))


async def submitted(devices: Devices, number: int) -> None:
    """Return when so many forwards were submitted and are waited for; the limit is the test's."""
    while devices.num_waiting < number:
        await asyncio.sleep(0.005)
    assert devices.num_submitted == number


async def test_a_batch_per_device_runs_and_results_keep_their_order(stub, devices, target):
    """The second device stands idle while the first batch is waited for; a third batch that is
    submitted too, and would only lie in the devices' queues; verdicts of another batch."""
    info = await stub.DescribeVerifier(verifier_pb2.DescribeVerifierRequest())
    assert wire.verifier_info_from_proto(info).num_stages == 2
    expected = tuple(greedy_reference(target, PROMPT, 1, eos_token_id=None))
    one, other = Stream(stub), Stream(stub)
    for number in (1, 2, 3):
        await one.send(batch(number))
    await submitted(devices, 2)
    await other.send(batch(4))
    await stub.DescribeVerifier(verifier_pb2.DescribeVerifierRequest())
    assert devices.num_submitted == 2
    devices.go_on.set()
    results = [await one.receive() for _ in range(3)] + [await other.receive()]
    assert [result.batch for result in results] == [1, 2, 3, 4]
    assert all(result.verdicts[0].token_ids == expected for result in results)
    assert all(0 < r.timings.forward_ns < r.timings.total_ns for r in results)
    assert results[2].timings.queue_ns > 0


async def test_a_stream_that_ends_takes_only_its_own_batches_along(stub, devices, registry, target):
    """Slots that stay taken since their stream went while a device still worked for it; a stream
    that goes on and is never served again."""
    expected = tuple(greedy_reference(target, PROMPT, 1, eos_token_id=None))
    gone, stays = Stream(stub), Stream(stub)
    await stays.send(batch(1))
    await submitted(devices, 1)
    for number in (2, 3, 4):
        await gone.send(batch(number))
    await submitted(devices, 2)
    gone.call.cancel()
    devices.go_on.set()
    assert (await stays.receive()).verdicts[0].token_ids == expected
    assert (await stays.verify(batch(5))).verdicts[0].token_ids == expected
    await until(registry, "forerun_verifier_open_sequences", 2)


@pytest.mark.parametrize("max_in_flight", [0, 1, 2])
async def test_rows_are_divided_over_the_stages(target, monkeypatch, max_in_flight):
    """Stages that stand idle since one batch has all rows; a text that changes with the number of
    batches; more of them in flight than an operator allows."""
    monkeypatch.setattr("core.model.count_stages", lambda passed: 3)
    shapes: list[tuple[int, int]] = []
    send = Verifying.send

    def noted(self, replica, rows):
        send(self, replica, rows)
        num_decoding = sum(len(row.new_token_ids) == 1 for row in rows)
        shapes.append((num_decoding, len(replica.in_flight)))

    monkeypatch.setattr(Verifying, "send", noted)
    prompts = [(7 * i, 3, i) for i in range(6)]
    drafter = pool("d", "test_sometimes_right", target, k=3)
    async with serving(target, [drafter], max_in_flight=max_in_flight) as stack:
        requests = [make_request(p, 16, request_id=str(p)) for p in prompts]
        results = await asyncio.gather(*(stack.run(request) for request in requests))
    for prompt, (ids, _, _) in zip(prompts, results, strict=True):
        assert ids == greedy_reference(target, prompt, 16, eos_token_id=None)
    limit = max_in_flight or 3
    assert max(num_decoding for num_decoding, _ in shapes) <= -(-6 // limit)
    assert max(in_flight for _, in_flight in shapes) == limit
