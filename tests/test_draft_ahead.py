"""The whole stack with plans pushed ahead: whoever drafts, and whenever it comes, the same text.

Greedy text is compared with transformers' `generate`, seeded text with our own path without drafts.
A drafter that is the target itself must never be wrong: each of its drafts is accepted whole, so a
branch that is taken for another outcome's shows.
"""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from core.config import DrafterPoolConfig
from core.types import DraftCommands, Rule, SamplingParams, VerifyBatch, VerifyResult
from orchestrator.requests import Finished, GenerationRequest, Health
from orchestrator.trace import Record, Recorder
from tests.ahead_wire import Gate
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
    count: int, drafters: Sequence[str], length: int = 24, seed: int = 0
) -> list[GenerationRequest]:
    """Prompts of 1 to 40 tokens; every drafter meets every way of sampling."""
    rng = random.Random(seed)
    pairs = itertools.islice(itertools.cycle(itertools.product(SAMPLINGS, drafters)), count)
    return [
        make_request(
            tuple(rng.randrange(256) for _ in range(rng.randrange(1, 40))),
            length + i % 5,
            request_id=f"{seed}-{i}",
            sampling=sampling,
            drafter=drafter,
        )
        for i, (sampling, drafter) in enumerate(pairs)
    ]


async def _check(
    stack: Stack, truth: Truth, requests: list[GenerationRequest], is_whole: bool = True
) -> list[Finished]:
    """Serve all at once; with `is_whole` drafts of the pools "exact*" must be accepted whole."""
    results = await asyncio.gather(*map(stack.run, requests))
    for request, (ids, _, finished) in zip(requests, results, strict=True):
        assert ids == await truth.of(request), (request.speculation, request.sampling)
        stats = finished.stats
        if is_whole and request.speculation.drafter.startswith("exact"):
            assert stats.num_accepted_draft_tokens == stats.num_draft_tokens > 0
            assert stats.num_plan_hits > 0
    return [finished for _, _, finished in results]


def _pools(target: Path, almost: Path, replicas: int) -> list[DrafterPoolConfig]:
    """With 0, 4 and 16 branches, drafters that are never wrong, and some that are."""
    kinds = {"exact": ("draft_model", target), "almost": ("draft_model", almost)}
    return [
        pool(f"{name}-{n}", kind, path, K, max_branches=n, replicas=replicas if n == 4 else 1)
        for n in (0, 4, 16)
        for name, (kind, path) in kinds.items()
    ]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("replicas", [1, 2])
async def test_no_switch_changes_the_text(
    target: Path, almost: Path, truth: Truth, max_in_flight: int, adaptive: bool, replicas: int
) -> None:
    """Draft-ahead, micro-batches, the controller and the number of drafters are about speed: a
    branch of another outcome, row or sequence, or a row sent twice, changes a token or is wrong."""
    pools = _pools(target, almost, replicas)
    names = [p.name for p in pools]
    switches = {"max_in_flight": max_in_flight, "adaptive_draft_length": adaptive}
    async with serving(target, pools, **switches) as stack:
        for request in _requests(2, ["exact-16", "almost-4"], seed=1):
            await _check(stack, truth, [request], not adaptive)
        for start in range(0, 24, 6):
            await _check(stack, truth, _requests(24, names)[start : start + 6], not adaptive)


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
        Gate.before(stack, is_foreseen=True)
        stack.engine.record(recorder)
        finishes = await _check(stack, truth, _requests(num_clients, ["exact"], seed=2))
    hits, asked = _ahead_hits(recorder.records)
    num_blocks = sum(f.stats.num_verify_steps for f in finishes)
    assert all(not f.stats.plan_misses["not_enumerated"] for f in finishes)
    assert asked <= num_clients
    # All but the prompt's row, the first block and the last two.
    assert hits >= num_blocks - 4 * num_clients > 0


@pytest.mark.asyncio(loop_scope="module")
async def test_a_hit_goes_to_the_target_before_anything_else(target: Path, truth: Truth) -> None:
    """Between a verdict that was foreseen and the next block there is nothing: no message to the
    drafter, none from it, no wait; then one frame tells the drafter of both."""
    exact = pool("exact", "draft_model", target, K, max_branches=4)
    async with serving(target, [exact], adaptive_draft_length=False) as stack:
        recorder = Recorder()
        Gate.before(stack, is_foreseen=True)
        stack.engine.record(recorder)
        await _check(stack, truth, _requests(1, ["exact"], seed=3))
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
@pytest.mark.parametrize("is_foreseen", [False, True])
@pytest.mark.parametrize("replicas", [1, 2])
async def test_a_drafter_that_dies_drafting_ahead_costs_speed_only(
    target: Path, truth: Truth, is_foreseen: bool, replicas: int
) -> None:
    """Dead with branches at hand or in the making: they are forgotten, and another drafter, which
    has no draft of the block at the target, takes the sequences up."""
    exact = pool("exact", "draft_model", target, K, max_branches=4, replicas=replicas)
    async with serving(target, [exact], adaptive_draft_length=False) as stack:
        gate = Gate.before(stack, is_foreseen=is_foreseen, min_tokens=8)
        requests = _requests(4, ["exact"], 40, seed=4)
        check = asyncio.create_task(_check(stack, truth, requests))
        await gate.reached.wait()
        assert any(s.plans.is_ahead for s in stack.engine._sequences.values())
        await stack.drafters.pop("exact").stop(0)
        [status] = stack.engine.status().drafter_pools
        await stack.engine._changes.until(
            lambda: stack.engine.status().drafter_pools[0].replicas[0].health is Health.LOST
        )
        gate.open()
        finishes = await check
    assert all(f.stats.num_verify_steps > 0 for f in finishes)


def _ahead_hits(records: list[Record]) -> tuple[int, int]:
    """Blocks whose draft had been drafted ahead, and drafts that were asked for."""
    frames = [r.message for r in records if isinstance(r.message, DraftCommands)]
    hits = sum(
        commit.sequence == sent.sequence and not commit.next_draft_tokens
        for frame in frames
        for commit in frame.commits
        for sent in frame.sents
    )
    return hits, sum(commit.next_draft_tokens > 0 for f in frames for commit in f.commits)
