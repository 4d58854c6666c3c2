"""Two orchestrators over one verifier and one drafter: each has its streams, and all its tokens."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from core.config import OrchestratorConfig
from core.errors import UnavailableError
from orchestrator.detokenizer import Detokenizer
from orchestrator.engine import Engine
from orchestrator.requests import ReplicaSpec
from tests.harness import Stack, pool, serving
from tests.policy import make_request
from tests.tiny_models import TinyFactory, greedy_reference

NUM_STREAMS = 4
NUM_SLOTS = 6  # fewer than both want together, and each believes to have all of them
LENGTH = 80


@pytest.fixture(scope="module")
def target(tiny: TinyFactory) -> Path:
    return tiny("llama", eos_token_id=300)


@contextlib.asynccontextmanager
async def two(target: Path) -> AsyncIterator[tuple[Stack, Engine]]:
    """A whole system, and a second engine that uses its services."""
    pools = [pool("copy", "draft_model", target, k=3)]
    async with serving(target, pools, model={"max_sequences": NUM_SLOTS}) as stack:

        def spec(replica_id: str, pool_name: str) -> ReplicaSpec:
            async def resolve() -> str:
                return stack.addresses[replica_id]

            return ReplicaSpec(replica_id, pool_name, resolve)

        specs = [spec("verifier", ""), spec("copy", "copy")]
        engine = Engine(OrchestratorConfig(draft_wait_ms=2000), pools, specs)
        await engine.start()
        yield stack, engine
        await engine.stop()


async def start(
    stack: Stack, engine: Engine, first: int, begun: asyncio.Semaphore
) -> list["asyncio.Task[list[int]]"]:
    """NUM_STREAMS requests; each releases `begun` once."""

    async def run(index: int) -> list[int]:
        ids: list[int] = []
        # The same ids at both: who numbers requests knows of no other orchestrator.
        request = make_request((first + index, 7, 9), LENGTH, request_id=f"r{first % 10 + index}")
        async for block in engine.generate(request, Detokenizer(stack.tokenizer)):
            if not ids:
                begun.release()
            ids.extend(block.token_ids)
        return ids

    return [asyncio.create_task(run(index)) for index in range(NUM_STREAMS)]


async def test_both_have_all_their_tokens(target: Path) -> None:
    """One's sequences would be taken for the other's, or a full verifier refuse them."""
    async with two(target) as (stack, second):
        begun = asyncio.Semaphore(0)
        tasks = await start(stack, stack.engine, 1, begun) + await start(stack, second, 11, begun)
        prompts = [(n, 7, 9) for n in (*range(1, 1 + NUM_STREAMS), *range(11, 11 + NUM_STREAMS))]
        for prompt, ids in zip(prompts, await asyncio.gather(*tasks), strict=True):
            assert ids == greedy_reference(target, prompt, LENGTH)
        for engine in (stack.engine, second):
            drafted = engine.status().drafter_pools[0]
            assert drafted.num_accepted_draft_tokens > 0.8 * drafted.num_draft_tokens > 0


async def test_one_that_ends_takes_only_its_own_with_it(target: Path) -> None:
    """Streams of the other would end too, or the slots of those that are gone stay taken."""
    async with two(target) as (stack, second):
        begun = asyncio.Semaphore(0)
        tasks = await start(stack, stack.engine, 1, begun)
        others = await start(stack, second, 11, begun)
        for _ in range(NUM_SLOTS):
            await begun.acquire()
        await second.stop()
        ended = await asyncio.gather(*others, return_exceptions=True)
        assert any(isinstance(each, UnavailableError) for each in ended)
        tasks += await start(stack, stack.engine, 25, begun)
        for first, task in zip((1, 2, 3, 4, 25, 26, 27, 28), tasks, strict=True):
            assert await task == greedy_reference(target, (first, 7, 9), LENGTH)
