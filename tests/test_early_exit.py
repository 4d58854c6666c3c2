"""The first layers as a drafter: it drafts what transformers drafts, attached and on its own.

The tiny target's last layer changes little, so that drafts are sometimes right.
"""

import warnings
from pathlib import Path

import pytest

from core.config import DrafterPoolConfig, ModelConfig
from core.drafter import Drafter, DraftJob
from core.errors import ConfigError, ModelError
from core.model import RaggedModel, Row
from core.types import Rule, SamplingParams
from drafter_service.drafters import attach_drafter, create_drafter
from tests.candidates import Round, accept_counts, draft_constantly, record_rounds
from tests.harness import MODEL, pool, serving
from tests.policy import make_request
from tests.tiny_models import load_reference

GREEDY = SamplingParams()
NUM_LAYERS, EXIT, K = 4, 3, 4
PROMPTS = [[(7 * i + 3 * s) % 250 for i in range(4 + 5 * s)] for s in range(6)]


@pytest.fixture(scope="module")
def target(tiny) -> Path:
    return tiny("llama", num_hidden_layers=NUM_LAYERS, eos_token_id=300)


@pytest.fixture(scope="module")
def rounds(target: Path) -> list[list[Round]]:
    """transformers' early exit on every prompt."""
    model = load_reference(target)
    draft_constantly(model, K)
    recorded = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the library about itself
        for prompt in PROMPTS:
            recorded.append(record_rounds(model, prompt, 40, assistant_early_exit=EXIT))
    return recorded


def config(target: Path, num_layers: int = EXIT, **settings: object) -> DrafterPoolConfig:
    model = ModelConfig(model=str(target), **MODEL)
    options = {"num_layers": num_layers}
    return DrafterPoolConfig(name="e", kind="early_exit", model=model, options=options, **settings)


def beside(target: Path) -> tuple[Drafter, RaggedModel]:
    """An attached drafter and its target, which has room for every prompt."""
    model = RaggedModel.load(ModelConfig(model=str(target), **MODEL))
    return attach_drafter(config(target, attached=True), model), model


def hold(model: RaggedModel, sequence: int, tokens: list[int]) -> None:
    """Bring the target's cache to what it holds when a draft is due: all but the last token."""
    if not model.cache.is_open(sequence):
        model.open(sequence)
    known = min(model.length(sequence), len(tokens) - 2)
    model.forward([Row(sequence, known, tokens[known:-1], 0)])


def test_drafts_are_transformers_own(target, rounds):
    """An off-by-one in layers, positions or rollback drafts something else in some round."""
    attached, model = beside(target)
    alone = create_drafter(config(target))
    counts = [count for each in rounds for count in accept_counts(each)]
    assert 0 in counts and max(counts) > 0, "the reference must accept and reject"
    for sequence, recorded in enumerate(rounds):
        for each in recorded:
            if len(each.draft) < K or len(each.prefix) < 2:
                continue  # cut at the end of the generation
            hold(model, sequence, each.prefix)
            job = DraftJob(sequence, each.prefix, K, GREEDY)
            for drafter in (attached, alone):
                assert list(drafter.draft([job])[0].token_ids) == each.draft
            assert model.length(sequence) == len(each.prefix) - 1
    for sequence in range(len(rounds)):
        for drafter in (attached, alone):
            drafter.close(sequence)


def test_rows_of_a_batch_do_not_see_each_other(target, rounds):
    """Six ragged rows, each of which must draft what it drafts alone, sampled ones too."""
    attached, model = beside(target)
    coupled = SamplingParams(temperature=0.8, top_k=40, seed=4, rule=Rule.COUPLED)
    jobs = []
    for sequence, recorded in enumerate(rounds):
        prefix = recorded[len(recorded) // 2].prefix
        hold(model, sequence, prefix)
        sampling = coupled if sequence % 2 else GREEDY
        jobs.append(DraftJob(sequence, prefix, 1 + sequence % K, sampling))
    together = attached.draft(jobs)
    assert together == [attached.draft([job])[0] for job in jobs]
    assert [len(draft.token_ids) for draft in together] == [job.num_draft_tokens for job in jobs]


@pytest.mark.parametrize("is_attached", [True, False])
async def test_the_text_is_the_targets_own(target, is_attached):
    """What fewer layers wrote into the target's cache would stay there and change the text."""
    drafting = config(target, attached=is_attached).model_copy(update={"max_draft_tokens": K})
    sampled = SamplingParams(temperature=0.9, seed=3, rule=Rule.COUPLED)
    async with serving(target, [drafting], adaptive_draft_length=False) as stack:
        for index, sampling in enumerate((GREEDY, sampled)):
            for prompt in PROMPTS[:3]:
                texts = [
                    await stack.run(
                        make_request(
                            tuple(prompt), 24, sampling=sampling, enabled=on, request_id=f"{index}"
                        )
                    )
                    for on in (False, True)
                ]
                assert texts[0][0] == texts[1][0]
                assert texts[1][2].stats.num_draft_tokens > 0


def test_layers_out_of_range_name_both_sides(target, tiny):
    """A layer that is not there, or model code that cannot stop early, would draft nonsense."""
    model = RaggedModel.load(ModelConfig(model=str(target), **MODEL))
    for count in (NUM_LAYERS, 77):
        with pytest.raises(ConfigError, match=r"num_layers: must be below the 4 layers of target"):
            attach_drafter(config(target, count, attached=True), model)
        with pytest.raises(ModelError, match=f"has 4 layers: the first {count} are no part"):
            create_drafter(config(target, count))
    with pytest.raises(ConfigError, match=r"x\.model: kind 'early_exit' needs"):
        create_drafter(pool("x", "early_exit", options={"num_layers": 1}))
    other = RaggedModel.load(ModelConfig(model=str(tiny("gpt2")), **MODEL))
    with pytest.raises(ConfigError, match="always runs all"):
        attach_drafter(config(target, 1, attached=True), other)
