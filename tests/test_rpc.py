"""core.rpc over real sockets: statuses, tokens, health, ports, draining, cancellation."""

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from core import errors
from core.rpc import RunningServer, bearer_metadata, create_channel, create_server

SERVICE = "forerun.test.EchoService"
STATUSES = [
    (errors.InvalidRequestError("top_p", "must lie in (0, 1]"), "INVALID_ARGUMENT"),
    (errors.OverloadedError("queue full", 0.25), "RESOURCE_EXHAUSTED"),
    (errors.UnavailableError("no verifier"), "UNAVAILABLE"),
    (errors.HandshakeError("a and b differ"), "FAILED_PRECONDITION"),
    (errors.ModelError("no such layer"), "FAILED_PRECONDITION"),
    (errors.ForerunError("anything else of ours"), "FAILED_PRECONDITION"),
]


class Echo:
    """Handlers of all four kinds over bytes; `error` is raised by each when set."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.started = asyncio.Event()
        self.ended = asyncio.Event()
        self.release = asyncio.Event()

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    async def unary(self, request: bytes, context: Any) -> bytes:
        self.check()
        return request

    async def server_stream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield request
        self.check()
        yield request

    async def client_stream(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        self.check()
        return b"".join([request async for request in requests])

    async def both(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        try:
            self.started.set()
            async for request in requests:
                yield request
                self.check()
        finally:
            self.ended.set()

    async def wait(self, request: bytes, context: Any) -> bytes:
        self.started.set()
        await self.release.wait()
        return b"done"

    async def writer(self, request: bytes, context: Any) -> None:
        await context.write(request)
        self.check()

    def add_to(self, server: grpc.aio.Server) -> None:
        handlers = {
            "unary": grpc.unary_unary_rpc_method_handler(self.unary),
            "server_stream": grpc.unary_stream_rpc_method_handler(self.server_stream),
            "client_stream": grpc.stream_unary_rpc_method_handler(self.client_stream),
            "both": grpc.stream_stream_rpc_method_handler(self.both),
            "wait": grpc.unary_unary_rpc_method_handler(self.wait),
            "writer": grpc.unary_stream_rpc_method_handler(self.writer),
        }
        server.add_registered_method_handlers(SERVICE, handlers)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


@pytest.fixture
async def echo() -> Echo:
    return Echo()


@pytest.fixture
async def server(echo: Echo) -> AsyncIterator[RunningServer]:
    running = await create_server(echo.add_to, [SERVICE], "127.0.0.1", 0)
    yield running
    await running.stop()


@pytest.fixture
async def channel(server: RunningServer) -> AsyncIterator[grpc.aio.Channel]:
    async with create_channel(server.address) as channel:
        yield channel


async def requests(*items: bytes) -> AsyncIterator[bytes]:
    for item in items:
        yield item


async def call(
    channel: grpc.aio.Channel, kind: str, num_sent: int = 2, **options: Any
) -> list[bytes]:
    """All responses of one call of the given kind.

    A client that still writes when the server aborts may see INTERNAL of its own grpc instead of
    the server's status; calls that are to fail send no more than the server reads.
    """
    items = [b"x"] * num_sent
    path = f"/{SERVICE}/{kind}"
    if kind == "unary":
        return [await channel.unary_unary(path)(b"x", **options)]
    if kind == "client_stream":
        return [await channel.stream_unary(path)(requests(*items), **options)]
    if kind == "both":
        stream = channel.stream_stream(path)(requests(*items), **options)
    else:
        stream = channel.unary_stream(path)(b"x", **options)
    return [response async for response in stream]


KINDS = {
    "unary": [b"x"],
    "server_stream": [b"x", b"x"],
    "client_stream": [b"xx"],
    "both": [b"x", b"x"],
    "writer": [b"x"],
}


@pytest.mark.parametrize("kind", KINDS)
async def test_every_kind_of_handler_passes_through_the_boundary(channel, kind):
    """A boundary that drops or reorders messages of one kind of call breaks that call."""
    assert await call(channel, kind) == KINDS[kind]


@pytest.mark.parametrize("kind", KINDS)
async def test_our_errors_become_their_statuses(channel, echo, kind):
    """The client must be able to tell its own fault from ours, and read what is wrong."""
    for error, status in STATUSES:
        echo.error = error
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, kind, num_sent=1)
        assert (caught.value.code().name, caught.value.details()) == (status, str(error))


async def test_overload_says_when_to_come_back(channel, echo):
    """Without retry information clients hammer a full queue."""
    echo.error = errors.OverloadedError("queue full", 0.25)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(channel, "unary")
    assert dict(caught.value.trailing_metadata())["retry-after-ms"] == "250"


@pytest.mark.parametrize("kind", KINDS)
async def test_unforeseen_errors_are_hidden_and_logged(channel, echo, kind, capsys):
    """grpc sends an exception's text to the client; it may hold prompts, paths or tokens."""
    echo.error = RuntimeError("secret path")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(channel, kind, num_sent=1)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in caught.value.details()
    error_id = caught.value.details().split()[2].rstrip(";")
    logged = "".join(capsys.readouterr())
    assert error_id in logged and "secret path" in logged


async def test_a_cancelled_stream_unwinds_its_handler(channel, echo):
    """`finally` must run when the client goes: it is what frees slots."""
    stream = channel.stream_stream(f"/{SERVICE}/both")()
    await stream.write(b"x")
    assert await stream.read() == b"x"
    stream.cancel()
    await asyncio.wait_for(echo.ended.wait(), 10)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_token_is_demanded_of_every_kind_of_call(echo, kind):
    """One kind of handler without the check would be an open door."""
    running = await create_server(echo.add_to, [SERVICE], "127.0.0.1", 0, auth_token="s3cret")
    async with create_channel(running.address) as channel:
        for metadata in (None, bearer_metadata("wrong"), (("authorization", "s3cret"),)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(channel, kind, num_sent=0, metadata=metadata)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        answer = await call(channel, kind, metadata=bearer_metadata("s3cret"))
        assert answer == KINDS[kind]
    await running.stop()


async def test_health_and_reflection_answer_without_a_token(echo):
    """kubelet's probe and grpcurl present no token."""
    running = await create_server(echo.add_to, [SERVICE], "127.0.0.1", 0, auth_token="s3cret")
    async with create_channel(running.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICE):
            status = await stub.Check(health_pb2.HealthCheckRequest(service=name))
            assert status.status == health_pb2.HealthCheckResponse.SERVING
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        stream = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([ask]))
        listed = [s.name async for r in stream for s in r.list_services_response.service]
        assert SERVICE in listed and "grpc.health.v1.Health" in listed
    await running.stop()


async def test_a_port_in_use_is_one_clear_error(server, echo):
    """With SO_REUSEPORT two servers would share a port and each get half of the calls."""
    port = int(server.address.rpartition(":")[2])
    with pytest.raises(errors.ConfigError, match=f"127.0.0.1:{port}"):
        await create_server(echo.add_to, [SERVICE], "127.0.0.1", port)


async def test_port_zero_reports_the_port_that_was_taken(server):
    """Ray actors listen on any free port and tell others which."""
    host, _, port = server.address.rpartition(":")
    assert host == "127.0.0.1"
    with socket.create_connection((host, int(port)), timeout=10):
        pass


async def test_stop_drains(echo):
    """A running call ends in peace, the health service says NOT_SERVING meanwhile."""
    stopped = asyncio.Event()

    async def on_stop() -> None:
        stopped.set()

    running = await create_server(echo.add_to, [SERVICE], "127.0.0.1", 0, on_stop=on_stop)
    async with create_channel(running.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        answer = asyncio.ensure_future(channel.unary_unary(f"/{SERVICE}/wait")(b""))
        await echo.started.wait()
        stop = asyncio.ensure_future(running.stop(30))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert not stopped.is_set()
        watch.cancel()
        echo.release.set()
        assert await answer == b"done"
        await asyncio.gather(stop, running.wait())
        assert stopped.is_set()


async def test_messages_up_to_the_limit_pass(channel):
    """The default of 4 MiB would refuse a long prompt's frame."""
    big = bytes(9 * 1024 * 1024)
    assert await channel.unary_unary(f"/{SERVICE}/unary")(big) == big


def test_logs_are_json_lines_when_asked_for():
    """A log collector reads one object a line, tracebacks included."""
    code = (
        "import structlog; from core.rpc import configure_logging\n"
        "configure_logging('warning', json=True); log = structlog.get_logger()\n"
        "log.info('dropped')\n"
        "try: 1 / 0\n"
        "except ZeroDivisionError: log.exception('failed', row=3)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    (line,) = run.stderr.splitlines()
    event = json.loads(line)
    assert (event["event"], event["level"], event["row"]) == ("failed", "error", 3)
    assert "ZeroDivisionError" in event["exception"]
