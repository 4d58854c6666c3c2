"""Links with a set delay, over any channel: real gRPC ones, or the simulator's.

A `DelayedChannel` stands between an orchestrator and one replica (`ReplicaSpec.connect`); messages
of a stream wait on their way out and in, in order. The waits are those of threads, which are exact
to a tenth of a millisecond, where an event loop's timers are rounded up to the next one.
Knows nothing of what is sent, but how many rows, plans or commits a message holds.
"""

import asyncio
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import grpc
from pydantic import BaseModel, ConfigDict

from core.rpc import create_channel


class Link(BaseModel):
    """One way takes `one_way_s` and up to `jitter_s` more; a round trip is two of them."""

    model_config = ConfigDict(frozen=True)

    one_way_s: float = 0.0
    jitter_s: float = 0.0
    seed: int = 0


class Overhead(BaseModel):
    """What a message costs beside its link, per message and per item in it (a row, a verdict, a
    plan, a commit, an open): time of the orchestrator's core, and time under way."""

    model_config = ConfigDict(frozen=True)

    cpu_message_s: float = 0.0
    cpu_item_s: float = 0.0
    hop_message_s: float = 0.0
    hop_item_s: float = 0.0


class Processor:
    """The orchestrator's core in a simulation: handles messages one after the other."""

    def __init__(self, overhead: Overhead) -> None:
        self._overhead = overhead
        self._free_at = 0.0

    def take(self, message: Any, now: float) -> float:
        """When a message that comes now has been handled."""
        cost = self._overhead.cpu_message_s + self._overhead.cpu_item_s * _num_items(message)
        self._free_at = max(self._free_at, now) + cost
        return self._free_at

    def hop_s(self, message: Any) -> float:
        """How much longer than its link a message is under way."""
        return self._overhead.hop_message_s + self._overhead.hop_item_s * _num_items(message)


def _num_items(message: Any) -> int:
    if message is grpc.aio.EOF:
        return 0
    parts = message.ListFields()
    return sum(len(part) for field, part in parts if field.is_repeated and field.message_type)


class DelayedChannel:
    """A channel whose streams take their time; the handshake does not."""

    def __init__(self, channel: Any, link: Link, processor: Processor | None = None) -> None:
        self._channel, self._link = channel, link
        self._processor = processor
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="link")

    async def __aenter__(self) -> Self:
        await self._channel.__aenter__()
        return self

    async def __aexit__(self, *details: Any) -> None:
        self._threads.shutdown(wait=False)
        await self._channel.__aexit__(*details)

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        """As of the channel."""
        return self._channel.unary_unary(*arguments, **options)

    def stream_stream(self, *arguments: Any, **options: Any) -> Callable[[], "DelayedCall"]:
        """Opens delayed streams."""
        begin = self._channel.stream_stream(*arguments, **options)
        return lambda: DelayedCall(begin(), self._link, self._processor, self._threads)


class DelayedCall:
    """A stream whose messages wait on their way; what `orchestrator.clients` uses of a call."""

    def __init__(
        self, call: Any, link: Link, processor: Processor | None, threads: ThreadPoolExecutor
    ) -> None:
        self._call, self._link, self._processor = call, link, processor
        self._threads = threads
        self._random = random.Random(link.seed)
        self._out: asyncio.Queue[tuple[float, Any]] = asyncio.Queue()
        self._in: asyncio.Queue[tuple[float, Any]] = asyncio.Queue()
        self._tasks = [asyncio.create_task(self._send()), asyncio.create_task(self._receive())]

    async def write(self, message: Any) -> None:
        """Send; returns at once."""
        leaves_at = time.perf_counter()
        if self._processor is not None:
            leaves_at = self._processor.take(message, leaves_at)
        self._out.put_nowait((leaves_at + self._delay(message), message))

    async def read(self) -> Any:
        """The next message, EOF, or the error that ended the stream."""
        due, message = await self._in.get()
        if isinstance(message, BaseException):
            raise message
        await self._wait(due)
        if self._processor is not None:
            await self._wait(self._processor.take(message, time.perf_counter()))
        return message

    async def code(self) -> Any:
        """The status."""
        return await self._call.code()

    async def details(self) -> Any:
        """The status in words."""
        return await self._call.details()

    def cancel(self) -> None:
        """End the stream."""
        self._call.cancel()
        for task in self._tasks:
            task.cancel()

    def _delay(self, message: Any) -> float:
        hop_s = self._processor.hop_s(message) if self._processor is not None else 0.0
        return hop_s + self._link.one_way_s + self._link.jitter_s * self._random.random()

    async def _wait(self, due: float) -> None:
        delay = due - time.perf_counter()
        if delay > 0:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._threads, time.sleep, delay)

    async def _send(self) -> None:
        while True:
            due, message = await self._out.get()
            await self._wait(due)
            await self._call.write(message)

    async def _receive(self) -> None:
        message = None
        try:
            while message is not grpc.aio.EOF:
                message = await self._call.read()
                self._in.put_nowait((time.perf_counter() + self._delay(message), message))
        except BaseException as error:  # a cancelled call too: the reader is told
            self._in.put_nowait((0.0, error))


def connect(link: Link) -> Callable[[str], Any]:
    """For `ReplicaSpec.connect`: a real channel with a delay; none is added for a link of 0."""
    if link.one_way_s == link.jitter_s == 0:
        return create_channel
    return lambda address: DelayedChannel(create_channel(address), link)
