"""The first layers of the target draft, with the target's own norm and head.

Good drafts come from targets trained for it (LayerSkip, arXiv 2404.16710); any other decoder works
and is seldom right. Beside the target nothing is loaded and nothing computed twice: the layers run
on the target's own weights and cache, behind the committed tokens, and what they wrote is cut off
again before the target verifies. On its own it is a small model whose layers are the target's.

    target's cache | run here with the first n layers only, then cut off
    0 ..... len-2  | last committed token, d1, d2, ... dk-1
"""

from collections.abc import Sequence

from pydantic import Field

from core.config import DrafterPoolConfig
from core.drafter import Draft, Drafter, DraftJob
from core.errors import ConfigError
from core.model import RaggedModel, Row
from core.types import ModelIdentity
from drafter_service.drafters.base import DrafterOptions, read_options
from drafter_service.drafters.draft_model import DraftModelDrafter, load_draft_model
from drafter_service.drawing import DraftDrawer


class EarlyExitOptions(DrafterOptions):
    """`[drafter_pools.options]` of kind "early_exit".

    `num_layers`: layers that draft. `prefill_chunk` and `top_q` as for "draft_model"; attached, no
    prompt is read.
    """

    num_layers: int = Field(ge=1)
    prefill_chunk: int = Field(256, ge=1)
    top_q: int = Field(64, ge=1)


class EarlyExit(Drafter):
    """Runs the target's first layers, beside it."""

    kind = "early_exit"
    has_distributions = True

    def __init__(self, target: RaggedModel, num_layers: int, top_q: int = 64) -> None:
        self._target = target
        self._num_layers = num_layers
        self._drawer = DraftDrawer(target.vocab_size, target.tokenizer_size, top_q)

    @property
    def identity(self) -> ModelIdentity:
        """The target's."""
        return self._target.identity

    @property
    def max_length(self) -> int:
        """The target's: drafts stand in its cache for a moment."""
        return self._target.max_length

    def draft(self, jobs: Sequence[DraftJob]) -> list[Draft]:
        """See `Drafter.draft`. The target's cache must hold all but the last token of each job;
        it holds the same afterwards, whatever happens."""
        drafts = [self._drawer.begin(job) for job in jobs]
        room = self._target.max_batch_tokens
        try:
            while drawing := [draft for draft in drafts if not draft.is_done]:
                for start in range(0, len(drawing), room):
                    part = drawing[start : start + room]
                    rows = []
                    for draft in part:
                        job, drafted = draft.job, draft.token_ids
                        position = len(job.token_ids) - 1 + len(drafted)
                        last = drafted[-1:] or [job.token_ids[-1]]
                        rows.append(Row(job.sequence, position, last, 1))
                    self._drawer.add(self._target.forward(rows, self._num_layers), part)
        finally:
            for job in jobs:
                self._target.truncate(job.sequence, len(job.token_ids) - 1)
        return [draft.end() for draft in drafts]

    def close(self, sequence: int) -> None:
        """Forget what parameters look back at."""
        self._drawer.close(sequence)


class RemoteEarlyExit(DraftModelDrafter):
    """The target's first layers as a model of its own."""

    kind = "early_exit"


def create_early_exit(config: DrafterPoolConfig) -> Drafter:
    """Load only the first layers of the target, which `model` must name.

    Raises ConfigError without a model or when it has fewer layers, ModelError if it cannot be
    served.
    """
    options = read_options(config, EarlyExitOptions)
    model = load_draft_model(config, num_layers=options.num_layers)
    return RemoteEarlyExit(model, options.prefill_chunk, options.top_q)


def attach_early_exit(config: DrafterPoolConfig, target: RaggedModel) -> Drafter:
    """The same beside the target. Raises ConfigError when it has fewer layers, or model code that
    always runs all of them."""
    options = read_options(config, EarlyExitOptions)
    where = f"drafter_pools.{config.name}.options.num_layers"
    count, model = target.num_layers, target.identity.model
    if options.num_layers >= count:
        raise ConfigError(f"{where}: must be below the {count} layers of target {model!r}")
    if not target.can_exit_early(options.num_layers):
        raise ConfigError(f"{where}: the code of target {model!r} always runs all {count} layers")
    return EarlyExit(target, options.num_layers, options.top_q)
