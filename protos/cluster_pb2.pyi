from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReplicaHealth(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REPLICA_HEALTH_UNSPECIFIED: _ClassVar[ReplicaHealth]
    REPLICA_HEALTH_CONNECTING: _ClassVar[ReplicaHealth]
    REPLICA_HEALTH_READY: _ClassVar[ReplicaHealth]
    REPLICA_HEALTH_LOST: _ClassVar[ReplicaHealth]
    REPLICA_HEALTH_REFUSED: _ClassVar[ReplicaHealth]
REPLICA_HEALTH_UNSPECIFIED: ReplicaHealth
REPLICA_HEALTH_CONNECTING: ReplicaHealth
REPLICA_HEALTH_READY: ReplicaHealth
REPLICA_HEALTH_LOST: ReplicaHealth
REPLICA_HEALTH_REFUSED: ReplicaHealth

class ScaleDraftersRequest(_message.Message):
    __slots__ = ("pool", "replicas")
    POOL_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    pool: str
    replicas: int
    def __init__(self, pool: _Optional[str] = ..., replicas: _Optional[int] = ...) -> None: ...

class ScaleDraftersResponse(_message.Message):
    __slots__ = ("previous_replicas", "replicas")
    PREVIOUS_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    previous_replicas: int
    replicas: int
    def __init__(self, previous_replicas: _Optional[int] = ..., replicas: _Optional[int] = ...) -> None: ...

class DrainDrafterRequest(_message.Message):
    __slots__ = ("replica_id",)
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    def __init__(self, replica_id: _Optional[str] = ...) -> None: ...

class DrainDrafterResponse(_message.Message):
    __slots__ = ("replicas",)
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    replicas: int
    def __init__(self, replicas: _Optional[int] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("model", "version", "verifiers", "drafter_pools", "num_waiting", "num_running", "num_finished", "num_completion_tokens", "uptime_s")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    VERIFIERS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_POOLS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_FINISHED_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: str
    verifiers: _containers.RepeatedCompositeFieldContainer[ReplicaStatus]
    drafter_pools: _containers.RepeatedCompositeFieldContainer[DrafterPoolStatus]
    num_waiting: int
    num_running: int
    num_finished: int
    num_completion_tokens: int
    uptime_s: float
    def __init__(self, model: _Optional[str] = ..., version: _Optional[str] = ..., verifiers: _Optional[_Iterable[_Union[ReplicaStatus, _Mapping]]] = ..., drafter_pools: _Optional[_Iterable[_Union[DrafterPoolStatus, _Mapping]]] = ..., num_waiting: _Optional[int] = ..., num_running: _Optional[int] = ..., num_finished: _Optional[int] = ..., num_completion_tokens: _Optional[int] = ..., uptime_s: _Optional[float] = ...) -> None: ...

class ReplicaStatus(_message.Message):
    __slots__ = ("replica_id", "address", "health", "message", "num_sequences", "max_sequences", "num_losses")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_LOSSES_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    address: str
    health: ReplicaHealth
    message: str
    num_sequences: int
    max_sequences: int
    num_losses: int
    def __init__(self, replica_id: _Optional[str] = ..., address: _Optional[str] = ..., health: _Optional[_Union[ReplicaHealth, str]] = ..., message: _Optional[str] = ..., num_sequences: _Optional[int] = ..., max_sequences: _Optional[int] = ..., num_losses: _Optional[int] = ...) -> None: ...

class DrafterPoolStatus(_message.Message):
    __slots__ = ("pool", "kind", "replicas", "num_draft_tokens", "num_accepted_draft_tokens", "num_drafts", "scale")
    POOL_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    pool: str
    kind: str
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaStatus]
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    num_drafts: int
    scale: DrafterPoolScale
    def __init__(self, pool: _Optional[str] = ..., kind: _Optional[str] = ..., replicas: _Optional[_Iterable[_Union[ReplicaStatus, _Mapping]]] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_draft_tokens: _Optional[int] = ..., num_drafts: _Optional[int] = ..., scale: _Optional[_Union[DrafterPoolScale, _Mapping]] = ...) -> None: ...

class DrafterPoolScale(_message.Message):
    __slots__ = ("wanted_replicas", "min_replicas", "max_replicas", "is_autoscaled")
    WANTED_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    MIN_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    MAX_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    IS_AUTOSCALED_FIELD_NUMBER: _ClassVar[int]
    wanted_replicas: int
    min_replicas: int
    max_replicas: int
    is_autoscaled: bool
    def __init__(self, wanted_replicas: _Optional[int] = ..., min_replicas: _Optional[int] = ..., max_replicas: _Optional[int] = ..., is_autoscaled: _Optional[bool] = ...) -> None: ...
