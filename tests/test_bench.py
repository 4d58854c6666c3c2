"""The benchmark's harness over tiny checkpoints: figures are there and honest."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import kind_rows, overhead_rows, simulation_rows, system_rows, tune_rows
from benchmarks.bench import ROWS, run, select
from benchmarks.context import QUICK, Bench
from benchmarks.processes import BenchError, Process
from benchmarks.prompts import CHAT, GROUNDED, MIXED
from benchmarks.registry import Measurement, Outcome, Row, row
from benchmarks.report import machine, print_table, write_json
from benchmarks.stack import Block, Generation
from core.config import Config, parse_config
from core.tokenizer import Tokenizer
from protos import generation_pb2
from tests.tiny_prediction import save_prediction_layer

TINY = {"dtype": "float32", "device_map": "cpu", "max_sequences": 8, "max_length": 256}


@pytest.fixture
def config(tiny_llama: Path, tmp_path: Path) -> Config:
    """Each kind of pool; the small model is the target itself, so that drafts are accepted."""
    layer = {"model": str(save_prediction_layer(tiny_llama, tmp_path / "layer"))}
    beside = {"attached": True, "max_draft_tokens": 5, "model": layer}
    return parse_config(
        {
            "target": {"model": str(tiny_llama), **TINY, "max_batch_tokens": 64},
            "drafter_pools": [
                {"name": "lookup", "kind": "ngram", "max_draft_tokens": 3},
                {
                    "name": "small",
                    "kind": "draft_model",
                    "max_draft_tokens": 2,
                    "model": {"model": str(tiny_llama), **TINY},
                },
                {"name": "layer", "kind": "mtp_layers", **beside},
                {"name": "both", "kind": "hybrid", "options": {"kind": "mtp_layers"}, **beside},
            ],
        }
    )


def _console() -> Console:
    return Console(file=io.StringIO(), width=160)


async def test_every_row_is_measured_and_written(config: Config, tmp_path: Path) -> None:
    """A row that breaks, a side that does other work, fp32 texts that differ, or a key missing."""
    # These start services each.
    alone = (*kind_rows.ROWS, *tune_rows.ROWS, *simulation_rows.ROWS, *system_rows.ROWS)
    # What nobody trained is never accepted, so this one row has nothing to show here.
    rows = [each for each in ROWS if each not in alone and each.name != "drafter_acceptance"]
    outcomes = await run(config, rows, QUICK, _console())
    assert [outcome.error for outcome in outcomes] == [""] * len(rows)
    write_json(outcomes, machine(), tmp_path / "build" / "bench.json")
    written = json.loads((tmp_path / "build" / "bench.json").read_text())
    assert {"cpu", "cores", "torch", "transformers"} <= written["machine"].keys()
    assert [each["name"] for each in written["rows"]] == [each.name for each in rows]
    for each in written["rows"]:
        assert each["ours"] > 0 and each["peer"] > 0
        assert each["ratio"] == pytest.approx(each["ours"] / each["peer"])
        assert each["spread"][0] <= each["spread"][1]
        assert (each["mark"] is None) == (each["holds"] is None)
    equal = written["rows"][[r.name for r in rows].index("greedy_texts_equal")]
    assert equal["ours"] == equal["peer"] == len(MIXED)
    console = _console()
    print_table(outcomes, machine(), console)
    assert isinstance(console.file, io.StringIO)
    assert all(each.name in console.file.getvalue() for each in rows)


@pytest.mark.slow
async def test_every_kind_drafts_as_its_peer(config: Config) -> None:
    """A kind whose checkpoints or peer are set up wrong would break in the middle of a bench."""
    rows = [each for each in kind_rows.ROWS if each.name.endswith("_tiny")]
    for outcome in await run(config, rows, QUICK, _console()):
        assert outcome.error == "" and outcome.measurement is not None
        assert "ours" in outcome.measurement.notes[0]


def test_a_ratio_is_of_medians_and_meets_its_mark_from_the_right_side() -> None:
    """A mean instead of a median, a spread across pairs, a mark read the wrong way round."""
    measured = Measurement([1.0, 9.0, 2.0], [2.0, 3.0, 4.0])
    assert measured.ratio == pytest.approx(2 / 3)
    assert measured.spread == (0.5, 3.0)

    async def nothing(bench: Bench) -> Measurement:
        return measured

    lower, higher = row("a", "ms", at_most=0.7)(nothing), row("b", "t/s", at_least=0.7)(nothing)
    assert Outcome(lower, measured).holds is True
    assert Outcome(higher, measured).holds is False
    assert Outcome(row("c", "ms")(nothing), measured).holds is None
    for low, high, holds in ((0.6, 0.7, True), (0.67, 0.7, False), (0.5, 0.66, False)):
        between = row("d", "x", at_least=low, at_most=high)(nothing)
        assert Outcome(between, measured).holds is holds
    assert Outcome(lower, None, "it broke").holds is False
    assert Outcome(lower, None, "it broke").as_json()["notes"] == ["it broke"]


async def test_a_row_that_fails_leaves_the_others(config: Config) -> None:
    """One broken row that ends the whole bench, or is passed over in silence."""

    async def broken(bench: Bench) -> Measurement:
        raise BenchError("no luck")

    async def sound(bench: Bench) -> Measurement:
        return Measurement([1.0], [1.0])

    rows = [Row("broken", "ms", broken, at_most=1.0), Row("sound", "ms", sound, at_most=1.0)]
    outcomes = await run(config, rows, QUICK, _console())
    assert [(each.error, each.holds) for each in outcomes] == [("no luck", False), ("", True)]


def test_rows_are_chosen_by_pattern() -> None:
    """A pattern that chooses nothing must say so, with the names there are."""
    assert len(select("")) == len(ROWS)
    assert [each.name for each in select("ngram_8_clients_")] == [
        "ngram_8_clients_mixed",
        "ngram_8_clients_grounded",
    ]
    assert [each.name for each in select("engine_b?")] == ["engine_b8_ctx1024", "engine_b1"]
    with pytest.raises(BenchError, match="engine_b1"):
        select("nonsense")


def test_prompts_are_new_each_time(config: Config) -> None:
    """Two runs with one prompt would measure our prefix reuse against a peer that has none."""
    bench = Bench(config, QUICK, lambda line: None)
    first, second = bench.fresh(CHAT), bench.fresh(CHAT)
    assert len({tuple(ids[:12]) for ids in first + second}) == len(first + second)
    tokenizer = Tokenizer.load(config.target.model)
    texts = [tokenizer.decode(ids) for ids in first]
    assert all("number" in text for text in texts)
    assert len(CHAT) == len(GROUNDED) == len(MIXED) == 8


def test_unexplained_drafts_are_refused() -> None:
    """Comparing a round with a forward of another shape would make the overhead look small."""
    finished = generation_pb2.Finished(
        speculation=generation_pb2.SpeculationStats(num_draft_tokens=5)
    )
    blocks = (Block(0.0, (1,)), Block(0.1, (2,)), Block(0.2, (3,)))
    with pytest.raises(BenchError, match="5 draft tokens"):
        overhead_rows._rounds([7, 8], Generation(blocks, finished), None, 3)
    finished.speculation.num_draft_tokens = 0
    rounds = overhead_rows._rounds([7, 8], Generation(blocks, finished), None, 3)
    assert rounds == [(2, [1], 1), (3, [2], 1)]


async def test_a_child_that_dies_is_reported_with_its_last_words() -> None:
    """A bench that hangs, or says only that something went wrong."""
    process = await Process.start("doomed", "benchmarks.service", "orchestrator", core=0)
    try:
        await process.say("no json")
        with pytest.raises(BenchError, match=r"doomed ended; .*\n(.*\n)*.*[Ii]nvalid JSON"):
            await process.hear()
    finally:
        await process.stop()
