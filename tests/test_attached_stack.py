"""Attached drafters, fallbacks and remote drafters with needs, through the whole system.

The text is always the target's own; what is looked at beside it is who drafted, and that features
reach a remote drafter for every committed token, also after it or the verifier was replaced.
"""

import asyncio
from pathlib import Path
from unittest import mock

import pytest

from core.config import ModelConfig, VerifierConfig, parse_config
from core.errors import ConfigError, HandshakeError
from core.types import Rule, SamplingParams
from drafter_service import drafters as kinds
from drafter_service.server import serve_drafter
from tests.harness import MODEL, TEST_KINDS, Stack, pool, serving
from tests.policy import make_request
from tests.tiny_models import TinyFactory, greedy_reference
from verifier_service.server import serve_verifier

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6) * 3
SAMPLED = SamplingParams(temperature=0.8, top_k=30, seed=5, rule=Rule.COUPLED)


@pytest.fixture(scope="module")
def target(tiny: TinyFactory) -> Path:
    return tiny("llama", eos_token_id=300)


async def _checked(stack: Stack, target: Path, length: int = 60) -> list:  # type: ignore[type-arg]
    """Four greedy requests at once; returns their statistics."""
    prompts = [(i, *PROMPT) for i in range(4)]
    runs = [make_request(p, length, request_id=str(i)) for i, p in enumerate(prompts)]
    results = await asyncio.gather(*(stack.run(run) for run in runs))
    for prompt, (ids, _, _) in zip(prompts, results, strict=True):
        assert ids == greedy_reference(target, prompt, length)
    return [finished.stats for _, _, finished in results]


async def test_an_attached_pool_drafts_without_a_round_trip(target: Path) -> None:
    """Its drafts would be lost, taken for another outcome, or counted for nobody."""
    pools = [pool("near", "ngram", attached=True)]
    async with serving(target, pools, adaptive_draft_length=False) as stack:
        for stats in await _checked(stack, target):
            assert stats.drafter == "near" and stats.num_draft_tokens > 0
            assert stats.num_plan_hits > 0 and not stats.fallback_steps["late"]
        [status] = stack.engine.status().drafter_pools
        assert status.num_draft_tokens > 0 and len(status.replicas) == 1
        plain = make_request(PROMPT, 30, sampling=SAMPLED, enabled=False, request_id="plain")
        drafted = make_request(PROMPT, 30, sampling=SAMPLED)
        assert (await stack.run(plain))[0] == (await stack.run(drafted))[0]


async def test_a_fallback_drafts_while_the_remote_drafter_is_gone(target: Path) -> None:
    """A dead drafter would leave rows without drafts though one stands beside the target."""
    pools = [pool("far", "draft_model", target, k=3), pool("near", "ngram", attached=True)]
    async with serving(
        target, pools, adaptive_draft_length=False, default_pool="far", fallback_pool="near"
    ) as stack:
        before = await _checked(stack, target)
        assert all(stats.num_accepted_draft_tokens > 30 for stats in before)
        await stack.drafters.pop("far").stop(0)
        for stats in await _checked(stack, target):
            assert stats.fallback_steps["attached"] > 0 and stats.num_draft_tokens > 0
        far, near = stack.engine.status().drafter_pools
        assert far.num_accepted_draft_tokens > 0 and near.num_draft_tokens > 0


async def test_features_reach_a_remote_drafter_whatever_is_replaced(target: Path) -> None:
    """After a loss the drafter would draft from values of other positions, or never again."""
    config = pool("far", "test_head", target, k=2)
    async with serving(target, [config], adaptive_draft_length=False) as stack:
        for stats in await _checked(stack, target):
            assert stats.num_draft_tokens > 20
        tasks = [asyncio.create_task(_checked(stack, target, 120))]
        await _until(stack, lambda: stack.engine.status().num_running == 4)
        await stack.drafters.pop("far").stop(0)
        with mock.patch.object(kinds, "REMOTE", {**kinds.REMOTE, **TEST_KINDS}):
            stack.drafters["far"] = await serve_drafter(config)
        stack.addresses["far"] = stack.drafters["far"].address
        await tasks[0]
        tasks = [asyncio.create_task(_checked(stack, target, 120))]
        await _until(stack, lambda: stack.engine.status().num_running == 4)
        await stack.verifiers.pop().stop(0)
        again = await serve_verifier(ModelConfig(model=str(target), **MODEL), VerifierConfig())
        stack.verifiers.append(again)
        stack.addresses["verifier"] = again.address
        for stats in await tasks[0]:
            assert stats.num_draft_tokens > 20 and not stats.fallback_steps["drafter_error"]


async def test_a_verifier_without_the_attached_drafter_is_refused(target: Path) -> None:
    """Its sequences would fail one by one, long after the start."""
    missing = mock.patch("tests.harness.attacher", lambda pools: lambda model: ())
    with missing, pytest.raises(HandshakeError, match=r"drafter_pools\.near: verifier .* without"):
        async with serving(target, [pool("near", "ngram", attached=True)]):
            pass


def test_the_config_says_what_can_be_attached_and_fall_back() -> None:
    """A fallback that does not exist, or an address for an attached pool, would be ignored."""
    base = {"target": {"model": "m"}, "drafter_pools": [{"name": "far", "kind": "ngram"}]}
    with pytest.raises(ConfigError, match=r"fallback_pool: 'far' is not an attached pool"):
        parse_config(base | {"orchestrator": {"fallback_pool": "far"}})
    near = {"name": "near", "kind": "ngram", "attached": True}
    config = parse_config(base | {"drafter_pools": [*base["drafter_pools"], near]})
    assert [p.name for p in config.remote_pools] == ["far"]
    assert [p.name for p in config.attached_pools] == ["near"]
    with pytest.raises(ConfigError, match=r"near\.addresses: an attached pool has none"):
        parse_config(base | {"drafter_pools": [near | {"addresses": ["127.0.0.1:1"]}]})


async def _until(stack: Stack, holds) -> None:  # type: ignore[no-untyped-def]
    while not holds():
        await asyncio.sleep(0)
