"""`forerun tune`: what it counts is what the stack does, for every kind of drafter; its arithmetic
by hand; the command on a tiny target."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from core.config import DrafterPoolConfig, ModelConfig
from core.errors import ConfigError, InvalidRequestError, ModelError
from core.model import RaggedModel
from drafter_service.distil.generate import Text
from drafter_service.distil.measure import acceptance, matches
from orchestrator.cli import app
from orchestrator.tune_cli import parse_drafter
from orchestrator.tuning import run as tuning
from orchestrator.tuning.prediction import (
    Answer,
    PoolCosts,
    Steps,
    TargetCosts,
    best_of_pool,
    count_steps,
    predict,
)
from orchestrator.tuning.replay import NoDrafts, Options, RemoteSource, replay
from orchestrator.tuning.run import TuneOptions, tune
from orchestrator.tuning.tables import print_report
from tests.harness import MODEL, pool, serving
from tests.policy import make_request
from tests.test_kinds import KINDS, PROMPTS, quiet_library, setting, targets
from tests.tiny_models import TinyFactory, greedy_reference
from verifier_service.engine import VerifierEngine

__all__ = ["quiet_library", "targets"]  # fixtures
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def engine(tiny: TinyFactory) -> VerifierEngine:
    """A target that never ends a text."""
    path = tiny("llama", eos_token_id=300)
    return VerifierEngine(RaggedModel.load(ModelConfig(model=str(path), **MODEL)))


# ------------------------------------------------------------ counting and predicting


def test_steps_by_hand() -> None:
    """Off by one anywhere, and every expected speed-up is wrong.

    Steps at k=2: behind 1: [2, 9] one right, commits 2 3; behind 3: [] commits 4; behind 4:
    [5, 6] both right, commits 5 6 7; the drafts of at most 8 tokens leave room for none behind 7.
    """
    drafts = ((2, 9, 0), (7,), (), (5, 6, 0), (1,), (1,), (8,))
    answer = Answer((0,), (1, 2, 3, 4, 5, 6, 7, 8), drafts)
    steps = count_steps([answer], 2, 8)
    assert steps.tokens_per_step == 7 / 4
    assert steps.by_position == (2 / 2, 1 / 2)
    assert steps.lengths == {0: 2 / 4, 2: 2 / 4}
    one = count_steps([answer, answer], 1, 8)
    assert one.tokens_per_step == 7 / 5  # 2 3, 4, 5 6, 7, 8
    assert one.by_position == (2 / 3,)


def costs() -> tuple[TargetCosts, PoolCosts]:
    """A target that takes 10 ms for a token, 2 more for each further one, and 8 rows at twice the
    price; a drafter of 3 ms a token and row that is right every other time."""
    verify = {(r, n): (0.008 + 0.002 * n) * (2 if r == 8 else 1) for r in (1, 8) for n in range(4)}
    target = TargetCosts(verify, {1: 0.001, 8: 0.002}, {1: 0.0005, 8: 0.001})
    steps = [Steps(1.5, (0.5,), {1: 1.0}), Steps(1.75, (0.5, 0.5), {0: 0.1, 2: 0.9})]
    drafting = {(r, k): 0.003 * r * k for r in (1, 8) for k in (1, 2)}
    return target, PoolCosts("small", False, steps, drafting)


def test_a_prediction_by_hand() -> None:
    """A part that is forgotten, counted twice, or of the wrong shape."""
    target, remote = costs()
    assert target.plain(1) == pytest.approx(1 / 0.011)
    two = predict(target, remote, 1, 2)
    assert two.step_s == pytest.approx(0.1 * 0.010 + 0.9 * 0.014 + 0.001 + 0.006 + 0.0005)
    assert two.speedup == pytest.approx(1.75 / two.step_s * 0.011)
    attached = predict(target, PoolCosts("near", True, remote.steps, remote.draft_s), 1, 2)
    assert attached.step_s == pytest.approx(two.step_s - 0.0005)
    eight = predict(target, remote, 8, 1, replicas=3)  # three rows for the busiest
    assert eight.step_s == pytest.approx(0.024 + 0.002 + 0.001 + 3 * 0.003)
    assert eight.tokens_per_s == pytest.approx(8 * 1.5 / eight.step_s)


def test_replicas_are_as_few_as_keep_up() -> None:
    """One drafter too few starves the target, one too many is paid for nothing."""
    target, remote = costs()
    best = best_of_pool(target, remote, 8)
    per_replica = {n: predict(target, remote, 8, best.draft_length, n) for n in range(1, 9)}
    assert best == per_replica[best.replicas]
    assert best.tokens_per_s >= 0.97 * per_replica[8].tokens_per_s
    assert all(per_replica[n].tokens_per_s < best.tokens_per_s for n in range(1, best.replicas))
    free = PoolCosts("free", False, remote.steps, dict.fromkeys(remote.draft_s, 0.0))
    assert best_of_pool(target, free, 8).replicas == 1
    attached = PoolCosts("near", True, remote.steps, remote.draft_s)
    assert best_of_pool(target, attached, 8).replicas == 1


# ------------------------------------------------------------ what is counted is what happens


def test_answers_are_the_targets_and_drafts_stand_where_they_belong(
    engine: VerifierEngine, tiny: TinyFactory
) -> None:
    """The target as its own drafter is right everywhere: a draft shifted by one never is."""
    path = tiny("llama", eos_token_id=300)
    drafter = tuning.create_drafter(pool("self", "draft_model", path, 3))
    seen = replay(engine, RemoteSource(drafter, 3), PROMPTS, Options(3, 3, NEW_TOKENS))
    for prompt, answer in zip(PROMPTS, seen.answers, strict=True):
        assert list(answer.token_ids) == greedy_reference(path, prompt, NEW_TOKENS)
        assert answer.prompt_ids == prompt and len(answer.drafts) == NEW_TOKENS - 1
        for place, draft in enumerate(answer.drafts, start=1):
            follows = answer.token_ids[place : place + 3]
            assert len(draft) == 3 and draft[: len(follows)] == follows
    stop = seen.answers[0].token_ids[5]
    short = replay(engine, NoDrafts(), PROMPTS[:1], Options(1, 3, NEW_TOKENS, {stop})).answers[0]
    assert short.token_ids == seen.answers[0].token_ids[: 1 + short.token_ids.index(stop)]
    assert engine.num_open == 0


def test_counts_as_distilling_does(engine: VerifierEngine, tiny: TinyFactory) -> None:
    """Two ways to the same acceptance: one job after the other, and the drafter's engine."""
    path = tiny("llama", seed=7, num_hidden_layers=1)
    drafter = tuning.create_drafter(pool("small", "draft_model", path, 3))
    answers = replay(engine, RemoteSource(drafter, 3), PROMPTS, Options(2, 3, 40)).answers
    model = RaggedModel.load(ModelConfig(model=str(path), **MODEL))
    texts = [Text(list(a.prompt_ids), list(a.token_ids), None, None) for a in answers]
    expected = acceptance(matches(model, drafter, texts, 3), 3)
    steps = count_steps(answers, 3, 1000)
    assert steps.tokens_per_step == pytest.approx(expected.tokens_per_step)
    # Where an answer ends, a draft has nothing to be held against: both leave it out.
    assert steps.by_position == pytest.approx(expected.by_position)


@pytest.mark.parametrize(("kind", "is_attached"), KINDS)
async def test_the_stack_takes_the_steps_that_were_counted(kind, is_attached, targets):
    """Every kind, features and all: as many verify steps in the stack as in the replay."""
    target, config = setting(kind, is_attached, targets)
    model = RaggedModel.load(ModelConfig(model=str(target), **MODEL))
    with tuning._drafting(model, config) as (verifier, source):
        answers = replay(verifier, source, PROMPTS, Options(2, 3, NEW_TOKENS)).answers
    async with serving(target, [config], adaptive_draft_length=False) as stack:
        for k in (1, 3):
            runs = [
                make_request(p, NEW_TOKENS, max_draft_tokens=k, request_id=f"{k} {n}")
                for n, p in enumerate(PROMPTS)
            ]
            ends = await asyncio.gather(*(stack.run(each) for each in runs))
            steps = sum(end.stats.num_verify_steps - 1 for _, _, end in ends)
            expected = count_steps(answers, k, NEW_TOKENS)
            assert [list(a.token_ids) for a in answers] == [ids for ids, _, _ in ends]
            assert expected.tokens_per_step == pytest.approx(
                len(PROMPTS) * (NEW_TOKENS - 1) / steps
            )


# ------------------------------------------------------------ the whole, and the command


@pytest.fixture
def target(tiny: TinyFactory) -> Path:
    return tiny("llama", num_hidden_layers=4)


def test_everything_is_measured_and_the_best_comes_first(target: Path) -> None:
    """A shape, a pool or a number of clients that is left out; a recommendation that is not the
    best of its own evidence."""
    pools = [
        pool("lookup", "ngram"),
        pool("early", "early_exit", attached=True, options={"num_layers": 3}),
        pool("self", "draft_model", target),
    ]
    model = ModelConfig(model=str(target), **MODEL)
    said: list[str] = []
    prompts = ["tell me of boats", "and of the sea"]
    options = TuneOptions(model, pools, max_new_tokens=12, longest=2, clients=2, ignore_eos=True)
    report = tune(options, prompts, said.append)
    assert set(report.target.verify_s) == {(r, n) for r in (1, 2) for n in (1, 2, 3)}
    assert min(*report.target.verify_s.values(), *report.target.round_s.values()) > 0
    assert set(report.target.trip_s) == set(report.best) == {1, 2}
    lookup, early, itself = report.pools
    assert set(itself.draft_s) == set(early.draft_s) == {(r, k) for r in (1, 2) for k in (1, 2)}
    assert 0 < lookup.draft_s[1, 1] < itself.draft_s[1, 1]
    assert itself.steps[1].by_position == (1.0, 1.0)
    for rows, best in report.best.items():
        assert {each.pool for each in best} == {"lookup", "early", "self"}
        assert best[0].tokens_per_s == max(each.tokens_per_s for each in best)
        assert all(each.rows == rows for each in best)
    assert sum("loading" in line for line in said) == 4
    console = Console(record=True, width=150)
    print_report(report, pools, console)
    text = console.export_text()
    assert all(f"Pool {name}" in text for name in ("lookup", "early", "self"))
    assert text.count("expected speed-up") + text.count("no drafter") == 2


def test_what_does_not_fit_is_told(target: Path, tiny: TinyFactory) -> None:
    """A prompt without room, a drafter of another vocabulary, a kind that lacks its model."""
    model = ModelConfig(model=str(target), **MODEL)
    with pytest.raises(InvalidRequestError, match=r"prompts: the longest has 301 tokens.*256"):
        tune(TuneOptions(model, [pool("a", "ngram")]), [[7] * 301])
    other = tiny("llama", seed=3, tokenizer="other")
    short = {"max_new_tokens": 4, "longest": 1, "clients": 1}
    with pytest.raises(ConfigError, match=r"drafter_pools\.b: .*tokenizers differ"):
        tune(TuneOptions(model, [pool("b", "draft_model", other)], **short), [[7, 8]])
    with pytest.raises(ConfigError, match=r"drafter_pools\.c\.model"):
        tune(TuneOptions(model, [pool("c", "draft_model")], **short), [[7, 8]])


def test_a_drafter_that_gives_up_is_an_error(engine: VerifierEngine, tiny: TinyFactory) -> None:
    """Silence would read as "never accepted"."""
    config = pool("small", "draft_model", tiny("llama", eos_token_id=300), 2)
    short = config.model.model_copy(update={"max_length": 12})
    drafter = tuning.create_drafter(config.model_copy(update={"model": short}))
    with pytest.raises(ModelError, match="context is 12"):
        replay(engine, RemoteSource(drafter, 2), PROMPTS[:1], Options(1, 2, NEW_TOKENS))
    engine.close_stream(0)


@pytest.fixture
def prompts_file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "prompts.txt"
    path.write_text("tell me of boats\nand of the sea\n")
    yield path


def test_the_command_recommends(target: Path, prompts_file: Path) -> None:
    """From the command line to the tables, for a drafter with a model and options."""
    arguments = ["tune", "--target", str(target), "--dtype", "float32", "--threads", "1"]
    arguments += ["--drafter", "ngram:name=lookup,max_ngram=3", "--prompts", str(prompts_file)]
    arguments += ["--drafter", f"early_exit:model={target},num_layers=2"]
    arguments += ["--clients", "1", "--longest", "1", "--max-new-tokens", "8"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "Pool lookup (remote" in result.output and "Pool early_exit" in result.output
    assert "speed-up" in result.output


def test_drafters_are_read_as_they_would_stand_in_the_config() -> None:
    """A number taken for a string, or an option for a key of the pool."""
    held = {"dtype": "float32"}
    assert parse_drafter("ngram", held) == {"name": "ngram", "kind": "ngram", "options": {}}
    spec = "hybrid:attached=true,model=embedded:x,name=h,min_match=2,drafter.method=slem"
    assert parse_drafter(spec, held) == {
        "name": "h",
        "kind": "hybrid",
        "attached": True,
        "model": {"model": "embedded:x", "dtype": "float32"},
        "options": {"min_match": 2, "drafter": {"method": "slem"}},
    }
    assert DrafterPoolConfig.model_validate(parse_drafter(spec, held)).attached
    for wrong in ("ngram:max_ngram", "ngram:a=1,a=2"):
        with pytest.raises(ConfigError, match="--drafter ngram"):
            parse_drafter(wrong, held)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either"),
        (["--target", "x", "--config", "y"], "give either"),
        (["--config", "y", "--drafter", "ngram"], "give either"),
        (["--target", "x"], "no drafter"),
        (["--target", "x", "--drafter", "ngram:attached=7"], "attached"),
    ],
)
def test_the_command_wants_one_source_of_settings(arguments: list[str], message: str) -> None:
    """Two, or half of one, would measure something else than was meant."""
    result = CliRunner().invoke(app, ["tune", *arguments])
    assert isinstance(result.exception, ConfigError) and message in str(result.exception)
