"""How tokens are drawn and verified: the resolved parameters of one sequence, as a value.

Verifier and drafter get the same value, so that a drafter can guess what the target will do with
it. Knows nothing of protobuf, torch or ranges (`orchestrator.validation` checks those). The
processors apply in this order, as in transformers where it has them:

    logit_bias, repetition_penalty, presence and frequency penalty, no_repeat_ngram_size,
    bad_words_ids, min_new_tokens, constraint, temperature, top_k, top_p, min_p, typical_p
"""

import enum
from dataclasses import dataclass


class Rule(enum.Enum):
    """How a draft is verified; see docs/losslessness.md."""

    GREEDY = "greedy"
    COUPLED = "coupled"
    REJECTION = "rejection"
    TOKEN_REJECTION = "token_rejection"
    ENSEMBLE = "ensemble"

    @property
    def needs_distributions(self) -> bool:
        """Whether it looks at what drafts were sampled from."""
        return self in (Rule.REJECTION, Rule.TOKEN_REJECTION, Rule.ENSEMBLE)


class ConstraintKind(enum.Enum):
    """The language of a constraint."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class Constraint:
    """The generated text must be in this language; `source` is the schema, regex or grammar."""

    kind: ConstraintKind
    source: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Fully resolved sampling parameters of one sequence; the defaults change nothing.

    temperature 0 is greedy. Penalties on generated tokens and `min_new_tokens` count from
    `num_prompt_tokens` on; repetition_penalty sees the prompt too, as in transformers.
    `end_token_ids` cannot be drawn before `min_new_tokens`. `ensemble_weight` is the target's
    weight under ENSEMBLE.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    rule: Rule = Rule.GREEDY
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    min_new_tokens: int = 0
    end_token_ids: tuple[int, ...] = ()
    num_prompt_tokens: int = 0
    ensemble_weight: float = 1.0
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class SparseDistribution:
    """What a draft token was sampled from: ids in the target's vocabulary, chances of sum 1."""

    token_ids: tuple[int, ...]
    probabilities: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The target's log-softmax at one position, before any processor: of the token that was
    committed, and of the likeliest tokens, best first."""

    logprob: float
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Features:
    """What the target computed of `num_tokens` consecutive tokens from `position` on.

    `data` holds one row per token, every value a drafter needs of it side by side, row-major and
    little-endian in the target's `dtype` ("float32", "bfloat16", "float16"). See `core.tensors`.
    """

    position: int
    num_tokens: int
    dtype: str
    data: bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one token."""
        return len(self.data) // max(1, self.num_tokens)

    @property
    def problem(self) -> str:
        """What is wrong with the values by themselves, or ""."""
        size = {"float32": 4, "bfloat16": 2, "float16": 2}.get(self.dtype)
        if size is None:
            return f"dtype {self.dtype!r} is not float32, bfloat16 or float16"
        if not self.row_bytes or self.row_bytes % size or len(self.data) % self.num_tokens:
            return f"{len(self.data)} bytes are not {self.num_tokens} rows of {self.dtype}"
        return ""
