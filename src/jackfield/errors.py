"""What can go wrong, as a tree.

    JackfieldError
    ├── TracingError
    │   ├── NoSource              a block whose text Python did not keep, or that cannot be lifted
    │   ├── UnboundSave           a save, or a change of an outside object, that would be lost
    │   ├── OutOfOrder            a read, or an edit, of something the forward pass has already left behind
    │   └── NotReached            a value, or a step, that never came
    ├── ValueAccessError
    │   ├── UnknownValue          a name, layer, head or module that is not there       (also an AttributeError)
    │   ├── Unavailable           a known name this model, layer, engine or step cannot serve, with the reason
    │   └── EditMismatch          an edit of the wrong shape or dtype, giving both
    ├── UnresolvedExpression      an expression in a module's source that has no value here (also a ValueError)
    ├── EngineError
    │   ├── UnknownModel          nothing loads under that name, or a file of weights is broken
    │   ├── UnsupportedModel      it loads, but cannot be served right
    │   ├── UnsupportedVersion    a library outside the versions that were tried
    │   ├── InvalidRequest        a prompt or sampling argument that is not one          (also a ValueError)
    │   ├── RequestTooLong        a prompt that does not fit                             (also an InvalidRequest)
    │   ├── MissingExtra          an optional package that this call needs
    │   └── EngineDied            the engine is gone, or was closed
    ├── HarvestError              a folder that cannot be harvested into, gone on with, or read
    ├── InvalidIntervention       an intervention that cannot be applied, found when it is submitted
    └── InvalidPlot               arrays or labels that cannot be drawn                   (also a ValueError)

Every message says what was asked, what was found and what to write instead. Only errors of this tree, and the user's
own errors out of a block, leave the public functions.
"""

import difflib
from collections.abc import Iterable


class JackfieldError(Exception):
    """The root of every error that jackfield raises."""


class TracingError(JackfieldError):
    """A block cannot be run, or went against the order of the forward pass."""


class NoSource(TracingError):
    """The text of a block cannot be had, or cannot be lifted out of its function."""


class UnboundSave(TracingError):
    """A save that binds to no name, or a change of an outside object: it would be lost without a word."""


class OutOfOrder(TracingError):
    """The forward pass has already left this value behind."""


class NotReached(TracingError):
    """The run ended before this value, or this step, came."""


class ValueAccessError(JackfieldError):
    """A value cannot be named, read or written."""


class UnknownValue(ValueAccessError, AttributeError):
    """No value, layer, head or module of that name. An AttributeError, so that `hasattr` answers."""


class Unavailable(ValueAccessError):
    """A name of the contract that this model, layer, engine or step cannot serve; the message gives the reason."""


class EditMismatch(ValueAccessError):
    """An edit whose shape or dtype is not the value's."""


class UnresolvedExpression(JackfieldError, ValueError):
    """An expression found in a module's source that has no value on this module."""


class EngineError(JackfieldError):
    """An engine cannot be made, or cannot take this request."""


class UnknownModel(EngineError):
    """Nothing can be loaded under that name."""


class UnsupportedModel(EngineError):
    """The model loads, but what was asked cannot be right on it."""


class UnsupportedVersion(EngineError):
    """A library outside the range of versions that were tried."""


class InvalidRequest(EngineError, ValueError):
    """A prompt or a sampling argument that is not one."""


class RequestTooLong(InvalidRequest):
    """A prompt, with the tokens asked for, that does not fit the context."""


class MissingExtra(EngineError):
    """A package that only this call needs is not installed; the message has the command that brings it."""


class EngineDied(EngineError):
    """The engine has ended, or was closed."""


class HarvestError(JackfieldError):
    """A folder that cannot be harvested into, gone on with, or read."""


class InvalidIntervention(JackfieldError):
    """An intervention that cannot be applied to this model."""


class InvalidPlot(JackfieldError, ValueError):
    """Arrays or labels that cannot be drawn: their shape, their number, or what they hold."""


def near(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'a' or 'b'?`, of the known names nearest to `name`; empty where none is near."""
    close = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
