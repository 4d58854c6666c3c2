"""Drafts across tokenizers are those of transformers' own generators, round after round."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer
from transformers.generation.candidate_generator import (
    AssistantToTargetTranslator,
    UniversalSpeculativeDecodingGenerator,
)
from transformers.generation.candidate_generator import (
    AssistedCandidateGeneratorDifferentTokenizers as UniversalAssistedGenerator,
)

from core.params import Rule, SamplingParams
from core.sampling import draw
from core.tokenizer import Tokenizer
from drafter_service.drafters import create_drafter
from drafter_service.drafters.base import Draft, DraftJob
from drafter_service.translation import Translator
from tests.tiny_models import load_reference
from tests.tiny_tokenizers import PAIRS, TEXT, Checkpoints, encode, pool_config

GREEDY = SamplingParams()
COUPLED = SamplingParams(temperature=0.8, top_k=40, seed=3, rule=Rule.COUPLED)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """A tiny model with the tokenizer of that name."""
    return Checkpoints(tmp_path_factory.mktemp)


def reference(kind: Any, drafter: Path, target: Path, num_tokens: int, **more: Any) -> Any:
    """transformers' own candidate generator of that class, with its heuristics off. Its `read` is
    what its drafter was given last."""

    class Generator(kind):  # type: ignore[misc]
        def _prepare_assistant_input_ids(self, input_ids: torch.Tensor) -> Any:
            result = super()._prepare_assistant_input_ids(input_ids)
            self.read = result[0][0].tolist()
            return result

    model = load_reference(drafter)
    settings = model.generation_config
    settings.assistant_confidence_threshold = 0.0
    settings.num_assistant_tokens = num_tokens
    settings.num_assistant_tokens_schedule = "constant"
    settings.eos_token_id = settings.pad_token_id = None
    wanted = type(settings)(max_length=10_000, do_sample=False)
    wanted.update(**wanted._get_default_generation_params(), defaults_only=True)
    return Generator(
        input_ids=torch.tensor([[0]]),
        assistant_model=model,
        target_tokenizer=AutoTokenizer.from_pretrained(target),
        assistant_tokenizer=AutoTokenizer.from_pretrained(drafter),
        generation_config=wanted,
        model_kwargs={},
        **more,
    )


@pytest.mark.filterwarnings("ignore")  # of the library, about its own settings
@pytest.mark.parametrize("pair", PAIRS, ids="<-".join)
def test_text_drafts_are_those_of_transformers(
    checkpoint: Checkpoints, pair: tuple[str, str]
) -> None:
    """Universal assisted decoding, round after round through no, some and full acceptance.

    Its generator is asked twice: one that is new in each round, and one that lasts, which compares
    only while its drafter reads the text (rejected drafts that are longer than its window stay
    in). Where it loses its place in the text, it proposes what its drafter did not write.
    """
    target, drafter = map(checkpoint, pair)
    ours = create_drafter(pool_config(drafter, target, "slem"))
    lasting = reference(UniversalAssistedGenerator, drafter, target, 6)
    tokens, future = encode(target, TEXT), encode(target, " protect it. The basin was deepened.")
    num_new = num_lasting = 0
    for accepted in (0, 2, 1, 0, 5, 3, 0):
        [drafted] = ours.draft([DraftJob(1, list(tokens), 5, GREEDY, 0)])
        assert len(drafted.token_ids) == 5
        new = reference(UniversalAssistedGenerator, drafter, target, 30)
        agreed = compare(new, tokens, drafted)
        assert agreed in (None, True)
        num_new += agreed is not None
        agreed = compare(lasting, tokens, drafted)
        if lasting.read == new.read:
            assert agreed in (None, True)
            num_lasting += agreed is not None
        tokens = [*tokens, *drafted.token_ids[:accepted], future.pop(0)]
    assert num_new >= 4 and num_lasting == num_new


def compare(theirs: Any, tokens: list[int], ours: Draft) -> bool | None:
    """Whether a draft is what the generator proposes, as far as both go; None where that is not
    what its drafter wrote. Its last token counts for nothing: it may lack its end."""
    proposed = theirs.get_candidates(torch.tensor([tokens]))[0][0].tolist()
    written = theirs.assistant_tokenizer.decode(theirs.prev_assistant_ids[0, len(theirs.read) :])
    decode = theirs.target_tokenizer.decode
    if decode(proposed) != decode(tokens) + written:
        return None
    proposed = proposed[len(tokens) : -1]
    length = min(len(proposed), len(ours.token_ids))
    return length > 0 and list(ours.token_ids[:length]) == proposed[:length]


@pytest.mark.filterwarnings("ignore")
def test_token_drafts_are_those_of_transformers(checkpoint: Checkpoints) -> None:
    """Universal speculative decoding, whose shared tokens are the same for these two."""
    target, drafter = checkpoint("byte_level_bos"), checkpoint("byte_level")
    ours = create_drafter(pool_config(drafter, target, "tli"))
    tokens = encode(target, TEXT)
    for accepted in (0, 2, 5, 1):
        [drafted] = ours.draft([DraftJob(1, list(tokens), 5, GREEDY, 0)])
        pair = AutoTokenizer.from_pretrained(target), AutoTokenizer.from_pretrained(drafter)
        translator = AssistantToTargetTranslator(*pair, target_vocab_size=len(pair[0]))
        theirs = reference(
            UniversalSpeculativeDecodingGenerator, drafter, target, 5, atm_translator=translator
        )
        proposed, _ = theirs.get_candidates(torch.tensor([tokens]))
        assert list(drafted.token_ids) == proposed[0, len(tokens) :].tolist()
        tokens = [*tokens, *drafted.token_ids[:accepted], *encode(target, " a")]


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED, replace(COUPLED, top_k=0)])
def test_token_drafts_are_drawn_among_the_targets_tokens(
    checkpoint: Checkpoints, sampling: SamplingParams
) -> None:
    """The noise belongs to the target's ids and positions: drawn by the drafter's own, a draft
    would agree with the target by chance only."""
    target, drafter = checkpoint("metaspace"), checkpoint("byte_level")
    ours = create_drafter(pool_config(drafter, target, "tli"))
    model, speller = load_reference(drafter), Tokenizer.load(str(drafter))
    shared = Translator(Tokenizer.load(str(target)), speller, speller.size).shared
    tokens = encode(target, TEXT)
    for accepted in (3, 0, 4):
        read = speller.encode(AutoTokenizer.from_pretrained(target).decode(tokens))
        expected: list[int] = []
        for _ in range(4):
            with torch.inference_mode():
                logits = model(torch.tensor([read])).logits[0, -1].float()
            scores = torch.full((1, 480), -torch.inf)
            scores[0, list(shared.values())] = logits[list(shared)]
            expected += draw(scores, [sampling], [len(tokens) + len(expected)]).tolist()
            read.append(next(d for d, t in shared.items() if t == expected[-1]))
        [drafted] = ours.draft([DraftJob(1, list(tokens), 4, sampling)])
        assert list(drafted.token_ids) == expected
        tokens = [*tokens, *expected[:accepted], *encode(target, " the")[-1:]]
