"""verifier_service.engine: rows and opens that cannot be served, and who must not notice.

Every test has a bystander: a sequence whose next token is known and must come out whatever stands
beside it in the batch.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from core.model import RaggedModel
from core.types import (
    Rule,
    SamplingParams,
    VerdictStatus,
    VerifyBatch,
    VerifyOpen,
    VerifyResult,
    VerifyRow,
)
from tests.tiny_models import VOCAB_SIZE, greedy_reference
from tests.verifying import GREEDY, model_config
from verifier_service.engine import VerifierEngine

PROMPT = (10, 20, 30, 40)
OK, INVALID = VerdictStatus.OK, VerdictStatus.INVALID
NEED_PREFIX, NO_SLOT = VerdictStatus.NEED_PREFIX, VerdictStatus.NO_SLOT
BYSTANDER = 77


@pytest.fixture(scope="module")
def target(tiny) -> Path:
    return tiny("llama", eos_token_id=VOCAB_SIZE - 1)


@pytest.fixture(scope="module")
def answer(target) -> list[int]:
    return greedy_reference(target, PROMPT, 8, eos_token_id=None)


@pytest.fixture
def engine(target) -> VerifierEngine:
    """With the bystander open and its prompt cached."""
    engine = VerifierEngine(RaggedModel.load(model_config(target)))
    opens = (VerifyOpen(BYSTANDER, GREEDY, 64),)
    engine.verify(0, VerifyBatch(0, (VerifyRow(BYSTANDER, 0, PROMPT),), opens))
    return engine


def verify(
    engine: VerifierEngine, answer: list[int], *rows: VerifyRow, opens: tuple[VerifyOpen, ...] = ()
) -> VerifyResult:
    """Verify rows around the bystander's, which must be served as ever; the others' result."""
    bystander = VerifyRow(BYSTANDER, 4, (answer[0],), tuple(answer[1:3]))
    result = engine.verify(0, VerifyBatch(5, (*rows[:1], bystander, *rows[1:]), opens))
    verdicts = list(result.verdicts)
    seen = verdicts.pop(1 if rows else 0)
    assert (seen.status, seen.accepted, seen.token_ids) == (OK, 2, tuple(answer[1:4]))
    engine._model.cache.check()
    return VerifyResult(result.batch, tuple(verdicts), result.open_failures, result.timings)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (VerifyRow(1, 0, ()), "rows.new_token_ids: at least one"),
        (VerifyRow(1, 0, (), (5,)), "rows.new_token_ids: at least one"),
        (VerifyRow(1, 0, (VOCAB_SIZE,)), "rows.new_token_ids: ids must be below 260"),
        (VerifyRow(1, 0, (1,), (2**32 - 1,)), "rows.draft_token_ids: ids must be below 260"),
        (VerifyRow(1, 0, (1,), (2,), partial=True), "rows.draft_token_ids: a partial row"),
        (VerifyRow(1, 0, (1,) * 33), "rows.position: .* max_length 32"),
        (VerifyRow(1, 0, (1,) * 30, (2, 3, 4)), "rows.position: .* max_length 32"),
        (VerifyRow(1, 0, (1,), (2,) * 64), "rows.draft_token_ids: more than 63"),
        (VerifyRow(BYSTANDER, 0, (1,)), "rows.sequence: 77 is twice"),
    ],
)
def test_a_malformed_row_is_refused_alone(engine, answer, row, words):
    """One bad row must name its field and cost nobody else anything."""
    opens = (VerifyOpen(1, GREEDY, 100 if "63" in words else 32),)
    rows = (VerifyRow(1, 0, PROMPT), row) if "twice" in words else (row,)
    refused = verify(engine, answer, *rows, opens=opens).verdicts[-1]
    assert refused.status is INVALID and not refused.token_ids
    assert pytest.raises(AssertionError, match=words).matches(AssertionError(refused.message))


def test_an_unknown_sequence_and_a_gap_need_the_prefix(engine, answer):
    """After a restart, or a lost row, the orchestrator must be told to send the tokens again."""
    unknown = verify(engine, answer, VerifyRow(9, 0, PROMPT)).verdicts[0]
    assert (unknown.status, unknown.token_ids) == (NEED_PREFIX, ())
    opens = (VerifyOpen(1, GREEDY, 32),)
    gap = verify(engine, answer, VerifyRow(1, 2, PROMPT[2:]), opens=opens).verdicts[0]
    assert gap.status is NEED_PREFIX
    whole = verify(engine, answer, VerifyRow(1, 0, PROMPT)).verdicts[0]
    assert whole.token_ids == (answer[0],)
    rejected = VerifyRow(1, 4, (answer[0],), ((answer[1] + 1) % 256, 7, 8))
    assert verify(engine, answer, rejected).verdicts[0].accepted == 0
    # What was rejected is not held: a position inside it is a gap, not a wrong text.
    assert verify(engine, answer, VerifyRow(1, 6, (9,))).verdicts[0].status is NEED_PREFIX


def test_the_context_is_filled_exactly(target, answer):
    """lorax#474: prompt + max tokens equal to the context crashed; vllm#38711: wrong near it."""
    engine = VerifierEngine(RaggedModel.load(model_config(target, max_length=8)))
    opens = (VerifyOpen(1, GREEDY, 8),)
    full = VerifyRow(1, 0, PROMPT, tuple(answer[:4]))
    (verdict,) = engine.verify(0, VerifyBatch(0, (full,), opens)).verdicts
    assert (verdict.accepted, list(verdict.token_ids)) == (4, answer[:5])
    (verdict,) = engine.verify(0, VerifyBatch(0, (VerifyRow(1, 8, (answer[4],)),))).verdicts
    assert verdict.status is INVALID


def open_with(**fields: object) -> VerifyOpen:
    return VerifyOpen(1, SamplingParams(**fields), 32)


@pytest.mark.parametrize(
    ("open_", "field"),
    [
        (VerifyOpen(1, GREEDY, 129), "opens.max_length"),
        (VerifyOpen(1, GREEDY, 0), "opens.max_length"),
        (open_with(rule=Rule.REJECTION), "opens.sampling.rule"),
        (open_with(rule=Rule.GREEDY, temperature=1.0), "opens.sampling.rule"),
        (open_with(temperature=-1.0), "opens.sampling.temperature"),
        (open_with(temperature=float("nan")), "opens.sampling.temperature"),
        (open_with(rule=Rule.COUPLED, temperature=1.0, top_p=0.0), "opens.sampling.top_p"),
    ],
)
def test_a_malformed_open_is_refused_alone(engine, answer, open_, field):
    """Parameters that cannot be honoured must be refused by name, and no slot kept."""
    result = verify(engine, answer, VerifyRow(1, 0, PROMPT), opens=(open_,))
    (failure,) = result.open_failures
    assert (failure.sequence, failure.status) == (1, INVALID)
    assert failure.message.startswith(field)
    assert result.verdicts[0].status is NEED_PREFIX
    assert engine.num_open == 1


def test_opens_beyond_the_slots_are_told_so(engine, answer):
    """Admission fails before any work, and closing one makes room for one in the same batch."""
    opens = tuple(VerifyOpen(sequence, GREEDY, 32) for sequence in (1, 2, 3, 4))
    result = verify(engine, answer, opens=opens)
    assert [(f.sequence, f.status) for f in result.open_failures] == [(4, NO_SLOT)]
    batch = VerifyBatch(1, (VerifyRow(4, 0, PROMPT),), opens[3:], closes=(2, 99))
    assert engine.verify(0, batch).verdicts[0].token_ids == (answer[0],)
    assert engine.num_open == 4


def test_opening_an_open_sequence_starts_it_again(engine, answer):
    """A repeated open (after a lost answer) must neither leak a slot nor keep old tokens."""
    opens = (VerifyOpen(BYSTANDER, GREEDY, 64),)
    batch = VerifyBatch(0, (VerifyRow(BYSTANDER, 4, (1,)),), opens)
    assert engine.verify(0, batch).verdicts[0].status is NEED_PREFIX
    batch = VerifyBatch(0, (VerifyRow(BYSTANDER, 0, PROMPT),), opens)
    assert engine.verify(0, batch).verdicts[0].token_ids == (answer[0],)
    assert engine.num_open == 1


def test_streams_are_isolated_and_end_together_with_their_sequences(engine, answer):
    """Two orchestrators choose the same ids; one that goes takes only its own with it."""
    opens = (VerifyOpen(BYSTANDER, GREEDY, 64), VerifyOpen(1, GREEDY, 64))
    other = VerifyRow(BYSTANDER, 0, (50, 60))
    assert engine.verify(1, VerifyBatch(0, (other,), opens)).verdicts[0].status is OK
    assert engine.num_open == 3
    engine.close_stream(1)
    engine.close_stream(2)
    assert engine.num_open == engine._model.cache.num_live == 1
    verify(engine, answer)


def break_forward(
    engine: VerifierEngine, key: int, broken: Callable[[torch.Tensor | None], torch.Tensor]
) -> None:
    """Make the target fail whenever the model's sequence `key` is in the batch."""
    forward = engine._model.forward

    def failing(rows):
        return broken(forward(rows)) if any(row.sequence == key for row in rows) else forward(rows)

    engine._model.forward = failing


def test_a_row_that_breaks_the_target_fails_alone(engine, answer):
    """An out-of-memory or a kernel's refusal belongs to one row; its neighbours are run again."""

    def out_of_memory(logits):
        raise torch.OutOfMemoryError("out of memory")

    break_forward(engine, 1, out_of_memory)
    opens = (VerifyOpen(1, GREEDY, 32), VerifyOpen(2, GREEDY, 32))
    rows = (VerifyRow(1, 0, PROMPT), VerifyRow(2, 0, PROMPT))
    guilty, innocent = verify(engine, answer, *rows, opens=opens).verdicts
    assert guilty.status is INVALID and "out of memory" in guilty.message
    assert innocent.token_ids == (answer[0],)


def test_logits_that_are_not_numbers_fail_their_row_alone(engine, answer):
    """A NaN must not become a token id, nor reach the other rows of the batch."""

    def first_is_nan(logits):
        logits = logits.clone()
        logits[0, 3] = float("nan")
        return logits

    break_forward(engine, 1, first_is_nan)
    opens = (VerifyOpen(1, GREEDY, 32),)
    (verdict,) = verify(engine, answer, VerifyRow(1, 0, (1,)), opens=opens).verdicts
    assert verdict.status is INVALID and "finite" in verdict.message


def test_padded_ids_are_verified_and_never_accepted(tiny):
    """vllm#5203: a head wider than the tokenizer; its padded ids must never be said."""
    path = tiny("padded", eos_token_id=VOCAB_SIZE - 1)
    engine = VerifierEngine(RaggedModel.load(model_config(path)))
    assert engine.info.tokenizer_size == VOCAB_SIZE < engine.info.identity.vocab_size == 320
    forward = engine._model.forward

    def padding_wins(rows):
        logits = forward(rows).clone()
        logits[:, 300] = 1e4
        return logits

    engine._model.forward = padding_wins
    rows = (VerifyRow(1, 0, PROMPT, (300, 301)),)
    batch = VerifyBatch(0, rows, (VerifyOpen(1, GREEDY, 64),))
    (verdict,) = engine.verify(0, batch).verdicts
    assert (verdict.status, verdict.accepted) == (OK, 0)
    assert verdict.token_ids[0] < VOCAB_SIZE


def test_a_shared_prefix_is_copied_and_changes_nothing(target, engine, answer):
    """The second request with a long system prompt must say the same, computing less."""
    shared = tuple((3 * i) % 256 for i in range(40))
    expected = greedy_reference(target, (*shared, 5), 1, eos_token_id=None)
    opens = (VerifyOpen(1, GREEDY, 64), VerifyOpen(2, GREEDY, 64))
    first = verify(engine, answer, VerifyRow(1, 0, (*shared, 4)), opens=opens).verdicts[0]
    second = verify(engine, answer, VerifyRow(2, 0, (*shared, 5))).verdicts[0]
    assert (first.cached_tokens, second.cached_tokens) == (0, 40)
    assert list(second.token_ids) == expected
