"""`forerun distil` on a tiny target: the whole way, interrupted and resumed; what it refuses."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from core.config import DrafterPoolConfig, ModelConfig
from core.drafter import DraftJob
from core.errors import InvalidRequestError, ModelError
from core.model import RaggedModel, Row
from core.params import Rule, SamplingParams
from core.shared_weights import MANIFEST
from drafter_service.distil.generate import GenerationOptions, Text, load_texts
from drafter_service.distil.measure import acceptance, matches
from drafter_service.distil.run import DistilOptions, distil
from drafter_service.distil.train import Point, TrainingOptions
from drafter_service.drafters import create_drafter
from tests.tiny_models import TinyFactory, greedy_reference

GREEDY = SamplingParams()
WRITING = GenerationOptions(max_new_tokens=12, top_n=4)


class Silent:
    """An observer that counts, and can interrupt the run as Ctrl-C would."""

    def __init__(self, stop_at_tokens: int = 1 << 30, stop_at_step: int = 1 << 30) -> None:
        self._stop_at_tokens, self._stop_at_step = stop_at_tokens, stop_at_step
        self.written: list[int] = []
        self.steps: list[int] = []

    def wrote(self, num_tokens: int, planned: int) -> None:
        self.written.append(num_tokens)
        if num_tokens >= self._stop_at_tokens:
            raise KeyboardInterrupt

    def computed(self, num_shards: int, planned: int) -> None:
        assert num_shards <= planned

    def trained(self, step: int, planned: int, last: Point | None) -> None:
        self.steps.append(step)
        if step >= self._stop_at_step:
            raise KeyboardInterrupt


def options(target: Path, folder: Path) -> DistilOptions:
    """A run of seconds: two shards of text, a dozen steps."""
    prompts = folder / "prompts.txt"
    prompts.write_text("\n".join(f"tell {i} of {'abcdefg'[i % 7]}" for i in range(150)))
    return DistilOptions(
        target=str(target),
        out=folder / "drafter",
        prompts=prompts,
        num_tokens=1200,
        shape="pruned",
        layers=2,
        vocabulary=200,
        rows=16,
        generation=WRITING,
        training=TrainingOptions(epochs=1.5, batch_size=8, evaluate_every=4, warmup_steps=2),
    )


@pytest.fixture(scope="module")
def target(tiny: TinyFactory) -> Path:
    """A target that never ends a text, so that texts have their full length."""
    return tiny("llama", eos_token_id=300)


@pytest.fixture(scope="module")
def made(target: Path, tmp_path_factory: pytest.TempPathFactory) -> DistilOptions:
    """A finished run."""
    run = options(target, tmp_path_factory.mktemp("made"))
    observer = Silent()
    distil(run, observer)
    assert observer.steps[-1] == len(observer.steps) - 1 > 8  # the end is told once more
    return run


def model(path: Path, **limits: int) -> RaggedModel:
    given = {"max_length": 128, "max_sequences": 4, "max_batch_tokens": 128, **limits}
    return RaggedModel.load(ModelConfig(model=str(path), **given))


def held_out(run: DistilOptions) -> list[Text]:
    work = run.out.with_name("drafter.work")
    return list(load_texts(sorted((work / "held-out").iterdir())))


def test_training_lowers_the_loss_and_raises_acceptance(made: DistilOptions) -> None:
    """A loss whose sign, mapping or alignment were wrong would end no better than it began."""
    work = made.out.with_name("drafter.work")
    history = torch.load(work / "training.pt", weights_only=True)["history"]
    assert history[-1][2] < 0.9 * history[0][2]
    assert history[-1][1] < history[0][1]


def test_interrupted_and_resumed_is_the_same_drafter(
    made: DistilOptions, target: Path, tmp_path: Path
) -> None:
    """Bit for bit, wherever it was interrupted: in the first shard, or between checkpoints."""
    run = options(target, tmp_path)
    for observer in (Silent(stop_at_tokens=300), Silent(stop_at_step=6), Silent(stop_at_step=9)):
        with pytest.raises(KeyboardInterrupt):
            distil(run, observer)
        assert not run.out.exists()
    last = Silent()
    distil(run, last)
    assert last.steps[0] == 9, "training began anew"
    resumed, whole = (load_file(each.out / "model.safetensors") for each in (run, made))
    assert resumed.keys() == whole.keys()
    for name, tensor in whole.items():
        assert torch.equal(resumed[name], tensor), name


def test_texts_are_the_targets(made: DistilOptions, target: Path) -> None:
    """Held-out answers are the target's greedy ones; a sampled or shifted token would teach and
    measure something else."""
    for text in held_out(made)[:3]:
        assert text.answer_ids == greedy_reference(target, text.prompt_ids, 12)
        assert text.top_ids[:, 0].tolist() == text.answer_ids
        assert text.top_log_probs.exp().sum(dim=-1).max() <= 1.001


def test_drafter_loads_and_proposes_its_tokens_only(made: DistilOptions) -> None:
    """Through `draft_model`, greedy and sampled by every kind of rule: a spread head that leaked
    would propose tokens it was never taught."""
    allowed = set(load_file(made.out / "model.safetensors")["draft_token_ids"].tolist())
    assert len(allowed) == 200
    config = ModelConfig(model=str(made.out), max_length=128, max_sequences=8)
    drafter = create_drafter(DrafterPoolConfig(name="d", kind="draft_model", model=config))
    sampled = [
        SamplingParams(1.5, seed=seed, rule=rule)
        for seed, rule in enumerate((Rule.COUPLED, Rule.REJECTION))
    ]
    jobs = [DraftJob(i, [65, 66, 67], 6, p) for i, p in enumerate([GREEDY, *sampled])]
    for draft in drafter.draft(jobs):
        assert len(draft.token_ids) == 6
        assert set(draft.token_ids) <= allowed
        for distribution in draft.distributions:
            assert set(distribution.token_ids) <= allowed


def test_loaded_drafter_has_the_targets_handshake(made: DistilOptions, target: Path) -> None:
    """Vocabulary and tokenizer are the target's, though neither is in the directory."""
    ours, theirs = model(made.out).identity, model(target).identity
    assert (ours.vocab_size, ours.tokenizer_fingerprint) == (
        theirs.vocab_size,
        theirs.tokenizer_fingerprint,
    )
    weights = load_file(made.out / "model.safetensors")
    assert not [name for name in weights if "embed" in name or "lm_head" in name]


def test_replayed_acceptance_is_that_of_real_drafts(made: DistilOptions, target: Path) -> None:
    """The shortcut (nothing is verified) and drafts as verification asks for must say the same."""
    texts = held_out(made)[:6]
    config = ModelConfig(model=str(made.out), max_length=128)
    drafter = create_drafter(DrafterPoolConfig(name="d", kind="draft_model", model=config))
    measured = acceptance(matches(model(target), drafter, texts, 3), 3)
    asked, accepted = [0] * 3, [0] * 3
    for text in texts:
        position = 1
        while position < len(text.answer_ids):
            tokens = [*text.prompt_ids, *text.answer_ids[:position]]
            draft = drafter.draft([DraftJob(0, tokens, 3, GREEDY)])[0].token_ids
            for i, (drafted, right) in enumerate(
                zip(draft, text.answer_ids[position:], strict=False)
            ):
                position += 1
                asked[i] += 1
                if drafted != right:
                    break
                accepted[i] += 1
            else:
                position += 1
    shares = [a / max(1, n) for a, n in zip(accepted, asked, strict=True)]
    assert list(measured.by_position) == pytest.approx(shares)


def test_untrained_copy_of_all_layers_is_the_target(target: Path, tmp_path: Path) -> None:
    """Sharing weights loses nothing: all layers, no training, and the logits are the target's."""
    run = replace(
        options(target, tmp_path),
        layers=(0, 1, 2),
        vocabulary=0,
        training=TrainingOptions(epochs=0.01, batch_size=8, learning_rate=0.0),
    )
    distil(run, Silent())
    ours, theirs = (
        model(run.out),
        RaggedModel.load(
            ModelConfig(model=str(target), dtype="bfloat16", max_length=128, max_sequences=4)
        ),
    )
    logits = []
    for each in (ours, theirs):
        each.open(1)
        logits.append(each.forward([Row(1, 0, [1, 2, 3, 4], 4)]))
    assert torch.equal(logits[0], logits[1])


def test_card_tells_what_was_measured(made: DistilOptions) -> None:
    """The card is what a user has to judge the drafter by; it must load as TOML says it does."""
    card = (made.out / "README.md").read_text()
    assert "| accepted |" in card and "expected speed-up" in card
    assert (made.out / "curve.svg").read_text().startswith("<svg")
    manifest = json.loads((made.out / MANIFEST).read_text())
    assert manifest["layers"] == [0, 2] and manifest["draft_vocabulary"] == 200


def test_drafter_of_another_target_is_refused(
    made: DistilOptions, tiny: TinyFactory, tmp_path: Path
) -> None:
    """With other embeddings it would draft noise, silently."""
    other = tiny("llama", seed=3, eos_token_id=300)
    folder = Path(shutil.copytree(made.out, tmp_path / "copy"))
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**manifest, "target": str(other)}))
    with pytest.raises(ModelError, match="another target"):
        model(folder)
    (folder / MANIFEST).write_text(json.dumps({**manifest, "target": "../nowhere"}))
    with pytest.raises(ModelError, match="no directory"):
        model(folder)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layers": 9}, "9 of the target's 3 layers"),
        ({"layers": (0, 3)}, "layers 0 to 2"),
        ({"layers": (2, 0)}, "ascend"),
        ({"vocabulary": 400}, "400 tokens of the target's 260"),
    ],
)
def test_wrong_shapes_are_told(
    made: DistilOptions, tmp_path: Path, change: dict[str, object], reason: str
) -> None:
    """Before hours of work, and by name."""
    work = made.out.with_name("drafter.work")
    with pytest.raises(InvalidRequestError, match=reason):
        distil(replace(made, out=tmp_path / "x", work=work, **change), Silent())


def test_work_of_another_recipe_is_not_mixed_in(made: DistilOptions, tmp_path: Path) -> None:
    """Text of another seed in the same directory would make a drafter that nobody can repeat."""
    work = made.out.with_name("drafter.work")
    other = replace(made, out=tmp_path / "x", work=work, generation=replace(WRITING, seed=5))
    with pytest.raises(InvalidRequestError, match="seed 0, not 5"):
        distil(other, Silent())
    with pytest.raises(InvalidRequestError, match="is there already"):
        distil(made, Silent())
