"""Drafts for many streams with one drafter, one batch at a time.

Knows nothing of sockets, event loops or how a drafter works. One thread calls it.

    commands ──apply──▶ SequenceTable ──step──▶ drafter.draft(batch) ──▶ plans, by stream

What is wanted comes first: a step drafts for every sequence that waits, as one batch; then, a
forward at a time, drafts for the outcomes of blocks at the target (ahead.py). Prompts are read in
chunks when nobody waits, and now and then when somebody always does.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable

import structlog

from core.drafter import Draft, Drafter, DraftJob, MissingFeaturesError, TargetFeatures
from core.types import Branch, DraftCommands, DraftPlans, Features, NeedOpenReason, Plan
from drafter_service.ahead import AheadWork
from drafter_service.fan_out import MAX_GUESSES
from drafter_service.sequences import HeldSequence, Key, Limits, SequenceTable

#: While drafts are always wanted, the share of steps that goes to reading prompts is one in this.
_PREFILL_EVERY = 5

#: So few tokens are read with the next draft, which takes no longer for it.
_SMALL_LAG = 16

_log = structlog.get_logger(__name__)

_Batch = list[tuple[Key, DraftJob]]


class DrafterEngine:
    """Keeps the streams' sequences and turns commands into plans. Not thread-safe."""

    def __init__(
        self,
        drafter: Drafter,
        max_draft_tokens: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`clock` tells seconds: branches are as many as there was time for."""
        self._drafter = drafter
        self.can_draft_ahead = drafter.can_draft_ahead and not drafter.needs
        limits = Limits(
            max_draft_tokens=max_draft_tokens,
            max_length=drafter.max_length,
            max_sequences=drafter.max_sequences,
            vocab_size=drafter.identity.vocab_size,
            can_draft_ahead=self.can_draft_ahead,
        )
        self._ahead = AheadWork(drafter, clock)
        self._table = SequenceTable(limits, self._forget, self._ahead.decide)
        self._steps_since_prefill = 0
        self._ahead_ns = 0

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do or to say."""
        held = self._table.held.values()
        return self._table.has_need_opens or any(
            self._is_wanted(each) or self._lag(each) or self._ahead.has_work(each) for each in held
        )

    @property
    def num_sequences(self) -> int:
        """Sequences held, over all streams."""
        return len(self._table.held)

    def apply(self, stream: int, commands: DraftCommands) -> None:
        """Take in one frame. A bad command quarantines its sequence; nothing is raised."""
        self._table.apply(stream, commands)

    def refuse(self, stream: int, sequence: int, generation: int, message: str) -> None:
        """Quarantine a sequence whose command could not even be read."""
        self._table.refuse((stream, sequence), generation, NeedOpenReason.INVALID, message)

    def close_stream(self, stream: int) -> None:
        """Forget everything of a stream that ended."""
        self._table.close_stream(stream)

    def step(self) -> list[tuple[int, DraftPlans]]:
        """Draft one batch, or one forward ahead; returns at most one frame per stream. Without work
        it does nothing."""
        started_ns = time.perf_counter_ns()
        plans: defaultdict[int, list[Plan]] = defaultdict(list)
        made = self._answer()
        batch = [] if made else self._choose()
        is_ahead = not made and not batch
        for key, plan in made or (self._draft_ahead() if is_ahead else self._draft_batch(batch)):
            plans[key[0]].append(plan)
        need_opens = self._table.take_need_opens()
        draft_ns = time.perf_counter_ns() - started_ns
        if is_ahead:  # a plan takes several steps
            draft_ns += self._ahead_ns
        self._ahead_ns = draft_ns if is_ahead and not plans else 0
        queued = [key[0] for key, held in self._table.held.items() if held.wanted]
        return [
            (
                stream,
                DraftPlans(
                    plans=tuple(plans.get(stream, ())),
                    need_opens=tuple(need_opens.get(stream, ())),
                    draft_ns=draft_ns,
                    num_queued=queued.count(stream),
                ),
            )
            for stream in sorted(plans.keys() | need_opens.keys())
        ]

    def _answer(self) -> list[tuple[Key, Plan]]:
        """What is wanted and was drafted ahead."""
        ready = [
            (key, held)
            for key, held in self._table.held.items()
            if 0 < held.wanted <= len(held.known)
        ]
        return [(key, _plan(key, held, Draft(held.known))) for key, held in ready]

    def _draft_batch(self, batch: _Batch) -> list[tuple[Key, Plan]]:
        """Draft what `_choose` says."""
        plans = []
        for key, job, draft in self._draft(batch):
            held = self._table.held[key]
            held.seen = len(job.token_ids)
            if job.num_draft_tokens:
                held.known = draft.token_ids
                plans.append((key, _plan(key, held, draft)))
        return plans

    def _draft_ahead(self) -> list[tuple[Key, Plan]]:
        """One step for the outcomes of blocks at the target."""
        plans = []
        for key, branches in self._ahead.step(self._table.held.items()).items():
            held = self._table.held[key]
            plan = Plan(key[1], held.generation, len(held.token_ids), tuple(branches))
            plans.append((key, plan))
        return plans

    def _forget(self, handle: int) -> None:
        self._ahead.forget(handle)
        self._drafter.close(handle)

    def _is_wanted(self, held: HeldSequence) -> bool:
        """Whether a draft is due that can be made."""
        return held.wanted > 0 and (not self._drafter.needs or held.has_every_feature)

    def _lag(self, held: HeldSequence) -> int:
        """Tokens to catch up with: those not seen, or those whose features wait."""
        if self._drafter.needs:
            return held.num_untold
        return held.lag if held.wanted or held.lag > _SMALL_LAG else 0

    def _choose(self) -> _Batch:
        """The next batch: every wanted draft, or else a chunk of what the drafter has not read;
        nothing where drafting ahead goes before that.

        A wanted draft that has more than a chunk to read first waits among the readers, in front.
        """
        chunk = self._drafter.prefill_chunk or math.inf
        wanted: dict[Key, HeldSequence] = {}
        behind: dict[Key, HeldSequence] = {}
        for key, held in self._table.held.items():
            if self._is_wanted(held) and self._lag(held) <= chunk:
                wanted[key] = held
            elif self._lag(held):
                behind[key] = held
        self._steps_since_prefill += 1
        is_busy = bool(wanted) or any(map(self._ahead.has_work, self._table.held.values()))
        if is_busy and not (behind and self._steps_since_prefill >= _PREFILL_EVERY):
            return [
                (key, _job(held, len(held.token_ids), held.wanted)) for key, held in wanted.items()
            ]
        self._steps_since_prefill = 0
        batch = []
        for key, held in sorted(behind.items(), key=lambda item: not item[1].wanted):
            if self._drafter.needs:  # features come in chunks of the target's
                chunk -= held.num_untold
                batch.append((key, _job(held, len(held.token_ids), 0)))
            else:
                end = int(min(len(held.token_ids), held.seen + chunk))
                chunk -= end - held.seen
                batch.append((key, _job(held, end, 0)))
            if chunk <= 0:
                break
        return batch

    def _draft(self, batch: _Batch) -> list[tuple[Key, DraftJob, Draft]]:
        """Run the drafter; if it fails, once more for each sequence alone and without its cache."""
        if not batch:
            return []
        try:
            drafts = self._drafter.draft([job for _, job in batch])
            return [(key, job, d) for (key, job), d in zip(batch, drafts, strict=True)]
        except Exception as error:  # the boundary to a drafter: whatever it is, contain it
            is_gap = isinstance(error, MissingFeaturesError)
            if not is_gap:
                _log.exception("drafter_failed", kind=self._drafter.kind, num_sequences=len(batch))
            if len(batch) == 1 or self._drafter.needs:  # features that were told are gone
                reason = NeedOpenReason.GAP if is_gap else NeedOpenReason.INVALID
                message = f"the drafter failed: {type(error).__name__}"
                for key, _ in batch:
                    self._table.refuse(key, self._table.held[key].generation, reason, message)
                return []
        for key, job in batch:
            self._drafter.close(job.sequence)
            self._table.held[key].seen = 0
        results = []
        for key, job in batch:
            again = _job(self._table.held[key], len(job.token_ids), job.num_draft_tokens)
            results += self._draft([(key, again)])
        return results


def _plan(key: Key, held: HeldSequence, draft: Draft) -> Plan:
    """The draft that was wanted, for the known outcome."""
    draft, held.wanted = draft.cut(held.wanted), 0
    outcome = held.accepted, held.token_ids[-1]
    branch = Branch(*outcome, draft.token_ids, draft.distributions, draft.is_copy)
    return Plan(key[1], held.generation, held.base_length, (branch,))


def _job(held: HeldSequence, end: int, num_draft_tokens: int) -> DraftJob:
    """A job for the first `end` tokens. It takes the features that wait with it."""
    token_ids = held.token_ids if end == len(held.token_ids) else held.token_ids[:end]
    features = None
    if held.untold:
        features, held.untold = _join(held.untold), []
    return DraftJob(
        sequence=held.handle,
        token_ids=token_ids,
        num_draft_tokens=num_draft_tokens,
        sampling=held.sampling,
        num_unchanged=held.seen,
        features=features,
        num_guesses=min(held.max_branches, MAX_GUESSES),
    )


def _join(untold: list[Features]) -> TargetFeatures:
    import torch  # a drafter that needs features has it

    from core.tensors import features_from_bytes

    parts = [features_from_bytes(features) for features in untold]
    return TargetFeatures(untold[0].position, torch.cat(parts))
