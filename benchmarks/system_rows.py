"""Drafting ahead against what it can bring, with a target and a drafter that have set costs.

All is real but the two models (benchmarks/synthetic.py): engine, services, gRPC, links as slow as
they are told to be. One client. The steps take what those of models of 70 billion and one billion
parameters take on GPUs, and guesses are right as often as those of `embedded:smollm2-135m-pruned`
for the embedded target in open talk (the first 1 to 8 guesses of 173 rejected tokens). The push
model of docs/benchmarks.md says what rounds that never wait bring:

    hit rate h:   h E(k) + 1 - h  tokens in  h max(T_v(k+1), enumeration + R) + (1 - h) T_v(1)
"""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.context import Bench
from benchmarks.links import Link
from benchmarks.loads import Result, Services, drive, quiet
from benchmarks.registry import Measurement, row
from benchmarks.setting import DraftCost, Setting, TargetCost
from benchmarks.texts import Luck

_LENGTH = 4  # as a pool has by default
BASE = Setting(
    target=TargetCost(base_s=0.03, token_s=0.0001),
    draft=DraftCost(step_s=0.0035, row_s=0.000002),
    guess_hits=(0.25, 0.39, 0.49, 0.55, 0.62, 0.64, 0.65, 0.68),
    pool={"max_draft_tokens": _LENGTH, "max_branches": 64},
)
_ACCEPTANCES = (0.6, 0.8, 0.9)
_ROUND_TRIPS_S = (0.0, 0.002, 0.01)
_TEMPERATURES = {"GREEDY": 0.0, "COUPLED": 1.0}
_RUN_S = 3.0


def expected_tokens(acceptance: float, length: int) -> float:
    """E(k): tokens of a round with a draft of k."""
    return sum(acceptance**j for j in range(length + 1))


def predicted(setting: Setting, acceptance: float, hit_rate: float) -> float:
    """The push model's speed-up over plain decoding."""
    target, round_trip_s = setting.target, 2 * setting.link.one_way_s
    num_branches = setting.pool["max_branches"]
    enumeration_s = setting.draft.seconds(num_branches, _LENGTH + 1, 0)
    plain_s, whole_s = target.seconds(1, 1), target.seconds(1, _LENGTH + 1)
    tokens = hit_rate * expected_tokens(acceptance, _LENGTH) + 1 - hit_rate
    seconds = hit_rate * max(whole_s, enumeration_s + round_trip_s) + (1 - hit_rate) * plain_s
    return tokens * plain_s / seconds


def hit_rate(result: Result) -> float:
    """Share of the rounds behind the first whose draft was there when the outcome came."""
    rounds = sum(end.stats.num_verify_steps - 1 for end in result.ends)
    misses = sum(
        end.stats.plan_misses[cause] for end in result.ends for cause in ("late", "not_enumerated")
    )
    return max(0.0, 1 - misses / max(1, rounds))


def acceptance_of(result: Result, setting: Setting) -> float:
    """Share of the texts' tokens that this drafter drafts right: near what it is set to."""
    luck = Luck("right")
    right = [
        luck.at(seed, setting.num_prompt_tokens + i) < setting.acceptance[0]
        for seed, text in result.texts.items()
        for i in range(len(text))
    ]
    return statistics.fmean(right)


@dataclass(slots=True)
class _Point:
    """One setting's runs: speed-up over plain, what the model says, hit rate, acceptance."""

    name: str
    measured: list[float] = field(default_factory=list)
    predicted: list[float] = field(default_factory=list)
    hits: list[float] = field(default_factory=list)
    rights: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return statistics.median(self.measured) / statistics.median(self.predicted)

    def note(self) -> str:
        """In words."""
        told, found = statistics.median(self.predicted), statistics.median(self.measured)
        return (
            f"{self.name}: predicted {told:.2f}, measured {found:.2f} ({self.ratio:.2f}); hit rate "
            f"{statistics.fmean(self.hits):.2f}, acceptance {statistics.fmean(self.rights):.3f}"
        )


def _setting(bench: Bench, acceptance: float, round_trip_s: float, rule: str) -> Setting:
    """Of a run of about `_RUN_S` seconds."""
    speed = 0.75 * expected_tokens(acceptance, _LENGTH) / BASE.target.seconds(1, _LENGTH + 1)
    tokens = round(speed * _RUN_S) if bench.scale.num_runs > 1 else 8
    changes = {
        "acceptance": (acceptance,),
        "temperature": _TEMPERATURES[rule],
        "link": Link(one_way_s=round_trip_s / 2),
        "num_new_tokens": tokens,
    }
    return BASE.model_copy(update=changes)


async def _run(services: Services, setting: Setting, seed: int) -> Result:
    async with services.engine(setting) as engine:
        return await drive(engine, setting, first_seed=seed)


async def _plain(services: Services, setting: Setting) -> float:
    """Tokens per second without a drafter."""
    tokens = min(24, setting.num_new_tokens)
    changes = {"num_drafters": 0, "num_new_tokens": tokens}
    return (await services.run(setting.model_copy(update=changes))).tokens_per_s


@row("push_vs_model_worst", unit="speed-up", at_least=0.9)
async def push_vs_model_worst(bench: Bench) -> Measurement:
    """Speed-up over plain against the push model's, at the worst of all settings."""
    is_quick = bench.scale.num_runs == 1
    points = []
    for acceptance in _ACCEPTANCES[: 1 if is_quick else None]:
        base = _setting(bench, acceptance, 0.0, "GREEDY")
        async with Services.start(base, bench.target_core, bench.other_core) as services:
            with quiet():
                kinds = itertools.product(_TEMPERATURES, _ROUND_TRIPS_S[: 1 if is_quick else None])
                for rule, round_trip_s in kinds:
                    setting = _setting(bench, acceptance, round_trip_s, rule)
                    name = f"{rule} acceptance {acceptance} R {1000 * round_trip_s:g} ms"
                    points.append(await _point(services, setting, name, bench.scale.num_runs))
    worst = min(points, key=lambda point: point.ratio)
    return Measurement(worst.measured, worst.predicted, [point.note() for point in points])


async def _point(services: Services, setting: Setting, name: str, num_runs: int) -> _Point:
    point = _Point(name)
    for run in range(num_runs):
        plain = await _plain(services, setting)
        result = await _run(services, setting, 100 * run)
        point.hits.append(hit_rate(result))
        point.rights.append(acceptance_of(result, setting))
        point.measured.append(result.tokens_per_s / plain)
        point.predicted.append(predicted(setting, point.rights[-1], point.hits[-1]))
    return point


@row("push_vs_sequential_a80_r10", unit="tokens/s", at_least=1.5)
async def push_vs_sequential_a80_r10(bench: Bench) -> Measurement:
    """Drafting ahead against drafting when the outcome is known, with the same services."""
    speeds: tuple[list[float], list[float]] = ([], [])
    hits: list[float] = []
    ahead = _setting(bench, 0.8, 0.01, "GREEDY")
    async with Services.start(ahead, bench.target_core, bench.other_core) as services:
        with quiet():
            for run in range(bench.scale.num_runs):
                temperature = _TEMPERATURES["COUPLED" if run % 2 else "GREEDY"]
                setting = ahead.model_copy(update={"temperature": temperature})
                waiting = setting.model_copy(update={"pool": setting.pool | {"max_branches": 0}})
                pushed = await _run(services, setting, 100 * run)
                speeds[0].append(pushed.tokens_per_s)
                speeds[1].append((await _run(services, waiting, 100 * run)).tokens_per_s)
                hits.append(hit_rate(pushed))
    return Measurement(*speeds, [f"hit rate {_mean(hits):.2f}, drafts of up to {_LENGTH} tokens"])


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)


ROWS = (push_vs_model_worst, push_vs_sequential_a80_r10)
