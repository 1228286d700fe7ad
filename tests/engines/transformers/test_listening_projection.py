"""The first linear product of a router. Truth: what the router returns, and routers with other weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from jackfield.engines.transformers.listening import listen_projection
from jackfield.errors import EditMismatch
from tests import zoo
from tests.engines.transformers.test_listening_by_hand import Told

ROUTERS = {
    "mixtral": ("MixtralTopKRouter", 0),
    "gpt_oss": ("GptOssTopKRouter", 0),
    "qwen3_moe": ("Qwen3MoeTopKRouter", 0),
    "deepseek_v3": ("DeepseekV3TopkRouter", 0),
    "llama4_text": ("Llama4Router", 1),
    "dbrx": ("DbrxRouter", None),
}
routers = pytest.mark.parametrize("name", ROUTERS)


def _router(name: str, **options: Any) -> nn.Module:
    modules = zoo.build(name, **options).modules()
    return next(module for module in modules if type(module).__name__ == ROUTERS[name][0])


def _flat(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


@routers
def test_router_logits_are_handed_out(name: str) -> None:
    router, x = _router(name), torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    told: list[Tensor] = []
    plain = _flat(router(x))
    with listen_projection(router, told.append) as listening:
        heard = _flat(router(x))
    assert listening.missing is None
    assert all(torch.equal(*pair) for pair in zip(heard, plain, strict=True))
    assert torch.equal(told[0], plain[ROUTERS[name][1] or 0])


@routers
def test_replaced_router_logits_change_the_routing(name: str) -> None:
    """As if the weights had been others."""
    router, x = _router(name, fresh=True), torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    with listen_projection(router, lambda logits: -logits.double()):
        heard = _flat(router(x))
    for parameter in router.requires_grad_(False).parameters():
        parameter.neg_()
    assert all(torch.equal(*pair) for pair in zip(heard, _flat(router(x)), strict=True))


def test_a_projection_of_another_shape_is_refused() -> None:
    router = _router("mixtral")
    with (
        pytest.raises(EditMismatch, match=r"router logits were edited with shape \(5, 1\); they have shape \(5, 4\)"),
        listen_projection(router, lambda logits: logits[:, :1]),
    ):
        router(torch.zeros(5, 64))


@pytest.mark.parametrize("function", [lambda x, w: x @ w.T, lambda x, w: torch.addmm(torch.ones(3), x, w.T)])
def test_a_projection_may_be_a_matrix_product(function: Callable[..., Tensor]) -> None:
    x, weight, told = torch.ones(2, 4), torch.ones(3, 4), []
    with listen_projection(module := Told(function), told.append):
        result = module(x, weight)
    assert told[0] is result


def test_a_module_without_a_projection_says_so() -> None:
    with listen_projection(module := nn.Tanh(), lambda logits: logits) as listening:
        module(torch.ones(2))
    assert listening.missing == "The router logits of Tanh cannot be read: it takes no linear product."
