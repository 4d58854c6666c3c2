"""Replicas of a service: which are healthy, which one a sequence gets, what they have done.

Pure policy: knows nothing of clocks, sockets or Ray. A verifier set and a drafter pool are both a
Pool; a sequence stays with its replica until one of them ends.
"""

from collections.abc import Iterable

from core.errors import HandshakeError
from core.types import DrafterInfo, ModelIdentity, VerifierInfo
from orchestrator.costs import BatchWork
from orchestrator.requests import Health, PoolStatus, ReplicaStatus, SpeculationStats


class Replica:
    """One replica as the orchestrator sees it."""

    def __init__(self, replica_id: str) -> None:
        self.replica_id = replica_id
        self.address = ""
        self.health = Health.CONNECTING
        self.message = ""
        self.info: VerifierInfo | DrafterInfo | None = None
        self.sequences: set[int] = set()
        self.in_flight: dict[int, BatchWork] = {}  # by the batch's number
        self.num_losses = 0
        self.num_taken = 0  # sequences it was ever given
        self.is_blocked = False
        self.busy_s = 0.0  # a verifier's time in the target, the rule and attached drafters
        self.idle_s = 0.0  # a verifier's time without work while plans were waited for
        self._idle_since: float | None = None

    @property
    def max_sequences(self) -> int:
        """Sequences it can hold; 0 is unlimited."""
        return self.info.max_sequences if self.info else 0

    @property
    def num_free(self) -> int:
        """Sequences it can still take; a large number when unlimited."""
        if self.health is not Health.READY or self.is_blocked:
            return 0
        limit = self.max_sequences or 1_000_000_000
        return max(0, limit - len(self.sequences))

    @property
    def has_distributions(self) -> bool:
        """Whether its drafts come with distributions; False until the handshake."""
        return isinstance(self.info, DrafterInfo) and self.info.has_distributions

    @property
    def needs(self) -> tuple[str, ...]:
        """What a drafter needs of the target beside token ids; nothing until the handshake."""
        return self.info.needs if isinstance(self.info, DrafterInfo) else ()

    @property
    def can_draft_ahead(self) -> bool:
        """Whether it drafts ahead of verdicts; False until the handshake."""
        return isinstance(self.info, DrafterInfo) and self.info.can_draft_ahead

    def take(self, sequence: int) -> None:
        """Give it a sequence."""
        self.sequences.add(sequence)
        self.num_taken += 1

    def note_idle(self, now: float, is_idle: bool) -> None:
        """Note whether a verifier stands still from now on because its rows wait for plans."""
        if self._idle_since is not None:
            self.idle_s += now - self._idle_since
        self._idle_since = now if is_idle else None

    def become_ready(self, address: str, info: VerifierInfo | DrafterInfo) -> None:
        """The handshake succeeded."""
        self.address, self.info, self.health, self.message = address, info, Health.READY, ""

    def become_lost(self, health: Health, message: str) -> set[int]:
        """The connection ended or was refused; returns the sequences it held."""
        self.num_losses += self.health is Health.READY
        self._idle_since = None
        self.health, self.message = health, message
        orphans, self.sequences, self.in_flight = self.sequences, set(), {}
        return orphans

    def status(self) -> ReplicaStatus:
        """A snapshot."""
        return ReplicaStatus(
            self.replica_id,
            self.address,
            self.health,
            self.message,
            len(self.sequences),
            self.max_sequences,
            self.num_losses,
            self.busy_s,
            self.idle_s,
        )


class Pool:
    """Equal replicas under one name, and the totals of their drafts."""

    def __init__(
        self, name: str, kind: str, max_draft_tokens: int = 0, is_attached: bool = False
    ) -> None:
        self.name = name
        self.kind = kind
        self.max_draft_tokens = max_draft_tokens
        self.is_attached = is_attached
        self.replicas: dict[str, Replica] = {}
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_draft_tokens = 0
        self.num_accepted_per_pos: list[int] = []
        self.busy_s = 0.0  # time its drafters drafted, all together
        self.num_steps = 0  # verify steps of the sequences that ended with it
        self.num_late = 0  # of these, the ones that went without their plan

    def add(self, replica_id: str) -> Replica:
        """Know a replica; it is CONNECTING until its handshake."""
        return self.replicas.setdefault(replica_id, Replica(replica_id))

    def check_fit(self) -> None:
        """Raise HandshakeError when a replica was refused: it does not fit the others."""
        for replica in self.replicas.values():
            if replica.health is Health.REFUSED:
                raise HandshakeError(replica.message)

    def ready(self) -> Iterable[Replica]:
        """The replicas that serve."""
        return (r for r in self.replicas.values() if r.health is Health.READY)

    @property
    def num_free(self) -> int:
        """Sequences the pool can still take."""
        return sum(r.num_free for r in self.replicas.values())

    def choose(self, needs_distributions: bool = False) -> Replica | None:
        """The least loaded replica with room, of several in turn; None when there is none.

        needs_distributions: drafters whose drafts come without them do not count.
        """
        candidates = [
            r
            for r in self.replicas.values()
            if r.num_free > 0 and (r.has_distributions or not needs_distributions)
        ]
        return min(candidates, key=lambda r: (len(r.sequences), r.num_taken), default=None)

    def surplus(self, newcomer: Replica) -> list[int]:
        """The sequences that a drafter that just came should take over from its equals: what they
        hold above the even share, until it has its own. None where the target would have to compute
        their features once more."""
        if newcomer.needs:
            return []
        others = sorted((r for r in self.ready() if r is not newcomer), key=lambda r: r.replica_id)
        num_held = sum(len(r.sequences) for r in (newcomer, *others))
        share = num_held // (len(others) + 1)
        room = min(share - len(newcomer.sequences), newcomer.num_free)
        moving: list[int] = []
        for other in others:
            num_spare = min(len(other.sequences) - share, room - len(moving))
            moving += sorted(other.sequences, reverse=True)[: max(0, num_spare)]
        return moving

    def count(self, num_draft_tokens: int, num_accepted: int) -> None:
        """Add one verified draft to the totals."""
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_draft_tokens += num_accepted
        counts = self.num_accepted_per_pos
        counts.extend([0] * (num_accepted - len(counts)))
        for position in range(num_accepted):
            counts[position] += 1

    def retire(self, stats: SpeculationStats) -> None:
        """Keep what an ended sequence of this pool went through."""
        self.num_steps += stats.num_verify_steps
        self.num_late += stats.fallback_steps["late"]

    def status(self, hosts: "Pool | None" = None) -> PoolStatus:
        """A snapshot; `hosts` are the replicas in whose processes an attached pool lives."""
        return PoolStatus(
            self.name,
            self.kind,
            tuple(r.status() for r in list((hosts or self).replicas.values())),
            self.num_drafts,
            self.num_draft_tokens,
            self.num_accepted_draft_tokens,
            tuple(self.num_accepted_per_pos),
            self.busy_s,
        )


def explain_mismatch(drafter: ModelIdentity, target: ModelIdentity) -> str:
    """Why a drafter's ids do not fit the target's, or "". Padded vocabularies may differ in size.

    An empty fingerprint with vocabulary size 0 is a drafter that works on any ids.
    """
    if drafter.tokenizer_fingerprint and target.tokenizer_fingerprint:
        if drafter.tokenizer_fingerprint == target.tokenizer_fingerprint:
            return ""
        why = "their tokenizers differ"
    elif drafter.vocab_size in (0, target.vocab_size):
        return ""
    else:
        why = "their vocabularies differ and a tokenizer is missing"
    return f"drafter {_describe(drafter)} does not fit target {_describe(target)}: {why}"


def _describe(identity: ModelIdentity) -> str:
    tokenizer = identity.tokenizer_fingerprint[:12] or "none"
    return f"{identity.model!r} ({identity.vocab_size} ids, tokenizer {tokenizer})"
