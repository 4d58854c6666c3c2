"""One sequence on its way through the pipeline: what is committed, who holds what, what comes next.

Pure policy: knows nothing of clocks, sockets, protobuf or models; time is passed in. The committed
tokens are the truth. Verifier and drafter are caches of it, each described by one number or key:

    tokens     [ prompt ......... | generated .......... ]
    verified   [ the verifier holds these ]^ the row sent next begins here
    outcome    (base_length, accepted, last token): names the state a plan's branch must match

Losing a verifier sets `verified` to 0; losing a drafter forgets `drafter`. Nothing else changes.
"""

from core.types import (
    Branch,
    DraftClose,
    DraftCommit,
    DraftOpen,
    DraftSent,
    Plan,
    Verdict,
    VerifyOpen,
    VerifyRow,
)
from orchestrator.accounting import count_step, count_verdict
from orchestrator.controller import MAX_DRAFT_TOKENS, Acceptance, Histories
from orchestrator.foresight import Foresight
from orchestrator.near import NearDrafter
from orchestrator.plans import Key, Outcome, Plans
from orchestrator.requests import GenerationRequest, SpeculationStats


class Sequence:
    """The state of one running request. `id` is unique for the orchestrator's lifetime."""

    def __init__(self, sequence: int, request: GenerationRequest) -> None:
        self.id = sequence
        self.request = request
        self.tokens: list[int] = list(request.prompt_token_ids)
        self.num_prompt = len(self.tokens)
        self.stats = SpeculationStats()
        self.histories, self.is_copy = Histories(), False  # is_copy: whether the row's draft is one
        self.foresight = Foresight(self.histories.model.first)
        self.num_worthwhile = MAX_DRAFT_TOKENS
        self.cached_prompt_tokens = 0
        # Verifier side.
        self.verifier: str | None = None
        self.is_open, self.verified = False, 0
        self.row: VerifyRow | None = None
        # Drafter side.
        self.drafter: str | None = None
        self.drafter_limit = 0
        self.max_branches = 0
        self.needs: tuple[str, ...] = ()
        self.generation = 0
        self.outcome = Outcome(self.num_prompt - 1, 0)
        self.plans = Plans()
        self.num_wanted = 0
        self.wanted_at = 0.0
        self.impatience = self.impatient_rounds = 0
        self.absence = "no_drafter"
        self.no_draft_cause = "" if request.speculation.enabled else "disabled"
        self.near = NearDrafter()
        self.draft_source = ""  # the pool whose draft is in flight

    # ------------------------------------------------------------ lengths

    @property
    def num_generated(self) -> int:
        """Tokens committed behind the prompt."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.request.stopping.max_new_tokens - self.num_generated

    @property
    def is_unread(self) -> bool:
        """Whether the target has computed nothing of it yet: what it holds, it had cached."""
        return self.is_prompt_pending and self.verified == self.cached_prompt_tokens

    @property
    def max_length(self) -> int:
        """Tokens the sequence may grow to."""
        return self.num_prompt + self.request.stopping.max_new_tokens

    @property
    def is_prompt_pending(self) -> bool:
        """True until the target has drawn the first token."""
        return self.num_generated == 0

    @property
    def num_unverified(self) -> int:
        """Committed tokens the verifier does not hold; 1 in the steady state."""
        return len(self.tokens) - self.verified

    # ------------------------------------------------------------ verifier

    def assign_verifier(self, replica_id: str | None) -> None:
        """Give the sequence a slot; the next row re-sends everything."""
        self.verifier, self.is_open, self.verified, self.row = replica_id, False, 0, None

    def forget_verifier(self) -> None:
        """The verifier is gone, and with it the row in flight."""
        self.assign_verifier(None)

    def open(self) -> VerifyOpen:
        """The message that leases the slot."""
        self.is_open, self.verified = True, 0
        if self.is_prompt_pending:
            self.cached_prompt_tokens = 0
        request, output = self.request, self.request.output
        prompt_logprobs = output.prompt_logprobs and self.is_prompt_pending
        told = (output.logprobs, prompt_logprobs, self.needs, self.near.pool, request.traceparent)
        return VerifyOpen(self.id, request.sampling, self.max_length, *told)

    @property
    def acceptance(self) -> Acceptance:
        """The history of drafts like the one at hand."""
        branch = self.branch_at_hand
        return self.histories.of(branch is not None and branch.is_copy)

    @property
    def branch_at_hand(self) -> Branch | None:
        """What is drafted for the known outcome: by the drafter, else by the one beside the
        target."""
        return self.plans.branches.get(self.outcome_key, self.near.branch)

    def draft_at_hand(self) -> tuple[int, ...]:
        """The draft for the known outcome, no longer than what may still be committed."""
        branch = self.branch_at_hand
        return branch.draft_token_ids[: self.num_remaining - 1] if branch else ()

    def next_row(self, max_new: int, max_draft: int) -> VerifyRow:
        """The row to send now, and put it in flight: at most `max_new` (at least 1) committed
        tokens, and behind the last of them at most `max_draft` of the draft at hand."""
        new = tuple(self.tokens[self.verified : self.verified + max_new])
        partial = self.verified + len(new) < len(self.tokens)
        draft = () if partial else self.draft_at_hand()[:max_draft]
        branch = self.branch_at_hand
        distributions = branch.draft_distributions[: len(draft)] if branch else ()
        if not partial:
            self.is_copy = branch is not None and branch.is_copy
            count_step(self, draft, branch)
            is_near = branch is not None and branch is self.near.branch
            self.draft_source = self.near.pool if is_near else self.stats.drafter
            if branch is not None and not is_near:
                self.impatience = self.impatient_rounds = 0
        copies = 0 if partial else self._wish(self.near.limit, 2)  # one costs nothing to make
        asked = min(copies, self.num_worthwhile), copies
        self.row = VerifyRow(self.id, self.verified, new, draft, partial, distributions, *asked)
        return self.row

    def _wish(self, limit: int, num_kept: int) -> int:
        """`limit` or what the request wants, with room for `num_kept` tokens beside the draft."""
        wish = self.request.speculation.max_draft_tokens or limit
        return max(0, min(wish, limit, self.num_remaining - num_kept))

    def accept(self, verdict: Verdict) -> bool:
        """Take the verdict on the row in flight. False when it is not the answer to that row.

        The committed tokens do not change yet: the caller truncates `verdict.token_ids` at stops
        first and then calls `commit`.
        """
        row = self.row
        if row is None or verdict.position != row.position + len(row.new_token_ids):
            return False
        self.row = None
        self.verified = verdict.position + verdict.accepted
        if self.is_prompt_pending:
            self.cached_prompt_tokens += verdict.cached_tokens
        self.stats.num_draft_tokens += len(row.draft_token_ids)
        return True

    def commit(self, token_ids: tuple[int, ...], row: VerifyRow, accepted: int) -> int:
        """Append what the verdict committed; returns how many of these were drafted."""
        delivered = min(accepted, len(token_ids))
        self.outcome = Outcome(len(self.tokens), accepted)
        self.tokens.extend(token_ids)
        decided = self.plans.decide(self.outcome_key, len(row.draft_token_ids), self.foresight)
        self.stats.plan_misses.update(decided)
        self.near.branch = None
        self.num_wanted = 0
        self.histories.of(self.is_copy).observe(len(row.draft_token_ids), accepted)
        self.impatient_rounds = max(0, self.impatient_rounds - 1)
        count_verdict(self, row, len(token_ids), delivered)
        return delivered

    # ------------------------------------------------------------ drafter

    @property
    def outcome_key(self) -> Key:
        """(base_length, accepted, token): what a branch must match to be usable now."""
        return (self.outcome.base_length, self.outcome.accepted, self.tokens[-1])

    @property
    def has_drafter(self) -> bool:
        """Whether somebody drafts for it; a fallback does not count."""
        return self.drafter is not None or self.near.is_own

    @property
    def longest_draft(self) -> int:
        """Draft length to ask for if verifying it pays: by the drafter, the request, its end."""
        return self._wish(max(self.drafter_limit if self.drafter else 0, self.near.limit), 1)

    def take_attached(self, verdict: Verdict, num_ids: int) -> None:
        """Keep the draft that came with the verdict just committed."""
        if cause := self.near.take(verdict, self.tokens[-1], self.request.sampling.rule, num_ids):
            self.stats.plan_misses[cause] += 1

    @property
    def num_draft_tokens(self) -> int:
        """Draft length to ask for: what the controller last thought worth verifying, at most."""
        return min(self.longest_draft, self.num_worthwhile, self.drafter_limit)

    def open_drafter(
        self, replica_id: str, pool_limit: int, now: float, max_branches: int = 0
    ) -> DraftOpen:
        """Take up a drafter (again) from the committed tokens."""
        self.drafter, self.drafter_limit = replica_id, pool_limit
        self.max_branches = 0 if self.request.sampling.rule.needs_distributions else max_branches
        self.generation += 1
        self.plans.clear()
        self.outcome = Outcome(len(self.tokens) - 1, 0)
        self.impatience = self.impatient_rounds = 0
        prepare_only = self.is_prompt_pending or (self.row is not None and not self.row.partial)
        self._want(0 if prepare_only else self.num_draft_tokens, now)
        known = (self.id, self.generation, tuple(self.tokens), self.request.sampling)
        return DraftOpen(
            *known,
            max_draft_tokens=pool_limit,
            next_draft_tokens=self.num_wanted,
            max_branches=self.max_branches,
            traceparent=self.request.traceparent,
        )

    def commit_drafter(self, token_ids: tuple[int, ...], now: float) -> DraftCommit:
        """Tell the drafter what was committed, and ask for the next draft unless it is there."""
        is_at_hand = self.outcome_key in self.plans.branches
        self._want(0 if is_at_hand else self.num_draft_tokens, now)
        return DraftCommit(
            self.id,
            self.generation,
            self.outcome.base_length,
            self.outcome.accepted,
            token_ids,
            next_draft_tokens=self.num_wanted,
        )

    def close_drafter(self) -> DraftClose:
        """Let the drafter forget the sequence."""
        close = DraftClose(self.id, self.generation)
        self.forget_drafter()
        return close

    def forget_drafter(self) -> None:
        """The drafter is gone; rows go on without drafts until another is found."""
        self.drafter, self.num_wanted = None, 0
        self.plans.clear()

    def _want(self, num_tokens: int, now: float) -> None:
        self.num_wanted, self.wanted_at = num_tokens, now
        self.plans.ask(self.outcome.base_length, now)

    def take_plan(self, plan: Plan, num_ids: int) -> bool:
        """Keep of a plan's branches what can still be used; count why not otherwise."""
        misses = self.stats.plan_misses
        if plan.generation != self.generation or self.drafter is None:
            misses["stale"] += 1
            return False
        block = None if self.row is None or self.row.partial else len(self.tokens)
        rule = self.request.sampling.rule
        misses.update(self.plans.take(plan, self.outcome_key, block, rule, num_ids))
        return block is None and self.outcome_key in self.plans.branches

    def draft_ahead(self, now: float) -> DraftSent | None:
        """Ask the drafter what may come behind the block just sent, if that is its own or empty;
        None when there is nothing to ask."""
        row, is_own = self.row, self.outcome_key in self.plans.branches
        if row is None or row.partial or self.is_prompt_pending or not self.max_branches:
            return None
        num_sent, length = len(row.draft_token_ids), len(self.tokens)
        wanted = min(self.num_draft_tokens, self.num_remaining - num_sent - 2)
        if wanted <= 0 or (num_sent and not is_own):
            return None
        self.plans.ask(length, now, is_ahead=True)
        return DraftSent(self.id, self.generation, length, num_sent, wanted)

    # ------------------------------------------------------------ readiness

    def plan_deadline(self, patience_s: float) -> float | None:
        """Until when the row waits for its plan; None when it does not wait."""
        if self.num_wanted == 0 or self.impatient_rounds or self.num_unverified > 1:
            return None
        return None if self.outcome_key in self.plans.branches else self.wanted_at + patience_s

    def give_up_plan(self) -> None:
        """The plan did not come in time: go on without, twice as long each time it happens."""
        self.impatience = min(64, 2 * self.impatience or 1)
        self.impatient_rounds = self.impatience
