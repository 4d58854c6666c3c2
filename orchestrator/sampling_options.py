"""The part of a request that shapes the distribution: from the API's options to SamplingParams.

One half of `orchestrator.validation`, which has the rest of the request. Ranges of plain numbers
stand in one table. Whatever is wrong, or cannot be combined, is refused with an error that names
the field and what is allowed. The syntax of a constraint is the verifier's to check. Knows the
target by its VerifierInfo only; knows nothing of prompts, drafters, servers or engines.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from core.errors import InvalidRequestError
from core.params import Constraint, Rule, SamplingParams
from core.types import VerifierInfo
from core.wire import constraint_from_proto, rule_from_proto
from protos import common_pb2
from protos import generation_pb2 as pb

MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100.0
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_LENGTH = 64
MAX_CONSTRAINT_BYTES = 32 * 1024

#: Field of SamplingOptions and SamplingParams: the values it may have (NaN is none), in words.
_RANGES: Final[Mapping[str, tuple[Callable[[float], bool], str]]] = {
    "temperature": (
        lambda value: value == 0 or 0.001 <= value <= 100,
        "0 (greedy) or between 0.001 and 100",
    ),
    "top_k": (lambda value: value >= 0, "0 (all) or more"),
    "top_p": (lambda value: 0 < value <= 1, "above 0 and at most 1"),
    "min_p": (lambda value: 0 <= value <= 1, "between 0 and 1"),
    "typical_p": (lambda value: 0 < value <= 1, "above 0 and at most 1"),
    "repetition_penalty": (lambda value: 0.01 <= value <= 10, "between 0.01 and 10"),
    "presence_penalty": (lambda value: -2 <= value <= 2, "between -2 and 2"),
    "frequency_penalty": (lambda value: -2 <= value <= 2, "between -2 and 2"),
    "no_repeat_ngram_size": (lambda value: value >= 0, "0 (none) or more"),
}


def resolve_sampling(message: pb.GenerateRequest, info: VerifierInfo) -> SamplingParams:
    """Check and resolve all but what depends on the prompt's length and the stopping criteria.

    Unset numbers take the model's defaults, an unset seed is drawn. Raises InvalidRequestError
    naming the field.
    """
    given = message.sampling
    numbers: dict[str, Any] = {name: _number(given, info, name) for name in _RANGES}
    rule = rule_from_proto(message.speculation.rule, numbers["temperature"], "speculation.rule")
    _check_rule(rule, numbers["temperature"])
    sampling = SamplingParams(
        **numbers,
        seed=given.seed if given.HasField("seed") else secrets.randbits(64),
        rule=rule,
        logit_bias=_logit_bias(given.logit_bias, info),
        bad_words_ids=_bad_words_ids(given.bad_words_ids, info),
        ensemble_weight=_ensemble_weight(message.speculation, rule),
        constraint=_constraint(message.constraint) if message.HasField("constraint") else None,
    )
    if sampling.constraint is not None:
        _check_constrained(sampling, message.stopping, info)
    return sampling


def check_ids(field: str, ids: Sequence[int], info: VerifierInfo) -> None:
    """Raise InvalidRequestError for an id that is not the tokenizer's."""
    largest = max(ids, default=0)
    if largest >= info.tokenizer_size:
        raise InvalidRequestError(
            field, f"must be below {info.tokenizer_size}, the tokenizer's size; {largest} is not"
        )


def _number(given: pb.SamplingOptions, info: VerifierInfo, name: str) -> float:
    options = given if given.HasField(name) else info.default_sampling
    value: float = getattr(options, name)
    is_allowed, allowed = _RANGES[name]
    if not is_allowed(value):
        raise InvalidRequestError(f"sampling.{name}", f"must be {allowed}, not {value:g}")
    return value


def _check_rule(rule: Rule, temperature: float) -> None:
    if rule is not Rule.ENSEMBLE and (rule is Rule.GREEDY) != (temperature == 0):
        needed = "0" if rule is Rule.GREEDY else "above 0"
        raise InvalidRequestError(
            "speculation.rule", f"{rule.name} needs temperature {needed}, not {temperature:g}"
        )


def _ensemble_weight(given: pb.SpeculationOptions, rule: Rule) -> float:
    field, is_set = "speculation.ensemble_weight", given.HasField("ensemble_weight")
    if rule is not Rule.ENSEMBLE:
        if is_set:
            raise InvalidRequestError(field, f"needs the rule ENSEMBLE, not {rule.name}")
        return 1.0
    if not is_set:
        raise InvalidRequestError(field, "must be set with the rule ENSEMBLE, between 0 and 1")
    if not 0 < given.ensemble_weight < 1:
        raise InvalidRequestError(
            field, f"must be above 0 and below 1, not {given.ensemble_weight:g}"
        )
    return given.ensemble_weight


def _logit_bias(given: Mapping[int, float], info: VerifierInfo) -> tuple[tuple[int, float], ...]:
    field = "sampling.logit_bias"
    if len(given) > MAX_LOGIT_BIASES:
        raise InvalidRequestError(field, f"at most {MAX_LOGIT_BIASES} entries, not {len(given)}")
    check_ids(field, list(given), info)
    for token_id, bias in given.items():
        if not abs(bias) <= MAX_LOGIT_BIAS:  # NaN is not
            raise InvalidRequestError(
                f"{field}[{token_id}]",
                f"must be between {-MAX_LOGIT_BIAS:g} and {MAX_LOGIT_BIAS:g}, not {bias:g}",
            )
    return tuple(sorted(given.items()))


def _bad_words_ids(
    given: Sequence[common_pb2.TokenIds], info: VerifierInfo
) -> tuple[tuple[int, ...], ...]:
    field = "sampling.bad_words_ids"
    if len(given) > MAX_BAD_WORDS:
        raise InvalidRequestError(field, f"at most {MAX_BAD_WORDS} lists, not {len(given)}")
    for index, words in enumerate(given):
        if not 1 <= len(words.ids) <= MAX_BAD_WORD_LENGTH:
            raise InvalidRequestError(
                f"{field}[{index}]",
                f"must have 1 to {MAX_BAD_WORD_LENGTH} ids, not {len(words.ids)}",
            )
        check_ids(f"{field}[{index}]", words.ids, info)
    return tuple([tuple(words.ids) for words in given])


def _constraint(given: common_pb2.Constraint) -> Constraint:
    _, *kinds = common_pb2.ConstraintKind.items()  # all but UNSPECIFIED
    if given.kind not in dict(kinds).values():
        names = ", ".join(name for name, _ in kinds)
        raise InvalidRequestError("constraint.kind", f"must be one of {names}")
    num_bytes = len(given.source.encode())
    if not 1 <= num_bytes <= MAX_CONSTRAINT_BYTES:
        raise InvalidRequestError(
            "constraint.source",
            f"must have 1 to {MAX_CONSTRAINT_BYTES} bytes, not {num_bytes}",
        )
    return constraint_from_proto(given, "request")


def _check_constrained(
    sampling: SamplingParams, stopping: pb.StoppingOptions, info: VerifierInfo
) -> None:
    """What else forbids tokens could leave none to draw: the constraint alone decides then."""
    if not info.eos_token_ids:
        raise InvalidRequestError("constraint", "the target has no end token to end the text with")
    forbidders = {
        "sampling.bad_words_ids": bool(sampling.bad_words_ids),
        "sampling.no_repeat_ngram_size": sampling.no_repeat_ngram_size > 0,
        "stopping.min_new_tokens": stopping.min_new_tokens > 0,
        "stopping.ignore_eos": stopping.ignore_eos,
    }
    for field, is_set in forbidders.items():
        if is_set:
            raise InvalidRequestError(
                field, "not together with a constraint: both could leave no token to draw"
            )
