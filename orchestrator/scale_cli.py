"""`forerun scale` and `forerun drain`: more and fewer drafters, while everything is served.

Two calls of ClusterService. Speaks gRPC to an orchestrator and knows nothing of what is behind it.
"""

import asyncio
import time
from typing import Annotated

import typer

from core.errors import UnavailableError
from core.rpc import bearer_metadata, create_channel
from orchestrator.client_cli import DEFAULT_ADDRESS, Address, TokenFile, run_client
from orchestrator.server import read_token
from protos import cluster_pb2 as cluster
from protos.cluster_pb2_grpc import ClusterServiceStub

_CALL_S = 10.0
_DRAIN_S = 60.0
_POLL_S = 0.5


def scale(
    pool: Annotated[str, typer.Argument(help="Name of a drafter pool.")],
    replicas: Annotated[int, typer.Argument(help="Drafters it is to have.")],
    wait: Annotated[
        float, typer.Option(help="Seconds to wait until so many serve; 0: do not wait.")
    ] = 0.0,
    address: Address = DEFAULT_ADDRESS,
    token_file: TokenFile = "",
) -> None:
    """Set how many drafters a pool has; new ones join when they are loaded."""
    run_client(_scale(pool, replicas, wait, address, token_file), address)


def drain(
    replica_id: Annotated[str, typer.Argument(help="Name of a drafter, as in `status`.")],
    address: Address = DEFAULT_ADDRESS,
    token_file: TokenFile = "",
) -> None:
    """Take one drafter out of service: its sequences move to others, then it ends."""
    run_client(_drain(replica_id, address, token_file), address)


async def _scale(pool: str, replicas: int, wait_s: float, address: str, token_file: str) -> None:
    metadata = bearer_metadata(read_token(token_file))
    request = cluster.ScaleDraftersRequest(pool=pool, replicas=replicas)
    async with create_channel(address) as channel:
        stub = ClusterServiceStub(channel)
        answer = await stub.ScaleDrafters(request, metadata=metadata, timeout=_CALL_S)
        print(f"{pool}: {answer.previous_replicas} -> {answer.replicas} drafters wanted")
        give_up_at = time.monotonic() + wait_s
        while wait_s:
            status = await stub.GetStatus(
                cluster.GetStatusRequest(), metadata=metadata, timeout=_CALL_S
            )
            health = [r.health for p in status.drafter_pools if p.pool == pool for r in p.replicas]
            num_ready = health.count(cluster.REPLICA_HEALTH_READY)
            if num_ready == len(health) == replicas:
                print(f"{pool}: {num_ready} serve")
                return
            if time.monotonic() > give_up_at:
                raise UnavailableError(
                    f"{pool}: {num_ready} of {replicas} drafters serve after {wait_s:g} s;"
                    " see `forerun status`"
                )
            await asyncio.sleep(_POLL_S)


async def _drain(replica_id: str, address: str, token_file: str) -> None:
    metadata = bearer_metadata(read_token(token_file))
    request = cluster.DrainDrafterRequest(replica_id=replica_id)
    async with create_channel(address) as channel:
        stub = ClusterServiceStub(channel)
        answer = await stub.DrainDrafter(request, metadata=metadata, timeout=_DRAIN_S)
    print(f"{replica_id}: ended; {answer.replicas} drafters wanted in its pool")
