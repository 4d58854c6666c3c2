"""The `forerun` command as a user meets it: its flags, its errors, its end. Real processes."""

import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest
import typer

from orchestrator.cli import app
from protos import generation_pb2, generation_pb2_grpc
from tests.command_flags import FLAGS
from tests.tiny_models import TinyFactory

FORERUN = (sys.executable, "-m", "orchestrator.cli")
CONFIG = """
[target]
model = "{model}"
device_map = "cpu"
threads = 1
max_length = 2048
[verifier]
placement = {{ num_cpus = 0.1 }}
[[drafter_pools]]
name = "ngram"
kind = "ngram"
placement = {{ num_cpus = 0.1 }}
addresses = {drafters}
[orchestrator]
port = 0
drain_timeout_s = 60
metrics_port = 0
verifier_addresses = {verifiers}
[http]
enabled = true
port = 0
"""


class Processes:
    """Starts commands and ends what a failed test left."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: list[subprocess.Popen[str]] = []

    def config(self, model: object, verifiers: object = (), drafters: object = ()) -> str:
        """A config file for these addresses."""
        text = CONFIG.format(
            model=model, verifiers=list(map(str, verifiers)), drafters=list(map(str, drafters))
        )
        path = self._folder / f"{len(list(self._folder.iterdir()))}.toml"
        path.write_text(text)
        return str(path)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """A forerun command, stdout and stderr as one stream."""
        process = subprocess.Popen(
            [*FORERUN, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._running.append(process)
        return process

    def end(self) -> None:
        """Kill what still runs."""
        for process in self._running:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """Commands of one test."""
    started = Processes(tmp_path)
    yield started
    started.end()


def read_until(process: subprocess.Popen[str], start: str) -> str:
    """Wait for a line that has `start` in it and return what follows."""
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if start in line:
            return line.split(start, 1)[1].strip()
    raise AssertionError(f"{process.args} ended without {start!r}: {''.join(seen)}")


def generate(address: str, num_tokens: int) -> Iterator[generation_pb2.GenerateResponse]:
    """Stream an answer."""
    with grpc.insecure_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        stopping = generation_pb2.StoppingOptions(max_new_tokens=num_tokens, ignore_eos=True)
        yield from stub.Generate(generation_pb2.GenerateRequest(prompt="hello", stopping=stopping))


def test_flags_are_frozen() -> None:
    """A flag that is renamed or dropped would break scripts without anybody noticing."""
    command = typer.main.get_command(app)
    flags = {
        name: {
            option
            for parameter in sub.params
            if parameter.name != "help"
            for option in (*parameter.opts, *parameter.secondary_opts)
        }
        for name, sub in command.commands.items()  # type: ignore[attr-defined]
    }
    assert flags == FLAGS


def test_help_imports_neither_torch_nor_ray() -> None:
    """`forerun --help` and the client commands would take seconds to start."""
    code = (
        "import sys; from orchestrator.cli import app;"
        "print([m for m in ('torch', 'ray', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "config", "expected"),
    [
        ("serve", "[target]\nmodle = 'x'", "did you mean 'model'?"),
        ("serve", None, "no such file"),
        ("serve --address 127.0.0.1:9", "[target]\nmodel = 'x'", "no Ray cluster at 127.0.0.1:9"),
        ("verifier", "[target]\nmodel = '/no/such/model'", "/no/such/model"),
        ("verifier", "[target]\nmodel = 'embedded:none'", "embedded:smollm2-135m-instruct"),
        ("orchestrator", "[target]\nmodel = 'x'", "orchestrator.verifier_addresses"),
        ("drafter --pool b", "[target]\nmodel = 'x'", "no pool 'b'; there are: none"),
        (
            "drafter --pool a",
            "[target]\nmodel = 'x'\n[[drafter_pools]]\nname = 'a'\nkind = 'magic'",
            "magic",
        ),
    ],
)
def test_an_error_is_one_line_and_code_2(
    tmp_path: Path, arguments: str, config: str | None, expected: str
) -> None:
    """A user would get a traceback, no reason, or a code that says success."""
    path = tmp_path / "config.toml"
    if config is not None:
        path.write_text(config)
    command = [*FORERUN, *arguments.split(), "--config", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2
    assert len(errors) == 1 and expected in errors[0]
    assert "Traceback" not in done.stderr and done.stdout == ""


def test_services_without_ray_serve_and_drain(processes: Processes, tiny_llama: Path) -> None:
    """Single services would not find each other, cut running answers at SIGTERM, or stay."""
    verifier = processes.start("verifier", "--config", processes.config(tiny_llama))
    drafter = processes.start("drafter", "--config", processes.config(tiny_llama), "--pool=ngram")
    addresses = [read_until(p, "serving at ") for p in (verifier, drafter)]
    config = processes.config(tiny_llama, addresses[:1], addresses[1:])
    orchestrator = processes.start("orchestrator", "--config", config)
    metrics = read_until(orchestrator, "metrics at ")
    openai = read_until(orchestrator, "OpenAI's API is at ")
    address = read_until(orchestrator, "forerun is ready at ")
    with urllib.request.urlopen(f"{openai}/models", timeout=30) as models:
        assert str(tiny_llama).encode() in models.read()
    with urllib.request.urlopen(metrics, timeout=30) as page:
        assert b"forerun_requests_running 0.0" in page.read()

    responses = generate(address, 200)
    next(responses)  # it runs
    orchestrator.send_signal(signal.SIGTERM)
    read_until(orchestrator, "draining")
    *_, last = responses
    assert last.finished.usage.completion_tokens == 200
    assert orchestrator.wait(60) == 0
    for process in (verifier, drafter):
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_serve_leaves_nothing(processes: Processes, tiny_llama: Path) -> None:
    """Ray's processes or a model would stay behind."""
    serve = processes.start("serve", "--config", processes.config(tiny_llama))
    address = read_until(serve, "forerun is ready at ")
    *_, last = generate(address, 8)
    assert last.finished.usage.completion_tokens == 8
    family = psutil.Process(serve.pid).children(recursive=True)
    assert any("ServiceActor" in process.name() for process in family)
    serve.send_signal(signal.SIGTERM)
    assert serve.wait(60) == 0
    assert [process for process in family if process.is_running()] == []


def test_second_signal_ends_at_once(processes: Processes, tiny: TinyFactory) -> None:
    """Who presses Ctrl-C twice would wait for the drain all the same, or leave Ray behind."""
    model = tiny("llama", max_position_embeddings=2048)
    serve = processes.start("serve", "--config", processes.config(model))
    responses = generate(read_until(serve, "forerun is ready at "), 2000)
    next(responses)
    family = psutil.Process(serve.pid).children(recursive=True)
    for process in family:
        if "ServiceActor" in process.name():
            process.suspend()  # the answer cannot end any more
    serve.send_signal(signal.SIGINT)
    read_until(serve, "draining")
    serve.send_signal(signal.SIGINT)
    assert serve.wait(30) == 128 + signal.SIGINT
    _, alive = psutil.wait_procs(family, timeout=30)
    assert alive == []
    with pytest.raises(grpc.RpcError):
        list(responses)
