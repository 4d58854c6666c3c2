"""What drafting ahead brings with a pool, and how long a row without a draft may wait for one.

Pure policy: knows nothing of clocks or sockets. A round that was not foreseen has a choice: wait
for the drafter, or go without, in which case the drafter drafts ahead of the one token that comes.
With the tokens E of a round that has a draft, h and h0 the chances that a round behind one with and
without a draft was foreseen, and V what a draft at hand is worth more than none:

    V = E + h V - 1 - h0 V          wait  <=>  the V of those who wait > what all rows lose meanwhile
"""

from orchestrator.controller import Rate


class Foresight:
    """Of a pool's sequences, lately. `seconds` is the time from asking to the first draft; 0.0 as
    long as it is not known."""

    _PACE_WEIGHT = 0.1

    def __init__(self, first: Rate) -> None:
        """`first`: how often a draft's first token is right, as the first guess behind a block is."""
        self._behind_draft = Rate(0.5, 4, 0.99)
        self._behind_nothing = Rate(first, 4, 0.99)
        self.seconds = 0.0

    def learn(self, had_draft: bool, is_hit: bool) -> None:
        """A block, one with a draft or none, was drafted ahead of; it is a hit when there was a
        draft for its outcome."""
        (self._behind_draft if had_draft else self._behind_nothing).observe(is_hit)

    def time(self, seconds: float) -> None:
        """A draft came so long after it was asked for."""
        known = self.seconds or seconds
        self.seconds = known + self._PACE_WEIGHT * (seconds - known)

    def worth(self, tokens: float) -> float:
        """Tokens that a draft at hand brings more than none, now and in the rounds that follow;
        `tokens` are those of a round with a draft."""
        return (tokens - 1) / (1 + self._behind_nothing.value - self._behind_draft.value)

    def tokens_per_round(self, tokens: float) -> float:
        """Of rounds that never wait."""
        missed, found = 1 - self._behind_draft.value, self._behind_nothing.value
        share = found / (missed + found)
        return share * tokens + 1 - share
