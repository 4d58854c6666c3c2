"""What the wires of both services share: enums, sampling parameters, identities, versions.

Knows protobuf and `core.types`, nothing of the services. Import it through `core.wire`.
A value that cannot be understood raises InvalidRequestError that names the field; a peer of
another protocol version raises HandshakeError that names both versions.
"""

from collections.abc import Iterable, Mapping
from typing import Final, TypeVar

from core import PROTOCOL_VERSION
from core.errors import HandshakeError, InvalidRequestError
from core.params import (
    Constraint,
    ConstraintKind,
    Features,
    Rule,
    SamplingParams,
    SparseDistribution,
)
from core.types import ModelIdentity
from protos import common_pb2

_Value = TypeVar("_Value")

_RULES: Final[Mapping[Rule, common_pb2.Rule]] = {
    Rule.GREEDY: common_pb2.RULE_GREEDY,
    Rule.COUPLED: common_pb2.RULE_COUPLED,
    Rule.REJECTION: common_pb2.RULE_REJECTION,
    Rule.ENSEMBLE: common_pb2.RULE_ENSEMBLE,
    Rule.TOKEN_REJECTION: common_pb2.RULE_TOKEN_REJECTION,
}
_KINDS: Final[Mapping[ConstraintKind, common_pb2.ConstraintKind]] = {
    ConstraintKind.JSON_SCHEMA: common_pb2.CONSTRAINT_KIND_JSON_SCHEMA,
    ConstraintKind.REGEX: common_pb2.CONSTRAINT_KIND_REGEX,
    ConstraintKind.GRAMMAR: common_pb2.CONSTRAINT_KIND_GRAMMAR,
}
_KIND_OF: Final[Mapping[int, ConstraintKind]] = {number: kind for kind, number in _KINDS.items()}
_RULE_OF: Final[Mapping[int, Rule]] = {number: rule for rule, number in _RULES.items()}


def enum_from_proto(values: Mapping[int, _Value], number: int, field: str) -> _Value:
    """`values[number]`. Raises InvalidRequestError that names `field` when there is none."""
    try:
        return values[number]
    except KeyError:
        raise InvalidRequestError(field, f"unknown value {number}") from None


def rule_from_proto(number: int, temperature: float, field: str = "rule") -> Rule:
    """The rule; unset is GREEDY at temperature 0 and COUPLED above."""
    if number == common_pb2.RULE_UNSPECIFIED:
        return Rule.COUPLED if temperature > 0 else Rule.GREEDY
    return enum_from_proto(_RULE_OF, number, field)


def sampling_to_proto(sampling: SamplingParams) -> common_pb2.Sampling:
    """`seed` must lie in [0, 2**64)."""
    constraint = sampling.constraint
    return common_pb2.Sampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
        rule=_RULES[sampling.rule],
        min_p=sampling.min_p,
        typical_p=sampling.typical_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        no_repeat_ngram_size=sampling.no_repeat_ngram_size,
        logit_bias=[
            common_pb2.LogitBias(token_id=token, bias=bias) for token, bias in sampling.logit_bias
        ],
        bad_words_ids=[common_pb2.TokenIds(ids=ids) for ids in sampling.bad_words_ids],
        min_new_tokens=sampling.min_new_tokens,
        end_token_ids=sampling.end_token_ids,
        num_prompt_tokens=sampling.num_prompt_tokens,
        ensemble_weight=sampling.ensemble_weight,
        constraint=constraint_to_proto(constraint) if constraint else None,
    )


def sampling_from_proto(message: common_pb2.Sampling, field: str = "sampling") -> SamplingParams:
    """Checks enums only; the ranges are the business of who draws."""
    has_constraint = message.HasField("constraint")
    return SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        seed=message.seed,
        rule=rule_from_proto(message.rule, message.temperature, f"{field}.rule"),
        min_p=message.min_p,
        typical_p=message.typical_p,
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        no_repeat_ngram_size=message.no_repeat_ngram_size,
        logit_bias=tuple([(entry.token_id, entry.bias) for entry in message.logit_bias]),
        bad_words_ids=tuple([tuple(words.ids) for words in message.bad_words_ids]),
        min_new_tokens=message.min_new_tokens,
        end_token_ids=tuple(message.end_token_ids),
        num_prompt_tokens=message.num_prompt_tokens,
        ensemble_weight=message.ensemble_weight,
        constraint=constraint_from_proto(message.constraint, field) if has_constraint else None,
    )


def constraint_to_proto(constraint: Constraint) -> common_pb2.Constraint:
    """A language and its definition."""
    return common_pb2.Constraint(kind=_KINDS[constraint.kind], source=constraint.source)


def constraint_from_proto(message: common_pb2.Constraint, field: str) -> Constraint:
    """Raises InvalidRequestError for an unknown kind."""
    kind = enum_from_proto(_KIND_OF, message.kind, f"{field}.constraint.kind")
    return Constraint(kind, message.source)


def distributions_to_proto(
    distributions: Iterable[SparseDistribution],
) -> list[common_pb2.SparseDistribution]:
    """Probabilities are rounded to fp32: the drafter samples from the rounded ones."""
    return [
        common_pb2.SparseDistribution(token_ids=each.token_ids, probabilities=each.probabilities)
        for each in distributions
    ]


def distributions_from_proto(
    messages: Iterable[common_pb2.SparseDistribution],
) -> tuple[SparseDistribution, ...]:
    """As sent; the ranges are the business of the rule."""
    return tuple([SparseDistribution(tuple(m.token_ids), tuple(m.probabilities)) for m in messages])


def identity_to_proto(identity: ModelIdentity) -> common_pb2.ModelIdentity:
    """The handshake's facts."""
    return common_pb2.ModelIdentity(
        model=identity.model,
        vocab_size=identity.vocab_size,
        tokenizer_fingerprint=identity.tokenizer_fingerprint,
    )


def identity_from_proto(message: common_pb2.ModelIdentity) -> ModelIdentity:
    """The handshake's facts."""
    return ModelIdentity(message.model, message.vocab_size, message.tokenizer_fingerprint)


def check_version(version: int, peer: str) -> None:
    """Raises HandshakeError that names both versions when they differ."""
    if version != PROTOCOL_VERSION:
        raise HandshakeError(
            f"{peer} speaks protocol version {version}, this process speaks {PROTOCOL_VERSION}"
        )


def features_to_proto(features: Features | None) -> common_pb2.Features | None:
    """None stays None: the field is then unset."""
    if features is None:
        return None
    return common_pb2.Features(
        position=features.position,
        num_tokens=features.num_tokens,
        dtype=features.dtype,
        data=features.data,
    )


def features_from_proto(message: common_pb2.Features) -> Features:
    """The values."""
    return Features(message.position, message.num_tokens, message.dtype, message.data)
