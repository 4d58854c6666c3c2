"""What rows measure with: prompts as ids, our services, the peer, the bare engine.

Everything starts when a row first asks for it and ends with the bench. One side works at a time:
a row awaits each call. Knows nothing of any row.
"""

import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from benchmarks import prompts
from benchmarks.processes import BenchError, Process, pinned
from benchmarks.stack import Stack
from core.config import Config
from core.embedded import resolve_model
from core.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured. `max_prompt_tokens` and `max_context` cut what a tiny model lacks."""

    num_runs: int = 3
    num_new_tokens: int = 96
    num_engine_runs: int = 7
    num_forwards: int = 10
    max_prompt_tokens: int = 1024
    max_context: int = 1024


#: Every path once, nothing worth reading: for a look at the harness, and for its test.
QUICK = Scale(1, 8, 1, 2, 64, 64)


class Bench:
    """The lazily started parts. `config` is what would be served."""

    def __init__(self, config: Config, scale: Scale, say: Callable[[str], None]) -> None:
        self.scale = scale
        self.config = _with_local_models(config)
        cores = sorted(os.sched_getaffinity(0))
        self.target_core, self.other_core = cores[0], cores[min(1, len(cores) - 1)]
        self._say = say
        self._ending = contextlib.AsyncExitStack()
        self._tokenizer: Tokenizer | None = None
        self._stacks: dict[bool, Stack] = {}
        self._traced: Stack | None = None
        self._processes: dict[str, Process] = {}
        self._num_salts = 0

    async def __aenter__(self) -> Self:
        self._ending.enter_context(pinned(self.other_core))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._ending.aclose()

    # ------------------------------------------------------------ the parts

    async def stack(self, is_adaptive: bool = True) -> Stack:
        """Our services. Without `is_adaptive` each draft is verified whole; a network's has up to
        five tokens then."""
        if is_adaptive not in self._stacks:
            self._say("starting verifier, drafters and orchestrator")
            config = self.config if is_adaptive else _with_whole_drafts(self.config)
            stack = await Stack.start(config, self.target_core, self.other_core)
            self._ending.push_async_callback(stack.stop)
            await stack.generate(self.fresh(prompts.CHAT[:1])[0], 4)
            self._stacks[is_adaptive] = stack
        return self._stacks[is_adaptive]

    async def traced_stack(self) -> Stack:
        """Our services with an orchestrator that can record; see `benchmarks.traced`."""
        if self._traced is None:
            self._say("starting services to record")
            cores = (self.target_core, self.other_core)
            self._traced = await Stack.start(self.config, *cores, role="traced")
            self._ending.push_async_callback(self._traced.stop)
        return self._traced

    @contextlib.asynccontextmanager
    async def stack_of(self, config: Config) -> AsyncIterator[Stack]:
        """Our services with another configuration, for as long as a row needs them."""
        self._say("starting " + ", ".join(pool.kind for pool in config.drafter_pools))
        stack = await Stack.start(_with_local_models(config), self.target_core, self.other_core)
        try:
            yield stack
        finally:
            await stack.stop()

    @contextlib.asynccontextmanager
    async def peer_of(self, path: str, dtype: str) -> AsyncIterator[Process]:
        """transformers with another target, for as long as a row needs it."""
        process = await Process.start("peer-of", "benchmarks.peer", core=self.target_core)
        try:
            await process.call("load", path=path, dtype=dtype)
            yield process
        finally:
            await process.stop()

    async def peer(self) -> Process:
        """transformers; see `benchmarks.peer`."""
        target = self.config.target
        return await self._process("peer", path=target.model, dtype=target.dtype)

    async def engine(self) -> Process:
        """Our engine beside the stock forward; see `benchmarks.engine_process`."""
        return await self._process("engine_process", config=self.config.target.model_dump())

    async def verifying(self) -> Process:
        """The verifier's engine without its wire; see `benchmarks.verify_process`."""
        return await self._process("verify_process", config=self.config.target.model_dump())

    async def _process(self, name: str, **arguments: Any) -> Process:
        if name not in self._processes:
            self._say(f"starting {name.removesuffix('_process')}")
            module = f"benchmarks.{name}"
            process = await Process.start(name, module, core=self.target_core)
            self._ending.push_async_callback(process.stop)
            await process.call("load", **arguments)
            self._processes[name] = process
        return self._processes[name]

    # ------------------------------------------------------------ prompts

    def fresh(self, tasks: Sequence[str]) -> list[list[int]]:
        """Ids of one conversation per task, new at each call.

        A number in front sees to it that no earlier run's prefix is reused: the peer keeps none.
        """
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.load(self.config.target.model)
        conversations = []
        for task in tasks:
            self._num_salts += 1
            system = f"{self._num_salts} is the number of this talk. You are a helpful assistant."
            messages = [{"role": "system", "content": system}, {"role": "user", "content": task}]
            ids = self._tokenizer.apply_chat_template(messages)
            conversations.append(ids[: self.scale.max_prompt_tokens])
        return conversations

    @property
    def default_pool(self) -> str:
        """Name of the pool for requests that name none."""
        return self.config.orchestrator.default_pool or self.config.drafter_pools[0].name

    def pool(self, kind: str) -> str:
        """Name of the first drafter pool of a kind. Raises BenchError."""
        for pool in self.config.drafter_pools:
            if pool.kind == kind:
                return pool.name
        raise BenchError(f"the configuration has no drafter pool of kind {kind!r}")

    def pool_with_model(self) -> str:
        """Name of the first drafter pool that drafts with a network. Raises BenchError."""
        for pool in self.config.drafter_pools:
            if pool.kind in ("draft_model", "mtp_layers"):
                return pool.name
        raise BenchError("the configuration has no drafter pool with a model")

    # ------------------------------------------------------------ runs

    async def in_turns(
        self,
        tasks: Sequence[str],
        ours: Callable[[list[list[int]]], Awaitable[float]],
        peer: Callable[[list[list[int]]], Awaitable[float]],
        num_runs: int = 0,
    ) -> tuple[list[float], list[float]]:
        """Runs of ours and of the peer on the same prompts, one after the other."""
        runs: tuple[list[float], list[float]] = ([], [])
        for _ in range(num_runs or self.scale.num_runs):
            conversations = self.fresh(tasks)
            runs[0].append(await ours(conversations))
            runs[1].append(await peer(conversations))
        return runs


def _with_local_models(config: Config) -> Config:
    """Embedded models made now, where the progress is seen, and named by their folders."""
    pools = [
        pool.model_copy(
            update={
                "model": pool.model.model_copy(update={"model": resolve_model(pool.model.model)})
            }
        )
        if pool.model
        else pool
        for pool in config.drafter_pools
    ]
    target = config.target.model_copy(update={"model": resolve_model(config.target.model)})
    return config.model_copy(update={"target": target, "drafter_pools": pools})


def _with_whole_drafts(config: Config) -> Config:
    settings = config.orchestrator.model_copy(update={"adaptive_draft_length": False})
    pools = [
        pool.model_copy(update={"max_draft_tokens": 5}) if pool.kind != "ngram" else pool
        for pool in config.drafter_pools
    ]
    return config.model_copy(update={"drafter_pools": pools, "orchestrator": settings})
