"""`forerun distil` on many machines: actors of a real Ray write the same files as this process, and
two processes under torchrun train the same drafter. Run as a module, this file is such a process.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

os.environ["RAY_AUTH_MODE"] = "disabled"  # read when ray is imported; only loopback talks here

from core.config import PlacementConfig, RayConfig
from core.errors import InvalidRequestError, ModelError, UnavailableError
from core.features import HIDDEN_STATES
from core.model import RaggedModel
from drafter_service.distil import ranks
from drafter_service.distil.generate import GenerationOptions
from drafter_service.distil.run import DistilOptions, distil
from drafter_service.distil.train import TrainingOptions
from drafter_service.distil.writers import LocalWriter, Writer, load_target
from orchestrator import distil_ray
from orchestrator.cli import app
from orchestrator.distil_ray import RayWriters
from orchestrator.local_ray import LocalRay
from tests.test_distil import Silent
from tests.tiny_models import TinyFactory

WRITING = GenerationOptions(max_new_tokens=12)
PROMPTS = [f"tell {i} of {'abcdefg'[i % 7]}" for i in range(150)]
SMALL = PlacementConfig(num_cpus=0.1)
ALL = 1 << 40
Files = dict[str, dict[str, Tensor]]
STOP = 9  # steps; between two checkpoints


@pytest.fixture(scope="module")
def target(tiny: TinyFactory) -> Path:
    """Many of its tokens end a text, so that lengths differ, from one token to twelve."""
    return tiny("llama", eos_token_id=list(range(40)))


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    running = LocalRay(RayConfig())
    yield
    running.stop()


def load(target: Path) -> RaggedModel:
    return load_target(str(target), rows=16, max_new_tokens=12, threads=1)


def load_and_die_once(target: Path, marker: Path) -> RaggedModel:
    """The first process that loads it is killed in the middle of a shard."""
    model = load(target)
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return model
    forward, rounds = model.forward, iter(range(8))

    def forward_or_die(rows):
        if next(rounds, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return forward(rows)

    model.forward = forward_or_die
    return model


def write(writer: Writer, folder: Path) -> tuple[Files, list[int], list[int]]:
    """Everything that a writer leaves, and the progress it told: of text, of hidden states."""
    told: tuple[list[int], list[int]] = [], []
    shards = writer.texts(PROMPTS, folder / "text", WRITING, ALL, told[0].append)
    writer.features([HIDDEN_STATES], shards, folder / "features", told[1].append)
    writer.close()
    files = [*shards, *(folder / "features" / shard.name for shard in shards)]
    return {str(path.relative_to(folder)): load_file(path) for path in files}, *told


@pytest.fixture(scope="module")
def written(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Files:
    """What this process writes."""
    return write(LocalWriter(load(target)), tmp_path_factory.mktemp("here"))[0]


def assert_same(files: Files, others: Files) -> None:
    """The same tokens; log-probabilities and states but for the last bit, which may depend on how
    many rows a forward has."""
    assert files.keys() == others.keys() and len(files) == 2 * 3
    for file, tensors in files.items():
        for name, tensor in tensors.items():
            exact = not tensor.is_floating_point()
            torch.testing.assert_close(
                tensor,
                others[file][name],
                rtol=0 if exact else 2e-3,
                atol=0 if exact else 1e-3,
                msg=lambda text, where=(file, name): f"{where}: {text}",
            )


def test_two_writers_write_what_one_process_does(
    local_ray: None, written: Files, target: Path, tmp_path: Path
) -> None:
    """Also when one is killed in the middle of a shard: else a drafter would depend on the machines
    that wrote its text. Repeated, it finds everything there and asks for no actor."""
    marker = tmp_path / "died"
    writer = RayWriters(partial(load_and_die_once, target, marker), 16, 2, SMALL)
    files, text, states = write(writer, tmp_path)
    assert marker.exists()
    assert_same(files, written)
    assert text == sorted(text) and len(text) == 3 and states == [1, 2, 3]
    again = RayWriters(partial(load, Path("nowhere")), 16, 2, SMALL)
    assert_same(write(again, tmp_path)[0], files)


def test_writers_that_cannot_work_are_told(
    local_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run must not wait for ever for a machine or a model that is not there."""
    nowhere = RayWriters(partial(load, tmp_path / "nowhere"), 16, 1, SMALL)
    with pytest.raises(ModelError, match="no such directory"):
        write(nowhere, tmp_path)
    nowhere.close()
    monkeypatch.setattr(distil_ray, "_JOINED_PLACEMENT_S", 0.3)
    homeless = RayWriters(partial(load, tmp_path), 16, 1, PlacementConfig(num_gpus=64))
    with pytest.raises(UnavailableError, match=r"no room .* GPU 64"):
        write(homeless, tmp_path)
    homeless.close()


# ------------------------------------------------------------ training


def options(target: Path, folder: Path, name: str) -> DistilOptions:
    """A run of a dozen steps on all prompts."""
    return DistilOptions(
        target=str(target),
        out=folder / name,
        work=folder / f"{name}.work",
        prompts=folder / "prompts.txt",
        num_tokens=100_000,  # more than there is: all prompts
        feature_layers=(0, 1),
        vocabulary=200,
        rows=16,
        generation=WRITING,
        training=TrainingOptions(epochs=0.8, batch_size=8, evaluate_every=4),
    )


def train_together(target: Path, folder: Path) -> None:
    """What a process under torchrun does: one run interrupted and resumed, one by the command."""
    run = options(target, folder, "resumed")
    given = {
        "target": run.target,
        "out": folder / "whole",
        "prompts": run.prompts,
        "tokens": run.num_tokens,
        "feature-layers": "0,1",
        "vocabulary": run.vocabulary,
        "rows": run.rows,
        "max-new-tokens": WRITING.max_new_tokens,
        "epochs": run.training.epochs,
        "batch-size": run.training.batch_size,
        "evaluate-every": run.training.evaluate_every,
    }
    arguments = [str(part) for key, value in given.items() for part in (f"--{key}", value)]
    with ranks.joined():
        try:
            distil(run, Silent(stop_at_step=STOP))
        except KeyboardInterrupt:
            last = Silent()
            measured = distil(run, last)
            assert last.steps[0] == STOP and (measured is not None) == ranks.is_first()
        with pytest.raises(InvalidRequestError, match="1 texts per step for 2 processes"):
            distil(replace(run, out=folder / "x", training=TrainingOptions(batch_size=1)), Silent())
        app(["distil", *arguments], standalone_mode=False)


@pytest.mark.timeout(180)
def test_two_processes_train_what_one_does(target: Path, tmp_path: Path) -> None:
    """Every token counts the same on either side, so only rounding differs: an average over
    processes instead of tokens, or a lost gradient, is far outside. Interrupted and resumed it is
    the same bit for bit, and one of them alone reports."""
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    distil(options(target, tmp_path, "alone"), Silent())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    arguments = ["-m", __name__, str(target), str(tmp_path)]
    ended = subprocess.run(
        [*command, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.count("mean acceptance") == 1
    alone, whole, resumed = (
        torch.load(tmp_path / f"{name}.work" / "training.pt", weights_only=True)["weights"]
        for name in ("alone", "whole", "resumed")
    )
    assert all(tensor.equal(resumed[name]) for name, tensor in whole.items())
    there, here = (torch.cat([each.flatten() for each in run.values()]) for run in (whole, alone))
    assert (there - here).norm() < 1e-3 * here.norm()


if __name__ == "__main__":
    train_together(Path(sys.argv[1]), Path(sys.argv[2]))
