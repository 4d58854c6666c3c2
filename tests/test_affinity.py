"""Which verifier gets a sequence: even load first, a known beginning where it costs little."""

from collections import Counter

from core.types import ModelIdentity, SamplingParams, VerifierInfo
from orchestrator.affinity import PrefixAffinity
from orchestrator.pool import Pool, Replica
from orchestrator.requests import Health

SLOTS = 16
SYSTEM = tuple(range(64))


def info(instance: str = "first life") -> VerifierInfo:
    """A verifier with SLOTS slots."""
    identity = ModelIdentity("m", 100)
    return VerifierInfo(identity, 2048, SLOTS, 512, (), SamplingParams(), instance, 100)


def verifiers(*names: str) -> Pool:
    """Verifiers that are ready."""
    pool = Pool("", "verifier")
    for name in names:
        pool.add(name).become_ready("x:1", info())
    return pool


def take(affinity: PrefixAffinity, pool: Pool, sequence: int, tokens: tuple[int, ...]) -> Replica:
    """Admit one sequence."""
    replica = affinity.choose(pool, tokens)
    assert replica is not None
    replica.take(sequence)
    return replica


def prompt(seed: int, length: int = 100) -> tuple[int, ...]:
    """A prompt that shares its beginning with no other."""
    return tuple(1000 * seed + i for i in range(length))


def test_requests_one_after_another_take_turns() -> None:
    """Of idle verifiers the first would get everything."""
    pool, affinity, counts = verifiers("a", "b", "c"), PrefixAffinity(), Counter[str]()
    for sequence in range(30):
        replica = take(affinity, pool, sequence, prompt(sequence))
        counts[replica.replica_id] += 1
        replica.sequences.clear()
    assert set(counts.values()) == {10}


def test_next_turn_of_a_conversation_goes_where_the_last_one_was() -> None:
    """A long conversation would be read anew by another verifier at every turn."""
    pool, affinity = verifiers("a", "b", "c"), PrefixAffinity()
    for turn in range(1, 4):
        for user in range(5):
            replica = take(affinity, pool, 10 * turn + user, prompt(user, 100 * turn))
            replica.sequences.clear()
            assert replica.replica_id == "abcab"[user]


def test_longest_known_beginning_wins() -> None:
    """A system prompt that all share must not outweigh a conversation that one of them has."""
    pool, affinity = verifiers("a", "b"), PrefixAffinity()
    first = take(affinity, pool, 1, SYSTEM)
    second = take(affinity, pool, 2, (*SYSTEM, *prompt(2)))
    pool.replicas["a"].sequences.clear()
    pool.replicas["b"].sequences.clear()
    assert second is first  # it has read the system prompt, and is hardly fuller
    other = pool.replicas["b" if first.replica_id == "a" else "a"]
    first.sequences.update({5, 6, 7})
    assert take(affinity, pool, 3, (*SYSTEM, *prompt(3))) is other  # the first is too full
    first.sequences.clear()
    other.sequences.clear()
    assert take(affinity, pool, 4, (*SYSTEM, *prompt(2), 7)) is first
    assert take(affinity, pool, 5, (*SYSTEM, *prompt(3), 7)) is other


def test_one_system_prompt_for_all_spreads_over_all() -> None:
    """Affinity without a limit would fill one verifier and leave the others idle."""
    pool, affinity = verifiers("a", "b"), PrefixAffinity()
    for sequence in range(2 * SLOTS - 2):
        take(affinity, pool, sequence, (*SYSTEM, *prompt(sequence)))
        loads = [len(r.sequences) for r in pool.replicas.values()]
        assert abs(loads[0] - loads[1]) <= SLOTS // 8 + 1


def test_what_a_verifier_no_longer_holds_is_not_followed() -> None:
    """A restart, or as many new sequences as there are slots, and the beginning is gone."""
    pool, affinity = verifiers("a", "b"), PrefixAffinity()
    first, second = pool.replicas["a"], pool.replicas["b"]
    assert take(affinity, pool, 1, prompt(1)) is first
    assert take(affinity, pool, 2, prompt(2)) is second
    first.become_lost(Health.LOST, "killed")
    first.become_ready("x:2", info("second life"))
    second.sequences.clear()
    assert take(affinity, pool, 3, prompt(1)) is first  # by turn, not by memory: 1 against 1
    first.sequences.update({7})
    assert take(affinity, pool, 4, prompt(2)) is second  # it remembers
    for sequence in range(10, 10 + 2 * SLOTS):
        take(affinity, pool, sequence, prompt(sequence)).sequences.clear()
        first.sequences.clear()
    second.sequences.add(99)
    assert take(affinity, pool, 100, prompt(2)) is first


def test_full_or_lost_verifiers_get_nothing() -> None:
    """A request would wait for the one that knows it while another has room."""
    pool, affinity = verifiers("a", "b"), PrefixAffinity()
    first = take(affinity, pool, 1, prompt(1))
    first.is_blocked = True
    assert take(affinity, pool, 2, prompt(1)) is not first
    for replica in pool.replicas.values():
        replica.become_lost(Health.LOST, "gone")
    assert affinity.choose(pool, prompt(1)) is None
