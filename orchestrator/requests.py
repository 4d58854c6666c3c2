"""What a client wants and what it gets, as the engine sees it: everything resolved and checked.

Knows nothing of protobuf, tokenizers or services. `orchestrator.server` builds a
GenerationRequest from the wire and turns Blocks back into responses.
"""

import enum
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from core.params import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Stopping:
    """When to stop. `stop_token_ids` holds the model's end tokens too, unless ignored.

    With `include_stop` the stop string that matched stays in the text.
    """

    max_new_tokens: int
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    include_stop: bool = False


@dataclass(frozen=True, slots=True)
class Speculation:
    """Use of drafts. `max_draft_tokens` 0 and `drafter` "" leave the choice to the pool."""

    enabled: bool = True
    max_draft_tokens: int = 0
    drafter: str = ""


@dataclass(frozen=True, slots=True)
class Output:
    """What blocks carry. logprobs: likeliest tokens per token, 0 for the token's own only."""

    logprobs: int | None = None
    prompt_logprobs: bool = False


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One admitted request; lengths and ids are already checked against the target.

    traceparent: W3C trace context of the span it belongs to, "" without.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stopping: Stopping
    speculation: Speculation = field(default_factory=Speculation)
    output: Output = field(default_factory=Output)
    traceparent: str = ""


class FinishReason(enum.Enum):
    """Why a generation ended."""

    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    LENGTH = "length"


@dataclass(slots=True)
class SpeculationStats:
    """What speculation did for one request; names as in generation.proto."""

    num_verify_steps: int = 0
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_plan_hits: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)
    plan_misses: Counter[str] = field(default_factory=Counter)
    fallback_steps: Counter[str] = field(default_factory=Counter)
    drafter: str = ""
    num_tokens_without_distributions: int = 0

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / num_spec_steps."""
        return 1.0 + self.num_accepted_draft_tokens / max(1, self.num_spec_steps)

    @property
    def draft_acceptance_rate(self) -> float:
        """accepted / drafted."""
        return self.num_accepted_draft_tokens / max(1, self.num_draft_tokens)


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a generation. Times in seconds from arrival."""

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int
    stats: SpeculationStats
    time_to_first_token_s: float
    total_s: float
    stop_string: str = ""
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class Block:
    """The tokens one verdict committed: the first `accepted` were drafted, the rest the target's.

    `text` is what became final with them: complete code points, no part of a stop string.
    `logprobs` has one entry per id when asked for; `prompt_logprobs` come with the first block.
    `drafter`: the pool that drafted, where something was. `stats`: the request's, up to now; they
    go on growing. `queue_s`: how long it waited for its slot.
    """

    token_ids: tuple[int, ...]
    accepted: int
    text: str
    finished: Finished | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    drafter: str = ""
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    queue_s: float = 0.0


class Health(enum.Enum):
    """Health of a replica as the orchestrator sees it."""

    CONNECTING = "connecting"
    READY = "ready"
    LOST = "lost"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """A service replica and how to find it: `resolve` returns its address now ("host:port")
    or raises UnavailableError; it is asked again after each loss. `pool` is "" for a verifier.
    `connect` opens another channel to an address than the usual one (a slower one, a simulated)."""

    replica_id: str
    pool: str
    resolve: Callable[[], Awaitable[str]]
    connect: Callable[[str], Any] | None = None


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """A replica at one moment; names as in cluster.proto.

    Of a verifier, since the start: busy_s is its time spent on batches, idle_s its time without
    one while its rows waited for plans.
    """

    replica_id: str
    address: str
    health: Health
    message: str
    num_sequences: int
    max_sequences: int
    num_losses: int
    busy_s: float = 0.0
    idle_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """A drafter pool at one moment; names as in cluster.proto.

    num_accepted_per_pos: accepted draft tokens by their place in the draft.
    busy_s: time its drafters spent drafting, all together; 0 for an attached pool.
    """

    pool: str
    kind: str
    replicas: tuple[ReplicaStatus, ...]
    num_drafts: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    num_accepted_per_pos: tuple[int, ...] = ()
    busy_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """The cluster at one moment; names as in cluster.proto."""

    model: str
    verifiers: tuple[ReplicaStatus, ...]
    drafter_pools: tuple[PoolStatus, ...]
    num_waiting: int
    num_running: int
    num_finished: int
    num_completion_tokens: int
    uptime_s: float
