"""The HTTP edge: OpenAI's API and, if wanted, the page, in the orchestrator's own event loop.

Composes the endpoints, checks the bearer token, turns what they raise into OpenAI's errors, and
listens. Knows nothing of what the endpoints do. Whoever starts it stops it.
"""

import asyncio
import contextlib
import hmac
import socket
from collections.abc import Iterator
from typing import Final

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from core.config import HttpConfig
from core.errors import ConfigError, UnauthenticatedError
from orchestrator.cluster_api import ClusterApi
from orchestrator.generation_api import GenerationApi
from orchestrator.http_page import FILES, PageApi
from orchestrator.openai_api import OpenAiApi
from orchestrator.openai_errors import problem_of

_BACKLOG: Final = 2048


class RunningHttpServer:
    """A server that listens. `address` is the "host:port" it is really bound to."""

    def __init__(self, server: uvicorn.Server, listener: socket.socket, address: str) -> None:
        self.address = address
        self._server = server
        self._serving = asyncio.create_task(server.serve([listener]))

    async def stop(self, grace_s: float = 0.0) -> None:
        """Refuse new requests, give running ones `grace_s`, then cancel them."""
        # With less than a moment uvicorn would call idle connections overdue, and log an error.
        grace_s = max(grace_s, 0.1)
        self._server.config.timeout_graceful_shutdown = grace_s  # type: ignore[assignment]
        self._server.should_exit = True
        await self._serving
        if tasks := set(self._server.server_state.tasks):
            await asyncio.wait(tasks)


async def serve_http(
    config: HttpConfig, generation: GenerationApi, cluster: ClusterApi, auth_token: str = ""
) -> RunningHttpServer:
    """Start the server. `auth_token`: when set, every call but the page's files must present it.

    Raises ConfigError that names host and port when they cannot be listened on.
    """
    netloc = f"[{config.host}]" if ":" in config.host else config.host
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        listener = socket.create_server((config.host, config.port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(f"http: cannot listen on {netloc}:{config.port}: {error}") from error
    app = create_app(config, generation, cluster, auth_token)
    options = uvicorn.Config(
        app, lifespan="off", log_config=None, access_log=False, ws="none", server_header=False
    )
    return RunningHttpServer(_Server(options), listener, f"{netloc}:{listener.getsockname()[1]}")


def create_app(
    config: HttpConfig, generation: GenerationApi, cluster: ClusterApi, auth_token: str = ""
) -> ASGIApp:
    """The application by itself."""
    routes = OpenAiApi(generation, config.model_name).routes()
    if config.page:
        routes += PageApi(generation, cluster).routes()
    return Starlette(
        routes=routes,
        middleware=[Middleware(_Boundary, auth_token=auth_token)],
        exception_handlers={HTTPException: _tell},
    )


async def _tell(request: Request, error: Exception) -> Response:
    return problem_of(error).response()


class _Boundary:
    """Checks the token and turns exceptions into answers, while there is none yet."""

    def __init__(self, app: ASGIApp, auth_token: str) -> None:
        self._app = app
        self._expected = f"Bearer {auth_token}".encode() if auth_token else b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_begun = False

        async def note(message: Message) -> None:
            nonlocal is_begun
            is_begun = True
            await send(message)

        try:
            self._check_token(scope)
            await self._app(scope, receive, note)
        except ClientDisconnect:
            pass  # nobody is there to be told
        except (Exception, asyncio.CancelledError) as error:
            # The boundary: nothing of an unforeseen error leaves. Cancelled is what is stopped.
            problem = problem_of(error)
            if not is_begun:
                await problem.response()(scope, receive, send)

    def _check_token(self, scope: Scope) -> None:
        if not self._expected or scope["path"] in FILES:
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        if not hmac.compare_digest(given, self._expected):
            raise UnauthenticatedError("this server needs a valid bearer token")


class _Server(uvicorn.Server):
    """Leaves the process's signals to the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """None."""
        yield
