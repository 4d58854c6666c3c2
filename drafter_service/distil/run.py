"""`forerun distil` from the target's path to the finished directory; every part is elsewhere.

What takes long lies in a work directory and is not done twice: text and hidden states in shards,
training in a checkpoint. Texts of every fiftieth prompt are not trained on but say when to stop;
the held-out prompts are only measured. Progress is told to an `Observer`. A `Writer` may write text
and hidden states elsewhere; several processes may train (see `ranks`).
"""

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from core.config import DrafterPoolConfig, ModelConfig
from core.errors import InvalidRequestError, ModelError
from core.features import HIDDEN_STATES
from core.model import RaggedModel
from core.prediction_layer import SHAPE
from drafter_service.distil import ranks
from drafter_service.distil.checkpoint import check_free, write_card, write_checkpoint
from drafter_service.distil.features import with_features
from drafter_service.distil.generate import GenerationOptions, Text, load_texts
from drafter_service.distil.measure import Report, report, step_seconds
from drafter_service.distil.prediction import PredictionStudent
from drafter_service.distil.prompts import HELD_OUT, built_in, read_prompts, whole_words
from drafter_service.distil.shapes import (
    PrunedCopy,
    check_layers,
    choose_layers,
    choose_vocabulary,
    prune,
)
from drafter_service.distil.train import Point, Student, Trainer, TrainingData, TrainingOptions
from drafter_service.distil.writers import LocalWriter, Writer, load_target
from drafter_service.drafters import attach_drafter, create_drafter

_MAX_PROMPTS = 24_000
_VALIDATION = 50
_LONGEST_DRAFT = 8
_ENOUGH = 1 << 60


class Observer(Protocol):
    """Whom a run tells how far it is."""

    def wrote(self, num_tokens: int, planned: int) -> None:
        """So many tokens of training text there are."""

    def computed(self, num_shards: int, planned: int) -> None:
        """So many shards of hidden states there are."""

    def trained(self, step: int, planned: int, last: Point | None) -> None:
        """So many steps are done; `last` is the latest evaluation."""


@dataclass(frozen=True, slots=True)
class DistilOptions:
    """What to make of what.

    target: a directory or `embedded:NAME`. out: the directory to write. shape: "prediction_layer"
    on the target's hidden states, or "pruned", a copy of some of its layers. work: where unfinished
    things lie, by default beside `out`. prompts: a file, one a line, instead of the built-in ones;
    every tenth, up to 40, is held out. num_tokens: of training text. layers: of the pruned copy, or
    how many. feature_layers: whose hidden states the prediction layer gets beside the last one;
    None is one at a third and one at two thirds of the depth. vocabulary: how many tokens the
    drafter may propose, 0 is all. rows: texts written at a time. threads: of torch, 0 is as many as
    it likes.
    """

    target: str
    out: Path
    shape: Literal["prediction_layer", "pruned"] = "prediction_layer"
    work: Path | None = None
    prompts: Path | None = None
    num_tokens: int = 400_000
    layers: tuple[int, ...] | int = 4
    feature_layers: tuple[int, ...] | None = None
    vocabulary: int = 16_384
    rows: int = 64
    threads: int = 0
    generation: GenerationOptions = field(default_factory=GenerationOptions)
    training: TrainingOptions = field(default_factory=TrainingOptions)


def distil(
    options: DistilOptions, observer: Observer, writer: Writer | None = None
) -> Report | None:
    """Make the drafter, or go on making it. Raises InvalidRequestError, ConfigError, ModelError.

    writer: writes text and hidden states instead of this process; it is closed when they are there.
    Inside `ranks.joined()` every process calls this alike; only the first one gets the report.
    """
    check_free(options.out)
    work = options.work or options.out.with_name(options.out.name + ".work")
    work.mkdir(parents=True, exist_ok=True)
    longest = min(_LONGEST_DRAFT, options.training.draft_length + 3)
    with ranks.first_before_others():
        target = _load(options, 1 if writer else options.rows, "auto")
        layers = _layers(options, target.num_layers)
        texts, held_out = _write_texts(
            target, writer or LocalWriter(target), options, layers, work, observer
        )
        if writer:
            writer.close()
        lengths = range(1, longest + 2 if ranks.is_first() else 1)
        target_s = [step_seconds(target, length) for length in lengths]
    answers = (text.answer_ids for text in texts)
    token_ids = choose_vocabulary(
        answers, options.vocabulary, target.vocab_size, target.eos_token_ids
    )
    del target  # its memory is needed

    student, network = _student(options, layers, token_ids)
    data = TrainingData(
        [text for i, text in enumerate(texts) if i % _VALIDATION], texts[::_VALIDATION], held_out
    )
    trainer = Trainer(student, data, options.training)
    trainer.run(
        work / "training.pt",
        lambda t: observer.trained(t.step, t.num_steps, t.history[-1] if t.history else None),
    )
    observer.trained(trainer.step, trainer.num_steps, trainer.history[-1])
    if not ranks.is_first():
        return None
    manifest = _manifest(options, layers, token_ids, texts, trainer)
    write_checkpoint(options.out, network, trainer.best, token_ids, manifest)
    measured = _report(options, held_out, target_s, longest)
    write_card(options.out, manifest, trainer.history, measured)
    return measured


def _student(
    options: DistilOptions, layers: tuple[int, ...], token_ids: Sequence[int]
) -> tuple[Student, Any]:
    """The student, and the network whose config the checkpoint gets."""
    target = _load(options, 1, "float32")
    if options.shape == SHAPE:
        network = target.network
        student = PredictionStudent(network, layers, token_ids, options.training.seed)
        return student, network
    network = prune(target, layers, token_ids)
    return PrunedCopy(network, token_ids), network


def _report(
    options: DistilOptions, held_out: Sequence[Text], target_s: Sequence[float], longest: int
) -> Report:
    """Measure the finished drafter as it will serve."""
    target = _load(options, 1, "auto")
    is_attached = options.shape == SHAPE
    pool = DrafterPoolConfig(
        name="distilled",
        kind="mtp_layers" if is_attached else "draft_model",
        attached=is_attached,
        model=ModelConfig(model=str(options.out), max_sequences=1, threads=options.threads),
    )
    drafter = attach_drafter(pool, target) if is_attached else create_drafter(pool)
    return report(target, drafter, held_out, target_s, longest)


def _load(options: DistilOptions, rows: int, dtype: Any) -> RaggedModel:
    """The target, to write with many rows, or in fp32 to be cut down and trained."""
    return load_target(
        options.target,
        rows=rows,
        max_new_tokens=options.generation.max_new_tokens,
        threads=options.threads,
        dtype=dtype,
        device_map=ranks.device_map(),
    )


def _layers(options: DistilOptions, num_layers: int) -> tuple[int, ...]:
    """Those of the pruned copy, or those whose hidden states the prediction layer gets."""
    if options.shape == SHAPE:
        if options.feature_layers is None:
            return tuple(max(0, num_layers * third // 3 - 1) for third in (1, 2))
        if options.feature_layers:
            check_layers(options.feature_layers, num_layers, "feature_layers")
        return options.feature_layers
    if isinstance(options.layers, int):
        return choose_layers(num_layers, options.layers)
    check_layers(options.layers, num_layers, "layers")
    return options.layers


def _write_texts(
    target: RaggedModel,
    writer: Writer,
    options: DistilOptions,
    layers: tuple[int, ...],
    work: Path,
    observer: Observer,
) -> tuple[list[Text], list[Text]]:
    """The texts to train with and the greedy answers to the held-out prompts, with the hidden
    states of all of them where the shape needs them."""
    prompts, held_out = _prompts(target, options)
    recipe = {
        "target": options.target,
        "prompts": hashlib.sha256("\n".join(prompts).encode()).hexdigest(),
        **asdict(options.generation),
    }
    _check_recipe(work / "text.json", recipe)
    greedy = GenerationOptions(
        greedy_share=1.0,
        max_new_tokens=options.generation.max_new_tokens,
        top_n=options.generation.top_n,
    )
    measured = writer.texts(held_out, work / "held-out", greedy, _ENOUGH)
    shards = writer.texts(
        prompts,
        work / "text",
        options.generation,
        options.num_tokens,
        lambda total: observer.wrote(total, options.num_tokens),
    )
    observer.wrote(options.num_tokens, options.num_tokens)
    if options.shape != SHAPE:
        return list(load_texts(shards)), list(load_texts(measured))
    needs = [*(f"{HIDDEN_STATES}:{layer}" for layer in layers), HIDDEN_STATES]
    name = "-".join(["features", *map(str, layers)])
    folders = work / name, work / f"held-out-{name}"
    writer.features(needs, measured, folders[1])
    writer.features(needs, shards, folders[0], lambda done: observer.computed(done, len(shards)))
    observer.computed(len(shards), len(shards))
    return list(with_features(shards, folders[0])), list(with_features(measured, folders[1]))


def _prompts(target: RaggedModel, options: DistilOptions) -> tuple[list[str], list[str]]:
    if options.prompts is None:
        if target.tokenizer is None:
            raise ModelError(f"{options.target} has no tokenizer to read prompts with")
        decode = target.tokenizer.decode
        # The first half of the ids: byte-pair tokenizers number rare words and fragments last.
        words = whole_words(decode([i]) for i in range(target.tokenizer.size // 2))
        prompts = built_in(words, options.generation.seed)
        return list(itertools.islice(prompts, _MAX_PROMPTS)), list(HELD_OUT)
    listed = read_prompts(options.prompts)
    held_out = listed[9::10][:40]
    if not held_out:
        raise InvalidRequestError("prompts", f"{options.prompts} needs at least 10 prompts")
    return [prompt for prompt in listed if prompt not in set(held_out)], held_out


def _check_recipe(path: Path, recipe: dict[str, Any]) -> None:
    """Raise InvalidRequestError when the work directory is of another recipe."""
    if not path.exists():
        path.write_text(json.dumps(recipe, indent=2) + "\n", encoding="utf-8")
        return
    stored = json.loads(path.read_text(encoding="utf-8"))
    for key, value in recipe.items():
        if stored.get(key) != value:
            raise InvalidRequestError(
                "work", f"{path.parent} was begun with {key} {stored.get(key)!r}, not {value!r}"
            )


def _manifest(
    options: DistilOptions,
    layers: Sequence[int],
    token_ids: Sequence[int],
    texts: Sequence[Text],
    trainer: Trainer,
) -> dict[str, Any]:
    """What `forerun.json` tells: the target, and how the drafter was made."""
    target = options.target
    if not target.startswith("embedded:"):
        target = str(Path(target).expanduser().resolve())
    return {
        "target": target,
        "shape": options.shape,
        "feature_layers" if options.shape == SHAPE else "layers": list(layers),
        "draft_vocabulary": len(token_ids),
        "prompts": options.prompts.name if options.prompts else "built-in",
        "texts": len(texts),
        "training_tokens": sum(len(text.answer_ids) for text in texts),
        "steps": trainer.step,
        "generation": asdict(options.generation),
        "training": asdict(options.training),
    }
