from protos import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VerdictStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERDICT_STATUS_UNSPECIFIED: _ClassVar[VerdictStatus]
    VERDICT_STATUS_OK: _ClassVar[VerdictStatus]
    VERDICT_STATUS_NEED_PREFIX: _ClassVar[VerdictStatus]
    VERDICT_STATUS_NO_SLOT: _ClassVar[VerdictStatus]
    VERDICT_STATUS_INVALID: _ClassVar[VerdictStatus]
VERDICT_STATUS_UNSPECIFIED: VerdictStatus
VERDICT_STATUS_OK: VerdictStatus
VERDICT_STATUS_NEED_PREFIX: VerdictStatus
VERDICT_STATUS_NO_SLOT: VerdictStatus
VERDICT_STATUS_INVALID: VerdictStatus

class DescribeVerifierRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeVerifierResponse(_message.Message):
    __slots__ = ("protocol_version", "identity", "max_length", "max_sequences", "max_batch_tokens", "eos_token_ids", "default_sampling", "instance_id", "tokenizer_size", "attached", "num_stages")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_SIZE_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    NUM_STAGES_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    identity: _common_pb2.ModelIdentity
    max_length: int
    max_sequences: int
    max_batch_tokens: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    default_sampling: _common_pb2.Sampling
    instance_id: str
    tokenizer_size: int
    attached: _containers.RepeatedCompositeFieldContainer[AttachedDrafter]
    num_stages: int
    def __init__(self, protocol_version: _Optional[int] = ..., identity: _Optional[_Union[_common_pb2.ModelIdentity, _Mapping]] = ..., max_length: _Optional[int] = ..., max_sequences: _Optional[int] = ..., max_batch_tokens: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., default_sampling: _Optional[_Union[_common_pb2.Sampling, _Mapping]] = ..., instance_id: _Optional[str] = ..., tokenizer_size: _Optional[int] = ..., attached: _Optional[_Iterable[_Union[AttachedDrafter, _Mapping]]] = ..., num_stages: _Optional[int] = ...) -> None: ...

class AttachedDrafter(_message.Message):
    __slots__ = ("pool", "kind", "max_draft_tokens", "has_distributions")
    POOL_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HAS_DISTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    pool: str
    kind: str
    max_draft_tokens: int
    has_distributions: bool
    def __init__(self, pool: _Optional[str] = ..., kind: _Optional[str] = ..., max_draft_tokens: _Optional[int] = ..., has_distributions: _Optional[bool] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("batch", "opens", "rows", "closes")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    OPENS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    CLOSES_FIELD_NUMBER: _ClassVar[int]
    batch: int
    opens: _containers.RepeatedCompositeFieldContainer[VerifyOpen]
    rows: _containers.RepeatedCompositeFieldContainer[VerifyRow]
    closes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, batch: _Optional[int] = ..., opens: _Optional[_Iterable[_Union[VerifyOpen, _Mapping]]] = ..., rows: _Optional[_Iterable[_Union[VerifyRow, _Mapping]]] = ..., closes: _Optional[_Iterable[int]] = ...) -> None: ...

class VerifyOpen(_message.Message):
    __slots__ = ("sequence", "sampling", "max_length", "logprobs", "prompt_logprobs", "features", "attached", "traceparent")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    sampling: _common_pb2.Sampling
    max_length: int
    logprobs: int
    prompt_logprobs: bool
    features: _containers.RepeatedScalarFieldContainer[str]
    attached: str
    traceparent: str
    def __init__(self, sequence: _Optional[int] = ..., sampling: _Optional[_Union[_common_pb2.Sampling, _Mapping]] = ..., max_length: _Optional[int] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[bool] = ..., features: _Optional[_Iterable[str]] = ..., attached: _Optional[str] = ..., traceparent: _Optional[str] = ...) -> None: ...

class VerifyRow(_message.Message):
    __slots__ = ("sequence", "position", "new_token_ids", "draft_token_ids", "partial", "draft_distributions", "next_draft_tokens", "next_copy_tokens")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    NEW_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    DRAFT_DISTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    NEXT_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NEXT_COPY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    position: int
    new_token_ids: _containers.RepeatedScalarFieldContainer[int]
    draft_token_ids: _containers.RepeatedScalarFieldContainer[int]
    partial: bool
    draft_distributions: _containers.RepeatedCompositeFieldContainer[_common_pb2.SparseDistribution]
    next_draft_tokens: int
    next_copy_tokens: int
    def __init__(self, sequence: _Optional[int] = ..., position: _Optional[int] = ..., new_token_ids: _Optional[_Iterable[int]] = ..., draft_token_ids: _Optional[_Iterable[int]] = ..., partial: _Optional[bool] = ..., draft_distributions: _Optional[_Iterable[_Union[_common_pb2.SparseDistribution, _Mapping]]] = ..., next_draft_tokens: _Optional[int] = ..., next_copy_tokens: _Optional[int] = ...) -> None: ...

class VerifyResponse(_message.Message):
    __slots__ = ("batch", "verdicts", "open_failures", "timings")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    VERDICTS_FIELD_NUMBER: _ClassVar[int]
    OPEN_FAILURES_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    batch: int
    verdicts: _containers.RepeatedCompositeFieldContainer[VerifyVerdict]
    open_failures: _containers.RepeatedCompositeFieldContainer[OpenFailure]
    timings: VerifyTimings
    def __init__(self, batch: _Optional[int] = ..., verdicts: _Optional[_Iterable[_Union[VerifyVerdict, _Mapping]]] = ..., open_failures: _Optional[_Iterable[_Union[OpenFailure, _Mapping]]] = ..., timings: _Optional[_Union[VerifyTimings, _Mapping]] = ...) -> None: ...

class OpenFailure(_message.Message):
    __slots__ = ("sequence", "status", "message")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    status: VerdictStatus
    message: str
    def __init__(self, sequence: _Optional[int] = ..., status: _Optional[_Union[VerdictStatus, str]] = ..., message: _Optional[str] = ...) -> None: ...

class VerifyVerdict(_message.Message):
    __slots__ = ("sequence", "position", "status", "message", "accepted", "token_ids", "logprobs", "cached_tokens", "features", "prompt_logprobs", "next_draft_token_ids", "next_draft_distributions", "next_draft_is_copy")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NEXT_DRAFT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NEXT_DRAFT_DISTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    NEXT_DRAFT_IS_COPY_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    position: int
    status: VerdictStatus
    message: str
    accepted: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    cached_tokens: int
    features: _common_pb2.Features
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    next_draft_token_ids: _containers.RepeatedScalarFieldContainer[int]
    next_draft_distributions: _containers.RepeatedCompositeFieldContainer[_common_pb2.SparseDistribution]
    next_draft_is_copy: bool
    def __init__(self, sequence: _Optional[int] = ..., position: _Optional[int] = ..., status: _Optional[_Union[VerdictStatus, str]] = ..., message: _Optional[str] = ..., accepted: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ..., cached_tokens: _Optional[int] = ..., features: _Optional[_Union[_common_pb2.Features, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ..., next_draft_token_ids: _Optional[_Iterable[int]] = ..., next_draft_distributions: _Optional[_Iterable[_Union[_common_pb2.SparseDistribution, _Mapping]]] = ..., next_draft_is_copy: _Optional[bool] = ...) -> None: ...

class VerifyTimings(_message.Message):
    __slots__ = ("queue_ns", "forward_ns", "sampling_ns", "num_forwards", "draft_ns", "total_ns")
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_NS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_NS_FIELD_NUMBER: _ClassVar[int]
    NUM_FORWARDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_NS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_NS_FIELD_NUMBER: _ClassVar[int]
    queue_ns: int
    forward_ns: int
    sampling_ns: int
    num_forwards: int
    draft_ns: int
    total_ns: int
    def __init__(self, queue_ns: _Optional[int] = ..., forward_ns: _Optional[int] = ..., sampling_ns: _Optional[int] = ..., num_forwards: _Optional[int] = ..., draft_ns: _Optional[int] = ..., total_ns: _Optional[int] = ...) -> None: ...
