"""Every parameter, end to end: the text and log-probabilities that transformers gives, with drafts.

Greedy, fp32, over real gRPC; four rows with different parameters run in one batch, at several
draft lengths, with a drafter that is often right and one that is often wrong.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from core.types import SamplingParams
from orchestrator.requests import Block, Output
from tests.harness import Stack, pool, serving
from tests.policy import make_request
from tests.tiny_models import TinyFactory, greedy_reference, load_reference

PROMPTS = [tuple(range(5 + i, 40 + 3 * i, 3)) * (1 + i % 2) for i in range(4)]
LENGTH = 24


class Penalties(LogitsProcessor):  # type: ignore[misc]
    """Presence and frequency penalties as OpenAI defines them; transformers has none."""

    def __init__(self, num_prompt: int, presence: float, frequency: float) -> None:
        self.num_prompt, self.presence, self.frequency = num_prompt, presence, frequency

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        scores = scores.clone()
        for token, count in Counter(input_ids[0, self.num_prompt :].tolist()).items():
            scores[0, token] -= self.presence + self.frequency * count
        return scores


#: name -> (our parameters, transformers' options, presence, frequency)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], float, float]] = {
    "repetition": ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}, 0, 0),
    "presence": ({"presence_penalty": 1.5}, {}, 1.5, 0),
    "frequency": ({"frequency_penalty": 0.8}, {}, 0, 0.8),
    "no_repeat": ({"no_repeat_ngram_size": 2}, {"no_repeat_ngram_size": 2}, 0, 0),
    "bias": (
        {"logit_bias": ((7, 5.0), (9, -100.0))},
        {"sequence_bias": {(7,): 5.0, (9,): -100.0}},
        0,
        0,
    ),
    "all": (
        {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "no_repeat_ngram_size": 3},
        {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
        0,
        0.5,
    ),
    "bias_presence": (
        {"logit_bias": ((3, 4.0),), "presence_penalty": 2.0},
        {"sequence_bias": {(3,): 4.0}},
        2.0,
        0,
    ),
    "repetition_bias": (
        {"repetition_penalty": 0.8, "logit_bias": ((11, 3.0),)},
        {"repetition_penalty": 0.8, "sequence_bias": {(11,): 3.0}},
        0,
        0,
    ),
    "presence_frequency": ({"presence_penalty": 0.7, "frequency_penalty": 0.4}, {}, 0.7, 0.4),
    "no_repeat_penalties": (
        {"no_repeat_ngram_size": 2, "presence_penalty": -1.0, "repetition_penalty": 1.1},
        {"no_repeat_ngram_size": 2, "repetition_penalty": 1.1},
        -1.0,
        0,
    ),
    "frequency_down": ({"frequency_penalty": -0.5}, {}, 0, -0.5),
    "plain": ({}, {}, 0, 0),
}


@pytest.fixture(scope="module")
def target(tiny: TinyFactory) -> Path:
    return tiny("llama", eos_token_id=300)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def stack(target: Path, tiny: TinyFactory) -> AsyncIterator[Stack]:
    pools = [pool("copy", "draft_model", target), pool("ngram", "ngram")]
    async with serving(target, pools, adaptive_draft_length=False) as running:
        yield running


def _reference(model: Any, prompt: tuple[int, ...], name: str) -> list[int]:
    _, options, presence, frequency = CASES[name]
    extra = LogitsProcessorList([Penalties(len(prompt), presence, frequency)])
    return greedy_reference(model, prompt, LENGTH, logits_processor=extra, **options)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("k", [1, 3, 8])
async def test_processors_equal_transformers(stack: Stack, target: Path, k: int) -> None:
    """Penalties that see only the last accepted token (sglang#33643), or count it twice
    (vllm#33251), or remember rejected drafts (vmlx-swift#357), change some token here."""
    model = load_reference(target)
    names = list(CASES)
    for first in range(0, len(names), 4):
        batch = names[first : first + 4]
        requests = [
            make_request(
                prompt,
                LENGTH,
                request_id=name,
                sampling=SamplingParams(num_prompt_tokens=len(prompt), **CASES[name][0]),
                drafter=("copy", "ngram")[i % 2],
                max_draft_tokens=k,
            )
            for i, (name, prompt) in enumerate(zip(batch, PROMPTS, strict=True))
        ]
        results = await asyncio.gather(*(stack.run(r) for r in requests))
        for request, (ids, _, _) in zip(requests, results, strict=True):
            expected = _reference(model, request.prompt_token_ids, request.request_id)
            assert ids == expected, request.request_id


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("k", [1, 3, 8])
async def test_min_new_tokens_and_bad_words_equal_transformers(
    stack: Stack, target: Path, k: int
) -> None:
    """An end token held back one position too long (vllm#41768) or too short shows here."""
    model = load_reference(target)
    prompt = PROMPTS[0]
    plain = greedy_reference(model, prompt, LENGTH)
    end, bad = plain[3], [[plain[1]], [plain[6], plain[7]]]
    cases = [
        (
            {"min_new_tokens": 8, "end_token_ids": (end,)},
            {"min_new_tokens": 8, "eos_token_id": end},
            frozenset({end}),
        ),
        (
            {"bad_words_ids": tuple(map(tuple, bad))},
            {"bad_words_ids": bad},
            frozenset(),
        ),
    ]
    for ours, options, stop_token_ids in cases:
        sampling = SamplingParams(num_prompt_tokens=len(prompt), **ours)
        request = make_request(
            prompt,
            LENGTH,
            sampling=sampling,
            drafter="copy",
            max_draft_tokens=k,
            stop_token_ids=stop_token_ids,
        )
        ids, _, _ = await stack.run(request)
        assert ids == greedy_reference(model, prompt, LENGTH, **options)


async def _blocks(stack: Stack, **request: Any) -> list[Block]:
    return [block async for block in stack.stream(make_request(**request))]


@pytest.mark.asyncio(loop_scope="module")
async def test_logprobs_are_the_targets_own(stack: Stack, target: Path) -> None:
    """All 0.0 under speculation (llama.cpp#27972), wrong near the end (vllm#38711), or one short
    (sglang#10660): each token has the target's log-softmax, accepted draft or not."""
    model = load_reference(target)
    for drafter in ("copy", "ngram"):
        prompt = PROMPTS[1]
        blocks = await _blocks(
            stack,
            prompt=prompt,
            max_new_tokens=LENGTH,
            drafter=drafter,
            output=Output(logprobs=3, prompt_logprobs=True),
        )
        ids = [t for block in blocks for t in block.token_ids]
        entries = [entry for block in blocks for entry in block.logprobs]
        assert len(entries) == len(ids) == LENGTH
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0].float()
        expected = torch.log_softmax(logits, dim=-1)
        for index, (token, entry) in enumerate(zip(ids, entries, strict=True)):
            row = expected[len(prompt) - 1 + index]
            assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
            best = row.topk(3)
            assert list(entry.top_token_ids) == best.indices.tolist()
            assert list(entry.top_logprobs) == pytest.approx(best.values.tolist(), abs=1e-4)
        prompt_entries = [entry for block in blocks for entry in block.prompt_logprobs]
        assert len(prompt_entries) == len(prompt) - 1
        for index, entry in enumerate(prompt_entries):
            wanted = float(expected[index, prompt[index + 1]])
            assert entry.logprob == pytest.approx(wanted, abs=1e-4)
