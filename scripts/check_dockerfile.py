"""Checks deploy/Dockerfile with Docker's own parser and a few rules of this project.

Every image is pinned by a tag; nothing is downloaded but by pip under constraints.txt; what is
copied exists and is let through by the .dockerignore; a stage that is shipped does not run as
root; no secret or proxy is baked in. Knows nothing of what the images are for.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import dockerfile

ROOT = Path(__file__).resolve().parent.parent
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
SHIPPED = ("orchestrator", "services", "orchestrator-embedded", "services-embedded")


class Stage:
    """One FROM and the commands behind it. `user` is what the last USER, or the parent, set."""

    def __init__(self, name: str, base: str, parent: "Stage | None") -> None:
        self.name = name
        self.base = base
        self.user: str = parent.user if parent else "root"
        self.commands: list[dockerfile.Command] = []


def read_stages(path: Path = DOCKERFILE) -> tuple[dict[str, str], dict[str, Stage]]:
    """The global build arguments and the stages of a Dockerfile.

    Raises dockerfile.GoParseError on what Docker could not parse.
    """
    arguments: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    current: Stage | None = None
    for command in dockerfile.parse_file(str(path)):
        keyword = command.cmd.upper()
        if keyword == "FROM":
            base, name = command.value[0], command.value[-1]
            current = stages[name] = Stage(name, base, stages.get(base))
        elif current is None:
            key, _, value = command.value[0].partition("=")
            arguments[key] = value
        else:
            current.commands.append(command)
            if keyword == "USER":
                current.user = command.value[0]
    return arguments, stages


def base_problems(arguments: dict[str, str], stages: dict[str, Stage]) -> Iterator[str]:
    """Bases without a fixed tag, and stages that are missing or run as root."""
    for stage in stages.values():
        base = stage.base
        for key, value in arguments.items():
            base = base.replace("${" + key + "}", value)
        if base not in stages and (":" not in base or base.endswith(":latest")):
            yield f"stage {stage.name}: the base {base!r} has no fixed tag"
    for name in SHIPPED:
        if name not in stages:
            yield f"there is no stage {name!r}"
        elif not stages[name].user.isdigit() or stages[name].user == "0":
            yield f"stage {name}: ends as user {stages[name].user!r}; give a numeric id, not root's"


def command_problems(stage: Stage, stages: dict[str, Stage], allowed: set[str]) -> Iterator[str]:
    """Commands that download, copy or bake in what they should not."""
    for command in stage.commands:
        keyword, text = command.cmd.upper(), " ".join(command.value)
        where = f"line {command.start_line}"
        if keyword == "ADD":
            yield f"{where}: COPY, not ADD"
        if keyword == "RUN" and "pip install" in text:
            for option in ("--no-cache-dir", "-c "):
                if option not in text:
                    yield f"{where}: pip install without {option.strip()}"
        if keyword == "RUN" and any(tool in text.split() for tool in ("curl", "wget", "sudo")):
            yield f"{where}: curl, wget and sudo have no place in an image"
        if keyword == "COPY":
            origin = [flag.partition("=")[2] for flag in command.flags if "--from" in flag]
            if origin and origin[0] not in stages:
                yield f"{where}: copies from {origin[0]!r}, which is no stage"
            for source in [] if origin else command.value[:-1]:
                if not (ROOT / source).exists():
                    yield f"{where}: {source} does not exist"
                elif source not in allowed:
                    yield f"{where}: {source} is kept out by {DOCKERFILE.name}.dockerignore"


def let_through() -> set[str]:
    """The top-level names that the .dockerignore lets into the build."""
    path = DOCKERFILE.with_name(DOCKERFILE.name + ".dockerignore")
    lines = path.read_text(encoding="utf-8").splitlines()
    return {line.removeprefix("!") for line in lines if line.startswith("!")}


def problems(path: Path = DOCKERFILE) -> list[str]:
    """Everything that is wrong with a Dockerfile of this repository."""
    try:
        arguments, stages = read_stages(path)
    except dockerfile.GoParseError as error:
        return [f"cannot be parsed: {error}"]
    allowed = let_through()
    found = list(base_problems(arguments, stages))
    for stage in stages.values():
        found.extend(command_problems(stage, stages, allowed))
    return found


def main() -> None:
    """Print every problem; exit 1 when there is one."""
    found = problems()
    print("\n".join(found), end="\n" if found else "")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
