"""Admission and micro-batches, without a clock: time is a number the test passes in."""

from dataclasses import replace

import pytest

from core.errors import OverloadedError
from core.types import (
    Branch,
    DrafterInfo,
    ModelIdentity,
    Plan,
    VerifyResult,
    VerifyTimings,
)
from orchestrator.costs import BatchWork
from orchestrator.pipeline import Sequence
from orchestrator.pool import Pool, explain_mismatch
from orchestrator.requests import Health
from orchestrator.scheduler import Scheduler
from tests.policy import make_sequence


def test_waiting_requests_are_admitted_in_order_of_arrival() -> None:
    """A later request must not overtake; a full verifier admits nobody."""
    scheduler, pool = _scheduler(), _pool("a", slots=2)
    sequences = [make_sequence(i) for i in range(3)]
    for sequence in sequences:
        scheduler.enqueue(sequence, pool.num_free)
    assert scheduler.admit(pool) == sequences[:2]
    assert scheduler.admit(pool) == []
    pool.replicas["a"].sequences.discard(0)
    assert scheduler.admit(pool) == sequences[2:]


def test_full_queue_is_refused_and_says_so() -> None:
    """Unbounded queues hide overload until it is too late."""
    scheduler = _scheduler(max_queue=1)
    scheduler.enqueue(make_sequence(1), 0)
    with pytest.raises(OverloadedError, match="max_queue = 1"):
        scheduler.enqueue(make_sequence(2), 0)
    scheduler.enqueue(make_sequence(3), num_free_slots=1)  # it will get the slot at once


def test_lost_sequences_go_back_in_front_in_order() -> None:
    """Those that already stream must not wait behind new arrivals."""
    scheduler = _scheduler()
    late = make_sequence(9)
    scheduler.enqueue(late, 5)
    a, b = make_sequence(1), make_sequence(2)
    scheduler.requeue([b, a])
    assert list(scheduler.waiting) == [a, b, late]


def test_batch_waits_for_a_plan_but_not_longer_than_its_patience() -> None:
    """Going too early wastes the draft; waiting for ever stalls everybody."""
    scheduler = _scheduler(patience_s=0.25)
    slow, quick = _decoding(1), _decoding(2)
    slow.commit_drafter((4,), now=10.0)
    waiting = scheduler.select([slow, quick], 100, now=10.1)
    assert waiting.rows == () and waiting.wake_at == 10.25
    rows = scheduler.select([slow, quick], 100, now=10.25).rows
    assert [row.sequence for row in rows] == [1, 2]


def test_plan_that_came_lets_the_batch_go_at_once() -> None:
    """The row goes with its draft as soon as nobody else is awaited."""
    scheduler = _scheduler(patience_s=0.25)
    sequence = _decoding(1)
    commit = sequence.commit_drafter((4,), now=10.0)
    sequence.take_plan(Plan(1, 1, commit.base_length, (Branch(0, 4, (5, 6)),)), 100)
    assert scheduler.select([sequence], 100, now=10.0).rows[0].draft_token_ids == (5, 6)


def test_prompt_chunks_take_only_the_room_beside_decoding_rows() -> None:
    """A long prompt must not stop the streams that run."""
    scheduler = _scheduler(max_prefill_tokens=8)
    decoding, prompt = _decoding(1), make_sequence(2, prompt=tuple(range(1, 60)))
    prompt.assign_verifier("a")
    rows = scheduler.select([decoding, prompt], 40, now=0.0).rows
    assert [row.num_tokens for row in rows] == [1, 8] and rows[1].partial


def test_long_prompts_slow_streams_down_by_a_bounded_time() -> None:
    """4 ms a prompt token beside rounds of 20 ms: after a first chunk, which may be cached, a chunk
    takes 30 ms; more prompts than streams may take more."""
    scheduler = _scheduler(max_prefill_tokens=64)
    costs, done = scheduler.controller.costs, VerifyTimings(forward_ns=20_000_000, num_forwards=1)
    for _ in range(9):
        costs.observe(BatchWork(1, 0, 0), VerifyResult(1, (), timings=done))
    costs.observe(
        BatchWork(0, 0, 10), VerifyResult(1, (), timings=replace(done, forward_ns=40_000_000))
    )
    stream, prompts = _decoding(1), [make_sequence(i, prompt=(7,) * 200) for i in (2, 3, 4)]
    for prompt in prompts:
        prompt.assign_verifier("a")
    assert _sizes(scheduler, stream, prompts[:1]) == [1, 64]
    prompts[0].verified = 64
    assert _sizes(scheduler, stream, prompts[:1]) == [1, 8]  # 1.5 * 20 ms / 4 ms, but 8 at least
    for prompt in prompts:
        prompt.verified = 64
    assert _sizes(scheduler, stream, prompts) == [1, 22]
    prompts[0].cached_prompt_tokens = 64  # all of it was cached so far: the rest may be, too
    assert _sizes(scheduler, stream, prompts[:1]) == [1, 64]


def _sizes(scheduler: Scheduler, *sequences: Sequence | list[Sequence]) -> list[int]:
    rows = [s for each in sequences for s in (each if isinstance(each, list) else [each])]
    selection = scheduler.select(rows, 200, now=0.0)
    for sequence in rows:
        sequence.row = None
    return [row.num_tokens for row in selection.rows]


def test_prompts_alone_use_the_whole_budget_and_never_more() -> None:
    """An oversized batch would be refused by the verifier."""
    scheduler = _scheduler(max_prefill_tokens=8)
    prompts = [make_sequence(i, prompt=tuple(range(1, 31))) for i in (1, 2)]
    for prompt in prompts:
        prompt.assign_verifier("a")
    rows = scheduler.select(prompts, 40, now=0.0).rows
    assert [row.num_tokens for row in rows] == [30, 10]


def test_rows_in_flight_are_not_sent_again() -> None:
    """A sequence appears once per batch and has one row in flight at most."""
    scheduler = _scheduler()
    sequence = _decoding(1)
    assert scheduler.select([sequence], 100, now=0.0).rows
    assert not scheduler.select([sequence], 100, now=0.0).rows


@pytest.mark.parametrize(("num_rows", "num_parts", "sizes"), [(8, 3, [3, 3, 2]), (2, 4, [1, 1])])
def test_rows_are_divided_over_the_devices(num_rows: int, num_parts: int, sizes: list[int]) -> None:
    """A batch with all rows leaves every device but one idle."""
    scheduler, sequences = _scheduler(), [_decoding(i) for i in range(num_rows)]
    batches = [scheduler.select(sequences, 100, 0.0, num_parts).rows for _ in range(num_parts)]
    assert [len(rows) for rows in batches if rows] == sizes
    assert sorted(row.sequence for rows in batches for row in rows) == list(range(num_rows))
    for sequence in sequences:
        sequence.row = None
    assert len(scheduler.select(sequences, 100, 0.0).rows) == num_rows  # one device: as ever


def test_a_share_of_ready_rows_waits_for_nobodys_plan() -> None:
    """A device that stands idle for the plans of rows that belong to other batches."""
    scheduler = _scheduler(patience_s=0.25)
    sequences = [_decoding(i) for i in range(4)]
    for slow in sequences[:3]:
        slow.commit_drafter((4,), now=10.0)
    assert scheduler.select(sequences, 100, 10.0, 2).wake_at == 10.25
    sequences[1].num_wanted = 0
    assert [row.sequence for row in scheduler.select(sequences, 100, 10.0, 2).rows] == [1, 3]
    assert scheduler.select(sequences, 100, 10.0, 2).wake_at == 10.25
    assert [row.sequence for row in scheduler.select(sequences, 100, 10.25, 2).rows] == [0, 2]


def test_a_prompt_between_batches_that_decode_comes_in_chunks() -> None:
    """Alone in its batch, a whole prompt would stand before the others on every device."""
    scheduler = _scheduler(max_prefill_tokens=8)
    decoding, prompt = _decoding(1), make_sequence(2, prompt=tuple(range(1, 60)))
    prompt.assign_verifier("a")
    assert scheduler.select([decoding], 40, 0.0, 2).rows
    assert [row.num_tokens for row in scheduler.select([decoding, prompt], 40, 0.0, 2).rows] == [8]


def test_pool_chooses_the_least_loaded_ready_replica() -> None:
    """A lost or full replica must get no sequence."""
    pool = _pool("a", slots=2)
    other = pool.add("b")
    assert pool.choose() is pool.replicas["a"]  # b has not shaken hands
    other.become_ready("x:1", _info(slots=1))
    pool.replicas["a"].sequences.add(1)
    assert pool.choose() is other
    other.sequences.add(2)
    assert pool.choose() is pool.replicas["a"]
    assert pool.replicas["a"].become_lost(Health.LOST, "gone") == {1}
    assert pool.choose() is None


def test_mismatched_tokenizers_are_explained_with_both_sides() -> None:
    """A drafter of another tokenizer would draft nonsense for ever, unnoticed."""
    target = ModelIdentity("big", 100, "aaaa")
    assert explain_mismatch(ModelIdentity("small", 128, "aaaa"), target) == ""  # padded
    assert explain_mismatch(ModelIdentity("ngram", 0, ""), target) == ""
    message = explain_mismatch(ModelIdentity("small", 100, "bbbb"), target)
    assert "'small'" in message and "'big'" in message and "tokenizers differ" in message


def _scheduler(
    max_queue: int = 9, patience_s: float = 0.25, max_prefill_tokens: int = 64
) -> Scheduler:
    return Scheduler(max_queue, patience_s, max_prefill_tokens)


def _info(slots: int) -> DrafterInfo:
    return DrafterInfo("ngram", ModelIdentity("m", 0), 0, slots, 4, "i")


def _pool(name: str, slots: int) -> Pool:
    pool = Pool("p", "ngram", 4)
    pool.add(name).become_ready("x:1", _info(slots))
    return pool


def _decoding(sequence_id: int) -> Sequence:
    """A sequence with its first token committed and a drafter."""
    sequence = make_sequence(sequence_id)
    sequence.assign_verifier("a")
    sequence.open()
    row = sequence.next_row(100, 100)
    sequence.row, sequence.verified = None, 3
    sequence.commit((4,), row, 0)
    sequence.open_drafter("d", 4, 0.0)
    sequence.num_wanted = 0
    return sequence
