"""Open sequences and rows under way: the verifier engine's bookkeeping, and how a batch is split.

Knows nothing of models, forwards or rules.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from core.params import TokenLogprobs
from core.types import Verdict, VerdictStatus, VerifyRow
from verifier_service.drawing import Drawer, PromptReader

if TYPE_CHECKING:
    from torch import Tensor

    from core.features import FeatureTap


@dataclass(slots=True)
class OpenSequence:
    """An open sequence: its id in the model, how long it may grow, how it is drawn.

    `reader` reports the prompt's tokens; None when not asked for, or once a token was drawn.
    `features` reads what its remote drafter needs, `tap` what its attached one does, to which the
    first `num_told` positions have been told, and which has seen the first `num_seen` tokens.
    """

    key: int
    max_length: int
    drawer: Drawer
    reader: PromptReader | None = None
    features: "FeatureTap | None" = None
    attached: str = ""
    tap: "FeatureTap | None" = None
    num_told: int = 0
    num_seen: int = 0

    @property
    def needs_every_token(self) -> bool:
        """Whether every token must be run: nothing can be told of a copied prefix."""
        taps = (self.features, self.tap, self.reader)
        return any(each is not None for each in taps)


@dataclass(slots=True)
class Work:
    """A sound row on its way through the target; `done` of its tokens are in the cache."""

    row: VerifyRow
    sequence: OpenSequence
    tokens: tuple[int, ...]
    cached: int = 0
    done: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    verdict: Verdict | None = None
    values: "dict[FeatureTap, list[Tensor]]" = field(default_factory=dict)

    @property
    def num_left(self) -> int:
        """Tokens that have not been run."""
        return len(self.tokens) - self.done

    @property
    def num_drawn(self) -> int:
        """Logits the rule needs: of the last new token and of every draft token."""
        return 0 if self.row.partial else len(self.row.draft_token_ids) + 1

    def num_logits(self, size: int) -> int:
        """Logits wanted of the next `size` tokens."""
        if self.sequence.reader is not None:
            return size
        return self.num_drawn if size == self.num_left else 0

    @property
    def start(self) -> int:
        """Where the drawn tokens begin."""
        return self.row.position + len(self.row.new_token_ids)

    def end(self) -> Verdict:
        """The verdict of a work that was run."""
        assert self.verdict is not None
        return self.verdict


def plan_forward(works: Sequence[Work], max_tokens: int) -> list[tuple[Work, int]]:
    """The next forward: works in order, as many of their tokens as fit.

    Only new tokens are ever split: the tokens that the rule needs logits of stay together.
    """
    chunks = []
    for work in works:
        fits = work.num_left <= max_tokens
        size = work.num_left if fits else min(max_tokens, work.num_left - work.num_drawn)
        if size > 0:
            chunks.append((work, size))
            max_tokens -= size
    return chunks


def refusal(row: VerifyRow, status: VerdictStatus, message: str) -> Verdict:
    """The verdict on a row that is not verified."""
    position = row.position + len(row.new_token_ids)
    return Verdict(row.sequence, position, status, message=message)
