"""The target answers prompts, and a drafter is asked behind each verdict what comes next.

The verifier's and the drafter's engines do it as in their services, only in one process and one
after the other, so any kind works: features, prompts and commits go the usual ways. Either the
drafts are verified, or they are only written down, behind every token. Knows nothing of what
anybody concludes from that.
"""

import contextlib
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from core.drafter import Drafter
from core.errors import ModelError
from core.params import Rule, SamplingParams
from core.types import (
    Branch,
    DraftClose,
    DraftCommands,
    DraftCommit,
    DraftFeatures,
    DraftOpen,
    Verdict,
    VerdictStatus,
    VerifyBatch,
    VerifyOpen,
    VerifyResult,
    VerifyRow,
)
from drafter_service.engine import DrafterEngine
from orchestrator.branches import usable_branch
from orchestrator.tuning.prediction import Answer
from verifier_service.engine import VerifierEngine

GREEDY = SamplingParams()
_STREAM = 0


class Source(Protocol):
    """Where drafts come from. `attached` and `features` as in `VerifyOpen`."""

    attached: str
    features: tuple[str, ...]

    def open(self, sequence: int, prompt_ids: tuple[int, ...]) -> None:
        """A sequence begins."""

    def drafts(
        self, result: VerifyResult, draft_length: int
    ) -> tuple[Mapping[int, tuple[int, ...]], float]:
        """Drafts behind the verdicts, by sequence, and the seconds that they took."""

    def close(self, sequence: int) -> None:
        """It has ended."""


class NoDrafts:
    """Plain decoding."""

    attached = ""
    features: tuple[str, ...] = ()

    def open(self, sequence: int, prompt_ids: tuple[int, ...]) -> None:
        """See `Source`."""

    def drafts(
        self, result: VerifyResult, draft_length: int
    ) -> tuple[Mapping[int, tuple[int, ...]], float]:
        """None."""
        return {}, 0.0

    def close(self, sequence: int) -> None:
        """See `Source`."""


class AttachedSource(NoDrafts):
    """A drafter beside the target: its drafts came with the verdicts."""

    def __init__(self, pool: str) -> None:
        self.attached = pool

    def drafts(
        self, result: VerifyResult, draft_length: int
    ) -> tuple[Mapping[int, tuple[int, ...]], float]:
        """See `Source`."""
        drafts = {each.sequence: each.next_draft_token_ids for each in result.verdicts}
        return drafts, result.timings.draft_ns / 1e9


class RemoteSource:
    """A drafter that is a process of its own in the stack. `threads`: of torch, 0 leaves them."""

    attached = ""

    def __init__(self, drafter: Drafter, max_draft_tokens: int, threads: int = 0) -> None:
        self.features = drafter.needs
        self._engine = DrafterEngine(drafter, max_draft_tokens)
        self._limit, self._threads = max_draft_tokens, threads

    def open(self, sequence: int, prompt_ids: tuple[int, ...]) -> None:
        """See `Source`; the prompt is read at once."""
        opened = DraftOpen(sequence, 0, prompt_ids, GREEDY, self._limit)
        self._run(DraftCommands(opens=(opened,)))

    def drafts(
        self, result: VerifyResult, draft_length: int
    ) -> tuple[Mapping[int, tuple[int, ...]], float]:
        """See `Source`. Raises ModelError when the drafter cannot go on."""
        begin = time.perf_counter()
        commands = DraftCommands(
            commits=tuple([_commit(each, draft_length) for each in result.verdicts]),
            features=tuple(
                [
                    DraftFeatures(each.sequence, 0, each.features)
                    for each in result.verdicts
                    if each.features is not None
                ]
            ),
        )
        return self._run(commands), time.perf_counter() - begin

    def close(self, sequence: int) -> None:
        """See `Source`."""
        self._run(DraftCommands(closes=(DraftClose(sequence, 0),)))

    def _run(self, commands: DraftCommands) -> dict[int, tuple[int, ...]]:
        drafts: dict[int, tuple[int, ...]] = {}
        with torch_threads(self._threads):
            self._engine.apply(_STREAM, commands)
            while self._engine.has_work:
                for _, frame in self._engine.step():
                    for need in frame.need_opens:
                        raise ModelError(f"the drafter gave up: {need.message or need.reason}")
                    for plan in frame.plans:
                        drafts[plan.sequence] = plan.branches[0].draft_token_ids
        return drafts


def _commit(verdict: Verdict, draft_length: int) -> DraftCommit:
    return DraftCommit(
        verdict.sequence, 0, verdict.position, verdict.accepted, verdict.token_ids, draft_length
    )


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """So many threads of torch meanwhile; 0 changes nothing."""
    before = torch.get_num_threads()
    if count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


@dataclass(frozen=True, slots=True)
class Step:
    """A verify step: the lengths of its rows' drafts, the seconds of target and rule, and those of
    the drafter behind it."""

    lengths: tuple[int, ...]
    verify_s: float
    draft_s: float


@dataclass(slots=True)
class Replay:
    """What was seen: answers in the order of the prompts, and the steps but the prompts' own."""

    answers: list[Answer] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Options:
    """How to replay. `num_rows` prompts at a time, drafts of up to `draft_length` tokens, which
    `is_verified` sends to the target. Answers end at a stop id, at `max_new_tokens`, or all
    together after `max_steps` verify steps. Where drafts are verified there is not one behind every
    token, so the answers say nothing of them."""

    num_rows: int
    draft_length: int
    max_new_tokens: int
    stop_ids: Collection[int] = ()
    is_verified: bool = False
    max_steps: int = 1 << 30


@dataclass(slots=True)
class _Running:
    id: int
    prompt_ids: tuple[int, ...]
    answer_ids: list[int] = field(default_factory=list)
    drafts: list[tuple[int, ...]] = field(default_factory=list)
    is_done: bool = False

    def row(self, options: Options, is_attached: bool) -> VerifyRow:
        new = (self.answer_ids[-1],) if self.answer_ids else self.prompt_ids
        position = len(self.prompt_ids) + len(self.answer_ids) - len(new)
        draft = self.drafts[-1] if self.drafts and options.is_verified else ()
        next_draft = options.draft_length if is_attached else 0
        return VerifyRow(self.id, position, new, draft, next_draft_tokens=next_draft)

    def add(self, token_ids: Sequence[int], options: Options) -> None:
        for token_id in token_ids:
            self.answer_ids.append(token_id)
            ended = token_id in options.stop_ids
            if ended or len(self.answer_ids) == options.max_new_tokens:
                self.is_done = True
                return

    def answer(self) -> Answer:
        return Answer(self.prompt_ids, tuple(self.answer_ids), tuple(self.drafts[:-1]))


def replay(
    engine: VerifierEngine, source: Source, prompts: Sequence[Sequence[int]], options: Options
) -> Replay:
    """Have prompts answered, a group of `num_rows` after the other.

    Raises ModelError when the target or the drafter fails.
    """
    seen = Replay()
    try:
        for first in range(0, len(prompts), options.num_rows):
            part = [tuple(prompt) for prompt in prompts[first : first + options.num_rows]]
            _replay_group(engine, source, part, options, seen)
    finally:
        engine.close_stream(_STREAM)
    return seen


def _replay_group(
    engine: VerifierEngine,
    source: Source,
    prompts: Sequence[tuple[int, ...]],
    options: Options,
    seen: Replay,
) -> None:
    group = [_Running(number, prompt) for number, prompt in enumerate(prompts)]
    opens = []
    for each in group:
        length = len(each.prompt_ids) + options.max_new_tokens + options.draft_length
        told = {"features": source.features, "attached": source.attached}
        opens.append(VerifyOpen(each.id, GREEDY, length, **told))  # type: ignore[arg-type]
        source.open(each.id, each.prompt_ids)
    closes: tuple[int, ...] = ()
    for _ in range(options.max_steps):
        running = [each for each in group if not each.is_done]
        if not running:
            break
        rows = tuple([each.row(options, bool(source.attached)) for each in running])
        result = verify(engine, VerifyBatch(0, rows, tuple(opens), closes))
        drafts, draft_s = source.drafts(result, options.draft_length)
        if not opens:  # the first draft is behind a prompt that may have to be read first
            lengths = tuple([len(row.draft_token_ids) for row in rows])
            seen.steps.append(Step(lengths, compute_seconds(result), draft_s))
        opens = []
        for each, verdict in zip(running, result.verdicts, strict=True):
            each.add(verdict.token_ids, options)
            each.drafts.append(_usable(drafts.get(each.id, ()), engine.info.tokenizer_size))
        closes = tuple([each.id for each in running if each.is_done])
    for each in group:
        source.close(each.id)
    engine.close_stream(_STREAM)
    seen.answers += [each.answer() for each in group]


def _usable(draft: tuple[int, ...], num_ids: int) -> tuple[int, ...]:
    return usable_branch(Branch(0, 0, draft), Rule.COUPLED, num_ids)[0].draft_token_ids


def compute_seconds(result: VerifyResult) -> float:
    """What target and rule took."""
    return (result.timings.forward_ns + result.timings.sampling_ns) / 1e9


def verify(engine: VerifierEngine, batch: VerifyBatch) -> VerifyResult:
    """One batch. Raises ModelError for a row or an open that fails."""
    result = engine.verify(_STREAM, batch)
    failed = [each.message for each in result.open_failures]
    failed += [each.message for each in result.verdicts if each.status is not VerdictStatus.OK]
    if failed:
        raise ModelError(f"the target cannot verify: {failed[0]}")
    return result
