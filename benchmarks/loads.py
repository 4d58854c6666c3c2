"""An engine over synthetic services, and clients that keep it busy: for real, or simulated.

    async with Services.start(setting, ...) as services:   processes, reached over real gRPC
        result = await services.run()

`benchmarks.simulate` puts the same engine and clients into a world without a clock. The engine
runs in this process, and its links are as slow as the setting says.
"""

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import structlog
import structlog.testing

from benchmarks.links import connect
from benchmarks.processes import BenchError, Process
from benchmarks.setting import Setting
from benchmarks.texts import VOCAB_SIZE
from core.config import OrchestratorConfig
from core.params import Rule, SamplingParams
from orchestrator.engine import Engine
from orchestrator.requests import Finished, GenerationRequest, ReplicaSpec, Speculation, Stopping


@dataclass(frozen=True, slots=True)
class _Piece:
    text: str
    num_tokens: int


class _NoText:
    """A detokenizer for clients that want ids only."""

    stop_string = ""

    def push(self, token_ids: Sequence[int]) -> _Piece:
        """No text, no stop string."""
        return _Piece("", len(token_ids))

    def flush(self) -> str:
        """Nothing is held back."""
        return ""


@dataclass(slots=True)
class Result:
    """What clients got: all their texts by the seed, the seconds it took, the ends."""

    texts: dict[int, list[int]]
    seconds: float
    ends: list[Finished]
    arrivals: list[tuple[float, int]]  # when tokens came, from the begin, and how many
    gaps_s: list[float]  # between two blocks of one stream
    cpu_s: float = 0.0  # of this process meanwhile

    @property
    def tokens_per_s(self) -> float:
        """New tokens over all clients."""
        return sum(map(len, self.texts.values())) / self.seconds

    @property
    def steady_tokens_per_s(self) -> float:
        """The same between the first quarter of the tokens and the last: neither prompts, nor
        streams that are left alone at the end."""
        total = sum(count for _, count in self.arrivals)
        passed, marks = 0, list[tuple[float, int]]()
        for at_s, together in itertools.groupby(sorted(self.arrivals), lambda each: each[0]):
            passed += sum(count for _, count in together)
            if len(marks) < 2 and passed >= total * (1 + 2 * len(marks)) / 4:
                marks.append((at_s, passed))
        (begin_s, before), (end_s, after) = marks
        return (after - before) / (end_s - begin_s)

    @property
    def tokens_per_step(self) -> float:
        """New tokens a verify step brought."""
        steps = sum(end.stats.num_verify_steps for end in self.ends)
        return sum(map(len, self.texts.values())) / max(1, steps)

    @property
    def hit_rate(self) -> float:
        """Share of verify steps behind the first that had a plan."""
        steps = sum(end.stats.num_verify_steps - 1 for end in self.ends)
        return sum(end.stats.num_plan_hits for end in self.ends) / max(1, steps)

    @property
    def fallbacks(self) -> Counter[str]:
        """Steps without a plan by cause."""
        return sum((end.stats.fallback_steps for end in self.ends), Counter())


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what engines and services here log from the terminal. Raises BenchError when an error
    is among it: what was measured is not what it should be."""
    with structlog.testing.capture_logs() as logs:
        yield
    errors = [each for each in logs if each["log_level"] in ("error", "critical")]
    if errors:
        raise BenchError(f"{len(errors)} errors were logged; the first: {errors[0]}")


def engine_of(setting: Setting, specs: Sequence[ReplicaSpec]) -> Engine:
    """The engine a setting describes, to be started."""
    pools = [setting.pool_config] if setting.num_drafters else []
    settings: dict[str, Any] = {"max_queue": 100_000, "max_prefill_tokens": 4096}
    return Engine(OrchestratorConfig(**settings | setting.orchestrator), pools, list(specs))


def spec(
    replica_id: str, pool: str, address: str, connect: Callable[[str], Any] | None = None
) -> ReplicaSpec:
    """A replica that stays where it is."""

    async def resolve() -> str:
        return address

    return ReplicaSpec(replica_id, pool, resolve, connect)


def request(setting: Setting, seed: int, prompt: Sequence[int] = ()) -> GenerationRequest:
    """The request whose text is that of `seed`."""
    temperature = setting.temperature
    rule = Rule.COUPLED if temperature > 0 else Rule.GREEDY
    prompt = prompt or [(997 * seed + i) % VOCAB_SIZE for i in range(setting.num_prompt_tokens)]
    return GenerationRequest(
        f"request-{seed}",
        tuple(prompt),
        SamplingParams(temperature=temperature, seed=seed, rule=rule),
        Stopping(setting.num_new_tokens),
        Speculation(enabled=setting.num_drafters > 0),
    )


async def drive(
    engine: Engine, setting: Setting, prompts: Sequence[Sequence[int]] = (), first_seed: int = 0
) -> Result:
    """So many clients, each with its next request as soon as it has its answer.

    prompts: of the requests in their order, whose seeds count from `first_seed`.
    """
    num_requests = len(prompts) or setting.num_clients * setting.num_requests
    waiting = iter(range(num_requests))
    result = Result({}, 0.0, [], [], [])

    async def client() -> None:
        for number in waiting:
            seed = first_seed + number
            prompt = prompts[number] if prompts else ()
            text = result.texts.setdefault(seed, [])
            blocks = engine.generate(request(setting, seed, prompt), _NoText())
            async with contextlib.aclosing(blocks):
                last_at = None
                async for block in blocks:
                    now = time.perf_counter()
                    if last_at is not None:
                        result.gaps_s.append(now - last_at)
                    last_at = now
                    result.arrivals.append((now - begin, len(block.token_ids)))
                    text.extend(block.token_ids)
                    if block.finished is not None:
                        result.ends.append(block.finished)

    begin, cpu_begin = time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as clients:
        for _ in range(setting.num_clients):
            clients.create_task(client())
    result.seconds = time.perf_counter() - begin
    result.cpu_s = time.process_time() - cpu_begin
    return result


class Services:
    """A target and drafters as processes on cores of their own, and engines here that use them."""

    def __init__(self, setting: Setting, target: str, drafters: Sequence[str]) -> None:
        self.setting = setting
        self._target, self._drafters = target, drafters

    @classmethod
    @contextlib.asynccontextmanager
    async def start(
        cls, setting: Setting, target_core: int, other_core: int
    ) -> AsyncIterator["Services"]:
        """The target has a core; the drafters share the other one. Raises BenchError."""
        async with contextlib.AsyncExitStack() as stack:

            async def start(role: str, core: int) -> list[str]:
                process = await Process.start(
                    f"synthetic-{role}", "benchmarks.synthetic", role, core=core
                )
                stack.push_async_callback(process.stop)
                await process.say(setting.model_dump_json())
                return (await process.hear()).split()

            starting = start("target", target_core), start("drafters", other_core)
            [target], drafters = await asyncio.gather(*starting)
            yield cls(setting, target, drafters)

    @contextlib.asynccontextmanager
    async def engine(self, setting: Setting | None = None) -> AsyncIterator[Engine]:
        """An engine that has reached them. What another setting may change: links, number of
        drafters (fewer), the orchestrator's settings, the load."""
        setting = setting or self.setting
        specs = [spec("target", "", self._target, connect(setting.target_link))]
        for i, address in enumerate(self._drafters[: setting.num_drafters]):
            link = setting.link.model_copy(update={"seed": i})
            specs.append(spec(f"drafter-{i}", "synthetic", address, connect(link)))
        engine = engine_of(setting, specs)
        try:
            await engine.start()
            yield engine
        finally:
            await engine.stop()

    async def run(self, setting: Setting | None = None) -> Result:
        """What the clients of a setting get."""
        setting = setting or self.setting
        async with self.engine(setting) as engine:
            return await drive(engine, setting)
