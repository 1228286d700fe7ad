"""Where every value of the contract is in a model, whatever its class: by structure, and by what two prompts showed.

    anatomy = read_anatomy(model)
    anatomy.layers[3].values["attention_output"]      # a Formula, or Missing with the reason
    anatomy.layers[3].attention.scale

Each of two prompts, of different lengths, is read by itself, and what they do not agree on is not served. Names of
modules are asked only where neither structure nor numbers tell, and what a Family states stands above both.
"""

from dataclasses import replace
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from jackfield.engines.transformers.agreement import agree
from jackfield.engines.transformers.attends import find_attends
from jackfield.engines.transformers.blocks import find_blocks
from jackfield.engines.transformers.dataflow import Block, blocks_of, is_norm, output_formula
from jackfield.engines.transformers.layers import read_layer
from jackfield.engines.transformers.recording import Call, Recording, modules_of, record
from jackfield.errors import UnsupportedModel
from jackfield.interleave.site import Port, Site
from jackfield.values.anatomy import Anatomy, Formula, LayerAnatomy, Missing
from jackfield.values.families import family_of
from jackfield.values.families.family import Family

_LENGTHS = (11, 13)
"""Tokens of the two prompts: no model has as many heads, or heads as wide, so that axes can be told apart."""


def read_anatomy(model: PreTrainedModel, family: Family | None = None) -> Anatomy:
    """Where the values of `model` are. `family` states what its structure does not tell; ours, where we have one.

    Runs two short prompts of random tokens. The model, its hooks and the random generators are as before.

    Raises:
        UnsupportedModel: no decoder blocks are found, a path that the family states is not there, or the model does
            not run on plain token ids.
    """
    stated = family if family is not None else family_of(model.config.model_type)
    readings = [_read(model, record(model, ids), stated) for ids in _prompts(model)]
    return _with_stated(model, agree(*readings), stated)


def _prompts(model: PreTrainedModel) -> list[Tensor]:
    """Token ids [1, token] without special tokens, whose embeddings and masks are special too."""
    config = model.config.get_text_config()
    sizes = (getattr(config, name, None) for name in ("vocab_size", "vocab_size_per_layer_input"))
    size = min(size for size in sizes if isinstance(size, int))
    special = [_as_list(getattr(config, name, None)) for name in ("pad_token_id", "bos_token_id", "eos_token_id")]
    plain = torch.tensor([token for token in range(min(size, 4096)) if not any(token in ids for ids in special)])
    generator = torch.Generator().manual_seed(0)
    order = plain[torch.randint(len(plain), (2, max(_LENGTHS)), generator=generator)].to(model.device)
    return [order[number : number + 1, :length] for number, length in enumerate(_LENGTHS)]


def _as_list(value: object) -> list[object]:
    return cast("list[object]", value) if isinstance(value, list) else [value]


def _read(model: PreTrainedModel, recording: Recording, family: Family) -> Anatomy:
    calls = find_blocks(model, recording, family.blocks)
    blocks = blocks_of(recording, calls)
    attends = find_attends(recording, modules_of(model))
    config = model.config.get_text_config()
    readings = [read_layer(block, recording, attends, config, family) for block in blocks]
    norm = _final_norm(recording, blocks[-1])
    embedding, head = (_path_of(model, part) for part in _ends(model))
    return Anatomy(
        layers=tuple(reading.layer for reading in readings),
        values={
            "token_embeddings": Missing("the model names no module of token embeddings")
            if embedding is None
            else Formula(Site(embedding, Port.OUTPUT)),
            "final_norm_output": Missing("nothing normalises the stream after the last block")
            if norm is None
            else output_formula(norm, recording.tokens),
        },
        final_norm=None if norm is None else norm.path,
        output_head=head,
        broken=_broken(blocks, [reading.whole for reading in readings]),
    )


def _final_norm(recording: Recording, last: Block) -> Call | None:
    """The norm that takes what the last block gives; where that is several streams, the last norm of all."""
    after = [call for call in recording.calls if call.start > last.call.end and is_norm(call)]
    taking = [call for call in after if call.argument is not None and call.argument.equals(last.leaving)]
    merged = after[-1:] if last.leaving.value.ndim > 3 else []
    return next(iter(taking or merged), None)


def _ends(model: PreTrainedModel) -> tuple[object, object]:
    """The modules of token embeddings and of the output head; None for one that the model does not name."""
    head = cast("object", model.get_output_embeddings())
    try:
        return cast("object", model.get_input_embeddings()), head
    except NotImplementedError:
        return None, head


def _path_of(model: nn.Module, module: object) -> str | None:
    return next((path for path, other in modules_of(model).items() if other is module), None)


def _broken(blocks: list[Block], whole: list[bool]) -> dict[str, str]:
    broken: dict[str, str] = {}
    partial = [block.number for block, holds in zip(blocks, whole, strict=True) if not holds]
    if partial:
        broken["residual_stream"] = (
            f"what layers {partial} do to their stream is not the sum of an attention and an MLP, "
            "so layer_input + attention_output + mlp_output is not layer_output there"
        )
    changed = [block.number for block, after in pairwise(blocks) if not after.entering.equals(block.leaving)]
    if changed:
        broken["layer_chain"] = f"the model changes its stream after layers {changed}, before the next layer takes it"
    return broken


def _with_stated(model: nn.Module, anatomy: Anatomy, family: Family) -> Anatomy:
    """`anatomy` with what the family states in place of what was found."""
    layers = tuple(_layer_with_stated(model, layer, family) for layer in anatomy.layers)
    for formula in family.root.values():
        _require(model, formula)
    return replace(
        anatomy,
        layers=layers,
        values={**anatomy.values, **family.root},
        broken={**anatomy.broken, **family.broken},
    )


def _layer_with_stated(model: nn.Module, layer: LayerAnatomy, family: Family) -> LayerAnatomy:
    values = {name: _below(layer.path, value) for name, value in family.values.items()}
    for value in values.values():
        _require(model, value)
    return replace(layer, values={**layer.values, **values})


def _below(path: str, value: Formula | Missing) -> Formula | Missing:
    """`value`, whose sites are below a block, for the block at `path`."""
    if isinstance(value, Missing):
        return value
    minus = None if value.minus is None else _site_below(path, value.minus)
    return replace(value, site=_site_below(path, value.site), minus=minus)


def _site_below(path: str, site: Site) -> Site:
    return site._replace(path=f"{path}.{site.path}" if site.path else path)


def _require(model: nn.Module, value: Formula | Missing) -> None:
    """Refuse a stated place that the model does not have."""
    if isinstance(value, Missing):
        return
    if value.site.path not in modules_of(model):
        raise UnsupportedModel(
            f"The family states a value at {value.site}, and {type(model).__name__} has no module "
            f"{value.site.path!r}. Paths of a layer's values are below the block."
        )
