"""The page at `/` and what it talks to: our own API as JSON, for browsers.

    GET  /forerun/status     GetStatusResponse
    POST /forerun/generate   GenerateRequest -> server-sent events, each a GenerateResponse
    POST /forerun/scale      ScaleDraftersRequest -> ScaleDraftersResponse

Messages are in protobuf's JSON form, under the names of the .proto files. The page itself is three
files in `orchestrator/page/`, served as they are. Knows nothing of what the messages say.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Final, TypeVar

from google.protobuf import json_format
from google.protobuf.message import Message
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from core.errors import InvalidRequestError
from orchestrator.cluster_api import ClusterApi
from orchestrator.generation_api import GenerationApi
from orchestrator.http_events import event, open_events, read_body
from protos import cluster_pb2, generation_pb2

FILES: Final = {"/": "index.html", "/page.js": "page.js", "/page.css": "page.css"}
_FOLDER: Final = Path(__file__).parent / "page"
_HEADERS: Final = {
    "Cache-Control": "no-cache",
    # Whatever a model writes, the page runs its own script only, and nobody frames it.
    "Content-Security-Policy": "default-src 'self'; img-src data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}

_Message = TypeVar("_Message", bound=Message)


class PageApi:
    """The endpoints, over the calls that the gRPC services make too."""

    def __init__(self, generation: GenerationApi, cluster: ClusterApi) -> None:
        self._generation = generation
        self._cluster = cluster

    def routes(self) -> list[Route]:
        """Where they are."""
        return [
            *(Route(path, self._file, methods=["GET"]) for path in FILES),
            Route("/forerun/status", self._status, methods=["GET"]),
            Route("/forerun/generate", self._generate, methods=["POST"]),
            Route("/forerun/scale", self._scale, methods=["POST"]),
        ]

    async def _file(self, request: Request) -> Response:
        return FileResponse(_FOLDER / FILES[request.url.path], headers=_HEADERS)

    async def _status(self, request: Request) -> Response:
        return _answer(self._cluster.status())

    async def _generate(self, request: Request) -> Response:
        message = _parse(generation_pb2.GenerateRequest(), await read_body(request))
        traceparent = request.headers.get("traceparent", "")
        return await open_events(request, _events(self._generation.generate(message, traceparent)))

    async def _scale(self, request: Request) -> Response:
        message = _parse(cluster_pb2.ScaleDraftersRequest(), await read_body(request))
        return _answer(await self._cluster.scale_drafters(message))


async def _events(
    responses: AsyncGenerator[generation_pb2.GenerateResponse, None],
) -> AsyncGenerator[bytes, None]:
    async with aclosing(responses):
        async for response in responses:
            yield event(_json(response))


def _json(message: Message, is_full: bool = False) -> str:
    """One line. `is_full`: with the fields that are not set, too."""
    return json_format.MessageToJson(
        message,
        indent=None,
        preserving_proto_field_name=True,
        always_print_fields_with_no_presence=is_full,
    )


def _answer(message: Message) -> Response:
    text = _json(message, is_full=True)
    return Response(text, media_type="application/json", headers={"Cache-Control": "no-store"})


def _parse(message: _Message, body: bytes) -> _Message:
    try:
        return json_format.Parse(body, message)
    except (json_format.ParseError, UnicodeDecodeError) as error:
        raise InvalidRequestError("body", str(error)) from None
