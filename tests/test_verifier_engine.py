"""verifier_service.engine on tiny models: exact against transformers' generate, sturdy per row.

The target is a tiny random fp32 model; what it should say comes from transformers.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from core.model import RaggedModel
from core.sampling import draw
from core.types import (
    SamplingParams,
    VerdictStatus,
    VerifyBatch,
    VerifyOpen,
    VerifyRow,
)
from tests.tiny_models import EOS, VOCAB_SIZE, greedy_reference, load_reference
from tests.verifying import (
    COUPLED,
    GREEDY,
    NUM_NEW,
    Driver,
    drafters,
    make_prompts,
    model_config,
    noise,
)
from verifier_service.engine import VerifierEngine


@pytest.fixture(scope="module")
def endless(tiny) -> Path:
    """A target that never stops by itself, so that lengths are known."""
    return tiny("llama", eos_token_id=VOCAB_SIZE - 1)


@pytest.fixture
def engine(endless) -> VerifierEngine:
    return VerifierEngine(RaggedModel.load(model_config(endless)))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return make_prompts()


@pytest.fixture(scope="module")
def truth(endless, prompts) -> list[list[int]]:
    """The greedy continuation of each prompt, from transformers."""
    model = load_reference(endless)
    return [
        greedy_reference(model, p, NUM_NEW, eos_token_id=None, pad_token_id=EOS) for p in prompts
    ]


def run(
    engine: VerifierEngine, drivers: Sequence[Driver], sampling: SamplingParams, stream: int = 0
) -> None:
    """Drive all sequences, in one batch per round, until each has NUM_NEW tokens."""
    opens = tuple(VerifyOpen(driver.sequence, sampling, 128) for driver in drivers)
    while active := [driver for driver in drivers if len(driver.generated) < NUM_NEW]:
        rows = tuple(driver.row() for driver in active)
        result = engine.verify(stream, VerifyBatch(0, rows, opens))
        opens = ()
        assert not result.open_failures
        for driver, row, verdict in zip(active, rows, result.verdicts, strict=True):
            driver.apply(row, verdict)
    engine.verify(stream, VerifyBatch(0, closes=tuple(d.sequence for d in drivers)))


@pytest.mark.parametrize("kind", ["perfect", "random", "never right", "garbage", "half right"])
@pytest.mark.parametrize("k", [0, 1, 2, 3, 5, 8])
def test_greedy_text_is_the_targets_own(engine, prompts, truth, kind, k):
    """Any drafter at any length must leave the text alone; batch of 4, drafts of all lengths."""
    drivers = [
        Driver(i, prompt, drafters(kind, prompt + truth[i], i), k)
        for i, prompt in enumerate(prompts)
    ]
    run(engine, drivers, GREEDY)
    for driver, expected in zip(drivers, truth, strict=True):
        assert driver.generated[:NUM_NEW] == expected
        if kind == "never right":  # lattice#243: an off-by-one in the logits row accepts some
            assert set(driver.accepted) == {0}
        if kind == "perfect" and k:  # and one the other way rejects some
            assert driver.accepted[:2] == [k, k]
    engine._model.cache.check()
    assert engine.num_open == engine._model.cache.num_live == 0


def test_rows_without_a_draft_beside_rows_with_one(engine, prompts, truth):
    """vllm#41758: in a ragged batch rows changed each other's text."""
    kinds = ["perfect", "never right", "random", "half right"]
    lengths = [8, 3, 0, 5]
    drivers = [
        Driver(i, prompts[i], drafters(kind, prompts[i] + truth[i], i), lengths[i])
        for i, kind in enumerate(kinds)
    ]
    run(engine, drivers, GREEDY)
    assert [driver.generated[:NUM_NEW] for driver in drivers] == truth


@pytest.mark.parametrize("kind", ["perfect", "random", "half right"])
def test_seeded_sampling_is_the_same_with_and_without_drafts(engine, prompts, kind):
    """COUPLED: the seed alone decides the text, not the drafter, the batch or the draft length."""
    alone = []
    for i, prompt in enumerate(prompts):
        driver = Driver(i, prompt, noise(0, 1), 0)
        run(engine, [driver], COUPLED)
        alone.append(driver.generated)
    drivers = [
        Driver(i, prompt, drafters(kind, prompt + alone[i], i), 5)
        for i, prompt in enumerate(prompts)
    ]
    run(engine, drivers, COUPLED, stream=9)
    assert [driver.generated[:NUM_NEW] for driver in drivers] == [text[:NUM_NEW] for text in alone]
    if kind == "perfect":
        assert all(driver.accepted[:2] == [5, 5] for driver in drivers)
    assert len({tuple(text) for text in alone}) == len(alone)


def test_noise_is_keyed_by_the_absolute_index_of_the_drawn_token(endless, engine, prompts):
    """Drafters and other verifiers key by the same index; one off and nothing ever couples."""
    driver = Driver(1, prompts[1], noise(3, 4), 3)
    run(engine, [driver], COUPLED)
    model = load_reference(endless)
    with torch.inference_mode():
        logits = model(torch.tensor([driver.tokens])).logits[0]
    index = list(range(len(prompts[1]), len(driver.tokens)))
    drawn = draw(logits[[i - 1 for i in index]], [COUPLED] * len(index), index)
    assert drawn.tolist() == driver.generated


def test_a_repeated_row_gets_the_same_verdict(engine, prompts, truth):
    """A call that is retried after a lost answer must not advance or redraw anything."""
    for sampling in (GREEDY, COUPLED):
        engine.verify(0, VerifyBatch(0, opens=(VerifyOpen(1, sampling, 128),)))
        prompt = VerifyRow(1, 0, tuple(prompts[2]), tuple(truth[2][:3]))
        first = engine.verify(0, VerifyBatch(1, (prompt,))).verdicts
        assert engine.verify(0, VerifyBatch(2, (prompt,))).verdicts == first
        step = VerifyRow(1, 20 + first[0].accepted, first[0].token_ids[-1:], (7, 8))
        second = engine.verify(0, VerifyBatch(3, (step,))).verdicts
        assert engine.verify(0, VerifyBatch(4, (step,))).verdicts == second
        assert engine.verify(0, VerifyBatch(5, (prompt,))).verdicts == first


def test_rollback_to_an_earlier_position(endless, engine, prompts, truth):
    """The position alone says what is kept: tokens behind it must leave no trace."""
    prompt = prompts[1]
    engine.verify(0, VerifyBatch(0, opens=(VerifyOpen(1, GREEDY, 128),)))
    engine.verify(0, VerifyBatch(1, (VerifyRow(1, 0, (*prompt, *truth[1][:10])),)))
    other = greedy_reference(endless, [*prompt[:4], 99, 98], 1, eos_token_id=None)
    (verdict,) = engine.verify(0, VerifyBatch(2, (VerifyRow(1, 4, (99, 98)),))).verdicts
    assert list(verdict.token_ids) == other
    (verdict,) = engine.verify(0, VerifyBatch(3, (VerifyRow(1, 4, tuple(prompt[4:])),))).verdicts
    assert list(verdict.token_ids) == truth[1][:1]


def test_a_long_prompt_is_split_and_short_rows_ride_in_the_first_forward(endless, prompts):
    """Chunked prefill must not change the text, nor cost more forwards than tokens demand."""
    engine = VerifierEngine(
        RaggedModel.load(model_config(endless, max_batch_tokens=16, max_length=256))
    )
    long = [(7 * i) % 256 for i in range(70)]
    expected = greedy_reference(endless, long, 6, eos_token_id=None)
    opens = (VerifyOpen(1, GREEDY, 256), VerifyOpen(2, GREEDY, 256))
    engine.verify(0, VerifyBatch(0, (VerifyRow(2, 0, (1, 2, 3)),), opens))
    rows = (VerifyRow(1, 0, tuple(long), tuple(expected[:5])), VerifyRow(2, 3, (4,), (5, 6)))
    shapes = []
    forward = engine._model.forward
    engine._model.forward = lambda rows: shapes.append(list(rows)) or forward(rows)
    result = engine.verify(0, VerifyBatch(1, rows))
    assert result.verdicts[0].token_ids == tuple(expected)
    assert result.timings.num_forwards == len(shapes) == 5  # 78 tokens, 16 at a time
    assert [row.sequence for row in shapes[0]] == [1, 0]  # the model's ids: 2 was first to run
    assert [row.num_logits for step in shapes[1:] for row in step] == [0, 0, 0, 6]


def test_partial_rows_cache_a_prompt_and_draw_nothing(engine, prompts, truth):
    """The orchestrator's chunks: only the last one gives a token, and it gives the right one."""
    prompt = prompts[3]
    opens = (VerifyOpen(1, GREEDY, 128),)
    for start in (0, 12):
        chunk = VerifyRow(1, start, tuple(prompt[start : start + 12]), partial=True)
        (verdict,) = engine.verify(0, VerifyBatch(0, (chunk,), opens)).verdicts
        opens = ()
        assert (verdict.status, verdict.position, verdict.token_ids) == (
            VerdictStatus.OK,
            start + 12,
            (),
        )
    (verdict,) = engine.verify(0, VerifyBatch(0, (VerifyRow(1, 24, tuple(prompt[24:])),))).verdicts
    assert list(verdict.token_ids) == truth[3][:1]
