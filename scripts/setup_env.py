"""Makes .venv and installs forerun with all its extras, at the versions of constraints.txt.

Runs under the system's Python, before anything is installed: standard library only. Of pip's
output it shows what takes long (large downloads, the installation) and, when pip fails,
all of it. A stamp file marks the finished environment; make compares its time.
"""

import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / ".stamp"
EXTRAS = "services,ray,tracing,dev"
LARGE_DOWNLOAD = re.compile(r"Downloading .*\((\d{2,}\.\d MB|\d{3,} MB|[\d.]+ GB)\)")


def say(text: str) -> None:
    """Print one progress line at once."""
    print(f"setup: {text}", flush=True)


def make_venv() -> None:
    """Create .venv. Exits with advice where Python is too old or has no venv."""
    if sys.version_info < (3, 11):  # noqa: UP036 - it runs before anything checked the version
        sys.exit(
            f"setup: needs Python 3.11 or newer, not {sys.version.split()[0]}: PYTHON=... make"
        )
    say(f"making .venv with Python {sys.version.split()[0]}")
    try:
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    except subprocess.CalledProcessError:
        sys.exit("setup: python -m venv failed; on Debian it needs the package python3-venv")


def install() -> None:
    """Install the project in editable form. Exits with pip's whole output when pip fails."""
    pip = [str(VENV / "bin" / "python"), "-m", "pip", "install", "--progress-bar", "off"]
    command = [*pip, "-c", "constraints.txt", "-e", f".[{EXTRAS}]"]
    say("installing forerun and what it needs (torch, ray, transformers: some minutes)")
    output: list[str] = []
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            output.append(line)
            show(line.strip())
    if process.returncode != 0:
        sys.exit("".join(output) + f"setup: pip failed with status {process.returncode}")


def show(line: str) -> None:
    """Print the lines of pip that tell where the time goes."""
    if line.startswith("Installing collected packages:"):
        say(f"unpacking {line.count(',') + 1} packages (a minute or two, silent)")
    elif LARGE_DOWNLOAD.search(line):
        say(line[:90])


def main() -> None:
    """Create the environment, or bring it up to date."""
    start = time.monotonic()
    if not (VENV / "bin" / "python").exists():
        make_venv()
    install()
    STAMP.touch()
    say(f"ready after {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
