"""The examples, as a reader would run them, against a whole small system."""

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from core.config import OrchestratorConfig
from orchestrator.server import serve_orchestrator
from tests.harness import pool, serving
from tests.tiny_models import EOS, TinyFactory

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def address(tiny: TinyFactory) -> AsyncIterator[str]:
    """Where a tiny target with its own copy as drafter is served."""
    target = tiny("llama", eos_token_id=EOS, max_position_embeddings=1024)
    pools = [pool("copy", "draft_model", target)]
    async with serving(target, pools, model={"max_length": 1024}) as stack:
        server = await serve_orchestrator(stack.engine, stack.tokenizer, OrchestratorConfig(port=0))
        yield server.address
        await server.stop()


async def run(name: str, *arguments: str, address: str, stdin: str = "") -> str:
    """Run an example; what it printed."""
    pipe = asyncio.subprocess.PIPE
    path = str(ROOT / "examples" / f"{name}.py")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, path, *arguments, "--address", address),
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"},
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
    )
    out, err = await process.communicate(stdin.encode())
    assert (process.returncode, err) == (0, b"")
    return out.decode()


async def test_chat(address: str):
    """The second turn finds the first in the cache."""
    out = await run("chat", address=address, stdin="hi there, how are you?\nand now?\n\n")
    first, second = re.findall(r"\[(\d+) tokens read, (\d+) of them cached", out)
    assert int(second[0]) > int(first[0]) and int(second[1]) > 0


async def test_generate(address: str):
    """The client that resumes."""
    out = await run("generate", "hi", "--max-new-tokens", "8", address=address)
    assert "drafted by 'copy'" in out


async def test_seeded_sampling(address: str):
    """Each of the three samples comes again by its seed, without drafts."""
    out = await run("seeded_sampling", "hello", address=address)
    assert out.count("the same again") == 3


async def test_structured_output(address: str):
    """A model that knows nothing answers in JSON of the schema."""
    out = await run("structured_output", "Bob, 7, sings.", address=address)
    answer, tokens = out.rsplit("[", 1)
    person = json.loads(answer)
    assert set(person) == {"name", "age", "skills"} and 0 <= person["age"] <= 150
    assert "accepted" in tokens


async def test_logprobs(address: str):
    """A line for each token, and a perplexity for prompt and answer."""
    out = await run("logprobs", "hello", "--max-new-tokens", "8", address=address)
    assert out.count("   of: ") == 8
    assert "nan" not in out.rsplit("perplexity", 1)[1]
