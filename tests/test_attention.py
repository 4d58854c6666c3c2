"""How a batch is split into groups, and that the splits do not show in the result."""

import pytest
import torch

import core.attention
import core.grouping
from core.grouping import Segment, group_segments, make_groups
from core.model import Row
from tests.test_families import TOLERANCE, load, truth
from tests.tiny_models import TinyFactory, load_reference


def slots(groups: list[list[Segment]]) -> list[list[int]]:
    """Slots per group."""
    return [[segment.slot for segment in group] for group in groups]


def test_equal_rows_share_a_group() -> None:
    """Breaks when a plain decode batch is split: each group costs a kernel per layer."""
    assert slots(group_segments([Segment(i, 1000 + i, 1) for i in range(8)])) == [[*range(8)]]


def test_one_long_context_does_not_widen_the_others() -> None:
    """Breaks when fifteen short rows are attended over the longest row's 4000 keys."""
    rows = [Segment(i, 4000 if i == 3 else 100, 1) for i in range(8)]
    assert slots(group_segments(rows)) == [[0, 1, 2], [3], [4, 5, 6, 7]]


def test_gaps_are_bridged_only_when_that_is_cheap() -> None:
    """Breaks when a row that is not in the batch splits it, or costs more than a split."""
    assert slots(group_segments([Segment(0, 200, 1), Segment(2, 200, 1)])) == [[0, 2]]
    assert slots(group_segments([Segment(0, 2000, 1), Segment(2, 2000, 1)])) == [[0], [2]]


def test_a_long_draft_does_not_widen_the_others() -> None:
    """Breaks when each row of a batch is padded to the longest draft: ten queries for one."""
    counts = [1, 1, 1, 11, 1, 1, 1, 1]
    rows = [Segment(i, 300, count) for i, count in enumerate(counts)]
    assert slots(group_segments(rows)) == [[0, 1, 2], [3], [4, 5, 6, 7]]
    assert slots(group_segments([Segment(i, 300, 1 + i % 2) for i in range(8)])) == [[*range(8)]]


def test_prompts_are_attended_alone() -> None:
    """Breaks when a draft's queries are padded to a prompt's length."""
    rows = [Segment(1, 10, 1), Segment(3, 10, 5), Segment(0, 0, 100), Segment(2, 0, 90)]
    assert slots(group_segments(rows)) == [[1, 3], [0], [2]]


def test_fixed_groups_read_keys_in_whole_steps() -> None:
    """Breaks when the number of keys or the first one, and with them the order of a sum, follow
    the batch; or when a long row is not cut into blocks that see only what they need."""
    group, *blocks = make_groups([Segment(0, 900, 1), Segment(1, 630, 70)], is_fixed=True)
    assert group.keys(None) == slice(0, 960)
    assert group.keys(300) == slice(512, 960)
    assert [block.tokens for block in blocks] == [slice(1, 33), slice(33, 65), slice(65, 71)]
    assert [block.keys(16) for block in blocks] == [slice(512, 704)] * 3
    exact = make_groups([Segment(0, 900, 1)], is_fixed=False)[0]
    assert exact.keys(300) == slice(601, 901)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("cost", [0, 1 << 40])
def test_grouping_does_not_change_logits(
    kind: str, cost: int, tiny: TinyFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Breaks when padding, a slot without a row, or a split leaks into a row's result: the same
    batches with every row alone, and with everything in one group."""
    monkeypatch.setattr(core.grouping, "GROUP_COST_TOKENS", cost)
    path = tiny(kind)
    model, expected = load(path), truth(load_reference(path))
    texts = [[(7 * i + 13 * s * i * i) % 256 for i in range(100)] for s in range(4)]
    for sequence, length in enumerate((60, 3, 25, 17)):
        model.open(sequence)
        model.forward([Row(sequence, 0, texts[sequence][:length], 0)])
    for counts in ({3: 4, 0: 1}, {0: 1, 1: 3, 3: 1}, {1: 1, 2: 1}, {2: 5, 0: 2, 1: 1, 3: 30}):
        rows = [
            Row(s, model.length(s), texts[s][model.length(s) : model.length(s) + count], count)
            for s, count in counts.items()
        ]
        wanted = torch.cat(
            [expected(texts[r.sequence][: r.position + r.num_logits], r.num_logits) for r in rows]
        )
        assert (model.forward(rows) - wanted).abs().max().item() < TOLERANCE


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral"])
def test_bf16_by_hand_is_as_good_as_fused(
    kind: str, tiny: TinyFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Breaks when the products that replace torch's fused attention for bf16 are wrong: both ways
    must be equally near to fp32, in a prompt, a draft and a single token."""
    expected = truth(load_reference(tiny(kind)))
    text = [(7 * i + 5 * i * i) % 256 for i in range(60)]
    errors = []
    for is_fixed in (True, False):
        monkeypatch.setattr(
            core.attention, "make_groups", lambda s, _, f=is_fixed: make_groups(s, f)
        )
        model = load(tiny(kind), dtype="bfloat16")
        for sequence, length in ((0, 40), (1, 30)):
            model.open(sequence)
            model.forward([Row(sequence, 0, text[:length], 0)])
        model.open(2)
        rows = [Row(0, 40, text[40:45], 5), Row(1, 30, text[30:31], 1), Row(2, 0, text, 60)]
        got = model.forward(rows)
        wanted = torch.cat([expected(text[:45], 5), expected(text[:31], 1), expected(text, 60)])
        errors.append((got - wanted).abs().mean().item())
    assert errors[0] < 0.1
    assert errors[0] < 1.5 * errors[1]
