"""How much of each draft to verify: the lengths with the most expected tokens per second.

Pure policy: knows nothing of clocks or sockets. A draft token costs verify time and pays with the
chance that it is accepted. The cost is learned from measured times (orchestrator/costs.py), the
chance from each sequence's own history, and lengths (0 included) are chosen for a whole micro-batch
at once. They depend on history only, never on what the draft says.

    goodput(m) = (rows + the m largest chances) / seconds(tokens + m)       take the best m

A drafter beside the target drafts on the target's time: what it is asked for costs that, too.
"""

from collections.abc import Sequence as Rows

from orchestrator.costs import RoundCosts

#: No draft is longer; what a sequence may ask for before the controller knows better.
MAX_DRAFT_TOKENS = 64
_MIN_CHANCE = 0.02
#: Chances are estimates, and the largest of many are those that were estimated too high.
_CAUTION = 0.9


class Rate:
    """How often something is so, of late. `prior` is believed like `prior_weight` observations."""

    def __init__(self, prior: "float | Rate", prior_weight: float, keep: float) -> None:
        self._prior, self._prior_weight, self._keep = prior, prior_weight, keep
        self._hits = self._count = 0.0

    @property
    def value(self) -> float:
        """Between 0 and 1."""
        prior = self._prior.value if isinstance(self._prior, Rate) else self._prior
        return (self._hits + self._prior_weight * prior) / (self._count + self._prior_weight)

    def observe(self, is_hit: bool) -> None:
        """Take in one observation; older ones fade."""
        self._hits = self._keep * self._hits + is_hit
        self._count = self._keep * self._count + 1

    def forget(self, share: float) -> None:
        """Go back towards the prior."""
        self._hits *= 1 - share
        self._count *= 1 - share


class Acceptance:
    """How likely draft tokens are accepted: a sequence's, or lately those of a whole pool.

    Two rates: that of the first draft token, and that of each further one when those before it
    were accepted (for prompt lookup they differ much: once a copy is right it stays right). A
    sequence expects what its pool's sequences get until it knows better, and tells the pool what it
    gets; a pool begins hopeful. A step without a draft makes
    what is known a little less certain, so that drafting is tried again.
    """

    _HOPE = 0.6

    def __init__(self, pool: "Acceptance | None" = None) -> None:
        self._pool, self._forgetting, self.is_known = pool, 0.01, False
        self.first: Rate = Rate(pool.first if pool else self._HOPE, 2, 0.93)
        self.further: Rate = Rate(pool.further if pool else self._HOPE, 2, 0.93)

    @classmethod
    def of_pool(cls) -> "Acceptance":
        """That of a pool: of many sequences at once, so each weighs little."""
        acceptance = cls()
        acceptance._forgetting = 0.0005
        acceptance.first = Rate(cls._HOPE, 4, 0.99)
        acceptance.further = Rate(cls._HOPE, 4, 0.99)
        return acceptance

    def observe(self, num_draft_tokens: int, accepted: int) -> None:
        """Take in one verdict."""
        if self._pool is not None:
            self._pool.observe(num_draft_tokens, accepted)
        if num_draft_tokens == 0:
            self.first.forget(self._forgetting)
            self.further.forget(self._forgetting)
            return
        self.is_known = True
        self.first.observe(accepted > 0)
        for _ in range(accepted - 1):
            self.further.observe(True)
        if 0 < accepted < num_draft_tokens:
            self.further.observe(False)

    def chance(self, j: int) -> float:
        """Chance that the first `j` (at least 1) draft tokens are all accepted."""
        return self.first.value * self.further.value ** (j - 1)

    def chances(self, length: int) -> list[float]:
        """`chance` of each token of a draft of so many."""
        chance, further = self.first.value, self.further.value
        return [chance * further**j for j in range(length)]

    def tokens(self, length: int) -> float:
        """Tokens expected of a round with a draft of so many."""
        return 1 + sum(self.chances(length))


class Histories:
    """Acceptance of a sequence's (or a pool's) drafts by what makes them: the pool's model, or the
    lookup of a kind that has one beside it."""

    def __init__(self, pool: "Histories | None" = None) -> None:
        self.model: Acceptance = Acceptance(pool.model if pool else None)
        self.copies: Acceptance = Acceptance(pool.copies if pool else None)

    @classmethod
    def of_pool(cls) -> "Histories":
        """Those of a pool."""
        histories = cls()
        histories.model, histories.copies = Acceptance.of_pool(), Acceptance.of_pool()
        return histories

    def of(self, is_copy: bool) -> Acceptance:
        """That of drafts of one of the two."""
        return self.copies if is_copy else self.model

    @property
    def best(self) -> Acceptance:
        """That of the drafts which are right more often."""
        is_copies = self.copies.is_known and self.copies.chance(2) > self.model.chance(2)
        return self.of(is_copies)


class Controller:
    """Chooses draft lengths. With `is_adaptive` off every draft is verified whole."""

    def __init__(self, is_adaptive: bool = True) -> None:
        self.is_adaptive = is_adaptive
        self.costs = RoundCosts()

    def allot(
        self,
        drafts: Rows[tuple[Acceptance, int]],
        num_rows: int,
        num_prompt: int = 0,
        is_near: Rows[bool] = (),
    ) -> list[int]:
        """Draft tokens to verify per row.

        drafts: (acceptance history, length of the draft at hand) of each row that has a draft.
        num_rows: rows of the batch that decode, with or without. num_prompt: its tokens of prompts.
        is_near: for drafts that are not made yet, which of them would be beside the target.
        """
        lengths = [length for _, length in drafts]
        if not self.is_adaptive or not any(lengths):
            return lengths
        gains = sorted(
            (
                (chance, -j, row)
                for row, (acceptance, length) in enumerate(drafts)
                for j, chance in enumerate(acceptance.chances(length), start=1)
                if chance >= _MIN_CHANCE
            ),
            reverse=True,
        )
        expected, best = float(num_rows), 0
        num_near = num_steps = 0
        best_goodput = expected / self.costs.seconds(num_rows, 0, num_prompt)
        for taken, (gain, minus_j, row) in enumerate(gains, start=1):
            expected += _CAUTION * gain
            if is_near and is_near[row]:
                num_near, num_steps = num_near + 1, max(num_steps, -minus_j)
            seconds = self.costs.seconds(num_rows, taken, num_prompt)
            goodput = expected / (seconds + self.costs.draft.added(num_steps, num_near))
            if goodput > best_goodput:
                best, best_goodput = taken, goodput
        allotted = [0] * len(drafts)
        for _, _, row in gains[:best]:
            allotted[row] += 1
        return allotted
