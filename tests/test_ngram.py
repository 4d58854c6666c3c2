"""Prompt lookup by hand: every expected draft can be read off the tokens."""

import sys
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.config import DrafterPoolConfig
from core.errors import ConfigError
from core.types import SamplingParams
from drafter_service.drafters import create_drafter
from drafter_service.drafters.base import Drafter, DraftJob

GREEDY = SamplingParams()


def make(**options: Any) -> Drafter:
    return create_drafter(DrafterPoolConfig(name="lookup", kind="ngram", options=options))


def draft(drafter: Drafter, token_ids: Sequence[int], k: int, num_unchanged: int = 0) -> list[int]:
    [drafted] = drafter.draft([DraftJob(1, token_ids, k, GREEDY, num_unchanged)])
    return list(drafted.token_ids)


def scan(token_ids: Sequence[int], k: int, max_ngram: int, min_ngram: int) -> list[int]:
    """The definition, by brute force over the whole list."""
    for n in range(max_ngram, min_ngram - 1, -1):
        for end in range(len(token_ids) - 1, n - 1, -1):
            if token_ids[end - n : end] == token_ids[-n:] and n <= len(token_ids):
                grown = list(token_ids)
                for _ in range(k):
                    grown.append(grown[end + len(grown) - len(token_ids)])
                return grown[len(token_ids) :]
    return []


def test_the_longest_match_wins_over_a_more_recent_shorter_one() -> None:
    """Preferring recency would propose 9 here, which followed 3 alone."""
    assert draft(make(), [1, 2, 3, 7, 8, 3, 9, 1, 2, 3], 2) == [7, 8]


def test_of_equal_matches_the_most_recent_one_wins() -> None:
    """HF's algorithm takes the first (7): text near the end predicts better."""
    assert draft(make(), [1, 2, 7, 0, 1, 2, 8, 0, 1, 2], 1) == [8]


def test_nothing_is_guessed_for_tokens_never_seen() -> None:
    """The suffix must not match itself; an empty draft is an answer, not an error."""
    assert draft(make(), [1, 2, 3, 4], 4) == []
    assert draft(make(), [5], 4) == []


def test_a_draft_is_as_long_as_its_evidence_is_good() -> None:
    """A guess from one token is wrong three times in four, and wastes what it costs to verify."""
    tokens = [4, 1, 2, 3, *range(10, 20)]
    lengths = [
        len(draft(make(min_chance=0.3), tokens + tokens[4 - n : 4], 10)) for n in range(1, 5)
    ]
    assert lengths[0] == 0 and lengths == sorted(lengths) and lengths[3] >= 4
    assert len(draft(make(min_chance=0.0), [*tokens, 3], 10)) == 10


def test_what_was_followed_by_different_tokens_is_trusted_less() -> None:
    """Three in four of such guesses from one token of open talk are wrong."""
    assert draft(make(min_chance=0.2), [1, 7, 2, 7, 1], 1) == [7]
    assert draft(make(min_chance=0.2), [1, 7, 1, 8, 2, 1], 1) == []


def test_a_text_shows_what_its_matches_are_worth() -> None:
    """Text that copies is drafted from one token, text that never does not from two: a fixed rule
    is wrong about one of them. Nothing needs to be drafted for it."""
    source = list(range(100, 160))
    copying, inventing = [*source, 1], [*source, 1]
    for i in range(0, 56, 2):  # each pair again, behind a token of its own; or one token, in vain
        copying += [1000 + i, source[i], source[i + 1]]
        inventing += [source[i], source[i + 1], 1000 + i]
    lookup = make(min_chance=0.4)
    assert draft(lookup, [*source, 1001, source[56]], 1) == []
    assert draft(lookup, [*copying, 1001, source[56]], 1) == [source[57]]
    assert draft(lookup, [*source, 1, source[56], source[57]], 1) == [source[58]]
    assert draft(lookup, [*inventing, source[56], source[57]], 1) == []


def test_min_ngram_refuses_weak_matches() -> None:
    """`min_ngram = 2` must not draft from a single token."""
    assert draft(make(min_ngram=2), [1, 2, 3, 9, 3], 4) == []
    assert draft(make(min_ngram=2), [1, 2, 3, 9, 2, 3], 1) == [9]


def test_a_loop_is_continued_beyond_the_end() -> None:
    """A continuation that stops at the end of the tokens would draft one token per step in a loop
    of one token, where all are right."""
    assert draft(make(), [5, 5, 5, 5, 5], 4) == [5, 5, 5, 5]
    assert draft(make(max_ngram=2), [1, 2, 3, 1, 2, 3, 1, 2], 5) == [3, 1, 2, 3, 1]


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.lists(st.tuples(st.integers(0, 60), st.lists(st.integers(0, 3), min_size=1)), max_size=6),
    st.integers(1, 6),
    st.integers(1, 4),
)
def test_the_index_agrees_with_a_scan_through_growth_and_rollback(
    tokens: list[int],
    commits: list[tuple[int, list[int]]],
    k: int,
    max_ngram: int,
) -> None:
    """A stale position after a truncation, or one index entry too few, drafts something else."""
    min_ngram = min(2, max_ngram)
    drafter = make(max_ngram=max_ngram, min_ngram=min_ngram, min_chance=0.0)
    expected = scan(tokens, k, max_ngram, min_ngram)
    assert draft(drafter, tokens, k) == expected
    for base_length, token_ids in commits:
        unchanged = min(base_length, len(tokens))
        tokens = tokens[:unchanged] + token_ids
        expected = scan(tokens, k, max_ngram, min_ngram)
        assert draft(drafter, tokens, k, num_unchanged=unchanged) == expected


def test_a_prompt_read_in_chunks_makes_the_same_index() -> None:
    """Chunks must not lose the n-grams that cross their borders."""
    tokens = [1, 2, 3, 4, 5, 6, 7, 3, 4]
    whole, chunked = make(), make()
    for end in (2, 4, 5):
        assert draft(chunked, tokens[:end], 0) == []
    assert draft(chunked, tokens, 3, num_unchanged=5) == draft(whole, tokens, 3) == [5, 6, 7]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_ngrams": 3}, r"drafter_pools\.lookup\.options\.max_ngrams: .*'max_ngram'"),
        ({"max_ngram": 0}, r"drafter_pools\.lookup\.options\.max_ngram: .*greater than or equal"),
        ({"min_chance": 1.5}, r"drafter_pools\.lookup\.options\.min_chance: .*less than or equal"),
        ({"max_ngram": "4"}, r"drafter_pools\.lookup\.options\.max_ngram: .*valid integer"),
        ({"min_ngram": 5}, r"drafter_pools\.lookup\.options: min_ngram 5 is above max_ngram 4"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], message: str) -> None:
    """A typo in the config must not be ignored."""
    with pytest.raises(ConfigError, match=message):
        make(**options)


def test_prompt_lookup_starts_without_torch() -> None:
    """An n-gram drafter runs on a machine where the model libraries are not installed."""
    import subprocess

    code = (
        "import sys\n"
        "from core.config import DrafterPoolConfig\n"
        "from drafter_service.drafters import create_drafter\n"
        "create_drafter(DrafterPoolConfig(name='n', kind='ngram'))\n"
        "import drafter_service.server\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
