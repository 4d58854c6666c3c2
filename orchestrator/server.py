"""The public gRPC edge: GenerationService and ClusterService over an engine.

A wire around `orchestrator.generation_api`, and no more. A call that ends for any reason (finished,
cancelled, past its deadline, client gone) closes the engine's iterator at once. Errors become
statuses in `core.rpc`. Knows nothing of verifiers, drafters or Ray; whoever starts the engine stops
it.
"""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import grpc

from core.config import OrchestratorConfig
from core.errors import ConfigError
from core.rpc import RunningServer, create_server
from core.tokenizer import Tokenizer
from orchestrator.autoscaling import DrafterScaler
from orchestrator.cluster_api import ClusterApi
from orchestrator.generation_api import GenerationApi, ServingEngine
from orchestrator.telemetry import Telemetry
from protos import cluster_pb2, cluster_pb2_grpc, generation_pb2, generation_pb2_grpc

_SERVICE_NAMES: Final = ("forerun.v1.GenerationService", "forerun.v1.ClusterService")


async def serve_orchestrator(
    engine: ServingEngine,
    tokenizer: Tokenizer,
    config: OrchestratorConfig,
    telemetry: Telemetry | None = None,
    scaler: DrafterScaler | None = None,
) -> RunningServer:
    """Start the public server. `tokenizer` is the target's, `telemetry` watches the requests,
    `scaler` sets the number of drafters where that can be done.

    Raises ConfigError when the address is taken or the token file is not usable.
    """

    def add_servicers(server: grpc.aio.Server) -> None:
        generation = _GenerationServicer(GenerationApi(engine, tokenizer, telemetry))
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(generation, server)
        cluster = _ClusterServicer(ClusterApi(engine, scaler))
        cluster_pb2_grpc.add_ClusterServiceServicer_to_server(cluster, server)

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
    def __init__(self, api: GenerationApi) -> None:
        self._api = api

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        """The API's own responses."""
        metadata = dict(context.invocation_metadata() or ())
        answer = self._api.generate(request, metadata.get("traceparent", ""))
        async with contextlib.aclosing(answer) as responses:
            async for response in responses:
                yield response


class _ClusterServicer(cluster_pb2_grpc.ClusterServiceServicer):
    def __init__(self, api: ClusterApi) -> None:
        self._api = api

    async def GetStatus(
        self, request: cluster_pb2.GetStatusRequest, context: Any
    ) -> cluster_pb2.GetStatusResponse:
        """The API's status."""
        return self._api.status()

    async def ScaleDrafters(
        self, request: cluster_pb2.ScaleDraftersRequest, context: Any
    ) -> cluster_pb2.ScaleDraftersResponse:
        """The API's answer."""
        return await self._api.scale_drafters(request)

    async def DrainDrafter(
        self, request: cluster_pb2.DrainDrafterRequest, context: Any
    ) -> cluster_pb2.DrainDrafterResponse:
        """The API's answer."""
        return await self._api.drain_drafter(request)
