"""From the residual stream to the vocabulary, as the model does it after its last block."""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from jackfield.errors import Unavailable, UnsupportedModel
from jackfield.values.anatomy import Anatomy
from jackfield.values.tree import named_modules

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}  # other dtypes round: 2e-2


class Lens:
    """The modules that run after the last block, and what is done to the head's result, found by running them once."""

    def __init__(self, model: PreTrainedModel, anatomy: Anatomy) -> None:
        self._model, self._anatomy = model, anatomy
        self._tail: list[str] | None = None  # paths: what stands there may be replaced
        self._finish: Callable[[Tensor], Tensor] = _same

    def project(self, x: Tensor, *, norm: bool) -> Tensor:
        """[..., d_model] to [..., vocab]; without `norm` the final norm is left out."""
        if self._tail is None:
            self._tail = self._find()
        with torch.set_grad_enabled(torch.is_grad_enabled() and x.requires_grad):
            for path in self._tail:
                if norm or path != self._anatomy.final_norm:
                    x = self._module(path)(x)
            return self._finish(x)

    def _module(self, path: str) -> nn.Module:
        try:
            return self._model.get_submodule(path)
        except AttributeError:
            raise UnsupportedModel(
                f"project_on_vocab goes through {path}, which the model had when it was loaded, and has not now: load "
                "it again."
            ) from None

    @torch.no_grad()
    def _find(self) -> list[str]:
        """Follows one token from the last block's output to the logits, module by module."""
        last = self._model.get_submodule(self._anatomy.layers[-1].path)
        passed: list[tuple[nn.Module, Tensor, Tensor]] = []
        handles = [module.register_forward_hook(_recorder(passed)) for module in self._leaves() if module is not last]
        handles.append(last.register_forward_hook(_recorder(passed)))
        try:
            ids = torch.tensor([[1, 2, 3]], device=self._model.device) % self._model.config.get_text_config().vocab_size
            logits = self._model(input_ids=ids, use_cache=False).logits
        finally:
            for handle in handles:
                handle.remove()
        place = max(index for index, (module, _, _) in enumerate(passed) if module is last)
        stream, tail = passed[place][2], list[str]()
        paths = {id(module): path for path, module in named_modules(self._model).items()}
        for module, given, result in passed[place + 1 :]:
            if torch.equal(given, stream):
                stream, tail = result, [*tail, paths[id(module)]]
        self._finish = _finish(self._model, stream, logits)
        return tail

    def _leaves(self) -> list[nn.Module]:
        inside = tuple(f"{layer.path}." for layer in self._anatomy.layers)
        blocks = {layer.path for layer in self._anatomy.layers}
        return [
            module
            for path, module in named_modules(self._model).items()
            if path and path not in blocks and not path.startswith(inside) and not list(module.children())
        ]


def _recorder(
    passed: list[tuple[nn.Module, Tensor, Tensor]],
) -> Callable[[nn.Module, tuple[object, ...], object], None]:
    def record(module: nn.Module, args: tuple[object, ...], output: object) -> None:
        given = args[0] if args else None
        result = cast("tuple[object, ...]", output)[0] if isinstance(output, tuple) else output
        if isinstance(result, Tensor) and result.is_floating_point():
            passed.append((module, given if isinstance(given, Tensor) else result, result.clone()))

    return record


def _finish(model: PreTrainedModel, head: Tensor, logits: Tensor) -> Callable[[Tensor], Tensor]:
    """What the model does to the head's result: nothing, a scale, a soft cap, by what its configuration says."""
    config = model.config.get_text_config()
    cap = getattr(config, "final_logit_softcapping", None)
    candidates: list[Callable[[Tensor], Tensor]] = [_same]
    for name in ("logit_scale", "logits_scaling", "output_multiplier_scale", "lm_head_multiplier"):
        factor = getattr(config, name, None)
        if isinstance(factor, int | float) and factor:
            candidates += [_scaled(float(factor)), _scaled(1.0 / float(factor))]
    if cap:
        candidates += [_capped(float(cap), before) for before in list(candidates)]
    tolerance = TOLERANCE.get(logits.dtype, 2e-2)
    for candidate in candidates:
        if torch.allclose(
            candidate(head).float(), logits.float(), rtol=tolerance, atol=tolerance * float(logits.abs().max())
        ):
            return candidate
    raise Unavailable(
        "project_on_vocab is not available: how this model makes logits of its final norm's output was not understood."
    )


def _same(x: Tensor) -> Tensor:
    return x


def _scaled(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * factor


def _capped(cap: float, before: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.tanh(before(x) / cap) * cap
