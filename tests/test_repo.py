"""The repository keeps the promises that its README and its checks make."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import check, check_dockerfile, check_sources, protos, size_table

ROOT = check.ROOT


def test_checks_pass_that_take_no_time() -> None:
    """The tree itself is within its limits, whoever ran only the tests."""
    for name in ("sources", "sizes", "protos", "dockerfile"):
        done = subprocess.run(check.CHECKS[name], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, f"make check CHECK={name}\n{done.stdout}{done.stderr}"


def test_orchestrator_starts_without_torch() -> None:
    """The orchestrator's image has no torch: an import of it anywhere on the way would end it."""
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "import core.tokenizer, orchestrator.server, orchestrator.engine, orchestrator.cli\n"
        "assert 'ray' not in sys.modules, 'ray is imported before it is needed'\n"
        "import orchestrator.cluster, orchestrator.launch\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def readme_tree() -> str:
    """The README's fenced block that draws the file tree: the one that begins a line `protos/`."""
    blocks = (ROOT / "README.md").read_text(encoding="utf-8").split("```")[1::2]
    trees = [block for block in blocks if "\nprotos/" in block]
    assert len(trees) == 1, "README.md has one file tree"
    return trees[0]


def test_readme_tree_matches_the_tree() -> None:
    """A tree that names what is gone, or lacks a folder, misleads the newcomer it is for."""
    named: set[str] = set()
    for word in re.findall(r"[\w{},./*-]+", readme_tree()):
        before, _, rest = word.strip(",.").partition("{")
        inside, _, after = rest.partition("}")
        named |= {before + part + after for part in inside.split(",")}
    files = {name for name in named if re.search(r"\.(py|toml|proto|md)$", name)}
    folders = {name.rstrip("/") for name in named if name.endswith("/")}
    for name in files | folders:
        assert list(ROOT.glob(name)) or list(ROOT.glob(f"*/{name}")), f"README.md names {name}"
    present = {path.parts[0] for path in size_table.source_files() if len(path.parts) > 1}
    assert present <= folders, f"README.md's tree lacks {present - folders}"


@pytest.mark.parametrize("command", ["demo", "test", "check", "bench", "protos", "test-gpu"])
def test_make_knows_its_commands(command) -> None:
    """One command per chore; the README and the CI call them by these names."""
    done = subprocess.run(
        ["make", "--dry-run", command], cwd=ROOT, capture_output=True, text=True, check=True
    )
    scripts = [word for word in done.stdout.split() if word.endswith(".py")]
    for script in scripts:
        assert (ROOT / script).exists(), f"make {command} runs {script}"


# ---------------------------------------------------------------- the checks themselves


def test_size_table_finds_long_functions(tmp_path) -> None:
    """Exactly 60 lines pass, 61 do not, nested and async ones included."""
    body = "\n".join(["async def fits():", *["    pass"] * 59, "class C:", "    def grows(self):"])
    path = tmp_path / "module.py"
    path.write_text(body + "\n        pass" * 60)
    assert list(size_table.long_functions(path)) == [f"{path}:62 grows has 61 lines"]


def test_sources_check_finds_what_it_forbids() -> None:
    """An import in a function, a host and a path are found; look-alikes are not."""
    source = "def f():\n    from transformers.models import gpt2\nimport transformers_x\n"
    assert len(list(check_sources.transformers_imports("core/wire.py", source))) == 1
    assert not list(check_sources.transformers_imports("core/model.py", source))
    host, path = "ghcr" + ".io", "/" + "root/x"
    assert len(list(check_sources.forbidden_names("a", f"{host}\nok\n'{path}'"))) == 2
    assert not list(check_sources.forbidden_names("a", "see net" + path + " and core/work/x"))
    assert list(check_sources.unlisted_packages(["core/new/__init__.py"]))


def test_protos_check_covers_every_file() -> None:
    """Generated code of a .proto file that is gone, or missing code, counts as stale."""
    names = {path.stem for path in (ROOT / "protos").glob("*.proto")}
    expected = {f"{name}{suffix}" for name in names for suffix in protos.SUFFIXES}
    assert set(protos.generated(ROOT / "protos")) == expected


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("python:3.11-slim-bookworm", "python:latest", "no fixed tag"),
        ("USER 1000\nEXPOSE", "EXPOSE", "numeric id"),
        ("-c /opt/forerun/constraints.txt \\\n    --find-links", "--find-links", "without -c"),
        ("COPY core core", "COPY cores cores", "does not exist"),
        ("COPY core core", "COPY tests tests", "kept out"),
        ("COPY core core", "ADD core core", "not ADD"),
        ("--from=services-embedded", "--from=elsewhere", "no stage"),
        ("mkdir -p /opt", "curl x && mkdir -p /opt", "no place"),
    ],
)
def test_dockerfile_check_refuses(tmp_path, old, new, problem) -> None:
    """Each rule refuses the Dockerfile that breaks it, and only that."""
    text = check_dockerfile.DOCKERFILE.read_text(encoding="utf-8")
    assert old in text
    path: Path = tmp_path / "Dockerfile"
    path.write_text(text.replace(old, new, 1))
    found = check_dockerfile.problems(path)
    assert found and all(problem in line for line in found)


def test_every_module_says_what_it_is() -> None:
    """A module without a header leaves its reader to guess; headers are short enough to be read."""
    for path in size_table.source_files():
        if path.name == "__init__.py" or path.parts[0] == "tests":
            continue
        header = ast.get_docstring(ast.parse((ROOT / path).read_text(encoding="utf-8")))
        assert header, f"{path} has no header"
        assert 1 <= len(header.splitlines()) <= 20, f"{path}: a header of 3 to 15 lines"
