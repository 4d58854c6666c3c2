"""The one door between `core.types` and protobuf: beyond it no service sees a message.

`X_to_proto(value) -> message` and `X_from_proto(message) -> value`, torch-free. A message that
cannot be understood raises InvalidRequestError that names the field; a handshake from another
protocol version raises HandshakeError. Knows nothing itself: the conversions lie beside each other
in `core.wire_common`, `core.wire_verifier` and `core.wire_drafter`.
"""

from core.wire_common import (
    constraint_from_proto,
    rule_from_proto,
    sampling_from_proto,
    sampling_to_proto,
)
from core.wire_drafter import (
    draft_commands_from_proto,
    draft_commands_to_proto,
    draft_plans_from_proto,
    draft_plans_to_proto,
    drafter_info_from_proto,
    drafter_info_to_proto,
)
from core.wire_verifier import (
    logprobs_to_proto,
    verifier_info_from_proto,
    verifier_info_to_proto,
    verify_batch_from_proto,
    verify_batch_to_proto,
    verify_result_from_proto,
    verify_result_to_proto,
)

__all__ = [
    "constraint_from_proto",
    "draft_commands_from_proto",
    "draft_commands_to_proto",
    "draft_plans_from_proto",
    "draft_plans_to_proto",
    "drafter_info_from_proto",
    "drafter_info_to_proto",
    "logprobs_to_proto",
    "rule_from_proto",
    "sampling_from_proto",
    "sampling_to_proto",
    "verifier_info_from_proto",
    "verifier_info_to_proto",
    "verify_batch_from_proto",
    "verify_batch_to_proto",
    "verify_result_from_proto",
    "verify_result_to_proto",
]
