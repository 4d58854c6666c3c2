"""The simulator: its world, figures a person can compute, and the real services beside it."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import simulate as simulation
from benchmarks import virtual
from benchmarks.links import DelayedChannel, Link, Overhead
from benchmarks.loads import drive, engine_of, spec
from benchmarks.processes import BenchError
from benchmarks.setting import DraftCost, Setting, TargetCost
from benchmarks.simulate import Line, Policy, simulate, table, write
from benchmarks.simulation_rows import _overhead
from benchmarks.synthetic import SyntheticTarget, serve_drafter, serve_target
from benchmarks.synthetic_drafter import SyntheticDrafter
from benchmarks.texts import Text
from core.drafter import AheadJob, Draft, DraftJob
from core.rpc import create_channel
from core.types import SamplingParams, VerifyBatch, VerifyOpen, VerifyRow

BASE = Setting(target=TargetCost(base_s=0.02), draft=DraftCost(step_s=0.002), num_new_tokens=40)
R10 = Link(one_way_s=0.005)


def _with(**changes: object) -> Setting:
    return BASE.model_copy(update=changes)


# ---------------------------------------------------------------- the world


def test_time_passes_by_itself_and_only_here() -> None:
    """A wait that is waited for, a thread that does two jobs at once, a clock changed for all."""
    elsewhere: list[float] = []

    def look() -> None:
        elsewhere.append(time.monotonic())

    async def main() -> list[float]:
        threads, loop = virtual.VirtualThreads(1), asyncio.get_running_loop()
        jobs = [loop.run_in_executor(threads, time.sleep, 1000.0) for _ in range(2)]
        jobs.append(asyncio.ensure_future(asyncio.sleep(5000.0)))
        ends = []
        for job in jobs:
            await job
            ends.append(time.perf_counter())
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        return ends

    before = time.monotonic()
    assert virtual.run(main) == [1000.0, 2000.0, 5000.0]
    assert before <= elsewhere[0] <= time.monotonic() < before + 1000


def test_a_world_in_which_nothing_can_happen_ends() -> None:
    """A deadlock that hangs the simulator instead of being told."""
    with pytest.raises(RuntimeError, match="nothing will ever happen"):
        virtual.run(lambda: asyncio.Event().wait())


# ---------------------------------------------------------------- figures a person can compute


def test_plain_decoding_takes_a_forward_per_token() -> None:
    """Time that is lost or counted twice: in a link, in a message, in a forward."""
    plain = _with(num_drafters=0)
    assert simulate(plain).seconds == pytest.approx(40 * 0.02)
    assert simulate(_with(num_drafters=0, target_link=R10)).seconds == pytest.approx(40 * 0.03)
    cost = TargetCost(base_s=0.02, row_s=0.001, token_s=0.0001)
    dear = simulate(_with(num_drafters=0, num_clients=4, num_prompt_tokens=2, target=cost))
    # The first comes with its first request alone, three as soon as that has been verified.
    assert dear.seconds == pytest.approx(0.0212 + 0.02 + 4 * 0.001 + 7 * 0.0001 + 0.0244 * 39, 0.01)
    overhead = Overhead(
        cpu_message_s=0.001, cpu_item_s=0.0001, hop_message_s=0.002, hop_item_s=0.0003
    )
    lossy = simulate(plain, overhead)
    extra = 40 * 2 * (0.001 + 0.0001 + 0.002 + 0.0003) + 0.0004  # the first frame opens, too
    assert lossy.seconds == pytest.approx(40 * 0.02 + extra)


def test_a_perfect_drafter_adds_its_steps_and_its_link() -> None:
    """A draft that is made twice, or for nothing; a plan that is not waited for."""
    pool = {"max_draft_tokens": 4}
    perfect = _with(acceptance=(1.0,), pool=pool, num_new_tokens=41, link=R10)
    result = simulate(perfect)
    assert result.tokens_per_step == pytest.approx(41 / 9)  # the prompt's, and eight of five
    assert result.seconds == pytest.approx(9 * 0.02 + 8 * (4 * 0.002 + 0.01), rel=0.02)
    assert result.hit_rate == 1.0
    assert result.steady_tokens_per_s == pytest.approx(5 / 0.038, rel=0.01)


def test_drafting_ahead_hides_the_link() -> None:
    """Branches that are never picked, or cost what they were to save."""
    sequential = simulate(_with(link=R10, num_new_tokens=200))
    pool = {"max_draft_tokens": 4, "max_branches": 8}
    ahead = simulate(_with(link=R10, num_new_tokens=200, pool=pool))
    assert ahead.texts == sequential.texts
    assert ahead.tokens_per_s > 1.15 * sequential.tokens_per_s


def test_texts_and_runs_do_not_depend_on_the_schedule() -> None:
    """A text that depends on time, or a run that cannot be repeated."""
    base = _with(num_clients=6, num_requests=2)
    reference = simulate(base)
    assert len(reference.texts) == 12 and {len(t) for t in reference.texts.values()} == {40}
    again = simulate(base)
    assert (again.seconds, again.arrivals) == (reference.seconds, reference.arrivals)
    for changes in (
        {"num_drafters": 0},
        {"num_drafters": 3, "link": Link(one_way_s=0.01, jitter_s=0.02)},
        {"temperature": 0.8, "orchestrator": {"max_in_flight": 4}},
        {"acceptance": (0.0,), "pool": {"max_draft_tokens": 8, "max_branches": 4}},
    ):
        assert simulate(base.model_copy(update=changes)).texts == reference.texts


def test_stages_work_side_by_side() -> None:
    """A sharded target that works on one batch only, or on more than it has devices for."""

    async def main() -> list[float]:
        target = SyntheticTarget(_with(target=TargetCost(base_s=0.04, num_stages=4)))
        opens = tuple(VerifyOpen(i, SamplingParams(seed=i), 99) for i in range(5))
        target.complete(target.submit(0, VerifyBatch(0, opens=opens)))
        batches = [VerifyBatch(i, (VerifyRow(i, 0, (7,)),)) for i in range(5)]
        ends = []
        for submitted in [target.submit(0, batch) for batch in batches]:
            await asyncio.to_thread(submitted.wait)
            ends.append(time.perf_counter())
            assert target.complete(submitted).timings.forward_ns == round(ends[-1] * 1e9)
        return ends

    assert virtual.run(main) == pytest.approx([0.04, 0.05, 0.06, 0.07, 0.08])


def test_a_served_target_runs_a_batch_per_stage() -> None:
    """Stages that stand idle because the service lets one batch in at a time."""

    def seconds(num_stages: int) -> float:
        setting = _with(num_drafters=0, target=TargetCost(base_s=0.02, num_stages=num_stages))

        async def world() -> float:
            server = await serve_target(SyntheticTarget(setting))
            connect = lambda _: DelayedChannel(server, Link())  # noqa: E731
            engines = [engine_of(setting, [spec("t", "", "", connect)]) for _ in range(2)]
            for engine in engines:
                await engine.start()
            begin = time.perf_counter()
            await asyncio.gather(*(drive(engine, setting) for engine in engines))
            end = time.perf_counter()
            for engine in engines:
                await engine.stop()
            return end - begin

        return virtual.run(world)

    assert seconds(1) == pytest.approx(2 * 40 * 0.02, rel=0.05)
    assert seconds(2) == pytest.approx(40 * 0.02, rel=0.05)


def test_an_error_in_the_system_is_no_result() -> None:
    """Figures of a system whose drafter fails, taken for those of one that drafts."""

    class Broken(SyntheticDrafter):
        def draft(self, jobs: Sequence[DraftJob]) -> list[Draft]:
            raise ValueError("broken")

    with pytest.raises(BenchError, match="drafter_failed"):
        simulate(BASE, drafter=Broken(BASE))


# ---------------------------------------------------------------- the synthetic parts


def test_a_drafter_is_as_often_right_as_it_is_told() -> None:
    """An acceptance that is another than the one that stands beside the figure."""
    setting = _with(acceptance=(0.9, 0.6), guess_hits=(0.3, 0.5))
    drafter, text = SyntheticDrafter(setting), Text()
    right = [[False] * 3000 for _ in range(3)]
    for p in range(3000):
        for place, token in enumerate(drafter.tokens(5, p, 3)):
            right[place][p] = token == text.token(5, p + place)
    assert [sum(each) / 3000 for each in right] == pytest.approx([0.9, 0.6, 0.6], abs=0.03)
    for count, hits in ((1, 0.3), (2, 0.5)):
        guesses = [drafter.corrections(5, p, count, 0) for p in range(3000)]
        assert {len(each) for each in guesses} == {count}
        found = sum(text.token(5, p) in each for p, each in enumerate(guesses))
        assert found / 3000 == pytest.approx(hits, abs=0.03)
    assert all(
        text.token(5, p) not in drafter.corrections(5, p, 3, text.token(5, p)) for p in (0, 1)
    )


def test_a_branch_says_what_a_draft_would() -> None:
    """A branch with another draft, a guess that is the block's own token, a branch too late."""

    def main() -> None:
        drafter = SyntheticDrafter(BASE)
        prompt, sampling = [1, 2, 3], SamplingParams(seed=4)
        [draft] = drafter.draft([DraftJob(0, prompt, 3, sampling)])
        job = AheadJob(0, prompt, draft.token_ids, 2, sampling, (2, 1, 1, 2), num_guesses=3)
        ahead = drafter.begin_ahead(job)
        for num_finished in (0, 4, 6):
            drafter.advance([ahead])
            assert len(ahead.branches) == num_finished
        assert ahead.is_done
        for branch in ahead.branches:
            tokens = [*prompt, *draft.token_ids[: branch.accepted], branch.token]
            assert branch.token not in draft.token_ids[branch.accepted : branch.accepted + 1]
            [expected] = drafter.draft([DraftJob(1, tokens, 2, sampling)])
            assert branch.draft_token_ids == expected.token_ids
        assert [len(each) for each in ahead.guesses] == [3, 3, 3, 3]
        last = ahead.branches[-1]
        assert ahead.keep(last.accepted, last.token) and not ahead.keep(9, 9)

    virtual.run(lambda: asyncio.to_thread(main))


async def test_real_services_do_what_simulated_ones_do() -> None:
    """A simulation of something else than what runs: other batches, drafts or verdicts."""
    setting = _with(
        target=TargetCost(base_s=0.0),
        draft=DraftCost(step_s=0.0),
        num_clients=1,
        num_new_tokens=60,
        orchestrator={"adaptive_draft_length": False, "draft_wait_ms": 10_000},
        link=Link(one_way_s=0.0005, jitter_s=0.001),
    )
    async with contextlib.AsyncExitStack() as stack:
        target = await serve_target(SyntheticTarget(setting))
        stack.push_async_callback(target.stop)
        drafter = await serve_drafter(setting, SyntheticDrafter(setting))
        stack.push_async_callback(drafter.stop)
        slow = lambda address: DelayedChannel(create_channel(address), setting.link)  # noqa: E731
        specs = [
            spec("target", "", target.address),
            spec("drafter-0", "synthetic", drafter.address, slow),
        ]
        engine = engine_of(setting, specs)
        stack.push_async_callback(engine.stop)
        await engine.start()
        real = await drive(engine, setting)
    simulated = await asyncio.to_thread(simulate, setting)
    assert real.texts == simulated.texts
    for side in (real, simulated):
        assert side.hit_rate == 1.0
    [theirs], [ours] = real.ends, simulated.ends
    assert ours.stats == theirs.stats


# ---------------------------------------------------------------- rows and table


def test_the_cost_of_messages_is_found_again() -> None:
    """A calibration that does not give back what was put in."""
    known = Overhead(cpu_message_s=0.001, cpu_item_s=0.0001, hop_message_s=0.002, hop_item_s=0.0003)
    per_round = []
    for num_clients in (1, 8):
        cpu_s = 2 * (known.cpu_message_s + num_clients * known.cpu_item_s)
        hop_s = 2 * (known.hop_message_s + num_clients * known.hop_item_s)
        per_round.append((cpu_s + hop_s, cpu_s))
    found = _overhead(*zip(*per_round, strict=True))
    assert found.model_dump() == pytest.approx(known.model_dump())


def test_the_best_policy_is_the_fastest_with_the_fewest_drafters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search that stops short, a table that names another policy than the best."""
    speeds = {2: 100.0, 4: 130.0, 8: 150.0}

    def speed(base: Setting, overhead: Overhead, num_drafters: int, policy: Policy) -> float:
        gain = speeds.get(policy.length, 90.0) - 20 * abs(policy.in_flight - 4)
        return gain + (30 if num_drafters >= 4 else 0) * (policy.length > 0)

    monkeypatch.setattr(simulation, "tokens_per_s", speed)
    line = simulation.best_line(_with(num_clients=8, link=R10))
    assert line.policies[2] == Policy(8, 4) and line.policies[0] == Policy(0, 4)
    assert line.num_drafters == 4 and line.speeds[4] == 180
    assert "2.00 of plain" in table([line]) and "4 in flight" in table([line])
    document = tmp_path / "simulator.md"
    document.write_text("before\n<!-- table -->\nold\n<!-- end -->\nafter\n")
    write(table([line]), document)
    assert document.read_text().startswith("before\n<!-- table -->\n| clients |")
    assert document.read_text().endswith("<!-- end -->\nafter\n") and "old" not in table([line])
    slow = Line(1, 0.02, {0: 10.0, 1: 9.0}, {0: Policy(0, 1), 1: Policy(2, 1)})
    assert slow.num_drafters == 0 and "no drafts" in table([slow])
