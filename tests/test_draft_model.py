"""The model drafter against transformers: what it drafts, and how few forwards it takes."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from core.config import DrafterPoolConfig, ModelConfig
from core.errors import ConfigError, ModelError
from core.model import RaggedModel, Row
from core.params import Constraint, ConstraintKind, Rule, SamplingParams
from core.sampling import draw
from drafter_service.drafters import create_drafter
from drafter_service.drafters.base import Draft, DraftJob
from drafter_service.drafters.draft_model import DraftModelDrafter
from tests.tiny_models import VOCAB_SIZE, TinyFactory, greedy_reference, load_reference

GREEDY = SamplingParams()


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


def load(path: Path, **options: int) -> CountingModel:
    limits = {"max_length": 128, "max_sequences": 4, "max_batch_tokens": 64, **options}
    return CountingModel(RaggedModel.load(ModelConfig(model=str(path), **limits)))


def make(model: CountingModel) -> DraftModelDrafter:
    return DraftModelDrafter(model)  # type: ignore[arg-type]


@pytest.fixture
def model(tiny_llama: Path) -> CountingModel:
    return load(tiny_llama)


@pytest.fixture(scope="module")
def reference(tiny_llama: Path) -> PreTrainedModel:
    return load_reference(tiny_llama)


@torch.inference_mode()
def continuation(
    reference: PreTrainedModel, token_ids: Sequence[int], k: int, sampling: SamplingParams
) -> tuple[int, ...]:
    """k tokens behind `token_ids`, each from a full forward of the stock model."""
    tokens = list(token_ids)
    for _ in range(k):
        logits = reference(torch.tensor([tokens])).logits[:, -1].float()
        tokens += draw(logits[:, :VOCAB_SIZE], [sampling], [len(tokens)]).tolist()
    return tuple(tokens[len(token_ids) :])


@pytest.mark.parametrize(
    "sampling", [GREEDY, SamplingParams(0.9, top_p=0.9, seed=5, rule=Rule.COUPLED)]
)
def test_drafts_are_the_stock_models_continuation(
    model: CountingModel, reference: PreTrainedModel, sampling: SamplingParams
) -> None:
    """Through full, partial and no acceptance: an off-by-one in the cache or in the position of
    the noise would show in the next round."""
    drafter = make(model)
    texts = {1: [10, 20, 30], 2: [7] * 20}
    for accepted in (4, 0, 2, 4, 1, 0, 4):
        jobs = [DraftJob(s, tokens, 4, sampling) for s, tokens in texts.items()]
        drafts = [draft.token_ids for draft in drafter.draft(jobs)]
        for tokens, drafted in zip(texts.values(), drafts, strict=True):
            assert drafted == continuation(reference, tokens, 4, sampling)
            tokens += [*drafted[:accepted], (tokens[-1] * 7 + accepted) % VOCAB_SIZE]


def test_penalised_drafts_are_what_transformers_generates(
    model: CountingModel, reference: PreTrainedModel
) -> None:
    """The target applies its processors at every position; a drafter that does not would propose
    what the target cannot say. Each draft position sees the tokens drafted before it, and a
    rejected draft leaves nothing behind."""
    drafter, tokens = make(model), [10, 20, 30, 20, 30, 10]
    plain = continuation(reference, tokens, 6, GREEDY)
    words = (plain[:1], plain[1:3])
    sampling = SamplingParams(
        repetition_penalty=1.4,
        no_repeat_ngram_size=2,
        bad_words_ids=words,
        num_prompt_tokens=6,
        constraint=Constraint(ConstraintKind.REGEX, "[a-z]*"),  # for the target alone
    )
    for accepted in (0, 3, 6, 1):
        [drafted] = drafter.draft([DraftJob(1, tokens, 6, sampling, 6)])
        expected = greedy_reference(
            reference,
            tokens,
            6,
            repetition_penalty=1.4,
            no_repeat_ngram_size=2,
            bad_words_ids=[list(word) for word in words],
        )
        assert list(drafted.token_ids[: len(expected)]) == expected  # which ends at an end token
        assert plain[0] not in expected
        tokens = [*tokens, *drafted.token_ids[:accepted], (tokens[-1] + 40) % VOCAB_SIZE]


def test_a_round_is_one_catch_up_and_k_minus_one_steps(model: CountingModel) -> None:
    """Catching up row by row, or running a token twice, costs forwards: the price of a draft."""
    drafter = make(model)
    texts = {1: [1, 2, 3], 2: [4] * 10, 3: [5, 6]}
    lengths = {1: 3, 2: 2, 3: 1}
    drafts = drafter.draft([DraftJob(s, t, lengths[s], GREEDY) for s, t in texts.items()])
    assert model.forwards == [[3, 10, 2], [1, 1], [1]]
    model.forwards.clear()
    texts[1] += [*drafts[0].token_ids, 9]  # all accepted: two tokens are new
    texts[2] += [*drafts[1].token_ids[:1], 9]
    texts[3] += [9]
    drafter.draft([DraftJob(s, t, 2, GREEDY, 1) for s, t in texts.items()])
    assert model.forwards == [[2, 1, 1], [1, 1, 1]]


def test_reading_only_draws_nothing_and_drafting_reads_the_rest(model: CountingModel) -> None:
    """A prompt may be read ahead; the draft then needs its last token only once more."""
    drafter = make(model)
    assert drafter.draft([DraftJob(1, range(100), 0, GREEDY)]) == [Draft()]
    assert model.forwards == [[64], [36]]
    [drafted] = drafter.draft([DraftJob(1, range(100), 1, GREEDY, 100)])
    assert model.forwards[2:] == [[1]] and len(drafted.token_ids) == 1


def test_more_rows_than_a_forward_holds_are_split(
    tiny_llama: Path, reference: PreTrainedModel
) -> None:
    """A forward beyond `max_batch_tokens` is refused by the model."""
    model = load(tiny_llama, max_sequences=20, max_batch_tokens=16)
    jobs = [DraftJob(s, [s, s + 1], 2, GREEDY) for s in range(20)]
    drafts = make(model).draft(jobs)
    assert drafts[19].token_ids == continuation(reference, [19, 20], 2, GREEDY)
    assert max(sum(sizes) for sizes in model.forwards) <= 16


def test_a_prompt_that_others_have_read_is_copied(
    model: CountingModel, reference: PreTrainedModel
) -> None:
    """A shared system prompt must not be computed again for every request."""
    drafter, shared = make(model), [(7 * i) % VOCAB_SIZE for i in range(60)]
    drafter.draft([DraftJob(1, [*shared, 1], 1, GREEDY)])
    model.forwards.clear()
    [drafted] = drafter.draft([DraftJob(2, [*shared, 2], 3, GREEDY)])
    assert model.forwards == [[1], [1], [1]]
    assert drafted.token_ids == continuation(reference, [*shared, 2], 3, GREEDY)


def test_padding_is_never_drafted(tiny: TinyFactory) -> None:
    """The head has more rows than the tokenizer has ids; a padded id would be invalid at the
    target. The stock model's own argmax is one here, so an unmasked draw would show."""
    path = tiny("padded")
    reference = load_reference(path)
    prompts = [[first, 2, 3] for first in range(40)]
    with torch.inference_mode():
        best = reference(torch.tensor(prompts)).logits[:, -1].argmax(-1).tolist()
    chosen = [
        tokens for tokens, token_id in zip(prompts, best, strict=True) if token_id >= VOCAB_SIZE
    ]
    assert chosen
    drafter = make(load(path))
    for tokens in chosen[:4]:
        [drafted] = drafter.draft([DraftJob(1, tokens, 5, GREEDY)])
        assert drafted.token_ids == continuation(reference, tokens, 5, GREEDY)
        assert max(drafted.token_ids) < VOCAB_SIZE


def test_logits_that_are_no_numbers_end_a_draft(model: CountingModel) -> None:
    """A broken head must give a short draft, not an id that does not exist."""
    forward = model.forward
    model.forward = lambda rows: forward(rows) * float("nan")  # type: ignore[method-assign]
    assert make(model).draft([DraftJob(1, [1, 2], 3, GREEDY)]) == [Draft()]


def test_the_config_must_name_a_model_that_is_there(tmp_path: Path) -> None:
    """Both errors name what is missing."""
    with pytest.raises(ConfigError, match=r"drafter_pools\.small\.model: .*needs a model"):
        create_drafter(DrafterPoolConfig(name="small", kind="draft_model"))
    missing = ModelConfig(model=str(tmp_path / "nowhere"))
    with pytest.raises(ModelError, match="nowhere"):
        create_drafter(DrafterPoolConfig(name="small", kind="draft_model", model=missing))
