"""A double of the engine that a person can compute, for tests of the public edge and its client.

It answers with the request's own prompt and invented statistics. The real engine has its own tests.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Mapping

from core.types import ModelIdentity, SamplingParams, TokenLogprobs, VerifierInfo
from orchestrator.detokenizer import Detokenizer
from orchestrator.requests import (
    Block,
    ClusterStatus,
    Finished,
    FinishReason,
    GenerationRequest,
    Health,
    PoolStatus,
    ReplicaStatus,
    SpeculationStats,
)
from tests.tiny_models import EOS, VOCAB_SIZE

INFO = VerifierInfo(
    ModelIdentity("tiny", VOCAB_SIZE), 20_000, 4, 64, (EOS,), SamplingParams(), "i", VOCAB_SIZE
)
STATS = SpeculationStats(
    num_verify_steps=4,
    num_spec_steps=2,
    num_draft_tokens=8,
    num_accepted_draft_tokens=6,
    num_plan_hits=1,
    acceptance_histogram=[0, 0, 1, 0, 1],
    plan_misses=Counter(late=2),
    fallback_steps=Counter(disabled=1),
    drafter="ngram",
    num_tokens_without_distributions=5,
)
REPLICA = ReplicaStatus("drafter-0", "127.0.0.1:9", Health.LOST, "gone", 1, 8, 3)


def entries(token_ids: tuple[int, ...], num_top: int | None) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities that tell to which tokens they belong; none when `num_top` is None."""
    if num_top is None:
        return ()
    top = tuple(range(num_top))
    return tuple(TokenLogprobs(-t, top, tuple(-t - 1.0 - i for i in top)) for t in token_ids)


class EchoEngine:
    """Answers in blocks of five tokens, all but the last of each block drafted, then ends.

    answer: ids to answer with; the request's own prompt when empty.
    is_seeded: the prompt is turned by as many tokens as the seed says.
    error: raised instead of an answer, for requests whose seed is `error_seed` or for all.
    hold: when set, waited for after each block.
    num_running: generators that are not closed.
    closed: set when the last generator was closed, however it ended.
    """

    pool_kinds: Mapping[str, str] = {"ngram": "ngram", "small": "draft_model"}

    def __init__(self) -> None:
        self.info: VerifierInfo | None = INFO
        self.requests: list[GenerationRequest] = []
        self.answer: tuple[int, ...] = ()
        self.error: Exception | None = None
        self.error_seed: int | None = None
        self.is_seeded = False
        self.hold: asyncio.Event | None = None
        self.num_running = 0
        self.closed = asyncio.Event()

    async def generate(
        self, request: GenerationRequest, detokenizer: Detokenizer
    ) -> AsyncGenerator[Block, None]:
        """The blocks."""
        self.requests.append(request)
        self.num_running += 1
        prompt, seed, output = request.prompt_token_ids, request.sampling.seed, request.output
        news = entries(prompt[1:], output.logprobs or 0) if output.prompt_logprobs else ()
        try:
            if self.error is not None and self.error_seed in (None, seed):
                raise self.error
            turn = seed % len(prompt) if self.is_seeded else 0
            ids = self.answer or prompt[turn:] + prompt[:turn]
            for begin in range(0, len(ids), 5):
                block = ids[begin : begin + 5]
                text, logprobs = detokenizer.push(block).text, entries(block, output.logprobs)
                yield Block(block, len(block) - 1, text, None, logprobs, news)
                news = ()
                if self.hold is not None:
                    await self.hold.wait()
            usage = (len(ids), len(ids), 2, STATS, 0.5, 1.5)
            end = Finished(FinishReason.STOP_TOKEN, *usage, "", EOS)
            yield Block((EOS,), 0, detokenizer.flush(), end, entries((EOS,), output.logprobs))
        finally:
            self.num_running -= 1
            if not self.num_running:
                self.closed.set()

    def status(self) -> ClusterStatus:
        """One lost verifier, one pool."""
        pool = PoolStatus("ngram", "ngram", (REPLICA,), 1, 2, 3)
        return ClusterStatus("tiny", (REPLICA,), (pool,), 1, 2, 3, 4, 5.5)
