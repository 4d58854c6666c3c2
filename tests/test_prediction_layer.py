"""A prediction layer trained for a target that has none: from text to drafts, here and there."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from core.config import DrafterPoolConfig, ModelConfig
from core.drafter import DraftJob, TargetFeatures
from core.errors import ConfigError, InvalidRequestError
from core.features import FeatureTap
from core.loading import load_network
from core.model import Row
from core.params import SamplingParams
from core.shared_weights import MANIFEST
from drafter_service.distil.batches import make_batch
from drafter_service.distil.generate import Text
from drafter_service.distil.measure import acceptance, matches
from drafter_service.distil.prediction import PredictionStudent
from drafter_service.distil.run import DistilOptions, distil
from drafter_service.distil.train import TrainingOptions
from drafter_service.drafters import attach_drafter, create_drafter
from tests.test_distil import Silent, held_out, model, options
from tests.tiny_models import TinyFactory

GREEDY = SamplingParams()
TRAINING = TrainingOptions(epochs=1.5, batch_size=8, evaluate_every=4, warmup_steps=2)


@pytest.fixture(scope="module")
def target(tiny: TinyFactory) -> Path:
    """A target that never ends a text."""
    return tiny("llama", eos_token_id=300)


def shaped(target: Path, folder: Path, **changes: object) -> DistilOptions:
    return replace(options(target, folder), shape="prediction_layer", training=TRAINING, **changes)


@pytest.fixture(scope="module")
def made(target: Path, tmp_path_factory: pytest.TempPathFactory) -> DistilOptions:
    """A finished run."""
    run = shaped(target, tmp_path_factory.mktemp("made"), feature_layers=(0, 1))
    distil(run, Silent())
    return run


def pool(run: DistilOptions, **settings: object) -> DrafterPoolConfig:
    config = ModelConfig(model=str(run.out), max_length=128, max_sequences=4, dtype="float32")
    return DrafterPoolConfig(name="d", kind="mtp_layers", model=config, **settings)


def test_training_lowers_the_loss(made: DistilOptions) -> None:
    """A wrong alignment of tokens and hidden states would learn nothing."""
    work = made.out.with_name("drafter.work")
    history = torch.load(work / "training.pt", weights_only=True)["history"]
    assert history[-1][2] < 0.9 * history[0][2]


def test_drafts_are_what_training_saw(made: DistilOptions, target: Path) -> None:
    """Attached and remote drafts equal the student's choices, place after place of the draft: if a
    hidden state, position or mask differed, another drafter would serve than was trained."""
    texts = held_out(made)[:5]
    config = ModelConfig(model=str(target), max_length=128, dtype="float32", pack_weights=False)
    ids = sorted(load_file(made.out / "model.safetensors")["draft_token_ids"].tolist())
    student = PredictionStudent(load_network(config), (0, 1), ids, seed=0)
    weights = load_file(made.out / "model.safetensors")
    with torch.no_grad():
        for name, parameter in student.trained.items():
            parameter.copy_(weights[name])
    loaded = model(target, dtype="float32")
    for text in texts:
        tap = FeatureTap(loaded, student.layer.needs)
        loaded.open(9)
        loaded.forward([Row(9, 0, [*text.prompt_ids, *text.answer_ids[:-1]], 0)])
        (features,) = tap.read([9])
        loaded.truncate(9, 0)
        loaded.close(9)
        tap.close()
        wanted = _student_drafts(student, replace(text, features=features.clone()), ids, 3)
        for drafter in (
            attach_drafter(pool(made, attached=True), loaded),
            create_drafter(pool(made)),
        ):
            assert drafter.needs == student.layer.needs
            for start in range(1, len(text.answer_ids) - 3):
                tokens = [*text.prompt_ids, *text.answer_ids[:start]]
                told = TargetFeatures(0, features[: len(tokens) - 1])
                draft = drafter.draft([DraftJob(0, tokens, 3, GREEDY, 0, told)])[0].token_ids
                agreed = 0
                while agreed < 2 and draft[agreed] == text.answer_ids[start + agreed]:
                    agreed += 1  # behind a wrong token training saw another text
                assert draft[: agreed + 1] == tuple(wanted[d][start - 1] for d in range(agreed + 1))


def _student_drafts(
    student: PredictionStudent, text: Text, ids: list[int], depths: int
) -> list[list[int]]:
    """By place in the draft and beginning: the student's choice."""
    batch = make_batch([text], student.columns)
    found = []
    with torch.no_grad():
        for logits, _ in student.logits(batch, depths):
            found.append([ids[column] for column in logits.argmax(dim=-1).tolist()])
    return found


def test_measured_acceptance_counts_its_own_drafts(made: DistilOptions, target: Path) -> None:
    """`matches` has one row per place in the draft, shorter by one each time."""
    texts = held_out(made)[:4]
    loaded = model(target)
    found = matches(loaded, attach_drafter(pool(made, attached=True), loaded), texts, 3)
    for text, answer in zip(texts, found, strict=True):
        assert [len(place) for place in answer] == [len(text.answer_ids) - k for k in (1, 2, 3)]
    assert 1.0 <= acceptance(found, 3).tokens_per_step <= 4.0


def test_interrupted_and_resumed_is_the_same_layer(
    made: DistilOptions, target: Path, tmp_path: Path
) -> None:
    """Bit for bit, also in the part that teaches later places of a draft."""
    run = shaped(target, tmp_path, feature_layers=(0, 1))
    for stop in (6, 13):
        with pytest.raises(KeyboardInterrupt):
            distil(run, Silent(stop_at_step=stop))
    distil(run, Silent())
    resumed, whole = (load_file(each.out / "model.safetensors") for each in (run, made))
    assert resumed.keys() == whole.keys()
    for name, tensor in whole.items():
        assert torch.equal(resumed[name], tensor), name


def test_directory_says_what_it_is(made: DistilOptions, target: Path) -> None:
    """The card's config is the one that loads it; as a model of its own it is refused by name."""
    manifest = json.loads((made.out / MANIFEST).read_text())
    assert manifest["shape"] == "prediction_layer" and manifest["feature_layers"] == [0, 1]
    card = (made.out / "README.md").read_text()
    assert 'kind = "mtp_layers"\nattached = true' in card
    config = ModelConfig(model=str(made.out), max_length=128)
    with pytest.raises(ConfigError, match="mtp_layers"):
        create_drafter(DrafterPoolConfig(name="d", kind="draft_model", model=config))


def test_layer_of_another_target_is_refused(made: DistilOptions, tiny: TinyFactory) -> None:
    """Its hidden states would mean something else."""
    other = model(tiny("llama", seed=3, eos_token_id=300))
    with pytest.raises(ConfigError, match="does not fit"):
        attach_drafter(pool(made, attached=True), other)


def test_wrong_feature_layers_are_told(target: Path, tmp_path: Path) -> None:
    """Before hours of work, and by name."""
    with pytest.raises(InvalidRequestError, match="feature_layers"):
        distil(shaped(target, tmp_path, feature_layers=(0, 3)), Silent())
