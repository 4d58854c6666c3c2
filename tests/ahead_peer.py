"""Peers for the tests of drafting ahead: an orchestrator's side that checks every plan it gets.

The truth is a second model that forgets everything between two drafts.
"""

import itertools
from collections.abc import Sequence

from core.drafter import Ahead, AheadJob, Draft, DraftJob
from core.model import RaggedModel
from core.types import DraftCommands, DraftCommit, DraftOpen, DraftSent, Plan, Rule, SamplingParams
from drafter_service.drafters.draft_model import DraftModelDrafter
from drafter_service.engine import DrafterEngine

GREEDY = SamplingParams()
COUPLED = SamplingParams(0.9, seed=3, rule=Rule.COUPLED, repetition_penalty=1.3)
K = 3


class Noting(DraftModelDrafter):
    """Notes what it was asked for, in order; fails ahead when it is told to."""

    def __init__(self, model: RaggedModel) -> None:
        super().__init__(model)
        self.calls: list[str] = []
        self.is_broken = False

    def draft(self, jobs: Sequence[DraftJob]) -> list[Draft]:
        self.calls.append(f"draft {[job.num_draft_tokens for job in jobs]}")
        return super().draft(jobs)

    def begin_ahead(self, job: AheadJob) -> Ahead:
        self.calls.append(f"begin {len(job.block)}")
        return super().begin_ahead(job)

    def advance(self, aheads: Sequence[Ahead]) -> None:
        self.calls.append(f"advance {len(aheads)}")
        if self.is_broken:
            raise RuntimeError("broken")
        super().advance(aheads)


class Oracle:
    """What a drafter without memory drafts, computed once for each text."""

    def __init__(self, model: RaggedModel) -> None:
        self._drafter = DraftModelDrafter(model)
        self._made: dict[tuple[object, ...], tuple[int, ...]] = {}

    def draft(self, tokens: Sequence[int], sampling: SamplingParams) -> tuple[int, ...]:
        key = (*tokens, sampling)
        if key not in self._made:
            [made] = self._drafter.draft([DraftJob(0, list(tokens), K, sampling)])
            self._drafter.close(0)
            self._made[key] = made.token_ids
        return self._made[key]


class Peer:
    """One sequence as its orchestrator sees it: checks every plan, and goes on."""

    def __init__(
        self, engine: DrafterEngine, oracle: Oracle, number: int, sampling: SamplingParams
    ) -> None:
        self.engine, self.oracle, self.number, self.sampling = engine, oracle, number, sampling
        self.generation = 0
        self.reopen(K)

    def reopen(self, wanted: int, max_branches: int = 6) -> None:
        """A new open; what there was is stale."""
        self.generation += 1
        self.tokens = [self.number * 20 + i for i in range(5)]
        self.accepted, self.wanted = 0, wanted
        self.draft: tuple[int, ...] | None = None
        self.block: tuple[int, ...] | None = None
        self.branches: dict[tuple[int, int], tuple[int, ...]] = {}
        open_ = DraftOpen(
            self.number,
            self.generation,
            tuple(self.tokens),
            self.sampling,
            K,
            wanted,
            max_branches,
        )
        self.engine.apply(0, DraftCommands(opens=(open_,)))

    def send(self, num_tokens: int, next_tokens: int = K, is_own: bool = True) -> None:
        """A block goes to the target; with `is_own` it is the drafter's, and it is told."""
        self.block = (self.draft or ())[:num_tokens] if is_own else (1, 2, 3)[:num_tokens]
        self.branches = {}
        if is_own:
            self.wanted = 0
            sent = DraftSent(
                self.number, self.generation, len(self.tokens), len(self.block), next_tokens
            )
            self.engine.apply(0, DraftCommands(sents=(sent,)))

    def commit(self, accepted: int, token: int, wanted: int = K, repeats: int = 1) -> bool:
        """The block's outcome; returns whether a branch was there for it."""
        assert self.block is not None
        base, new = len(self.tokens), (*self.block[:accepted], token)
        self.draft = self.branches.get((accepted, token))
        self.wanted = wanted
        commit = DraftCommit(self.number, self.generation, base, accepted, new, wanted)
        self.engine.apply(0, DraftCommands(commits=(commit,) * repeats))
        self.tokens += new
        self.block, self.accepted = None, accepted
        return self.draft is not None

    def take(self, plan: Plan) -> None:
        """Check a plan for the state it was made in, which is this one."""
        assert plan.generation == self.generation
        if plan.base_length < len(self.tokens):
            [branch] = plan.branches
            assert plan.base_length == len(self.tokens) - self.accepted - 1
            assert (branch.accepted, branch.token) == (self.accepted, self.tokens[-1])
            expected = self.oracle.draft(self.tokens, self.sampling)
            assert branch.draft_token_ids == expected[: self.wanted]
            if self.block is None:
                self.draft = branch.draft_token_ids
            self.wanted = 0
            return
        assert self.block is not None and plan.base_length == len(self.tokens)
        for branch in plan.branches:
            assert (branch.accepted, branch.token) not in self.branches
            assert branch.token not in self.block[branch.accepted : branch.accepted + 1]
            outcome = [*self.tokens, *self.block[: branch.accepted], branch.token]
            drafted = branch.draft_token_ids
            assert drafted == self.oracle.draft(outcome, self.sampling)[: len(drafted)]
            self.branches[branch.accepted, branch.token] = drafted


def timeless(drafter: DraftModelDrafter) -> DrafterEngine:
    """An engine that never runs out of time, so that the same schedule gives the same branches."""
    return DrafterEngine(drafter, K, clock=lambda: 0.0)


def step(engine: DrafterEngine, *peers: Peer) -> None:
    for _, frame in engine.step():
        for plan in frame.plans:
            next(p for p in peers if p.number == plan.sequence).take(plan)


def drain(engine: DrafterEngine, *peers: Peer) -> None:
    for num_steps in itertools.count():
        if not engine.has_work:
            return
        assert num_steps < 100
        step(engine, *peers)
