"""core.wire: every value survives the wire; what cannot be understood is named."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core import wire
from core.errors import HandshakeError, InvalidRequestError
from core.types import (
    DraftCommands,
    DrafterInfo,
    DraftPlans,
    Rule,
    SamplingParams,
    SparseDistribution,
    TokenLogprobs,
    VerifierInfo,
    VerifyBatch,
    VerifyOpen,
    VerifyResult,
    VerifyRow,
)
from protos import common_pb2, drafter_pb2, verifier_pb2

uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
# Fields declared `int` are 32 bits wide on the wire, except these.
WIDE = {"sequence", "batch", "seed", "queue_ns", "forward_ns", "sampling_ns", "draft_ns"}
SINGLE = {SparseDistribution, TokenLogprobs}  # their floats are fp32 on the wire


def values(cls: type) -> st.SearchStrategy:
    """Any value of a dataclass of `core.types`, field by field from its annotations."""
    fields: dict[str, st.SearchStrategy] = {}
    for name, annotation in cls.__annotations__.items():
        fields[name] = field_values(name, annotation, cls)
    return st.builds(cls, **fields)


def field_values(name: str, annotation: object, owner: type) -> st.SearchStrategy:
    arguments = getattr(annotation, "__args__", ())
    if annotation is int:
        return uint64 if name in WIDE else uint32
    if annotation is float:
        return st.floats(allow_nan=False, width=32 if owner in SINGLE else 64)
    if hasattr(annotation, "__dataclass_fields__"):
        return values(annotation)
    if type(None) in arguments:
        return st.none() | field_values(name, arguments[0], owner)
    if getattr(annotation, "__origin__", None) is not tuple:
        return st.from_type(annotation)
    if arguments[-1] is Ellipsis:
        plain = name == "closes" and arguments[0] is int
        element = uint64 if plain else field_values("", arguments[0], owner)
        return st.lists(element, max_size=4).map(tuple)
    return st.tuples(*(field_values("", argument, owner) for argument in arguments))


ROUND_TRIPS = [
    (SamplingParams, wire.sampling_to_proto, wire.sampling_from_proto),
    (VerifierInfo, wire.verifier_info_to_proto, wire.verifier_info_from_proto),
    (DrafterInfo, wire.drafter_info_to_proto, wire.drafter_info_from_proto),
    (VerifyBatch, wire.verify_batch_to_proto, wire.verify_batch_from_proto),
    (VerifyResult, wire.verify_result_to_proto, wire.verify_result_from_proto),
    (DraftCommands, wire.draft_commands_to_proto, wire.draft_commands_from_proto),
    (DraftPlans, wire.draft_plans_to_proto, wire.draft_plans_from_proto),
]


@pytest.mark.parametrize(("cls", "to_proto", "from_proto"), ROUND_TRIPS)
def test_every_value_survives_the_bytes(cls, to_proto, from_proto):
    """A field that is dropped, swapped or narrowed would change a value on the way."""

    @settings(max_examples=40, deadline=None)
    @given(values(cls))
    def check(value):
        message = to_proto(value)
        received = type(message).FromString(message.SerializeToString())
        assert from_proto(received) == value

    check()


@pytest.mark.parametrize(("temperature", "rule"), [(0.0, Rule.GREEDY), (0.7, Rule.COUPLED)])
def test_an_unset_rule_follows_the_temperature(temperature, rule):
    """The default of common.proto: a client that sets no rule must still get an exact one."""
    message = common_pb2.Sampling(temperature=temperature)
    assert wire.sampling_from_proto(message).rule is rule


def test_unknown_enum_values_are_named():
    """A newer peer's enum value must not pass as something this version knows."""
    batch = verifier_pb2.VerifyRequest(opens=[verifier_pb2.VerifyOpen()])
    batch.opens[0].sampling.rule = 77
    result = verifier_pb2.VerifyResponse(verdicts=[verifier_pb2.VerifyVerdict(sequence=1)])
    failure = verifier_pb2.VerifyResponse(open_failures=[verifier_pb2.OpenFailure(status=9)])
    plans = drafter_pb2.SessionResponse(need_opens=[drafter_pb2.NeedOpen(reason=9)])
    for field, from_proto, message in [
        ("opens.sampling.rule", wire.verify_batch_from_proto, batch),
        ("verdicts.status", wire.verify_result_from_proto, result),
        ("open_failures.status", wire.verify_result_from_proto, failure),
        ("need_opens.reason", wire.draft_plans_from_proto, plans),
    ]:
        with pytest.raises(InvalidRequestError, match="unknown value") as caught:
            from_proto(message)
        assert caught.value.field == field


def test_another_protocol_version_fails_the_handshake_and_names_both():
    """Two versions that talk past each other would fail later and less clearly."""
    for from_proto, message in [
        (wire.verifier_info_from_proto, verifier_pb2.DescribeVerifierResponse()),
        (wire.drafter_info_from_proto, drafter_pb2.DescribeDrafterResponse()),
    ]:
        message.protocol_version = 999
        with pytest.raises(HandshakeError, match=r"999.*speaks 1"):
            from_proto(message)


def test_values_that_do_not_fit_the_wire_are_refused_by_it():
    """A negative position or an id over 32 bits must not wrap around."""
    for row in (VerifyRow(1, -1, (1,)), VerifyRow(1, 0, (2**32,))):
        with pytest.raises(ValueError, match=r"out of range|Value out"):
            wire.verify_batch_to_proto(VerifyBatch(0, rows=(row,)))
    greedy = SamplingParams(seed=2**64)
    with pytest.raises(ValueError, match=r"out of range|Value out"):
        wire.verify_batch_to_proto(VerifyBatch(0, opens=(VerifyOpen(1, greedy, 8),)))


def test_wire_is_torch_free():
    """The orchestrator imports it, and it runs where torch is not installed."""
    code = "import sys, core.wire, core.rpc; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


def test_every_conversion_is_exported_and_tested():
    """A conversion that is added without a round trip would go untested."""
    tree = ast.parse((Path(wire.__file__)).read_text())
    imported = {a.name for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names}
    tested = {f.__name__ for _, *functions in ROUND_TRIPS for f in functions}
    parts = {"rule_from_proto", "constraint_from_proto", "logprobs_to_proto"}  # of tested ones
    assert imported == set(wire.__all__) == tested | parts
