"""Drafts behind the outcomes of a block, decoded by one model as a tree over one slot.

    plain tokens             nodes                        the block is d1 d2 d3, the target may say
    .. c  d1  d2  d3         t  x1 x2 ..   behind d1      t or u instead of d2, or v behind d3
                             u  y1 y2 ..   behind d1
                             v  z1 z2 ..   behind d3

All branches of all trees take a step in one forward. Where a token's guesses are not known, because
it has not been run yet (the last one of a whole draft) or was forgotten, it is run first and its
branches begin one step later. When the outcome is known the slot keeps that branch's nodes and the
drafter its tokens, so that the next draft goes on from there. Knows nothing of streams and plans.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from core.drafter import Ahead, AheadJob, DraftJob
from core.model import RaggedModel, Row
from core.tree import Node
from core.types import Branch, SamplingParams
from drafter_service.drawing import DraftInProgress


@dataclass(frozen=True, slots=True)
class Continuation:
    """What the model says behind the first `length` tokens of a slot, as far as it was asked.

    The slot holds all of `token_ids` but the last. guesses: as in DraftInProgress.
    """

    length: int
    sampling: SamplingParams
    token_ids: tuple[int, ...]
    guesses: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, draft: DraftInProgress) -> "Continuation":
        """What a draft tells, once its last token but one was run."""
        job, tokens = draft.job, tuple(draft.token_ids)
        length = len(job.token_ids) + len(draft.behind)
        return cls(length, job.sampling, tokens, tuple(draft.guesses))

    def fits(self, job: DraftJob | AheadJob, block: Sequence[int] = ()) -> bool:
        """Whether it is about a job's text, and says its block; the text itself is not compared."""
        return (
            self.length == len(job.token_ids)
            and self.sampling == job.sampling
            and self.token_ids[: len(block)] == tuple(block)
        )


@dataclass(slots=True)
class _Twig:
    """One outcome, and the draft behind it. `tip` is the last token run, None before the first.

    Without a token it is a block's token that is run for its guesses.
    """

    accepted: int
    token: int | None
    draft: DraftInProgress
    tip: Node | None = None


@dataclass(slots=True)
class _Step:
    """A token to run behind `parent`; `twig` gets the logits."""

    token_id: int
    parent: Node
    twig: _Twig | None


@dataclass(slots=True)
class BranchTree(Ahead):
    """See `Ahead`. `root` is an empty draft of the job; `known` says the block, if it is known.

    The model's slot must hold nothing that does not agree with the committed tokens, the block and
    what is known behind it, and lack the last token of the block whose guesses are not known.
    """

    model: RaggedModel
    job: AheadJob
    root: DraftInProgress
    known: Continuation | None
    memory: dict[int, Continuation]
    _pending: list[_Step] = field(default_factory=list)
    _taken: list[_Step] = field(default_factory=list)
    _twigs: list[_Twig] = field(default_factory=list)
    _branches: list[Branch] = field(default_factory=list)
    _guesses: list[tuple[int, ...]] = field(default_factory=list)
    _num_plain: int = 0
    _room: int = 0

    def __post_init__(self) -> None:
        size, block = len(self.job.token_ids), self.job.block
        self._num_plain = start = self.model.length(self.job.sequence)
        self._room = self.model.max_length - max(start, size + len(block))
        self._guesses = [() for _ in range(len(block) + 1)]
        num_known = 0 if self.known is None else len(self.known.token_ids)
        first_unknown = len(block) + 1 if num_known > len(block) else num_known
        chain = [*self.job.token_ids[start:], *block[max(0, start - size) :]]
        for index, token_id in enumerate(chain, start):
            accepted, twig = index - size + 1, None
            if accepted >= first_unknown:
                twig = _Twig(accepted, None, self.root.fork(block[:accepted], 1))
            self._pending.append(_Step(token_id, self._chain_node(index - 1), twig))
        for accepted in range(min(first_unknown, len(block) + 1)):
            assert self.known is not None
            best = self.known.guesses[accepted]
            if accepted == len(block):
                best = (self.known.token_ids[accepted], *best)
            self._branch_out(accepted, best)

    @property
    def is_done(self) -> bool:
        """See `Ahead`."""
        return not self._pending

    @property
    def branches(self) -> Sequence[Branch]:
        """See `Ahead`."""
        return self._branches

    @property
    def guesses(self) -> Sequence[Sequence[int]]:
        """See `Ahead`."""
        return self._guesses

    def take(self, room: int) -> tuple[Row, list[DraftInProgress]]:
        """What to run next, at most `room` tokens, and the drafts that get its logits."""
        self._taken, self._pending = self._pending[:room], self._pending[room:]
        start = self.model.cache.num_used(self.job.sequence)
        nodes = [step.parent.child(index) for index, step in enumerate(self._taken, start)]
        twigs = [step.twig for step in self._taken if step.twig is not None]
        token_ids = [step.token_id for step in self._taken]
        for step, node in zip(self._taken, nodes, strict=True):
            if step.twig is not None:
                step.twig.tip = node
        row = Row(self.job.sequence, start, token_ids, len(twigs), nodes)
        return row, [twig.draft for twig in twigs]

    def grow(self) -> None:
        """Go on from what the drafts of `take` have got."""
        for step in self._taken:
            twig = step.twig
            if twig is not None and twig.token is None:
                best = [*twig.draft.token_ids, *(g for each in twig.draft.guesses for g in each)]
                self._branch_out(twig.accepted, best)
            elif twig is not None:
                self._go_on(twig)
        self._taken = []

    def keep(self, accepted: int, token: int) -> bool:
        """See `Ahead`."""
        sequence, cache = self.job.sequence, self.model.cache
        self._pending = []
        found = [t for t in self._twigs if (t.accepted, t.token) == (accepted, token)]
        tip = found[0].tip if found else None
        if num_used := cache.num_used(sequence):
            last = min(len(self.job.token_ids) + accepted, num_used) - 1
            cache.keep(sequence, tip or self._chain_node(last))
        self.memory.pop(sequence, None)
        if tip is not None and found[0].draft.token_ids:
            self.memory[sequence] = Continuation.of(found[0].draft)
        return tip is not None

    def _chain_node(self, index: int) -> Node:
        """The place of a committed token or one of the block's."""
        num_plain = min(index + 1, self._num_plain)
        return Node(num_plain, tuple(range(num_plain, index + 1)))

    def _branch_out(self, accepted: int, best: Sequence[int]) -> None:
        """Begin the branches of one accepted count, for the likeliest tokens it is to have."""
        block, size = tuple(self.job.block), len(self.job.token_ids)
        others = [token for token in best if token not in block[accepted : accepted + 1]]
        self._guesses[accepted] = tuple(others)
        place = self._chain_node(size + accepted - 1)
        length = min(self.job.num_draft_tokens, self.model.max_length - size - accepted - 1)
        for token in others[: self.job.fan_out[accepted]]:
            if not 0 < length <= self._room:
                return
            self._room -= length
            twig = _Twig(accepted, token, self.root.fork((*block[:accepted], token), length))
            self._twigs.append(twig)
            if self.known is not None and self.known.token_ids[accepted : accepted + 1] == (token,):
                self._follow(twig, self.known)
            if twig.tip is None:
                self._pending.append(_Step(token, place, twig))
            else:
                self._go_on(twig)

    def _follow(self, twig: _Twig, known: Continuation) -> None:
        """Let a branch that says what was drafted behind the block begin with that."""
        first, index = twig.accepted + 1, len(self.job.token_ids) + twig.accepted
        tokens = known.token_ids[first:]
        count = min(len(tokens), twig.draft.job.num_draft_tokens)
        assert index + count <= self._num_plain, "what is known but its last token was run"
        for i in range(count):
            twig.draft.restore(tokens[i], known.guesses[first + i])
            twig.tip = self._chain_node(index + i)

    def _go_on(self, twig: _Twig) -> None:
        """Run the last token of a branch's draft, unless the draft is finished."""
        if twig.draft.is_done:
            assert twig.token is not None
            token_ids = tuple(twig.draft.token_ids)
            self._branches.append(Branch(twig.accepted, twig.token, token_ids))
        else:
            assert twig.tip is not None
            self._pending.append(_Step(twig.draft.token_ids[-1], twig.tip, twig))
