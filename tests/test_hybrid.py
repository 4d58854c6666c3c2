"""Prompt lookup and a model under one roof: who drafts, and what the model must not miss."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from core.config import DrafterPoolConfig, ModelConfig
from core.errors import ConfigError
from core.types import ModelIdentity, Rule, SamplingParams, SparseDistribution
from drafter_service import drafters as kinds
from drafter_service.drafters import attach_drafter, create_drafter
from drafter_service.drafters.base import Draft, Drafter, DraftJob, TargetFeatures
from drafter_service.drafters.hybrid import HybridDrafter
from tests.harness import pool, serving
from tests.policy import make_request
from tests.tiny_models import VOCAB_SIZE, TinyFactory, greedy_reference
from verifier_service.rules import Block, verdicts

GREEDY = SamplingParams()
REJECTION = SamplingParams(temperature=0.8, seed=1, rule=Rule.REJECTION)
ENSEMBLE = SamplingParams(temperature=0.8, seed=1, rule=Rule.ENSEMBLE, ensemble_weight=0.5)
COPIED = [1, 2, 3, 4, 9, 8, 7, 1, 2, 3, 4]  # the lookup says 9, 8, 7
FRESH = [10, 20, 30, 40, 50]  # the lookup has nothing to say


class Counter(Drafter):
    """Drafts 100 and keeps its jobs; checks what it is told against what it was told before."""

    kind = "counter"
    identity = ModelIdentity("counter", VOCAB_SIZE)
    has_distributions = True
    prefill_chunk = 7
    needs: tuple[str, ...] = ()

    def __init__(self, needs: tuple[str, ...] = ()) -> None:
        self.calls: list[list[DraftJob]] = []
        self.seen: dict[int, list[int]] = {}
        self.needs = needs

    def draft(self, jobs: Sequence[DraftJob]) -> list[Draft]:
        self.calls.append([replace(job, token_ids=list(job.token_ids)) for job in jobs])
        for job in jobs:
            known = self.seen.get(job.sequence, [])[: job.num_unchanged]
            assert list(job.token_ids[: job.num_unchanged]) == known, "told of tokens it never saw"
            self.seen[job.sequence] = list(job.token_ids)
        return [Draft((100,) * job.num_draft_tokens) for job in jobs]

    def close(self, sequence: int) -> None:
        self.seen.pop(sequence, None)


def hybrid(inner: Drafter, min_match: int = 3, max_inner_tokens: int = 0) -> HybridDrafter:
    options = {"min_ngram": min_match, "max_ngram": max(4, min_match)}
    lookup = create_drafter(DrafterPoolConfig(name="lookup", kind="ngram", options=options))
    return HybridDrafter(lookup, inner, max_inner_tokens)


def job(sequence: int, token_ids: Sequence[int], k: int = 3, **fields: Any) -> DraftJob:
    return DraftJob(sequence, token_ids, k, fields.pop("sampling", GREEDY), **fields)


def load(path: Path, kind: str = "hybrid", **options: Any) -> Drafter:
    model = ModelConfig(model=str(path), max_length=128, max_sequences=4, max_batch_tokens=64)
    return create_drafter(DrafterPoolConfig(name="pool", kind=kind, model=model, options=options))


def test_a_long_match_wins_and_the_model_drafts_elsewhere(tiny_llama: Path) -> None:
    """Each job gets exactly what the one of the two drafts for it alone; a match that is one token
    too short is not a long one."""
    jobs = [job(1, COPIED), job(2, FRESH), job(3, [1, 2, 3, 9, 5, 2, 3]), job(4, COPIED, 0)]
    mixed = load(tiny_llama).draft(jobs)
    assert mixed[0].token_ids == (9, 8, 7)
    assert mixed[1:] == load(tiny_llama, "draft_model").draft(jobs)[1:]
    shorter = load(tiny_llama, min_match=2).draft(jobs)
    assert shorter[2].token_ids == (9, 5, 2) and shorter[1] == mixed[1]


def test_copies_are_told_apart_and_asked_for_on_their_own() -> None:
    """A copy is free to make and right for long; a model's draft may not be worth its time."""
    inner = Counter()
    drafter = hybrid(inner)
    asked = [job(1, COPIED, 0, num_copy_tokens=3), job(2, FRESH, 0, num_copy_tokens=3)]
    copied, nothing = drafter.draft(asked)
    assert (copied.token_ids, copied.is_copy) == ((9, 8, 7), True)
    assert nothing == Draft() and not inner.calls, "nobody wants its drafts"
    short, own = drafter.draft([job(1, COPIED, 2), job(2, FRESH, 2)])
    assert short.is_copy and short.cut(1).is_copy and own == Draft((100, 100))


def test_a_long_draft_is_asked_of_the_lookup_only() -> None:
    """A copy goes on for long and costs nothing; a model asked for as much would pay for it."""
    inner = Counter()
    drafter = hybrid(inner, max_inner_tokens=2)
    copied, fresh, short = drafter.draft(
        [job(0, COPIED), job(1, FRESH, 5), job(2, [*FRESH, 60], 1)]
    )
    assert copied.token_ids == (9, 8, 7)
    assert fresh.token_ids == (100, 100) and short.token_ids == (100,)


def test_the_model_rests_while_the_lookup_drafts_and_catches_up_when_asked() -> None:
    """A forward for every copied token would cost what the lookup saves; a model that is told
    that it knows the tokens it slept through drafts from a stale cache."""
    inner = Counter()
    drafter = hybrid(inner)
    text = COPIED[:7]
    drafter.draft([job(1, text, 0)])
    known = len(text)
    for length in (4, 5, 6):
        text = (COPIED[:7] * 2)[: 7 + length]
        [draft] = drafter.draft([job(1, text, num_unchanged=known)])
        assert draft.token_ids[0] == COPIED[length]
        known = len(text)
    assert len(inner.calls) == 1
    text = [*text, 99]
    assert drafter.draft([job(1, text, num_unchanged=known)]) == [Draft((100,) * 3)]
    assert [each.num_unchanged for each in inner.calls[1]] == [7] and inner.seen[1] == text


def test_owed_tokens_are_paid_along_with_others_or_when_they_are_many() -> None:
    """Paid one by one they cost forwards; never paid, they hold up a batch at the worst time."""
    inner = Counter()
    drafter = hybrid(inner)
    drafter.draft([job(1, COPIED)])
    assert inner.calls == []
    drafts = drafter.draft([job(1, COPIED, num_unchanged=11), job(2, FRESH)])
    assert [draft.token_ids for draft in drafts] == [(9, 8, 7), (100,) * 3]
    assert [each.num_draft_tokens for each in inner.calls[0]] == [0, 3]
    text = list(COPIED)
    for _ in range(40):  # a copy of the copy, without end
        known = len(text)
        [draft] = drafter.draft([job(1, text, num_unchanged=known)])
        text += draft.token_ids
    catching_up = [len(each.token_ids) - each.num_unchanged for [each] in inner.calls[1:]]
    assert len(catching_up) == 1 and 64 < catching_up[0] < 70


@pytest.mark.parametrize("seed", range(3))
def test_what_is_unchanged_stays_true_through_rests_and_rewinds(seed: int) -> None:
    """`Counter` compares; one skipped minimum would leave wrong tokens in the model's cache."""
    rng = random.Random(seed)
    inner = Counter()
    drafter = hybrid(inner, min_match=2)
    texts: dict[int, list[int]] = {s: [rng.randrange(4) for _ in range(6)] for s in range(3)}
    unchanged = dict.fromkeys(texts, 0)
    for _ in range(150):
        busy = [s for s in texts if rng.random() < 0.7]
        jobs = [
            job(s, list(texts[s]), rng.choice([0, 1, 3]), num_unchanged=unchanged[s]) for s in busy
        ]
        drafter.draft(jobs)
        for s in busy:
            unchanged[s] = len(texts[s])
        for s, text in texts.items():
            del text[len(text) - rng.choice([0, 0, 0, 2]) :]
            unchanged[s] = min(unchanged[s], len(text))
            text.extend(rng.randrange(4) for _ in range(rng.randrange(1, 4)))
        if rng.random() < 0.1:
            drafter.close(0)
    assert 20 < len(inner.calls) < 150


def test_features_are_handed_on_at_once_even_where_the_lookup_drafts() -> None:
    """They are told once: kept back, they would be a gap."""
    inner = Counter(needs=("hidden_states",))
    drafter = hybrid(inner)
    features = TargetFeatures(0, torch.zeros(10, 2))
    assert drafter.needs == ("hidden_states",)
    assert drafter.draft([job(1, COPIED, features=features)])[0].token_ids == (9, 8, 7)
    [[told]] = inner.calls
    assert told.features is features and told.num_draft_tokens == 0


def test_a_copied_draft_says_where_its_mass_stands(tiny_llama: Path) -> None:
    """Without distributions the draft would be refused or counted as lacking them; with the
    model's, the text would be biased."""
    jobs = [job(1, COPIED, sampling=REJECTION), job(2, FRESH, sampling=REJECTION)]
    copied, made = load(tiny_llama).draft(jobs)
    assert copied.distributions == tuple(SparseDistribution((t,), (1.0,)) for t in (9, 8, 7))
    only_made = [job(1, COPIED, 0, sampling=REJECTION), jobs[1]]
    assert made == load(tiny_llama, "draft_model").draft(only_made)[1] and made.distributions
    logits = torch.randn(200 * 4, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    logits[:, [9, 8, 7]] += 4
    blocks = [
        [Block(REJECTION, at, copied.token_ids, q) for at in range(200)]
        for q in (copied.distributions, ())
    ]
    outcomes, expected = (verdicts(logits.clone(), each) for each in blocks)
    assert outcomes == expected
    assert {outcome.accepted for outcome in outcomes} == {0, 1, 2, 3}


def test_under_ensemble_the_model_always_drafts(tiny_llama: Path) -> None:
    """Its distribution is part of what the client asked for: one point would be mixed in."""
    jobs = [job(1, COPIED, sampling=ENSEMBLE)]
    drafts = load(tiny_llama).draft(jobs)
    assert drafts == load(tiny_llama, "draft_model").draft(jobs) and drafts[0].distributions


def test_it_is_as_limited_as_what_it_is_made_of(tiny_llama: Path) -> None:
    """Sequences beyond the model's slots or context, or a vocabulary that is not said, would fail
    in the middle of a request."""
    mixed, model = load(tiny_llama), load(tiny_llama, "draft_model")
    for name in ("identity", "max_length", "max_sequences", "prefill_chunk", "has_distributions"):
        assert getattr(mixed, name) == getattr(model, name)
    assert hybrid(Counter()).prefill_chunk == 7
    two_lookups = create_drafter(
        DrafterPoolConfig(name="pool", kind="hybrid", options={"kind": "ngram", "min_match": 5})
    )
    assert not two_lookups.has_distributions and two_lookups.identity.vocab_size == 0
    [draft] = two_lookups.draft([job(1, COPIED, sampling=REJECTION)])
    assert draft == Draft((9, 8, 7))  # four tokens match: the second lookup's


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_matches": 3}, r"drafter_pools\.pool\.options\.min_matches: .*'min_match'"),
        ({"lookup": {"min_ngram": 1}}, r"drafter_pools\.pool\.options: lookup\.min_ngram"),
        ({"lookup": {"top_q": 1}}, r"drafter_pools\.pool\.options\.lookup\.top_q: unknown"),
        ({"drafter": {"top_k": 1}}, r"drafter_pools\.pool\.options\.drafter\.top_k: .*'top_q'"),
        ({"kind": "oracle"}, r"drafter_pools\.pool\.options\.kind: no drafter 'oracle'"),
        ({"kind": "hybrid"}, r"drafter_pools\.pool\.options: kind 'hybrid' cannot be its own"),
        ({"min_match": 6, "lookup": {"max_ngram": 5}}, r"options\.lookup: min_ngram 6 is above"),
        ({}, r"drafter_pools\.pool\.model: kind 'draft_model' needs a model"),
    ],
)
def test_a_wrong_option_is_named_where_it_stands(options: dict[str, Any], message: str) -> None:
    """The inner kinds know nothing of where their options come from; the person does."""
    with pytest.raises(ConfigError, match=message):
        create_drafter(DrafterPoolConfig(name="pool", kind="hybrid", options=options))


def test_attached_its_inner_kind_is_attached_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of its own inside the verifier's, or an inner drafter without its target."""
    config = DrafterPoolConfig(
        name="near", kind="hybrid", attached=True, options={"kind": "counter"}
    )
    table = {**kinds.ATTACHED, "counter": (__name__, "attach_counter")}
    monkeypatch.setattr(kinds, "ATTACHED", table)
    drafter = attach_drafter(config, "the target")  # type: ignore[arg-type]
    assert drafter.needs == ("the target",)
    wrong = config.model_copy(update={"options": {}})
    with pytest.raises(ConfigError, match=r"near\.attached: kind 'draft_model' only runs on"):
        attach_drafter(wrong, "the target")  # type: ignore[arg-type]


def attach_counter(config: DrafterPoolConfig, target: Any) -> Drafter:
    """For the table of kinds."""
    return Counter(needs=(target,))


async def test_the_text_is_the_targets_own(tiny: TinyFactory) -> None:
    """Through the real services: copied and made drafts side by side, some accepted, some not."""
    target = tiny("llama", eos_token_id=300)
    other = tiny("llama", seed=7, num_hidden_layers=1)
    pools = [pool("copy", "hybrid", target, k=4), pool("other", "hybrid", other, k=4)]
    prompts = [tuple(COPIED * 3), tuple(FRESH), tuple(FRESH * 4)]
    async with serving(target, pools, adaptive_draft_length=False) as stack:
        for prompt in prompts:
            expected = greedy_reference(target, prompt, 24)
            for name in ("copy", "other"):
                ids, _, finished = await stack.run(make_request(prompt, 24, drafter=name))
                assert ids == expected and finished.stats.num_draft_tokens > 0
