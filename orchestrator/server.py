"""The public gRPC edge: GenerationService and ClusterService over an engine.

Turns messages into requests (see `orchestrator.validation`) and blocks into messages, and no more:
protobuf ends here. A call that ends for any reason (finished, cancelled, past its deadline, client
gone) closes the engine's iterator at once. Errors become statuses in `core.rpc`. Knows nothing of
verifiers, drafters or Ray; whoever starts the engine stops it.
"""

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import grpc

from core import __version__
from core.config import OrchestratorConfig
from core.errors import ConfigError, InvalidRequestError, UnavailableError
from core.rpc import RunningServer, create_server
from core.tokenizer import Tokenizer
from core.types import VerifierInfo
from core.wire import logprobs_to_proto
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
)
from orchestrator.samples import merge, sample_requests
from orchestrator.validation import build_request, is_long
from protos import cluster_pb2, cluster_pb2_grpc, generation_pb2, generation_pb2_grpc

_REASONS: Final[Mapping[FinishReason, generation_pb2.FinishReason]] = {
    FinishReason.STOP_TOKEN: generation_pb2.FINISH_REASON_STOP_TOKEN,
    FinishReason.STOP_STRING: generation_pb2.FINISH_REASON_STOP_STRING,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
}
_HEALTHS: Final[Mapping[Health, cluster_pb2.ReplicaHealth]] = {
    Health.CONNECTING: cluster_pb2.REPLICA_HEALTH_CONNECTING,
    Health.READY: cluster_pb2.REPLICA_HEALTH_READY,
    Health.LOST: cluster_pb2.REPLICA_HEALTH_LOST,
    Health.REFUSED: cluster_pb2.REPLICA_HEALTH_REFUSED,
}
_SERVICE_NAMES: Final = ("forerun.v1.GenerationService", "forerun.v1.ClusterService")


class ServingEngine(Protocol):
    """What the edge needs of `orchestrator.engine.Engine`."""

    @property
    def info(self) -> VerifierInfo | None:
        """The target's facts; None until a verifier is there."""

    @property
    def pool_kinds(self) -> Mapping[str, str]:
        """Kinds of the drafter pools by name, the default pool first."""

    def generate(
        self, request: GenerationRequest, detokenizer: Detokenizer
    ) -> AsyncGenerator[Block, None]:
        """Run one request; closing the generator frees everything."""

    def status(self) -> ClusterStatus:
        """The cluster at this moment."""


async def serve_orchestrator(
    engine: ServingEngine, tokenizer: Tokenizer, config: OrchestratorConfig
) -> RunningServer:
    """Start the public server. `tokenizer` is the target's.

    Raises ConfigError when the address is taken or the token file is not usable.
    """

    def add_servicers(server: grpc.aio.Server) -> None:
        generation = _GenerationServicer(engine, tokenizer)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(generation, server)
        cluster_pb2_grpc.add_ClusterServiceServicer_to_server(_ClusterServicer(engine), server)

    token = read_token(config.auth_token_file)
    return await create_server(
        add_servicers, _SERVICE_NAMES, config.host, config.port, auth_token=token
    )


def read_token(path: str) -> str:
    """The bearer token in a file; "" without one. Raises ConfigError."""
    if not path:
        return ""
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"auth token file {path}: {error}") from error
    if not token:
        raise ConfigError(f"auth token file {path}: it is empty")
    return token


class _GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    def __init__(self, engine: ServingEngine, tokenizer: Tokenizer) -> None:
        self._engine = engine
        self._tokenizer = tokenizer

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        """Validate, run, translate."""
        requests = sample_requests(await self._resolve(request), request.n or 1)
        detokenizers = [self._detokenizer(request, r) for r in requests]
        wants_ids = request.output.return_token_ids
        spellers = [self._speller(request) if wants_ids else None for _ in requests]
        starts = [
            functools.partial(self._engine.generate, *arguments)
            for arguments in zip(requests, detokenizers, strict=True)
        ]
        async with contextlib.aclosing(merge(starts)) as blocks:
            async for sample, block in blocks:
                response = _response(block, spellers[sample], requests[sample].sampling.seed)
                response.request_id, response.sample = requests[0].request_id, sample
                yield response

    def _detokenizer(
        self, message: generation_pb2.GenerateRequest, request: GenerationRequest
    ) -> Detokenizer:
        """One that stands behind the tokens to continue from."""
        detokenizer = Detokenizer(self._tokenizer, request.stopping.stop)
        if stop_string := detokenizer.push(message.continue_from_token_ids).stop_string:
            raise InvalidRequestError(
                "continue_from_token_ids", f"the text has ended: {stop_string!r} is a stop string"
            )
        return detokenizer

    def _speller(self, message: generation_pb2.GenerateRequest) -> Detokenizer:
        """One that stops at nothing, for the texts of single tokens."""
        speller = Detokenizer(self._tokenizer)
        speller.push(message.continue_from_token_ids)
        return speller

    async def _resolve(self, request: generation_pb2.GenerateRequest) -> GenerationRequest:
        info = self._engine.info
        if info is None:
            raise UnavailableError("no verifier is there yet; try again later")
        arguments = (request, info, self._tokenizer, self._engine.pool_kinds)
        if is_long(request):
            return await asyncio.to_thread(build_request, *arguments)
        return build_request(*arguments)


class _ClusterServicer(cluster_pb2_grpc.ClusterServiceServicer):
    def __init__(self, engine: ServingEngine) -> None:
        self._engine = engine

    async def GetStatus(
        self, request: cluster_pb2.GetStatusRequest, context: Any
    ) -> cluster_pb2.GetStatusResponse:
        """The engine's status."""
        return _status(self._engine.status())


def _response(
    block: Block, speller: Detokenizer | None, seed: int
) -> generation_pb2.GenerateResponse:
    response = generation_pb2.GenerateResponse(
        text=block.text,
        logprobs=logprobs_to_proto(block.logprobs),
        prompt_logprobs=logprobs_to_proto(block.prompt_logprobs),
    )
    if speller is not None:
        accepted, total = block.accepted, len(block.token_ids)
        response.token_ids.extend(block.token_ids)
        response.origins.extend([generation_pb2.TOKEN_ORIGIN_ACCEPTED_DRAFT] * accepted)
        response.origins.extend([generation_pb2.TOKEN_ORIGIN_TARGET] * (total - accepted))
        response.token_texts.extend(speller.push(block.token_ids).token_texts)
    if block.finished is not None:
        response.finished.CopyFrom(_finished(block.finished, seed))
    return response


def _finished(finished: Finished, seed: int) -> generation_pb2.Finished:
    stats = finished.stats
    return generation_pb2.Finished(
        reason=_REASONS[finished.reason],
        stop_string=finished.stop_string,
        stop_token_id=finished.stop_token_id,
        usage=generation_pb2.Usage(
            prompt_tokens=finished.prompt_tokens,
            completion_tokens=finished.completion_tokens,
            cached_prompt_tokens=finished.cached_prompt_tokens,
        ),
        seed=seed,
        speculation=generation_pb2.SpeculationStats(
            num_spec_steps=stats.num_spec_steps,
            num_draft_tokens=stats.num_draft_tokens,
            num_accepted_draft_tokens=stats.num_accepted_draft_tokens,
            mean_acceptance_length=stats.mean_acceptance_length,
            draft_acceptance_rate=stats.draft_acceptance_rate,
            acceptance_histogram=stats.acceptance_histogram,
            num_plan_hits=stats.num_plan_hits,
            plan_misses=stats.plan_misses,
            fallback_steps=stats.fallback_steps,
            num_verify_steps=stats.num_verify_steps,
            drafter=stats.drafter,
            num_tokens_without_distributions=stats.num_tokens_without_distributions,
        ),
        time_to_first_token_ms=finished.time_to_first_token_s * 1000,
        total_ms=finished.total_s * 1000,
    )


def _status(status: ClusterStatus) -> cluster_pb2.GetStatusResponse:
    return cluster_pb2.GetStatusResponse(
        model=status.model,
        version=__version__,
        verifiers=map(_replica, status.verifiers),
        drafter_pools=map(_pool, status.drafter_pools),
        num_waiting=status.num_waiting,
        num_running=status.num_running,
        num_finished=status.num_finished,
        num_completion_tokens=status.num_completion_tokens,
        uptime_s=status.uptime_s,
    )


def _pool(pool: PoolStatus) -> cluster_pb2.DrafterPoolStatus:
    return cluster_pb2.DrafterPoolStatus(
        pool=pool.pool,
        kind=pool.kind,
        replicas=map(_replica, pool.replicas),
        num_draft_tokens=pool.num_draft_tokens,
        num_accepted_draft_tokens=pool.num_accepted_draft_tokens,
        num_drafts=pool.num_drafts,
    )


def _replica(replica: ReplicaStatus) -> cluster_pb2.ReplicaStatus:
    return cluster_pb2.ReplicaStatus(
        replica_id=replica.replica_id,
        address=replica.address,
        health=_HEALTHS[replica.health],
        message=replica.message,
        num_sequences=replica.num_sequences,
        max_sequences=replica.max_sequences,
        num_losses=replica.num_losses,
    )
