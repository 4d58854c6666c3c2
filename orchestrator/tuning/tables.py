"""What `forerun tune` prints: the evidence as tables, then what to put into the configuration.

Knows what was measured and predicted, not how.
"""

from rich.console import Console
from rich.table import Table

from core.config import DrafterPoolConfig
from orchestrator.tuning.prediction import PoolCosts, Prediction, TargetCosts, predict
from orchestrator.tuning.run import TuneReport


def print_report(report: TuneReport, pools: list[DrafterPoolConfig], console: Console) -> None:
    """Tables and recommendation. `pools`: those that were measured."""
    counts = sorted(report.best)
    console.print(_target_table(report.target, counts))
    for pool in report.pools:
        console.print(_pool_table(report.target, pool, counts))
    console.print(_best_table(report, counts))
    configs = {pool.name: pool for pool in pools}
    for rows in counts:
        best = report.best[rows][0]
        who = "1 client" if rows == 1 else f"{rows} clients"
        if best.speedup <= 1:
            console.print(f"{who}: no drafter; plain decoding is fastest", highlight=False)
            continue
        console.print(
            f"{who}: pool {best.pool}, {best.draft_length} draft tokens, {_where(best, configs)}: "
            f"expected speed-up {best.speedup:.2f}",
            highlight=False,
        )
        console.print(_snippet(best, configs[best.pool]), highlight=False, markup=False)


def _where(best: Prediction, configs: dict[str, DrafterPoolConfig]) -> str:
    if configs[best.pool].attached:
        return "beside the target"
    return "1 replica" if best.replicas == 1 else f"{best.replicas} replicas per verifier"


def _snippet(best: Prediction, pool: DrafterPoolConfig) -> str:
    """The keys of the pool that the recommendation is about."""
    lines = ["  [[drafter_pools]]", f'  name = "{pool.name}"', f'  kind = "{pool.kind}"']
    lines.append(f"  max_draft_tokens = {best.draft_length}")
    lines.append("  attached = true" if pool.attached else f"  replicas = {best.replicas}")
    return "\n".join(lines)


def _target_table(target: TargetCosts, counts: list[int]) -> Table:
    table = Table(title="The target: milliseconds of a verify step by tokens per row")
    longest = max(length for _, length in target.verify_s)
    table.add_column("rows", justify="right")
    for length in range(1, longest + 1):
        table.add_column(str(length), justify="right")
    for name in ("round", "trip to a drafter", "plain tokens/s"):
        table.add_column(name, justify="right")
    for rows in counts:
        table.add_row(
            str(rows),
            *(_ms(target.verify_s[rows, length]) for length in range(1, longest + 1)),
            _ms(target.round_s[rows]),
            _ms(target.trip_s[rows]),
            f"{target.plain(rows):.1f}",
        )
    return table


def _pool_table(target: TargetCosts, pool: PoolCosts, counts: list[int]) -> Table:
    where = "beside the target" if pool.is_attached else "remote, one replica"
    table = Table(title=f"Pool {pool.name} ({where})")
    for name in ("k", "accepted at k", "tokens/step", "drafted/step"):
        table.add_column(name, justify="right")
    for rows in counts:
        for name in ("draft ms", "step ms", "speed-up"):
            table.add_column(f"{name}, {rows}", justify="right")
    for k, steps in enumerate(pool.steps, start=1):
        cells = [str(k), f"{steps.by_position[-1]:.3f}", f"{steps.tokens_per_step:.2f}"]
        cells.append(f"{sum(length * share for length, share in steps.lengths.items()):.2f}")
        for rows in counts:
            expected = predict(target, pool, rows, k)
            cells += [_ms(pool.draft_s[rows, k]), _ms(expected.step_s), f"{expected.speedup:.2f}"]
        table.add_row(*cells)
    return table


def _best_table(report: TuneReport, counts: list[int]) -> Table:
    table = Table(title="The best of each pool")
    for name in ("clients", "pool", "k", "replicas", "tokens/s", "speed-up"):
        table.add_column(name, justify="left" if name == "pool" else "right")
    for rows in counts:
        for best in report.best[rows]:
            cells = (str(rows), best.pool, str(best.draft_length), str(best.replicas))
            table.add_row(*cells, f"{best.tokens_per_s:.1f}", f"{best.speedup:.2f}")
    return table


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f}"
