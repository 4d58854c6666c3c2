"""Drafting ahead with a model: every branch is what a fresh drafter says once its outcome came."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from core.config import ModelConfig
from core.drafter import Ahead, AheadJob, DraftJob
from core.model import RaggedModel, Row
from core.types import Rule, SamplingParams
from drafter_service.drafters.draft_model import DraftModelDrafter
from tests.tiny_models import VOCAB_SIZE

GREEDY = SamplingParams()
COUPLED = SamplingParams(0.9, top_p=0.95, seed=5, rule=Rule.COUPLED)
PENALTIES = {
    "repetition_penalty": 1.4,
    "frequency_penalty": 0.3,
    "no_repeat_ngram_size": 2,
    "num_prompt_tokens": 3,
}
SAMPLINGS = {
    "greedy": GREEDY,
    "coupled": COUPLED,
    "greedy, penalised": replace(GREEDY, **PENALTIES),
    "coupled, penalised": replace(COUPLED, **PENALTIES),
}


class CountingModel:
    """A RaggedModel that notes the tokens of every forward."""

    def __init__(self, model: RaggedModel) -> None:
        self._model = model
        self.forwards: list[list[int]] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)

    def forward(self, rows: Sequence[Row]) -> torch.Tensor:
        self.forwards.append([len(row.token_ids) for row in rows])
        return self._model.forward(rows)


def make(path: Path, **options: int) -> tuple[DraftModelDrafter, CountingModel]:
    limits = {"max_length": 128, "max_sequences": 4, "max_batch_tokens": 64, **options}
    model = CountingModel(RaggedModel.load(ModelConfig(model=str(path), **limits)))
    return DraftModelDrafter(model), model  # type: ignore[arg-type]


@pytest.fixture(params=SAMPLINGS)
def sampling(request: pytest.FixtureRequest) -> SamplingParams:
    return SAMPLINGS[request.param]


@pytest.fixture(scope="module")
def oracle(tiny_llama: Path) -> Iterator[DraftModelDrafter]:
    yield make(tiny_llama)[0]


def fresh(
    oracle: DraftModelDrafter, tokens: Sequence[int], k: int, sampling: SamplingParams
) -> tuple[int, ...]:
    """What a drafter without memory drafts."""
    oracle.close(99)
    [draft] = oracle.draft([DraftJob(99, list(tokens), k, sampling)])
    return draft.token_ids


def text(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(length)]


def draft(
    drafter: DraftModelDrafter, sequence: int, tokens: list[int], k: int, sampling: SamplingParams
) -> tuple[int, ...]:
    [made] = drafter.draft([DraftJob(sequence, tokens, k, sampling, num_guesses=4)])
    return made.token_ids


def begin(
    drafter: DraftModelDrafter,
    sequence: int,
    tokens: list[int],
    block: Sequence[int],
    k: int,
    sampling: SamplingParams,
    fan_out: Sequence[int],
) -> Ahead:
    job = AheadJob(sequence, tokens, block, k, sampling, fan_out, num_guesses=4)
    return drafter.begin_ahead(job)


def finish(drafter: DraftModelDrafter, aheads: Sequence[Ahead]) -> None:
    while going := [ahead for ahead in aheads if not ahead.is_done]:
        drafter.advance(going)


def check(
    oracle: DraftModelDrafter,
    ahead: Ahead,
    tokens: list[int],
    block: Sequence[int],
    k: int,
    sampling: SamplingParams,
) -> None:
    """Every branch is what would be drafted; no correction repeats the block's own token."""
    keys = [(branch.accepted, branch.token) for branch in ahead.branches]
    assert len(keys) == len(set(keys))
    for branch in ahead.branches:
        assert branch.token not in block[branch.accepted : branch.accepted + 1]
        committed = [*tokens, *block[: branch.accepted], branch.token]
        assert branch.draft_token_ids == fresh(oracle, committed, k, sampling)


def test_branches_are_what_the_outcome_would_be_drafted(
    tiny_llama: Path, oracle: DraftModelDrafter, sampling: SamplingParams
) -> None:
    """Whole blocks, parts of drafts and none, as one batch over several sequences: a branch that
    sees its neighbour, a wrong position's noise or another branch's penalties differs."""
    drafter, _ = make(tiny_llama)
    aheads, cases = [], []
    for sequence, (length, m) in enumerate(((20, 4), (3, 2), (9, 0), (40, 4))):
        tokens = text(sequence, length)
        block = draft(drafter, sequence, tokens, 4, sampling)[:m]
        fan_out = [2, 1, 3, 0, 2][: m + 1] if m else [3]
        aheads.append(begin(drafter, sequence, tokens, block, 3, sampling, fan_out))
        cases.append((tokens, block, sum(fan_out)))
    finish(drafter, aheads)
    for ahead, (tokens, block, num_branches) in zip(aheads, cases, strict=True):
        assert len(ahead.branches) == num_branches
        check(oracle, ahead, tokens, block, 3, sampling)


def test_the_guesses_are_the_best_of_the_draw(
    tiny_llama: Path, oracle: DraftModelDrafter, sampling: SamplingParams
) -> None:
    """The first guess behind a block is what the drafter itself would say there, also where it has
    to run the block's last token first; a guess that is no better than chance wastes a branch."""
    drafter, model = make(tiny_llama)
    tokens = text(1, 12)
    block = draft(drafter, 1, tokens, 4, sampling)
    ahead = begin(drafter, 1, tokens, block, 2, sampling, [1, 1, 1, 1, 1])
    finish(drafter, [ahead])
    assert ahead.guesses[4][0] == fresh(oracle, [*tokens, *block], 1, sampling)[0]
    assert [len(guesses) for guesses in ahead.guesses] == [4, 4, 4, 4, 5]
    if sampling == GREEDY:
        for j in range(4):
            model.open(50)
            [logits] = model.forward([Row(50, 0, [*tokens, *block[:j]], 1)])
            best = [t for t in logits.topk(5).indices.tolist() if t != block[j]]
            assert list(ahead.guesses[j]) == best
            model.close(50)


def test_a_kept_branch_is_gone_on_with(
    tiny_llama: Path, oracle: DraftModelDrafter, sampling: SamplingParams
) -> None:
    """Round by round with outcomes that were foreseen: a finished branch costs nothing when it is
    asked for, an unfinished one only what is missing, and its guesses serve the next round."""
    drafter, model = make(tiny_llama)
    tokens = text(2, 12)
    block = draft(drafter, 1, tokens, 3, sampling)
    for num_steps in (9, 2, 1, 9, 9, 2, 3, 9):
        ahead = begin(drafter, 1, tokens, block, 3, sampling, [2, 1, 1, 2])
        model.forwards.clear()
        for _ in range(num_steps):
            if not ahead.is_done:
                drafter.advance([ahead])
        accepted = num_steps % 3
        token = ahead.guesses[accepted][0]
        assert ahead.keep(accepted, token) and ahead.is_done
        tokens = [*tokens, *block[:accepted], token]
        model.forwards.clear()
        block = draft(drafter, 1, tokens, 3, sampling)
        assert block == fresh(oracle, tokens, 3, sampling)
        assert len(model.forwards) == max(0, 3 - num_steps)


def test_an_outcome_that_was_not_foreseen_leaves_nothing_behind(
    tiny_llama: Path, oracle: DraftModelDrafter, sampling: SamplingParams
) -> None:
    """What branches wrote beside the text must be gone, and what was accepted need not be run
    again."""
    drafter, model = make(tiny_llama)
    tokens = text(3, 10)
    for accepted in (4, 0, 2, 4):
        block = draft(drafter, 1, tokens, 4, sampling)
        assert block == fresh(oracle, tokens, 4, sampling)
        ahead = begin(drafter, 1, tokens, block, 3, sampling, [2, 2, 1, 1, 1])
        finish(drafter, [ahead])
        guesses = {token for each in ahead.guesses for token in each}
        token = next(t for t in range(VOCAB_SIZE) if t not in guesses and t not in block)
        assert not ahead.keep(accepted, token)
        tokens = [*tokens, *block[:accepted], token]
        assert model.length(1) == len(tokens) - 1
        model.forwards.clear()


def test_an_abandoned_ahead_is_simply_forgotten(
    tiny_llama: Path, oracle: DraftModelDrafter, sampling: SamplingParams
) -> None:
    """The block's text may be taken back, or the sequence read further, in mid-step."""
    drafter, _ = make(tiny_llama)
    tokens = text(4, 10)
    block = draft(drafter, 1, tokens, 4, sampling)
    for num_steps in (0, 1, 3):
        ahead = begin(drafter, 1, tokens, block, 3, sampling, [2, 2, 1, 1, 1])
        for _ in range(num_steps):
            drafter.advance([ahead])
        tokens = [*tokens[:-2], 7, 9, 11]
        drafter.draft([DraftJob(1, tokens, 0, sampling)])
        block = draft(drafter, 1, tokens, 4, sampling)
        assert block == fresh(oracle, tokens, 4, sampling)


def test_a_forgotten_text_gives_the_same_branches(tiny_llama: Path) -> None:
    """Memory may change the speed only: without it the block is run again for its guesses."""
    drafter, _ = make(tiny_llama)
    tokens = text(5, 15)
    block = draft(drafter, 1, tokens, 4, COUPLED)
    found = []
    for forget in (False, True):
        if forget:
            drafter.close(1)
        ahead = begin(drafter, 1, tokens, block, 3, COUPLED, [2, 2, 1, 1, 2])
        finish(drafter, [ahead])
        found.append({(b.accepted, b.token): b.draft_token_ids for b in ahead.branches})
    assert found[0] == found[1] and len(found[0]) == 8


def test_another_text_of_the_same_length_is_not_taken_for_the_known_one(
    tiny_llama: Path, oracle: DraftModelDrafter
) -> None:
    """Without a block nothing but the text itself tells that it was taken back and replaced."""
    drafter, _ = make(tiny_llama)
    tokens = text(6, 10)
    draft(drafter, 1, tokens, 4, GREEDY)
    tokens = [*tokens[:-2], 7, 9]
    ahead = begin(drafter, 1, tokens, (), 3, GREEDY, [3])
    finish(drafter, [ahead])
    assert ahead.guesses[0][0] == fresh(oracle, tokens, 1, GREEDY)[0]
    check(oracle, ahead, tokens, (), 3, GREEDY)


def test_a_kept_branch_may_be_longer_than_what_is_wanted(tiny_llama: Path) -> None:
    """What the controller wants changes from round to round; one token too many breaks the row."""
    drafter, _ = make(tiny_llama)
    tokens = text(7, 10)
    block = draft(drafter, 1, tokens, 2, GREEDY)
    ahead = begin(drafter, 1, tokens, block, 4, GREEDY, [1, 1, 1])
    finish(drafter, [ahead])
    [branch] = [branch for branch in ahead.branches if branch.accepted == 1]
    ahead.keep(1, branch.token)
    tokens = [*tokens, block[0], branch.token]
    for k in (2, 1):
        assert draft(drafter, 1, tokens, k, GREEDY) == branch.draft_token_ids[:k]
    assert draft(drafter, 1, tokens, 4, GREEDY) == branch.draft_token_ids


@pytest.mark.parametrize("limits", [{"max_batch_tokens": 16}, {"max_length": 24}])
def test_branches_are_cut_to_what_there_is_room_for(
    tiny_llama: Path, limits: dict[str, int]
) -> None:
    """A step beyond `max_batch_tokens` is refused by the model, and nodes beyond the context would
    overrun the slot: branches wait, are shorter, or are left out."""
    drafter, model = make(tiny_llama, **limits)
    oracle, _ = make(tiny_llama, **limits)
    aheads, cases = [], []
    for sequence, length in enumerate((16, 10)):
        tokens = text(sequence, length)
        block = draft(drafter, sequence, tokens, 3, GREEDY)
        aheads.append(begin(drafter, sequence, tokens, block, 3, GREEDY, [4, 4, 4, 5]))
        cases.append((tokens, block))
    finish(drafter, aheads)
    assert max(sum(sizes) for sizes in model.forwards) <= model.max_batch_tokens
    for ahead, (tokens, block) in zip(aheads, cases, strict=True):
        check(oracle, ahead, tokens, block, 3, GREEDY)
    expected = [1, 3] if "max_length" in limits else [17, 17]
    assert [len(ahead.branches) for ahead in aheads] == expected


def test_all_branches_of_all_sequences_take_a_step_in_one_forward(tiny_llama: Path) -> None:
    """The price of drafting ahead is that of the longest draft, and one more where the last token
    of the block was not run yet."""
    drafter, model = make(tiny_llama)
    aheads = []
    for sequence in range(2):
        tokens = text(sequence, 12)
        block = draft(drafter, sequence, tokens, 3, GREEDY)
        aheads.append(begin(drafter, sequence, tokens, block, 3, GREEDY, [2, 1, 0, 2]))
    model.forwards.clear()
    finish(drafter, aheads)
    assert model.forwards == [[4, 4], [5, 5], [5, 5], [2, 2]]
