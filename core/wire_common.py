"""What the wires of both services share: enums, sampling parameters, identities, versions.

Knows protobuf and `core.types`, nothing of the services. Import it through `core.wire`.
A value that cannot be understood raises InvalidRequestError that names the field; a peer of
another protocol version raises HandshakeError that names both versions.
"""

from collections.abc import Mapping
from typing import Final, TypeVar

from core import PROTOCOL_VERSION
from core.errors import HandshakeError, InvalidRequestError
from core.types import ModelIdentity, Rule, SamplingParams
from protos import common_pb2

_Value = TypeVar("_Value")

_RULES: Final[Mapping[Rule, common_pb2.Rule]] = {
    Rule.GREEDY: common_pb2.RULE_GREEDY,
    Rule.COUPLED: common_pb2.RULE_COUPLED,
    Rule.REJECTION: common_pb2.RULE_REJECTION,
    Rule.ENSEMBLE: common_pb2.RULE_ENSEMBLE,
}
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
    return common_pb2.Sampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
        rule=_RULES[sampling.rule],
    )


def sampling_from_proto(message: common_pb2.Sampling, field: str = "sampling") -> SamplingParams:
    """Checks the rule only; the ranges are the business of who draws."""
    return SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        seed=message.seed,
        rule=rule_from_proto(message.rule, message.temperature, f"{field}.rule"),
    )


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
