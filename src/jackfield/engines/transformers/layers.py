"""One decoder block, read off a recording: a Formula, or a reason, for each of its values."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from torch import nn
from transformers import PretrainedConfig

from jackfield.engines.transformers.attends import Attend, ends_with, not_understood
from jackfield.engines.transformers.dataflow import Block, input_formula, is_linear, is_norm, output_formula
from jackfield.engines.transformers.heads import find_heads
from jackfield.engines.transformers.neurons import find_activations, find_router
from jackfield.engines.transformers.recording import Call, Recording
from jackfield.engines.transformers.sublayers import (
    NO_SUBLAYERS,
    Sublayers,
    core,
    find_middle,
    find_norm,
    find_sublayers,
    inline_entry,
)
from jackfield.values.anatomy import AttentionAnatomy, Formula, LayerAnatomy, Missing
from jackfield.values.families.family import Family
from jackfield.values.families.names import CLIPS, LAYER_NUMBERS

NOT_A_SUM = (
    "this block is not seen to add the result of one module per sublayer to its stream, "
    "so no tensor is what this sublayer adds"
)
_NO_SUBLAYER = "no such sublayer adds to the stream of this block"


@dataclass(frozen=True, slots=True)
class Reading:
    """A layer, and whether its stream is layer_input + attention_output + mlp_output."""

    layer: LayerAnatomy
    whole: bool


def read_layer(
    block: Block, recording: Recording, attends: Sequence[Attend], config: PretrainedConfig, family: Family
) -> Reading:
    """The places of everything in `block`; `attends` are the attention ops of the whole recording."""
    mine = _attends_of(block, attends, family)
    attending = mine[0].path if mine else None
    sublayers = find_sublayers(block, attending, config) if block.has_one_stream else NO_SUBLAYERS
    mixer = _mixer(block, sublayers, attending)
    mlp = _mlp(block, sublayers, mixer, family)
    router = find_router(block, recording, attending)
    values = _stream(block) | _attention_values(block, sublayers, mixer) | _mlp_values(block, sublayers, mlp, mixer)
    values["router_logits"] = router
    if mlp is not None:
        values["mlp_activations"] = find_activations(block, mlp, routed=isinstance(router, Formula))
    attention = _describe(block, recording, mine, mixer, config) if mine else _no_attention(recording, mixer)
    layer = LayerAnatomy(
        path=block.path,
        values=values,
        attention=attention,
        attention_path=None if mixer is None else mixer.path,
        mlp_path=None if mlp is None or is_linear(mlp) else mlp.path,
    )
    return Reading(layer, sublayers.whole)


def _attends_of(block: Block, attends: Sequence[Attend], family: Family) -> list[Attend]:
    """The ops of the attention of `block`: those of the module that the family states, or that attends first."""
    mine = [attend for attend in attends if block.call.start < attend.index < block.call.end]
    path = mine[0].path if mine and family.attention is None else f"{block.path}.{family.attention}"
    return [attend for attend in mine if attend.path == path]


def _mlp(block: Block, sublayers: Sublayers, mixer: Call | None, family: Family) -> Call | None:
    """The MLP: what the family states, else the outermost module around what it adds that holds no attention."""
    if family.mlp is not None:
        return next((call for call in block.inside if call.path == f"{block.path}.{family.mlp}"), None)
    if sublayers.mlp is None:
        return None
    last = core(block, sublayers.mlp)
    around = [call for call in block.around(last.path) if mixer is None or not call.holds(mixer)]
    return around[0] if around else last


def _stream(block: Block) -> dict[str, Formula | Missing]:
    if not block.has_one_stream:
        several = Missing("the blocks of this model hand on several tensors, of which none is the residual stream")
        return {"layer_input": several, "layer_output": several}
    return {
        "layer_input": input_formula(block.call, block.entering, block.tokens),
        "layer_output": output_formula(block.call, block.tokens),
    }


def _mixer(block: Block, sublayers: Sublayers, attending: str | None) -> Call | None:
    """The attention as the block sees it: the module behind its summand, with the op inside.

    Where no summand was found: of the modules around the op, the outermost that takes the same input.
    """
    behind = None if sublayers.attention is None else core(block, sublayers.attention)
    if attending is None:
        return behind
    around = block.around(attending)
    if behind is not None:
        inner = [call for call in around if call is behind or call.holds(behind)]
        return next(iter(inner[-1:]), behind)
    taken = around[-1].argument if around else None
    same = [call for call in around if taken is not None and call.argument is not None and call.argument.equals(taken)]
    return next(iter(same or around[-1:]), None)


def _attention_values(block: Block, sublayers: Sublayers, mixer: Call | None) -> dict[str, Formula | Missing]:
    reason = Missing(_NO_SUBLAYER if sublayers.whole else NOT_A_SUM)
    norm = reason if mixer is None else _norm_value(block, mixer, "attention")
    output = reason if sublayers.attention is None else sublayers.attention.formula
    return {"attention_norm_output": norm, "attention_output": output}


def _norm_value(block: Block, sublayer: Call, name: str, after: Call | None = None) -> Formula | Missing:
    """The norm's result; where that is there before `after` has run, what the sublayer takes, which is the same."""
    norm = find_norm(block, sublayer, sublayer.argument)
    if norm is not None and (after is None or norm.end > after.end):
        return output_formula(norm, block.tokens)
    if norm is not None and sublayer.argument is not None:
        return input_formula(sublayer, sublayer.argument, block.tokens)
    return Missing(f"nothing normalises what the {name} of this block takes")


def _mlp_values(
    block: Block, sublayers: Sublayers, mlp: Call | None, mixer: Call | None
) -> dict[str, Formula | Missing]:
    if mlp is None:
        reason = Missing(_NO_SUBLAYER if sublayers.whole else NOT_A_SUM)
        return dict.fromkeys(("layer_mid", "mlp_norm_output", "mlp_activations", "mlp_output"), reason)
    entry = inline_entry(block, mlp) if is_linear(mlp) else mlp
    norm = find_norm(block, entry, entry.argument)
    middle: Formula | Missing = Missing(_NO_SUBLAYER if sublayers.whole else NOT_A_SUM)
    if sublayers.middle is not None:
        middle = find_middle(block, sublayers.middle, entry, norm)
    return {
        "layer_mid": middle,
        "mlp_norm_output": _norm_value(block, entry, "MLP", mixer),
        "mlp_output": Missing(NOT_A_SUM) if sublayers.mlp is None else sublayers.mlp.formula,
    }


def _no_attention(recording: Recording, mixer: Call | None) -> Missing:
    if mixer is None:
        return Missing("no softmax attention on this layer: none was seen")
    name, reason = type(mixer.module).__name__, not_understood(recording, mixer)
    if reason is not None:
        return Missing(f"the attention of {name} is not understood: {reason}")
    return Missing(f"no softmax attention on this layer: {name} mixes its tokens without one")


def _describe(
    block: Block, recording: Recording, attends: list[Attend], mixer: Call | None, config: PretrainedConfig
) -> AttentionAnatomy:
    attend = attends[0]
    module = next(call.module for call in block.inside if call.path == attend.path)
    clip = _held(CLIPS, module, config)
    own = _held(LAYER_NUMBERS, module)
    cache_layer, unheld = _cached(recording, attend, own)
    keys = find_heads(block, attend, attend.keys, clip)
    if isinstance(keys, Missing) and cache_layer is not None and own is not None and cache_layer != own:
        keys = Missing(f"this layer has no keys of its own: it attends to those of layer {cache_layer}")
    return AttentionAnatomy(
        path=attend.path,
        dispatched=attend.dispatched,
        num_heads=attend.queries.shape[0],
        num_kv_heads=attend.keys.shape[0],
        d_head=attend.queries.shape[-1],
        d_value=attend.values.shape[-1],
        scale=attend.scale,
        window=_window(attend, block.number, config),
        softcap=attend.softcap,
        calls=sum(other.path == attend.path for other in attends),
        output_projection=_output_projection(block, mixer, attend),
        cache_layer=cache_layer,
        unheld=unheld,
        queries_prerotary=find_heads(block, attend, attend.queries, clip),
        keys_prerotary=keys,
    )


def _held(names: tuple[str, ...], module: nn.Module, config: object = None) -> float | None:
    """The first of the numbers `names` that the module holds, or its configuration."""
    configs = (config, getattr(config, "attn_config", None))  # foreign: dbrx and mpt nest theirs
    found = (getattr(owner, name, None) for name in names for owner in (module, *configs))
    return next((value for value in found if isinstance(value, int | float) and not isinstance(value, bool)), None)


def _output_projection(block: Block, mixer: Call | None, attend: Attend) -> str | None:
    """The first projection of the attention, after the op, that takes all heads, one beside the other.

    Where a module around it takes the same and nothing else, it is that one: an adapter adds to what it holds.
    """
    if mixer is None:
        return None
    width = attend.queries.shape[0] * attend.values.shape[-1]
    after = [call for call in block.inside if attend.index < call.start and call.end < mixer.end]
    projections = [call for call in after if is_linear(call) and block.once(call)]
    taking = (call for call in projections if call.argument is not None and call.argument.value.shape[-1] == width)
    found = next(taking, None)
    if found is None:
        return None
    return next(call.path for call in after if call is found or (call.holds(found) and _wraps(block, call, found)))


def _wraps(block: Block, call: Call, inner: Call) -> bool:
    """Whether `call` takes what `inner` does, and nothing else, and gives as many rows as wide; it holds no norm."""
    given = [seen for seen in (*call.arguments.values(), *call.nested) if seen.value.is_floating_point()]
    if call.result is None or inner.result is None or inner.argument is None or not block.once(call):
        return False
    alike = len(given) == 1 and given[0].equals(inner.argument) and call.result.rows.shape == inner.result.rows.shape
    return alike and not any(call.holds(other) and is_norm(other) for other in block.inside)


def _cached(recording: Recording, attend: Attend, own: float | None) -> tuple[int | None, dict[str, str]]:
    """The layer of the cache with the keys that the op received, and which operands it does not hold, with the reason.

    Layers may share keys and values, and a cache may hold something that they are made of (latents).
    """
    layers = list(getattr(recording.cache, "layers", ()))  # foreign: transformers.Cache from 4.56
    order = sorted(range(len(layers)), key=lambda number: number != own)
    holding = (number for number in order if ends_with(attend.keys, getattr(layers[number], "keys", None)))
    number = next(holding, None)
    if number is None:
        reason = "the cache of this model does not hold the keys and values that its attention receives"
        return None, {"k": reason, "v": reason}
    if ends_with(attend.values, getattr(layers[number], "values", None)):
        return number, {}
    return number, {"v": "the attention receives the cached values rearranged"}


def _window(attend: Attend, number: int, config: PretrainedConfig) -> int | None:
    """How many keys a query sees. `layer_types` decides masks, whatever a layer passes; chunks are no window."""
    kinds = cast("list[str]", getattr(config, "layer_types", None) or [])  # foreign: configurations from 4.53
    stated = getattr(config, "sliding_window", None)
    if number < len(kinds):
        return (attend.window or stated) if kinds[number] == "sliding_attention" else None
    if attend.dispatched and "sliding_window" not in attend.passed:
        return stated
    return attend.window
