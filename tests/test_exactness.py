"""The product's promise: the text is the target's own, whoever drafts, however it goes.

Greedy output is compared with transformers' `generate`; seeded output with our own path without
drafts. Everything runs over real gRPC with fp32 tiny checkpoints; requests join and leave eight
slots while others run, with different drafters and draft lengths side by side in one batch.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from core.types import Rule, SamplingParams
from orchestrator.requests import GenerationRequest
from tests.harness import Stack, pool, serving
from tests.policy import make_request
from tests.tiny_models import VOCAB_SIZE, TinyFactory, greedy_reference, load_reference

DRAFT_LENGTHS = (1, 2, 3, 5, 8)
KINDS = ("perfect", "random", "ngram", "never_right", "garbage", "stale")


@pytest.fixture(scope="module")
def target(tiny: TinyFactory) -> Path:
    return tiny("llama", eos_token_id=300)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def stack(target: Path, tiny: TinyFactory) -> AsyncIterator[Stack]:
    pools = [
        pool("perfect", "draft_model", target),
        pool("random", "draft_model", tiny("llama", seed=7, num_hidden_layers=1)),
        pool("ngram", "ngram"),
        pool("never_right", "test_never_right", target),
        pool("garbage", "test_garbage", target),
        pool("stale", "test_stale", target),
    ]
    # Every draft is verified whole: the controller would soon leave the bad drafters' out.
    async with serving(target, pools, adaptive_draft_length=False) as running:
        yield running


def _prompts(count: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Prompts of 1 to 90 tokens, some of them repetitive so that prompt lookup has matches."""
    rng = random.Random(seed)
    prompts = []
    for i in range(count):
        words = [rng.randrange(256) for _ in range(rng.randrange(1, 30))]
        prompts.append(tuple(words * (1 + i % 3)))
    return prompts


async def _gather(stack: Stack, requests: list[GenerationRequest]) -> list[tuple]:  # type: ignore[type-arg]
    return await asyncio.gather(*(stack.run(r) for r in requests))


@pytest.mark.asyncio(loop_scope="module")
async def test_greedy_equals_transformers(stack: Stack, target: Path) -> None:
    """Any off-by-one in positions, masks, logits rows or rollback changes some token here; tokens
    that are handed over before they are verified (vllm#55055) would too."""
    cases = [(kind, k) for kind in KINDS for k in DRAFT_LENGTHS]
    prompts = _prompts(len(cases))
    requests = [
        make_request(p, 16 + i % 9, request_id=f"g{i}", drafter=kind, max_draft_tokens=k)
        for i, (p, (kind, k)) in enumerate(zip(prompts, cases, strict=True))
    ]
    results = await _gather(stack, requests)
    model = load_reference(target)
    for request, (ids, _, finished) in zip(requests, results, strict=True):
        expected = greedy_reference(
            model, request.prompt_token_ids, request.stopping.max_new_tokens
        )
        assert ids == expected, request.speculation
        assert finished.completion_tokens == len(ids)
        stats = finished.stats
        if request.speculation.drafter == "never_right":
            assert stats.num_draft_tokens > 0 and stats.num_accepted_draft_tokens == 0
        if request.speculation.drafter == "perfect":
            assert stats.num_draft_tokens == stats.num_accepted_draft_tokens > 0


@pytest.mark.asyncio(loop_scope="module")
async def test_seeded_sampling_is_independent_of_the_drafter(stack: Stack) -> None:
    """COUPLED promises the text that the target alone draws with that seed."""
    settings = [
        SamplingParams(temperature=0.7, seed=1, rule=Rule.COUPLED),
        SamplingParams(temperature=1.0, top_k=20, seed=2**63 + 5, rule=Rule.COUPLED),
        SamplingParams(temperature=1.3, top_p=0.8, seed=3, rule=Rule.COUPLED),
        SamplingParams(temperature=0.9, top_k=50, top_p=0.9, seed=4, rule=Rule.COUPLED),
    ]
    for prompt, sampling in zip(_prompts(4, seed=5), settings, strict=True):
        plain = make_request(prompt, 20, sampling=sampling, enabled=False, request_id="plain")
        drafted = [
            make_request(
                prompt, 20, sampling=sampling, request_id=kind, drafter=kind, max_draft_tokens=k
            )
            for kind, k in zip(KINDS, (1, 2, 3, 5, 8, 4), strict=True)
        ]
        expected, *others = await _gather(stack, [plain, *drafted])
        for request, other in zip(drafted, others, strict=True):
            assert other[0] == expected[0], request.speculation
        perfect = others[0][2].stats
        assert perfect.num_accepted_draft_tokens == perfect.num_draft_tokens > 0


@pytest.mark.asyncio(loop_scope="module")
async def test_context_filled_to_the_last_token(stack: Stack, target: Path) -> None:
    """Prompt and new tokens that fill the context exactly once crashed others (lorax#474)."""
    prompt = _prompts(1, seed=9)[0]
    room = stack.engine.info.max_length - len(prompt)  # type: ignore[union-attr]
    request = make_request(prompt, room, drafter="perfect")
    ids, _, _ = await stack.run(request)
    assert ids == greedy_reference(target, prompt, room)


@pytest.mark.asyncio(loop_scope="module")
async def test_stops_inside_an_accepted_block(stack: Stack) -> None:
    """An end token or stop string in mid-block ends the text there (transformers#47912, #48039)."""
    prompt = _prompts(1, seed=11)[0]
    ids, text, _ = await stack.run(make_request(prompt, 24, enabled=False, request_id="all"))
    for drafter in ("perfect", "ngram"):
        token = ids[10]
        request = make_request(prompt, 24, stop_token_ids=frozenset({token}), drafter=drafter)
        got, _, finished = await stack.run(request)
        assert got == ids[: ids.index(token) + 1] and finished.stop_token_id == token
        stop = text[8:10]
        got, cut, finished = await stack.run(
            make_request(prompt, 24, stop=(stop,), drafter=drafter)
        )
        assert cut == text[: text.index(stop)] and finished.stop_string == stop
        assert got == ids[: len(got)] and finished.completion_tokens == len(got)


async def test_adaptive_length_does_not_change_the_text(target: Path) -> None:
    """Draft lengths follow measured times, so they differ from run to run: the text may not."""
    pools = [pool("never_right", "test_never_right", target), pool("ngram", "ngram")]
    async with serving(target, pools, adaptive_draft_length=True) as stack:
        requests = [
            make_request(p, 40, request_id=f"a{i}", drafter=("never_right", "ngram")[i % 2])
            for i, p in enumerate(_prompts(8, seed=21))
        ]
        model = load_reference(target)
        for request, (ids, _, _) in zip(requests, await _gather(stack, requests), strict=True):
            assert ids == greedy_reference(model, request.prompt_token_ids, 40)


@pytest.mark.parametrize("kind", ["mistral", "gemma2", "padded", "mixtral", "gpt2", "qwen3"])
async def test_families_greedy_equals_transformers(kind: str, tiny: TinyFactory) -> None:
    """Sliding windows crossed in mid-draft and rolled back (transformers#48280), soft caps, padded
    ids, experts: all behind one API."""
    target = tiny(kind, eos_token_id=300)
    pools = [pool("perfect", "draft_model", target), pool("ngram", "ngram")]
    model = load_reference(target)
    async with serving(target, pools) as stack:
        requests = [
            make_request(p, 24, request_id=f"f{i}", drafter=("perfect", "ngram")[i % 2])
            for i, p in enumerate(_prompts(6, seed=3))
        ]
        for request, (ids, _, _) in zip(requests, await _gather(stack, requests), strict=True):
            # Ids that no tokenizer knows are never produced; the reference may not either.
            padding = list(range(VOCAB_SIZE, model.config.vocab_size)) or None
            expected = greedy_reference(
                model, request.prompt_token_ids, 24, suppress_tokens=padding
            )
            assert ids == expected
