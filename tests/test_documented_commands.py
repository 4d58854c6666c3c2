"""What the documents tell people to type: `forerun` reads it, and their TOML is a configuration."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import typer

from core.config import parse_config
from orchestrator.cli import app

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^(?:\$ )?(?:\.venv/bin/)?forerun (?!is ready)(.+)$", re.MULTILINE)


def blocks(path: Path, language: str) -> list[str]:
    return [text for name, text in BLOCK.findall(path.read_text()) if name == language]


COMMANDS = [
    pytest.param(line, id=f"{path.name}: {line[:50]}")
    for path in DOCUMENTS
    for language in ("", "bash", "sh")
    for block in blocks(path, language)
    for line in COMMAND.findall(block.replace("\\\n", " "))
]


@pytest.mark.parametrize("line", COMMANDS)
def test_the_command_is_one(line: str) -> None:
    """A flag that was renamed lives on in a document, and fails where it is needed."""
    line = re.sub(r"\$\w+|\$\(.*?\)", "x", line)
    name, *arguments = shlex.split(line, comments=True)
    ends = [i for i, each in enumerate(arguments) if each in ("<", ">", "|", "&", ";")]
    arguments = ["1" if each == "N" else each for each in arguments[: min(ends, default=None)]]
    command = typer.main.get_command(app)
    with command.make_context("forerun", [name]) as context:
        found = command.get_command(context, name)  # type: ignore[attr-defined]
        assert found is not None, name
        found.make_context(name, arguments, parent=context)


def test_there_are_commands() -> None:
    """A pattern that matches nothing proves nothing."""
    assert len(COMMANDS) > 20


def test_the_cluster_of_the_operations_document_is_a_configuration() -> None:
    """The walk through docs/operations.md would end at its first command."""
    (text,) = [t for t in blocks(ROOT / "docs" / "operations.md", "toml") if "[target]" in t]
    config = parse_config(tomllib.loads(text))
    assert [pool.name for pool in config.remote_pools] == ["ngram"]
