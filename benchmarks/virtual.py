"""A world without a clock: the services' and the engine's own code, in one thread, at once.

Three things are not real in it: time jumps to the next timer when nothing else is to be done; a
thread's work takes the time it sleeps and no other; a server is reached without a socket. All the
rest (asyncio, the services, their queues and batches, the engine, its clients) is what runs
elsewhere. Events at one moment keep their order, so a run is repeated exactly.

    run(main)       runs a coroutine in such a world; other threads keep the real one
    sleep in a job  ──▶ the job's thread is free that much later, and its result comes then

Knows the names that it replaces, and nothing else of what runs in it.
"""

import asyncio
import contextlib
import functools
import selectors
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Executor, Future
from contextvars import Context
from typing import Any, TypeVar
from unittest import mock

import grpc

from drafter_service.engine import DrafterEngine

T = TypeVar("T")


class Clock:
    """Seconds since the world began. `is_job` while a thread's work is done."""

    def __init__(self) -> None:
        self.now = 0.0
        self.is_job = False

    def time(self) -> float:
        """For `time.monotonic` and `time.perf_counter`."""
        return self.now

    def time_ns(self) -> int:
        """The same in nanoseconds."""
        return round(self.now * 1e9)

    def sleep(self, seconds: float) -> None:
        """For `time.sleep`, in a job."""
        assert self.is_job, "the event loop must not sleep"
        self.now += seconds


class _Selector(selectors.SelectSelector):
    """Waits for nothing: there are no sockets."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[Any]:
        """Let the time pass."""
        if timeout is None:
            raise RuntimeError("nothing will ever happen again, and somebody still waits")
        self._clock.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop for one thread in which nobody else can wake it."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(_Selector(clock))
        self.clock = clock
        self._threads = VirtualThreads(1_000)

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Any, *args: Any
    ) -> Any:
        """`asyncio.to_thread` too must not leave the world."""
        return super().run_in_executor(executor or self._threads, func, *args)

    def time(self) -> float:
        """The world's."""
        return self.clock.now

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """There are no threads."""
        return self.call_soon(callback, *args, context=context)


class VirtualThreads(Executor):
    """`ThreadPoolExecutor` without threads: a job is done when it begins, its result comes when it
    would have ended."""

    def __init__(self, max_workers: int = 1, thread_name_prefix: str = "") -> None:
        self._num_free = max_workers
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def submit(self, fn: Callable[..., T], /, *arguments: Any, **options: Any) -> "Future[T]":
        """Do a job as soon as a thread is free."""
        future: Future[T] = Future()
        self._waiting.append((future, lambda: fn(*arguments, **options)))
        self._next()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Nothing to end."""

    def _next(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        clock = loop.clock
        while self._num_free and self._waiting:
            future, job = self._waiting.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            self._num_free -= 1
            begin, clock.is_job = clock.now, True
            try:
                tell = _later(future.set_result, job())
            except Exception as error:  # as a thread would: whoever waits gets it
                tell = _later(future.set_exception, error)
            end, clock.now, clock.is_job = clock.now, begin, False
            loop.call_at(end, self._end, tell)

    def _end(self, tell: Callable[[], None]) -> None:
        self._num_free += 1
        tell()
        self._next()


def _later(call: Callable[[Any], None], value: Any) -> Callable[[], None]:
    return lambda: call(value)


class LocalServer:
    """What `core.rpc.create_server` returns, without a socket. Messages are passed as they are."""

    def __init__(self, on_stop: Callable[[], Coroutine[Any, Any, None]] | None) -> None:
        self.address = "nowhere"
        self._handlers: dict[str, Any] = {}
        self._on_stop = on_stop

    @classmethod
    async def create(
        cls,
        add_servicers: Callable[[Any], None],
        service_names: Any,
        host: str,
        port: int,
        *,
        on_stop: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> "LocalServer":
        """As `core.rpc.create_server`."""
        server = cls(on_stop)
        add_servicers(server)
        return server

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Part of grpc's interface; the names come with `add_registered_method_handlers`."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        """Take a servicer's methods."""
        self._handlers |= {f"/{service}/{name}": each for name, each in handlers.items()}

    async def stop(self, grace_s: float = 0.0) -> None:
        """End the service."""
        if self._on_stop is not None:
            await self._on_stop()

    # ------------------------------------------------------------ as a channel

    async def __aenter__(self) -> "LocalServer":
        return self

    async def __aexit__(self, *details: Any) -> None:
        pass

    def unary_unary(self, method: str, **options: Any) -> Any:
        """A call with one answer."""

        async def call(request: Any, timeout: float = 0.0) -> Any:
            return await self._handlers[method].unary_unary(request, None)

        return call

    def stream_stream(self, method: str, **options: Any) -> Callable[[], "_Stream"]:
        """A call with streams both ways."""
        return lambda: _Stream(self._handlers[method].stream_stream)


class _Stream:
    """Both ends of a running call."""

    def __init__(self, behaviour: Callable[[AsyncIterator[Any], Any], AsyncIterator[Any]]) -> None:
        self._requests: asyncio.Queue[Any] = asyncio.Queue()
        self._responses: asyncio.Queue[Any] = asyncio.Queue()
        self._task = asyncio.create_task(self._serve(behaviour))

    async def _serve(self, behaviour: Callable[[Any, Any], AsyncIterator[Any]]) -> None:
        try:
            async for response in behaviour(self._incoming(), None):
                self._responses.put_nowait(response)
        finally:
            self._responses.put_nowait(grpc.aio.EOF)

    async def _incoming(self) -> AsyncIterator[Any]:
        while True:
            yield await self._requests.get()

    async def write(self, message: Any) -> None:
        """Send to the service."""
        self._requests.put_nowait(message)

    async def read(self) -> Any:
        """Its next answer, or EOF."""
        return await self._responses.get()

    async def code(self) -> Any:
        """Nothing fails here."""
        return grpc.StatusCode.OK

    async def details(self) -> str:
        """Nothing to say."""
        return ""

    def cancel(self) -> None:
        """End the call."""
        self._task.cancel()


@contextlib.contextmanager
def _patched(clock: Clock) -> Iterator[None]:
    """The world for this thread; the clocks of other threads stay real."""
    thread = threading.get_ident()

    def here(real: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *a: ours(*a) if threading.get_ident() == thread else real(*a)

    clocks: dict[str, Callable[..., Any]] = {
        "monotonic": clock.time,
        "monotonic_ns": clock.time_ns,
        "perf_counter": clock.time,
        "perf_counter_ns": clock.time_ns,
        "sleep": clock.sleep,
    }
    others: dict[str, Any] = {
        "drafter_service.server.DrafterEngine": functools.partial(DrafterEngine, clock=clock.time),
        "benchmarks.links.ThreadPoolExecutor": VirtualThreads,
        "drafter_service.server.ThreadPoolExecutor": VirtualThreads,
        "drafter_service.server.create_server": LocalServer.create,
        "verifier_service.server.ThreadPoolExecutor": VirtualThreads,
        "verifier_service.server.create_server": LocalServer.create,
    }
    with contextlib.ExitStack() as stack:
        for name, ours in clocks.items():
            stack.enter_context(mock.patch.object(time, name, here(getattr(time, name), ours)))
        for name, other in others.items():
            stack.enter_context(mock.patch(name, other))
        yield


def run(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run `main()` to its end in a world of its own."""
    clock = Clock()
    with _patched(clock), asyncio.Runner(loop_factory=lambda: VirtualLoop(clock)) as runner:
        return runner.run(main())
