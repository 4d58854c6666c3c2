"""Generates the committed protobuf code from protos/*.proto, or checks that it is fresh.

usage: protos.py [--check]

Per .proto file: messages (`_pb2.py`, `_pb2.pyi`) and typed gRPC stubs (`_pb2_grpc.py`, `.pyi`).
The versions of the generator are those of constraints.txt; other versions may write other bytes.
"""

import filecmp
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


def generate(out: Path) -> None:
    """Write the generated code of every .proto file under `out`/protos."""
    sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "protos").glob("*.proto"))
    outputs = ("python", "pyi", "grpc_python", "mypy_grpc")
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", *sources]
    command += [f"--{kind}_out={out}" for kind in outputs]
    # protoc looks for mypy-protobuf's plugin on the PATH.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True, text=True
    )
    if done.returncode != 0:
        sys.exit(f"protos: protoc failed\n{done.stderr}")


def generated(folder: Path) -> dict[str, Path]:
    """The generated files of a folder, by name."""
    return {path.name: path for path in folder.iterdir() if path.name.endswith(SUFFIXES)}


def main() -> None:
    """Generate in place, or compare a new generation with the committed code."""
    with tempfile.TemporaryDirectory() as temporary:
        generate(Path(temporary))
        fresh = generated(Path(temporary) / "protos")
        committed = generated(ROOT / "protos")
        stale = sorted(
            name
            for name in fresh.keys() | committed.keys()
            if name not in fresh
            or name not in committed
            or not filecmp.cmp(fresh[name], committed[name], shallow=False)
        )
        if "--check" in sys.argv[1:]:
            if stale:
                sys.exit(f"protos: not fresh (run `make protos`): {', '.join(stale)}")
            return
        for name in stale:
            (committed[name].unlink() if name not in fresh else None)
        for name, path in fresh.items():
            shutil.copy(path, ROOT / "protos" / name)
    print(f"protos: {len(fresh)} files written, {len(stale)} of them changed")


if __name__ == "__main__":
    main()
