"""The verifier's messages as the values of `core.types` and back.

Knows nothing of torch, sockets or what the values mean: it checks what protobuf cannot (unknown
enum values, fields this version does not honour) and leaves the rest to the receiver. Import it
through `core.wire`. The conversions lie on the path of every token, so they are plain constructor
calls: no reflection, no intermediate dicts.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from core import PROTOCOL_VERSION
from core.params import TokenLogprobs
from core.types import (
    AttachedInfo,
    OpenFailure,
    Verdict,
    VerdictStatus,
    VerifierInfo,
    VerifyBatch,
    VerifyOpen,
    VerifyResult,
    VerifyRow,
    VerifyTimings,
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
from protos import common_pb2, verifier_pb2

_STATUSES: Final[Mapping[VerdictStatus, verifier_pb2.VerdictStatus]] = {
    VerdictStatus.OK: verifier_pb2.VERDICT_STATUS_OK,
    VerdictStatus.NEED_PREFIX: verifier_pb2.VERDICT_STATUS_NEED_PREFIX,
    VerdictStatus.NO_SLOT: verifier_pb2.VERDICT_STATUS_NO_SLOT,
    VerdictStatus.INVALID: verifier_pb2.VERDICT_STATUS_INVALID,
}
_STATUS_OF: Final[Mapping[int, VerdictStatus]] = {n: status for status, n in _STATUSES.items()}


def verifier_info_to_proto(info: VerifierInfo) -> verifier_pb2.DescribeVerifierResponse:
    """Adds this process's protocol version."""
    return verifier_pb2.DescribeVerifierResponse(
        protocol_version=PROTOCOL_VERSION,
        identity=identity_to_proto(info.identity),
        max_length=info.max_length,
        max_sequences=info.max_sequences,
        max_batch_tokens=info.max_batch_tokens,
        eos_token_ids=info.eos_token_ids,
        default_sampling=sampling_to_proto(info.default_sampling),
        instance_id=info.instance_id,
        tokenizer_size=info.tokenizer_size,
        attached=[
            verifier_pb2.AttachedDrafter(
                pool=drafter.pool,
                kind=drafter.kind,
                max_draft_tokens=drafter.max_draft_tokens,
                has_distributions=drafter.has_distributions,
            )
            for drafter in info.attached
        ],
        num_stages=info.num_stages,
    )


def verifier_info_from_proto(message: verifier_pb2.DescribeVerifierResponse) -> VerifierInfo:
    """Raises HandshakeError when the verifier speaks another protocol version."""
    check_version(message.protocol_version, "the verifier")
    return VerifierInfo(
        identity=identity_from_proto(message.identity),
        max_length=message.max_length,
        max_sequences=message.max_sequences,
        max_batch_tokens=message.max_batch_tokens,
        eos_token_ids=tuple(message.eos_token_ids),
        default_sampling=sampling_from_proto(message.default_sampling, "default_sampling"),
        instance_id=message.instance_id,
        tokenizer_size=message.tokenizer_size,
        attached=tuple(
            AttachedInfo(a.pool, a.kind, a.max_draft_tokens, a.has_distributions)
            for a in message.attached
        ),
        num_stages=message.num_stages,
    )


def verify_batch_to_proto(batch: VerifyBatch) -> verifier_pb2.VerifyRequest:
    """One micro-batch."""
    return verifier_pb2.VerifyRequest(
        batch=batch.batch,
        opens=[
            verifier_pb2.VerifyOpen(
                sequence=open_.sequence,
                sampling=sampling_to_proto(open_.sampling),
                max_length=open_.max_length,
                logprobs=open_.logprobs,
                prompt_logprobs=open_.prompt_logprobs,
                features=open_.features,
                attached=open_.attached,
                traceparent=open_.traceparent,
            )
            for open_ in batch.opens
        ],
        rows=[
            verifier_pb2.VerifyRow(
                sequence=row.sequence,
                position=row.position,
                new_token_ids=row.new_token_ids,
                draft_token_ids=row.draft_token_ids,
                partial=row.partial,
                draft_distributions=distributions_to_proto(row.draft_distributions),
                next_draft_tokens=row.next_draft_tokens,
                next_copy_tokens=row.next_copy_tokens,
            )
            for row in batch.rows
        ],
        closes=batch.closes,
    )


def verify_batch_from_proto(message: verifier_pb2.VerifyRequest) -> VerifyBatch:
    """Raises InvalidRequestError for an unknown rule or kind of constraint."""
    return VerifyBatch(
        batch=message.batch,
        opens=tuple([_verify_open_from_proto(open_) for open_ in message.opens]),
        rows=tuple([_verify_row_from_proto(row) for row in message.rows]),
        closes=tuple(message.closes),
    )


def _verify_open_from_proto(message: verifier_pb2.VerifyOpen) -> VerifyOpen:
    return VerifyOpen(
        message.sequence,
        sampling_from_proto(message.sampling, "opens.sampling"),
        message.max_length,
        message.logprobs if message.HasField("logprobs") else None,
        message.prompt_logprobs,
        tuple(message.features),
        message.attached,
        message.traceparent,
    )


def _verify_row_from_proto(message: verifier_pb2.VerifyRow) -> VerifyRow:
    return VerifyRow(
        message.sequence,
        message.position,
        tuple(message.new_token_ids),
        tuple(message.draft_token_ids),
        message.partial,
        distributions_from_proto(message.draft_distributions),
        message.next_draft_tokens,
        message.next_copy_tokens,
    )


def logprobs_to_proto(entries: Iterable[TokenLogprobs]) -> list[common_pb2.TokenLogprobs]:
    """Log-probabilities are rounded to fp32, which the target computes them in."""
    return [
        common_pb2.TokenLogprobs(
            logprob=entry.logprob,
            top_token_ids=entry.top_token_ids,
            top_logprobs=entry.top_logprobs,
        )
        for entry in entries
    ]


def _logprobs_from_proto(
    messages: Iterable[common_pb2.TokenLogprobs],
) -> tuple[TokenLogprobs, ...]:
    return tuple(
        [TokenLogprobs(m.logprob, tuple(m.top_token_ids), tuple(m.top_logprobs)) for m in messages]
    )


def verify_result_to_proto(result: VerifyResult) -> verifier_pb2.VerifyResponse:
    """The verdicts of one micro-batch."""
    timings = result.timings
    return verifier_pb2.VerifyResponse(
        batch=result.batch,
        verdicts=[
            verifier_pb2.VerifyVerdict(
                sequence=verdict.sequence,
                position=verdict.position,
                status=_STATUSES[verdict.status],
                message=verdict.message,
                accepted=verdict.accepted,
                token_ids=verdict.token_ids,
                cached_tokens=verdict.cached_tokens,
                logprobs=logprobs_to_proto(verdict.logprobs),
                prompt_logprobs=logprobs_to_proto(verdict.prompt_logprobs),
                features=features_to_proto(verdict.features),
                next_draft_token_ids=verdict.next_draft_token_ids,
                next_draft_distributions=distributions_to_proto(verdict.next_draft_distributions),
                next_draft_is_copy=verdict.next_draft_is_copy,
            )
            for verdict in result.verdicts
        ],
        open_failures=[
            verifier_pb2.OpenFailure(
                sequence=failure.sequence,
                status=_STATUSES[failure.status],
                message=failure.message,
            )
            for failure in result.open_failures
        ],
        timings=verifier_pb2.VerifyTimings(
            queue_ns=timings.queue_ns,
            forward_ns=timings.forward_ns,
            sampling_ns=timings.sampling_ns,
            num_forwards=timings.num_forwards,
            draft_ns=timings.draft_ns,
            total_ns=timings.total_ns,
        ),
    )


def verify_result_from_proto(message: verifier_pb2.VerifyResponse) -> VerifyResult:
    """Raises InvalidRequestError for an unknown status."""
    timings = message.timings
    return VerifyResult(
        batch=message.batch,
        verdicts=tuple(
            [
                Verdict(
                    sequence=verdict.sequence,
                    position=verdict.position,
                    status=enum_from_proto(_STATUS_OF, verdict.status, "verdicts.status"),
                    accepted=verdict.accepted,
                    token_ids=tuple(verdict.token_ids),
                    cached_tokens=verdict.cached_tokens,
                    message=verdict.message,
                    logprobs=_logprobs_from_proto(verdict.logprobs),
                    prompt_logprobs=_logprobs_from_proto(verdict.prompt_logprobs),
                    features=(
                        features_from_proto(verdict.features)
                        if verdict.HasField("features")
                        else None
                    ),
                    next_draft_token_ids=tuple(verdict.next_draft_token_ids),
                    next_draft_distributions=distributions_from_proto(
                        verdict.next_draft_distributions
                    ),
                    next_draft_is_copy=verdict.next_draft_is_copy,
                )
                for verdict in message.verdicts
            ]
        ),
        open_failures=tuple(
            [
                OpenFailure(
                    failure.sequence,
                    enum_from_proto(_STATUS_OF, failure.status, "open_failures.status"),
                    failure.message,
                )
                for failure in message.open_failures
            ]
        ),
        timings=VerifyTimings(
            timings.queue_ns,
            timings.forward_ns,
            timings.sampling_ns,
            timings.num_forwards,
            timings.draft_ns,
            timings.total_ns,
        ),
    )
