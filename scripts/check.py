"""Runs every static check and prints one line per check with its name and time.

usage: check.py [NAME ...]   (all of them without a name)

All checks run even when one fails; the output of a failed one, and of those whose output is the
point, is shown. Knows nothing of what the checks look at: each is a command that exits non-zero.
"""

import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = str(Path(sys.executable).parent)
PYTHON = sys.executable

CHECKS: dict[str, list[str]] = {
    "lint": [f"{BIN}/ruff", "check", "--output-format=concise", "."],
    "format": [f"{BIN}/ruff", "format", "--check", "."],
    "types": [f"{BIN}/mypy"],
    "types-scripts": [f"{BIN}/mypy", "scripts", "benchmarks", "examples"],
    "imports": [f"{BIN}/lint-imports"],
    "sources": [PYTHON, "scripts/check_sources.py"],
    "sizes": [PYTHON, "scripts/size_table.py"],
    "protos": [PYTHON, "scripts/protos.py", "--check"],
    "protos-lint": [f"{BIN}/buf", "lint"],
    "protos-format": [f"{BIN}/buf", "format", "--diff", "--exit-code"],
    "dockerfile": [PYTHON, "scripts/check_dockerfile.py"],
    "manifests": [PYTHON, "scripts/check_manifests.py"],
}
SHOWN = {"sizes", "manifests"}


def run_check(name: str) -> bool:
    """Run one check and print its line. Returns whether it passed."""
    start = time.monotonic()
    done = subprocess.run(
        CHECKS[name], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    passed = done.returncode == 0
    seconds = time.monotonic() - start
    print(f"check: {name:<14} {'ok' if passed else 'FAILED':<7} {seconds:5.1f} s", flush=True)
    if (not passed or name in SHOWN) and done.stdout.strip():
        print("    " + done.stdout.rstrip().replace("\n", "\n    "), flush=True)
    return passed


def main() -> None:
    """Run the checks named on the command line, or all."""
    names = sys.argv[1:] or list(CHECKS)
    unknown = [name for name in names if name not in CHECKS]
    if unknown:
        sys.exit(f"check: no check {unknown[0]!r}; there are: {', '.join(CHECKS)}")
    failed = [name for name in names if not run_check(name)]
    if failed:
        sys.exit(f"check: {len(failed)} of {len(names)} failed: {', '.join(failed)}")
    print(f"check: all {len(names)} passed")


if __name__ == "__main__":
    main()
