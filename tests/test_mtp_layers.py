"""Prediction layers as a drafter: its drafts equal transformers' own, attached and remote.

Checkpoints are tiny ones of two families in the real format, with one to three prediction layers.
What the option `repeat_last_layer` adds is compared with the library's own layers run by hand.
"""

import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from core.config import DrafterPoolConfig, ModelConfig
from core.drafter import Draft, Drafter, DraftJob, MissingFeaturesError, TargetFeatures
from core.errors import ConfigError, InvalidRequestError
from core.features import FeatureTap
from core.model import RaggedModel, Row
from core.mtp import MtpLayers
from core.types import Rule, SamplingParams
from drafter_service.drafters import attach_drafter, create_drafter
from tests.candidates import Round, accept_counts, record_rounds
from tests.harness import MODEL, serving
from tests.policy import make_request
from tests.tiny_models import load_reference
from tests.tiny_mtp import NUM_LAYERS, at_layer, save_tiny_mtp

GREEDY = SamplingParams()
PROMPTS = [[(11 * i + 5 * s) % 250 for i in range(3 + 6 * s)] for s in range(6)]
SHAPES = [("deepseek_v3", 1), ("deepseek_v3", 2), ("glm4_moe", 1), ("glm4_moe", 3)]
LIMITS = {**MODEL, "max_batch_tokens": 16}  # so that prompts are read in parts


@pytest.fixture(scope="module", params=SHAPES, ids=str)
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


def pairs(path: Path, **options) -> list[Pair]:
    """An attached and a remote drafter, with a target each."""
    targets = [RaggedModel.load(ModelConfig(model=str(path), **LIMITS)) for _ in range(2)]
    attached = attach_drafter(config(path, attached=True, options=options), targets[0])
    remote = create_drafter(config(path, options=options))
    return [Pair(targets[0], attached), Pair(targets[1], remote)]


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


def test_a_round_runs_each_layer_once(checkpoint, monkeypatch):
    """Reading what was accepted apart from drafting would double the price of a draft."""
    _, count, tame, _ = checkpoint
    pair = pairs(tame)[0]
    tokens = PROMPTS[1]
    pair.drafter.draft([pair.job(0, tokens, count)])
    calls = []
    run = MtpLayers.run

    def counted(self, depth, rows):
        calls.append((depth, sum(len(row.hidden) for row in rows)))
        return run(self, depth, rows)

    monkeypatch.setattr(MtpLayers, "run", counted)
    for num_new, wanted in ((1, count), (3, 1), (count + 1, count)):
        calls.clear()
        tokens = [*tokens, *range(num_new)]
        pair.drafter.draft([pair.job(0, tokens, wanted)])
        assert calls == [(depth, num_new + count - 1) for depth in range(count)]


def repeated_by_hand(path: Path, tokens: list[int], num_draft_tokens: int) -> list[int]:
    """The library's layers, each once over everything, then the last again token by token."""
    model = load_reference(path)
    layers = MtpModel.from_pretrained(model, device_map={"": "cpu"})
    cache = MtpCache(config=model.config.get_mtp_config())
    with torch.no_grad():
        ids = torch.tensor([tokens])
        hidden = model.model(ids[:, :-1]).last_hidden_state
        ids, positions = ids[:, 1:], torch.arange(1, ids.shape[1])[None]
        drafted: list[int] = []
        while len(drafted) < num_draft_tokens:
            depth = min(len(drafted), layers.num_mtp_layers - 1)
            hidden = layers.forward_layer(depth, hidden, positions, cache, input_ids=ids)
            drafted.append(int(layers._project_to_logits(hidden[:, -1:]).argmax()))
            ids = torch.cat([ids[:, 1:], torch.tensor([drafted[-1:]])], dim=1)
            positions = positions + 1
            if len(drafted) >= layers.num_mtp_layers:
                ids, hidden, positions = ids[:, -1:], hidden[:, -1:], positions[:, -1:]
    return drafted


def test_the_last_layer_repeats(checkpoint):
    """Drafts beyond the layers would go wrong, or leave entries for drafts in the cache."""
    _, _, tame, wild = checkpoint
    for path in (tame, wild):
        for pair in pairs(path, repeat_last_layer=True):
            jobs, expected = [], []
            for _ in range(2):  # the second round begins with what the first has left
                tokens = [[*p, *range(len(jobs) // 2)] for p in PROMPTS[:3]]
                jobs = [pair.job(i, each, 4 + i) for i, each in enumerate(tokens)]
                expected = [repeated_by_hand(path, t, 4 + i) for i, t in enumerate(tokens)]
                drafts = pair.drafter.draft(jobs)
                assert [list(draft.token_ids) for draft in drafts] == expected


def test_a_remote_drafter_reads_no_decoder_layers(checkpoint, tmp_path):
    """It would need as much memory as the target."""
    _, count, tame, _ = checkpoint
    shutil.copytree(tame, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    needed = {
        name: tensor
        for name, tensor in tensors.items()
        if not any(f".layers.{layer}." in name for layer in range(NUM_LAYERS))
    }
    assert len(needed) < len(tensors)
    save_file(needed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    pair = pairs(tame)[1]
    job = pair.job(0, PROMPTS[3], count)
    assert create_drafter(config(tmp_path)).draft([job]) == pair.drafter.draft([job])


def test_bf16_is_the_same_attached_and_remote(checkpoint):
    """Weights laid out for bf16, or a head in another type, would draft something else."""
    _, count, tame, _ = checkpoint
    settings = {**LIMITS, "dtype": "bfloat16"}
    model = ModelConfig(model=str(tame), **settings)
    target = RaggedModel.load(model)
    remote = create_drafter(config(tame).model_copy(update={"model": model}))
    pair = Pair(target, attach_drafter(config(tame, attached=True), target))
    jobs = [pair.job(i, prompt, count) for i, prompt in enumerate(PROMPTS)]
    assert remote.draft(jobs) == pair.drafter.draft(jobs)


def test_what_cannot_be_drafted_for(checkpoint):
    """A first token alone has no features yet; another model's features are no use."""
    _, count, tame, _ = checkpoint
    drafter = create_drafter(config(tame))
    assert drafter.draft([DraftJob(0, [5], count, GREEDY)]) == [Draft()]
    alien = TargetFeatures(0, torch.zeros(1, 3))
    with pytest.raises(InvalidRequestError, match="values per token, told were 3"):
        drafter.draft([DraftJob(0, [5, 6], count, GREEDY, features=alien)])


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
