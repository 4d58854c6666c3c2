"""The drafter's service over real gRPC, with prompt lookup (inline) and a tiny model (threaded)."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from core import PROTOCOL_VERSION, wire
from core.config import DrafterPoolConfig, ModelConfig
from core.errors import ConfigError
from core.rpc import RunningServer, create_channel
from core.types import (
    Branch,
    DraftClose,
    DraftCommit,
    DraftOpen,
    DraftPlans,
    DraftSent,
    NeedOpenReason,
    Plan,
    SamplingParams,
)
from drafter_service.drafters.base import Draft, DraftJob
from drafter_service.drafters.ngram import NgramDrafter
from drafter_service.engine import DrafterEngine
from drafter_service.server import Worker, serve, serve_drafter
from protos import drafter_pb2, drafter_pb2_grpc
from tests.drafter_session import Session, frame

NGRAM = DrafterPoolConfig(name="lookup", kind="ngram", max_draft_tokens=3)
TOKENS = (1, 2, 3, 4, 1, 2)  # prompt lookup goes on with 3, 4, 1


def opened(sequence: int, token_ids: Sequence[int] = TOKENS, k: int = 3) -> DraftOpen:
    return DraftOpen(sequence, 1, tuple(token_ids), SamplingParams(), 3, k)


@pytest.fixture
async def server() -> AsyncIterator[RunningServer]:
    running = await serve_drafter(NGRAM)
    yield running
    await running.stop()


@pytest.fixture
async def session(server: RunningServer) -> AsyncIterator[Session]:
    opened_session = Session(server.address)
    yield opened_session
    await opened_session.close()


@pytest.fixture
async def model_server(tiny_llama: Path) -> AsyncIterator[RunningServer]:
    model = ModelConfig(model=str(tiny_llama), max_length=64, max_sequences=2, max_batch_tokens=16)
    running = await serve_drafter(
        DrafterPoolConfig(name="small", kind="draft_model", max_draft_tokens=3, model=model)
    )
    yield running
    await running.stop()


async def test_open_and_commit_are_answered_with_plans(session: Session) -> None:
    """The whole conversation of one sequence; a wrong base or outcome makes drafts unusable."""
    await session.send(opened(7))
    frame_1 = await session.receive()
    assert frame_1.plans == (Plan(7, 1, 5, (Branch(0, 2, (3, 4, 1)),)),)
    assert frame_1.draft_ns > 0 and frame_1.num_queued == 0
    await session.send(DraftCommit(7, 1, 6, 1, (3, 2), 2))
    assert (await session.receive()).plans == (Plan(7, 1, 6, (Branch(1, 2, (3, 2)),)),)


async def test_branches_are_pushed_while_a_block_is_at_the_target(
    model_server: RunningServer,
) -> None:
    """Breaks when the worker sleeps with work ahead to do, or wakes for it only once: nothing is
    sent to it between the block and the last branch. The branch of the outcome is the draft."""
    session = Session(model_server.address)
    open_ = DraftOpen(7, 1, TOKENS, SamplingParams(), 3, 3, max_branches=5)
    await session.send(open_)
    [known] = (await session.receive()).plans[0].branches
    await session.send(DraftSent(7, 1, 6, 3, 2))
    branches: list[Branch] = []
    while len(branches) < 5:
        [plan] = (await session.receive()).plans
        assert plan.base_length == 6
        branches += plan.branches
    outcome = max(branches, key=lambda branch: branch.accepted)
    tokens = (*known.draft_token_ids[: outcome.accepted], outcome.token)
    await session.send(DraftCommit(7, 1, 6, outcome.accepted, tokens, 2))
    assert (await session.receive()).plans == (Plan(7, 1, 6, (outcome,)),)
    await session.close()


async def test_the_handshake_says_what_it_is(server: RunningServer) -> None:
    """The orchestrator refuses what does not fit, and sees a restart by the instance id."""
    async with create_channel(server.address) as channel:
        stub = drafter_pb2_grpc.DrafterServiceStub(channel)  # type: ignore[no-untyped-call]
        message = await stub.DescribeDrafter(drafter_pb2.DescribeDrafterRequest())
    info = wire.drafter_info_from_proto(message)
    assert message.protocol_version == PROTOCOL_VERSION
    assert (info.kind, info.identity.vocab_size, info.max_draft_tokens) == ("ngram", 0, 3)
    assert info.instance_id and not info.has_distributions and not info.can_draft_ahead


async def test_the_handshake_says_who_drafts_ahead(model_server: RunningServer) -> None:
    """One that does is asked for nothing ahead if it does not say so."""
    async with create_channel(model_server.address) as channel:
        stub = drafter_pb2_grpc.DrafterServiceStub(channel)  # type: ignore[no-untyped-call]
        message = await stub.DescribeDrafter(drafter_pb2.DescribeDrafterRequest())
    assert wire.drafter_info_from_proto(message).can_draft_ahead


async def test_gaps_old_generations_and_nonsense_leave_the_stream_alive(session: Session) -> None:
    """Each bad command is answered by itself; the sequence beside it is drafted for as ever."""
    await session.send(opened(1), opened(2), opened(3))
    await session.receive()
    await session.send(
        DraftCommit(1, 1, 50, 0, (1,), 3),  # a gap
        DraftCommit(2, 0, 6, 0, (3,), 3),  # an old generation
        DraftCommit(3, 1, 6, 2, (3,), 3),  # accepted does not fit its tokens
        DraftCommit(2, 1, 6, 0, (3,), 1),
    )
    answer = await session.receive()
    assert answer.plans == (Plan(2, 1, 6, (Branch(0, 3, (4,)),)),)
    reasons = {need.sequence: need.reason for need in answer.need_opens}
    assert reasons == {1: NeedOpenReason.GAP, 3: NeedOpenReason.INVALID}


async def test_a_command_that_cannot_be_read_is_refused_alone(session: Session) -> None:
    """An enum value of a newer peer must not end the stream, nor lose the rest of its frame."""
    request = wire.draft_commands_to_proto(frame(opened(1), opened(2)))
    request.opens[0].sampling.rule = 99  # type: ignore[assignment]
    await session.call.write(request)
    answer = await session.receive()
    assert [plan.sequence for plan in answer.plans] == [2]
    [need] = answer.need_opens
    assert (need.sequence, need.reason) == (1, NeedOpenReason.INVALID)
    assert "rule" in need.message and "99" in need.message


async def test_a_refused_open_leaves_the_blocks_of_others(model_server: RunningServer) -> None:
    """What stands at the target is told in the same frame: without it nothing is drafted ahead of
    any sequence."""
    session = Session(model_server.address)
    await session.send(DraftOpen(7, 1, TOKENS, SamplingParams(), 3, 3, max_branches=5))
    await session.receive()
    request = wire.draft_commands_to_proto(
        frame(opened(8), DraftSent(7, 1, 6, 3, 2), DraftSent(8, 1, 6, 0, 2))
    )
    request.opens[0].sampling.rule = 99  # type: ignore[assignment]
    await session.call.write(request)
    answers = [await session.receive()]
    while not any(answer.plans for answer in answers):
        answers.append(await session.receive())
    assert {plan.sequence for plan in answers[-1].plans} == {7}
    assert [need.sequence for answer in answers for need in answer.need_opens] == [8]
    await session.close()


async def test_streams_may_use_the_same_ids(server: RunningServer, session: Session) -> None:
    """Sequences belong to their stream: the end of one must not close the other's."""
    other = Session(server.address)
    await session.send(opened(7, [1, 2, 9, 1, 2]))
    await other.send(opened(7, [1, 2, 8, 1, 2]))
    assert (await session.receive()).plans[0].branches[0].draft_token_ids[0] == 9
    assert (await other.receive()).plans[0].branches[0].draft_token_ids[0] == 8
    await other.close()
    await session.send(DraftCommit(7, 1, 5, 0, (1,), 1))
    assert (await session.receive()).plans[0].branches[0].token == 1


async def test_full_and_too_long_are_told_and_a_lost_peer_frees_its_slots(
    model_server: RunningServer,
) -> None:
    """A peer that is gone without closing anything must not keep the drafter full."""
    first, second = Session(model_server.address), Session(model_server.address)
    await first.send(opened(1), opened(2))
    assert len((await first.receive()).plans) == 2
    await second.send(opened(1))
    assert [n.reason for n in (await second.receive()).need_opens] == [NeedOpenReason.FULL]
    await first.close()
    plans: tuple[Plan, ...] = ()
    for _ in range(1_000):  # until the server has noticed
        if plans:
            break
        await second.send(opened(1))
        plans = (await second.receive()).plans
    assert plans and len(plans[0].branches[0].draft_token_ids) == 3
    await second.send(opened(2, range(64)))
    assert [n.reason for n in (await second.receive()).need_opens] == [NeedOpenReason.TOO_LONG]
    await second.close()


class Gated(NgramDrafter):
    """Prompt lookup in a thread, whose batches start when the test says so."""

    runs_inline = False

    def __init__(self) -> None:
        super().__init__(NGRAM)
        self.started, self.gate = threading.Semaphore(0), threading.Semaphore(0)
        self.broken = False

    def draft(self, jobs: Sequence[DraftJob]) -> list[Draft]:
        self.started.release()
        self.gate.acquire()
        return super().draft(jobs)

    def close(self, sequence: int) -> None:
        if self.broken:
            self.broken = False
            raise RuntimeError("broken")
        super().close(sequence)


async def test_frames_that_arrive_while_it_drafts_become_one_batch() -> None:
    """Without coalescing every frame costs a forward, and a row of the next micro-batch waits for
    drafts that nobody wants any more."""
    drafter = Gated()
    with ThreadPoolExecutor(1) as thread:
        worker = Worker(DrafterEngine(drafter, 3), thread)
        task = asyncio.create_task(worker.run())
        stream, outbox = worker.open_stream()

        def submit(*commands: DraftOpen | DraftCommit) -> None:
            worker.submit(lambda engine: engine.apply(stream, frame(*commands)))

        submit(opened(1))
        await asyncio.to_thread(drafter.started.acquire)
        submit(opened(2))
        submit(opened(3), DraftCommit(1, 1, 6, 0, (9,), 3))
        submit(DraftCommit(2, 1, 6, 0, (9,), 3))
        drafter.gate.release(2)
        first, second = await outbox.get(), await outbox.get()
        assert isinstance(first, DraftPlans) and isinstance(second, DraftPlans)
        assert [plan.sequence for plan in first.plans] == [1]
        assert {(plan.sequence, plan.base_length) for plan in second.plans} == {
            (1, 6),
            (2, 6),
            (3, 5),
        }
        task.cancel()


async def test_the_service_outlives_a_broken_drafter() -> None:
    """An error outside a draft fails the streams with INTERNAL; the next ones are served."""
    drafter = Gated()
    drafter.gate.release(10)
    running = await serve(drafter, NGRAM)
    session = Session(running.address)
    await session.send(opened(1))
    await session.receive()
    drafter.broken = True
    await session.send(DraftClose(1, 1))
    assert await session.call.code() is grpc.StatusCode.INTERNAL
    again = Session(running.address)
    await again.send(opened(1))
    assert (await again.receive()).plans
    for each in (session, again):
        await each.close()
    await running.stop()


async def test_ending_the_stream_ends_the_call(session: Session) -> None:
    """A peer that says it is done must not be left waiting for an answer."""
    await session.send(opened(1))
    await session.receive()
    await session.call.done_writing()
    assert await session.call.read() is grpc.aio.EOF
    assert await session.call.code() is grpc.StatusCode.OK


async def test_a_pool_that_cannot_be_made_fails_at_start() -> None:
    """The error reaches who starts it, not a log nobody reads."""
    with pytest.raises(ConfigError, match="max_ngram"):
        await serve_drafter(DrafterPoolConfig(name="x", kind="ngram", options={"max_ngrm": 1}))
