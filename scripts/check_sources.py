"""Checks of the sources that no linter knows.

- One file knows transformers: only core/{model,tokenizer,convert}.py import it, beside tests,
  benchmarks and examples, which compare against it.
- No file names a package registry's host or a path of the machine it was written on: both would
  break on the next machine.
- The packages listed in pyproject.toml are those of the tree.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TRANSFORMERS_USERS = {
    *("core/model.py", "core/loading.py", "core/tokenizer.py", "core/convert.py"),
    *("core/mtp.py", "core/prediction_layer.py", "core/assistant.py", "core/block_diffusion.py"),
}
FREE_FOLDERS = ("tests/", "benchmarks/", "examples/")
PACKAGE_ROOTS = ("protos", "core", "drafter_service", "verifier_service", "orchestrator")
# Written in pieces, so that this file does not name what it forbids.
HOSTS = (
    *("pypi" + r"\.org", "python" + r"hosted\.org", "download" + r"\.pytorch"),
    *("npmjs" + r"\.(org|com)", "debian" + r"\.org", "proxy" + r"\.golang", "crates" + r"\.io"),
    *("ghcr" + r"\.io", "quay" + r"\.io", "docker" + r"\.(io|com)"),
)
PATHS = ("/" + "work/", "/" + "root/", "/opt/" + "pypi", "/opt/" + "wheels", "/" + r"home/(?!ray)")
FORBIDDEN = re.compile(rf"(?:{'|'.join(HOSTS)})|(?<![\w.)}}/-])(?:{'|'.join(PATHS)})")


def tracked_files() -> list[str]:
    """Files that git knows or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in sorted(set(names.split("\0"))) if name and (ROOT / name).is_file()]


def transformers_imports(name: str, source: str) -> Iterator[str]:
    """Imports of transformers in a file that may not have any."""
    if name in TRANSFORMERS_USERS or name.startswith(FREE_FOLDERS):
        return
    for node in ast.walk(ast.parse(source)):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        for module in modules:
            if module.split(".")[0] == "transformers":
                assert isinstance(node, ast.Import | ast.ImportFrom)
                yield f"{name}:{node.lineno}: imports transformers"


def forbidden_names(name: str, source: str) -> Iterator[str]:
    """Lines that name a registry's host or a machine's path."""
    for number, line in enumerate(source.splitlines(), start=1):
        found = FORBIDDEN.search(line)
        if found:
            yield f"{name}:{number}: names {found.group()!r}"


def unlisted_packages(names: list[str]) -> Iterator[str]:
    """Differences between the packages of the tree and those that pyproject.toml lists."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = set(project["tool"]["setuptools"]["packages"])
    inits = [Path(name).parent for name in names if name.endswith("/__init__.py")]
    present = {".".join(path.parts) for path in inits if path.parts[0] in PACKAGE_ROOTS}
    for package in sorted(listed ^ present):
        where = "is not in the tree" if package in listed else "is not listed"
        yield f"pyproject.toml: package {package} {where}"


def main() -> None:
    """Print every problem; exit 1 when there is one."""
    names = tracked_files()
    problems = list(unlisted_packages(names))
    for name in names:
        try:
            source = (ROOT / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # an image or another binary file
        problems.extend(forbidden_names(name, source))
        if name.endswith(".py"):
            problems.extend(transformers_imports(name, source))
    print("\n".join(problems))
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
