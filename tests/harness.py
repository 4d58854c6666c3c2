"""A whole forerun in one process over real loopback gRPC: verifier, drafter pools, engine.

The services are the real ones with tiny checkpoints. The bad kinds misbehave on purpose; they are
entered in the table of kinds, so that everything behind them is real too.
"""

import collections
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from opentelemetry.trace import Tracer
from prometheus_client import CollectorRegistry
from torch import Tensor

from core.config import DrafterPoolConfig, ModelConfig, OrchestratorConfig, VerifierConfig
from core.model import RaggedModel
from core.rpc import RunningServer
from core.tokenizer import Tokenizer
from core.types import ModelIdentity
from drafter_service import drafters as kinds
from drafter_service.drafters.base import Draft, Drafter, DraftJob
from drafter_service.drafters.draft_model import DraftModelDrafter
from drafter_service.server import serve_drafter
from orchestrator.attaching import attacher
from orchestrator.detokenizer import Detokenizer
from orchestrator.engine import Engine
from orchestrator.requests import Finished, GenerationRequest, ReplicaSpec
from verifier_service.server import serve_verifier

ORCHESTRATOR = {"draft_wait_ms": 2000, "adaptive_draft_length": False}
MODEL: dict[str, Any] = {
    "dtype": "float32",
    "device_map": "cpu",
    "max_length": 256,
    "max_sequences": 8,
    "max_batch_tokens": 64,
    "threads": 1,
}


@dataclass
class Stack:
    """Everything that runs; tests reach in to stop a part of it."""

    engine: Engine
    verifiers: list[RunningServer]
    drafters: dict[str, RunningServer]
    tokenizer: Tokenizer
    addresses: dict[str, str]
    registries: dict[str, CollectorRegistry]

    async def run(self, request: GenerationRequest) -> tuple[list[int], str, Finished]:
        """Generate to the end; returns ids, text and the finish."""
        ids: list[int] = []
        text = ""
        finished = None
        async with contextlib.aclosing(self.stream(request)) as blocks:
            async for block in blocks:
                ids.extend(block.token_ids)
                text += block.text
                finished = block.finished
        assert finished is not None
        return ids, text, finished

    def stream(self, request: GenerationRequest) -> Any:
        """The engine's own iterator."""
        return self.engine.generate(request, Detokenizer(self.tokenizer, request.stopping.stop))


def pool(
    name: str, kind: str, model: Path | None = None, k: int = 8, **options: Any
) -> DrafterPoolConfig:
    """A drafter pool with a tiny model."""
    config = ModelConfig(model=str(model), **MODEL) if model else None
    return DrafterPoolConfig(name=name, kind=kind, model=config, max_draft_tokens=k, **options)


@contextlib.asynccontextmanager
async def serving(
    target: Path,
    pools: Sequence[DrafterPoolConfig] = (),
    *,
    model: dict[str, Any] | None = None,
    tracer: Tracer | None = None,
    **orchestrator: Any,
) -> AsyncIterator[Stack]:
    """Start one verifier, a pool's drafters (NAME, NAME-1, ...), and an engine; stop them all at
    the end. Unless told otherwise every draft is verified whole: with models so small hardly any
    is worth its wait."""
    config = ModelConfig(model=str(target), **{**MODEL, **(model or {})})
    attach = attacher([p for p in pools if p.attached])
    registries = collections.defaultdict[str, CollectorRegistry](CollectorRegistry)
    verifier = await serve_verifier(
        config, VerifierConfig(), registries["verifier"], attach, tracer
    )
    remote = {
        f"{p.name}-{i}" if i else p.name: p
        for p in pools
        for i in range(p.replicas)
        if not p.attached
    }
    with mock.patch.object(kinds, "REMOTE", {**kinds.REMOTE, **TEST_KINDS}):
        drafters = {n: await serve_drafter(p, registries[n], tracer) for n, p in remote.items()}
    addresses = {"verifier": verifier.address} | {n: d.address for n, d in drafters.items()}

    def spec(replica_id: str, pool_name: str) -> ReplicaSpec:
        async def resolve() -> str:
            return addresses[replica_id]

        return ReplicaSpec(replica_id, pool_name, resolve)

    specs = [spec("verifier", ""), *(spec(name, p.name) for name, p in remote.items())]
    engine = Engine(OrchestratorConfig(**{**ORCHESTRATOR, **orchestrator}), list(pools), specs)
    tokenizer = Tokenizer.load(str(target))
    stack = Stack(engine, [verifier], drafters, tokenizer, addresses, registries)
    try:
        await engine.start()
        yield stack
    finally:
        await engine.stop()
        for server in (*stack.drafters.values(), *stack.verifiers):
            await server.stop(0)


class NeverRight(DraftModelDrafter):
    """Given the target's own checkpoint, proposes anything but its next token."""

    def draft(self, jobs: Sequence[DraftJob]) -> list[Draft]:
        """The right draft, every id off by one."""
        drafts = super().draft(jobs)
        return [Draft(tuple((t + 1) % 250 for t in draft.token_ids)) for draft in drafts]


class SometimesRight(DraftModelDrafter):
    """Given the target's own checkpoint, proposes its next tokens, two of seven off by one."""

    def draft(self, jobs: Sequence[DraftJob]) -> list[Draft]:
        """The right draft, wrong at two of seven positions of the sequence, side by side."""
        return [
            Draft(
                tuple(
                    t if (len(job.token_ids) + i) % 7 > 1 else (t + 1) % 250
                    for i, t in enumerate(draft.token_ids)
                )
            )
            for job, draft in zip(jobs, super().draft(jobs), strict=True)
        ]


class Stale(DraftModelDrafter):
    """Answers each question with the answer to an earlier one."""

    def draft(self, jobs: Sequence[DraftJob]) -> list[Draft]:
        """The draft of a prefix that is four tokens old."""
        old = [replace(j, token_ids=j.token_ids[:-4] or j.token_ids, num_unchanged=0) for j in jobs]
        return super().draft(old)


class Garbage(DraftModelDrafter):
    """Random ids, half of them outside every vocabulary."""

    def draft(self, jobs: Sequence[DraftJob]) -> list[Draft]:
        """As many ids as wanted, none of them thought about."""
        rng = random.Random(sum(len(j.token_ids) for j in jobs))
        return [
            Draft(tuple(rng.choice((rng.randrange(256), 5_000_000)) for _ in range(length)))
            for length in (j.num_draft_tokens for j in jobs)
        ]


def create_never_right(config: DrafterPoolConfig) -> Drafter:
    """For the table of kinds."""
    return NeverRight(_load(config))


def create_sometimes_right(config: DrafterPoolConfig) -> Drafter:
    """For the table of kinds."""
    return SometimesRight(_load(config))


def create_stale(config: DrafterPoolConfig) -> Drafter:
    """For the table of kinds."""
    return Stale(_load(config))


def create_garbage(config: DrafterPoolConfig) -> Drafter:
    """For the table of kinds."""
    return Garbage(_load(config))


class HeadDrafter(Drafter):
    """Knows the target's head only: says again what the target said one token ago.

    Its draft is computed from the last hidden state it was told, so it is right about what the
    target will repeat, and it proves that features arrive: it raises when one is missing.
    """

    kind = "test_head"
    needs = ("hidden_states",)

    def __init__(self, model: RaggedModel) -> None:
        self._model = model
        self._told: dict[int, list[Tensor]] = {}

    @property
    def identity(self) -> ModelIdentity:
        """The target's own: it has its tokenizer."""
        return self._model.identity

    def draft(self, jobs: Sequence[DraftJob]) -> list[Draft]:
        """The argmax of the head on the newest hidden state: the last committed token itself."""
        drafts = []
        for job in jobs:
            told = self._told.setdefault(job.sequence, [])
            if job.features is not None:
                assert job.features.position == sum(map(len, told))
                told.append(job.features.values)
            assert sum(map(len, told)) == len(job.token_ids) - 1 or not job.num_draft_tokens
            ids: tuple[int, ...] = ()
            if job.num_draft_tokens:
                ids = (int(self._model.network.lm_head(told[-1][-1]).argmax()),)
                assert job.sampling.temperature or ids == tuple(job.token_ids[-1:])
            drafts.append(Draft(ids))
        return drafts

    def close(self, sequence: int) -> None:
        """Forget what was told."""
        self._told.pop(sequence, None)


def create_head(config: DrafterPoolConfig) -> Drafter:
    """For the table of kinds."""
    return HeadDrafter(_load(config))


def _load(config: DrafterPoolConfig) -> RaggedModel:
    assert config.model is not None
    return RaggedModel.load(config.model)


TEST_KINDS = {
    f"test_{name}": ("tests.harness", f"create_{name}")
    for name in ("never_right", "sometimes_right", "stale", "garbage", "head")
}
