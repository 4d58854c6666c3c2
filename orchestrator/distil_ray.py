"""The `Writer` of `forerun distil` with several machines: actors that each load the target.

Shards are handed out a few at a time, in order, to whoever is free; an actor writes them itself,
into the work directory, which all machines must see. Only numbers and prompts pass through Ray.
What an actor that died had not finished goes to the next one, and a new actor is asked for. Ray is
joined, or started, when the first shard turns out to be missing.

Knows how shards are shared out; knows nothing of what is in them.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.exceptions

from core.config import PlacementConfig, RayConfig
from core.errors import ForerunError, ModelError, UnavailableError
from core.model import RaggedModel
from drafter_service.distil.features import write_features
from drafter_service.distil.generate import (
    SHARD_PROMPTS,
    GenerationOptions,
    Shards,
    num_answered,
    write_shards,
)
from orchestrator.local_ray import LocalRay, join_ray
from orchestrator.ray_options import describe_amounts, describe_placement, placement_options

#: How often an actor keeps all its rows full before it runs dry at the end of a turn.
_FULL_ROUNDS = 4
#: Of actors in a row, without a shard between: then it is not the machines.
_MOST_DEATHS = 3
_LOCAL_PLACEMENT_S = 30.0
_JOINED_PLACEMENT_S = 900.0

#: What an actor tells: a finished shard's number and size, or in words what went wrong.
_Told = tuple[int, int] | str


class WriterActor:
    """Runs inside a Ray actor; its methods tell as they go. `load` gives the target."""

    def __init__(self, load: Callable[[], RaggedModel]) -> None:
        self._load = load

    def load(self) -> Iterator[_Told]:
        """Load the target."""
        try:
            self._target = self._load()
        except ForerunError as error:
            yield str(error)

    def texts(
        self, prompts: dict[int, str], paths: dict[int, Path], options: GenerationOptions
    ) -> Iterator[_Told]:
        """Write shards of text."""
        sizes = {n: num_answered(path) for n, path in paths.items() if path.exists()}
        yield from sizes.items()
        missing = {n: path for n, path in paths.items() if n not in sizes}
        told = set(sizes)
        try:
            for _ in write_shards(self._target, prompts, missing, options, sizes):
                yield from ((n, size) for n, size in sizes.items() if n not in told)
                told |= sizes.keys()
        except ForerunError as error:
            yield str(error)

    def features(
        self, needs: Sequence[str], shards: dict[int, Path], folder: Path
    ) -> Iterator[_Told]:
        """Write the hidden states of shards."""
        try:
            for number, shard in shards.items():
                write_features(self._target, needs, [shard], folder)
                yield number, 0
        except ForerunError as error:
            yield str(error)


@dataclass(slots=True)
class _Work:
    """Shards to be written. waiting: the numbers of those that nobody writes, ascending. size: how
    many the next turn has. call: has an actor write some. note: hears of a finished one."""

    waiting: list[int]
    size: Callable[[], int]
    call: Callable[[Any, list[int]], Any]
    note: Callable[[int, int], None]


@dataclass(slots=True)
class _Turn:
    """What an actor is busy with: shards, or at first loading its target (`work` is None)."""

    actor: Any
    work: _Work | None
    numbers: list[int]


class RayWriters:
    """A `Writer` of `count` actors. load: gives the target with `rows` rows, in an actor.

    An empty `address` starts a local Ray, unless this process has joined one already. The methods
    raise UnavailableError for no Ray, no room or actors that keep dying, ModelError for an actor
    that cannot load or run the target.
    """

    def __init__(
        self,
        load: Callable[[], RaggedModel],
        rows: int,
        count: int,
        placement: PlacementConfig,
        address: str = "",
    ) -> None:
        self._load, self._rows, self._count = load, rows, count
        self._placement, self._address = placement, address
        self._local: LocalRay | None = None
        self._has_joined = False
        self._idle: list[Any] = []
        self._busy: dict[Any, _Turn] = {}
        self._num_deaths = 0
        self._is_placed = False

    def texts(
        self,
        prompts: Sequence[str],
        folder: Path,
        options: GenerationOptions,
        num_tokens: int,
        on_tokens: Callable[[int], None] = lambda total: None,
    ) -> list[Path]:
        """See `Writer`. Shards behind the last one needed may be written, too."""
        folder = folder.resolve()
        shards = Shards(folder, len(prompts), num_tokens)

        def size() -> int:
            left = num_tokens - sum(shards.sizes.values())
            known = sum(shards.sizes.values()) or SHARD_PROMPTS * options.max_new_tokens
            num_left = min(len(work.waiting), left * max(1, len(shards.sizes)) // known)
            largest = max(1, _FULL_ROUNDS * self._rows // SHARD_PROMPTS)
            return max(1, min(largest, num_left // (2 * self._count)))

        def call(actor: Any, numbers: list[int]) -> Any:
            first_ids = [number * SHARD_PROMPTS for number in numbers]
            given = {
                i: prompts[i]
                for first in first_ids
                for i in range(first, min(first + SHARD_PROMPTS, len(prompts)))
            }
            return actor.texts.remote(given, {n: shards.paths[n] for n in numbers}, options)

        def note(number: int, num_answered: int) -> None:
            shards.sizes[number] = num_answered
            on_tokens(min(num_tokens, sum(shards.sizes.values())))

        work = _Work(shards.missing(), size, call, note)
        self._run(work, lambda: shards.needed() is not None)
        return shards.needed() or []

    def features(
        self,
        needs: Sequence[str],
        shards: Sequence[Path],
        folder: Path,
        on_shard: Callable[[int], None] = lambda done: None,
    ) -> None:
        """See `Writer`."""
        folder.mkdir(parents=True, exist_ok=True)
        folder, sources = folder.resolve(), [shard.resolve() for shard in shards]
        missing = {n for n, shard in enumerate(sources) if not (folder / shard.name).exists()}

        def call(actor: Any, numbers: list[int]) -> Any:
            return actor.features.remote(needs, {n: sources[n] for n in numbers}, folder)

        def note(number: int, _: int) -> None:
            missing.discard(number)
            on_shard(len(sources) - len(missing))

        self._run(_Work(sorted(missing), lambda: 1, call, note), lambda: not missing)

    def close(self) -> None:
        """End the actors and a Ray that was started here; safe to call again."""
        actors = [*self._idle, *(turn.actor for turn in self._busy.values())]
        self._idle, self._busy = [], {}
        _kill(actors)
        if self._local is not None:
            self._local.stop()
        elif self._has_joined:
            ray.shutdown()
        self._local, self._has_joined, self._is_placed = None, False, False

    # ------------------------------------------------------------ turns

    def _run(self, work: _Work, is_done: Callable[[], bool]) -> None:
        if not is_done() and not self._idle and not self._busy:
            self._connect()
            for _ in range(self._count):
                self._create_actor()
        while not is_done():
            while self._idle and work.waiting:
                size = work.size()
                numbers, work.waiting[:] = work.waiting[:size], work.waiting[size:]
                actor = self._idle.pop()
                self._busy[work.call(actor, numbers)] = _Turn(actor, work, numbers)
            self._hear(self._wait())

    def _wait(self) -> Any:
        """The one that tells next. Actors may find no room for ever, but not all of them."""
        limit_s = _JOINED_PLACEMENT_S if self._local is None else _LOCAL_PLACEMENT_S
        ready, _ = ray.wait(list(self._busy), timeout=None if self._is_placed else limit_s)
        if ready:
            return ready[0]
        raise UnavailableError(
            f"no room after {limit_s:.0f} s for a writer ({describe_placement(self._placement)}). "
            f"The cluster has {describe_amounts(ray.cluster_resources())}, "
            f"of it free {describe_amounts(ray.available_resources())}"
        )

    def _hear(self, telling: Any) -> None:
        """Take the next thing that an actor tells; it may be of work that is no longer wanted."""
        turn = self._busy[telling]
        try:
            told: _Told = ray.get(next(telling))
        except StopIteration:
            del self._busy[telling]
            self._is_placed = True
            self._idle.append(turn.actor)
            return
        except ray.exceptions.RayActorError as error:
            del self._busy[telling]
            self._replace(turn, str(error).splitlines()[0])
            return
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            reason = f"{type(cause).__name__}: {cause}" if cause else str(error).splitlines()[0]
            raise ModelError(f"a writer failed: {reason}") from error
        if isinstance(told, str):
            raise ModelError(f"a writer failed: {told}")
        assert turn.work is not None
        number, size = told
        self._num_deaths = 0
        turn.numbers.remove(number)
        turn.work.note(number, size)

    def _replace(self, turn: _Turn, reason: str) -> None:
        """Another actor for one that is lost; its shards wait again."""
        _kill([turn.actor])  # Ray may have lost sight of it only
        self._num_deaths += 1
        if self._num_deaths > _MOST_DEATHS * self._count:
            raise UnavailableError(f"writers keep dying: {reason}")
        if turn.work is not None:
            turn.work.waiting[:] = sorted([*turn.numbers, *turn.work.waiting])
        self._create_actor()

    # ------------------------------------------------------------ Ray

    def _connect(self) -> None:
        if ray.is_initialized():
            return
        if self._address:
            join_ray(self._address, RayConfig().namespace)
            self._has_joined = True
        else:
            self._local = LocalRay(RayConfig())

    def _create_actor(self) -> None:
        options = placement_options(self._placement)
        actor = ray.remote(WriterActor).options(**options).remote(self._load)
        # Telling nothing at its end says that the target is loaded.
        self._busy[actor.load.remote()] = _Turn(actor, None, [])


def _kill(actors: Iterable[Any]) -> None:
    for actor in actors:
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(actor, no_restart=True)
