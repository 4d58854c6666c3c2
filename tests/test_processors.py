"""Biases, penalties and bans against transformers' processors, at every position of every draft.

The reference knows no drafts and no batches: it processes one row of logits behind one prefix.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from core.errors import InvalidRequestError
from core.processors import History, HistoryRow, apply_history
from core.sampling import draw, process_logits
from core.types import Rule, SamplingParams
from tests.test_sampling import warp

VOCAB = 12
"""Small, so that random texts repeat themselves."""


def reference(row: Tensor, prefix: list[int], p: SamplingParams) -> Tensor:
    """One row `[V]` behind one prefix: transformers' processors in the order of its generate, and
    a plain loop for the penalties that it lacks."""
    ids = torch.tensor([prefix], dtype=torch.long)
    scores = row[None]
    if p.logit_bias:
        scores = SequenceBiasLogitsProcessor({(t,): b for t, b in p.logit_bias})(ids, scores)
    if p.repetition_penalty != 1:
        scores = RepetitionPenaltyLogitsProcessor(p.repetition_penalty)(ids, scores)
    generated = prefix[p.num_prompt_tokens :]
    penalty = [
        p.presence_penalty * (t in generated) + p.frequency_penalty * generated.count(t)
        for t in range(len(row))
    ]
    scores = scores - scores.new_tensor(penalty)
    rest = LogitsProcessorList()
    if p.no_repeat_ngram_size:
        rest.append(NoRepeatNGramLogitsProcessor(p.no_repeat_ngram_size))
    if p.bad_words_ids:
        words = [list(word) for word in p.bad_words_ids]
        rest.append(NoBadWordsLogitsProcessor(words, eos_token_id=list(p.end_token_ids) or None))
    if p.min_new_tokens and p.end_token_ids:
        rest.append(
            MinNewTokensLengthLogitsProcessor(
                p.num_prompt_tokens, p.min_new_tokens, list(p.end_token_ids)
            )
        )
    return rest(ids, scores)[0]


def random_logits(num_rows: int, vocab_size: int = VOCAB, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def opened(p: SamplingParams, prefix: list[int], vocab_size: int = VOCAB) -> History:
    history = History(p, vocab_size)
    history.extend(prefix)
    return history


def processed(logits: Tensor, p: SamplingParams, prefix: list[int], draft: list[int]) -> Tensor:
    logits = logits.clone()
    history = opened(p, prefix, logits.shape[1])
    apply_history(logits, [HistoryRow(history, 0, draft)])
    return logits


def assert_each_position_is_the_reference(
    p: SamplingParams, prefix: list[int], draft: list[int]
) -> None:
    logits = random_logits(len(draft) + 1)
    ours = processed(logits, p, prefix, draft)
    for i in range(len(draft) + 1):
        assert torch.equal(ours[i], reference(logits[i], prefix + draft[:i], p)), (i, p)


TOKEN = st.integers(0, VOCAB - 1)
TEXT = st.lists(TOKEN, min_size=1, max_size=40)
DRAFT = st.lists(TOKEN, max_size=6)
PENALTY = st.sampled_from([-2.0, -0.3, 0.1, 0.7, 2.0])
END = (3, 5)
ONE = {
    "logit_bias": st.dictionaries(TOKEN, st.floats(-9, 9, width=32), min_size=1).map(
        lambda bias: tuple(bias.items())
    ),
    "repetition_penalty": st.sampled_from([0.3, 0.9, 1.1, 1.3, 7.0]),
    "presence_penalty": PENALTY,
    "frequency_penalty": PENALTY,
    "no_repeat_ngram_size": st.integers(1, 5),
    "bad_words_ids": st.lists(
        st.lists(TOKEN, min_size=1, max_size=4).map(tuple), min_size=1, max_size=25
    )
    .map(tuple)
    # Of nothing but end tokens transformers makes an error, and we nothing.
    .filter(lambda words: any(len(word) > 1 or word[0] not in END for word in words)),
    "min_new_tokens": st.integers(1, 45),
}


def values(names: tuple[str, ...]) -> st.SearchStrategy[dict]:
    return st.fixed_dictionaries(
        {name: ONE[name] for name in names} | {"num_prompt_tokens": st.integers(0, 20)}
    )


SOME = st.sets(st.sampled_from(sorted(ONE)), min_size=1).flatmap(lambda s: values(tuple(s)))


def params(**given) -> SamplingParams:
    return SamplingParams(end_token_ids=END, **given)


@pytest.mark.parametrize("name", ONE)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_each_parameter_equals_transformers(name, data):
    """Another sign rule, window or count would be another distribution than the user's own stack;
    a parameter that is accepted and does nothing is worse [sglang#28180]."""
    p = params(**data.draw(values((name,))))
    assert History.needed(p)
    assert_each_position_is_the_reference(p, data.draw(TEXT), data.draw(DRAFT))


@settings(deadline=None, max_examples=200)
@given(given_params=SOME, prefix=TEXT, draft=DRAFT)
def test_combinations_equal_transformers_in_its_order(given_params, prefix, draft):
    """A bias behind a penalty, or a penalty that lifts a ban, is another text."""
    assert_each_position_is_the_reference(params(**given_params), prefix, draft)


@settings(deadline=None, max_examples=60)
@given(rows=st.lists(st.tuples(SOME, TEXT, DRAFT), min_size=2, max_size=6))
def test_ragged_batch_equals_rows_alone(rows):
    """Batch-mates' parameters must not leak, and rows that have none must stay as they are."""
    sizes = [len(draft) + 2 for _, _, draft in rows]  # one row of logits between any two
    logits = random_logits(sum(sizes))
    together, alone, first = logits.clone(), logits.clone(), 0
    batch = []
    for (given_params, prefix, draft), size in zip(rows, sizes, strict=True):
        p = params(**given_params)
        batch.append(HistoryRow(opened(p, prefix), first, draft))
        part = slice(first, first + size - 1)
        alone[part] = processed(logits[part], p, prefix, draft)
        first += size
    apply_history(together, batch)
    assert torch.equal(together, alone)


@settings(deadline=None, max_examples=100)
@given(given_params=SOME, kept=TEXT, dropped=TEXT, added=TEXT, draft=DRAFT)
def test_truncated_and_extended_history_is_a_new_one(given_params, kept, dropped, added, draft):
    """A sequence that is rolled back and goes on another way must forget what was dropped."""
    p, logits = params(**given_params), random_logits(len(draft) + 1)
    history = opened(p, kept + dropped)
    history.truncate(len(kept))
    assert len(history) == len(kept)
    history.extend(added)
    ours = logits.clone()
    apply_history(ours, [HistoryRow(history, 0, draft)])
    assert torch.equal(ours, processed(logits, p, kept + added, draft))


def test_every_accepted_token_counts():
    """Penalties weakened as acceptance grew, because only the last accepted token of a block was
    counted [sglang#33643]."""
    p = params(frequency_penalty=0.5, presence_penalty=0.25, num_prompt_tokens=2)
    logits = torch.zeros(4, VOCAB)
    out = processed(logits, p, [9, 8], [1, 2, 1])
    assert out[3].tolist() == [0, -1.25, -0.75] + [0] * 9
    history = opened(p, [9, 8])
    history.extend([1, 2, 1])  # the block was accepted whole
    after = torch.zeros(1, VOCAB)
    apply_history(after, [HistoryRow(history, 0)])
    assert torch.equal(after[0], out[3])


def test_last_token_counts_once():
    """The newest token was counted by the block that drew it and again by the next
    [vllm#33251]."""
    p = params(frequency_penalty=1.0, num_prompt_tokens=1)
    history = opened(p, [0])
    for step in range(1, 4):
        logits = torch.zeros(2, VOCAB)
        apply_history(logits, [HistoryRow(history, 0, [7])])
        assert logits[:, 7].tolist() == [1 - step, -step]
        history.extend([7])


def test_end_tokens_are_masked_up_to_min_new_tokens_and_no_row_longer():
    """EOS was masked one row too long under min_tokens [vllm#41768]."""
    p = params(min_new_tokens=3, num_prompt_tokens=4)
    out = processed(torch.zeros(6, VOCAB), p, [1, 1, 1, 1, 2], [2, 2, 2, 2, 2])
    banned = out[:, list(END)].isinf()
    assert banned.all(-1).tolist() == [True, True, False, False, False, False]
    assert not banned[2:].any()
    assert out.isfinite().sum() == 6 * VOCAB - 4


def test_rejected_drafts_leave_no_trace():
    """State was recorded from drafts that were rejected later [vmlx-swift#357]."""
    p = params(
        repetition_penalty=1.5,
        presence_penalty=1.0,
        no_repeat_ngram_size=2,
        bad_words_ids=((4, 6),),
        num_prompt_tokens=1,
    )
    history, logits = opened(p, [1, 2, 3]), random_logits(1)
    apply_history(random_logits(5), [HistoryRow(history, 0, [2, 4, 2, 11])])
    after = logits.clone()
    apply_history(after, [HistoryRow(history, 0)])
    assert torch.equal(after, processed(logits, p, [1, 2, 3], []))
    again = logits.clone()
    apply_history(again, [HistoryRow(history, 0)])
    assert torch.equal(after, again)


def test_greedy_and_sampled_rows_draw_from_processed_logits():
    """Greedy rows skip temperature and truncation, never penalties; sampled rows do both, in
    transformers' order: a token that is banned must not fill a place in top_k."""
    logits = random_logits(3)
    order = logits[0].argsort(descending=True).tolist()
    greedy = params(bad_words_ids=((order[0],),))
    history = opened(greedy, [order[0]])
    processed_logits = logits.clone()
    apply_history(processed_logits, [HistoryRow(history, 0)])
    assert draw(processed_logits[:1], [greedy], [1]).tolist() == [order[1]]
    prefix = order[:4]
    sampled = SamplingParams(
        temperature=0.7, top_k=4, top_p=0.9, rule=Rule.COUPLED, repetition_penalty=1.4,
        bad_words_ids=((order[0],),),
    )  # fmt: skip
    ours = process_logits(processed(logits[:1], sampled, prefix, []), [sampled])[0]
    assert torch.equal(ours, warp(reference(logits[0], prefix, sampled), sampled))


def test_parameters_that_ignore_the_past_need_no_history():
    """Rows without processors must cost nothing."""
    free = SamplingParams(temperature=0.7, top_k=5, min_p=0.1, min_new_tokens=4)
    assert not History.needed(free)
    logits = random_logits(2)
    apply_history(logits, [])
    assert torch.equal(logits, random_logits(2))


def test_more_distinct_tokens_than_the_first_table_holds():
    """Long texts grow the table of seen tokens; grown wrongly it would lose or mix counts."""
    p = params(repetition_penalty=1.2, frequency_penalty=0.5, num_prompt_tokens=100)
    prefix = [*range(300), *range(150, 250), *range(7)]
    logits = random_logits(3, 400)
    ours = processed(logits, p, prefix, [399, 0])
    for i in range(3):
        assert torch.equal(ours[i], reference(logits[i], prefix + [399, 0][:i], p))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logit_bias", ((VOCAB, 1.0),)),
        ("bad_words_ids", ((1, VOCAB),)),
        ("bad_words_ids", ((),)),
        ("end_token_ids", (VOCAB,)),
    ],
)
def test_ids_outside_the_vocabulary_are_refused_by_name(name, value):
    """An index out of range would fail the whole batch, on CUDA the whole process."""
    with pytest.raises(InvalidRequestError) as error:
        History(SamplingParams(**{name: value}), VOCAB)
    assert error.value.field == f"sampling.{name}"


@pytest.mark.gpu
def test_cuda_edits_what_the_cpu_edits():
    """Indices and values travel to the device; every bit must survive."""
    p = params(
        logit_bias=((1, 2.5),), repetition_penalty=1.3, presence_penalty=0.3,
        frequency_penalty=0.1, no_repeat_ngram_size=2, min_new_tokens=50,
    )  # fmt: skip
    logits, prefix, draft = random_logits(4), [1, 2, 3, 1, 2, 7], [3, 1, 2]
    on_cuda = processed(logits.cuda(), p, prefix, draft).cpu()
    assert torch.equal(on_cuda, processed(logits, p, prefix, draft))
