"""What operators may ask, as messages: status, scaling and draining, for every edge.

Turns ClusterService's messages into calls of the engine and of the scaler, if there is one: only
who starts drafters can scale them. Knows nothing of servers.
"""

from core.errors import ConfigError
from orchestrator.autoscaling import DrafterScaler
from orchestrator.generation_api import ServingEngine
from orchestrator.messages import status_to_proto
from protos import cluster_pb2


class ClusterApi:
    """ClusterService over an engine. Without `scaler` the number of drafters is fixed."""

    def __init__(self, engine: ServingEngine, scaler: DrafterScaler | None = None) -> None:
        self._engine = engine
        self._given_scaler = scaler

    def status(self) -> cluster_pb2.GetStatusResponse:
        """The cluster at this moment, and how far its pools can be scaled."""
        response = status_to_proto(self._engine.status())
        scales = self._given_scaler.scales if self._given_scaler is not None else {}
        for pool in response.drafter_pools:
            if scale := scales.get(pool.pool):
                pool.scale.wanted_replicas = scale.wanted
                pool.scale.min_replicas = scale.least
                pool.scale.max_replicas = scale.most
                pool.scale.is_autoscaled = scale.autoscaler is not None
        return response

    async def scale_drafters(
        self, request: cluster_pb2.ScaleDraftersRequest
    ) -> cluster_pb2.ScaleDraftersResponse:
        """Want so many drafters. Raises InvalidRequestError, ConfigError without a scaler."""
        previous = self._scaler.scale(request.pool, request.replicas)
        return cluster_pb2.ScaleDraftersResponse(
            previous_replicas=previous, replicas=request.replicas
        )

    async def drain_drafter(
        self, request: cluster_pb2.DrainDrafterRequest
    ) -> cluster_pb2.DrainDrafterResponse:
        """Take one out of service. Raises InvalidRequestError, ConfigError without a scaler."""
        replicas = await self._scaler.drain(request.replica_id)
        return cluster_pb2.DrainDrafterResponse(replicas=replicas)

    @property
    def _scaler(self) -> DrafterScaler:
        if self._given_scaler is None:
            raise ConfigError(
                "this orchestrator did not start its drafters and cannot start or end any: they"
                " were given by their addresses; `forerun serve` starts them with Ray"
            )
        return self._given_scaler
