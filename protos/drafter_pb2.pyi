from protos import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NeedOpenReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NEED_OPEN_REASON_UNSPECIFIED: _ClassVar[NeedOpenReason]
    NEED_OPEN_REASON_GAP: _ClassVar[NeedOpenReason]
    NEED_OPEN_REASON_TOO_LONG: _ClassVar[NeedOpenReason]
    NEED_OPEN_REASON_FULL: _ClassVar[NeedOpenReason]
    NEED_OPEN_REASON_INVALID: _ClassVar[NeedOpenReason]
NEED_OPEN_REASON_UNSPECIFIED: NeedOpenReason
NEED_OPEN_REASON_GAP: NeedOpenReason
NEED_OPEN_REASON_TOO_LONG: NeedOpenReason
NEED_OPEN_REASON_FULL: NeedOpenReason
NEED_OPEN_REASON_INVALID: NeedOpenReason

class DescribeDrafterRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeDrafterResponse(_message.Message):
    __slots__ = ("protocol_version", "kind", "identity", "max_length", "max_sequences", "max_draft_tokens", "instance_id", "has_distributions", "needs", "can_draft_ahead")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    HAS_DISTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    NEEDS_FIELD_NUMBER: _ClassVar[int]
    CAN_DRAFT_AHEAD_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    kind: str
    identity: _common_pb2.ModelIdentity
    max_length: int
    max_sequences: int
    max_draft_tokens: int
    instance_id: str
    has_distributions: bool
    needs: _containers.RepeatedScalarFieldContainer[str]
    can_draft_ahead: bool
    def __init__(self, protocol_version: _Optional[int] = ..., kind: _Optional[str] = ..., identity: _Optional[_Union[_common_pb2.ModelIdentity, _Mapping]] = ..., max_length: _Optional[int] = ..., max_sequences: _Optional[int] = ..., max_draft_tokens: _Optional[int] = ..., instance_id: _Optional[str] = ..., has_distributions: _Optional[bool] = ..., needs: _Optional[_Iterable[str]] = ..., can_draft_ahead: _Optional[bool] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("opens", "commits", "closes", "features", "sents")
    OPENS_FIELD_NUMBER: _ClassVar[int]
    COMMITS_FIELD_NUMBER: _ClassVar[int]
    CLOSES_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    SENTS_FIELD_NUMBER: _ClassVar[int]
    opens: _containers.RepeatedCompositeFieldContainer[DraftOpen]
    commits: _containers.RepeatedCompositeFieldContainer[DraftCommit]
    closes: _containers.RepeatedCompositeFieldContainer[DraftClose]
    features: _containers.RepeatedCompositeFieldContainer[DraftFeatures]
    sents: _containers.RepeatedCompositeFieldContainer[DraftSent]
    def __init__(self, opens: _Optional[_Iterable[_Union[DraftOpen, _Mapping]]] = ..., commits: _Optional[_Iterable[_Union[DraftCommit, _Mapping]]] = ..., closes: _Optional[_Iterable[_Union[DraftClose, _Mapping]]] = ..., features: _Optional[_Iterable[_Union[DraftFeatures, _Mapping]]] = ..., sents: _Optional[_Iterable[_Union[DraftSent, _Mapping]]] = ...) -> None: ...

class DraftFeatures(_message.Message):
    __slots__ = ("sequence", "generation", "features")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    generation: int
    features: _common_pb2.Features
    def __init__(self, sequence: _Optional[int] = ..., generation: _Optional[int] = ..., features: _Optional[_Union[_common_pb2.Features, _Mapping]] = ...) -> None: ...

class DraftOpen(_message.Message):
    __slots__ = ("sequence", "generation", "token_ids", "sampling", "max_draft_tokens", "max_branches", "next_draft_tokens", "traceparent")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_BRANCHES_FIELD_NUMBER: _ClassVar[int]
    NEXT_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    generation: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.Sampling
    max_draft_tokens: int
    max_branches: int
    next_draft_tokens: int
    traceparent: str
    def __init__(self, sequence: _Optional[int] = ..., generation: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.Sampling, _Mapping]] = ..., max_draft_tokens: _Optional[int] = ..., max_branches: _Optional[int] = ..., next_draft_tokens: _Optional[int] = ..., traceparent: _Optional[str] = ...) -> None: ...

class DraftCommit(_message.Message):
    __slots__ = ("sequence", "generation", "base_length", "accepted", "token_ids", "next_draft_tokens")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NEXT_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    generation: int
    base_length: int
    accepted: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    next_draft_tokens: int
    def __init__(self, sequence: _Optional[int] = ..., generation: _Optional[int] = ..., base_length: _Optional[int] = ..., accepted: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., next_draft_tokens: _Optional[int] = ...) -> None: ...

class DraftSent(_message.Message):
    __slots__ = ("sequence", "generation", "base_length", "num_draft_tokens", "next_draft_tokens")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NEXT_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    generation: int
    base_length: int
    num_draft_tokens: int
    next_draft_tokens: int
    def __init__(self, sequence: _Optional[int] = ..., generation: _Optional[int] = ..., base_length: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., next_draft_tokens: _Optional[int] = ...) -> None: ...

class DraftClose(_message.Message):
    __slots__ = ("sequence", "generation")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    generation: int
    def __init__(self, sequence: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("plans", "need_opens", "draft_ns", "num_queued")
    PLANS_FIELD_NUMBER: _ClassVar[int]
    NEED_OPENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_NS_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_FIELD_NUMBER: _ClassVar[int]
    plans: _containers.RepeatedCompositeFieldContainer[Plan]
    need_opens: _containers.RepeatedCompositeFieldContainer[NeedOpen]
    draft_ns: int
    num_queued: int
    def __init__(self, plans: _Optional[_Iterable[_Union[Plan, _Mapping]]] = ..., need_opens: _Optional[_Iterable[_Union[NeedOpen, _Mapping]]] = ..., draft_ns: _Optional[int] = ..., num_queued: _Optional[int] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("sequence", "generation", "base_length", "branches")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    BRANCHES_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    generation: int
    base_length: int
    branches: _containers.RepeatedCompositeFieldContainer[Branch]
    def __init__(self, sequence: _Optional[int] = ..., generation: _Optional[int] = ..., base_length: _Optional[int] = ..., branches: _Optional[_Iterable[_Union[Branch, _Mapping]]] = ...) -> None: ...

class Branch(_message.Message):
    __slots__ = ("accepted", "token", "draft_token_ids", "draft_distributions", "is_copy")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_DISTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    IS_COPY_FIELD_NUMBER: _ClassVar[int]
    accepted: int
    token: int
    draft_token_ids: _containers.RepeatedScalarFieldContainer[int]
    draft_distributions: _containers.RepeatedCompositeFieldContainer[_common_pb2.SparseDistribution]
    is_copy: bool
    def __init__(self, accepted: _Optional[int] = ..., token: _Optional[int] = ..., draft_token_ids: _Optional[_Iterable[int]] = ..., draft_distributions: _Optional[_Iterable[_Union[_common_pb2.SparseDistribution, _Mapping]]] = ..., is_copy: _Optional[bool] = ...) -> None: ...

class NeedOpen(_message.Message):
    __slots__ = ("sequence", "generation", "reason", "message")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    generation: int
    reason: NeedOpenReason
    message: str
    def __init__(self, sequence: _Optional[int] = ..., generation: _Optional[int] = ..., reason: _Optional[_Union[NeedOpenReason, str]] = ..., message: _Optional[str] = ...) -> None: ...
