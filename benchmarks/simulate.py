"""`make simulate`: the system at sizes that are not at hand, in a world without a clock.

    python -m benchmarks.simulate                     the table of docs/simulator.md (minutes)
    python -m benchmarks.simulate --setting FILE      one `Setting` as JSON: what its clients get

Engine, scheduler, controller, pools, pipelines, clients, the drafters' and the verifiers' services
are the real ones (see `benchmarks.virtual`); costs, acceptance, links and load are set (see
`benchmarks.synthetic`). `simulated_` rows of `make bench` compare it with the real thing.
"""

import argparse
import concurrent.futures
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track

from benchmarks import virtual
from benchmarks.links import DelayedChannel, Link, Overhead, Processor
from benchmarks.loads import Result, drive, engine_of, quiet, spec
from benchmarks.setting import DraftCost, Setting, TargetCost
from benchmarks.synthetic import SyntheticTarget, serve_drafter, serve_target
from benchmarks.synthetic_drafter import SyntheticDrafter
from benchmarks.texts import Text
from core.drafter import Drafter
from orchestrator.requests import ReplicaSpec

_DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "simulator.md"
_BEGIN, _END = "<!-- table -->\n", "<!-- end -->\n"

CLIENTS = (1, 8, 64, 512)
ROUND_TRIPS_S = (0.0002, 0.002, 0.02)
DRAFTERS = (1, 2, 4, 8, 16)
_LENGTHS = (2, 4, 8)
_IN_FLIGHT = (1, 2, 4, 8)
#: A model of 70 billion parameters in bf16, layer by layer on eight GPUs that read 3 TB/s, and
#: drafters of one billion on GPUs that read 0.6 TB/s.
_LARGE = Setting(
    target=TargetCost(base_s=0.047, row_s=0.0001, token_s=0.0002, num_stages=8),
    draft=DraftCost(step_s=0.0035, row_s=0.00002),
    acceptance=(0.8,),
    pool={"max_branches": 8},
)
#: Of the orchestrator on the machine that docs/simulator.md names.
_OVERHEAD = Overhead(cpu_message_s=0.0003, cpu_item_s=0.00002)


def simulate(
    setting: Setting,
    overhead: Overhead = Overhead(),  # noqa: B008 - frozen
    *,
    text: Text | None = None,
    drafter: Drafter | None = None,
    prompts: Sequence[Sequence[int]] = (),
    num_warm_ups: int = 0,
) -> Result:
    """What the clients of a setting get, the last of `num_warm_ups` + 1 times.

    `drafter` drafts instead of a synthetic one (one replica); `text` and `prompts` stand for random
    ones, see `Text` and `drive`. Raises BenchError when a part of the system logged an error.
    """

    async def world() -> Result:
        processor = Processor(overhead)
        target = await serve_target(SyntheticTarget(setting, text))
        specs = [_spec("target", target, setting.target_link, processor)]
        for i in range(setting.num_drafters):
            served = await serve_drafter(setting, drafter or SyntheticDrafter(setting, text))
            link = setting.link.model_copy(update={"seed": i})
            specs.append(_spec(f"drafter-{i}", served, link, processor))
        engine = engine_of(setting, specs)
        await engine.start()
        results = [await drive(engine, setting, prompts) for _ in range(num_warm_ups + 1)]
        await engine.stop()
        return results[-1]

    with quiet():
        return virtual.run(world)


def _spec(name: str, server: object, link: Link, processor: Processor) -> ReplicaSpec:
    pool = "" if name == "target" else "synthetic"
    return spec(name, pool, name, lambda _: DelayedChannel(server, link, processor))


# ---------------------------------------------------------------- the best policy


@dataclass(frozen=True, slots=True)
class Policy:
    """What an operator may choose: longest draft (0: none), micro-batches in flight."""

    length: int
    in_flight: int

    def __str__(self) -> str:
        return f"{self.length} x {self.in_flight}" if self.length else f"plain x {self.in_flight}"

    def neighbours(self) -> list["Policy"]:
        """One step to each side."""
        i, j = (0, *_LENGTHS).index(self.length), _IN_FLIGHT.index(self.in_flight)
        near = [Policy(k, self.in_flight) for k in _LENGTHS[max(0, i - 2) : i + 1]]
        return near + [Policy(self.length, m) for m in _IN_FLIGHT[max(0, j - 1) : j + 2]]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table: tokens per second by the number of drafters, each at its policy's
    best; 0 drafters is plain decoding."""

    num_clients: int
    round_trip_s: float
    speeds: dict[int, float]
    policies: dict[int, Policy]

    @property
    def num_drafters(self) -> int:
        """The fewest drafters with which it is within 2 % of the best."""
        best = max(self.speeds.values())
        return min(n for n, speed in self.speeds.items() if speed >= 0.98 * best)


def tokens_per_s(base: Setting, overhead: Overhead, num_drafters: int, policy: Policy) -> float:
    """Of a setting with another policy."""
    changes = {
        "num_drafters": num_drafters if policy.length else 0,
        "orchestrator": base.orchestrator | {"max_in_flight": policy.in_flight},
        "pool": base.pool | {"max_draft_tokens": max(1, policy.length)},
    }
    return simulate(base.model_copy(update=changes), overhead).steady_tokens_per_s


def best_line(base: Setting, overhead: Overhead = _OVERHEAD) -> Line:
    """The best policies for a setting's load and link: uphill from that for fewer drafters."""
    depths = _IN_FLIGHT if base.num_clients > 1 else _IN_FLIGHT[:1]
    plain = {m: tokens_per_s(base, overhead, 0, Policy(0, m)) for m in depths}
    in_flight = max(plain, key=plain.__getitem__)
    speeds, policies = {0: plain[in_flight]}, {0: Policy(0, in_flight)}
    here = Policy(4, in_flight)
    for num_drafters in DRAFTERS:
        if num_drafters > max(1, base.num_clients):
            break
        known: dict[Policy, float] = {}
        while True:
            for policy in [here, *here.neighbours()]:
                if policy not in known and policy.in_flight in depths:
                    known[policy] = tokens_per_s(base, overhead, num_drafters, policy)
            best = max(known, key=known.__getitem__)
            if best == here:
                break
            here = best
        speeds[num_drafters], policies[num_drafters] = known[here], here
    return Line(base.num_clients, 2 * base.link.one_way_s, speeds, policies)


def _load(num_clients: int, round_trip_s: float) -> Setting:
    link = Link(one_way_s=round_trip_s / 2, jitter_s=round_trip_s / 20)
    tokens = {1: 512, 8: 192, 64: 48, 512: 32}[num_clients]
    changes = {"num_clients": num_clients, "num_new_tokens": tokens, "link": link}
    return _LARGE.model_copy(update=changes)


# ---------------------------------------------------------------- the table


def table(lines: Sequence[Line]) -> str:
    """In Markdown."""
    counts = "".join(f" {n} |" for n in DRAFTERS)
    rows = [
        f"| clients | round trip | plain |{counts} best policy |",
        "|---" * (4 + len(DRAFTERS)) + "|",
    ]
    for line in lines:
        n = line.num_drafters
        cells = [f"{line.speeds[i]:.0f}" if i in line.speeds else "" for i in (0, *DRAFTERS)]
        policy = line.policies[n]
        gain = line.speeds[n] / line.speeds[0]
        best = (
            f"up to {policy.length} draft tokens, {n} drafter{'s' * (n > 1)} ({gain:.2f} of plain)"
        )
        best = f"{best if n else 'no drafts'}, {policy.in_flight} in flight"
        round_trip = f"{1000 * line.round_trip_s:g} ms"
        rows.append(f"| {line.num_clients} | {round_trip} | {' | '.join(cells)} | {best} |")
    return "\n".join(rows) + "\n"


def write(markdown: str, path: Path = _DOCUMENT) -> None:
    """Replace the table in the document."""
    text = path.read_text(encoding="utf-8")
    before, rest = text.split(_BEGIN)
    path.write_text(before + _BEGIN + markdown + _END + rest.split(_END)[1], encoding="utf-8")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--setting", type=Path, help="simulate what this file describes instead")
    options = parser.parse_args()
    if options.setting:
        result = simulate(Setting.model_validate_json(options.setting.read_text()), _OVERHEAD)
        print(f"{result.tokens_per_s:.1f} tokens/s, {result.tokens_per_step:.2f} per verify step")
        print(f"{result.hit_rate:.0%} of steps had a plan; others: {dict(result.fallbacks)}")
        return
    loads = [_load(n, round_trip_s) for n in CLIENTS for round_trip_s in ROUND_TRIPS_S]
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count()) as workers:
        # The longest first; what is printed is in order.
        found = workers.map(best_line, reversed(loads))
        lines = list(track(found, "simulating", len(loads), console=Console(stderr=True)))
    markdown = table(lines[::-1])
    write(markdown)
    print(markdown, end="")


if __name__ == "__main__":
    main()
