"""The call to the attention interface: finding it in source, and resolving what it passes without running it.

Every case is a forward that also runs, with an attention function that notes what it was given: that is the oracle.
"""

import ast
import functools
import math
from math import sqrt
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as RENAMED_TABLE

from jackfield.errors import UnresolvedExpression, UnsupportedModel
from jackfield.values.interface import AttentionFuser, argument, interface_call, interface_calls, mismatch

HEAD_DIM = 16
SOFTNESS = 0.5
SET_BY_A_FORWARD = 1.0


def note(module, query, key, value, attention_mask=None, scaling=None, dropout=0.0, **kwargs):
    """An attention function that hands back what it was given."""
    return {"scaling": scaling, **kwargs}


class Attention(nn.Module):
    """What the forwards below read."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(
            _attn_implementation="eager", head_dim=HEAD_DIM, caps=[None, 30.0], rope={"factor": 4.0}, sliding_window=8
        )
        self.layer_idx = 1
        self.head_dim = HEAD_DIM
        self.scaling = 0.3
        self.inverse = True
        self.nothing = None
        self.pairs = [(0, 1), (2, 3)]
        self.temperature = nn.Parameter(torch.tensor([0.7]))
        self.per_head = nn.Parameter(torch.tensor([0.7, 0.8]))
        self.sinks = nn.Parameter(torch.arange(8.0))
        self.register_buffer("buffered", torch.arange(8.0))

    @property
    def softened(self):
        return SOFTNESS * self.scaling

    @property
    def broken(self):
        raise RuntimeError("not yet")

    def compute(self):
        return 0.3


def made(forward):
    """A module with that forward."""
    return type(f"{forward.__name__}_attention", (Attention,), {"forward": forward})()


def called(module):
    """What the module's forward passes when it runs."""
    state = torch.ones(1, 2, 3, HEAD_DIM)
    return module(state, state, state)


# --- what a scale may be written as -------------------------------------------------------------------------------


def literal(self, q, k, v, mask=None, **kwargs):
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, note)
    return attend(self, q, k, v, mask, scaling=1.0, **kwargs)


def attribute(self, q, k, v, mask=None, **kwargs):
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, note)
    return attend(self, q, k, v, mask, scaling=self.scaling, **kwargs)


def power(self, q, k, v, mask=None, **kwargs):
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, note)
    return attend(self, q, k, v, mask, scaling=self.head_dim**-0.5, **kwargs)


def product_and_quotient(self, q, k, v, mask=None, **kwargs):
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, note)
    return attend(self, q, k, v, mask, scaling=-(-SOFTNESS * self.scaling) / (self.layer_idx + 1), **kwargs)


def root(self, q, k, v, mask=None, **kwargs):
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, note)
    return attend(self, q, k, v, mask, scaling=1 / math.sqrt(self.config.head_dim), **kwargs)


def imported_root(self, q, k, v, mask=None, **kwargs):
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, note)
    return attend(self, q, k, v, mask, scaling=1 / sqrt(float(HEAD_DIM)), **kwargs)


def prop(self, q, k, v, mask=None, **kwargs):
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, note)
    return attend(self, q, k, v, mask, scaling=self.softened, **kwargs)


def one_element_tensor(self, q, k, v, mask=None, **kwargs):
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, note)
    return attend(self, q, k, v, mask, scaling=self.temperature, **kwargs)


def item_of_a_tensor(self, q, k, v, mask=None, **kwargs):
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, note)
    return attend(self, q, k, v, mask, scaling=self.per_head[1].item(), **kwargs)


def subscripts(self, q, k, v, mask=None, **kwargs):
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, note)
    return attend(self, q, k, v, mask, scaling=self.config.caps[self.layer_idx] / self.config.rope["factor"], **kwargs)


def ternary(self, q, k, v, mask=None, **kwargs):
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, note)
    return attend(self, q, k, v, mask, scaling=self.scaling if 0 < self.layer_idx < 2 else mask.size(0), **kwargs)


def first_that_is_set(self, q, k, v, mask=None, **kwargs):
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, note)
    return attend(self, q, k, v, mask, scaling=self.nothing or self.scaling or mask.size(0), **kwargs)


def attribute_with_default(self, q, k, v, mask=None, **kwargs):
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, note)
    return attend(self, q, k, v, mask, scaling=getattr(self, "softness", 0.4), **kwargs)


def container(self, q, k, v, mask=None, **kwargs):
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, note)
    return attend(self, q, k, v, mask, scaling=max(len(self.pairs), min(1, 2)) * (1 in (1, 2)), **kwargs)


def local(self, q, k, v, mask=None, **kwargs):
    scaling = self.head_dim**-0.5
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, note)
    return attend(self, q, k, v, mask, scaling=scaling, **kwargs)


def annotated_local(self, q, k, v, mask=None, **kwargs):
    width: int = self.head_dim
    scaling: float = width**-0.5
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, note)
    return attend(self, q, k, v, mask, scaling=scaling, **kwargs)


def reassigned_local(self, q, k, v, mask=None, **kwargs):
    scaling, width = 1.0, self.head_dim
    scaling = scaling * width
    scaling /= self.layer_idx + 1
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, note)
    result = attend(self, q, k, v, mask, scaling=scaling, **kwargs)
    scaling = 7.0
    return result


def branch_that_resolves(self, q, k, v, mask=None, **kwargs):
    scaling = 1.0
    if self.nothing is not None:
        scaling = 2.0
    elif self.inverse:
        scaling = 1.0 / (self.layer_idx + 1)
    else:
        scaling = 3.0
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, note)
    return attend(self, q, k, v, mask, scaling=scaling, **kwargs)


def branch_not_taken(self, q, k, v, mask=None, **kwargs):
    scaling = 0.9
    if not self.inverse:
        scaling = 2.0
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, note)
    return attend(self, q, k, v, mask, scaling=scaling, **kwargs)


def branch_that_leaves(self, q, k, v, mask=None, **kwargs):
    scaling = 0.9
    if mask is not None:
        scaling = 2.0
        raise ValueError(scaling)
    with torch.no_grad():
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, note)
        return attend(self, q, k, v, mask, scaling=scaling, **kwargs)


def by_position(self, q, k, v, mask=None, **kwargs):
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, note)
    return attend(self, q, k, v, mask, self.scaling, 0.0)


def unpacked(self, q, k, v, mask=None, **kwargs):
    passed = {"dropout": 0.0, "scaling": self.scaling}
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, note)
    return attend(self, q, k, v, mask, **passed, **kwargs)


def renamed_self(this, q, k, v, mask=None, **kwargs):
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(this.config._attn_implementation, note)
    return attend(this, q, k, v, mask, scaling=this.scaling, **kwargs)


def text_left_of_the_function(self, q, k, v, mask=None, **kwargs):
    """A docstring
    that goes on in the first column.
    """
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, note)
    return attend(self, q, k, v, mask, scaling=self.scaling, **kwargs)


RESOLVED = [
    literal,
    attribute,
    power,
    product_and_quotient,
    root,
    imported_root,
    prop,
    one_element_tensor,
    item_of_a_tensor,
    subscripts,
    ternary,
    first_that_is_set,
    attribute_with_default,
    container,
    local,
    annotated_local,
    reassigned_local,
    branch_that_resolves,
    branch_not_taken,
    branch_that_leaves,
    by_position,
    unpacked,
    renamed_self,
    text_left_of_the_function,
]


@pytest.mark.parametrize("forward", RESOLVED, ids=lambda forward: forward.__name__)
def test_a_scale_resolves_to_what_the_call_passes(forward):
    module = made(forward)
    fuser = AttentionFuser.match(None, module)
    assert fuser is not None
    scale = fuser.scale(module)
    assert type(scale) is float
    assert scale == called(module)["scaling"]


def test_a_scale_follows_the_module_and_not_the_first_one_seen():
    one, other = made(attribute), made(attribute)
    other.scaling = 0.9
    fuser = AttentionFuser.match(None, one)
    assert (fuser.scale(one), fuser.scale(other)) == (0.3, 0.9)


def test_a_scale_reads_the_closure():
    softness = 0.6

    def closing(self, q, k, v, mask=None, **kwargs):
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, note)
        return attend(self, q, k, v, mask, scaling=softness, **kwargs)

    module = made(closing)
    assert AttentionFuser.match(None, module).scale(module) == softness


def no_scale(self, q, k, v, mask=None, **kwargs):
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, note)
    return attend(self, q, k, v, mask, dropout=0.0, **kwargs)


def literal_none(self, q, k, v, mask=None, **kwargs):
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, note)
    return attend(self, q, k, v, mask, scaling=None, **kwargs)


def none_attribute(self, q, k, v, mask=None, **kwargs):
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, note)
    return attend(self, q, k, v, mask, scaling=self.nothing, **kwargs)


@pytest.mark.parametrize("forward", [no_scale, literal_none, none_attribute], ids=lambda forward: forward.__name__)
def test_a_call_that_passes_no_scale_has_none(forward):
    module = made(forward)
    assert AttentionFuser.match(None, module).scale(module) is None
    assert called(module)["scaling"] is None


# --- what only a run can tell ---------------------------------------------------------------------------------------


def of_an_argument(self, q, k, v, mask=None, scaling=1.0):
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, note)
    return attend(self, q, k, v, mask, scaling=scaling)


def of_a_shape(self, q, k, v, mask=None, **kwargs):
    _, tokens, *_ = q.shape
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, note)
    return attend(self, q, k, v, mask, scaling=tokens**-0.5, **kwargs)


def of_a_method(self, q, k, v, mask=None, **kwargs):
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, note)
    return attend(self, q, k, v, mask, scaling=self.compute(), **kwargs)


def of_a_branch(self, q, k, v, mask=None, **kwargs):
    scaling = 1.0
    if mask is None:
        scaling = 0.5
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, note)
    return attend(self, q, k, v, mask, scaling=scaling, **kwargs)


def of_a_loop(self, q, k, v, mask=None, **kwargs):
    scaling = 1.0
    for _ in self.pairs:
        scaling = scaling / 2
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, note)
    return attend(self, q, k, v, mask, scaling=scaling, **kwargs)


def of_an_earlier_round(self, q, k, v, mask=None, **kwargs):
    attend, scaling, result = ALL_ATTENTION_FUNCTIONS.get_interface("eager", note), 1.0, None
    for _ in self.pairs:
        result = attend(self, q, k, v, mask, scaling=scaling, **kwargs)
        scaling = 2.0
    return result


def of_an_attempt(self, q, k, v, mask=None, **kwargs):
    try:
        scaling = q.size(5)
    except IndexError:
        scaling = 1.0
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, note)
    return attend(self, q, k, v, mask, scaling=scaling, **kwargs)


def of_a_failed_attempt(self, q, k, v, mask=None, **kwargs):
    attend, scaling = ALL_ATTENTION_FUNCTIONS.get_interface("eager", note), 1.0
    try:
        scaling = 2.0
        return q.size(5)
    except IndexError:
        return attend(self, q, k, v, mask, scaling=scaling, **kwargs)


def of_the_test_of_a_loop(self, q, k, v, mask=None, **kwargs):
    attend, scaling = ALL_ATTENTION_FUNCTIONS.get_interface("eager", note), 1.0
    while attend(self, q, k, v, mask, scaling=scaling, **kwargs):
        scaling = 2.0


def of_the_same_statement(self, q, k, v, mask=None, **kwargs):
    attend, scaling = ALL_ATTENTION_FUNCTIONS.get_interface("eager", note), 1.0
    return attend(self, q, k, v, mask if (scaling := 2.0) else None, scaling=scaling, **kwargs)


def of_a_later_time(self, q, k, v, mask=None, **kwargs):
    attend, scaling = ALL_ATTENTION_FUNCTIONS.get_interface("eager", note), 1.0

    def later():
        return attend(self, q, k, v, mask, scaling=scaling, **kwargs)

    scaling = 2.0
    return later()


def of_a_global_set_here(self, q, k, v, mask=None, **kwargs):
    global SET_BY_A_FORWARD
    SET_BY_A_FORWARD = 2.0
    attend = ALL_ATTENTION_FUNCTIONS.get_interface("eager", note)
    return attend(self, q, k, v, mask, scaling=SET_BY_A_FORWARD, **kwargs)


def of_a_comprehension(self, q, k, v, mask=None, **kwargs):
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, note)
    return [attend(self, q, k, v, mask, scaling=HEAD_DIM) for HEAD_DIM in (1.0, 2.0)]


def of_an_attribute_set_here(self, q, k, v, mask=None, **kwargs):
    self.scaling = q.shape[-1] ** -0.5
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, note)
    return attend(self, q, k, v, mask, scaling=self.scaling, **kwargs)


def of_a_star(self, *states, **kwargs):
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, note)
    return attend(self, *states)


def of_a_changed_dictionary(self, q, k, v, mask=None, **kwargs):
    passed = {"scaling": 1.0}
    passed["scaling"] = q.size(0)
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, note)
    return attend(self, q, k, v, mask, **passed)


def of_a_boolean(self, q, k, v, mask=None, **kwargs):
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, note)
    return attend(self, q, k, v, mask, scaling=self.inverse, **kwargs)


def of_a_missing_attribute(self, q, k, v, mask=None, **kwargs):
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, note)
    return attend(self, q, k, v, mask, scaling=self.softness, **kwargs)


def of_a_broken_property(self, q, k, v, mask=None, **kwargs):
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, note)
    return attend(self, q, k, v, mask, scaling=self.broken, **kwargs)


def of_many_elements(self, q, k, v, mask=None, **kwargs):
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, note)
    return attend(self, q, k, v, mask, scaling=self.per_head, **kwargs)


UNRESOLVED = {
    of_an_argument: "'scaling'.*known only when the module is called",
    of_a_shape: r"'tokens \*\* \(?-0.5\)?'.*'tokens' is set by '_, tokens, \*_ = q.shape'",
    of_a_method: r"'self.compute\(\)'.*would have to be called",
    of_a_branch: "'scaling'.*'mask' is known only when the module is called",
    of_a_loop: "'scaling' is set by 'for _ in self.pairs:'",
    of_an_earlier_round: "'scaling' may be set on the way by 'for _ in self.pairs:'",
    of_an_attempt: "'scaling' is set by 'try:'",
    of_a_failed_attempt: "'scaling' is set by 'try:'|may be set on the way by 'try:'",
    of_the_test_of_a_loop: "'scaling' may be set on the way by 'while attend",
    of_the_same_statement: "'scaling' may be set on the way by 'return attend",
    of_a_later_time: "'scaling' is read later than where it stands",
    of_a_global_set_here: "'SET_BY_A_FORWARD' is set by the forward",
    of_a_comprehension: "'HEAD_DIM' is set inside the expression",
    of_an_attribute_set_here: "the forward sets self.scaling itself",
    of_a_star: r"'\*states'",
    of_a_changed_dictionary: r"passed\['scaling'\]",
    of_a_boolean: "'self.inverse'.*it is True, and not one number",
    of_a_missing_attribute: "'self.softness'.*AttributeError",
    of_a_broken_property: "'self.broken'.*RuntimeError: not yet",
    of_many_elements: r"'self.per_head'.*it is a tensor of shape \(2,\), and not one number",
}


@pytest.mark.parametrize(("forward", "text"), UNRESOLVED.items(), ids=[forward.__name__ for forward in UNRESOLVED])
def test_a_scale_that_only_a_run_can_tell_is_refused(forward, text):
    module = made(forward)
    fuser = AttentionFuser.match(None, module)
    with pytest.raises(UnresolvedExpression, match=text) as caught:
        fuser.scale(module)
    assert isinstance(caught.value, ValueError)
    assert f"{forward.__name__}_attention" in str(caught.value)


# --- how the call may be reached ------------------------------------------------------------------------------------


def plain(self, q, k, v, mask=None):
    attention_interface = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
    return attention_interface(self, q, k, v, mask)


def annotated(self, q, k, v, mask=None):
    attention_interface: object = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, note)
    return attention_interface(self, q, k, v, mask)


def other_name_and_more_bindings(self, q, k, v, mask=None):
    states = q, k, v
    attention_interface = print
    op_7 = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, note)
    attention_interface()
    return op_7(self, *states, mask)


def replaced_in_a_branch(self, q, k, v, mask=None):
    attend = note
    if self.config._attn_implementation != "eager":
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
    return attend(self, q, k, v, mask)


def walrus(self, q, k, v, mask=None):
    if attend := ALL_ATTENTION_FUNCTIONS.get(self.config._attn_implementation, note):
        return attend(self, q, k, v, mask)
    return None


def at_once(self, q, k, v, mask=None):
    return ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation](self, q, k, v, mask)


def at_once_out_of_the_method(self, q, k, v, mask=None):
    return ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, note)(self, q, k, v, mask)


def by_getattr(self, q, k, v, mask=None):
    attend = getattr(ALL_ATTENTION_FUNCTIONS, self.config._attn_implementation, note)
    return attend(self, q, k, v, mask)


def by_a_table_of_another_name(self, q, k, v, mask=None):
    attend = RENAMED_TABLE[self.config._attn_implementation]
    return attend(self, q, k, v, mask)


def by_the_table_of_a_module(self, q, k, v, mask=None):
    attend = self.library.ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
    return attend(self, q, k, v, mask)


def by_another_receiver(self, q, k, v, mask=None):
    attend = self.library.get_interface(self.config._attn_implementation, note)
    return attend(self, q, k, v, mask)


def through_a_second_name(self, q, k, v, mask=None):
    first = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, note)
    second = first if self.inverse else None
    return second(self, q, k, v, mask)


def decorate(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


REACHED = [
    plain,
    annotated,
    other_name_and_more_bindings,
    replaced_in_a_branch,
    walrus,
    at_once,
    at_once_out_of_the_method,
    by_getattr,
    by_a_table_of_another_name,
    by_the_table_of_a_module,
    by_another_receiver,
    through_a_second_name,
    decorate(decorate(plain)),
    functools.partial(plain, mask=None),
    functools.partial(decorate(plain), mask=None),
    made(plain).forward,
    type(made(plain)),
]


@pytest.mark.parametrize("forward", REACHED, ids=lambda forward: getattr(forward, "__name__", "partial"))
def test_the_call_is_found(forward):
    call = interface_call(forward)
    assert isinstance(call, ast.Call)
    assert ast.unparse(call.args[0]) == "self"
    assert mismatch(forward) is None


def test_the_call_is_found_once_and_kept():
    assert interface_call(decorate(plain)) is interface_call(made(plain).forward)


def two_calls(self, q, k, v, mask=None):
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, note)
    first = attend(self, q, k, v, mask, scaling=self.scaling)
    return first, attend(self, q, k, v, mask, scaling=2 * self.scaling)


def test_two_calls_are_no_match_and_are_each_addressable():
    module = made(two_calls)
    assert interface_call(two_calls) is None
    assert AttentionFuser.match(None, module) is None
    assert mismatch(module.forward) == "its forward calls the attention interface of transformers 2 times"
    fusers = AttentionFuser.match_all(module)
    assert [fuser.index for fuser in fusers] == [0, 1]
    assert [fuser.call for fuser in fusers] == list(interface_calls(two_calls))
    assert [fuser.scale(module) for fuser in fusers] == [passed["scaling"] for passed in called(module)] == [0.3, 0.6]


def calls_nothing(self, q, k, v, mask=None):
    table = {"eager": note}
    attend = table.get(self.config._attn_implementation)
    return attend(self, q, k, v, mask)


def own_softmax(self, q, k, v, mask=None):
    return torch.softmax(q @ k.mT, dim=-1) @ v


def own_softmax_of_nn(self, q, k, v, mask=None):
    return nn.functional.softmax(q @ k.mT, dim=-1) @ v


def without_source():
    space = {"ALL_ATTENTION_FUNCTIONS": ALL_ATTENTION_FUNCTIONS}
    exec("def forward(self):\n    return ALL_ATTENTION_FUNCTIONS['sdpa'](self)", space)
    return space["forward"]


def circular():
    def forward(self):
        return ALL_ATTENTION_FUNCTIONS["sdpa"](self)

    forward.__wrapped__ = forward
    return forward


UNMATCHED = {
    "another table": (calls_nothing, "^its forward does not call the attention interface of transformers$"),
    "own softmax": (own_softmax, "it attends by itself"),
    "own softmax of nn": (own_softmax_of_nn, "it attends by itself"),
    "no source": (without_source(), "source of its forward cannot be read"),
    "not a function definition": (lambda self: ALL_ATTENTION_FUNCTIONS["sdpa"](self), "cannot be read"),
    "not Python": (math.sqrt, "cannot be read"),
    "decorators in a circle": (circular(), "cannot be read"),
    "no forward": (int, "cannot be read"),
    "nothing": (None, "cannot be read"),
}


@pytest.mark.parametrize(("forward", "reason"), UNMATCHED.values(), ids=UNMATCHED)
def test_what_does_not_call_the_interface_gives_no_call(forward, reason):
    assert interface_call(forward) is None
    assert interface_calls(forward) == ()
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(mismatch(forward))


def test_a_file_that_changed_since_it_was_imported_gives_no_call(tmp_path):
    path = tmp_path / "attention.py"
    path.write_text("def forward(self):\n    return ALL_ATTENTION_FUNCTIONS['sdpa'](self)\n")
    space = {}
    exec(compile(path.read_text(), str(path), "exec"), space)
    path.write_text("def other(self):\n    return ALL_ATTENTION_FUNCTIONS['sdpa'](self, scaling=1.0)\n")
    assert interface_call(space["forward"]) is None


def test_an_argument_is_found_by_name_and_by_position():
    call = ast.parse("f(self, q, k, v, mask, s, softcap=c)", mode="eval").body
    found = {name: argument(call, name) for name in ("module", "scaling", "dropout", "softcap", "sliding_window")}
    texts = {name: value and ast.unparse(value) for name, value in found.items()}
    assert texts == {"module": "self", "scaling": "s", "dropout": None, "softcap": "c", "sliding_window": None}


# --- what else a fuser tells ------------------------------------------------------------------------------------------


def everything(self, q, k, v, mask=None, **kwargs):
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, note)
    return attend(
        self,
        q,
        k,
        v,
        mask,
        scaling=self.scaling,
        sliding_window=getattr(self.config, "sliding_window", None) if self.layer_idx % 2 else None,
        softcap=self.config.caps[self.layer_idx],
        s_aux=getattr(self, "sinks", None),
        **kwargs,
    )


def test_window_softcap_and_sinks_are_what_the_call_passes():
    module = made(everything)
    fuser, passed = AttentionFuser.match(None, module), called(module)
    assert (fuser.window(module), fuser.softcap(module)) == (passed["sliding_window"], passed["softcap"]) == (8, 30.0)
    assert fuser.sinks(module) is passed["s_aux"] is module.sinks
    module.layer_idx = 0
    del module.sinks
    assert (fuser.window(module), fuser.softcap(module), fuser.sinks(module)) == (None, None, None)


def test_a_call_that_passes_no_more_has_no_window_softcap_or_sinks():
    module = made(attribute)
    fuser = AttentionFuser.match(None, module)
    assert (fuser.window(module), fuser.softcap(module), fuser.sinks(module), fuser.s_aux_expr) == (None,) * 4


def test_a_window_that_is_no_number_of_keys_is_refused():
    module = made(everything)
    module.config.sliding_window = 8.5
    with pytest.raises(UnresolvedExpression, match="a window is a number of keys"):
        AttentionFuser.match(None, module).window(module)


def test_sinks_that_are_no_tensor_are_refused():
    module = made(everything)
    del module.sinks
    module.sinks = 3.0
    with pytest.raises(UnresolvedExpression, match="sinks are a tensor"):
        AttentionFuser.match(None, module).sinks(module)


def test_info_names_the_module_the_class_and_what_is_passed():
    module = made(everything)
    fuser = AttentionFuser.match(None, module)
    assert fuser.info("layers.1.attn") == (
        "layers.1.attn (everything_attention) -> attention interface: "
        "scaling=self.scaling, s_aux=getattr(self, 'sinks', None)"
    )
    assert fuser.source_cls is type(module)
    assert not fuser.redefines_forward


def test_a_fuser_made_by_hand_resolves_on_the_module():
    module = made(plain)
    scaling = ast.parse("self.head_dim ** -0.5", mode="eval").body
    assert AttentionFuser(type(module), scaling, None).scale(module) == 0.25


CONFIGS = {
    "the same": ("jackfield", "jackfield", True),
    "another": ("sdpa", "jackfield", False),
    "none of its own": (None, "jackfield", False),
    "none asked": ("jackfield", None, False),
    "none at all": (None, None, False),
}


@pytest.mark.parametrize(("own", "asked", "answer"), CONFIGS.values(), ids=CONFIGS)
def test_validate_compares_the_implementations(own, asked, answer):
    module = made(attribute)
    module.config._attn_implementation = own
    fuser = AttentionFuser.match(None, module)
    assert fuser.validate(module, SimpleNamespace(_attn_implementation=asked)) is answer


def test_validate_is_false_without_a_config():
    module = made(attribute)
    fuser = AttentionFuser.match(None, module)
    assert fuser.validate(module, None) is False
    del module.config
    assert fuser.validate(module, SimpleNamespace(_attn_implementation="eager")) is False


def test_validate_asks_the_language_part_of_a_config_of_several_parts():
    module = made(attribute)
    module.config._attn_implementation = "jackfield"
    text = SimpleNamespace(_attn_implementation="jackfield")
    whole = SimpleNamespace(_attn_implementation="sdpa", get_text_config=lambda: text)
    assert AttentionFuser.match(None, module).validate(module, whole) is True


@pytest.mark.parametrize("name", ["layer_idx", "layer_index", "layer_id"])
def test_the_layer_index_is_read_off_the_module(name):
    module = made(attribute)
    del module.layer_idx
    fuser = AttentionFuser.match(None, module)
    assert fuser.layer_index(module) is None
    setattr(module, name, True)
    assert fuser.layer_index(module) is None
    setattr(module, name, 3)
    assert fuser.layer_index(module) == 3


# --- fusing -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 4])
def test_fuse_makes_the_sinks_a_share_that_loads_itself(size):
    whole = torch.arange(8.0, dtype=torch.bfloat16)
    shares = []
    for rank in range(size):
        module = made(everything).to(torch.bfloat16)
        fuser = AttentionFuser.match(None, module)
        original = module.sinks
        assert fuser.fuse(module, tp_rank=rank, tp_size=size) is module
        sinks = fuser.sinks(module)
        assert sinks is module.sinks is not original
        assert isinstance(sinks, nn.Parameter)
        assert (sinks.shape, sinks.dtype, sinks.device) == ((8 // size,), torch.bfloat16, original.device)
        assert not sinks.requires_grad
        sinks.weight_loader(sinks, whole)
        shares.append(sinks)
    assert torch.equal(torch.cat(shares), whole)


def test_fuse_without_sinks_changes_nothing():
    module = made(attribute)
    before = dict(module.named_parameters())
    assert AttentionFuser.match(None, module).fuse(module, tp_rank=1, tp_size=2) is module
    assert all(parameter is before[name] for name, parameter in module.named_parameters())


def buffered_sinks(self, q, k, v, mask=None):
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, note)
    return attend(self, q, k, v, mask, s_aux=self.buffered)


def computed_sinks(self, q, k, v, mask=None):
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, note)
    return attend(self, q, k, v, mask, s_aux=self.sinks * 2)


def test_fuse_replaces_sinks_that_are_a_buffer():
    module = made(buffered_sinks)
    AttentionFuser.match(None, module).fuse(module, tp_size=2)
    assert isinstance(module.buffered, nn.Parameter)
    assert dict(module.named_buffers()) == {}


def test_fuse_refuses_sinks_that_are_computed():
    module = made(computed_sinks)
    with pytest.raises(UnresolvedExpression, match=r"'self.sinks \* 2'.*neither a parameter nor a buffer"):
        AttentionFuser.match(None, module).fuse(module, tp_size=2)


@pytest.mark.parametrize(("rank", "size"), [(0, 3), (2, 2), (-1, 2), (0, 0)])
def test_fuse_refuses_a_share_that_is_none(rank, size):
    module = made(everything)
    with pytest.raises(UnsupportedModel, match=f"rank {rank} of {size}, found attention sinks of 8 heads"):
        AttentionFuser.match(None, module).fuse(module, tp_rank=rank, tp_size=size)


def test_the_loader_refuses_a_weight_of_other_heads():
    module = made(everything)
    AttentionFuser.match(None, module).fuse(module, tp_size=2)
    with pytest.raises(UnsupportedModel, match=r"shape \(4,\), expected \(8,\)"):
        module.sinks.weight_loader(module.sinks, torch.zeros(4))
