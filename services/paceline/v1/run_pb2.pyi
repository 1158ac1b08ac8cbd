import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from paceline.v1 import parameters_pb2 as _parameters_pb2
from paceline.v1 import rows_pb2 as _rows_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_COLLECTOR: _ClassVar[Role]
    ROLE_EVALUATOR: _ClassVar[Role]
ROLE_UNSPECIFIED: Role
ROLE_COLLECTOR: Role
ROLE_EVALUATOR: Role

class JoinRequest(_message.Message):
    __slots__ = ("run_id", "protocol_version", "role", "index", "process_id")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    protocol_version: int
    role: Role
    index: int
    process_id: str
    def __init__(self, run_id: _Optional[str] = ..., protocol_version: _Optional[int] = ..., role: _Optional[_Union[Role, str]] = ..., index: _Optional[int] = ..., process_id: _Optional[str] = ...) -> None: ...

class JoinResponse(_message.Message):
    __slots__ = ("index", "incarnation", "row_spec", "table", "actor_semantics_json", "warmup_step_count", "run_seed", "run_state", "environment_id", "environment_kwargs_json", "n_step", "gamma")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROW_SPEC_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    ACTOR_SEMANTICS_JSON_FIELD_NUMBER: _ClassVar[int]
    WARMUP_STEP_COUNT_FIELD_NUMBER: _ClassVar[int]
    RUN_SEED_FIELD_NUMBER: _ClassVar[int]
    RUN_STATE_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_ID_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_KWARGS_JSON_FIELD_NUMBER: _ClassVar[int]
    N_STEP_FIELD_NUMBER: _ClassVar[int]
    GAMMA_FIELD_NUMBER: _ClassVar[int]
    index: int
    incarnation: int
    row_spec: _rows_pb2.RowSpec
    table: str
    actor_semantics_json: str
    warmup_step_count: int
    run_seed: int
    run_state: _parameters_pb2.RunState
    environment_id: str
    environment_kwargs_json: str
    n_step: int
    gamma: float
    def __init__(self, index: _Optional[int] = ..., incarnation: _Optional[int] = ..., row_spec: _Optional[_Union[_rows_pb2.RowSpec, _Mapping]] = ..., table: _Optional[str] = ..., actor_semantics_json: _Optional[str] = ..., warmup_step_count: _Optional[int] = ..., run_seed: _Optional[int] = ..., run_state: _Optional[_Union[_parameters_pb2.RunState, str]] = ..., environment_id: _Optional[str] = ..., environment_kwargs_json: _Optional[str] = ..., n_step: _Optional[int] = ..., gamma: _Optional[float] = ...) -> None: ...

class ReportEpisodesRequest(_message.Message):
    __slots__ = ("run_id", "collector_index", "collector_incarnation", "sequence", "episodes", "environment_step_count")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    COLLECTOR_INDEX_FIELD_NUMBER: _ClassVar[int]
    COLLECTOR_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    EPISODES_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_STEP_COUNT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    collector_index: int
    collector_incarnation: int
    sequence: int
    episodes: _containers.RepeatedCompositeFieldContainer[Episode]
    environment_step_count: int
    def __init__(self, run_id: _Optional[str] = ..., collector_index: _Optional[int] = ..., collector_incarnation: _Optional[int] = ..., sequence: _Optional[int] = ..., episodes: _Optional[_Iterable[_Union[Episode, _Mapping]]] = ..., environment_step_count: _Optional[int] = ...) -> None: ...

class Episode(_message.Message):
    __slots__ = ("episode_return", "length", "terminated", "ended_at")
    EPISODE_RETURN_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    TERMINATED_FIELD_NUMBER: _ClassVar[int]
    ENDED_AT_FIELD_NUMBER: _ClassVar[int]
    episode_return: float
    length: int
    terminated: bool
    ended_at: _timestamp_pb2.Timestamp
    def __init__(self, episode_return: _Optional[float] = ..., length: _Optional[int] = ..., terminated: _Optional[bool] = ..., ended_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class ReportEpisodesResponse(_message.Message):
    __slots__ = ("run_state",)
    RUN_STATE_FIELD_NUMBER: _ClassVar[int]
    run_state: _parameters_pb2.RunState
    def __init__(self, run_state: _Optional[_Union[_parameters_pb2.RunState, str]] = ...) -> None: ...

class ReportEvaluationRequest(_message.Message):
    __slots__ = ("run_id", "policy", "learner_step", "environment_step_count", "episodes")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    LEARNER_STEP_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_STEP_COUNT_FIELD_NUMBER: _ClassVar[int]
    EPISODES_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    policy: _parameters_pb2.PolicyIdentity
    learner_step: int
    environment_step_count: int
    episodes: _containers.RepeatedCompositeFieldContainer[Episode]
    def __init__(self, run_id: _Optional[str] = ..., policy: _Optional[_Union[_parameters_pb2.PolicyIdentity, _Mapping]] = ..., learner_step: _Optional[int] = ..., environment_step_count: _Optional[int] = ..., episodes: _Optional[_Iterable[_Union[Episode, _Mapping]]] = ...) -> None: ...

class ReportEvaluationResponse(_message.Message):
    __slots__ = ("run_state",)
    RUN_STATE_FIELD_NUMBER: _ClassVar[int]
    run_state: _parameters_pb2.RunState
    def __init__(self, run_state: _Optional[_Union[_parameters_pb2.RunState, str]] = ...) -> None: ...
