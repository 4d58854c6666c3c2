"""Keeps every pool at its wanted number of drafters, and lets that number follow demand.

One background task reconciles what is wanted with what is there: it has drafters started and hands
them to the engine, or drains them and has them ended. What is wanted is set by an operator, or by
`orchestrator.scaling` where the pool has `min_replicas`. Knows nothing of Ray: whoever starts
and ends drafters is handed in; nothing of how a number is decided.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from core.config import DrafterPoolConfig
from core.errors import ForerunError, InvalidRequestError
from orchestrator.demand import PoolLoad
from orchestrator.requests import ClusterStatus, ReplicaSpec, ReplicaStatus
from orchestrator.scaling import Autoscaler, choose_to_drain

_TICK_S = 1.0
_RETRY_S = 10.0

log = structlog.get_logger()


class DrafterHost(Protocol):
    """Who starts and ends drafters. Its calls may block for seconds: they run in a thread."""

    def add_drafter(self, pool: str) -> ReplicaSpec:
        """Have one more drafter started; it need not serve yet. Raises ForerunError."""

    def end_drafter(self, replica_id: str) -> None:
        """End a drafter that nobody uses any more. Raises ForerunError."""


class ScalableEngine(Protocol):
    """What scaling needs of `orchestrator.engine.Engine`."""

    def add_replica(self, spec: ReplicaSpec) -> None:
        """Use one more drafter."""

    async def drain_replica(self, replica_id: str) -> None:
        """Do without a drafter. Raises InvalidRequestError."""

    def loads(self) -> Mapping[str, PoolLoad]:
        """What each pool has to do."""

    def status(self) -> ClusterStatus:
        """The cluster at this moment."""


@dataclass(slots=True)
class PoolScale:
    """How many drafters a pool is to have, and may have."""

    wanted: int
    least: int
    most: int
    autoscaler: Autoscaler | None = None
    retry_at: float = 0.0


class DrafterScaler:
    """The wanted numbers of all pools of remote drafters. `run` makes them come true."""

    def __init__(
        self,
        engine: ScalableEngine,
        host: DrafterHost,
        pools: Sequence[DrafterPoolConfig],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._host = host
        self._clock = clock
        self._wake = asyncio.Event()
        self._leaving: dict[str, asyncio.Future[None]] = {}
        self.scales = {p.name: self._scale_of(p) for p in pools if not p.attached}

    def _scale_of(self, pool: DrafterPoolConfig) -> PoolScale:
        least, most = pool.min_replicas or 0, pool.max_replicas
        wanted = max(least, len(self._replicas(pool.name)))  # some may have been found running
        autoscaler = Autoscaler(least, most, wanted) if pool.is_autoscaled else None
        return PoolScale(wanted, least, most, autoscaler)

    def _replicas(self, pool: str) -> tuple[ReplicaStatus, ...]:
        return next(p.replicas for p in self._engine.status().drafter_pools if p.pool == pool)

    # ------------------------------------------------------------ what is wanted

    def scale(self, pool: str, replicas: int) -> int:
        """Want so many drafters in a pool; returns how many were wanted before.

        Raises InvalidRequestError for a pool that cannot be scaled, or not so far.
        """
        scale = self.scales.get(pool)
        if scale is None:
            known = ", ".join(self.scales) or "none"
            raise InvalidRequestError(
                "pool", f"there is no pool of remote drafters {pool!r}; there are: {known}"
            )
        if not scale.least <= replicas <= scale.most:
            raise InvalidRequestError(
                "replicas",
                f"{replicas} is not between {scale.least} and {scale.most}, pool {pool!r}'s"
                " min_replicas and max_replicas",
            )
        previous = scale.wanted
        self._want(scale, replicas)
        log.info("scaled by hand", pool=pool, previous=previous, wanted=replicas)
        return previous

    def _want(self, scale: PoolScale, wanted: int) -> None:
        scale.wanted, scale.retry_at = wanted, 0.0
        if scale.autoscaler is not None:
            scale.autoscaler.hold(wanted, self._clock())
        self._wake.set()

    async def drain(self, replica_id: str) -> int:
        """Take one drafter out of its pool; returns when it is ended, with the number now wanted.

        Raises InvalidRequestError when there is no drafter of that name.
        """
        for pool, scale in self.scales.items():
            if replica_id in [replica.replica_id for replica in self._replicas(pool)]:
                if replica_id not in self._leaving:
                    self._leaving[replica_id] = asyncio.get_running_loop().create_future()
                    self._want(scale, max(scale.least, scale.wanted - 1))
                await asyncio.shield(self._leaving[replica_id])
                return scale.wanted
        raise InvalidRequestError("replica_id", f"there is no drafter {replica_id!r} to drain")

    # ------------------------------------------------------------ making it so

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            try:
                await self.step()
            except Exception:  # a boundary: whatever goes wrong here, requests are served
                log.exception("scaling failed")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self._wake.wait()
            self._wake.clear()

    async def step(self) -> None:
        """Look at the load once, and start and end what that takes."""
        loads, now = self._engine.loads(), self._clock()
        for pool, scale in self.scales.items():
            if scale.autoscaler is not None:
                self._follow(pool, scale, loads[pool], now)
        for replica_id in list(self._leaving):
            await self._end(replica_id)
            self._leaving.pop(replica_id).set_result(None)
        for pool, scale in self.scales.items():
            if now >= scale.retry_at:
                await self._reconcile(pool, scale)

    def _follow(self, pool: str, scale: PoolScale, load: PoolLoad, now: float) -> None:
        assert scale.autoscaler is not None
        wanted = scale.autoscaler.decide(load, now)
        if wanted != scale.wanted:
            log.info("scaled by demand", pool=pool, previous=scale.wanted, wanted=wanted)
            scale.wanted = wanted

    async def _reconcile(self, pool: str, scale: PoolScale) -> None:
        """End the drafters too many, or have the missing ones started."""
        replicas = self._replicas(pool)
        num_missing = scale.wanted - len(replicas)
        for replica_id in choose_to_drain(replicas, -num_missing):
            await self._end(replica_id)
        try:
            for _ in range(num_missing):
                self._engine.add_replica(await asyncio.to_thread(self._host.add_drafter, pool))
        except ForerunError as error:
            scale.retry_at = self._clock() + _RETRY_S
            log.warning("no drafter added", pool=pool, wanted=scale.wanted, why=str(error))

    async def _end(self, replica_id: str) -> None:
        try:
            await self._engine.drain_replica(replica_id)
            await asyncio.to_thread(self._host.end_drafter, replica_id)
        except ForerunError as error:
            log.warning("drafter not ended", replica=replica_id, why=str(error))


@contextlib.asynccontextmanager
async def scaling(
    engine: ScalableEngine, host: DrafterHost | None, pools: Sequence[DrafterPoolConfig]
) -> AsyncIterator[DrafterScaler | None]:
    """A scaler that works until the block ends; None where nobody can start drafters."""
    if host is None:
        yield None
        return
    scaler = DrafterScaler(engine, host, pools)
    task = asyncio.create_task(scaler.run(), name="scaling")
    try:
        yield scaler
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
