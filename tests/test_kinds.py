"""Every kind of drafter through the whole system, attached and remote, through all that goes wrong.

One target per family, tiny and random; requests run side by side, some are cancelled, the drafter
dies and comes back, one request outgrows the drafter's context. The text is the target's own each
time, nothing is left behind, and who had to go without drafts says why.
"""

import asyncio
import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from core.config import DrafterPoolConfig, ModelConfig
from core.types import Rule, SamplingParams
from drafter_service.drafters import ATTACHED, REMOTE
from drafter_service.server import serve_drafter
from orchestrator.requests import GenerationRequest
from tests.harness import MODEL, Stack, serving
from tests.policy import make_request
from tests.tiny_dflash import save_drafter as save_dflash
from tests.tiny_gemma4 import save_assistant, save_target
from tests.tiny_models import TinyFactory, greedy_reference
from tests.tiny_mtp import at_layer, save_tiny_mtp

KINDS = [(kind, True) for kind in sorted(ATTACHED)] + [(kind, False) for kind in sorted(REMOTE)]
MODELS = sorted(set(REMOTE) - {"ngram"})  # those with a context
SAMPLED = SamplingParams(temperature=0.8, top_k=30, seed=9, rule=Rule.COUPLED)
PROMPTS = [tuple((5 * i + 3 * n) % 60 for i in range(4 + 7 * n)) for n in range(4)]


@pytest.fixture(scope="module")
def targets(tiny: TinyFactory, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target per family of drafters; "" for those that take any."""
    folder = tmp_path_factory.mktemp("targets")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the library, about tiny models
        save_tiny_mtp("glm4_moe", folder / "mtp", 2, is_tame=True, eos_token_id=300)
        save_target("text", folder / "gemma")
        save_assistant(folder / "assistant")
        save_dflash(folder / "blocks")
    return {
        "": tiny("llama", num_hidden_layers=4, eos_token_id=300),
        "mtp_layers": folder / "mtp",
        "mtp_assistant": folder / "gemma",
        "assistant": folder / "assistant",
        "blocks": folder / "blocks",
    }


def setting(
    kind: str, is_attached: bool, targets: dict[str, Path], **limits: int
) -> tuple[Path, DrafterPoolConfig]:
    """A target and a pool of this kind for it; `limits` are the drafter's."""
    target = targets.get(kind, targets[""])
    model = {"mtp_assistant": targets["assistant"], "dflash": targets["blocks"]}.get(kind, target)
    options: dict[str, Any] = {"early_exit": {"num_layers": 3}}.get(kind, {})
    if kind == "cross_tokenizer" or (kind == "mtp_assistant" and not is_attached):
        options = {"target": str(target)}
    if kind == "hybrid" and is_attached:  # what it is made of must be attachable too
        options = {"kind": "early_exit", "drafter": {"num_layers": 3}}
    config = ModelConfig(model=str(model), **{**MODEL, **limits})
    pool = DrafterPoolConfig(
        name="pool",
        kind=kind,
        attached=is_attached,
        max_draft_tokens=3,
        model=config,
        options=options,
    )
    return target, pool


@pytest.fixture(autouse=True)
def quiet_library() -> Iterator[None]:
    """Its prediction layers where the tiny ones are, and no advice about tiny models."""
    with warnings.catch_warnings(), at_layer("glm4_moe"):
        warnings.simplefilter("ignore")
        yield


async def texts(stack: Stack, runs: list[GenerationRequest]) -> list[list[int]]:
    results = await asyncio.gather(*(stack.run(run) for run in runs))
    assert not any(end.stats.fallback_steps["drafter_error"] for _, _, end in results)
    return [ids for ids, _, _ in results]


async def cancel_early(stack: Stack, run: GenerationRequest) -> None:
    """Take a few tokens and go."""
    stream = stack.stream(run)
    async with contextlib.aclosing(stream):
        async for block in stream:
            if block.token_ids:
                return


@pytest.mark.parametrize(("kind", "is_attached"), KINDS)
async def test_the_text_is_the_targets_own_whatever_happens(kind, is_attached, targets):
    """Greedy and seeded, side by side with cancelled requests; then without the drafter, and with
    it again."""
    target, pool = setting(kind, is_attached, targets)
    async with serving(target, [pool], adaptive_draft_length=False) as stack:
        expected = [greedy_reference(target, prompt, 24) for prompt in PROMPTS]
        plain = [
            make_request(p, 24, sampling=SAMPLED, enabled=False, request_id=f"p{n}")
            for n, p in enumerate(PROMPTS)
        ]
        seeded = await texts(stack, plain)

        async def check(tag: str) -> None:
            runs = [make_request(p, 24, request_id=f"{tag}g{n}") for n, p in enumerate(PROMPTS)]
            runs += [
                make_request(p, 24, sampling=SAMPLED, request_id=f"{tag}s{n}")
                for n, p in enumerate(PROMPTS)
            ]
            cancelled = [
                make_request(p, 60, request_id=f"{tag}c{n}") for n, p in enumerate(PROMPTS)
            ]
            results, *_ = await asyncio.gather(
                texts(stack, runs), *(cancel_early(stack, run) for run in cancelled)
            )
            assert results == expected + seeded

        await check("a")
        assert stack.engine.status().drafter_pools[0].num_draft_tokens > 0
        if not is_attached:
            await stack.drafters.pop("pool").stop(0)
            await check("b")
            stack.drafters["pool"] = await serve_drafter(pool)
            stack.addresses["pool"] = stack.drafters["pool"].address
            await check("c")
        assert stack.engine.status().num_running == 0
        status = stack.engine.status()
        for replicas in (status.verifiers, *(each.replicas for each in status.drafter_pools)):
            assert all(replica.num_sequences == 0 for replica in replicas)


@pytest.mark.parametrize(
    "kind", [k for k, is_attached in KINDS if not is_attached and k != "ngram"]
)
async def test_what_outgrows_the_drafter_goes_on_alone(kind, targets):
    """One sequence beyond the drafter's context would end the drafts of all, or fail."""
    target, pool = setting(kind, False, targets, max_length=40)
    async with serving(target, [pool], adaptive_draft_length=False) as stack:
        long = make_request(PROMPTS[3], 40, request_id="long")
        short = make_request(PROMPTS[0], 20, request_id="short")
        (ids, _, finished), (short_ids, _, short_finished) = await asyncio.gather(
            stack.run(long), stack.run(short)
        )
        assert ids == greedy_reference(target, PROMPTS[3], 40)
        assert short_ids == greedy_reference(target, PROMPTS[0], 20)
        assert finished.stats.fallback_steps["too_long"] > 0
        assert short_finished.stats.fallback_steps["too_long"] == 0
        assert short_finished.stats.num_draft_tokens > 0
