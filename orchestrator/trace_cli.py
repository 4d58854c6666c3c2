"""`forerun trace`: run some generations and write down where their time went.

The orchestrator is one of its own, in this process, so that nothing has to be asked over the wire:
beside the services whose addresses the config gives, beside those of a running orchestrator, or
(without addresses) with a Ray brought up as `forerun serve` does. What other orchestrators have
the same services do meanwhile shows as waiting. Errors that forerun knows are told by
`orchestrator.cli`.
"""

import asyncio
import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import grpc
import typer

from core.config import Config, DrafterPoolConfig, ModelConfig, OrchestratorConfig, load_config
from core.embedded import resolve_model
from core.errors import ConfigError, UnavailableError
from core.rpc import bearer_metadata, configure_logging, create_channel
from core.tokenizer import Tokenizer
from core.types import ModelIdentity
from orchestrator.client_cli import TokenFile
from orchestrator.detokenizer import Detokenizer
from orchestrator.engine import Engine
from orchestrator.launch import running_replicas, say
from orchestrator.local_ray import prepare_environment
from orchestrator.placing import build
from orchestrator.requests import GenerationRequest, ReplicaSpec
from orchestrator.server import read_token
from orchestrator.timeline import Timeline, summarize
from orchestrator.trace import CpuClock, Recorder
from orchestrator.trace_events import describe, trace_events
from orchestrator.trace_picture import draw_timeline
from orchestrator.validation import build_request
from protos import cluster_pb2 as cluster
from protos import generation_pb2 as pb
from protos.cluster_pb2_grpc import ClusterServiceStub

_PROMPTS = (
    "Tell me a short story about a lighthouse keeper who finds a letter in a bottle.",
    "Write a Python function that returns the n-th Fibonacci number, and explain how it works.",
    "List ten things to pack for a week of hiking in the mountains, each with its reason.",
    "Explain to a child why the sky is blue and why it turns red in the evening.",
)
_LOOK_UP_S = 10.0


def trace(
    out: Annotated[Path, typer.Option(help="Where to write the trace (JSON).")],
    config: Annotated[Path | None, typer.Option("--config", "-c", help="The TOML file.")] = None,
    address: Annotated[str, typer.Option(help="host:port of a running orchestrator.")] = "",
    svg: Annotated[Path | None, typer.Option(help="Draw ten rounds into this file.")] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; repeatable.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="File of prompts, one a line.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Answer them as messages.")] = False,
    clients: Annotated[int, typer.Option(min=1, help="Requests that run at once.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens per request.")] = 64,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    drafter: Annotated[str, typer.Option(help="Name of a drafter pool.")] = "",
    token_file: TokenFile = "",
) -> None:
    """Run generations, write a timeline for ui.perfetto.dev, and say who waited for whom."""
    if (config is None) == (not address):
        raise typer.BadParameter("give one of the two", param_hint="--config, --address")
    texts = [*(prompt or ()), *(_lines(prompts) if prompts else ())] or list(_PROMPTS)
    texts = [texts[i % len(texts)] for i in range(max(clients, len(texts)))]
    messages = [
        pb.GenerateRequest(
            prompt=None if chat else text,
            chat=pb.Chat(messages=[pb.ChatMessage(role="user", content=text)]) if chat else None,
            sampling=pb.SamplingOptions(temperature=temperature),
            stopping=pb.StoppingOptions(max_new_tokens=max_new_tokens),
            speculation=pb.SpeculationOptions(drafter=drafter),
        )
        for text in texts
    ]
    configure_logging("WARNING")
    if config is not None:
        settings = load_config(config)
    else:
        settings = asyncio.run(_look_up(address, read_token(token_file)))
    with _services(settings) as replicas:
        traced = asyncio.run(run_traced(settings, replicas, messages, clients))
    _write(traced, out, svg)


def _lines(path: Path) -> list[str]:
    try:
        return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path}: {error}") from error


async def _look_up(address: str, token: str) -> Config:
    """A config of the services behind a running orchestrator, those that are ready.

    What status does not tell (patience, batches in flight) has its default.
    """
    async with create_channel(address) as channel:
        stub, metadata = ClusterServiceStub(channel), bearer_metadata(token)
        try:
            request = cluster.GetStatusRequest()
            status = await stub.GetStatus(request, metadata=metadata, timeout=_LOOK_UP_S)
        except grpc.aio.AioRpcError as error:
            raise UnavailableError(f"--address {address}: {error.details()}") from error
    verifiers = _ready(status.verifiers)
    pools = []
    for pool in status.drafter_pools:
        addresses = _ready(pool.replicas)
        is_attached = bool(addresses) and set(addresses) <= set(verifiers)
        told = {"attached": is_attached, "addresses": [] if is_attached else addresses}
        pools.append(DrafterPoolConfig(name=pool.pool, kind=pool.kind, max_draft_tokens=64, **told))
    return Config(
        target=ModelConfig(model=status.model),
        drafter_pools=pools,
        orchestrator=OrchestratorConfig(verifier_addresses=verifiers),
    )


def _ready(replicas: Sequence[cluster.ReplicaStatus]) -> list[str]:
    return [r.address for r in replicas if r.health == cluster.REPLICA_HEALTH_READY]


@contextlib.contextmanager
def _services(config: Config) -> Iterator[list[ReplicaSpec]]:
    if config.orchestrator.verifier_addresses:
        yield running_replicas(config)
        return
    if not config.ray.address:
        prepare_environment()
    from orchestrator.cluster import RayCluster  # imports ray, which wants the above

    with RayCluster.start(config, say) as started:
        yield started.replicas()


@dataclass(frozen=True, slots=True)
class Traced:
    """What a traced run gave; CPU seconds of the event loop's thread and of the whole process."""

    timeline: Timeline
    thread_s: float
    process_s: float


async def run_traced(
    config: Config,
    replicas: list[ReplicaSpec],
    messages: Sequence[pb.GenerateRequest],
    num_clients: int,
) -> Traced:
    """Run the requests, so many at once, with an orchestrator of our own, and record it."""
    target = config.target
    tokenizer = Tokenizer.load(
        resolve_model(target.model), target.gguf_file, target.trust_remote_code
    )
    identity = ModelIdentity(target.model, tokenizer.size, tokenizer.fingerprint)
    engine = Engine(config.orchestrator, config.drafter_pools, replicas, identity)
    recorder = Recorder()
    try:
        await engine.start()
        assert engine.info is not None, "start() has returned"
        requests = iter(
            [build_request(m, engine.info, tokenizer, engine.pool_kinds) for m in messages]
        )

        async def client() -> None:
            for request in requests:
                await _generate(engine, request, tokenizer)

        cpu = CpuClock()
        engine.record(recorder)
        await asyncio.gather(*(client() for _ in range(num_clients)))
        engine.record(None)
        thread_s, process_s = cpu.thread_s, cpu.process_s
    finally:
        await engine.stop()
    return Traced(build(recorder.records), thread_s, process_s)


async def _generate(engine: Engine, request: GenerationRequest, tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, request.stopping.stop)
    async with contextlib.aclosing(engine.generate(request, detokenizer)) as blocks:
        async for _ in blocks:
            pass


def _write(traced: Traced, out: Path, svg: Path | None) -> None:
    timeline = traced.timeline
    if not timeline.verifies:
        raise UnavailableError("no verifier answered: there is nothing to show")
    summary = summarize(timeline)
    _write_text(out, json.dumps(trace_events(timeline, summary)) + "\n")
    if svg is not None:
        rows = summary.num_rows / summary.num_rounds
        title = f"verification and drafting, {rows:.1f} rows per round"
        _write_text(svg, draw_timeline(timeline, title))
    for line in describe(summary):
        print(line)
    print(
        f"orchestrator CPU per round: {traced.thread_s * 1000 / summary.num_rounds:.2f} ms in the "
        f"event loop's thread, {traced.process_s * 1000 / summary.num_rounds:.2f} ms in all"
    )
    print(f"open {out} in ui.perfetto.dev", file=sys.stderr)


def _write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
