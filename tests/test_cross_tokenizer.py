"""The drafter with another tokenizer: under the contract of all kinds, and what is its own.

Its drafts are compared with transformers' in tests/test_universal_drafts.py.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from core.errors import ConfigError, ModelError
from core.params import SamplingParams
from core.tokenizer import Tokenizer
from core.types import ModelIdentity
from drafter_service.drafters import create_drafter
from drafter_service.drafters.base import Draft, Drafter, DraftJob
from drafter_service.translation import Translator
from orchestrator.pool import explain_mismatch
from tests.harness import pool, serving
from tests.policy import make_request
from tests.test_drafters import (  # the contract of every kind, run here over this one's pairs
    coupled,
    test_a_prompt_read_in_chunks_drafts_the_same,
    test_a_ragged_batch_drafts_what_each_sequence_drafts_alone,
    test_catching_up_after_many_missed_tokens,
    test_close_frees_and_unknown_closes_are_ignored,
    test_distributions_come_with_every_token_or_with_none,
    test_drafts_are_valid_and_no_longer_than_wanted,
    test_memory_changes_nothing_through_accepts_and_rejections,
    test_the_same_seed_drafts_the_same,
)
from tests.tiny_models import load_reference, save_tiny
from tests.tiny_tokenizers import (
    PAIRS,
    TEXT,
    Checkpoints,
    encode,
    pool_config,
    pure_bytes,
    save_model,
)

__all__ = [
    "test_a_prompt_read_in_chunks_drafts_the_same",
    "test_a_ragged_batch_drafts_what_each_sequence_drafts_alone",
    "test_catching_up_after_many_missed_tokens",
    "test_close_frees_and_unknown_closes_are_ignored",
    "test_distributions_come_with_every_token_or_with_none",
    "test_drafts_are_valid_and_no_longer_than_wanted",
    "test_memory_changes_nothing_through_accepts_and_rejections",
    "test_the_same_seed_drafts_the_same",
]

GREEDY = SamplingParams()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """A tiny model with the tokenizer of that name."""
    return Checkpoints(tmp_path_factory.mktemp)


@pytest.fixture(params=["tli-byte_level_bos", "slem-metaspace", "slem-byte_level_bos"])
def make(
    request: pytest.FixtureRequest, tiny_llama: Path, checkpoint: Checkpoints
) -> Callable[[], Drafter]:
    """What the contract calls: drafters for the usual target, whose tokens are bytes."""
    method, name = request.param.split("-")
    return lambda: create_drafter(pool_config(checkpoint(name), tiny_llama, method))


@pytest.mark.parametrize("method", ["tli", "slem"])
def test_two_drafters_in_one_process(checkpoint: Checkpoints, method: str) -> None:
    """transformers prunes the drafter's head for one target, and the next one gets garbage."""
    drafter, targets = checkpoint("byte_level"), ("metaspace", "byte_level_bos", "metaspace_first")

    def rounds(drafters: Sequence[Drafter]) -> list[list[Draft]]:
        jobs = [DraftJob(1, encode(checkpoint(name), TEXT), 5, GREEDY) for name in targets]
        drafts = [[each.draft([job])[0] for each, job in zip(drafters, jobs, strict=True)]]
        jobs = [
            replace(job, token_ids=[*job.token_ids, *draft.token_ids[:2], 300])
            for job, draft in zip(jobs, drafts[0], strict=True)
        ]
        return [*drafts, [each.draft([job])[0] for each, job in zip(drafters, jobs, strict=True)]]

    together = [create_drafter(pool_config(drafter, checkpoint(name), method)) for name in targets]
    found = rounds(together)
    for index, name in enumerate(targets):
        alone = create_drafter(pool_config(drafter, checkpoint(name), method))
        assert [row[index] for row in rounds([alone] * 3)] == [row[index] for row in found]
    assert all(draft.token_ids for row in found for draft in row)


def test_six_ragged_texts_draft_what_each_drafts_alone(checkpoint: Checkpoints) -> None:
    """Text drafts end after different numbers of steps: who is still writing is another batch in
    every step."""
    target, drafter = checkpoint("byte_level"), checkpoint("bytes")
    texts = [TEXT, "a", "def load(path):\n    with", TEXT[:30] + " 春眠", "über", "\n\n  x"]
    jobs = [DraftJob(s, encode(target, text), 1 + s % 4, GREEDY) for s, text in enumerate(texts, 1)]
    drafts = create_drafter(pool_config(drafter, target, "slem")).draft(jobs)
    alone = create_drafter(pool_config(drafter, target, "slem"))
    assert drafts == [alone.draft([job])[0] for job in jobs]
    assert [len(draft.token_ids) for draft in drafts] == [2, 3, 4, 1, 2, 3]


def test_random_text_never_breaks_a_stream(checkpoint: Checkpoints) -> None:
    """Ids of any kind, in any order, half characters at every end: drafts or none, and every id
    one of the target's."""
    generator = torch.Generator().manual_seed(5)
    for method, (target, drafter) in itertools.product(("tli", "slem"), PAIRS[::2]):
        ours = create_drafter(pool_config(checkpoint(drafter), checkpoint(target), method))
        size = ours.identity.vocab_size
        tokens: list[int] = []
        for _ in range(15):
            tokens += torch.randint(size, (3,), generator=generator).tolist()
            [drafted] = ours.draft([DraftJob(1, tokens, 3, coupled(1))])
            assert all(0 <= token_id < size for token_id in drafted.token_ids)
            tokens += drafted.token_ids[:1]


def test_the_drafters_context_ends_before_the_targets(checkpoint: Checkpoints) -> None:
    """A drafter of bytes is full after a quarter of the tokens: no draft, and no error."""
    target = checkpoint("byte_level")
    settings = pool_config(checkpoint("bytes"), target, "slem")
    assert settings.model is not None
    small = settings.model.model_copy(update={"max_length": 100})
    ours = create_drafter(settings.model_copy(update={"model": small}))
    tokens, lengths = encode(target, TEXT), []
    for end in range(2, len(tokens)):
        [drafted] = ours.draft([DraftJob(1, tokens[:end], 4, GREEDY)])
        lengths.append(len(drafted.token_ids))
    assert max(lengths[:5]) == 4 and ours.draft([DraftJob(1, tokens * 2, 4, GREEDY)]) == [Draft()]
    assert ours.draft([DraftJob(1, tokens[:9], 4, GREEDY)])[0].token_ids


def test_the_target_finds_its_own_vocabulary(checkpoint: Checkpoints) -> None:
    """The handshake accepts the target it translates for, and refuses any other, naming both."""
    target = Tokenizer.load(str(checkpoint("byte_level")))
    ours = create_drafter(pool_config(checkpoint("bytes"), checkpoint("byte_level")))
    served = ModelIdentity("served", 512, target.fingerprint)  # a padded head
    assert explain_mismatch(ours.identity, served) == ""
    other = ModelIdentity("another", 512, "0" * 64)
    message = explain_mismatch(ours.identity, other)
    assert str(checkpoint("bytes")) in message and str(checkpoint("byte_level")) in message
    assert "another" in message


def test_auto_chooses_by_what_the_vocabularies_share(checkpoint: Checkpoints) -> None:
    """Bytes in the target's ids are never right; and only token drafts serve every rule."""
    found = []
    for target, drafter in (("byte_level", "bytes"), ("byte_level_bos", "byte_level")):
        ours = create_drafter(pool_config(checkpoint(drafter), checkpoint(target)))
        found.append(ours.has_distributions)
    assert found == [False, True]


def test_what_cannot_work_is_refused_at_start(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Each error names the key or the two models."""
    drafter, target = checkpoint("bytes"), checkpoint("byte_level")
    settings = pool_config(drafter, target)
    with pytest.raises(ConfigError, match=r"drafter_pools\.pool\.model: .*needs a model"):
        create_drafter(settings.model_copy(update={"model": None}))
    with pytest.raises(ConfigError, match=r"options\.target: Field required"):
        create_drafter(settings.model_copy(update={"options": {}}))
    with pytest.raises(ConfigError, match=r"options\.method: .*'auto', 'tli' or 'slem'"):
        create_drafter(pool_config(drafter, target, "text"))
    with pytest.raises(ConfigError, match=r"options\.metod: .*did you mean 'method'"):
        create_drafter(pool_config(drafter, target, metod="tli"))
    with pytest.raises(ModelError, match="nowhere"):
        create_drafter(pool_config(drafter, tmp_path / "nowhere"))
    mute = save_tiny("llama", tmp_path / "mute", tokenizer=False)
    with pytest.raises(ConfigError, match=r"mute has no tokenizer"):
        create_drafter(pool_config(mute, target))


def test_an_end_of_text_ends_a_text_draft(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """A drafter that says "the end" goes on with nonsense; its token is the target's if both know
    it by the same name."""
    target = checkpoint("metaspace")  # "</s>" is 2 there, 1 at the drafter
    model = load_reference(save_model(tmp_path / "ending", "bytes"))
    tokens, read = encode(target, "The end"), encode(tmp_path / "ending", "The end!")
    ours = create_drafter(pool_config(checkpoint("bytes"), target, "slem"))
    with torch.no_grad():  # "!" is certain, and behind it the end
        hidden = model.model(torch.tensor([read])).last_hidden_state[0]
        model.lm_head.weight[:] = 0
        model.lm_head.weight[read[-1]] = hidden[-2]
        model.lm_head.weight[1] = 10 * (
            hidden[-1] - hidden[-2] * (hidden[-1] @ hidden[-2]) / (hidden[-2] @ hidden[-2])
        )
    model.save_pretrained(tmp_path / "ending")
    ours = create_drafter(pool_config(tmp_path / "ending", target, "slem"))
    [drafted] = ours.draft([DraftJob(1, tokens, 5, GREEDY)])
    assert drafted.token_ids == (encode(target, "x!")[-1], 2)


def save_twin(target: Path, path: Path) -> Path:
    """The network of the target of bytes, over the same bytes under other ids."""
    pure_bytes(reverse=True).save_pretrained(path)
    ours, theirs = Tokenizer.load(str(target)), Tokenizer.load(str(path))
    shared = Translator(theirs, ours, ours.size).shared
    model, order = load_reference(target), [shared[i] for i in range(len(shared))]
    with torch.no_grad():
        for weight in (model.lm_head.weight, model.get_input_embeddings().weight):
            weight[order] = weight.clone()
    model.save_pretrained(path)
    return path


async def test_the_text_is_the_targets_own(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Over real wires, greedy and seeded: as without drafts, whoever drafts; and the target's own
    network with another tokenizer, drafting token by token, is always right."""
    target = checkpoint("bytes")
    models = {"twin": save_twin(target, tmp_path / "twin"), "random": checkpoint("metaspace")}
    pools = [
        pool(
            f"{name}-{method}",
            "cross_tokenizer",
            model,
            options={"target": str(target), "method": method},
        )
        for name, model in models.items()
        for method in ("tli", "slem")
    ]
    prompt = tuple(encode(target, "The harbour 春 was "))
    async with serving(target, pools, adaptive_draft_length=False) as stack:
        for sampling in (GREEDY, coupled(5)):
            plain = make_request(prompt, 20, sampling=sampling, enabled=False, request_id="plain")
            expected, _, _ = await stack.run(plain)
            for each in pools:
                request = make_request(prompt, 20, sampling=sampling, drafter=each.name)
                ids, _, finished = await stack.run(request)
                assert ids == expected, each.name
                stats = finished.stats
                if each.name == "twin-tli" and sampling is GREEDY:
                    assert stats.num_draft_tokens == stats.num_accepted_draft_tokens > 0
