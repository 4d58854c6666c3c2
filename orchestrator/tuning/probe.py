"""Seconds of a verify round that neither the target nor a drafter computes.

A real stack over loopback, around the loaded target: verifier service, orchestrator, and a drafter
service whose drafter takes no time. Between two moments at which all clients decode, what remains
of the clock beside forwards and rule is spread over the batches. Knows nothing of the drafters
under test.
"""

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from prometheus_client import CollectorRegistry

from core.config import DrafterPoolConfig, OrchestratorConfig
from core.drafter import Draft, Drafter, DraftJob
from core.metrics import VerifierMetrics
from core.rpc import create_server
from core.tokenizer import Tokenizer
from core.types import ModelIdentity
from drafter_service.server import serve
from orchestrator.detokenizer import Detokenizer
from orchestrator.engine import Engine
from orchestrator.requests import GenerationRequest, ReplicaSpec, Speculation, Stopping
from orchestrator.tuning.replay import GREEDY
from protos import verifier_pb2_grpc
from verifier_service.engine import VerifierEngine
from verifier_service.server import SERVICE_NAME, VerifierServicer

_POOL = DrafterPoolConfig(name="probe", kind="probe", max_draft_tokens=1)
_PATIENCE_MS = 10_000.0


class _Instant(Drafter):
    """Says the last token again, at once, in a thread as a model would."""

    kind = "probe"

    @property
    def identity(self) -> ModelIdentity:
        return ModelIdentity("probe", 0)

    def draft(self, jobs: Sequence[DraftJob]) -> list[Draft]:
        return [Draft(tuple(job.token_ids[-1:])) for job in jobs]


@dataclass(frozen=True, slots=True)
class _Moment:
    """The clock, batches so far and the seconds computed for them."""

    at_s: float
    batches: float
    busy_s: float


class _Probe:
    """The running stack."""

    def __init__(self, engine: Engine, registry: CollectorRegistry, tokenizer: Tokenizer) -> None:
        self._engine, self._registry, self._tokenizer = engine, registry, tokenizer

    async def idle_seconds(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, is_drafted: bool
    ) -> float:
        """Per batch, with a client per prompt."""
        begun: list[_Moment] = []
        ended: list[_Moment] = []
        await asyncio.gather(
            *(
                self._client(tuple(prompt), num_tokens, is_drafted, begun, ended)
                for prompt in prompts
            )
        )
        first, last = begun[-1], ended[0]  # all had begun, none had ended
        spent = last.at_s - first.at_s - (last.busy_s - first.busy_s)
        return max(0.0, spent / max(1.0, last.batches - first.batches))

    async def _client(
        self,
        prompt: tuple[int, ...],
        num_tokens: int,
        is_drafted: bool,
        begun: list[_Moment],
        ended: list[_Moment],
    ) -> None:
        speculation = Speculation(is_drafted, drafter=_POOL.name if is_drafted else "")
        request = GenerationRequest(
            f"probe-{id(begun)}-{len(begun)}-{time.perf_counter_ns()}",
            prompt,
            GREEDY,
            Stopping(num_tokens),
            speculation,
        )
        blocks = self._engine.generate(request, Detokenizer(self._tokenizer, ()))
        num_blocks = 0
        async with contextlib.aclosing(blocks):
            async for block in blocks:
                num_blocks += 1
                if num_blocks == 3:  # the drafter has read the prompt by then
                    begun.append(self._now())
                if block.finished is not None:
                    ended.append(self._now())

    def _now(self) -> _Moment:
        def total(name: str) -> float:
            return self._registry.get_sample_value(f"forerun_verifier_{name}") or 0.0

        busy_s = total("forward_seconds_sum") + total("sampling_seconds_sum")
        return _Moment(time.perf_counter(), total("batches_total"), busy_s)


async def overheads(
    verifier: VerifierEngine,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    row_counts: Sequence[int],
    num_tokens: int,
    threads: int,
) -> tuple[dict[int, float], dict[int, float]]:
    """Seconds of a round without drafts, and of the way to a drafter and back, by clients.

    threads: of torch, for the target; 0 leaves them.
    """
    rounds, trips = {}, {}
    async with _serving(verifier, tokenizer, max(row_counts), threads) as probe:
        for rows in row_counts:
            chosen = [prompts[i % len(prompts)] for i in range(rows)]
            rounds[rows] = await probe.idle_seconds(chosen, num_tokens, False)
            drafted = await probe.idle_seconds(chosen, num_tokens, True)
            trips[rows] = max(0.0, drafted - rounds[rows])
    return rounds, trips


@contextlib.asynccontextmanager
async def _serving(
    verifier: VerifierEngine, tokenizer: Tokenizer, rows: int, threads: int
) -> AsyncIterator[_Probe]:
    registry = CollectorRegistry()
    async with contextlib.AsyncExitStack() as cleanup:
        prepare = functools.partial(torch.set_num_threads, threads or torch.get_num_threads())
        worker = ThreadPoolExecutor(1, "verifier", initializer=prepare)
        cleanup.callback(worker.shutdown)
        servicer = VerifierServicer(verifier, worker, VerifierMetrics(registry))
        target = await create_server(
            functools.partial(verifier_pb2_grpc.add_VerifierServiceServicer_to_server, servicer),
            [SERVICE_NAME],
            "127.0.0.1",
            0,
        )
        cleanup.push_async_callback(target.stop, 0)
        drafter = await serve(_Instant(), _POOL)
        cleanup.push_async_callback(drafter.stop, 0)
        settings = OrchestratorConfig(
            adaptive_draft_length=False,
            draft_wait_ms=_PATIENCE_MS,
            max_queue=rows,
            max_in_flight=1,  # what is measured is the time between two batches
        )
        specs = [_spec("verifier", "", target.address), _spec("drafter", "probe", drafter.address)]
        engine = Engine(settings, [_POOL], specs)
        cleanup.push_async_callback(engine.stop)
        await engine.start()
        yield _Probe(engine, registry, tokenizer)


def _spec(replica_id: str, pool: str, address: str) -> ReplicaSpec:
    async def resolve() -> str:
        return address

    return ReplicaSpec(replica_id, pool, resolve)
