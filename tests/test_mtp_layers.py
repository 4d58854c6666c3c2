"""Prediction layers as a drafter: its drafts equal transformers' own, attached and remote.

Checkpoints are tiny ones of two families in the real format, with one to three prediction layers.
"""

import warnings
from pathlib import Path

import pytest
import torch

from core.config import DrafterPoolConfig, ModelConfig
from core.drafter import Draft, Drafter, DraftJob, MissingFeaturesError, TargetFeatures
from core.errors import ConfigError
from core.features import FeatureTap
from core.model import RaggedModel, Row
from core.types import Rule, SamplingParams
from drafter_service.drafters import attach_drafter, create_drafter
from tests.candidates import Round, accept_counts, record_rounds
from tests.harness import MODEL, serving
from tests.policy import make_request
from tests.tiny_models import load_reference
from tests.tiny_mtp import CLASSES, at_layer, save_tiny_mtp

GREEDY = SamplingParams()
PROMPTS = [[(11 * i + 5 * s) % 250 for i in range(3 + 6 * s)] for s in range(6)]
LIMITS = {**MODEL, "max_batch_tokens": 16}  # so that prompts are read in parts


@pytest.fixture(scope="module", params=[(kind, n) for kind in CLASSES for n in (1, 2, 3)], ids=str)
def checkpoint(request, tmp_path_factory) -> tuple[str, int, Path, Path]:
    """(kind, prediction layers, a tame checkpoint, a wild one)."""
    kind, count = request.param
    paths = [tmp_path_factory.mktemp(f"{kind}-{count}") for _ in range(2)]
    with warnings.catch_warnings(), at_layer(kind):
        warnings.simplefilter("ignore")
        for path, is_tame in zip(paths, (True, False), strict=True):
            save_tiny_mtp(kind, path, count, is_tame, eos_token_id=300)
        yield kind, count, *paths


class Pair:
    """A target beside a drafter, which is told of every token the target runs."""

    def __init__(self, target: RaggedModel, drafter: Drafter) -> None:
        self.target, self.drafter = target, drafter
        self.tap = FeatureTap(target, drafter.needs)

    def features(self, sequence: int, tokens: list[int]) -> TargetFeatures:
        """Run what the target has not run of all tokens but the last."""
        if not self.target.cache.is_open(sequence):
            self.target.open(sequence)
        told = self.target.length(sequence)
        parts = []
        for start in range(told, len(tokens) - 1, 16):
            part = tokens[start : min(start + 16, len(tokens) - 1)]
            self.target.forward([Row(sequence, start, part, 0)])
            parts += self.tap.read([sequence])
        return TargetFeatures(told, torch.cat(parts))

    def job(self, sequence: int, tokens: list[int], wanted: int, **settings) -> DraftJob:
        sampling = SamplingParams(**settings)
        return DraftJob(
            sequence, tokens, wanted, sampling, features=self.features(sequence, tokens)
        )

    def close(self, sequence: int) -> None:
        self.drafter.close(sequence)
        self.target.truncate(sequence, 0)
        self.target.close(sequence)


def config(path: Path, **settings) -> DrafterPoolConfig:
    model = ModelConfig(model=str(path), **LIMITS)
    return DrafterPoolConfig(name="mtp", kind="mtp_layers", model=model, **settings)


def pairs(path: Path) -> list[Pair]:
    """An attached and a remote drafter, with a target each."""
    targets = [RaggedModel.load(ModelConfig(model=str(path), **LIMITS)) for _ in range(2)]
    attached = attach_drafter(config(path, attached=True), targets[0])
    return [Pair(targets[0], attached), Pair(targets[1], create_drafter(config(path)))]


def rounds_of(path: Path, prompts: list[list[int]], length: int = 24) -> list[list[Round]]:
    model = load_reference(path)
    return [record_rounds(model, prompt, length, use_mtp=True)[1:] for prompt in prompts]


def test_drafts_are_transformers_own(checkpoint):
    """A wrong position, hidden state or cut of the cache drafts something else in some round."""
    _, count, tame, wild = checkpoint
    counts: list[int] = []
    for path in (tame, wild):
        every = rounds_of(path, PROMPTS[:4])
        counts += [n for each in every for n in accept_counts(each)]
        for pair in pairs(path):
            for sequence, recorded in enumerate(every):
                for each in recorded:
                    [draft] = pair.drafter.draft([pair.job(sequence, each.prefix, count)])
                    assert list(draft.token_ids) == each.draft
                pair.close(sequence)
    assert {0, min(count, 2)} <= set(counts), "the reference must accept and reject"


def test_rows_of_a_batch_do_not_see_each_other(checkpoint):
    """Six ragged rows, sampled ones and short wishes among them, draft what each drafts alone."""
    _, count, tame, _ = checkpoint
    for pair in pairs(tame):
        results: list[list[Draft]] = []
        for is_alone in (False, True):
            jobs = []
            for i, prompt in enumerate(PROMPTS):
                sampled = {"temperature": 0.9, "seed": 3, "rule": Rule.COUPLED} if i % 2 else {}
                if i == 5:
                    sampled["rule"] = Rule.REJECTION
                jobs.append(pair.job(10 * is_alone + i, prompt, 1 + i % count, **sampled))
            batches = [[job] for job in jobs] if is_alone else [jobs]
            results.append([draft for batch in batches for draft in pair.drafter.draft(batch)])
            for job in jobs:
                pair.close(job.sequence)
        together, alone = results
        assert [d.token_ids for d in together] == [d.token_ids for d in alone]
        assert together[5].distributions and not together[1].distributions


def test_features_in_any_portions_draft_the_same(checkpoint):
    """A prompt told in chunks, or a wish shorter than the layers, would leave a wrong cache."""
    _, count, tame, _ = checkpoint
    pair = pairs(tame)[0]
    tokens = PROMPTS[5]
    expected = pair.drafter.draft([pair.job(0, tokens, count)])
    values = pair.features(1, tokens).values
    start = 0
    for size in (1, 2, 7, 9):
        part = TargetFeatures(start, values[start : start + size])
        start += size
        known = tokens[: start + (size % 2)]  # the next token may be unknown yet
        pair.drafter.draft([DraftJob(1, known, 0, GREEDY, features=part)])
    rest = TargetFeatures(start, values[start:])
    pair.drafter.draft([DraftJob(1, tokens, 1, GREEDY, features=rest)])
    again = DraftJob(1, tokens, count, GREEDY)
    assert pair.drafter.draft([again]) == pair.drafter.draft([again]) == expected
    for position in (3, len(tokens)):
        gap = TargetFeatures(position, values[:1])
        with pytest.raises(MissingFeaturesError):
            pair.drafter.draft([DraftJob(1, [*tokens, 1], 1, GREEDY, features=gap)])


@pytest.mark.parametrize("is_attached", [True, False])
async def test_the_text_is_the_targets_own(checkpoint, is_attached):
    """Through the whole system: greedy and seeded text with and without the drafter."""
    _, count, tame, _ = checkpoint
    pool = config(tame, attached=is_attached).model_copy(update={"max_draft_tokens": count})
    sampled = SamplingParams(temperature=0.9, seed=3, rule=Rule.COUPLED)
    async with serving(tame, [pool], adaptive_draft_length=False) as stack:
        for sampling in (GREEDY, sampled):
            texts = []
            for enabled in (False, True):
                run = make_request(tuple(PROMPTS[3]), 24, sampling=sampling, enabled=enabled)
                texts.append(await stack.run(run))
            assert texts[0][0] == texts[1][0]
            assert texts[1][2].stats.num_draft_tokens > 0
            assert not texts[1][2].stats.fallback_steps["drafter_error"]


def test_a_target_without_them_is_named(tiny_llama):
    """It would be found out at the first request."""
    target = RaggedModel.load(ModelConfig(model=str(tiny_llama), **MODEL))
    with pytest.raises(ConfigError, match=r"'mtp_layers' does not fit the target: .*\(llama\) has"):
        attach_drafter(config(tiny_llama, attached=True), target)
    with pytest.raises(ConfigError, match=r"mtp\.model: kind 'mtp_layers': .*no prediction layers"):
        create_drafter(config(tiny_llama))
    with pytest.raises(ConfigError, match=r"needs the target's checkpoint"):
        create_drafter(DrafterPoolConfig(name="mtp", kind="mtp_layers"))
