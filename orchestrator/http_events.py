"""What HTTP endpoints share: bodies in, answers and server-sent events out, clients that leave.

Work for a client is cancelled at the moment it goes, whether its answer has begun or not. Knows
nothing of what is asked and answered.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, Final, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from orchestrator.openai_errors import problem_of

MAX_BODY_BYTES: Final = 8 * 1024 * 1024

_Result = TypeVar("_Result")


async def read_body(request: Request) -> bytes:
    """The JSON text of a POST.

    Raises HTTPException: 415 for another type of content (a form that any web page could send
    here in its visitor's name is one), 413 above MAX_BODY_BYTES.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip()
    if content_type != "application/json":
        raise HTTPException(415, "the body must be JSON, with Content-Type: application/json")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413, f"the body has more than {MAX_BODY_BYTES} bytes")
    return bytes(body)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Do the work; when the client goes it is cancelled at once and ClientDisconnect raised.

    The request's body must have been read.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnection(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnection(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def event(data: str | dict[str, Any]) -> bytes:
    """One server-sent event: a line of text, or an object as JSON."""
    if not isinstance(data, str):
        data = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return b"data: " + data.encode() + b"\n\n"


class EventStream(Response):
    """An answer of server-sent events, as they come. An error among them is the last event.

    Open it with `open_events`. It closes `events` however it ends.
    """

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None], **headers: str) -> None:
        self._first = first
        self._events = events
        # Proxies that buffer would undo the streaming.
        extra = {"Cache-Control": "no-store", "X-Accel-Buffering": "no", **headers}
        super().__init__(media_type="text/event-stream", headers=extra)
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it; ends early when the client goes, and when the server is stopped."""
        try:
            async with contextlib.aclosing(self._events):
                await while_connected(receive, self._send(send))
        except ClientDisconnect:
            return
        except (Exception, asyncio.CancelledError) as error:
            # A boundary. The status line is out, so it is told in the text.
            data = event(problem_of(error).body)
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        part: dict[str, Any] = {"type": "http.response.body", "more_body": True}
        await send({**part, "body": self._first})
        async for data in self._events:
            await send({**part, "body": data})


async def open_events(
    request: Request, events: AsyncGenerator[bytes, None], **headers: str
) -> EventStream:
    """Wait for the first event, so that what is refused at once has an error's status, and answer.

    Raises what `events` raises before its first event, and ClientDisconnect.
    """
    try:
        first = await while_connected(request.receive, anext(events))
    except BaseException:
        await events.aclose()
        raise
    return EventStream(first, events, **headers)
