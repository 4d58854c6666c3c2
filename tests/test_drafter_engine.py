"""The drafter's engine with a drafter a person can compute: token t is followed by t + 1.

`Counting` notes every batch it was given, so that the tests see what was batched with what.
"""

from collections.abc import Sequence

import pytest

from core.types import (
    Branch,
    DraftClose,
    DraftCommands,
    DraftCommit,
    DraftOpen,
    DraftPlans,
    ModelIdentity,
    NeedOpen,
    NeedOpenReason,
    Plan,
    Rule,
    SamplingParams,
    SparseDistribution,
)
from drafter_service.drafters.base import Draft, Drafter, DraftJob
from drafter_service.engine import DrafterEngine

GREEDY = SamplingParams()
POISON = 66  # a sequence that ends with it breaks the drafter


def one_point(token_id: int) -> SparseDistribution:
    return SparseDistribution((token_id,), (1.0,))


class Counting(Drafter):
    """Drafts t + 1, t + 2, ... behind the last token t."""

    kind = "counting"
    identity = ModelIdentity("counting", vocab_size=100)
    max_length = 20
    max_sequences = 3
    prefill_chunk = 4

    def __init__(self) -> None:
        self.batches: list[list[DraftJob]] = []
        self.closed: list[int] = []
        self.excess = 0

    def draft(self, jobs: Sequence[DraftJob]) -> list[Draft]:
        self.batches.append([job for job in jobs])
        if any(job.token_ids[-1] == POISON for job in jobs):
            raise RuntimeError("poisoned")
        return [self._count(job) for job in jobs]

    def _count(self, job: DraftJob) -> Draft:
        ids = [(job.token_ids[-1] + 1 + i) % 100 for i in range(job.num_draft_tokens + self.excess)]
        needed = job.sampling.rule.needs_distributions
        return Draft(tuple(ids), tuple([one_point(i) for i in ids]) if needed else ())

    def close(self, sequence: int) -> None:
        self.closed.append(sequence)


@pytest.fixture
def drafter() -> Counting:
    return Counting()


@pytest.fixture
def engine(drafter: Counting) -> DrafterEngine:
    return DrafterEngine(drafter, max_draft_tokens=3)


def opened(
    sequence: int, token_ids: Sequence[int], k: int = 2, generation: int = 1
) -> DraftCommands:
    return DraftCommands(opens=(DraftOpen(sequence, generation, tuple(token_ids), GREEDY, 3, k),))


def committed(
    sequence: int, base_length: int, token_ids: Sequence[int], k: int = 2, generation: int = 1
) -> DraftCommands:
    accepted = len(token_ids) - 1
    commit = DraftCommit(sequence, generation, base_length, accepted, tuple(token_ids), k)
    return DraftCommands(commits=(commit,))


def run(engine: DrafterEngine) -> dict[int, DraftPlans]:
    """Steps until nothing is left; one frame per stream is expected."""
    frames: dict[int, DraftPlans] = {}
    while engine.has_work:
        for stream, plans in engine.step():
            assert stream not in frames
            frames[stream] = plans
    return frames


def test_an_open_and_a_commit_are_answered_for_the_known_outcome(engine: DrafterEngine) -> None:
    """The orchestrator matches base_length, accepted and token; one off and no draft is used."""
    engine.apply(0, opened(5, [1, 2, 3]))
    assert run(engine)[0].plans == (Plan(5, 1, 2, (Branch(0, 3, (4, 5)),)),)
    engine.apply(0, committed(5, 3, [4, 5, 9], k=3))
    assert run(engine)[0].plans == (Plan(5, 1, 3, (Branch(2, 9, (10, 11, 12)),)),)
    assert not engine.has_work and engine.step() == []


def test_distributions_travel_with_the_draft_and_are_cut_with_it(
    engine: DrafterEngine, drafter: Counting
) -> None:
    """One distribution more or less than tokens, and the verifier refuses the row."""
    drafter.excess = 2
    sampling = SamplingParams(temperature=1.0, rule=Rule.REJECTION)
    engine.apply(0, DraftCommands(opens=(DraftOpen(5, 1, (1, 2, 3), sampling, 3, 2),)))
    branch = Branch(0, 3, (4, 5), (one_point(4), one_point(5)))
    assert run(engine)[0].plans == (Plan(5, 1, 2, (branch,)),)


def test_all_streams_are_drafted_for_in_one_batch(engine: DrafterEngine, drafter: Counting) -> None:
    """Two orchestrators may use the same ids; their sequences must not touch each other."""
    engine.apply(0, opened(5, [1], k=1))
    engine.apply(1, opened(5, [7], k=3))
    frames = run(engine)
    assert frames[0].plans[0].branches[0].draft_token_ids == (2,)
    assert frames[1].plans[0].branches[0].draft_token_ids == (8, 9, 10)
    assert [len(batch) for batch in drafter.batches] == [2]
    engine.close_stream(0)
    engine.apply(1, committed(5, 1, [8]))
    assert run(engine)[1].plans and engine.num_sequences == 1


def test_a_newer_commit_replaces_a_wish_that_was_not_met_yet(
    engine: DrafterEngine, drafter: Counting
) -> None:
    """Drafting for an outcome that is history already would delay the one that is wanted."""
    engine.apply(0, opened(5, [1, 2], k=2))
    engine.apply(0, committed(5, 2, [3], k=2))
    engine.apply(0, committed(5, 3, [4], k=1))
    assert run(engine)[0].plans == (Plan(5, 1, 3, (Branch(0, 4, (5,)),)),)
    assert len(drafter.batches) == 1
    engine.apply(0, committed(5, 4, [5], k=2))
    engine.apply(0, committed(5, 5, [6], k=0))
    assert run(engine) == {}


def test_a_repeated_commit_changes_nothing(engine: DrafterEngine) -> None:
    """A commit that appends instead of truncating first doubles the tokens after a retry."""
    engine.apply(0, opened(5, [1, 2]))
    engine.apply(0, committed(5, 2, [3, 4]))
    first = run(engine)[0].plans
    engine.apply(0, committed(5, 2, [3, 4]))
    assert run(engine)[0].plans == first


@pytest.mark.parametrize(
    ("commands", "reason"),
    [
        (committed(5, 9, [1]), NeedOpenReason.GAP),
        (committed(5, 3, [1], generation=2), NeedOpenReason.GAP),
        (committed(77, 3, [1]), NeedOpenReason.GAP),
        (committed(5, 3, [100]), NeedOpenReason.INVALID),
        (committed(5, 0, [1]), NeedOpenReason.INVALID),
        (DraftCommands(commits=(DraftCommit(5, 1, 3, 2, (4,), 2),)), NeedOpenReason.INVALID),
        (committed(5, 3, range(17)), NeedOpenReason.TOO_LONG),
        (opened(7, [100]), NeedOpenReason.INVALID),
        (opened(7, []), NeedOpenReason.INVALID),
        (opened(7, range(20)), NeedOpenReason.TOO_LONG),
        (
            DraftCommands(opens=(DraftOpen(7, 1, (1,), SamplingParams(-1.0), 3, 2),)),
            NeedOpenReason.INVALID,
        ),
    ],
)
def test_what_cannot_go_on_is_said_once_and_harms_nobody(
    engine: DrafterEngine, commands: DraftCommands, reason: NeedOpenReason
) -> None:
    """One bad command must not stop the others, and must not be answered for ever."""
    [command] = commands.opens + commands.commits
    engine.apply(0, opened(5, [1, 2, 3], k=0))
    engine.apply(0, opened(6, [1, 2], k=1))
    run(engine)
    engine.apply(0, commands)
    engine.apply(0, committed(6, 2, [3], k=1))
    frame = run(engine)[0]
    assert [plan.sequence for plan in frame.plans] == [6]
    [need] = frame.need_opens
    assert (need.sequence, need.generation) == (command.sequence, command.generation)
    assert need.reason is reason and need.message
    engine.apply(0, committed(command.sequence, 3, [4], generation=command.generation))
    assert run(engine) == {}
    engine.apply(0, opened(command.sequence, [1, 2], k=1, generation=command.generation + 1))
    assert [plan.sequence for plan in run(engine)[0].plans] == [command.sequence]


def test_a_full_drafter_says_so_and_takes_the_next_after_a_close(
    engine: DrafterEngine, drafter: Counting
) -> None:
    """An open beyond the slots must fail by itself, and a close must really free one."""
    for sequence in (1, 2, 3, 4):
        engine.apply(0, opened(sequence, [sequence], k=1))
    frame = run(engine)[0]
    assert [plan.sequence for plan in frame.plans] == [1, 2, 3]
    assert [(need.sequence, need.reason) for need in frame.need_opens] == [(4, NeedOpenReason.FULL)]
    again = DraftCommands(opens=opened(4, [4]).opens, closes=(DraftClose(1, 1),))
    engine.apply(0, again)
    assert [plan.sequence for plan in run(engine)[0].plans] == [4]
    assert len(drafter.closed) == 1


def test_old_generations_are_ignored(engine: DrafterEngine, drafter: Counting) -> None:
    """A late message of an earlier open must not touch the sequence that replaced it."""
    engine.apply(0, opened(5, [1, 2], generation=3, k=0))
    run(engine)
    engine.apply(0, committed(5, 2, [9], generation=2))
    engine.apply(0, opened(5, [9], generation=2))
    engine.apply(0, DraftCommands(closes=(DraftClose(5, 2),)))
    engine.refuse(0, 5, 2, "unreadable")
    assert run(engine) == {} and drafter.closed == []
    engine.apply(0, committed(5, 2, [3], generation=3, k=1))
    assert run(engine)[0].plans[0].branches == (Branch(0, 3, (4,)),)


def test_drafts_are_cut_to_limits_and_context(engine: DrafterEngine) -> None:
    """A draft beyond the drafter's context would overrun its cache."""
    engine.apply(0, opened(5, range(10), k=50))
    assert len(run(engine)[0].plans[0].branches[0].draft_token_ids) == 3
    engine.apply(0, committed(5, 10, range(10, 18), k=3))
    assert run(engine)[0].plans[0].branches[0].draft_token_ids == (18, 19)


def test_prompts_are_read_in_chunks_behind_wanted_drafts(
    engine: DrafterEngine, drafter: Counting
) -> None:
    """A long prompt must not hold up the drafts of others, nor be starved by them."""
    engine.apply(0, opened(1, range(10), k=2))  # wanted, but more than a chunk to read
    engine.apply(0, opened(2, [1], k=1))
    assert [plan.sequence for _, frame in engine.step() for plan in frame.plans] == [2]
    served: list[int] = []
    for length in range(1, 20):
        engine.apply(0, committed(2, length, [5], k=1))
        served += [plan.sequence for _, frame in engine.step() for plan in frame.plans]
        if 1 in served:
            break
    assert served.count(2) >= 4 and served[-2:] in ([1, 2], [2, 1])
    chunks = [batch[0] for batch in drafter.batches if batch[0].num_draft_tokens == 0]
    assert [(len(job.token_ids), job.num_unchanged) for job in chunks] == [(4, 0), (8, 4)]


def test_a_few_tokens_are_read_with_the_next_draft(
    engine: DrafterEngine, drafter: Counting
) -> None:
    """A forward for every commit that wants no draft keeps the drafts of others waiting."""
    engine.apply(0, opened(5, [1, 2, 3], k=1))
    run(engine)
    engine.apply(0, committed(5, 3, [4], k=0))
    assert not engine.has_work
    engine.apply(0, committed(5, 4, [5], k=2))
    assert run(engine)[0].plans == (Plan(5, 1, 4, (Branch(0, 5, (6, 7)),)),)
    assert [job.num_unchanged for [job] in drafter.batches] == [0, 3]


def test_a_job_says_how_much_of_it_is_unchanged(engine: DrafterEngine, drafter: Counting) -> None:
    """A cache that trusts too much drafts from tokens that were taken back."""
    engine.apply(0, opened(5, [1, 2, 3], k=1))
    run(engine)
    engine.apply(0, committed(5, 3, [4, 5, 6], k=0))
    engine.apply(0, committed(5, 2, [7], k=1))
    run(engine)
    assert [job.num_unchanged for [job] in drafter.batches] == [0, 2]
    assert list(drafter.batches[-1][0].token_ids) == [1, 2, 7]


def test_one_failing_sequence_does_not_lose_the_others(
    engine: DrafterEngine, drafter: Counting
) -> None:
    """An exception in a batch is retried one by one, from nothing: what the caches are worth is
    not known any more. Only the culprit is given up."""
    for sequence in (1, 2, 3):
        engine.apply(0, opened(sequence, [sequence], k=0))
    assert run(engine) == {}
    for sequence, token in ((1, 10), (2, POISON), (3, 30)):
        engine.apply(0, committed(sequence, 1, [token], k=1))
    frame = run(engine)[0]
    drafts = {plan.sequence: plan.branches[0].draft_token_ids for plan in frame.plans}
    assert drafts == {1: (11,), 3: (31,)}
    expected = NeedOpen(2, 1, NeedOpenReason.INVALID, "the drafter failed: RuntimeError")
    assert frame.need_opens == (expected,)
    assert engine.num_sequences == 2
    assert set(drafter.closed) == {job.sequence for job in drafter.batches[0]}
    assert [job.num_unchanged for batch in drafter.batches[-3:] for job in batch] == [0, 0, 0]
