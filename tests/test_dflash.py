"""Block-diffusion drafters draft what transformers' own `generate` drafts with them, within the
sliding window and past it, and in a batch what they draft alone.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForImageTextToText, PreTrainedModel

import core.grouping
import core.loading
from core.block_diffusion import TargetEnds
from core.config import ModelConfig
from core.drafter import Draft, DraftJob, MissingFeaturesError
from core.errors import ConfigError, ModelError
from core.types import Rule, SamplingParams
from drafter_service.drafters import attach_drafter, create_drafter
from tests.assisting import ACCEPTED, Session, play
from tests.harness import serving
from tests.policy import make_request
from tests.tiny_dflash import (
    BLOCK,
    FULL,
    SLIDING,
    WINDOW,
    Pair,
    generate_assisted,
    job,
    load_drafter,
    save_drafter,
    save_muse,
    told,
)
from tests.tiny_models import greedy_reference, load_reference
from tests.verifying import GREEDY

PROMPT = [5, 9, 200, 31, 7]
#: Targets and drafters; the second's block is longer than its window and than a group of rows, the
#: third's target scales its embedding and caps its logits.
PAIRS = {
    "plain": ("llama", {}),
    "long": ("qwen3", {"block_size": 40, "sliding_window": 10, "target_layer_ids": [1]}),
    "capped": ("gemma2", {"layer_types": [FULL] * 3, "target_layer_ids": [3, 0]}),
    "sliding": ("mistral", {"layer_types": [SLIDING] * 3, "num_key_value_heads": 1}),
}


@pytest.fixture(scope="module")
def make_pair(tiny, tmp_path_factory) -> Callable[..., Pair]:
    made: dict[str, Pair] = {}

    def make(name: str = "plain") -> Pair:
        if name not in made:
            kind, fields = PAIRS[name]
            target = tiny(kind, num_hidden_layers=4, eos_token_id=300)
            made[name] = Pair(target, save_drafter(tmp_path_factory.mktemp(name), **fields))
        return made[name]

    return make


def compare(pair: Pair, target: PreTrainedModel) -> None:
    """Our rounds and the library's along one text, with mixed accepts."""
    drafter = load_drafter(pair.drafter)
    full = PROMPT + greedy_reference(target, PROMPT, 90)
    theirs = generate_assisted(target, drafter, full, len(PROMPT), ACCEPTED)
    attached, model = pair.attach()
    ours = play(Session(model, [attached]), 1, full, len(PROMPT), drafter.config.block_size - 1)
    assert len(theirs) > len(ACCEPTED) and theirs[-1][0] > 3 * WINDOW
    for (length, expected), (size, [draft]) in zip(theirs, ours, strict=False):
        assert (size, list(draft.token_ids)) == (length, expected)
    assert len(ours) >= len(theirs)
    assert len({tuple(expected) for _, expected in theirs}) > len(theirs) / 3


@pytest.mark.parametrize("name", sorted(PAIRS))
def test_drafts_are_those_of_transformers_generate(make_pair, name):
    """A wrong layer's state, the last one without its norm, a mask that hides a token of the block,
    a window off by one, K/V of an old block or a scale too many would draft otherwise."""
    pair = make_pair(name)
    compare(pair, load_reference(pair.target))


def test_drafts_for_a_muse_target_are_those_of_transformers(tmp_path):
    """The norm in the target's embedding would be applied, its logits would not be capped."""
    pair = Pair(save_muse(tmp_path / "target"), save_drafter(tmp_path / "drafter"))
    target = AutoModelForImageTextToText.from_pretrained(pair.target, local_files_only=True)
    compare(pair, target.eval())
    model = pair.load()
    hidden = torch.randn(3, 32)
    capped = TargetEnds(model).logits(hidden)
    text = model.network.config.text_config
    cap, scale = text.final_logit_softcapping, text.output_multiplier
    plain = model.network.get_output_embeddings()(hidden)
    assert torch.allclose(capped, cap * torch.tanh(plain * scale / cap), atol=1e-5)


def alone_and_together(
    pair: Pair, params: Sequence[SamplingParams]
) -> tuple[list[list[Draft]], list[list[Draft]]]:
    """Two rounds of six ragged rows, one of them without a wish each time: each by itself, and all
    in one batch."""
    rng = random.Random(3)
    lengths, wanted = (1, 40, 7, 19, 64, 2), (3, 1, 9, 0, 3, 2)
    texts = [[rng.randrange(256) for _ in range(n + 4)] for n in lengths]

    def rounds(together: bool) -> list[list[Draft]]:
        attached, model = pair.attach()
        session = Session(model, [attached])
        found: list[list[Draft]] = []
        for round_, order in enumerate(([3, 0, 5, 1, 4, 2], [2, 5, 3, 4, 0, 1])):
            rows = []
            for s, (text, n) in enumerate(zip(texts, lengths, strict=True)):
                block, kept = (text[:n], n) if round_ == 0 else (text[n : n + 3], 1 + s % 3)
                session.next[s] = text[n] if round_ == 0 else text[n + kept]
                rows.append((s, block, kept, wanted[s - round_], params[s]))
            if together:
                [drafts] = session.round([rows[i] for i in order])
            else:
                drafts = [session.round([rows[i]])[0][0] for i in order]
            found.append(drafts)
            for draft, i in zip(drafts, order, strict=True):
                assert len(draft.token_ids) == min(wanted[i - round_], BLOCK - 1)
        return found

    return rounds(together=False), rounds(together=True)


def test_a_row_drafts_in_a_batch_what_it_drafts_alone(make_pair):
    """Rows would see each other's K/V or be given each other's logits; a row that only listens
    would be drafted for."""
    sampled = SamplingParams(temperature=1.5, seed=5, rule=Rule.COUPLED)
    params = [
        GREEDY,
        sampled,
        replace(sampled, rule=Rule.REJECTION),
        replace(sampled, temperature=0.0, repetition_penalty=1.7, rule=Rule.GREEDY),
        replace(sampled, seed=6, rule=Rule.REJECTION),
        replace(sampled, seed=7),
    ]
    alone, together = alone_and_together(make_pair(), params)
    for ours, theirs in zip(alone, together, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one.token_ids == other.token_ids
            assert len(one.distributions) in (0, len(one.token_ids))
            for p, q in zip(one.distributions, other.distributions, strict=True):
                assert p.token_ids == q.token_ids
    assert any(draft.distributions for draft in together[0])


def test_a_batch_that_is_split_or_has_gaps_drafts_the_same(make_pair, monkeypatch):
    """Slots between those that draft, and rows in groups of their own, must not show."""
    monkeypatch.setattr(core.grouping, "GROUP_COST_TOKENS", 0)
    split = alone_and_together(make_pair(), [GREEDY] * 6)
    monkeypatch.setattr(core.grouping, "GROUP_COST_TOKENS", 1 << 40)
    assert split[0] == split[1] == alone_and_together(make_pair(), [GREEDY] * 6)[1]


def test_in_bf16_packed_weights_draft_as_plain_ones(make_pair):
    """Packed layers would be given another's input, or the head be asked for its weight."""
    pair = replace(make_pair(), dtype="bfloat16")
    drafter, model = pair.attach()
    config = pair.config(pair.drafter).model_copy(update={"pack_weights": False})
    plain = attach_drafter(pair.pool().model_copy(update={"model": config}), model)
    rng = random.Random(4)
    tokens = [rng.randrange(256) for _ in range(30)]
    values = told(model, drafter, tokens[:-1])
    jobs = [job(tokens[: n + 1], 3, values, (0, n), n) for n in (29, 11, 3)]
    drafts = drafter.draft(jobs)
    assert [len(draft.token_ids) for draft in drafts] == [3, 3, 3]
    assert drafts == plain.draft(jobs)


def test_a_gap_is_told_and_position_0_begins_anew(make_pair):
    """A lost or repeated increment would be attended to as if it were the text."""
    drafter, model = make_pair().attach()
    tokens = [random.Random(1).randrange(256) for _ in range(12)]
    values = told(model, drafter, tokens[:-1])

    def draft(start: int, stop: int, size: int = 12, wanted: int = 9) -> Draft:
        return drafter.draft([job(tokens[:size], wanted, values, (start, stop))])[0]

    whole = draft(0, 11)
    assert len(whole.token_ids) == BLOCK - 1, "a block has no more"
    assert draft(0, 11, wanted=2) == whole.cut(2), "a shorter wish still runs the whole block"
    assert drafter.draft([DraftJob(1, tokens, 9, GREEDY)]) == [whole], "asked again, told nothing"
    with pytest.raises(MissingFeaturesError, match="5"):
        draft(5, 11)
    with pytest.raises(MissingFeaturesError, match="9 of 11"):
        draft(0, 9)
    assert draft(0, 4, size=4, wanted=0) == Draft(), "what follows a prompt's part is not known"
    assert draft(4, 5, size=6, wanted=0) == Draft()
    assert draft(5, 11) == whole, "a prompt may come in chunks"
    for sequence in range(20):  # more than there is room for, unless closing frees it
        listening = job(tokens, 9, values, (0, 11), sequence + 2)
        assert drafter.draft([listening]) == [whole]
        drafter.close(sequence + 2)
        drafter.close(sequence + 2)
    drafter.close(1)
    with pytest.raises(MissingFeaturesError, match="0 of 11"):
        drafter.draft([DraftJob(1, tokens, 2, GREEDY)])


def test_a_text_may_be_as_long_as_the_targets(make_pair):
    """The block behind the last tokens would be written past the cache's end."""
    drafter, model = make_pair().attach()
    assert drafter.max_length == model.max_length == 256
    tokens = [random.Random(2).randrange(256) for _ in range(256)]
    values = told(model, drafter, tokens)
    [first] = drafter.draft([job(tokens, 3, values, (0, 255))])
    assert len(first.token_ids) == 3
    assert drafter.draft([job(tokens, 0, values, (255, 256))]) == [Draft()]


async def test_the_text_is_the_targets_own(make_pair):
    """Drafts through the whole system, beside other requests, a long prompt among them."""
    pair = make_pair()
    drafting = pair.pool(max_draft_tokens=8)
    sampled = SamplingParams(temperature=0.9, seed=3, rule=Rule.COUPLED)
    rng = random.Random(5)
    prompts = [tuple(rng.randrange(256) for _ in range(n)) for n in (3, 100, 17)]
    async with serving(pair.target, [drafting], adaptive_draft_length=False) as stack:
        for index, sampling in enumerate((GREEDY, sampled)):
            texts = []
            for on in (False, True):
                runs = [
                    make_request(p, 24, sampling=sampling, enabled=on, request_id=f"{index}{i}")
                    for i, p in enumerate(prompts)
                ]
                texts.append(await asyncio.gather(*(stack.run(run) for run in runs)))
            assert [ids for ids, *_ in texts[0]] == [ids for ids, *_ in texts[1]]
            for _, _, finished in texts[1]:
                assert finished.stats.num_draft_tokens > 24


def test_what_does_not_fit_is_refused_by_both_names(make_pair, tmp_path):
    """A wrong pair would draft noise, or fail in mid-flight."""
    pair = make_pair()
    model = pair.load()
    llama = pair.target
    with pytest.raises(ConfigError, match=rf"needs a checkpoint.*{llama}.*llama"):
        attach_drafter(replace(pair, drafter=llama).pool(), model)
    wrong = {
        "hidden states of 48 against 32": {"hidden_size": 48},
        r"layers \[0, 4\] against 4": {"target_layer_ids": [0, 4]},
        "mask token 260 against 260 token ids": {"mask_token_id": 260},
    }
    for number, (message, fields) in enumerate(wrong.items()):
        path = save_drafter(tmp_path / str(number), **fields)
        with pytest.raises(ConfigError, match=rf"near\.model.*{path}.*{llama}.*{message}"):
            attach_drafter(replace(pair, drafter=path).pool(), model)
    pool = pair.pool()
    with pytest.raises(ConfigError, match="needs a model"):
        attach_drafter(pool.model_copy(update={"model": None}), model)
    with pytest.raises(ConfigError, match=r"options\.top_k.*did you mean 'top_q'"):
        attach_drafter(pair.pool(options={"top_k": 1}), model)
    with pytest.raises(ConfigError, match="only runs attached"):
        create_drafter(pool.model_copy(update={"attached": False}))
    nowhere = ModelConfig(model=str(tmp_path / "nowhere"))
    with pytest.raises(ModelError, match="nowhere"):
        attach_drafter(pool.model_copy(update={"model": nowhere}), model)
