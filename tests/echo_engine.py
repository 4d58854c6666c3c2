"""A double of the engine that a person can compute, for tests of the public edge and its client.

It answers with the request's own prompt and invented statistics. The real engine has its own tests.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator

from core.types import ModelIdentity, SamplingParams, VerifierInfo
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
)
REPLICA = ReplicaStatus("drafter-0", "127.0.0.1:9", Health.LOST, "gone", 1, 8, 3)


class EchoEngine:
    """Answers in blocks of five tokens, all but the last of each block drafted, then ends.

    answer: ids to answer with; the request's own prompt when empty.
    error: raised instead of an answer.
    hold: when set, waited for after each block.
    closed: set when a generator was closed, however it ended.
    """

    pool_names = ("ngram",)

    def __init__(self) -> None:
        self.info: VerifierInfo | None = INFO
        self.requests: list[GenerationRequest] = []
        self.answer: tuple[int, ...] = ()
        self.error: Exception | None = None
        self.hold: asyncio.Event | None = None
        self.closed = asyncio.Event()

    async def generate(
        self, request: GenerationRequest, detokenizer: Detokenizer
    ) -> AsyncGenerator[Block, None]:
        """The blocks."""
        self.requests.append(request)
        try:
            if self.error is not None:
                raise self.error
            ids = self.answer or request.prompt_token_ids
            for begin in range(0, len(ids), 5):
                block = ids[begin : begin + 5]
                yield Block(block, len(block) - 1, detokenizer.push(block).text)
                if self.hold is not None:
                    await self.hold.wait()
            usage = (len(ids), len(ids), 2, STATS, 0.5, 1.5)
            end = Finished(FinishReason.STOP_TOKEN, *usage, "", EOS)
            yield Block((EOS,), 0, detokenizer.flush(), end)
        finally:
            self.closed.set()

    def status(self) -> ClusterStatus:
        """One lost verifier, one pool."""
        pool = PoolStatus("ngram", "ngram", (REPLICA,), 1, 2, 3)
        return ClusterStatus("tiny", (REPLICA,), (pool,), 1, 2, 3, 4, 5.5)
