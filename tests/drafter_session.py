"""One stream to a drafter's service, in values."""

from typing import Any

import grpc

from core import wire
from core.rpc import create_channel
from core.types import DraftClose, DraftCommands, DraftCommit, DraftOpen, DraftPlans, DraftSent
from protos import drafter_pb2_grpc


class Session:
    """One stream to a drafter, in values."""

    def __init__(self, address: str) -> None:
        self._channel = create_channel(address)
        stub = drafter_pb2_grpc.DrafterServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self.call: Any = stub.Session()

    async def send(self, *commands: DraftOpen | DraftCommit | DraftClose | DraftSent) -> None:
        await self.call.write(wire.draft_commands_to_proto(frame(*commands)))

    async def receive(self) -> DraftPlans:
        response = await self.call.read()
        assert response is not grpc.aio.EOF
        return wire.draft_plans_from_proto(response)

    async def close(self) -> None:
        self.call.cancel()
        await self._channel.close()


def frame(*commands: DraftOpen | DraftCommit | DraftClose | DraftSent) -> DraftCommands:
    return DraftCommands(
        opens=tuple(c for c in commands if isinstance(c, DraftOpen)),
        commits=tuple(c for c in commands if isinstance(c, DraftCommit)),
        closes=tuple(c for c in commands if isinstance(c, DraftClose)),
        sents=tuple(c for c in commands if isinstance(c, DraftSent)),
    )
