"""What drafting ahead brings with a pool: how long drafts pay, how long a row may wait for one.

Pure policy: knows nothing of clocks or sockets. A round that was not foreseen has a choice: wait
for the drafter, or go without, in which case the drafter drafts ahead of the one token that comes.
With the tokens E of a round that has a draft, h and h0 the chances that a round behind one with and
without a draft was foreseen, and V what a draft at hand is worth more than none:

    V = E + h V - 1 - h0 V        wait if the V of those who wait > what all rows lose meanwhile

A draft of k tokens takes `wait_s(k)`; one that is drafted ahead has the time of a verify round.
"""

from collections.abc import Callable

from orchestrator.controller import Acceptance, Rate


class Foresight:
    """Of a pool's sequences, lately."""

    _PACE_WEIGHT, _FADING = 0.1, 0.998

    def __init__(self, first: Rate) -> None:
        """`first`: how often a draft's first token is right, and so the first guess behind none."""
        self._behind_draft = Rate(0.5, 4, 0.99)
        self._behind_nothing = Rate(first, 4, 0.99)
        self._in_time = Rate(0.9, 4, 0.99)
        self._link_s = self._step_s = 0.0
        self.is_timed = False

    def learn(self, had_draft: bool, is_hit: bool | None) -> None:
        """A block, one with a draft or none, was drafted ahead of; it is a hit when there was a
        draft for its outcome, and None when nothing was there yet."""
        self._in_time.observe(is_hit is not None)
        if is_hit is not None:
            (self._behind_draft if had_draft else self._behind_nothing).observe(is_hit)

    def time(self, seconds: float, draft_s: float, num_tokens: int) -> None:
        """A draft of so many tokens came `seconds` after it was asked for; the drafter needed
        `draft_s` of them."""
        weight = self._PACE_WEIGHT if self.is_timed else 1.0
        self.is_timed = True
        self._link_s += weight * (max(0.0, seconds - draft_s) - self._link_s)
        self._step_s += weight * (draft_s / num_tokens - self._step_s)

    def wait_s(self, num_tokens: int) -> float:
        """Seconds from asking for a draft to its arrival; 0.0 as long as nothing is known."""
        return self._link_s + num_tokens * self._step_s

    def worth(self, tokens: float) -> float:
        """Tokens that a draft at hand brings more than none, now and in the rounds that follow;
        `tokens` are those of a round with a draft."""
        behind_draft, behind_nothing = self._hits()
        return (tokens - 1) / (1 + behind_nothing - behind_draft)

    def tokens_per_round(self, tokens: float) -> float:
        """Of rounds that never wait."""
        behind_draft, behind_nothing = self._hits()
        share = behind_nothing / (1 - behind_draft + behind_nothing)
        return share * tokens + 1 - share

    def _hits(self) -> tuple[float, float]:
        """Chances of a draft in time behind a block with a draft, and behind one without."""
        in_time = self._in_time.value
        return in_time * self._behind_draft.value, in_time * self._behind_nothing.value

    def best_length(
        self,
        acceptance: Acceptance,
        longest: int,
        verify_s: Callable[[int], float],
        is_ahead: bool = True,
    ) -> int:
        """The draft length of at most `longest` with the most tokens per second; at least 1 where
        drafts are made ahead, which costs the target nothing. `verify_s`: of a round with so many
        draft tokens. A drafter that is not asked is thought faster by and by, and tried again."""
        if not self.is_timed or longest == 0:
            return longest

        def speed(length: int) -> float:
            seconds = verify_s(length)
            if is_ahead:
                seconds = self._round_s(length, seconds)
            elif length:
                seconds += self.wait_s(length)
            return acceptance.tokens(length) / seconds

        best = max(range(int(is_ahead), longest + 1), key=speed)
        if best == 0:
            self._link_s *= self._FADING
            self._step_s *= self._FADING
        return best

    def _round_s(self, length: int, verify_s: float) -> float:
        """Seconds from verdict to verdict: a miss waits, or does with a round more; what was
        foreseen is there, or nearly."""
        hits, wait_s = self._behind_draft.value, self.wait_s(length)
        late_s = max(0.0, wait_s + self._step_s - verify_s)
        return verify_s + hits * late_s + (1 - hits) * min(wait_s, verify_s)
