"""The command line's client, as its own process, against a real server over the engine double."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from core.config import OrchestratorConfig
from core.errors import OverloadedError
from core.params import Constraint, ConstraintKind, Rule
from core.rpc import RunningServer
from core.tokenizer import Tokenizer
from orchestrator.client_cli import Painter
from orchestrator.server import serve_orchestrator
from protos import generation_pb2
from tests.echo_engine import EchoEngine
from tests.tiny_models import ASSISTANT, save_tokenizer

PROGRAM = """
import typer
from orchestrator import client_cli
app = typer.Typer()
app.command()(client_cli.generate)
app.command()(client_cli.status)
app()
"""


@pytest.fixture
def engine() -> EchoEngine:
    """A fresh engine double."""
    return EchoEngine()


@pytest.fixture
async def server(engine: EchoEngine, tmp_path: Path) -> AsyncIterator[RunningServer]:
    """A server over it."""
    save_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(str(tmp_path))
    running = await serve_orchestrator(engine, tokenizer, OrchestratorConfig(port=0))
    yield running
    await running.stop()


async def start(*arguments: str) -> asyncio.subprocess.Process:
    """Start the command."""
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, *arguments, stdout=pipe, stderr=pipe
    )


async def run(*arguments: str) -> tuple[int, str, str]:
    """Run the command: exit code, stdout, stderr."""
    process = await start(*arguments)
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_text_goes_to_stdout_and_statistics_to_stderr(server: RunningServer):
    """A pipe must get the text and nothing else, uncoloured."""
    code, out, err = await run("generate", "hello wörld", "--address", server.address)
    assert (code, out) == (0, "hello wörld\n")
    assert "12 tokens in 1.50 s (8.0/s), first after 500 ms" in err
    assert "6 of 8 draft tokens accepted (75%, ngram)" in err
    assert err.count("\n") == 1


async def test_options_arrive(server: RunningServer, engine: EchoEngine):
    """An option that is dropped would silently give another text."""
    options = ["--chat", "--temperature", "0.5", "--top-k", "4", "--top-p", "0.25", "--seed", "9"]
    options += ["--max-new-tokens", "3", "--stop", "a", "--stop", "b", "--drafter", "ngram"]
    options += ["--no-speculation", "--max-draft-tokens", "2"]
    code, _, err = await run("generate", "hi", *options, "--address", server.address)
    assert code == 0, err
    request = engine.requests[0]
    assert request.prompt_token_ids[-1] == ASSISTANT
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 4, 0.25)
    assert (sampling.seed, request.stopping.max_new_tokens) == (9, 3)
    assert request.stopping.stop == ("a", "b")
    speculation = request.speculation
    assert (speculation.enabled, speculation.max_draft_tokens) == (False, 2)
    assert speculation.drafter == "ngram"


async def test_sampling_options_arrive(server: RunningServer, engine: EchoEngine):
    """Each under its own name, and the file's content in place of its name."""
    given = {"min_p": 0.1, "typical_p": 0.9, "repetition_penalty": 1.5, "presence_penalty": -1.0}
    given |= {"frequency_penalty": 0.5, "no_repeat_ngram_size": 3, "min_new_tokens": 2}
    given |= {"ensemble_weight": 0.7}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    options += ["--rule", "ensemble", "--drafter", "small", "--include-stop", "--json"]
    code, _, err = await run("generate", "hi", *options, "--address", server.address)
    assert code == 0, err
    request = engine.requests[0]
    assert {name: getattr(request.sampling, name) for name in given} == given
    assert request.sampling.rule is Rule.ENSEMBLE
    assert request.stopping.include_stop and request.output.logprobs is None


async def test_constraints_arrive(server: RunningServer, engine: EchoEngine, tmp_path: Path):
    """The content of the file, not its name."""
    file = tmp_path / "schema.json"
    file.write_text('{"type": "object"}')
    for option, value in (("--json-schema", str(file)), ("--regex", "[a-z]+")):
        code, _, err = await run("generate", "hi", option, value, "--address", server.address)
        assert code == 0, err
    assert [request.sampling.constraint for request in engine.requests] == [
        Constraint(ConstraintKind.JSON_SCHEMA, '{"type": "object"}'),
        Constraint(ConstraintKind.REGEX, "[a-z]+"),
    ]


async def test_samples_are_printed_whole(server: RunningServer, engine: EchoEngine):
    """Blocks of different samples in one stream are no text."""
    engine.is_seeded = True
    options = ("--n", "3", "--seed", "0", "--address", server.address)
    code, out, err = await run("generate", "abcdefghi", *options)
    assert (code, sorted(out.splitlines())) == (0, ["abcdefghi", "bcdefghia", "cdefghiab"])
    assert [f"seed {seed}" in err for seed in range(4)] == [True, True, True, False]


async def test_json(server: RunningServer):
    """Scripts read one object per message, with ids, origins and the end."""
    options = ("--json", "--logprobs", "1", "--address", server.address)
    _, out, err = await run("generate", "hello world", *options)
    messages = [json.loads(line) for line in out.splitlines()]
    assert "".join(message["text"] for message in messages) == "hello world"
    assert messages[0]["origins"][-1] == "TOKEN_ORIGIN_TARGET"
    assert messages[-1]["finished"]["usage"]["completion_tokens"] == 11
    assert all(len(m["logprobs"]) == len(m["token_ids"]) for m in messages)
    assert err == ""


async def test_status(server: RunningServer):
    """The operator sees what is lost; scripts see the same."""
    code, out, _ = await run("status", "--address", server.address)
    assert code == 0 and "tiny, forerun" in out and "lost" in out and "1/8" in out
    assert "drafter-0: gone" in out
    _, out, _ = await run("status", "--json", "--address", server.address)
    assert json.loads(out)["drafter_pools"][0]["replicas"][0]["num_losses"] == 3


async def test_errors_are_one_line(server: RunningServer, engine: EchoEngine, tmp_path: Path):
    """A traceback is no error message."""
    engine.error = OverloadedError("the queue is full")
    reach = ("--address", server.address)
    cases = [
        (("generate", "x", *reach), "error: RESOURCE_EXHAUSTED: the queue is full"),
        (("generate", "x", "--temperature", "-1", *reach), "INVALID_ARGUMENT: sampling.temp"),
        (("generate", "x", "--top-k", str(2**40), *reach), "error: "),
        (("generate", "x", "--logprobs", "1", *reach), "error: --logprobs: "),
        (("generate", "x", "--regex", "a", "--json-schema", "b", *reach), "only one of them"),
        (("generate", "x", "--json-schema", str(tmp_path / "none"), *reach), "No such file"),
        (("generate", "x", "--n", "0", *reach), "INVALID_ARGUMENT: n: must be between 1 and 16"),
        (("status", "--address", "127.0.0.1:1"), "error: cannot reach 127.0.0.1:1"),
        (("status", "--token-file", str(tmp_path / "none"), *reach), "error: auth token file"),
    ]
    for arguments, message in cases:
        code, out, err = await run(*arguments)
        assert (code, out, err.count("\n")) == (1, "", 1), err
        assert message in err


async def test_interrupt_cancels_the_call(server: RunningServer, engine: EchoEngine):
    """Ctrl-C must free the request's slots, and print no traceback."""
    engine.hold = asyncio.Event()
    process = await start("generate", "hello world", "--address", server.address)
    assert process.stdout is not None
    assert await process.stdout.read(5) == b"hello"
    process.send_signal(signal.SIGINT)
    _, err = await process.communicate()
    assert (process.returncode, err) == (130, b"")
    await asyncio.wait_for(engine.closed.wait(), 30)


def test_the_client_imports_nothing_heavy():
    """`forerun status` would take seconds."""
    code = "import sys, orchestrator.client_cli; print(*sys.modules)"
    imported = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert "grpc" in imported and not {"torch", "transformers", "ray"} & set(imported)


def test_colours_follow_text_that_lags_behind_its_tokens():
    """A stop string's beginning comes late: colours must not shift to other characters."""
    draft, target = 1, 2
    painter = Painter()
    first = generation_pb2.GenerateResponse(
        text="a", token_texts=["a", "E"], origins=[draft, target]
    )
    second = generation_pb2.GenerateResponse(text="Eb\ufffd", token_texts=["b"], origins=[draft])
    assert painter.paint(first) == "\x1b[32ma\x1b[0m"
    assert painter.paint(second) == "E\x1b[32mb\x1b[0m\ufffd"
