"""Child processes on a core of their own: started, asked, and always stopped.

A child inherits the core that the bench stood on when it started it, so that everything it loads
and every thread it makes stays there. It ends when its stdin does, so none outlives the bench,
whatever ends that. What a child says on stderr goes to a log file. Knows nothing of models.
"""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / "build" / "bench-logs"
_STOP_S = 10.0
_MAX_LINE_BYTES = 64 * 1024 * 1024


class BenchError(Exception):
    """A row cannot be measured: a process died, or the two sides did not do the same work."""


@contextlib.contextmanager
def pinned(core: int) -> Iterator[None]:
    """Run this thread on one core, and what it starts meanwhile for good."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Process:
    """A running child; `say` and `hear` are lines on its stdin and stdout."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self._process = process

    @classmethod
    async def start(cls, name: str, module: str, *arguments: str, core: int) -> Self:
        """Start `python -m module` on a core, with one torch thread and no network."""
        LOGS.mkdir(parents=True, exist_ok=True)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        with pinned(core), (LOGS / f"{name}.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", module, *arguments),
                cwd=ROOT,
                env=environment,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                limit=_MAX_LINE_BYTES,
                start_new_session=True,  # Ctrl-C goes to the bench alone, which stops them all
            )
        return cls(name, process)

    async def say(self, line: str) -> None:
        """Write a line. Raises BenchError when the child is gone."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
            await self._process.stdin.drain()
        except ConnectionError:
            raise self._died() from None

    async def hear(self) -> str:
        """Read a line. Raises BenchError when the child is gone."""
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise self._died()
        return line.decode().rstrip("\n")

    async def call(self, function: str, **arguments: Any) -> Any:
        """Call a function of a child that runs `benchmarks.worker.serve`."""
        await self.say(json.dumps({"function": function, "arguments": arguments}))
        answer = json.loads(await self.hear())
        if "error" in answer:
            raise BenchError(f"{self.name}: {function}: {answer['error']}")
        return answer["result"]

    async def stop(self) -> None:
        """End the child: ask first, kill after a while."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            async with asyncio.timeout(_STOP_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    def _died(self) -> BenchError:
        log = LOGS / f"{self.name}.log"
        tail = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-8:]
        return BenchError(
            f"{self.name} ended; {log.relative_to(ROOT)} ends with:\n" + "\n".join(tail)
        )
