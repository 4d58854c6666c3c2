"""The contract of a drafter, run over every registered kind.

The truth a drafter is compared with is itself without memory: an instance that is told to close
every sequence before each call. Whatever it remembers may change its speed only.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from core.config import NEVER_AHEAD, DrafterPoolConfig, ModelConfig
from core.drafter import AheadJob
from core.errors import ConfigError
from core.types import Rule, SamplingParams
from drafter_service.drafters import REMOTE, create_drafter
from drafter_service.drafters.base import Draft, Drafter, DraftJob
from tests.tiny_models import VOCAB_SIZE

GREEDY = SamplingParams()
MAX_SEQUENCES = 6
Make = Callable[[], Drafter]


#: Kinds that need the target's features: what they are told is part of the contract, so their own
#: files run it with a target beside them.
NEEDY = {"mtp_assistant", "mtp_layers"} & set(REMOTE)


def options(kind: str, model: Path) -> dict[str, object]:
    """What a kind cannot do without."""
    return {"early_exit": {"num_layers": 1}, "cross_tokenizer": {"target": str(model)}}.get(
        kind, {}
    )


@pytest.fixture(params=sorted(set(REMOTE) - NEEDY))
def make(request: pytest.FixtureRequest, tiny_llama: Path) -> Make:
    """Makes drafters of one kind; those that need a model get a tiny one, read in small chunks."""
    model = ModelConfig(
        model=str(tiny_llama), max_length=256, max_sequences=MAX_SEQUENCES, max_batch_tokens=16
    )

    def create() -> Drafter:
        config = DrafterPoolConfig(
            name="pool",
            kind=request.param,
            model=model,
            options=options(request.param, tiny_llama),
        )
        return create_drafter(config)

    return create


def rejection(seed: int, temperature: float = 0.8) -> SamplingParams:
    return SamplingParams(
        temperature=temperature, top_k=40, seed=seed, rule=Rule.REJECTION, repetition_penalty=1.5
    )


def coupled(seed: int) -> SamplingParams:
    return SamplingParams(temperature=0.8, top_k=40, seed=seed, rule=Rule.COUPLED)


def prompt(seed: int, length: int) -> list[int]:
    """Tokens that repeat themselves, so that prompt lookup has something to find."""
    rng = random.Random(seed)
    motif = [rng.randrange(VOCAB_SIZE) for _ in range(7)]
    return [
        motif[i % 7] if rng.random() < 0.8 else rng.randrange(VOCAB_SIZE) for i in range(length)
    ]


def job(
    sequence: int,
    token_ids: Sequence[int],
    k: int = 4,
    sampling: SamplingParams = GREEDY,
    unchanged: int = 0,
) -> DraftJob:
    return DraftJob(sequence, token_ids, k, sampling, unchanged)


def forgetful(drafter: Drafter, jobs: Sequence[DraftJob]) -> list[Draft]:
    """Each job drafted alone, by a drafter that remembers nothing of it."""
    drafts = []
    for each in jobs:
        drafter.close(each.sequence)
        bare = DraftJob(each.sequence, each.token_ids, each.num_draft_tokens, each.sampling)
        drafts += drafter.draft([bare])
        drafter.close(each.sequence)
    return drafts


def ragged_jobs() -> list[DraftJob]:
    return [
        job(1, prompt(1, 1), 4),
        job(2, prompt(2, 40), 3),
        job(3, prompt(3, 17), 0),
        job(4, prompt(4, 33), 1, coupled(4)),
        job(5, prompt(5, 90), 6, coupled(5)),
        job(6, prompt(6, 8), 5),
    ]


def test_a_ragged_batch_drafts_what_each_sequence_drafts_alone(make: Make) -> None:
    """A padded or misplaced row would change what its batch-mates draft."""
    drafter = make()
    drafts = drafter.draft(ragged_jobs())
    assert drafts == forgetful(make(), ragged_jobs())
    assert any(draft.token_ids for draft in drafts)


def test_drafts_are_valid_and_no_longer_than_wanted(make: Make) -> None:
    """An id outside the vocabulary, or one draft too many, breaks the verify row."""
    drafter = make()
    for each, drafted in zip(ragged_jobs(), drafter.draft(ragged_jobs()), strict=True):
        assert len(drafted.token_ids) <= each.num_draft_tokens and drafted.distributions == ()
        assert all(0 <= token_id < VOCAB_SIZE for token_id in drafted.token_ids)


def test_distributions_come_with_every_token_or_with_none(make: Make) -> None:
    """The verifier takes a draft without them for a deterministic one; a kind that says it has
    them and forgets them would bias the text, and be refused under ENSEMBLE."""
    drafter = make()
    rules = [rejection(1), rejection(2), rejection(3), coupled(4), GREEDY, rejection(6)]
    jobs = [replace(each, sampling=p) for each, p in zip(ragged_jobs(), rules, strict=True)]
    drafts, alone = drafter.draft(jobs), forgetful(make(), jobs)
    assert [draft.token_ids for draft in drafts] == [draft.token_ids for draft in alone]
    for each, drafted in zip(jobs, drafts, strict=True):
        needed = drafter.has_distributions and each.sampling.rule.needs_distributions
        assert len(drafted.distributions) == (len(drafted.token_ids) if needed else 0)
        for token_id, q in zip(drafted.token_ids, drafted.distributions, strict=False):
            assert token_id in q.token_ids and max(q.token_ids) < VOCAB_SIZE
            assert sum(q.probabilities) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_memory_changes_nothing_through_accepts_and_rejections(make: Make, seed: int) -> None:
    """Rounds of random verdicts: all accepted, some, none; pauses; repeated and rewound commits.
    A cache that is one token off drafts something else from then on."""
    rng = random.Random(seed)
    drafter, oracle, penalised = make(), make(), rejection(0, temperature=0.0)
    texts = {sequence: prompt(sequence + 10 * seed, 5 + 9 * sequence) for sequence in range(4)}
    unchanged = dict.fromkeys(texts, 0)
    last: dict[int, tuple[int, ...]] = dict.fromkeys(texts, ())
    for _ in range(12):
        busy = [sequence for sequence in texts if rng.random() < 0.8]
        jobs = [
            job(
                s,
                texts[s],
                rng.choice([0, 1, 3, 5]),
                (GREEDY, coupled(s), penalised, rejection(s))[s],
                unchanged[s] if rng.random() < 0.7 else 0,
            )
            for s in busy
        ]
        drafts = drafter.draft(jobs)
        ids = [draft.token_ids for draft in drafts]
        assert ids == [draft.token_ids for draft in forgetful(oracle, jobs)]
        for s, drafted in zip(busy, drafts, strict=True):
            unchanged[s], last[s] = len(texts[s]), drafted.token_ids
        for s in texts:  # the target goes on, also with those that were not asked for
            accepted = last[s][: rng.choice([0, 1, len(last[s])])]
            rewound = rng.choice([0, 0, 0, 2])
            del texts[s][len(texts[s]) - rewound :]
            unchanged[s] = min(unchanged[s], len(texts[s]))
            texts[s] += [*accepted, rng.randrange(VOCAB_SIZE)]
            last[s] = ()


@pytest.mark.parametrize("sampling", [GREEDY, coupled(3)])
def test_what_is_drafted_ahead_is_what_would_be_drafted(
    make: Make, sampling: SamplingParams
) -> None:
    """A branch that differs from the draft for its outcome is a worse draft, and the one that is
    kept is gone on with."""
    drafter, tokens = make(), prompt(6, 30)
    if not drafter.can_draft_ahead:
        assert drafter.kind in NEVER_AHEAD, "its max_branches are refused by no config"
        pytest.skip("cannot draft ahead")
    assert drafter.kind not in NEVER_AHEAD
    [draft] = drafter.draft([replace(job(1, tokens, 4, sampling), num_guesses=3)])
    ahead = drafter.begin_ahead(
        AheadJob(1, tokens, draft.token_ids, 3, sampling, [2, 1, 1, 1, 2], num_guesses=3)
    )
    while not ahead.is_done:
        drafter.advance([ahead])
    assert len(ahead.branches) == 7
    for branch in ahead.branches:
        outcome = [*tokens, *draft.token_ids[: branch.accepted], branch.token]
        [alone] = forgetful(make(), [job(1, outcome, 3, sampling)])
        assert branch.draft_token_ids == alone.token_ids
    assert ahead.keep(branch.accepted, branch.token)
    again = [job(1, outcome, 3, sampling), job(2, prompt(2, 9), 2)]
    assert drafter.draft(again) == forgetful(make(), again)


def test_catching_up_after_many_missed_tokens(make: Make) -> None:
    """A drafter that was not asked for a while must not draft from its old state."""
    drafter = make()
    tokens = prompt(3, 20)
    drafter.draft([job(1, tokens)])
    unchanged = len(tokens)
    tokens = tokens + prompt(4, 100)
    late = [job(1, tokens, 4, unchanged=unchanged)]
    assert drafter.draft(late) == forgetful(make(), late)


def test_a_prompt_read_in_chunks_drafts_the_same(make: Make) -> None:
    """The engine cuts long prompts; the pieces must be worth the whole."""
    drafter, tokens = make(), prompt(5, 70)
    for end in (10, 33, 70):
        assert drafter.draft([job(1, tokens[:end], 0)]) == [Draft()]
    assert drafter.draft([job(1, tokens, 5, unchanged=70)]) == make().draft([job(1, tokens, 5)])


def test_close_frees_and_unknown_closes_are_ignored(make: Make) -> None:
    """A slot that leaks ends the drafter's service after a few hundred requests."""
    drafter = make()
    assert drafter.max_sequences in (0, MAX_SEQUENCES)
    for start in range(0, 4 * MAX_SEQUENCES, MAX_SEQUENCES):
        handles = range(start, start + MAX_SEQUENCES)
        drafter.draft([job(handle, prompt(handle, 12)) for handle in handles])
        for handle in handles:
            drafter.close(handle)
            drafter.close(handle)


def test_the_same_seed_drafts_the_same(make: Make) -> None:
    """Coupling needs the drafter's noise to be a function of seed and position alone."""
    jobs = [job(1, prompt(1, 30), 6, coupled(11)), job(2, prompt(1, 30), 6, coupled(12))]
    first, second = make().draft(jobs), make().draft(jobs[::-1])[::-1]
    assert first == second


def test_it_says_what_it_is(make: Make, request: pytest.FixtureRequest) -> None:
    """The handshake compares these; a kind under another name cannot be configured."""
    drafter = make()
    assert drafter.kind in REMOTE and drafter.kind in request.node.name
    assert drafter.identity.model
    assert (drafter.identity.vocab_size == 0) == (drafter.identity.tokenizer_fingerprint == "")
    assert drafter.max_length >= 0 and drafter.prefill_chunk >= 0


def test_an_unknown_option_is_refused(make: Make, request: pytest.FixtureRequest) -> None:
    """Every kind checks its options; the error names the key."""
    kind = request.node.callspec.params["make"]
    config = DrafterPoolConfig(name="pool", kind=kind, options={"no_such": 1})
    with pytest.raises(ConfigError, match=r"drafter_pools\.pool\.options\.no_such: .*did you mean"):
        create_drafter(config)


def test_an_unknown_kind_is_refused() -> None:
    """The error lists the kinds there are."""
    with pytest.raises(ConfigError, match=r"drafter_pools\.pool\.kind: .*draft_model, .*ngram"):
        create_drafter(DrafterPoolConfig(name="pool", kind="oracle"))
