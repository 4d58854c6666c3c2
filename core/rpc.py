"""gRPC servers and channels as every forerun service uses them.

Start-up, main loop and shutdown of a server; limits and keepalive of both ends; health and
reflection; the one boundary where exceptions become statuses; logging. Knows nothing of what is
served.

    handler raises            client sees
    ForerunError              its status (core.errors) and its message
    asyncio.CancelledError    nothing: re-raised, the client is gone
    anything else             INTERNAL and a random id; the traceback is in the log under that id

A frozen peer answers no ping: the connection is given up after 2 s of silence and 3 s of waiting
(`grpc.http2.ping_timeout_ms` decides, `keepalive_timeout_ms` alone does not).
"""

import asyncio
import contextlib
import hmac
import inspect
import logging
import secrets
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TextIO, cast

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from core import errors

MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024

_SHARED_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
_SERVER_OPTIONS: Final = (
    *_SHARED_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.so_reuseport", 0),
)
_CHANNEL_OPTIONS: Final = (
    *_SHARED_OPTIONS,
    # A service that was restarted on its old port is found again within a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)

_STATUSES: Final[Mapping[type[errors.ForerunError], grpc.StatusCode]] = {
    errors.InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.OverloadedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.UnavailableError: grpc.StatusCode.UNAVAILABLE,
    errors.UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
    errors.HandshakeError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ModelError: grpc.StatusCode.FAILED_PRECONDITION,
}
_OPEN_SERVICES: Final = ("/grpc.health.", "/grpc.reflection.")

_log = structlog.get_logger(__name__)


def create_channel(address: str) -> grpc.aio.Channel:
    """A channel to "host:port" with the servers' limits and keepalive."""
    return grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)


def bearer_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """The metadata of a call that presents `token`; none when it is empty."""
    return (("authorization", f"Bearer {token}"),) if token else ()


class RunningServer:
    """A server that listens. `address` is the "host:port" it is really bound to."""

    def __init__(
        self,
        server: grpc.aio.Server,
        health_servicer: health.aio.HealthServicer,
        boundary: "_Boundary",
        address: str,
        on_stop: Callable[[], Awaitable[None]] | None,
    ) -> None:
        self.address = address
        self._server = server
        self._health = health_servicer
        self._boundary = boundary
        self._on_stop = on_stop

    async def stop(self, grace_s: float = 0.0) -> None:
        """Drain: health says NOT_SERVING, new calls are refused, running ones get `grace_s`."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)
        await self._boundary.wait_for_handlers()
        if self._on_stop is not None:
            on_stop, self._on_stop = self._on_stop, None
            await on_stop()

    async def wait(self) -> None:
        """Return when the server has stopped."""
        await self._server.wait_for_termination()


async def create_server(
    add_servicers: Callable[[grpc.aio.Server], None],
    service_names: Sequence[str],
    host: str,
    port: int,
    *,
    auth_token: str = "",
    on_stop: Callable[[], Awaitable[None]] | None = None,
) -> RunningServer:
    """Start a server with health, reflection and the error boundary.

    add_servicers: registers the servicers (calls the generated `add_..._to_server`).
    service_names: full names ("forerun.v1.VerifierService"), for health and reflection.
    port: 0 takes a free one; see `RunningServer.address`.
    auth_token: when set, every call but health and reflection must present it as a bearer token.
    on_stop: awaited once, when no call runs any more.
    Raises ConfigError that names host and port when they cannot be listened on.
    """
    boundary = _Boundary(auth_token)
    server = grpc.aio.server(interceptors=[boundary], options=_SERVER_OPTIONS)
    add_servicers(server)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection(
        [*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME], server
    )
    netloc = f"[{host}]" if ":" in host else host
    try:
        bound = server.add_insecure_port(f"{netloc}:{port}")
    except RuntimeError as error:
        await server.stop(None)
        raise errors.ConfigError(
            f"cannot listen on {netloc}:{port}: is the port in use, or not of this machine?"
        ) from error
    await server.start()
    for name in ("", *service_names):
        await health_servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    return RunningServer(server, health_servicer, boundary, f"{netloc}:{bound}", on_stop)


def configure_logging(level: str = "INFO", *, json: bool = False) -> None:
    """Send structlog's events to stderr: for people, or one JSON object a line.

    Call it once, first thing in a process.
    """
    renderer: Any = (
        structlog.processors.JSONRenderer()
        if json
        else structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(),
            exception_formatter=structlog.dev.plain_traceback,  # rich would print local values
        )
    )
    processors: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if json:  # the console renderer prints exceptions by itself, and better
        processors.append(structlog.processors.format_exc_info)
    structlog.configure(
        processors=[*processors, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, _Stderr())),
    )


class _Stderr:
    """Whatever is stderr at the moment: a log line must not fail because it was replaced."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


class _Boundary(grpc.aio.ServerInterceptor):
    """Checks the token and turns exceptions into statuses, for every kind of handler."""

    def __init__(self, auth_token: str) -> None:
        self._token = auth_token
        self._handlers: set[asyncio.Task[Any]] = set()

    async def wait_for_handlers(self) -> None:
        """Return when no handler runs any more: grpc does not wait for those it cancels."""
        handlers = self._handlers - {asyncio.current_task()}
        if handlers:
            await asyncio.wait(handlers)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(_OPEN_SERVICES):
            return handler
        authorized = self._authorized(handler_call_details)

        def guard(context: Any) -> contextlib.AbstractAsyncContextManager[None]:
            return self._guard(context, method, authorized)

        if not handler.response_streaming:
            behaviour = handler.stream_unary or handler.unary_unary
            wrap = (
                grpc.stream_unary_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_unary_rpc_method_handler
            )
            wrapped = _guarded_unary(behaviour, guard)
        else:
            behaviour = handler.stream_stream or handler.unary_stream
            wrap = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_stream_rpc_method_handler
            )
            wrapped = _guarded_stream(behaviour, guard)
        return wrap(wrapped, handler.request_deserializer, handler.response_serializer)

    def _authorized(self, details: grpc.HandlerCallDetails) -> bool:
        if not self._token:
            return True
        metadata = {key: value for key, value in details.invocation_metadata or ()}
        given = metadata.get("authorization", "")
        return isinstance(given, str) and hmac.compare_digest(
            given.encode(), f"Bearer {self._token}".encode()
        )

    @contextlib.asynccontextmanager
    async def _guard(self, context: Any, method: str, authorized: bool) -> AsyncIterator[None]:
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        task.add_done_callback(self._handlers.discard)
        try:
            if not authorized:
                raise errors.UnauthenticatedError("this server needs a valid bearer token")
            yield
        except grpc.aio.AbortError:
            raise
        except errors.ForerunError as error:
            await _abort(context, error)
        except Exception:  # the boundary: nothing of an unforeseen error may reach the client
            error_id = secrets.token_hex(8)
            _log.exception("call_failed", method=method, error_id=error_id)
            await context.abort(grpc.StatusCode.INTERNAL, f"internal error {error_id}; see the log")


_Guard = Callable[[Any], contextlib.AbstractAsyncContextManager[None]]


def _guarded_unary(behaviour: Any, guard: _Guard) -> Any:
    async def call(request: Any, context: Any) -> Any:
        async with guard(context):
            return await behaviour(request, context)

    return call


def _guarded_stream(behaviour: Any, guard: _Guard) -> Any:
    # A coroutine that writes, even around a generator: a cancelled call then unwinds the
    # handler's `finally` at once and in this task, not when the generator is collected.
    async def call(request: Any, context: Any) -> None:
        async with guard(context):
            responses = behaviour(request, context)
            if inspect.isawaitable(responses):
                await responses
                return
            async with contextlib.aclosing(responses):
                async for response in responses:
                    await context.write(response)

    return call


async def _abort(context: Any, error: errors.ForerunError) -> None:
    status = next(
        (code for kind, code in _STATUSES.items() if isinstance(error, kind)),
        grpc.StatusCode.FAILED_PRECONDITION,
    )
    trailing: tuple[tuple[str, str], ...] = ()
    if isinstance(error, errors.OverloadedError):
        trailing = (("retry-after-ms", str(round(error.retry_after_s * 1000))),)
    await context.abort(status, str(error), trailing_metadata=trailing)
