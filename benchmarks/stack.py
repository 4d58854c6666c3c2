"""A whole forerun without Ray for the bench, and its client: real services, real gRPC.

The verifier has the target's core; drafters, orchestrator and this client share the other one.
Knows nothing of rows or of the peer.
"""

import asyncio
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import grpc

from benchmarks.processes import BenchError, Process
from core.config import Config
from core.rpc import create_channel
from protos import common_pb2, generation_pb2, generation_pb2_grpc


@dataclass(frozen=True, slots=True)
class Block:
    """What one verify round brought, and when."""

    at_s: float
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Generation:
    """One request: its blocks (with ids only if asked for) and its end."""

    blocks: tuple[Block, ...]
    finished: generation_pb2.Finished

    @property
    def token_ids(self) -> list[int]:
        """All new tokens."""
        return [token for block in self.blocks for token in block.token_ids]


@dataclass(frozen=True, slots=True)
class VerifierTime:
    """What a verifier did since it started: batches, and seconds by what they were spent on."""

    batches: float
    forward_s: float
    sampling_s: float
    queue_s: float
    drafting_s: float

    def __sub__(self, earlier: "VerifierTime") -> "VerifierTime":
        return VerifierTime(
            self.batches - earlier.batches,
            self.forward_s - earlier.forward_s,
            self.sampling_s - earlier.sampling_s,
            self.queue_s - earlier.queue_s,
            self.drafting_s - earlier.drafting_s,
        )


class Stack:
    """Running services and a channel to them."""

    def __init__(self, processes: list[Process], address: str, metrics: str) -> None:
        self._processes = processes
        self._metrics = metrics
        self.orchestrator = processes[-1]
        self._channel = create_channel(address)
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)

    @classmethod
    async def start(
        cls, config: Config, target_core: int, other_core: int, role: str = "orchestrator"
    ) -> Self:
        """Start the target, one drafter per pool, and the orchestrator. Raises BenchError.

        role: "traced" is the orchestrator that records; see `benchmarks.traced`.
        """
        processes: list[Process] = []
        try:
            verifier = await _start("verifier", config, target_core, processes)
            drafters = {
                pool.name: await _start(f"drafter:{pool.name}", config, other_core, processes)
                for pool in config.remote_pools
            }
            *_, metrics, verifier_address = (await verifier.hear()).split()
            pools = [
                pool.model_copy(update={"addresses": [await _address(drafters[pool.name])]})
                if pool.name in drafters
                else pool
                for pool in config.drafter_pools
            ]
            settings = config.orchestrator.model_copy(
                update={"verifier_addresses": [verifier_address], "port": 0, "metrics_port": None}
            )
            whole = config.model_copy(update={"drafter_pools": pools, "orchestrator": settings})
            orchestrator = await _start(role, whole, other_core, processes)
            return cls(processes, await _address(orchestrator), metrics)
        except BaseException:
            await _stop(processes)
            raise

    async def stop(self) -> None:
        """Stop everything."""
        await self._channel.close()
        await _stop(self._processes)

    async def generate(
        self, prompt: Sequence[int], max_new_tokens: int, drafter: str = "", ids: bool = False
    ) -> Generation:
        """Greedy, end tokens ignored; without drafts unless `drafter` names a pool."""
        request = generation_pb2.GenerateRequest(
            prompt_token_ids=common_pb2.TokenIds(ids=prompt),
            sampling=generation_pb2.SamplingOptions(temperature=0.0),
            stopping=generation_pb2.StoppingOptions(max_new_tokens=max_new_tokens, ignore_eos=True),
            speculation=generation_pb2.SpeculationOptions(enabled=bool(drafter), drafter=drafter),
            output=generation_pb2.OutputOptions(return_token_ids=ids),
        )
        generation = await self.call(request)
        if generation.finished.usage.completion_tokens != max_new_tokens:
            raise BenchError(f"not {max_new_tokens} new tokens but: {generation.finished}")
        return generation

    async def call(self, request: generation_pb2.GenerateRequest) -> Generation:
        """Any request for one sample. Raises BenchError."""
        blocks: list[Block] = []
        finished = None
        try:
            async for response in self._stub.Generate(request):
                blocks.append(Block(time.perf_counter(), tuple(response.token_ids)))
                if response.HasField("finished"):
                    finished = response.finished
        except grpc.aio.AioRpcError as error:
            raise BenchError(f"Generate: {error.code().name}: {error.details()}") from error
        if finished is None:
            raise BenchError(f"the answer ended after {len(blocks)} blocks, unfinished")
        return Generation(tuple(blocks), finished)

    async def generate_all(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        drafter: str = "",
        num_clients: int = 8,
    ) -> tuple[float, list[Generation]]:
        """So many clients, each with the next prompt as soon as it has its answer.

        Returns the seconds until the last has ended, and the generations as they ended.
        """
        waiting = iter(prompts)
        generations: list[Generation] = []

        async def client() -> None:
            for prompt in waiting:
                generations.append(await self.generate(prompt, max_new_tokens, drafter))

        begin = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(num_clients)))
        return time.perf_counter() - begin, generations

    async def steady_speed(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, drafter: str, num_clients: int
    ) -> float:
        """Tokens per second that so many clients get, until the first of them finds no prompt."""
        waiting = iter(prompts)
        generations: list[Generation] = []
        ends: list[float] = []

        async def client() -> None:
            for prompt in waiting:
                generations.append(await self.generate(prompt, max_new_tokens, drafter, ids=True))
            ends.append(time.perf_counter())

        begin = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(num_clients)))
        end = min(ends)
        blocks = [block for generation in generations for block in generation.blocks]
        return sum(len(b.token_ids) for b in blocks if b.at_s <= end) / (end - begin)

    async def verifier_time(self) -> VerifierTime:
        """The verifier's own account of its time."""
        text = await asyncio.to_thread(_fetch, f"http://{self._metrics}/metrics")
        lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
        series = {name: float(value) for name, value in lines}
        return VerifierTime(
            batches=series["forerun_verifier_batches_total"],
            forward_s=series["forerun_verifier_forward_seconds_sum"],
            sampling_s=series["forerun_verifier_sampling_seconds_sum"],
            queue_s=series["forerun_verifier_queue_seconds_sum"],
            drafting_s=series["forerun_verifier_drafting_seconds_sum"],
        )


async def _start(role: str, config: Config, core: int, processes: list[Process]) -> Process:
    process = await Process.start(role.replace(":", "-"), "benchmarks.service", role, core=core)
    processes.append(process)
    await process.say(config.model_dump_json())
    return process


async def _address(process: Process) -> str:
    return (await process.hear()).split()[-1]


async def _stop(processes: list[Process]) -> None:
    await asyncio.gather(*(process.stop() for process in reversed(processes)))


def _fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as response:
        return str(response.read().decode())
