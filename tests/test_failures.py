"""Parts die, hang or are cancelled in mid-stream: the text stays the same and nothing leaks."""

import asyncio
import random
import threading
from pathlib import Path

import pytest

from core.config import ModelConfig, VerifierConfig
from core.errors import HandshakeError, OverloadedError
from core.types import VerifyBatch
from drafter_service.server import serve_drafter
from orchestrator.requests import Health
from tests.harness import MODEL, Stack, pool, serving
from tests.policy import make_request
from tests.tiny_models import TinyFactory, greedy_reference
from verifier_service.engine import VerifierEngine
from verifier_service.server import serve_verifier
from verifier_service.work import Submission


@pytest.fixture(scope="module")
def target(tiny: TinyFactory) -> Path:
    return tiny("llama", eos_token_id=300)


async def _all_streaming(stack: Stack, count: int, length: int) -> list:  # type: ignore[type-arg]
    """Start `count` requests and return their tasks once each has produced some tokens."""
    begun = asyncio.Semaphore(0)

    async def run(index: int) -> list[int]:
        ids: list[int] = []
        async for block in stack.stream(
            make_request((index + 1, 7, 9), length, request_id=str(index))
        ):
            ids.extend(block.token_ids)
            if 8 <= len(ids) < 8 + len(block.token_ids):
                begun.release()
        return ids

    tasks = [asyncio.create_task(run(i)) for i in range(count)]
    for _ in range(count):
        await begun.acquire()
    return tasks


async def test_dead_drafter_costs_speed_only(target: Path) -> None:
    """A drafter that dies in mid-stream must not stall, end or change any stream."""
    async with serving(target, [pool("perfect", "draft_model", target, k=3)]) as stack:
        tasks = await _all_streaming(stack, 4, 100)
        await stack.drafters.pop("perfect").stop(0)
        for index, task in enumerate(tasks):
            assert await task == greedy_reference(target, (index + 1, 7, 9), 100)
        replica = stack.engine.status().drafter_pools[0].replicas[0]
        assert replica.health is Health.LOST and replica.num_losses == 1


async def test_replaced_drafter_is_found_and_used_again(target: Path) -> None:
    """A drafter restarted at another address takes the running sequences up again."""
    config = pool("perfect", "draft_model", target, k=3)
    async with serving(target, [config]) as stack:
        tasks = await _all_streaming(stack, 2, 200)
        await stack.drafters.pop("perfect").stop(0)
        stack.drafters["perfect"] = await serve_drafter(config)
        stack.addresses["perfect"] = stack.drafters["perfect"].address
        for index, task in enumerate(tasks):
            assert await task == greedy_reference(target, (index + 1, 7, 9), 200)
        ids, _, finished = await stack.run(make_request((5, 6), 20))
        while finished.stats.num_draft_tokens == 0:  # until the new one has shaken hands
            ids, _, finished = await stack.run(make_request((5, 6), 20))
        assert ids == greedy_reference(target, (5, 6), 20)


async def test_dead_verifier_is_replaced_and_streams_go_on(target: Path) -> None:
    """The committed tokens are the truth: a new verifier is rebuilt from them."""
    async with serving(target, [pool("ngram", "ngram")]) as stack:
        tasks = await _all_streaming(stack, 3, 150)
        await stack.verifiers.pop().stop(0)
        config = ModelConfig(model=str(target), **MODEL)
        stack.verifiers.append(await serve_verifier(config, VerifierConfig()))
        stack.addresses["verifier"] = stack.verifiers[0].address
        for index, task in enumerate(tasks):
            assert await task == greedy_reference(target, (index + 1, 7, 9), 150)


async def test_late_plans_never_change_the_text(target: Path) -> None:
    """With no patience every plan comes late: dropped, counted, and never used."""
    async with serving(
        target, [pool("perfect", "draft_model", target, k=3)], draft_wait_ms=0
    ) as stack:
        ids, _, finished = await stack.run(make_request((3, 1, 4), 60))
        assert ids == greedy_reference(target, (3, 1, 4), 60)
        assert finished.stats.fallback_steps["late"] > 0


async def test_two_hundred_requests_a_third_cancelled(target: Path) -> None:
    """Cancelled requests must give back slots and sequences on every service."""
    rng = random.Random(0)
    pools = [pool("perfect", "draft_model", target, k=3), pool("ngram", "ngram")]
    async with serving(target, pools, max_queue=200) as stack:

        async def one(index: int) -> None:
            request = make_request(
                tuple(rng.randrange(256) for _ in range(rng.randrange(1, 20))),
                rng.randrange(2, 20),
                request_id=str(index),
                drafter=("perfect", "ngram")[index % 2],
            )
            blocks = stack.stream(request)
            num_blocks = 0
            async for _ in blocks:
                num_blocks += 1
                if index % 3 == 0 and num_blocks == 1 + index % 4:
                    break
            await blocks.aclose()

        waiting_cancelled = asyncio.create_task(one(999))
        tasks = [asyncio.create_task(one(i)) for i in range(200)]
        waiting_cancelled.cancel()
        await asyncio.gather(*tasks)
        status = stack.engine.status()
        assert (status.num_running, status.num_waiting) == (0, 0)
        assert status.verifiers[0].num_sequences == 0
        assert all(p.replicas[0].num_sequences == 0 for p in status.drafter_pools)
        # The services agree: every slot can be leased at once again, by one batch of eight.
        results = await asyncio.gather(
            *(stack.run(make_request((i + 1,), 5, request_id=f"after{i}")) for i in range(8))
        )
        assert all(len(ids) == 5 for ids, _, _ in results)


async def test_full_queue_is_refused_without_disturbing_others(target: Path) -> None:
    """Past the queue's end a request is refused at once, and the running ones go on."""
    async with serving(target, model={"max_sequences": 1}, max_queue=0) as stack:
        running = stack.stream(make_request((1, 2), 50, request_id="running"))
        first = await anext(running)
        with pytest.raises(OverloadedError):
            await stack.run(make_request((3,), 5, request_id="refused"))
        rest = [block async for block in running]
        ids = [t for block in (first, *rest) for t in block.token_ids]
        assert ids == greedy_reference(target, (1, 2), 50)


async def test_drafter_with_another_tokenizer_fails_at_start(
    target: Path, tiny: TinyFactory
) -> None:
    """A mismatch must fail at start and name both sides, not draft nonsense unnoticed."""
    other = tiny("llama", seed=3, tokenizer="other")
    with pytest.raises(HandshakeError, match=r"drafter_pools\.wrong: .*does not fit target"):
        async with serving(target, [pool("wrong", "draft_model", other)]):
            pass


async def test_context_overflow_falls_back_alone(target: Path, tiny: TinyFactory) -> None:
    """A prompt beyond the drafter's context costs that request its drafts, and nobody else
    (vllm#24662, vllm#57941)."""
    config = pool("short", "draft_model", target, k=3)
    assert config.model is not None
    short = config.model.model_copy(update={"max_length": 32})
    config = config.model_copy(update={"model": short})
    async with serving(target, [config]) as stack:
        long, brief = await asyncio.gather(
            stack.run(make_request(tuple(range(1, 60)), 20, request_id="long")),
            stack.run(make_request((1, 2, 3), 12, request_id="brief")),
        )
        assert long[0] == greedy_reference(target, tuple(range(1, 60)), 20)
        assert brief[0] == greedy_reference(target, (1, 2, 3), 12)
        assert long[2].stats.fallback_steps["too_long"] > 0
        assert brief[2].stats.num_accepted_draft_tokens > 0


async def test_cancelled_prefix_sharer_leaves_the_others_alone(target: Path) -> None:
    """Freeing a prefix that somebody else uses corrupts the bystander (sglang#23392)."""
    shared = tuple(range(7, 67))
    async with serving(target, [pool("ngram", "ngram")]) as stack:
        await stack.run(make_request((*shared, 1), 4, request_id="first"))
        victim = stack.stream(make_request((*shared, 2), 60, request_id="victim"))
        await anext(victim)
        bystander = asyncio.create_task(
            stack.run(make_request((*shared, 3), 40, request_id="bystander"))
        )
        await anext(victim)
        await victim.aclose()
        later = await stack.run(make_request((*shared, 4), 40, request_id="later"))
        for last, (ids, _, finished) in ((3, await bystander), (4, later)):
            assert ids == greedy_reference(target, (*shared, last), 40)
            assert finished.cached_prompt_tokens > 0


async def test_silent_verifier_is_given_up_and_found_again(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verifier that neither answers nor dies must not hold its streams for ever."""
    silence = threading.Event()
    submit = VerifierEngine.submit

    def late(self: VerifierEngine, stream: int, batch: VerifyBatch) -> Submission:
        silence.wait(60)
        return submit(self, stream, batch)

    async with serving(target, verify_timeout_s=0.2) as stack:
        monkeypatch.setattr(VerifierEngine, "submit", late)
        task = asyncio.create_task(stack.run(make_request((1, 2, 3), 20)))
        await stack.engine._changes.until(lambda: stack.engine.status().verifiers[0].num_losses > 0)
        silence.set()
        ids, _, _ = await task
        assert ids == greedy_reference(target, (1, 2, 3), 20)
