"""Formulas and projections evaluated with hooks of our own, without the library's."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from jackfield.engines.transformers.heads import cut
from jackfield.interleave.site import Port, Site
from jackfield.values.anatomy import Anatomy, AttentionAnatomy, Formula, Missing, Projection


def assert_rows_close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    difference = (found - expected).abs().amax(-1) / expected.abs().amax(-1)
    assert float(difference.detach().max()) <= 1e-4


def evaluate(model: PreTrainedModel, anatomy: Anatomy, ids: Tensor) -> list[dict[str, Tensor]]:
    """Every value of every layer, by hooks."""
    wanted = [
        (number, name, value)
        for number, layer in enumerate(anatomy.layers)
        for name, value in layer.values.items()
        if isinstance(value, Formula) and value.site.port is not Port.PROJECT
    ]
    read = read_formulas(model, [formula for _, _, formula in wanted], ids)
    layers: list[dict[str, Tensor]] = [{} for _ in anatomy.layers]
    for (number, name, _), value in zip(wanted, read, strict=True):
        layers[number][name] = value
    return layers


def read_formulas(model: PreTrainedModel, formulas: Iterable[Formula], ids: Tensor) -> list[Tensor]:
    formulas = list(formulas)
    sites = {site for formula in formulas for site in (formula.site, formula.minus) if site is not None}
    seen: dict[Site, Tensor] = {}
    with ExitStack() as stack, torch.no_grad():
        for site in sites:
            stack.enter_context(listening(model, site, seen))
        model(input_ids=ids)
    return [computed(formula, seen) for formula in formulas]


def computed(formula: Formula, seen: Mapping[Site, Tensor]) -> Tensor:
    value = seen[formula.site]
    value = value if formula.stream is None else value[formula.stream]
    value = value if formula.minus is None else value - seen[formula.minus]
    return formula.factor * (value[None] if formula.flat else value)


@contextmanager
def listening(model: PreTrainedModel, site: Site, seen: dict[Site, Tensor]) -> Iterator[None]:
    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if site.key is None:
            value = args[0] if args else next(iter(kwargs.values()))
        else:
            value = kwargs[site.key] if site.key in kwargs else args[1]
        seen[site] = value.clone()

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        seen[site] = (output if isinstance(output, Tensor) else output[0]).clone()

    module = model.get_submodule(site.path)
    if site.port is Port.INPUT:
        handle = module.register_forward_pre_hook(before, with_kwargs=True)
    else:
        handle = module.register_forward_hook(after)
    try:
        yield
    finally:
        handle.remove()


def received(model: PreTrainedModel, ids: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Queries and keys [1, heads, token, width] that the attention interface was given, by the module's path."""
    paths = {id(module): path for path, module in model.named_modules()}
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def get_interface(name: str, default: Any) -> Any:
        def attend(module: nn.Module, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
            seen[paths[id(module)]] = (query.clone(), key.clone())
            return default(module, query, key, *args, **kwargs)

        return attend

    ALL_ATTENTION_FUNCTIONS.get_interface = get_interface
    try:
        with torch.no_grad():
            model(input_ids=ids)
    finally:
        del ALL_ATTENTION_FUNCTIONS.get_interface
    return seen


def projections_of(attention: AttentionAnatomy) -> list[tuple[Projection, ...] | Missing]:
    found = [attention.queries_prerotary, attention.keys_prerotary]
    return [(each,) if isinstance(each, Projection) else each for each in found]


def heads_before(model: PreTrainedModel, found: tuple[Projection, ...] | Missing, ids: Tensor) -> Tensor | None:
    if isinstance(found, Missing):
        return None
    results = read_formulas(model, [Formula(part.site) for part in found], ids)
    return torch.cat([cut(result, part) for result, part in zip(results, found, strict=True)], dim=-1)


def self_scores(queries: Tensor, keys: Tensor) -> Tensor:
    """[1, token, head]: each token's query times its own key."""
    keys = keys.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)
    return (queries * keys).sum(-1).transpose(1, 2)
