"""A target over several devices: batches are submitted while others are on their way.

The devices are the CPU under a false count; what only real ones do (to end later than the call, to
fail by then) is done by a false event. The rest is real.
"""

import random
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from core.model import RaggedModel
from core.stages import Relay, count_stages
from core.types import Rule, VerdictStatus, VerifyBatch, VerifyOpen, VerifyRow
from tests.tiny_models import VOCAB_SIZE, greedy_reference
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
from verifier_service.forwards import Forwards
from verifier_service.work import Submission

KINDS = ("perfect", "random", "never right", "half right")
PROMPT = (10, 20, 30, 40)


@pytest.fixture(scope="module")
def target(tiny) -> Path:
    return tiny("llama", eos_token_id=VOCAB_SIZE - 1)


@pytest.fixture(scope="module")
def model(target) -> RaggedModel:
    loaded = RaggedModel.load(model_config(target))
    assert loaded.num_stages == 1
    loaded.num_stages = 3
    return loaded


@pytest.fixture
def engine(model) -> Iterator[VerifierEngine]:
    engine = VerifierEngine(model)
    yield engine
    for stream in (0, 1):
        engine.close_stream(stream)
    model.cache.check()


@pytest.fixture(scope="module")
def truth(model) -> dict[Rule, list[list[int]]]:
    """What each prompt's text is under a rule, row by row and without drafts."""
    engine, texts = VerifierEngine(model), {}
    for sampling in (GREEDY, COUPLED):
        texts[sampling.rule] = [alone(engine, prompt, sampling) for prompt in make_prompts()]
    return texts


def alone(engine: VerifierEngine, prompt: list[int], sampling) -> list[int]:
    driver, opens = Driver(0, prompt, noise(0, 1), 0), (VerifyOpen(0, sampling, 128),)
    while len(driver.generated) < NUM_NEW:
        row = driver.row()
        driver.apply(row, engine.verify(0, VerifyBatch(0, (row,), opens)).verdicts[0])
        opens = ()
    engine.close_stream(0)
    return driver.generated[:NUM_NEW]


class End:
    """Stands in for a device's event, which may tell that the device failed."""

    def __init__(self, fails: bool) -> None:
        self._fails = fails

    def synchronize(self) -> None:
        if self._fails:
            raise RuntimeError("device-side assert")


def open_batch(*sequences: int) -> VerifyBatch:
    rows = tuple(VerifyRow(s, 0, PROMPT) for s in sequences)
    return VerifyBatch(0, rows, tuple(VerifyOpen(s, GREEDY, 64) for s in sequences))


# ---------------------------------------------------------------- devices


def test_stages_are_the_devices_that_a_forward_passes_once():
    """A head on the first device calls every forward back: the next one would wait for it."""
    a, b, c = (torch.device("cuda", i) for i in range(3))
    assert count_stages([a, a, a]) == 1
    assert count_stages([a, a, b, b, c, c, c]) == 3
    assert count_stages([a, a, b, b, a]) == 1


def test_what_all_layers_get_goes_from_device_to_device_once():
    """A copy from the first device for each layer would make both of them wait, each time."""
    seen: list[tuple[torch.Tensor, ...]] = []
    layers = [nn.Identity() for _ in range(3)]
    relay = Relay(layers, [torch.device(name) for name in ("cpu", "meta", "meta")])
    for layer in layers:
        layer.forward = lambda x, both, **others: seen.append((x, *both, others["scale"]))
    x, cosines, sines = torch.ones(2), torch.ones(3), torch.ones(4)
    for layer in layers:
        layer(x, (cosines, sines), scale=2.0)
    assert seen[0] == (x, cosines, sines, 2.0)
    assert all(tensor.device.type == "meta" for tensor in seen[1][:3])
    assert all(one is other for one, other in zip(seen[1], seen[2], strict=True))
    relay.forget()
    layers[1](x, (cosines, sines), scale=2.0)
    assert seen[3][1] is not seen[1][1]


# ---------------------------------------------------------------- the engine


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED])
def test_texts_do_not_depend_on_what_is_under_way(model, truth, sampling):
    """Any micro-batches in any order, forwards that fail at once or later, sequences that begin
    again while a row of theirs is under way: the text of each is what it is alone."""

    @settings(max_examples=25, deadline=None)
    @given(st.integers(0, 10**6))
    def check(seed):
        rng, engine = random.Random(seed), VerifierEngine(model)
        forward, sizes = model.forward, [0]

        def failing(rows):
            sizes[0] = len(rows)
            if len(rows) > 1 and rng.random() < 0.2:
                raise torch.OutOfMemoryError("now and then")
            return forward(rows)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model, "forward", failing)
            fails = lambda: sizes[0] > 1 and rng.random() < 0.2  # noqa: E731
            patch.setattr(Forwards, "_end_of", lambda *_: End(fails()))
            try:
                assert play(engine, rng, truth[sampling.rule], sampling) == truth[sampling.rule]
            finally:
                engine.close_stream(0)
        model.cache.check()
        assert model.cache.num_live == 0

    check()


def play(engine: VerifierEngine, rng: random.Random, truth, sampling) -> list[list[int]]:
    """Submit and complete in an order of chance, until every sequence has its text."""
    drivers = [
        Driver(i, prompt, drafters(KINDS[i], prompt + truth[i], i), 4)
        for i, prompt in enumerate(make_prompts())
    ]
    to_open, under_way = set(drivers), deque()
    while any(len(driver.generated) < NUM_NEW for driver in drivers):
        busy = {driver for _, rows in under_way for driver in rows}
        idle = [d for d in drivers if d not in busy and len(d.generated) < NUM_NEW]
        if busy and rng.random() < 0.05:  # lost by the orchestrator: all begins again
            lost = rng.choice(sorted(busy, key=lambda d: d.sequence))
            lost.position = 0
            for _, rows in under_way:
                rows.pop(lost, None)
            to_open.add(lost)
        elif idle and rng.random() < 0.6:
            chosen = rng.sample(idle, rng.randrange(1, len(idle) + 1))
            rows = {driver: driver.row() for driver in chosen}
            opens = [VerifyOpen(d.sequence, sampling, 128) for d in chosen if d in to_open]
            to_open -= set(chosen)
            batch = VerifyBatch(0, tuple(rows.values()), tuple(opens))
            under_way.append((engine.submit(0, batch), rows))
        elif under_way:
            at = rng.choice((0, 0, 0, len(under_way) - 1))
            submission, rows = under_way[at]
            del under_way[at]
            result = engine.complete(submission)
            assert not result.open_failures and result.timings.num_forwards
            verdicts = {verdict.sequence: verdict for verdict in result.verdicts}
            for driver, row in rows.items():
                driver.apply(row, verdicts[driver.sequence])
    return [driver.generated[:NUM_NEW] for driver in drivers]


def done(*submissions: Submission) -> list[bool]:
    return [submission.result.done() for submission in submissions]


@pytest.mark.parametrize("how", ["row", "close", "open"])
def test_a_batch_of_the_same_sequence_comes_after(engine, target, how):
    """A row that begins where its sequence's last one has not ended would read its drafts."""
    expected = greedy_reference(target, PROMPT, 1, eos_token_id=None)
    first, other = engine.submit(0, open_batch(1)), engine.submit(0, open_batch(2))
    foreign = VerifyBatch(1, closes=(1, 2))
    assert done(first, other, engine.submit(1, foreign)) == [False, False, False]
    batch = {
        "row": VerifyBatch(1, (VerifyRow(1, 0, PROMPT),)),
        "close": VerifyBatch(1, closes=(1,)),
        "open": VerifyBatch(1, opens=(VerifyOpen(1, GREEDY, 64),)),
    }[how]
    last = engine.submit(0, batch)
    assert done(first, other, last) == [True, False, False]
    for submission in (last, other, first):
        verdicts = engine.complete(submission).verdicts
        assert all(verdict.token_ids == tuple(expected) for verdict in verdicts)


def test_no_more_batches_than_stages_and_a_stream_ends_behind_its_own(engine):
    """More would only wait in the devices' queues; a slot given away while a batch writes to it."""
    submissions = [engine.submit(stream, open_batch(i)) for stream, i in ((0, 1), (0, 2), (1, 1))]
    assert not any(done(*submissions))
    submissions.append(engine.submit(1, VerifyBatch(0, closes=(7,))))
    assert done(*submissions) == [True, False, False, False]
    engine.close_stream(0)
    assert done(*submissions) == [True, True, False, False] and engine.num_open == 1


def test_a_row_that_fails_late_fails_alone(engine, target, monkeypatch):
    """What fails on the device is told at its end: its neighbours, and the batch behind, go on, and
    nothing that was read of the failed forward is told."""
    prompts = {1: PROMPT, 2: PROMPT, 3: PROMPT * 16, 4: PROMPT}  # the third takes two forwards
    forward, guilty = engine._model.forward, []

    def noted(rows):
        guilty.append(any(row.sequence == 1 for row in rows))  # the model's ids: 0, 1, 2
        return forward(rows)

    names = ("hidden_states",)
    opens = tuple(VerifyOpen(s, GREEDY, 128, features=names) for s in (1, 2, 3))
    rows = tuple(VerifyRow(s, 0, prompts[s]) for s in (1, 2, 3))
    with monkeypatch.context() as patch:
        patch.setattr(engine._model, "forward", noted)
        patch.setattr(Forwards, "_end_of", lambda self, logits: End(guilty[-1]))
        first = engine.submit(0, VerifyBatch(0, rows, opens))
        second = engine.submit(0, open_batch(4))
        verdicts = {v.sequence: v for s in (second, first) for v in engine.complete(s).verdicts}
    assert verdicts[2].status is VerdictStatus.INVALID and "assert" in verdicts[2].message
    for s in (1, 3, 4):
        expected = greedy_reference(target, prompts[s], 1, eos_token_id=None)
        assert verdicts[s].token_ids == tuple(expected)
    for row in (rows[0], rows[2]):
        [again] = engine.verify(0, VerifyBatch(9, (row,))).verdicts
        both = (verdicts[row.sequence].features, again.features)
        assert np.allclose(*(np.frombuffer(f.data, "f4") for f in both), atol=1e-4)


def test_an_error_belongs_to_its_batch(engine, monkeypatch):
    """A fault that was met while another batch was submitted, told to that one."""
    first = engine.submit(0, open_batch(1))
    with monkeypatch.context() as patch:
        patch.setattr(Forwards, "finish", lambda *_: {}["missing"])
        second = engine.submit(0, VerifyBatch(1, (VerifyRow(1, 0, PROMPT),)))
    assert engine.complete(second).verdicts[0].status is VerdictStatus.OK
    with pytest.raises(KeyError, match="missing"):
        engine.complete(first)
