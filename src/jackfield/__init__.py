"""jackfield: read and edit what a language model computes, by standard names, while an engine runs it."""

from jackfield.errors import (
    EditMismatch,
    EngineDied,
    EngineError,
    HarvestError,
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
from jackfield.harvest.reading import Harvest
from jackfield.interleave.site import Port, Site
from jackfield.interventions.documents import from_json, to_json
from jackfield.interventions.kinds import (
    Capture,
    Intervention,
    Knockout,
    Probe,
    Project,
    Replace,
    Scale,
    Skip,
    Steer,
)
from jackfield.model import Model
from jackfield.trace.result import Result
from jackfield.values.anatomy import Formula, Missing
from jackfield.values.families.family import Family
from jackfield.values.interface import AttentionFuser, interface_call, interface_calls
from jackfield.values.layer import values
from jackfield.values.value import DECODE_STEP, Value
from jackfield.version import __version__

__all__ = [
    "DECODE_STEP",
    "AttentionFuser",
    "Capture",
    "EditMismatch",
    "EngineDied",
    "EngineError",
    "Family",
    "Formula",
    "Harvest",
    "HarvestError",
    "Intervention",
    "InvalidIntervention",
    "InvalidPlot",
    "InvalidRequest",
    "JackfieldError",
    "Knockout",
    "Missing",
    "MissingExtra",
    "Model",
    "NoSource",
    "NotReached",
    "OutOfOrder",
    "Port",
    "Probe",
    "Project",
    "Replace",
    "RequestTooLong",
    "Result",
    "Scale",
    "Site",
    "Skip",
    "Steer",
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
    "__version__",
    "from_json",
    "interface_call",
    "interface_calls",
    "to_json",
    "values",
]
