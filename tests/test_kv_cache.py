"""The slot cache alone: leases, moves and copies, with K/V whose right values are computable.

The K/V row of a token here is (sum of the tokens up to it, its index): wrong as soon as a row is
moved to the wrong place, lost, or taken from a sequence with another past.
"""

import random

import pytest
import torch

from core.errors import ModelError
from core.kv_cache import MIN_REUSED_TOKENS, LayerSpec, NoSlotError, SlotCache

CPU = torch.device("cpu")
SLOTS, LENGTH = 5, 40


def make_cache() -> SlotCache:
    """Three layers of different geometry, the last of which reads the first one's K/V."""
    layers = [
        LayerSpec(2, 4, 4, CPU, torch.float32, 0),
        LayerSpec(1, 6, 3, CPU, torch.float32, 1),
        LayerSpec(2, 4, 4, CPU, torch.float32, 0),
    ]
    return SlotCache(layers, SLOTS, LENGTH)


def expected_rows(token_ids: list[int]) -> torch.Tensor:
    """`[T]`: what `append` wrote for each token."""
    tokens = torch.tensor(token_ids, dtype=torch.float32)
    return tokens.cumsum(0) * 100 + torch.arange(len(token_ids))


def append(cache: SlotCache, sequence: int, token_ids: list[int]) -> None:
    """Write the K/V of tokens behind the cached ones, as a forward does."""
    start = len(cache.token_ids(sequence))
    (slot,) = cache.place([sequence])
    rows = expected_rows([*cache.token_ids(sequence), *token_ids])[start:]
    slots = torch.full((len(token_ids),), slot)
    indices = torch.arange(start, start + len(token_ids))
    for layer, spec in enumerate(cache.layers):
        if spec.source == layer:
            index = cache.row_index(slots, indices, spec.num_heads)
            keys = rows[None, :, None].expand(spec.num_heads, -1, spec.key_dim) + layer
            values = -rows[None, :, None].expand(spec.num_heads, -1, spec.value_dim) - layer
            cache.write(layer, keys, values, index)
    cache.extend(sequence, token_ids)


def verify(cache: SlotCache, truth: dict[int, list[int]]) -> None:
    """Every live sequence has its tokens, and every layer their K/V; live slots have no gaps."""
    cache.check()
    places = cache.place(list(truth))
    assert not places or max(places) - min(places) + 1 == len(set(places)) == len(truth)
    for sequence, slot in zip(truth, places, strict=True):
        tokens = truth[sequence]
        assert list(cache.token_ids(sequence)) == tokens
        for layer, spec in enumerate(cache.layers):
            rows = expected_rows(tokens)[None, :, None]
            keys = cache.keys[layer][slot, :, : len(tokens)]
            values = cache.values[layer][slot, :, : len(tokens)]
            assert torch.equal(keys, (rows + spec.source).expand_as(keys))
            assert torch.equal(values, (-rows - spec.source).expand_as(values))


@pytest.mark.parametrize("seed", range(12))
def test_random_lives_of_sequences(seed: int) -> None:
    """Breaks when a move, a copied prefix or an eviction corrupts a bystander: random opens,
    closes, appends, rollbacks and prefix reuse, all K/V checked after each step."""
    rng = random.Random(seed)
    cache = make_cache()
    stems = [[rng.randrange(9) for _ in range(LENGTH)] for _ in range(3)]
    truth: dict[int, list[int]] = {}
    gained = 0
    for step in range(150):
        action = rng.choice(["open", "close", "append", "truncate", "reuse", "reuse"])
        sequence = rng.choice([*truth, step])
        if action == "open" or sequence not in truth:
            if len(truth) == SLOTS:
                with pytest.raises(NoSlotError):
                    cache.open(step)
                continue
            sequence = step
            cache.open(sequence)
            truth[sequence] = []
        if action == "close":
            cache.close(sequence)
            del truth[sequence]
        elif action == "truncate":
            length = rng.randrange(len(truth[sequence]) + 1)
            cache.truncate(sequence, length)
            del truth[sequence][length:]
        else:
            past = truth[sequence][:4]
            stem = rng.choice([s for s in stems if s[: len(past)] == past] or stems)
            room = LENGTH - len(truth[sequence])
            tokens = stem[len(truth[sequence]) :][: rng.randint(1, 20)]
            if rng.random() < 0.3:
                tokens = [*tokens[:-1], rng.randrange(9)]
            if not tokens or not room:
                continue
            known = cache.reuse_prefix(sequence, tokens) if action == "reuse" else 0
            assert 0 <= known < len(tokens)
            gained += known
            append(cache, sequence, tokens[known:])
            truth[sequence] += tokens
        verify(cache, truth)
    assert gained > 0


def test_a_finished_sequence_is_taken_over_in_place() -> None:
    """Breaks when the next turn of a chat copies, or computes again, what its slot still has."""
    cache = make_cache()
    cache.open(1)
    append(cache, 1, list(range(20)))
    (slot,) = cache.place([1])
    cache.close(1)
    cache.open(2)
    assert cache.reuse_prefix(2, [*range(20), 5, 6]) == 20
    assert cache.place([2]) == [slot]
    verify(cache, {2: list(range(20))})


def test_a_live_sequence_keeps_what_another_copies() -> None:
    """Breaks when a copied prefix is shared instead: the source changes its mind, then ends."""
    cache = make_cache()
    cache.open(1)
    append(cache, 1, list(range(20)))
    cache.open(2)
    assert cache.reuse_prefix(2, [*range(15), 77]) == 15
    cache.truncate(1, 5)
    append(cache, 1, [8] * 10)
    verify(cache, {1: [*range(5)] + [8] * 10, 2: list(range(15))})
    cache.close(1)
    cache.open(3)
    append(cache, 3, [4, 4])
    verify(cache, {2: list(range(15)), 3: [4, 4]})


def test_a_long_retained_conversation_survives_a_short_match() -> None:
    """Breaks when a request that shares only the first tokens takes the slot of a long one."""
    cache = make_cache()
    cache.open(1)
    append(cache, 1, list(range(35)))
    cache.close(1)
    cache.open(2)
    assert cache.reuse_prefix(2, [*range(10), 99]) == 10
    cache.open(3)
    assert cache.reuse_prefix(3, [*range(35), 1]) == 35


def test_at_least_one_token_is_left_to_compute() -> None:
    """Breaks when a repeated prompt is reused whole: there would be no logits to draw from."""
    cache = make_cache()
    cache.open(1)
    append(cache, 1, list(range(12)))
    cache.open(2)
    assert cache.reuse_prefix(2, list(range(12))) == 11
    cache.open(3)
    assert cache.reuse_prefix(3, list(range(MIN_REUSED_TOKENS))) == 0  # one short of worth it


def test_the_oldest_prefix_is_evicted_first() -> None:
    """Breaks when a slot is taken from the conversation that was used last."""
    cache = make_cache()
    for sequence in range(SLOTS):
        cache.open(sequence)
        append(cache, sequence, [sequence] * 12)
    for sequence in (3, 1, 0, 4, 2):
        cache.close(sequence)
    cache.open(10)
    append(cache, 10, [7])
    for stem, kept in ((1, 11), (3, 0)):
        cache.open(20 + stem)
        assert cache.reuse_prefix(20 + stem, [stem] * 12) == kept


def test_no_room_for_the_cache_is_one_clear_error() -> None:
    """Breaks when a cache that cannot fit ends the process, or fails later in mid-flight."""
    layer = LayerSpec(8, 128, 128, CPU, torch.float32, 0)
    with pytest.raises(ModelError, match=r"needs 8589934592000000 bytes .*max_sequences 1000000"):
        SlotCache([layer], 1_000_000, 1 << 20)
