"""Drafters that live beside the target: they draft right after the rule, in the same call.

A draft arrives with the verdict it stands behind, so it costs no round trip. What such a drafter
needs of the target is handed over as it is; a remote drafter gets the same values as bytes, with
the verdicts. A drafter that fails loses its sequences, never a verdict. Knows the drafters'
interface and nothing of a kind; nothing of rules, streams or messages.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import structlog
import torch

from core.drafter import Draft, Drafter, DraftJob, TargetFeatures
from core.errors import InvalidRequestError
from core.features import FeatureTap
from core.model import RaggedModel
from core.tensors import features_to_bytes
from core.types import AttachedInfo, Verdict, VerdictStatus
from verifier_service.work import OpenSequence, Work

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Attached:
    """A drafter beside the target, under its pool's name."""

    info: AttachedInfo
    drafter: Drafter


Attach = Callable[[RaggedModel], Sequence[Attached]]


class AttachedDrafters:
    """The attached drafters of one target, and the taps that read what drafters need of it."""

    def __init__(self, model: RaggedModel, attached: Sequence[Attached] = ()) -> None:
        self._model = model
        self._attached: Mapping[str, Attached] = {each.info.pool: each for each in attached}
        self._taps: dict[tuple[str, ...], FeatureTap] = {}
        for each in attached:  # a need the target cannot serve is an error at start
            self._tap(each.drafter.needs)

    @property
    def infos(self) -> tuple[AttachedInfo, ...]:
        """For the handshake."""
        return tuple(each.info for each in self._attached.values())

    def open(self, sequence: OpenSequence, pool: str, features: tuple[str, ...]) -> None:
        """Give a sequence its attached drafter, and the tap for its remote one.

        Raises InvalidRequestError when there is none of that name.
        """
        if pool and pool not in self._attached:
            known = ", ".join(self._attached) or "none"
            raise InvalidRequestError("attached", f"no drafter {pool!r}; there are: {known}")
        sequence.features = self._tap(features)
        sequence.attached = pool
        sequence.tap = self._tap(self._attached[pool].drafter.needs) if pool else None
        sequence.num_told = 0

    def close(self, sequence: OpenSequence) -> None:
        """Let the attached drafter forget a sequence."""
        if sequence.attached:
            self._attached[sequence.attached].drafter.close(sequence.key)

    def read(self, works: Sequence[Work]) -> None:
        """Keep what the forward that just ran computed, for the works that will be asked for it."""
        readers: defaultdict[FeatureTap, list[Work]] = defaultdict(list)
        for work in works:
            for tap in {work.sequence.features, work.sequence.tap} - {None}:
                assert tap is not None
                readers[tap].append(work)
        for tap, reading in readers.items():
            rows = tap.read([work.sequence.key for work in reading])
            for work, values in zip(reading, rows, strict=True):
                work.values.setdefault(tap, []).append(values)

    def finish(self, works: Iterable[Work]) -> int:
        """Put features and drafts into the verdicts of a batch; returns the nanoseconds taken."""
        begin = time.perf_counter_ns()
        jobs: defaultdict[str, list[tuple[Work, DraftJob]]] = defaultdict(list)
        for work in works:
            verdict = work.end()
            if verdict.status is not VerdictStatus.OK:
                continue
            tap = work.sequence.features
            if tap is not None:
                values = torch.cat(work.values[tap])[: _num_kept(work, verdict)]
                features = features_to_bytes(work.row.position, values)
                work.verdict = replace(verdict, features=features)
            if work.sequence.attached and (job := self._job(work, verdict)) is not None:
                jobs[work.sequence.attached].append((work, job))
        for pool, batch in jobs.items():
            self._draft(self._attached[pool], batch)
        return time.perf_counter_ns() - begin

    def _tap(self, names: tuple[str, ...]) -> FeatureTap | None:
        if names and names not in self._taps:
            self._taps[names] = FeatureTap(self._model, names)
        return self._taps.get(names)

    def _job(self, work: Work, verdict: Verdict) -> DraftJob | None:
        """What the sequence's drafter has to do now, None for nothing."""
        sequence = work.sequence
        attached = self._attached[sequence.attached]
        token_ids = [*self._model.cache.token_ids(sequence.key), *verdict.token_ids[-1:]]
        limits = (attached.drafter.max_length, sequence.max_length)
        room = min(limit - len(token_ids) for limit in limits if limit)
        room = 0 if work.row.partial else max(0, min(room, attached.info.max_draft_tokens))
        wanted = min(work.row.next_draft_tokens, room)
        copies = min(work.row.next_copy_tokens, room)
        if wanted == copies == 0 and sequence.tap is None:
            return None
        features = None
        if sequence.tap is not None:
            # A repeated row computes again what was told: each position is told once.
            num_known = max(0, sequence.num_told - work.row.position)
            values = torch.cat(work.values[sequence.tap])[num_known : _num_kept(work, verdict)]
            features = TargetFeatures(sequence.num_told, values) if len(values) else None
            sequence.num_told += len(values)
        job = DraftJob(
            sequence.key,
            token_ids,
            wanted,
            sequence.drawer.params,
            num_unchanged=min(sequence.num_seen, len(token_ids)),
            features=features,
            num_copy_tokens=copies,
        )
        sequence.num_seen = len(token_ids)
        return job

    def _draft(self, attached: Attached, batch: list[tuple[Work, DraftJob]]) -> None:
        try:
            with torch.inference_mode():
                drafts = attached.drafter.draft([job for _, job in batch])
        except Exception:  # the boundary to a drafter: whatever it is, contain it
            _log.exception("attached_drafter_failed", pool=attached.info.pool, rows=len(batch))
            for work, _ in batch:
                self.close(work.sequence)
                work.sequence.attached, work.sequence.tap = "", None
            return
        for (work, job), draft in zip(batch, drafts, strict=True):
            most = job.num_lookup_tokens if draft.is_copy else job.num_draft_tokens
            work.verdict = _with_draft(work.end(), draft.cut(most))


def _num_kept(work: Work, verdict: Verdict) -> int:
    """Tokens of the row that stay in the cache."""
    return len(work.row.new_token_ids) + verdict.accepted


def _with_draft(verdict: Verdict, draft: Draft) -> Verdict:
    return replace(
        verdict,
        next_draft_token_ids=draft.token_ids,
        next_draft_distributions=draft.distributions,
        next_draft_is_copy=draft.is_copy,
    )
