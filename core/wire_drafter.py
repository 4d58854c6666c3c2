"""The drafter's messages as the values of `core.types` and back.

Knows nothing of torch, sockets or drafting, and checks only what protobuf cannot (unknown enum
values). Import it through `core.wire`.
"""

from collections.abc import Mapping
from typing import Final

from core import PROTOCOL_VERSION
from core.types import (
    Branch,
    DraftClose,
    DraftCommands,
    DraftCommit,
    DrafterInfo,
    DraftFeatures,
    DraftOpen,
    DraftPlans,
    DraftSent,
    NeedOpen,
    NeedOpenReason,
    Plan,
)
from core.wire_common import (
    check_version,
    distributions_from_proto,
    distributions_to_proto,
    enum_from_proto,
    features_from_proto,
    features_to_proto,
    identity_from_proto,
    identity_to_proto,
    sampling_from_proto,
    sampling_to_proto,
)
from protos import drafter_pb2

_REASONS: Final[Mapping[NeedOpenReason, drafter_pb2.NeedOpenReason]] = {
    NeedOpenReason.GAP: drafter_pb2.NEED_OPEN_REASON_GAP,
    NeedOpenReason.TOO_LONG: drafter_pb2.NEED_OPEN_REASON_TOO_LONG,
    NeedOpenReason.FULL: drafter_pb2.NEED_OPEN_REASON_FULL,
    NeedOpenReason.INVALID: drafter_pb2.NEED_OPEN_REASON_INVALID,
}
_REASON_OF: Final[Mapping[int, NeedOpenReason]] = {n: reason for reason, n in _REASONS.items()}


def drafter_info_to_proto(info: DrafterInfo) -> drafter_pb2.DescribeDrafterResponse:
    """Adds this process's protocol version."""
    return drafter_pb2.DescribeDrafterResponse(
        protocol_version=PROTOCOL_VERSION,
        kind=info.kind,
        identity=identity_to_proto(info.identity),
        max_length=info.max_length,
        max_sequences=info.max_sequences,
        max_draft_tokens=info.max_draft_tokens,
        instance_id=info.instance_id,
        has_distributions=info.has_distributions,
        needs=info.needs,
        can_draft_ahead=info.can_draft_ahead,
    )


def drafter_info_from_proto(message: drafter_pb2.DescribeDrafterResponse) -> DrafterInfo:
    """Raises HandshakeError when the drafter speaks another protocol version."""
    check_version(message.protocol_version, "the drafter")
    return DrafterInfo(
        kind=message.kind,
        identity=identity_from_proto(message.identity),
        max_length=message.max_length,
        max_sequences=message.max_sequences,
        max_draft_tokens=message.max_draft_tokens,
        instance_id=message.instance_id,
        has_distributions=message.has_distributions,
        needs=tuple(message.needs),
        can_draft_ahead=message.can_draft_ahead,
    )


def draft_commands_to_proto(commands: DraftCommands) -> drafter_pb2.SessionRequest:
    """One frame to a drafter."""
    return drafter_pb2.SessionRequest(
        opens=[_open_to_proto(open_) for open_ in commands.opens],
        commits=[
            drafter_pb2.DraftCommit(
                sequence=commit.sequence,
                generation=commit.generation,
                base_length=commit.base_length,
                accepted=commit.accepted,
                token_ids=commit.token_ids,
                next_draft_tokens=commit.next_draft_tokens,
            )
            for commit in commands.commits
        ],
        closes=[
            drafter_pb2.DraftClose(sequence=close.sequence, generation=close.generation)
            for close in commands.closes
        ],
        features=[
            drafter_pb2.DraftFeatures(
                sequence=each.sequence,
                generation=each.generation,
                features=features_to_proto(each.features),
            )
            for each in commands.features
        ],
        sents=[
            drafter_pb2.DraftSent(
                sequence=sent.sequence,
                generation=sent.generation,
                base_length=sent.base_length,
                num_draft_tokens=sent.num_draft_tokens,
                next_draft_tokens=sent.next_draft_tokens,
            )
            for sent in commands.sents
        ],
    )


def _open_to_proto(open_: DraftOpen) -> drafter_pb2.DraftOpen:
    return drafter_pb2.DraftOpen(
        sequence=open_.sequence,
        generation=open_.generation,
        token_ids=open_.token_ids,
        sampling=sampling_to_proto(open_.sampling),
        max_draft_tokens=open_.max_draft_tokens,
        max_branches=open_.max_branches,
        next_draft_tokens=open_.next_draft_tokens,
        traceparent=open_.traceparent,
    )


def draft_commands_from_proto(message: drafter_pb2.SessionRequest) -> DraftCommands:
    """Raises InvalidRequestError for an unknown rule."""
    return DraftCommands(
        opens=tuple([_open_from_proto(open_) for open_ in message.opens]),
        commits=tuple(
            [
                DraftCommit(
                    commit.sequence,
                    commit.generation,
                    commit.base_length,
                    commit.accepted,
                    tuple(commit.token_ids),
                    commit.next_draft_tokens,
                )
                for commit in message.commits
            ]
        ),
        closes=tuple([DraftClose(close.sequence, close.generation) for close in message.closes]),
        features=tuple(
            [
                DraftFeatures(each.sequence, each.generation, features_from_proto(each.features))
                for each in message.features
            ]
        ),
        sents=tuple(
            [
                DraftSent(
                    sent.sequence,
                    sent.generation,
                    sent.base_length,
                    sent.num_draft_tokens,
                    sent.next_draft_tokens,
                )
                for sent in message.sents
            ]
        ),
    )


def _open_from_proto(message: drafter_pb2.DraftOpen) -> DraftOpen:
    return DraftOpen(
        sequence=message.sequence,
        generation=message.generation,
        token_ids=tuple(message.token_ids),
        sampling=sampling_from_proto(message.sampling, "opens.sampling"),
        max_draft_tokens=message.max_draft_tokens,
        next_draft_tokens=message.next_draft_tokens,
        max_branches=message.max_branches,
        traceparent=message.traceparent,
    )


def draft_plans_to_proto(plans: DraftPlans) -> drafter_pb2.SessionResponse:
    """One frame from a drafter."""
    return drafter_pb2.SessionResponse(
        plans=[
            drafter_pb2.Plan(
                sequence=plan.sequence,
                generation=plan.generation,
                base_length=plan.base_length,
                branches=[
                    drafter_pb2.Branch(
                        accepted=branch.accepted,
                        token=branch.token,
                        draft_token_ids=branch.draft_token_ids,
                        draft_distributions=distributions_to_proto(branch.draft_distributions),
                        is_copy=branch.is_copy,
                    )
                    for branch in plan.branches
                ],
            )
            for plan in plans.plans
        ],
        need_opens=[
            drafter_pb2.NeedOpen(
                sequence=need.sequence,
                generation=need.generation,
                reason=_REASONS[need.reason],
                message=need.message,
            )
            for need in plans.need_opens
        ],
        draft_ns=plans.draft_ns,
        num_queued=plans.num_queued,
    )


def draft_plans_from_proto(message: drafter_pb2.SessionResponse) -> DraftPlans:
    """Raises InvalidRequestError for an unknown reason."""
    return DraftPlans(
        plans=tuple([_plan_from_proto(plan) for plan in message.plans]),
        need_opens=tuple(
            [
                NeedOpen(
                    need.sequence,
                    need.generation,
                    enum_from_proto(_REASON_OF, need.reason, "need_opens.reason"),
                    need.message,
                )
                for need in message.need_opens
            ]
        ),
        draft_ns=message.draft_ns,
        num_queued=message.num_queued,
    )


def _plan_from_proto(message: drafter_pb2.Plan) -> Plan:
    branches = [
        Branch(
            branch.accepted,
            branch.token,
            tuple(branch.draft_token_ids),
            distributions_from_proto(branch.draft_distributions),
            branch.is_copy,
        )
        for branch in message.branches
    ]
    return Plan(message.sequence, message.generation, message.base_length, tuple(branches))
