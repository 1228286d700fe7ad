"""jackfield: read and edit what a language model computes, by standard names, while an engine runs it."""

from jackfield.errors import (
    EditMismatch,
    EngineDied,
    EngineError,
    InvalidIntervention,
    InvalidPlot,
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
from jackfield.interleave.site import Port, Site
from jackfield.model import Model
from jackfield.trace.result import Result
from jackfield.values.anatomy import Formula, Missing
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
    "Formula",
    "InvalidIntervention",
    "InvalidPlot",
    "InvalidRequest",
    "JackfieldError",
    "Missing",
    "MissingExtra",
    "Model",
    "NoSource",
    "NotReached",
    "OutOfOrder",
    "Port",
    "RequestTooLong",
    "Result",
    "Site",
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
