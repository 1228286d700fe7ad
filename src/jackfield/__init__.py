"""jackfield: read and edit what a language model computes, by standard names, while an engine runs it."""

from jackfield.errors import (
    EditMismatch,
    EngineDied,
    EngineError,
    InvalidIntervention,
    InvalidRequest,
    JackfieldError,
    MissingExtra,
    NoSource,
    NotReached,
    OutOfOrder,
    RequestTooLong,
    TracingError,
    Unavailable,
    UnboundSave,
    UnknownModel,
    UnknownValue,
    UnresolvedExpression,
    UnsupportedModel,
    UnsupportedVersion,
    ValueAccessError,
)
from jackfield.model import Model
from jackfield.trace.result import Result
from jackfield.values.families.family import Family
from jackfield.values.interface import AttentionFuser, interface_call, interface_calls
from jackfield.values.layer import values
from jackfield.values.value import DECODE_STEP, Value

__all__ = [
    "DECODE_STEP",
    "AttentionFuser",
    "EditMismatch",
    "EngineDied",
    "EngineError",
    "Family",
    "InvalidIntervention",
    "InvalidRequest",
    "JackfieldError",
    "MissingExtra",
    "Model",
    "NoSource",
    "NotReached",
    "OutOfOrder",
    "RequestTooLong",
    "Result",
    "TracingError",
    "Unavailable",
    "UnboundSave",
    "UnknownModel",
    "UnknownValue",
    "UnresolvedExpression",
    "UnsupportedModel",
    "UnsupportedVersion",
    "Value",
    "ValueAccessError",
    "interface_call",
    "interface_calls",
    "values",
]
