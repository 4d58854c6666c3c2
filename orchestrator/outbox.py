"""What the next frame to one drafter holds: collected between two flushes, taken back by sequence.

Pure policy: knows nothing of connections, pools or what a drafter does with a frame.
"""

from dataclasses import dataclass, field

from core.types import DraftClose, DraftCommands, DraftCommit, DraftFeatures, DraftOpen, DraftSent


@dataclass(slots=True)
class Outbox:
    """One drafter's commands that have not been sent."""

    opens: list[DraftOpen] = field(default_factory=list)
    commits: list[DraftCommit] = field(default_factory=list)
    closes: list[DraftClose] = field(default_factory=list)
    features: list[DraftFeatures] = field(default_factory=list)
    sents: list[DraftSent] = field(default_factory=list)

    def drop(self, sequence: int) -> bool:
        """Take back what has not been sent of a sequence; whether its open was among it."""
        opens = [each for each in self.opens if each.sequence != sequence]
        has_open = len(opens) < len(self.opens)
        self.opens = opens
        self.commits = [each for each in self.commits if each.sequence != sequence]
        self.features = [each for each in self.features if each.sequence != sequence]
        self.sents = [each for each in self.sents if each.sequence != sequence]
        return has_open

    def frame(self) -> DraftCommands:
        """All of it as one frame."""
        return DraftCommands(
            opens=tuple(self.opens),
            commits=tuple(self.commits),
            closes=tuple(self.closes),
            features=tuple(self.features),
            sents=tuple(self.sents),
        )
