"""The inside of the MLP: its down projection, whose input is the neurons, and its router, where there is one."""

from jackfield.engines.transformers.dataflow import Block, close, input_formula, is_linear
from jackfield.engines.transformers.recording import PRODUCTS, SQUASHES, Call, Operation, Recording
from jackfield.interleave.site import Port, Site
from jackfield.values.anatomy import Formula, Missing
from jackfield.values.families.names import EXPERTS

_SELECTIONS = frozenset({"topk", "sort"})


def find_activations(block: Block, mlp: Call, routed: bool) -> Formula | Missing:
    """The input of the projection whose result is the MLP's, or is it but for a factor and the residual."""
    last = [call for call in (mlp, *block.inside) if call is mlp or mlp.holds(call)]
    projections = [call for call in last if is_linear(call) and block.once(call) and _gives(block, mlp, call)]
    if projections:
        down = projections[-1]
        assert down.argument is not None
        return input_formula(down, down.argument, block.tokens)
    if routed or any(_is_experts(call) for call in last):
        return Missing(
            "mixture of experts: a token's neurons are spread over the experts that it is routed to, "
            "so no one tensor holds them"
        )
    return Missing("no single projection of this MLP makes its output")


def _gives(block: Block, mlp: Call, projection: Call) -> bool:
    assert mlp.result is not None
    if projection.result is None or projection.result.rows.shape != mlp.result.rows.shape:
        return False
    made, given = projection.result.rows.double(), mlp.result.rows.double()
    if projection.result.equals(mlp.result):
        return True
    residuals = [seen.rows.double() for seen in mlp.arguments.values() if seen.rows.shape == given.shape]
    if any(close(made + residual, given, block.dtype) for residual in residuals):
        return True
    factor = float((made * given).sum() / (made * made).sum().clamp_min(1e-30))
    return factor != 0 and close(factor * made, given, block.dtype)


def _is_experts(call: Call) -> bool:
    name = call.path.rpartition(".")[2].lower() + type(call.module).__name__.lower()
    return any(hint in name for hint in EXPERTS)


def find_router(block: Block, recording: Recording, attention: str | None) -> Formula | Missing:
    """The linear product that experts are selected by: of the block's selections, the first outside the attention."""
    inside = [item for item in recording.operations if block.call.start < item.index < block.call.end]
    mine = [item for item in inside if attention is None or not _within(item.path, attention)]
    selections = [item for item in mine if item.name in _SELECTIONS and _is_real(item)]
    if not selections:
        return Missing("this layer has no router: its MLP is dense")
    before = [item for item in mine if item.index < selections[0].index and item.name in PRODUCTS]
    size = selections[0].inputs[0].value.numel()
    products = [item for item in before if item.output.value.numel() == size]
    if not products:
        return Missing("experts are selected by something that is no linear product")
    product = products[-1]
    squashed = [item for item in mine if item.index > product.index and item.name in SQUASHES]
    if not any(item.inputs and item.inputs[0].equals(product.output) for item in squashed):
        return Missing("the router changes its linear product before it selects by it")
    return _logits(block, inside, product)


def _is_real(operation: Operation) -> bool:
    return any(seen.value.is_floating_point() for seen in operation.inputs[:1])


def _logits(block: Block, inside: list[Operation], product: Operation) -> Formula | Missing:
    flat = product.output.value.ndim == 2
    call = next(call for call in reversed(block.inside) if call.path == product.path and call.start < product.index)
    if call.is_tensor and call.result is not None and call.result.equals(product.output):
        return Formula(Site(product.path, Port.OUTPUT), flat=flat)
    first = next(item for item in inside if item.name in PRODUCTS and call.start < item.index < call.end)
    if first is product:
        return Formula(Site(product.path, Port.PROJECT), flat=flat)
    return Missing(f"the router's logits are not the first linear product of {product.path!r}")


def _within(path: str, outer: str) -> bool:
    return path == outer or path.startswith(f"{outer}.")
