"""The whole stack with plans pushed ahead: whoever drafts, and whenever it comes, the same text.

Greedy text is compared with transformers' `generate`, seeded text with our own path without drafts.
A drafter that is the target itself must never be wrong: each of its drafts is accepted whole, so a
branch that is taken for another outcome's shows.
"""

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from core.types import DraftCommands, Rule, SamplingParams, VerifyBatch, VerifyResult
from orchestrator import pipeline
from orchestrator.requests import Finished, GenerationRequest
from orchestrator.trace import Recorder
from tests.ahead_wire import FATES, Gate, Wire
from tests.harness import Stack, pool, serving
from tests.policy import make_request
from tests.tiny_models import TinyFactory, greedy_reference, load_reference, save_tokenizer

K = 3
GREEDY = SamplingParams()
PENALIZED = SamplingParams(repetition_penalty=1.3)
COUPLED = SamplingParams(0.9, top_k=50, seed=5, rule=Rule.COUPLED)
COUPLED_PENALIZED = SamplingParams(
    1.1, seed=2**63 + 1, rule=Rule.COUPLED, repetition_penalty=1.2, frequency_penalty=0.4
)
SAMPLINGS = (GREEDY, COUPLED, PENALIZED, COUPLED_PENALIZED)


@pytest.fixture(scope="module")
def target(tiny: TinyFactory) -> Path:
    return tiny("llama", eos_token_id=300)


@pytest.fixture(scope="module")
def almost(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target with a little noise on its weights: often right, often among its best guesses."""
    path, model = tmp_path_factory.mktemp("almost"), load_reference(target)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
    model.save_pretrained(path)
    save_tokenizer(path)
    return path


class Truth:
    """The text of a request without any drafts, computed once for each."""

    def __init__(self, target: Path, plain: Stack) -> None:
        self._model, self._plain = load_reference(target), plain
        self._known: dict[tuple[object, ...], list[int]] = {}

    async def of(self, request: GenerationRequest) -> list[int]:
        """Its new tokens."""
        sampling, count = request.sampling, request.stopping.max_new_tokens
        key = (request.prompt_token_ids, sampling, count)
        if key in self._known:
            return self._known[key]
        if sampling.temperature == 0:
            penalty = {"repetition_penalty": sampling.repetition_penalty}
            ids = greedy_reference(self._model, request.prompt_token_ids, count, **penalty)
        else:
            plain = make_request(request.prompt_token_ids, count, sampling=sampling)
            ids, _, _ = await self._plain.run(plain)
        self._known[key] = ids
        return ids


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def truth(target: Path) -> AsyncIterator[Truth]:
    async with serving(target) as stack:
        yield Truth(target, stack)


def _requests(
    count: int, drafters: Sequence[str], length: int = 16, start: int = 0
) -> list[GenerationRequest]:
    """Six prompts of 1 to 40 tokens; by `start`, each drafter meets each way of sampling."""
    rng = random.Random(0)
    sizes = (1, 40, 3, 17, 33, 8)
    prompts = [tuple(rng.randrange(256) for _ in range(size)) for size in sizes]
    pairs = list(itertools.product(SAMPLINGS, drafters))
    return [
        make_request(
            prompts[i % 6],
            length + i % 3,
            request_id=f"{start}-{i}",
            sampling=pairs[(start + 7 * i) % len(pairs)][0],
            drafter=pairs[(start + 7 * i) % len(pairs)][1],
        )
        for i in range(count)
    ]


async def _check(
    stack: Stack, truth: Truth, requests: list[GenerationRequest], drafting: str = ""
) -> list[Finished]:
    """Serve all at once. Drafts of the pools "exact*" must be accepted whole; the pool `drafting`
    must have drafted: of others, time decides whether their drafts are waited for."""
    async with asyncio.timeout(60):  # a branch that a gate waits for in vain
        results = await asyncio.gather(*map(stack.run, requests))
    for request, (ids, _, finished) in zip(requests, results, strict=True):
        assert ids == await truth.of(request), (request.speculation, request.sampling)
        stats, drafter = finished.stats, request.speculation.drafter
        if drafter.startswith("exact"):
            assert stats.num_accepted_draft_tokens == stats.num_draft_tokens
        assert stats.num_draft_tokens or drafter != drafting
    return [finished for _, _, finished in results]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("replicas", [1, 2])
async def test_no_switch_changes_the_text(
    target: Path, almost: Path, truth: Truth, max_in_flight: int, adaptive: bool, replicas: int
) -> None:
    """Draft-ahead, micro-batches, the controller and the number of drafters are about speed: a
    branch of another outcome, row or sequence, or a row sent twice, changes a token or is wrong."""
    pools = [
        pool(f"{name}-{n}", "draft_model", path, K, max_branches=n, replicas=replicas if n else 1)
        for name, path, n in (
            ("exact", target, 0),
            ("exact", target, 4),
            ("exact", target, 16),
            ("almost", almost, 4),
            ("almost", almost, 16),
        )
    ]
    start = 3 * (4 * max_in_flight + 2 * adaptive + replicas)
    switches = {"max_in_flight": max_in_flight, "adaptive_draft_length": adaptive}
    async with serving(target, pools, **switches) as stack:
        requests = _requests(7, [p.name for p in pools], start=start)
        for batch in (requests[:1], requests[1:]):
            await _check(stack, truth, batch, "" if adaptive else "exact-0")


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("num_clients", [1, 6])
@pytest.mark.parametrize(("max_in_flight", "branches", "replicas"), [(1, 4, 1), (2, 16, 2)])
async def test_every_block_is_foreseen_by_a_drafter_that_is_right(
    target: Path, truth: Truth, num_clients: int, max_in_flight: int, branches: int, replicas: int
) -> None:
    """Where the drafter has the time and says what the target says, no draft is ever asked for but
    the first, and its commit and the next block travel in one frame."""
    exact = pool("exact", "draft_model", target, K, max_branches=branches, replicas=replicas)
    switches = {"max_in_flight": max_in_flight, "adaptive_draft_length": False}
    async with serving(target, [exact], **switches) as stack:
        recorder = Recorder()
        Gate(stack)
        stack.engine.record(recorder)
        finishes = await _check(stack, truth, _requests(num_clients, ["exact"], 24), "exact")
    frames = [r.message for r in recorder.records if isinstance(r.message, DraftCommands)]
    num_asked = sum(c.next_draft_tokens > 0 for frame in frames for c in frame.commits)
    assert num_asked == num_clients
    for stats in (finished.stats for finished in finishes):
        num_without = stats.fallback_steps["late"] + stats.fallback_steps["not_waited_for"]
        assert stats.plan_misses.total() <= num_without <= 1
        # Not the prompt's row; not the first block, which may go without, nor the last two.
        assert stats.num_plan_hits >= stats.num_verify_steps - 4 > 2


@pytest.mark.asyncio(loop_scope="module")
async def test_a_hit_goes_to_the_target_before_anything_else(target: Path, truth: Truth) -> None:
    """Between a verdict that was foreseen and the next block there is nothing: no message to the
    drafter, none from it, no wait; then one frame tells the drafter of both."""
    exact = pool("exact", "draft_model", target, K, max_branches=4)
    async with serving(target, [exact], adaptive_draft_length=False) as stack:
        recorder = Recorder()
        Gate(stack)
        stack.engine.record(recorder)
        await _check(stack, truth, _requests(1, ["exact"], 24), "exact")
    messages = [record.message for record in recorder.records]
    num_hits = 0
    for index, message in enumerate(messages):
        if isinstance(message, DraftCommands) and message.sents and message.commits:
            result, batch = messages[index - 2 : index]
            assert isinstance(result, VerifyResult) and isinstance(batch, VerifyBatch)
            [sent], [row], [commit] = message.sents, batch.rows, message.commits
            assert sent.num_draft_tokens == len(row.draft_token_ids)
            assert sent.base_length == commit.base_length + len(commit.token_ids)
            num_hits += commit.next_draft_tokens == 0
    assert num_hits > 2


@pytest.mark.asyncio(loop_scope="module")
async def test_a_drafter_without_a_guess_is_not_lost(target: Path, truth: Truth) -> None:
    """Plans with empty drafts are nothing special: times that are counted by the draft token would
    divide by none of them. A drafter that cannot draft ahead is not asked to, whatever its pool's
    `max_branches`, or each verdict would count as missed."""
    async with serving(target, [pool("ngram", "ngram", k=K, max_branches=4)]) as stack:
        [finished] = await _check(stack, truth, _requests(1, ["ngram"], 24))
        [status] = stack.engine.status().drafter_pools
        assert finished.stats.fallback_steps["no_guess"] > 0 and not finished.stats.plan_misses
        assert status.replicas[0].num_losses == 0


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("is_foreseen", [False, True])
@pytest.mark.parametrize("replicas", [1, 2])
async def test_a_drafter_that_dies_drafting_ahead_costs_speed_only(
    target: Path, truth: Truth, is_foreseen: bool, replicas: int
) -> None:
    """Dead with branches at hand or in the making: they are forgotten, and another drafter, which
    has no draft of the block at the target, takes the sequences up."""
    exact = pool("exact", "draft_model", target, K, max_branches=4, replicas=replicas)

    def is_due(sequence: pipeline.Sequence) -> bool:
        is_ahead = sequence.plans.is_ahead and sequence.num_generated >= 8
        return is_ahead and sequence.drafter == "exact"

    def losses(stack: Stack) -> list[int]:
        [status] = stack.engine.status().drafter_pools
        return [r.num_losses for r in status.replicas]

    async with serving(target, [exact], adaptive_draft_length=False) as stack:
        gate = Gate(stack, is_foreseen, is_due)
        requests = _requests(4, ["exact"], 40)
        check = asyncio.create_task(_check(stack, truth, requests))
        await gate.reached.wait()
        await stack.drafters.pop("exact").stop(0)
        await stack.engine._changes.until(lambda: losses(stack) == [1, 0][:replicas])
        gate.open()
        await check


def test_no_schedule_changes_the_text(target: Path, almost: Path) -> None:
    """Commands, plans and verdicts that are late, lost, repeated or out of turn: a drafter is found
    to be behind and is opened again, and what it says of another text is never used."""
    pools = [
        pool("exact", "draft_model", target, K, max_branches=6),
        pool("almost", "draft_model", almost, K, max_branches=6),
        pool("exact-0", "draft_model", target, K),  # its rows wait, and have the others wait too
    ]
    names = [p.name for p in pools]
    switches = {"adaptive_draft_length": False, "draft_wait_ms": 50, "max_in_flight": 2}
    totals: Counter[str] = Counter()
    with asyncio.Runner() as runner:
        contexts = serving(target), serving(target, pools, **switches)
        plain, stack = (runner.run(context.__aenter__()) for context in contexts)
        truth = Truth(target, plain)

        async def one(fates: list[int], start: int) -> None:
            wire, recorder = Wire(stack, fates), Recorder()
            stack.engine.record(recorder)
            try:
                requests = _requests(3, names, 10, start)
                for finished in await _check(stack, truth, requests):
                    totals.update(finished.stats.plan_misses)
                    totals["hits"] += finished.stats.num_plan_hits
            finally:
                wire.remove()
            frames = [r.message for r in recorder.records if isinstance(r.message, DraftCommands)]
            totals["reopened"] += sum(o.generation > 1 for frame in frames for o in frame.opens)

        @example([FATES.index((200,))], 0)  # verdicts that give the drafters time
        @example([FATES.index(()), 0, 0], 1)
        @settings(max_examples=12, deadline=None)
        @given(
            st.lists(st.integers(0, len(FATES) - 1), min_size=1, max_size=40), st.integers(0, 11)
        )
        def check(fates: list[int], start: int) -> None:
            runner.run(one(fates, start))

        try:
            check()
        finally:
            for context in contexts:
                runner.run(context.__aexit__(None, None, None))
    assert totals["hits"] and totals["late"] and totals["reopened"]
