"""Tiny targets and assistants played through by hand, as the services would: for their tests.

Blocks of committed and drafted tokens go through the target, some of each are kept, and the
drafters are told of those: the same drafters attached, and on their own with features as bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from core.config import DrafterPoolConfig, ModelConfig
from core.drafter import Draft, Drafter, DraftJob, TargetFeatures
from core.features import FeatureTap
from core.model import RaggedModel, Row
from core.tensors import features_from_bytes, features_to_bytes
from core.types import SamplingParams
from drafter_service.drafters import attach_drafter, create_drafter
from tests.tiny_models import VOCAB_SIZE
from tests.verifying import GREEDY, model_config

#: Tokens drafted in a round, and how many of them are accepted in turn: none, all, some.
K = 3
ACCEPTED = (0, 3, 1, 3, 3, 2, 0, 0, 3)


@dataclass(frozen=True)
class Pair:
    """Checkpoints of a target and its assistant."""

    target: Path
    assistant: Path
    dtype: str = "float32"

    def config(self, path: Path, **options: int) -> ModelConfig:
        config = model_config(path, max_sequences=6, **options)
        return config.model_copy(update={"dtype": self.dtype})

    def load(self, **options: int) -> RaggedModel:
        return RaggedModel.load(self.config(self.target, **options))

    def pool(self, attached: bool, **options: object) -> DrafterPoolConfig:
        extra = {} if attached else {"target": str(self.target)}
        return DrafterPoolConfig(
            name="near" if attached else "far",
            kind="mtp_assistant",
            attached=attached,
            model=self.config(self.assistant),
            options={**extra, **options},
        )

    def drafters(self, model: RaggedModel) -> list[Drafter]:
        """Beside the target and on its own."""
        return [attach_drafter(self.pool(True), model), create_drafter(self.pool(False))]


class Session:
    """Runs blocks through a target and tells drafters, as the services do."""

    def __init__(self, model: RaggedModel, drafters: Sequence[Drafter]) -> None:
        self.model = model
        self.drafters = list(drafters)
        self.taps = [FeatureTap(model, drafter.needs) for drafter in drafters]
        self.next: dict[int, int] = {}  # the token that follows what is kept, by sequence

    def round(
        self, rows: Sequence[tuple[int, Sequence[int], int, int, SamplingParams]]
    ) -> list[list[Draft]]:
        """Rows of (sequence, block, tokens of it kept, tokens wanted, sampling). The token in
        `next` is committed behind what is kept. Returns each drafter's drafts."""
        starts = {}
        for sequence, *_ in rows:
            if not self.model.cache.is_open(sequence):
                self.model.open(sequence)
            starts[sequence] = self.model.length(sequence)
        self.model.forward([Row(s, starts[s], block, 0) for s, block, *_ in rows])
        told = [tap.read([s for s, *_ in rows]) for tap in self.taps]
        for sequence, _, kept, *_ in rows:
            self.model.truncate(sequence, starts[sequence] + kept)
        drafts = []
        for drafter, values in zip(self.drafters, told, strict=True):
            jobs = []
            for (s, _, kept, wanted, params), each in zip(rows, values, strict=True):
                cached = list(self.model.cache.token_ids(s))
                features = features_to_bytes(starts[s], each[:kept])
                known = TargetFeatures(starts[s], features_from_bytes(features))
                jobs.append(DraftJob(s, [*cached, self.next[s]], wanted, params, 0, known))
            drafts.append(drafter.draft(jobs))
        return drafts


def play(
    session: Session, sequence: int, full: Sequence[int], start: int, k: int = K
) -> list[tuple[int, list[Draft]]]:
    """One sequence through `full`: drafts made at each length, with ACCEPTED of every block."""
    rounds: list[tuple[int, list[Draft]]] = []
    block, kept = list(full[:start]), start
    position = 0
    while position + kept + k + 1 < len(full):
        size = position + kept
        session.next = {sequence: full[size]}
        drafts = session.round([(sequence, block, kept, k, GREEDY)])
        position = size
        rounds.append((size + 1, [each[0] for each in drafts]))
        kept = 1 + ACCEPTED[(len(rounds) - 1) % len(ACCEPTED)]
        wrong = [(t + 1) % VOCAB_SIZE for t in full[position + kept : position + 1 + k]]
        block = [*full[position : position + kept], *wrong]
    return rounds
