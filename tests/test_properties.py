"""What must hold for every request, whatever it asks for: checked over random ones.

The stack runs on an event loop of its own in a thread, so that hypothesis can drive it.
"""

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.types import Rule, SamplingParams
from orchestrator.requests import Block, FinishReason, GenerationRequest, Output
from tests.harness import Stack, pool, serving
from tests.policy import make_request
from tests.tiny_models import TinyFactory


class Running:
    """A stack on its own loop; `run` serves requests at once and returns all their blocks."""

    def __init__(self, loop: asyncio.AbstractEventLoop, stack: Stack) -> None:
        self.loop, self.stack = loop, stack

    def run(self, requests: list[GenerationRequest]) -> list[list[Block]]:
        async def one(request: GenerationRequest) -> list[Block]:
            return [block async for block in self.stack.stream(request)]

        async def every() -> list[list[Block]]:
            return await asyncio.gather(*(one(request) for request in requests))

        return asyncio.run_coroutine_threadsafe(every(), self.loop).result(60)


@pytest.fixture(scope="module")
def running(tiny: TinyFactory) -> Iterator[Running]:
    target = tiny("llama", eos_token_id=300)
    pools = [
        pool("copy", "draft_model", target),
        pool("other", "draft_model", tiny("llama", seed=7, num_hidden_layers=1)),
        pool("ngram", "ngram"),
    ]
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    context = serving(target, pools)
    stack = asyncio.run_coroutine_threadsafe(context.__aenter__(), loop).result(60)
    yield Running(loop, stack)
    asyncio.run_coroutine_threadsafe(context.__aexit__(None, None, None), loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


prompts = st.lists(st.integers(0, 255), min_size=1, max_size=40).map(tuple)
penalties = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.sampled_from([1.1, 1.5]),
        "frequency_penalty": st.sampled_from([0.3, -0.5]),
        "no_repeat_ngram_size": st.sampled_from([2, 3]),
        "min_new_tokens": st.integers(1, 8),
        "logit_bias": st.just(((65, 4.0),)),
    },
)
draws = st.one_of(
    st.just({"rule": Rule.GREEDY}),
    st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.5, 1.0, 1.7]),
            "rule": st.sampled_from([Rule.COUPLED, Rule.REJECTION, Rule.TOKEN_REJECTION]),
            "seed": st.integers(0, 2**64 - 1),
        },
        optional={
            "top_k": st.sampled_from([5, 40]),
            "top_p": st.sampled_from([0.7, 0.95]),
            "min_p": st.just(0.05),
            "typical_p": st.just(0.9),
        },
    ),
)


@st.composite
def requests(draw: st.DrawFn) -> GenerationRequest:
    """Any request: sampling, stops, drafter, draft length, log-probabilities."""
    prompt = draw(prompts)
    ends = draw(st.frozensets(st.integers(0, 255), max_size=3))
    sampling = SamplingParams(
        num_prompt_tokens=len(prompt),
        end_token_ids=tuple(sorted(ends)),
        **draw(draws),
        **draw(penalties),
    )
    request = make_request(
        prompt,
        draw(st.integers(1, 24)),
        sampling=sampling,
        stop_token_ids=ends,
        stop=tuple(draw(st.lists(st.sampled_from(["a", "ee", "\n", " t"]), max_size=2))),
        enabled=draw(st.booleans()),
        drafter=draw(st.sampled_from(["copy", "other", "ngram"])),
        max_draft_tokens=draw(st.integers(0, 8)),
        output=Output(logprobs=draw(st.sampled_from([None, 0, 2]))),
    )
    stopping = replace(request.stopping, include_stop=draw(st.booleans()))
    return replace(request, stopping=stopping)


def _check(stack: Stack, request: GenerationRequest, blocks: list[Block]) -> None:
    ids = [token for block in blocks for token in block.token_ids]
    text = "".join(block.text for block in blocks)
    finished = blocks[-1].finished
    assert finished is not None and all(block.finished is None for block in blocks[:-1])
    assert len(ids) == finished.completion_tokens <= request.stopping.max_new_tokens
    entries = [entry for block in blocks for entry in block.logprobs]
    assert len(entries) == (0 if request.output.logprobs is None else len(ids))
    assert all(entry.logprob <= 0 for entry in entries)
    whole = stack.tokenizer.decode(ids)
    if finished.reason is FinishReason.STOP_STRING:
        end = whole.index(finished.stop_string)
        assert text == whole[: end + len(finished.stop_string) * request.stopping.include_stop]
    else:
        assert text == whole
        assert not any(stop in whole for stop in request.stopping.stop)
    stops = [token for token in ids if token in request.stopping.stop_token_ids]
    assert stops in ([], ids[-1:]), "something was generated behind an end token"
    if stops:
        assert finished.reason is not FinishReason.LENGTH or request.stopping.stop
        assert len(ids) > request.sampling.min_new_tokens
    stats = finished.stats
    assert sum(block.accepted for block in blocks) == stats.num_accepted_draft_tokens
    assert sum(stats.acceptance_histogram) == stats.num_spec_steps
    assert stats.num_accepted_draft_tokens <= stats.num_draft_tokens
    expected = 1 + stats.num_accepted_draft_tokens / max(1, stats.num_spec_steps)
    assert stats.mean_acceptance_length == expected


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(batch=st.lists(requests(), min_size=1, max_size=4))
def test_identities_hold_for_any_request(running: Running, batch: list[GenerationRequest]) -> None:
    """Ids, text, log-probabilities, usage, origins and statistics must tell the same story."""
    named = [replace(request, request_id=str(i)) for i, request in enumerate(batch)]
    for request, blocks in zip(named, running.run(named), strict=True):
        _check(running.stack, request, blocks)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(request=requests(), mates=st.lists(requests(), min_size=1, max_size=3))
def test_same_seed_same_text_with_any_batch_mates(
    running: Running, request: GenerationRequest, mates: list[GenerationRequest]
) -> None:
    """Seeds shared by rows, or mixed up with unseeded ones (vllm#6038, #9441), change the text.

    The rules that look at drafts keep their law, not their text: they are left out.
    """
    if request.sampling.rule.needs_distributions:
        sampling = replace(request.sampling, rule=Rule.COUPLED)
        request = replace(request, sampling=sampling)
    alone = running.run([replace(request, request_id="alone")])[0]
    crowd = [replace(mate, request_id=str(i)) for i, mate in enumerate(mates)]
    together = running.run([replace(request, request_id="together"), *crowd])[0]
    assert [t for b in alone for t in b.token_ids] == [t for b in together for t in b.token_ids]
