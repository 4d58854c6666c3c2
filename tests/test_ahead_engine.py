"""The drafter's engine with blocks at the target: the order of its work, and what it answers."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from core.config import ModelConfig
from core.model import RaggedModel
from core.types import (
    DraftClose,
    DraftCommands,
    DraftOpen,
    DraftSent,
    NeedOpenReason,
    Rule,
    SamplingParams,
)
from drafter_service.drafters.draft_model import DraftModelDrafter
from drafter_service.engine import DrafterEngine
from tests.ahead_peer import COUPLED, GREEDY, K, Noting, Oracle, Peer, drain, step, timeless
from tests.tiny_models import VOCAB_SIZE


@pytest.fixture(scope="module")
def model(tiny_drafter: Path) -> RaggedModel:
    limits = {"max_length": 96, "max_sequences": 3, "max_batch_tokens": 64}
    return RaggedModel.load(ModelConfig(model=str(tiny_drafter), **limits))


@pytest.fixture(scope="module")
def oracle(tiny_drafter: Path) -> Oracle:
    limits = {"max_length": 96, "max_sequences": 1, "max_batch_tokens": 64}
    return Oracle(RaggedModel.load(ModelConfig(model=str(tiny_drafter), **limits)))


@pytest.fixture
def drafter(model: RaggedModel) -> Noting:
    return Noting(model)


@pytest.fixture
def engine(drafter: Noting) -> Iterator[DrafterEngine]:
    engine = timeless(drafter)
    yield engine
    engine.close_stream(0)


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED])
def test_rounds_that_were_foreseen_need_no_draft(
    engine: DrafterEngine, drafter: Noting, oracle: Oracle, sampling: SamplingParams
) -> None:
    """Breaks when a branch that was taken is drafted again, is not gone on from, or when the known
    draft of a round is not the branch of the last one."""
    peer = Peer(engine, oracle, 1, sampling)
    drain(engine, peer)
    for round_ in range(6):
        peer.send(K)
        drain(engine, peer)
        assert len(peer.branches) == 6 and all(len(b) == K for b in peer.branches.values())
        drafter.calls.clear()
        accepted, token = sorted(peer.branches)[-1 if round_ % 2 else 0]
        assert peer.commit(accepted, token, wanted=0)
        assert not engine.has_work
    assert not [call for call in drafter.calls if call.startswith("draft")]


def test_a_wanted_branch_is_sent_at_once(
    engine: DrafterEngine, drafter: Noting, oracle: Oracle
) -> None:
    """The plan may have crossed the commit: the answer must come all the same, without work if it
    is finished, and with what is missing if it is not."""
    peer = Peer(engine, oracle, 1, GREEDY)
    drain(engine, peer)
    peer.send(K)
    drain(engine, peer)
    drafter.calls.clear()
    assert peer.commit(*min(peer.branches), wanted=2)
    drain(engine, peer)
    assert peer.draft is not None and len(peer.draft) == 2 and drafter.calls == []
    peer.send(2)
    step(engine, peer)
    likeliest = oracle.draft([*peer.tokens, *peer.block], GREEDY)[0]
    assert not peer.commit(2, likeliest)
    drain(engine, peer)
    assert peer.draft is not None and len(peer.draft) == K
    assert drafter.calls == ["begin 2", "advance 1", "draft [3]"]


def test_what_is_wanted_goes_before_what_is_foreseen(
    engine: DrafterEngine, drafter: Noting, oracle: Oracle
) -> None:
    """A row that waits for its draft must not wait for the branches of others, and a step ahead is
    one forward long, so that it never waits for more."""
    one, two = Peer(engine, oracle, 1, GREEDY), Peer(engine, oracle, 2, COUPLED)
    drain(engine, one, two)
    one.send(K)
    two.send(1)
    drafter.calls.clear()
    step(engine, one, two)
    step(engine, one, two)
    two.commit(0, 200)
    step(engine, one, two)
    assert drafter.calls == ["begin 3", "begin 1", "advance 2", "advance 2", "draft [3]"]
    assert two.draft is not None and len(two.draft) == K
    drain(engine, one, two)
    assert set(drafter.calls[5:]) == {"advance 1"} and len(one.branches) == 6


def test_a_block_at_the_target_needs_no_draft_before_it(
    engine: DrafterEngine, drafter: Noting, oracle: Oracle
) -> None:
    """A draft that was not made in time is not made late; its guesses are what may come."""
    peer = Peer(engine, oracle, 1, GREEDY)
    peer.send(0)
    drain(engine, peer)
    assert not [call for call in drafter.calls if call.startswith("draft [3")]
    likeliest = oracle.draft(peer.tokens, GREEDY)[0]
    assert (0, likeliest) in peer.branches and len(peer.branches) == 6


def test_what_cannot_be_foreseen_is_not(
    engine: DrafterEngine, drafter: Noting, oracle: Oracle
) -> None:
    """No branches for rules with distributions, for sequences that did not ask for them, for a
    block longer than any draft that was given, and for one that is decided already."""
    peer = Peer(engine, oracle, 1, GREEDY)
    drain(engine, peer)
    for sent in (DraftSent(1, 1, 5, K + 1, K), DraftSent(1, 1, 4, 0, K), DraftSent(1, 1, 5, K, 0)):
        engine.apply(0, DraftCommands(sents=(sent,)))
        assert not engine.has_work
    peer.reopen(K, max_branches=0)
    drain(engine, peer)
    peer.send(K)
    assert not engine.has_work
    peer.sampling = replace(COUPLED, rule=Rule.REJECTION)
    peer.reopen(0)
    drain(engine, peer)
    peer.send(0)
    assert not engine.has_work
    ahead_of_us = DraftSent(1, peer.generation, 6, 0, K)
    engine.apply(0, DraftCommands(sents=(ahead_of_us,)))
    [(_, frame)] = engine.step()
    assert [need.reason for need in frame.need_opens] == [NeedOpenReason.GAP]


def test_a_commit_of_another_block_keeps_no_branch(engine: DrafterEngine, oracle: Oracle) -> None:
    """The orchestrator may have sent another block than it said, or take tokens back: a branch of
    the same name would be gone on with behind a text it was not drafted for."""
    for is_rewound in (False, True):
        peer = Peer(engine, oracle, 1, GREEDY)
        drain(engine, peer)
        peer.send(K)
        drain(engine, peer)
        accepted, token = max(peer.branches)
        peer.branches.clear()
        if is_rewound:
            peer.tokens.pop()
        else:
            peer.block = ((peer.block or ())[0] ^ 1, *(peer.block or ())[1:])
        peer.commit(accepted, token)
        drain(engine, peer)
        peer.send(K)
        drain(engine, peer)
        assert len(peer.branches) == 6
        engine.apply(0, DraftCommands(closes=(DraftClose(1, peer.generation),)))


def test_a_drafter_that_fails_ahead_still_drafts(
    engine: DrafterEngine, drafter: Noting, oracle: Oracle
) -> None:
    """Drafting ahead is an extra: its failure costs the branches, and the cache is made anew."""
    peer = Peer(engine, oracle, 1, COUPLED)
    drain(engine, peer)
    peer.send(K)
    step(engine, peer)
    drafter.is_broken = True
    with structlog.testing.capture_logs() as logs:
        drain(engine, peer)
    drafter.is_broken = False
    assert [entry["event"] for entry in logs] == ["draft_ahead_failed"]
    assert peer.branches == {}
    peer.commit(2, 17)
    drain(engine, peer)
    peer.send(K)
    drain(engine, peer)
    assert len(peer.branches) == 6


def test_a_long_prompt_is_read_before_its_outcomes(model: RaggedModel, oracle: Oracle) -> None:
    """A step ahead must stay short, and the prompts of others must not starve behind it."""
    drafter = Noting(model)
    drafter._prefill_chunk = 16
    engine = timeless(drafter)
    peer = Peer(engine, oracle, 1, GREEDY)
    drain(engine, peer)
    long = DraftOpen(7, 1, tuple(range(60)), GREEDY, K, 0, max_branches=4)
    sent = DraftSent(7, 1, 60, 0, K)
    drafter.calls.clear()
    engine.apply(0, DraftCommands(opens=(long,), sents=(sent,)))
    peer.send(K)
    while engine.has_work:
        engine.step()
    begins = [i for i, call in enumerate(drafter.calls) if call == "begin 0"]
    reads = [i for i, call in enumerate(drafter.calls) if call == "draft [0]"]
    assert len(begins) == 1 and len([i for i in reads if i < begins[0]]) >= 2
    engine.close_stream(0)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_no_schedule_gives_a_branch_that_is_wrong(
    model: RaggedModel, oracle: Oracle, data: st.DataObject
) -> None:
    """Blocks sent, decided, repeated, taken from elsewhere, closed and opened again while branches
    are in the making; every plan is compared with a drafter that knows nothing but the text."""
    engine = timeless(DraftModelDrafter(model))
    try:
        peers = [Peer(engine, oracle, 1, GREEDY), Peer(engine, oracle, 2, COUPLED)]
        for _ in range(data.draw(st.integers(5, 30))):
            peer = data.draw(st.sampled_from(peers))
            action = data.draw(
                st.sampled_from(["step", "step", "step", "go", "go", "drain", "reopen"])
            )
            if action == "step":
                step(engine, *peers)
            elif action == "drain":
                drain(engine, *peers)
            elif action == "reopen" or len(peer.tokens) > 80:
                if data.draw(st.booleans()):
                    close = DraftClose(peer.number, peer.generation)
                    engine.apply(0, DraftCommands(closes=(close,)))
                peer.reopen(data.draw(st.integers(0, K)))
            elif peer.block is None:
                is_own = data.draw(st.integers(0, 5)) > 0
                longest = len(peer.draft or ()) if is_own else K
                num_tokens = data.draw(st.sampled_from([longest, longest, longest // 2, 0]))
                peer.send(num_tokens, data.draw(st.integers(0, K)), is_own)
            else:
                accepted = data.draw(st.integers(0, len(peer.block)))
                outcome = [*peer.tokens, *peer.block[:accepted]]
                likely = [oracle.draft(outcome, peer.sampling)[0]]
                likely += [token for j, token in peer.branches if j == accepted]
                token = data.draw(st.sampled_from([*likely, *likely, 200, VOCAB_SIZE - 1]))
                is_there = (accepted, token) in peer.branches
                wanted = data.draw(st.sampled_from([0, K] if is_there else [K, K, 1, 0]))
                peer.commit(accepted, token, wanted, data.draw(st.sampled_from([1, 1, 1, 2])))
        drain(engine, *peers)
        model.cache.check()
    finally:
        engine.close_stream(0)
