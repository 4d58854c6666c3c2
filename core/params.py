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
