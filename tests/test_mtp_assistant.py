"""Gemma 4's assistants draft what transformers' own generator drafts, beside the target and apart
from it, within the sliding window and past it, and in a batch what they draft alone.
"""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from core.config import ModelConfig
from core.drafter import Draft, DraftJob, MissingFeaturesError, TargetFeatures
from core.errors import ConfigError, ModelError
from core.features import FeatureTap
from core.model import RaggedModel, Row
from core.types import AttachedInfo, Rule, SamplingParams, VerifyBatch, VerifyOpen, VerifyRow
from drafter_service.drafters import attach_drafter, create_drafter
from tests.assisting import ACCEPTED, K, Pair, Session, play
from tests.tiny_gemma4 import (
    TARGETS,
    WINDOW,
    generate_assisted,
    load_repaired,
    reference_draft,
    save_assistant,
    save_target,
)
from tests.tiny_models import greedy_reference
from tests.verifying import GREEDY, model_config
from verifier_service.attached import Attached, AttachedDrafters
from verifier_service.engine import VerifierEngine

#: (kind of target, unified assistant, ordered embeddings)
PAIRS = [
    ("text", False, False),
    ("unshared", False, True),
    ("images", False, True),
    ("unified_text", True, False),
    ("unified", True, True),
]


@pytest.fixture(scope="module")
def make_pair(tmp_path_factory):
    made: dict[tuple, Pair] = {}

    def make(kind: str = "text", is_unified: bool = False, is_ordered: bool = False) -> Pair:
        key = (kind, is_unified, is_ordered)
        if key not in made:
            folder = tmp_path_factory.mktemp(kind)
            target = save_target(kind, folder / "target")
            assistant = save_assistant(
                folder / "assistant", is_unified=is_unified, is_ordered=is_ordered
            )
            made[key] = Pair(target, assistant)
        return made[key]

    return make


@pytest.mark.parametrize("kind", sorted(TARGETS))
def test_gemma_4_is_served_as_transformers_runs_it(kind, tmp_path):
    """Shared or equal K and V, experts, per-layer inputs or soft caps would change the text."""
    path = save_target(kind, tmp_path)
    prompt, count = [5, 9, 200, 31, 7], 3 * WINDOW
    expected = greedy_reference(load_repaired(path), prompt, count)
    assert len(set(expected)) > 8, "the text repeats itself; the test would show nothing"
    model = RaggedModel.load(model_config(path))
    model.open(1)
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        cached = model.length(1)
        logits = model.forward([Row(1, cached, tokens[cached:], 1)])
        tokens.append(int(logits.argmax()))
    assert tokens[len(prompt) :] == expected


@pytest.mark.parametrize(("kind", "is_unified", "is_ordered"), PAIRS)
def test_drafts_are_those_of_transformers_generator(make_pair, kind, is_unified, is_ordered):
    """Another layer's K/V, a window off by one, an unscaled embedding or a moving position would
    draft something else; so would K/V that were lost on the way to a drafter of its own."""
    pair = make_pair(kind, is_unified, is_ordered)
    target, assistant = load_repaired(pair.target), load_repaired(pair.assistant)
    prompt = [5, 9, 200, 31, 7]
    full = prompt + greedy_reference(target, prompt, 4 * WINDOW)
    model = pair.load()
    rounds = play(Session(model, pair.drafters(model)), 1, full, len(prompt))
    assert len(rounds) > 2 * len(ACCEPTED) and rounds[-1][0] > 3 * WINDOW
    for length, (near, far) in rounds:
        expected = tuple(reference_draft(target, assistant, full[:length], K))
        assert near.token_ids == expected, f"attached, at {length} tokens"
        assert far.token_ids == expected, f"on its own, at {length} tokens"
    assert len({near.token_ids for _, (near, _) in rounds}) > len(rounds) / 2


@pytest.mark.parametrize("drop_rejected", [True, False])
def test_drafts_are_those_of_transformers_generate(make_pair, drop_rejected):
    """The library's whole loop, not its generator alone: its caches, its masks, its positions.

    It leaves K/V of rejected tokens in view, so stock rounds are compared where there are none.
    Without them every round is, but for those past the window behind a draft that was rejected
    whole: its cache then holds one key fewer than its own mask would show.
    """
    pair = make_pair()
    target, assistant = load_repaired(pair.target), load_repaired(pair.assistant)
    prompt = [5, 9, 200, 31, 7]
    full = prompt + greedy_reference(target, prompt, 5 * WINDOW)
    theirs = generate_assisted(
        target, assistant, full, len(prompt), ACCEPTED, K, drop_rejected=drop_rejected
    )
    model = pair.load()
    ours = play(Session(model, pair.drafters(model)[:1]), 1, full, len(prompt))
    compared = 0
    for i, (length, expected) in enumerate(theirs):
        last = ACCEPTED[(i - 1) % len(ACCEPTED)] if i else K
        assert ours[i][0] == length
        if last == K or (drop_rejected and (last > 0 or length <= WINDOW)):
            assert list(ours[i][1][0].token_ids) == expected, f"round {i}, {length} tokens"
            compared += 1
    assert compared >= len(theirs) // 3 and len(theirs) > 20


def alone_and_together(
    pair: Pair, params: Sequence[SamplingParams], is_attached: bool
) -> tuple[list[list[Draft]], list[list[Draft]]]:
    """Two rounds of six ragged rows: each by itself, and all in one batch."""
    rng = random.Random(3)
    lengths, wanted = (1, 40, 7, 19, 64, 2), (4, 1, 6, 0, 3, 5)
    texts = [[rng.randrange(256) for _ in range(n + 4)] for n in lengths]

    def rounds(together: bool) -> list[list[Draft]]:
        model = pair.load(max_batch_tokens=256)
        session = Session(model, [pair.drafters(model)[0 if is_attached else 1]])
        found: list[list[Draft]] = []
        for round_ in range(2):
            rows = []
            for s, (text, n) in enumerate(zip(texts, lengths, strict=True)):
                block, kept = (text[:n], n) if round_ == 0 else (text[n : n + 3], 1 + s % 3)
                session.next[s] = text[n] if round_ == 0 else text[n + kept]
                rows.append((s, block, kept, wanted[s - round_], params[s]))
            order = [[3, 0, 5, 1, 4, 2], [2, 5, 3, 4, 0, 1]][round_]
            if together:
                [drafts] = session.round([rows[i] for i in order])
            else:
                drafts = [session.round([rows[i]])[0][0] for i in order]
            found.append(drafts)
            for draft, i in zip(drafts, order, strict=True):
                assert len(draft.token_ids) == wanted[i - round_]
        return found

    return rounds(together=False), rounds(together=True)


@pytest.mark.parametrize("is_attached", [True, False])
@pytest.mark.parametrize("is_ordered", [False, True])
def test_a_row_drafts_in_a_batch_what_it_drafts_alone(make_pair, is_attached, is_ordered):
    """Rows would see each other's K/V, keep another's hidden state when rows drop out, or share
    the least logit of ordered embeddings, which sampling notices."""
    pair = make_pair("text", False, is_ordered)
    sampled = SamplingParams(temperature=1.5, seed=5, rule=Rule.COUPLED)
    params = [
        GREEDY,
        sampled,
        replace(sampled, rule=Rule.REJECTION),
        GREEDY,
        replace(sampled, seed=6, rule=Rule.REJECTION),
        replace(sampled, seed=7),
    ]
    alone, together = alone_and_together(pair, params, is_attached)
    for ours, theirs in zip(alone, together, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one.token_ids == other.token_ids
            assert len(one.distributions) in (0, len(one.token_ids))
            for p, q in zip(one.distributions, other.distributions, strict=True):
                assert p.token_ids == q.token_ids
    assert any(draft.distributions for draft in together[0])


def test_an_attached_assistant_serves_a_text(make_pair):
    """Beside the target in the verifier, its drafts would not fit what was committed."""
    pair = make_pair()
    full = greedy_reference(load_repaired(pair.target), [5, 9, 200], 40)
    model = pair.load()
    drafter = attach_drafter(pair.pool(True), model)
    attached = Attached(AttachedInfo("near", drafter.kind, K), drafter)
    engine = VerifierEngine(model, attached=AttachedDrafters(model, [attached]))
    engine.verify(0, VerifyBatch(0, opens=(VerifyOpen(1, GREEDY, 64, attached="near"),)))
    tokens, position, draft = [5, 9, 200], 0, ()
    while len(tokens) < 40:
        row = VerifyRow(1, position, tuple(tokens[position:]), draft, next_draft_tokens=K)
        [verdict] = engine.verify(0, VerifyBatch(1, rows=(row,))).verdicts
        position = len(tokens) + verdict.accepted
        tokens += verdict.token_ids
        draft = verdict.next_draft_token_ids
        assert len(draft) == K
    assert tokens[3:] == full[: len(tokens) - 3]
    engine.verify(0, VerifyBatch(2, closes=(1,)))
    with pytest.raises(MissingFeaturesError):
        drafter.draft([DraftJob(1, tokens, 1, GREEDY)])


def test_a_gap_is_told_and_position_0_begins_anew(make_pair):
    """A lost or repeated increment would be attended to as if it were the text."""
    pair = make_pair()
    model = pair.load()
    drafter = create_drafter(pair.pool(False, num_assistant_tokens=2))
    text = [random.Random(1).randrange(256) for _ in range(12)]
    tap = FeatureTap(model, drafter.needs)
    model.open(1)
    model.forward([Row(1, 0, text[:-1], 0)])
    [values] = tap.read([1])

    def draft(position: int, stop: int, tokens: Sequence[int] = text, wanted: int = 9) -> Draft:
        told = TargetFeatures(position, values[position:stop])
        return drafter.draft([DraftJob(1, tokens, wanted, GREEDY, 0, told)])[0]

    whole = draft(0, 11)
    assert len(whole.token_ids) == 2, "the option's longest draft"
    with pytest.raises(MissingFeaturesError, match="5"):
        draft(5, 11)
    with pytest.raises(MissingFeaturesError):
        draft(0, 9)
    assert draft(9, 11) == whole, "what was told before the gap is still true"
    assert draft(0, 4, text[:5], wanted=0) == Draft()
    assert draft(4, 11) == whole, "a prompt may come in chunks"
    for _ in range(12):  # more than the cache has room for, if it grew
        assert draft(0, 11) == whole
    drafter.close(1)
    with pytest.raises(MissingFeaturesError, match="0 of 11"):
        drafter.draft([DraftJob(1, text, 2, GREEDY)])


def test_in_bf16_a_row_drafts_in_a_batch_what_it_drafts_alone(make_pair):
    """Packed weights or padded groups would round otherwise in another batch."""
    pair = replace(make_pair("text", False, True), dtype="bfloat16")
    alone, together = alone_and_together(pair, [GREEDY] * 6, is_attached=True)
    assert alone == together


def test_the_checkpoint_says_how_many_tokens_are_worth_drafting(make_pair, tmp_path):
    """Every draft would be as long as the pool allows, whatever its authors found."""
    pair = replace(make_pair(), assistant=save_assistant(tmp_path, num_assistant_tokens=2))
    model = pair.load()
    session = Session(model, [attach_drafter(pair.pool(True), model)])
    session.next = {1: 4}
    [[draft]] = session.round([(1, [1, 2, 3], 3, 9, GREEDY)])
    assert len(draft.token_ids) == 2


def test_what_does_not_fit_is_refused_by_both_names(make_pair, tiny, tmp_path):
    """A wrong pair would draft noise, or fail in mid-flight."""
    pair = make_pair()
    model = pair.load()
    llama = tiny("llama")
    other = RaggedModel.load(model_config(llama))
    with pytest.raises(ConfigError, match=rf"near.*Gemma 4.*{llama}.*llama"):
        attach_drafter(pair.pool(True), other)
    with pytest.raises(ConfigError, match=rf"far.*Gemma 4.*{llama}.*llama"):
        create_drafter(replace(pair, target=llama).pool(False))
    with pytest.raises(ConfigError, match=rf"needs a checkpoint.*{llama}.*llama"):
        attach_drafter(replace(pair, assistant=llama).pool(True), model)
    wrong = {
        "hidden states of 48 against 32": {"backbone": 48},
        "token ids of 300 against 260": {"vocab_size": 300},
        r"full_attention, of \(2, 32\) against \(2, 16\)": {"global_head_dim": 32},
        r"sliding_attention, of \(1, 8\) against \(2, 8\)": {"num_key_value_heads": 1},
    }
    for number, (message, fields) in enumerate(wrong.items()):
        path = save_assistant(tmp_path / str(number), **fields)
        with pytest.raises(ConfigError, match=rf"{path}.*{pair.target}.*{message}"):
            attach_drafter(replace(pair, assistant=path).pool(True), model)
    pool = pair.pool(True)
    with pytest.raises(ConfigError, match="needs a model"):
        attach_drafter(pool.model_copy(update={"model": None}), model)
    with pytest.raises(ConfigError, match=r"options\.target"):
        create_drafter(pool)
    nowhere = ModelConfig(model=str(tmp_path / "nowhere"))
    with pytest.raises(ModelError, match="nowhere"):
        attach_drafter(pool.model_copy(update={"model": nowhere}), model)
