"""The prediction layers of the target's own checkpoint draft, or one that was trained for it.

They start from the target's last hidden state of each committed token, so they know what it was
about to say, at the price of one layer each. Attached, the states are at hand; on its own the
drafter gets them over the wire and loads the layers, the embedding and the head, nothing else.
`forerun distil` trains such a layer for a target that has none; it drafts token after token.

    index i     0 ........... start - 1 | start ...... F - 1 | F = len(token_ids) - 1
    cache       right at every depth    | run again          |
    target's hidden states              [held .............. ]  the last token has none yet

An index is right at every depth once all tokens it looks at are committed: the deepest of L layers
looks at token i + L. So the last L - 1 of the featured indices, whose deeper entries looked at
drafts, are run again with the next draft, from hidden states that are held as long.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from pydantic import Field
from torch import Tensor

from core.config import DrafterPoolConfig
from core.drafter import Draft, Drafter, DraftJob, MissingFeaturesError
from core.embedded import resolve_model
from core.errors import ConfigError, InvalidRequestError, ModelError
from core.model import RaggedModel
from core.mtp import MtpLayers, MtpRow
from core.types import ModelIdentity
from drafter_service.drafters.base import DrafterOptions, read_options
from drafter_service.drawing import DraftDrawer, DraftInProgress


class MtpLayersOptions(DrafterOptions):
    """`[drafter_pools.options]` of kind "mtp_layers".

    `repeat_last_layer`: draft more tokens than there are layers by running the last one again; by
    default only with a layer that was trained so.
    `top_q`: most tokens with a chance in the distributions that rules ask for.
    """

    repeat_last_layer: bool | None = None
    top_q: int = Field(64, ge=1)


#: A sequence that is not drafted for is caught up when so many tokens are owed: they cost less
#: together, and nothing if no draft is asked for again.
_MAX_OWED_TOKENS = 64


@dataclass(slots=True)
class _Held:
    """The target's hidden states `[n, D]` of the positions from `start` on, and what was told of
    those behind them, `[m, F]` together."""

    start: int
    hidden: Tensor | None = None
    told: list[Tensor] = field(default_factory=list)

    @property
    def stop(self) -> int:
        """Positions from here on have none."""
        num_hidden = 0 if self.hidden is None else len(self.hidden)
        return self.start + num_hidden + sum(map(len, self.told))

    def between(self, start: int, stop: int) -> Tensor:
        """Those of some positions."""
        assert self.hidden is not None
        return self.hidden[start - self.start : stop - self.start]

    def drop_before(self, start: int) -> None:
        """Forget those that will not be needed again."""
        if self.hidden is not None and start > self.start:
            self.hidden, self.start = self.hidden[start - self.start :], start


class MtpLayersDrafter(Drafter):
    """Drafts as many tokens as there are prediction layers, at most, unless the last repeats."""

    kind = "mtp_layers"
    has_distributions = True

    def __init__(self, layers: MtpLayers, options: MtpLayersOptions) -> None:
        self._layers = layers
        repeats = options.repeat_last_layer
        self._repeats_last = layers.is_trained if repeats is None else repeats
        self._drawer = DraftDrawer(layers.vocab_size, layers.tokenizer_size, options.top_q)
        self._held: dict[int, _Held] = {}

    @property
    def identity(self) -> ModelIdentity:
        """That of the target's checkpoint."""
        return self._layers.identity

    @property
    def needs(self) -> tuple[str, ...]:
        """The hidden states that the layers start from."""
        return self._layers.needs

    @property
    def max_length(self) -> int:
        """Of the layers' cache."""
        return self._layers.max_length

    @property
    def max_sequences(self) -> int:
        """Of the layers' cache."""
        return self._layers.max_sequences

    @property
    def prefill_chunk(self) -> int:
        """One run of the layers."""
        return self._layers.max_batch_tokens

    @torch.inference_mode()
    def draft(self, jobs: Sequence[DraftJob]) -> list[Draft]:
        """See `Drafter.draft`. Raises MissingFeaturesError when a hidden state was not told, and
        InvalidRequestError when they are not this checkpoint's."""
        for job in jobs:
            self._take(job)
        drafts = [self._drawer.begin(job) for job in jobs]
        drawing = [
            draft
            for draft in drafts
            if not draft.is_done and self._held[draft.job.sequence].stop  # else nothing is known
        ]
        jobs = [job for job in jobs if self._is_due(job)]
        self._fuse([self._held[job.sequence] for job in jobs])
        max_rows = max(1, self._layers.max_batch_tokens // self._layers.num_layers)
        num_rows = max(1, min(len(drawing), max_rows))
        self._catch_up(jobs, self._layers.max_batch_tokens // num_rows)
        for first in range(0, len(drawing), num_rows):
            self._draw(drawing[first : first + num_rows])
        return [draft.end() for draft in drafts]

    def close(self, sequence: int) -> None:
        """Free a sequence's slot."""
        self._drawer.close(sequence)
        if self._held.pop(sequence, None) is not None:
            self._layers.cache.close(sequence)

    def _take(self, job: DraftJob) -> None:
        """Hold the features that came with a job."""
        features, held = job.features, self._held.get(job.sequence)
        if features is not None and features.position == 0:
            self.close(job.sequence)
            held = None
        if held is None:
            self._layers.cache.open(job.sequence)
            held = self._held[job.sequence] = _Held(0)
        if features is not None:
            width = features.values.shape[1]
            if width != self._layers.num_features:
                ours = f"{self.identity.model} has {self._layers.num_features}"
                raise InvalidRequestError("features", f"{ours} values per token, told were {width}")
            if features.position != held.stop:
                raise MissingFeaturesError(f"told of {features.position}, held {held.stop}")
            held.told.append(features.values)
        if job.num_draft_tokens and held.stop != len(job.token_ids) - 1:
            raise MissingFeaturesError(f"{len(job.token_ids)} tokens, {held.stop} told")

    def _is_due(self, job: DraftJob) -> bool:
        num_owed = self._held[job.sequence].stop - self._num_right(job)
        return job.num_draft_tokens > 0 or num_owed > _MAX_OWED_TOKENS

    def _fuse(self, due: Sequence[_Held]) -> None:
        """Turn what was told into hidden states, of all sequences at once."""
        due = [held for held in due if held.told]
        if not due:
            return
        sizes = [sum(map(len, held.told)) for held in due]
        fused = self._layers.hidden(torch.cat([part for held in due for part in held.told]))
        parts: Sequence[Tensor] = fused.split(sizes)  # type: ignore[no-untyped-call]
        for held, hidden in zip(due, parts, strict=True):
            held.hidden = hidden if held.hidden is None else torch.cat([held.hidden, hidden])
            held.told.clear()

    def _catch_up(self, jobs: Sequence[DraftJob], share: int) -> None:
        """Run every depth over what is committed at every depth, but for the last index, which a
        draft begins with; in as few runs as `max_batch_tokens` allows. A draft itself runs what
        it finds, so one that has at most `share` indices before it is not to wait for that."""
        while True:
            room, rows = self._layers.max_batch_tokens, []
            for job in jobs:
                start, told = self._num_right(job), self._held[job.sequence].stop
                stop = min(self._limit(job), told - 1, start + room)
                if stop > start and not (job.num_draft_tokens and told - start <= share):
                    rows.append(self._row(job, start, stop))
                    room -= stop - start
                if room == 0:
                    break
            if not rows:
                return
            for depth in range(self._layers.num_layers):
                hidden = self._layers.run(depth, rows)
                rows = [
                    MtpRow(row.sequence, row.start, row.token_ids[1:], each)
                    for row, each in zip(rows, hidden, strict=True)
                ]
            for row in rows:
                self._held[row.sequence].drop_before(row.start + len(row.hidden))

    def _draw(self, drafts: Sequence[DraftInProgress]) -> None:
        """Run the last indices at every depth; each depth's last gives the draft a token."""
        rows = []
        for draft in drafts:
            stop = self._held[draft.job.sequence].stop
            rows.append(self._row(draft.job, min(self._num_right(draft.job), stop - 1), stop))
        starts = [row.start for row in rows]
        for depth in range(self._layers.num_layers):  # all of them, lest the cache lag behind
            hidden = self._layers.run(depth, rows)
            self._add([each[-1] for each in hidden], drafts)
            rows = [
                MtpRow(row.sequence, row.start, self._shifted(row, draft), each)
                for row, draft, each in zip(rows, drafts, hidden, strict=True)
            ]
        if self._repeats_last:
            self._repeat(drafts, rows)
        for draft, start in zip(drafts, starts, strict=True):
            held = self._held[draft.job.sequence]
            right = min(max(start, self._limit(draft.job)), held.stop)
            self._layers.cache.truncate(draft.job.sequence, right)
            held.drop_before(min(right, held.stop - 1))

    def _repeat(self, drafts: Sequence[DraftInProgress], rows: Sequence[MtpRow]) -> None:
        """Go on with the last layer, a token at a time: each at the next index, from the hidden
        state of the one before."""
        going = [
            (draft, MtpRow(row.sequence, row.start + len(row.hidden), [], row.hidden[-1:]))
            for draft, row in zip(drafts, rows, strict=True)
        ]
        while going := [(draft, row) for draft, row in going if not draft.is_done]:
            ours = [draft for draft, _ in going]
            rows = [
                MtpRow(row.sequence, row.start, draft.token_ids[-1:], row.hidden)
                for draft, row in going
            ]
            hidden = self._layers.run(self._layers.num_layers - 1, rows)
            self._add([each[-1] for each in hidden], ours)
            going = [
                (draft, MtpRow(row.sequence, row.start + 1, [], each))
                for draft, row, each in zip(ours, rows, hidden, strict=True)
            ]

    def _add(self, hidden: Sequence[Tensor], drafts: Sequence[DraftInProgress]) -> None:
        """Give those drafts a token that are not done, from a hidden state `[D]` each."""
        drawing = [i for i, draft in enumerate(drafts) if not draft.is_done]
        if drawing:
            logits = self._layers.logits(torch.stack([hidden[i] for i in drawing]))
            self._drawer.add(logits, [drafts[i] for i in drawing])

    def _shifted(self, row: MtpRow, draft: DraftInProgress) -> list[int]:
        """The tokens for the next depth: one further, the newest drafted token at the end."""
        newest = draft.token_ids[-1] if draft.token_ids else row.token_ids[-1]
        return [*row.token_ids[1:], newest]

    def _row(self, job: DraftJob, start: int, stop: int) -> MtpRow:
        """Indices `start` to `stop`; the token behind each, and as many more as deeper layers see
        of the committed ones."""
        last = min(stop + self._layers.num_layers, len(job.token_ids))
        token_ids = job.token_ids[start + 1 : last]
        return MtpRow(job.sequence, start, token_ids, self._held[job.sequence].between(start, stop))

    def _num_right(self, job: DraftJob) -> int:
        return len(self._layers.cache.token_ids(job.sequence))

    def _limit(self, job: DraftJob) -> int:
        """Indices below it look at committed tokens only, at every depth."""
        return len(job.token_ids) - self._layers.num_layers


def create_mtp_layers(config: DrafterPoolConfig) -> MtpLayersDrafter:
    """Load only what drafts: from the target's checkpoint, or from a directory with a layer that
    was trained for it; `model` must name one of them.

    Raises ConfigError without one or when it has no prediction layers.
    """
    options = read_options(config, MtpLayersOptions)
    where = f"drafter_pools.{config.name}.model"
    if config.model is None:
        raise ConfigError(f"{where}: kind 'mtp_layers' needs the target's checkpoint")
    model = config.model.model_copy(update={"model": resolve_model(config.model.model)})
    try:
        return MtpLayersDrafter(MtpLayers.load(model), options)
    except ModelError as error:
        raise ConfigError(f"{where}: kind 'mtp_layers': {error}") from error


def attach_mtp_layers(config: DrafterPoolConfig, target: RaggedModel) -> MtpLayersDrafter:
    """The same beside the target; a `model` names the directory of a layer that was trained for it.
    Raises ConfigError without one when the target has no prediction layers."""
    options = read_options(config, MtpLayersOptions)
    trained = resolve_model(config.model.model) if config.model else ""
    try:
        return MtpLayersDrafter(MtpLayers.beside(target, trained), options)
    except ModelError as error:
        where = f"drafter_pools.{config.name}.kind"
        raise ConfigError(f"{where}: 'mtp_layers' does not fit the target: {error}") from error
