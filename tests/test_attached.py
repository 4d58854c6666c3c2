"""Attached drafters and features: what the target tells is right, once per position, whatever the
rows looked like; a draft arrives with its verdict; a broken drafter costs nothing but its drafts.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from core.config import DrafterPoolConfig
from core.drafter import Draft, Drafter, DraftJob
from core.errors import ConfigError, InvalidRequestError
from core.features import FeatureTap
from core.model import RaggedModel, Row
from core.tensors import features_from_bytes, features_to_bytes
from core.types import (
    AttachedInfo,
    ModelIdentity,
    VerdictStatus,
    VerifyBatch,
    VerifyOpen,
    VerifyRow,
)
from drafter_service.drafters import attach_drafter, create_drafter
from orchestrator.attaching import attacher
from tests.tiny_models import VOCAB_SIZE, load_reference
from tests.verifying import GREEDY, Driver, make_prompts, model_config, oracle
from verifier_service.attached import Attached, AttachedDrafters
from verifier_service.engine import VerifierEngine

NAMES = ("hidden_states", "hidden_states:0", "kv:1")


class Listener(Drafter):
    """Needs hidden states, keeps all it is told, and drafts the last token over and over."""

    kind = "listener"
    identity = ModelIdentity("listener", 0)
    needs = ("hidden_states",)

    def __init__(self, is_broken: bool = False) -> None:
        self.told: dict[int, list[torch.Tensor]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.is_broken = is_broken

    def draft(self, jobs: Sequence[DraftJob]) -> list[Draft]:
        if self.is_broken:
            raise RuntimeError("no luck")
        for job in jobs:
            told = self.told.setdefault(job.sequence, [])
            if job.features is not None:
                assert job.features.position == sum(map(len, told)), "told twice or not at all"
                told.append(job.features.values)
            self.tokens[job.sequence] = list(job.token_ids)
        return [Draft((job.token_ids[-1],) * job.num_draft_tokens) for job in jobs]

    def close(self, sequence: int) -> None:
        self.told.pop(sequence, None)


@pytest.fixture(scope="module")
def endless(tiny) -> Path:
    return tiny("llama", eos_token_id=VOCAB_SIZE - 1)


@pytest.fixture
def model(endless) -> RaggedModel:
    return RaggedModel.load(model_config(endless, max_batch_tokens=16))


def beside(model: RaggedModel, drafter: Drafter) -> VerifierEngine:
    attached = Attached(AttachedInfo("near", drafter.kind, 4), drafter)
    return VerifierEngine(model, attached=AttachedDrafters(model, [attached]))


def expected_features(path: Path, tokens: Sequence[int]) -> torch.Tensor:
    """The library's own values of NAMES for these tokens."""
    reference = load_reference(path)
    with torch.no_grad():
        output = reference(torch.tensor([tokens]), output_hidden_states=True, use_cache=True)
    layer = output.past_key_values.layers[1]
    kv = [part[0].transpose(0, 1).flatten(1) for part in (layer.keys, layer.values)]
    return torch.cat([output.hidden_states[-1][0], output.hidden_states[1][0], *kv], dim=-1)


def test_a_tap_reads_what_the_library_computes(model, endless):
    """Rows of one forward would get each other's values, or another layer's."""
    tap = FeatureTap(model, NAMES)
    rows = [[5, 9, 200], [7, 7], [1, 2, 3, 4, 5, 6]]
    for sequence, tokens in enumerate(rows):
        model.open(sequence)
        model.forward([Row(sequence, 0, tokens[:1], 0)])
    model.forward([Row(s, 1, tokens[1:], 0) for s, tokens in enumerate(rows)])
    for values, tokens in zip(tap.read([0, 1, 2]), rows, strict=True):
        torch.testing.assert_close(values, expected_features(endless, tokens)[1:])
    tap.close()


@pytest.mark.parametrize("wrong_by", [0, 1])
def test_verdicts_carry_the_features_of_what_was_committed(model, endless, wrong_by):
    """Features of a rejected draft would be told, or those of an accepted one lost."""
    engine = VerifierEngine(model)
    prompt = make_prompts()[2]
    full = [*prompt, *_greedy(endless, prompt, 12)]
    driver = Driver(1, prompt, oracle(full, wrong_by), k=3)
    engine.verify(0, VerifyBatch(0, opens=(VerifyOpen(1, GREEDY, 64, features=NAMES),)))
    told: list[torch.Tensor] = []
    while len(driver.generated) < 8:
        row = driver.row()
        [verdict] = engine.verify(0, VerifyBatch(1, rows=(row,))).verdicts
        assert verdict.features is not None and verdict.features.position == row.position
        told.append(features_from_bytes(verdict.features))
        driver.apply(row, verdict)
    expected = expected_features(endless, driver.tokens[:-1])
    torch.testing.assert_close(torch.cat(told), expected, atol=1e-5, rtol=1e-4)


def test_an_attached_drafter_is_told_each_position_once(model, endless):
    """A repeated row, a long prompt or a rejection would tell a position twice or skip one."""
    listener = Listener()
    engine = beside(model, listener)
    prompt = make_prompts()[3]
    full = [*prompt, *_greedy(endless, prompt, 16)]
    driver = Driver(1, prompt, oracle(full), k=3)
    engine.verify(0, VerifyBatch(0, opens=(VerifyOpen(1, GREEDY, 64, attached="near"),)))
    first = VerifyRow(1, 0, tuple(prompt[:20]), partial=True)
    engine.verify(0, VerifyBatch(1, rows=(first,)))
    driver.position = 20
    for round_ in range(6):
        row = driver.row()
        wish = VerifyRow(
            1, row.position, row.new_token_ids, row.draft_token_ids, next_draft_tokens=round_ % 3
        )
        for _ in range(1 + round_ % 2):  # every other row is sent twice
            [verdict] = engine.verify(0, VerifyBatch(2, rows=(wish,))).verdicts
        assert verdict.next_draft_token_ids == verdict.token_ids[-1:] * (round_ % 3)
        driver.apply(row, verdict)
    [(key, told)] = listener.told.items()
    assert listener.tokens[key] == driver.tokens
    expected = expected_features(endless, driver.tokens[:-1])
    size = told[0].shape[1]
    torch.testing.assert_close(torch.cat(told), expected[:, :size], atol=1e-5, rtol=1e-4)
    engine.verify(0, VerifyBatch(3, closes=(1,)))
    assert not listener.told, "a closed sequence stays in the drafter"


def test_a_broken_attached_drafter_costs_only_its_drafts(model, endless):
    """Its exception would fail the batch, or every batch after it."""
    engine = beside(model, Listener(is_broken=True))
    prompt = make_prompts()[1]
    full = [*prompt, *_greedy(endless, prompt, 8)]
    engine.verify(0, VerifyBatch(0, opens=(VerifyOpen(1, GREEDY, 64, attached="near"),)))
    position, tokens = 0, list(prompt)
    for _ in range(4):
        row = VerifyRow(1, position, tuple(tokens[position:]), next_draft_tokens=2)
        [verdict] = engine.verify(0, VerifyBatch(1, rows=(row,))).verdicts
        assert verdict.status is VerdictStatus.OK and verdict.next_draft_token_ids == ()
        position, tokens = len(tokens), [*tokens, *verdict.token_ids]
    assert tokens == full[: len(tokens)]


def test_what_the_target_does_not_offer_is_refused_by_name(model):
    """A layer or a pool that does not exist would fail a verdict later, or be ignored."""
    engine = VerifierEngine(model)
    opens = (
        VerifyOpen(1, GREEDY, 64, features=("hidden_states:99",)),
        VerifyOpen(2, GREEDY, 64, features=("logits",)),
        VerifyOpen(3, GREEDY, 64, attached="nobody"),
    )
    failures = engine.verify(0, VerifyBatch(0, opens=opens)).open_failures
    assert [f.status for f in failures] == [VerdictStatus.INVALID] * 3
    for failure, name in zip(failures, ("'hidden_states:99'", "'logits'", "nobody"), strict=True):
        assert name in failure.message
    assert engine.num_open == 0 and model.cache.num_live == 0
    needy = Listener()
    needy.needs = ("kv:77",)
    with pytest.raises(InvalidRequestError, match="kv:77"):
        beside(model, needy)


def test_features_survive_their_bytes():
    """A type or a shape would change on the way, or wrong bytes pass as values."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        values = torch.randn(3, 5).to(dtype)
        features = features_to_bytes(7, values)
        assert features.position == 7 and torch.equal(features_from_bytes(features), values)
    for broken in (features_to_bytes(0, torch.randn(3, 5)), features_to_bytes(0, torch.zeros(2))):
        wrong = type(broken)(0, broken.num_tokens, broken.dtype, broken.data[:-1])
        with pytest.raises(InvalidRequestError, match="features"):
            features_from_bytes(wrong)


def test_a_kind_runs_where_it_can_and_says_so(model):
    """Prompt lookup beside the target would not draft, or a wrong placement pass in silence."""
    pool = DrafterPoolConfig(name="near", kind="ngram", attached=True)
    engine = VerifierEngine(model, attached=AttachedDrafters(model, attacher([pool])(model)))
    assert [each.kind for each in engine.info.attached] == ["ngram"]
    prompt = tuple([3, 1, 4, 1, 5, 9, 2, 6] * 3)
    row = VerifyRow(1, 0, prompt, next_draft_tokens=2)
    opens = (VerifyOpen(1, GREEDY, 64, attached="near"),)
    [verdict] = engine.verify(0, VerifyBatch(0, rows=(row,), opens=opens)).verdicts
    alone = create_drafter(DrafterPoolConfig(name="far", kind="ngram"))
    job = DraftJob(0, [*prompt, *verdict.token_ids], 2, GREEDY)
    assert verdict.next_draft_token_ids == alone.draft([job])[0].token_ids
    with pytest.raises(ConfigError, match=r"near\.attached: kind 'draft_model' only runs on"):
        attach_drafter(DrafterPoolConfig(name="near", kind="draft_model"), model)
    with pytest.raises(ConfigError, match="no drafter 'nothing'"):
        attach_drafter(DrafterPoolConfig(name="near", kind="nothing"), model)


def _greedy(path: Path, prompt: Sequence[int], count: int) -> list[int]:
    reference = load_reference(path)
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(reference(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]
