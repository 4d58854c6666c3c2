"""Prints lines per file and fails over the limits: 300 a file, 60 a function.

Counts every line of the hand-written Python files. The package (what is installed) has a target
of about 6,000 lines: what grows past it is a sign of a missing idea, so it is printed, not failed.
Files under 40 lines are listed as a hint: an interface may be that short, other files seldom.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ("core", "drafter_service", "verifier_service", "orchestrator")
MAX_FILE = 300
MAX_FUNCTION = 60
MIN_FILE = 40
PACKAGE_TARGET = 6_000


def source_files() -> list[Path]:
    """Hand-written Python files that git knows or would add, relative to the root."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.py"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [Path(name) for name in sorted(set(names.split("\0"))) if name]
    return [path for path in paths if "_pb2" not in path.name and (ROOT / path).exists()]


def long_functions(path: Path) -> Iterator[str]:
    """Functions over the limit, as `name (lines)`; decorators are not counted."""
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            if length > MAX_FUNCTION:
                yield f"{path}:{node.lineno} {node.name} has {length} lines"


def print_table(lines: dict[Path, int]) -> None:
    """Print one row per top-level folder with its files, and the package's total."""
    table = Table("folder", "lines", "files", title="Lines of hand-written Python")
    folders: dict[str, dict[Path, int]] = {}
    for path, count in lines.items():
        if count:
            folders.setdefault(path.parts[0], {})[path] = count
    for folder, files in folders.items():
        names = "  ".join(f"{path.relative_to(folder)} {n}" for path, n in files.items())
        table.add_row(folder, str(sum(files.values())), names)
    Console(width=110).print(table)
    total = sum(n for path, n in lines.items() if path.parts[0] in PACKAGE)
    print(f"package: {total} lines of a target of {PACKAGE_TARGET}")


def main() -> None:
    """Print the table; exit 1 when a file or a function is over its limit."""
    lines = {p: len((ROOT / p).read_text(encoding="utf-8").splitlines()) for p in source_files()}
    print_table(lines)
    short = [f"{p} {n}" for p, n in lines.items() if n < MIN_FILE and p.name != "__init__.py"]
    if short:
        print(f"hint: under {MIN_FILE} lines: {', '.join(short)}")
    problems = [f"{p} has {n} lines" for p, n in lines.items() if n > MAX_FILE]
    for path in lines:
        problems.extend(long_functions(path))
    for problem in problems:
        print(f"over the limit ({MAX_FILE} a file, {MAX_FUNCTION} a function): {problem}")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
