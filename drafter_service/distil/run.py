"""`forerun distil` from the target's path to the finished directory; every part is elsewhere.

What takes long lies in a work directory and is not done twice: text in shards, training in a
checkpoint. Texts of every fiftieth prompt are not trained on but say when to stop; the held-out
prompts are only measured. Knows nothing of terminals: progress is told to an `Observer`.
"""

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from core.config import ModelConfig
from core.embedded import resolve_model
from core.errors import InvalidRequestError, ModelError
from core.model import RaggedModel
from drafter_service.distil.checkpoint import check_free, write_card, write_checkpoint
from drafter_service.distil.generate import GenerationOptions, Text, generate, load_texts
from drafter_service.distil.measure import Report, report, step_seconds
from drafter_service.distil.prompts import HELD_OUT, built_in, read_prompts, whole_words
from drafter_service.distil.shapes import check_layers, choose_layers, choose_vocabulary, prune
from drafter_service.distil.train import Point, Trainer, TrainingData, TrainingOptions

_MAX_PROMPTS = 24_000
_VALIDATION = 50
_LONGEST_DRAFT = 8
_ENOUGH = 1 << 60


class Observer(Protocol):
    """Whom a run tells how far it is."""

    def wrote(self, num_tokens: int, planned: int) -> None:
        """So many tokens of training text there are."""

    def trained(self, step: int, planned: int, last: Point | None) -> None:
        """So many steps are done; `last` is the latest evaluation."""


@dataclass(frozen=True, slots=True)
class DistilOptions:
    """What to make of what.

    target: a directory or `embedded:NAME`. out: the directory to write. work: where unfinished
    things lie, by default beside `out`. prompts: a file, one a line, instead of the built-in ones;
    every tenth, up to 40, is held out. num_tokens: of training text. layers: of the target, or how
    many. vocabulary: how many tokens the drafter may propose, 0 is all. rows: texts written at a
    time. threads: of torch, 0 is as many as it likes.
    """

    target: str
    out: Path
    work: Path | None = None
    prompts: Path | None = None
    num_tokens: int = 400_000
    layers: tuple[int, ...] | int = 4
    vocabulary: int = 12_288
    rows: int = 64
    threads: int = 0
    generation: GenerationOptions = field(default_factory=GenerationOptions)
    training: TrainingOptions = field(default_factory=TrainingOptions)


def distil(options: DistilOptions, observer: Observer) -> Report:
    """Make the drafter, or go on making it. Raises InvalidRequestError, ConfigError, ModelError."""
    check_free(options.out)
    work = options.work or options.out.with_name(options.out.name + ".work")
    work.mkdir(parents=True, exist_ok=True)
    target = _load(options, options.rows, "auto")
    layers = _layers(options, target.num_layers)
    texts, held_out = _write_texts(target, options, work, observer)
    observer.wrote(options.num_tokens, options.num_tokens)
    longest = min(_LONGEST_DRAFT, options.training.draft_length + 3)
    target_s = [step_seconds(target, count) for count in range(1, longest + 2)]
    always = target.eos_token_ids
    vocab_size = target.vocab_size
    del target  # its memory is needed

    answers = (text.answer_ids for text in texts)
    token_ids = choose_vocabulary(answers, options.vocabulary, vocab_size, always)
    network = prune(_load(options, 1, "float32"), layers, token_ids)
    data = TrainingData(
        [text for i, text in enumerate(texts) if i % _VALIDATION], texts[::_VALIDATION], held_out
    )
    trainer = Trainer(network, token_ids, data, options.training)
    trainer.run(
        work / "training.pt",
        lambda t: observer.trained(t.step, t.num_steps, t.history[-1] if t.history else None),
    )
    observer.trained(trainer.step, trainer.num_steps, trainer.history[-1])
    manifest = _manifest(options, layers, token_ids, texts, trainer)
    write_checkpoint(options.out, network, trainer.best, token_ids, manifest)
    drafter = RaggedModel.load(
        ModelConfig(model=str(options.out), max_sequences=1, threads=options.threads)
    )
    measured = report(drafter, held_out, target_s, longest)
    write_card(options.out, manifest, trainer.history, measured)
    return measured


def _load(options: DistilOptions, rows: int, dtype: Any) -> RaggedModel:
    """The target, to write with many rows, or in fp32 to be cut down and trained."""
    return RaggedModel.load(
        ModelConfig(
            model=resolve_model(options.target),
            dtype=dtype,
            max_sequences=rows,
            max_length=max(512, 2 * options.generation.max_new_tokens),
            max_batch_tokens=max(1024, 16 * rows),
            threads=options.threads,
            pack_weights=dtype != "float32",
        )
    )


def _layers(options: DistilOptions, num_layers: int) -> tuple[int, ...]:
    if isinstance(options.layers, int):
        return choose_layers(num_layers, options.layers)
    check_layers(options.layers, num_layers)
    return options.layers


def _write_texts(
    target: RaggedModel, options: DistilOptions, work: Path, observer: Observer
) -> tuple[list[Text], list[Text]]:
    """The texts to train with and the greedy answers to the held-out prompts."""
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
    measured = generate(target, held_out, work / "held-out", greedy, _ENOUGH)
    shards = generate(
        target,
        prompts,
        work / "text",
        options.generation,
        options.num_tokens,
        lambda total: observer.wrote(total, options.num_tokens),
    )
    return list(load_texts(shards)), list(load_texts(measured))


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
        "layers": list(layers),
        "draft_vocabulary": len(token_ids),
        "prompts": options.prompts.name if options.prompts else "built-in",
        "texts": len(texts),
        "training_tokens": sum(len(text.answer_ids) for text in texts),
        "steps": trainer.step,
        "generation": asdict(options.generation),
        "training": asdict(options.training),
    }
