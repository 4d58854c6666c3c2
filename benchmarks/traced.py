"""The orchestrator for the bench with a recorder that can be switched on and off.

A child like those of `benchmarks.service`, but its stdin goes on: `begin` starts a recording, `end`
answers with one line of JSON, the figures of `orchestrator.timeline` and the CPU time meanwhile.
Stdin's end is the end.
"""

import asyncio
import dataclasses
import json
import sys

from core.config import Config
from core.tokenizer import Tokenizer
from orchestrator.engine import Engine
from orchestrator.launch import running_replicas
from orchestrator.placing import build
from orchestrator.server import serve_orchestrator
from orchestrator.timeline import summarize
from orchestrator.trace import CpuClock, Recorder


async def serve(config: Config) -> None:
    """Serve the public API until stdin ends."""
    tokenizer = Tokenizer.load(config.target.model)
    engine = Engine(config.orchestrator, config.drafter_pools, running_replicas(config))
    try:
        await engine.start()
        server = await serve_orchestrator(engine, tokenizer, config.orchestrator)
        print(server.address, flush=True)
        await _answer(engine)
        await server.stop(0)
    finally:
        await engine.stop()


async def _answer(engine: Engine) -> None:
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin
    )
    recorder, cpu = Recorder(), CpuClock()
    while line := await lines.readline():
        if line.strip() == b"begin":
            recorder, cpu = Recorder(), CpuClock()
            engine.record(recorder)
            print(flush=True)
        else:
            used = {"thread_s": cpu.thread_s, "process_s": cpu.process_s}
            engine.record(None)
            summary = summarize(build(recorder.records))
            print(json.dumps(dataclasses.asdict(summary) | used), flush=True)
