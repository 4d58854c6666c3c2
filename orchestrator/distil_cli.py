"""`forerun distil`: what may be typed, and the progress bar.

The work is in `drafter_service.distil`; what other machines do of it, in `orchestrator.distil_ray`.
Errors that forerun knows are told by `orchestrator.cli`. `--help` imports neither torch nor ray.
Ctrl-C ends it at once; the same command goes on from there.
"""

import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from core.config import PlacementConfig
from orchestrator.local_ray import prepare_environment

if TYPE_CHECKING:
    from drafter_service.distil.run import DistilOptions
    from drafter_service.distil.train import Point
    from orchestrator.distil_ray import RayWriters

_INTERRUPTED = 130


class _Bars:
    """The `Observer` of a run: a bar for each of its parts, on stderr."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._bars = {
            "writing text": progress.add_task("writing text", total=None, note=""),
            "hidden states": progress.add_task("hidden states", total=None, note="", visible=False),
            "training": progress.add_task("training", total=None, note=""),
        }
        self._shown = 0

    def wrote(self, num_tokens: int, planned: int) -> None:
        self._move("writing text", num_tokens, planned, "tokens")

    def computed(self, num_shards: int, planned: int) -> None:
        self._progress.update(self._bars["hidden states"], visible=True)
        self._move("hidden states", num_shards, planned, "shards")

    def trained(self, step: int, planned: int, last: "Point | None") -> None:
        note = "steps"
        if last is not None:
            accepted = f"acceptance {last.acceptance.mean:.3f}"
            note = f"steps, loss {last.validation_loss:.3f}, {accepted}"
            if last.step > self._shown:
                self._shown = last.step
                self._progress.console.print(
                    f"step {last.step}: loss {last.training_loss:.3f}, "
                    f"validation {last.validation_loss:.3f}, {accepted}"
                )
        self._move("training", step, planned, note)

    def _move(self, bar: str, done: int, planned: int, note: str) -> None:
        self._progress.update(self._bars[bar], completed=done, total=planned, note=note)


_Work = Annotated[Path | None, typer.Option(help="Where unfinished things lie; default: OUT.work.")]
_Prompts = Annotated[
    Path | None, typer.Option(help="Prompts, one a line, instead of the built-in ones.")
]
_LayersHelp = "Of a pruned copy: how many layers of the target to keep, or which: 0,10,20,29."
_FeatureLayers = Annotated[
    str,
    typer.Option(
        help="Of a prediction layer: layers whose hidden states it gets beside the last one, like"
        " 9,19, or none; default: at one and two thirds of the depth."
    ),
]
_Shape = Annotated[
    str, typer.Option(help="prediction_layer (on the target's hidden states) or pruned.")
]
_Vocabulary = Annotated[
    int, typer.Option(min=0, help="Tokens the drafter may propose; 0 is all of them.")
]


def distil(
    target: Annotated[str, typer.Option(help="Directory of the target, or embedded:NAME.")],
    out: Annotated[Path, typer.Option(help="The directory to write; must not exist yet.")],
    shape: _Shape = "prediction_layer",
    work: _Work = None,
    prompts: _Prompts = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of training text.")] = 400_000,
    layers: Annotated[str, typer.Option(help=_LayersHelp)] = "4",
    feature_layers: _FeatureLayers = "",
    vocabulary: _Vocabulary = 16_384,
    epochs: Annotated[float, typer.Option(min=0, help="How often to see the text.")] = 5.0,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts per training step.")] = 16,
    learning_rate: Annotated[float, typer.Option(min=0)] = 1e-2,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Longest answer.")] = 160,
    evaluate_every: Annotated[int, typer.Option(min=1, help="Steps between evaluations.")] = 40,
    rows: Annotated[int, typer.Option(min=1, help="Answers written at a time.")] = 64,
    seed: Annotated[int, typer.Option(help="Same seed, same drafter.")] = 0,
    threads: Annotated[int, typer.Option(min=0, help="Threads of torch; 0: its own.")] = 0,
    writers: Annotated[
        int, typer.Option(min=0, help="Ray actors that write the text; 0: this process does.")
    ] = 0,
    address: Annotated[
        str, typer.Option(help="Join this Ray cluster (host:port) instead of starting a local one.")
    ] = "",
    gpus_per_writer: Annotated[float, typer.Option(min=0, help="GPUs of each actor.")] = 0.0,
    cpus_per_writer: Annotated[float, typer.Option(min=0, help="CPUs of each actor.")] = 1.0,
) -> None:
    """Make a drafter for a target from the target itself; repeated, it goes on where it ended.

    Under torchrun, several processes train together.
    """
    from drafter_service.distil.generate import GenerationOptions
    from drafter_service.distil.run import DistilOptions
    from drafter_service.distil.train import TrainingOptions

    options = DistilOptions(
        target=target,
        out=out,
        shape=_shape(shape),
        work=work,
        prompts=prompts,
        num_tokens=tokens,
        layers=_layers(layers),
        feature_layers=_feature_layers(feature_layers),
        vocabulary=vocabulary,
        rows=rows,
        threads=threads,
        generation=GenerationOptions(seed=seed, max_new_tokens=max_new_tokens),
        training=TrainingOptions(
            epochs=epochs,
            batch_size=batch_size,
            learning_rate=learning_rate,
            evaluate_every=evaluate_every,
            seed=seed,
        ),
    )
    ray = (cpus_per_writer, gpus_per_writer, address)
    _run(options, _ray_writers(options, writers, *ray) if writers else None)


def _run(options: "DistilOptions", writer: "RayWriters | None") -> None:
    from drafter_service.distil import ranks
    from drafter_service.distil.run import distil as run

    try:
        with ranks.joined(), _progress(quiet=not ranks.is_first()) as progress:
            measured = run(options, _Bars(progress), writer)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        raise typer.Exit(_INTERRUPTED) from None
    finally:
        if writer:
            writer.close()
    if measured is None:  # the first process tells
        return
    best = measured.best_length
    print(
        f"{options.out}: mean acceptance {measured.acceptance[best - 1].mean:.3f} over {best}"
        f" draft tokens, step {measured.step_ratio:.3f} of the target's, expected speed-up"
        f" {measured.speedup(best):.2f}"
    )


def _ray_writers(
    options: "DistilOptions", count: int, num_cpus: float, num_gpus: float, address: str
) -> "RayWriters":
    from drafter_service.distil.writers import load_target

    if not address:
        prepare_environment()
    from orchestrator.distil_ray import RayWriters  # imports ray, which wants the above

    # Other processes have other working directories.
    path = Path(options.target).expanduser()
    load = functools.partial(
        load_target,
        str(path.resolve()) if path.is_dir() else options.target,
        rows=options.rows,
        max_new_tokens=options.generation.max_new_tokens,
        threads=options.threads,
    )
    placement = PlacementConfig(num_cpus=num_cpus, num_gpus=num_gpus)
    return RayWriters(load, options.rows, count, placement, address)


def _progress(quiet: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True, quiet=quiet),
    )


def _shape(text: str) -> Literal["prediction_layer", "pruned"]:
    if text == "prediction_layer":
        return "prediction_layer"
    if text == "pruned":
        return "pruned"
    raise typer.BadParameter("prediction_layer or pruned", param_hint="--shape")


def _layers(text: str) -> tuple[int, ...] | int:
    numbers = _numbers(text, "--layers")
    return numbers[0] if len(numbers) == 1 else numbers


def _feature_layers(text: str) -> tuple[int, ...] | None:
    if text in ("", "none"):
        return () if text else None
    return _numbers(text, "--feature-layers")


def _numbers(text: str, option: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter("a number, or layers like 0,10,20,29", param_hint=option) from None
