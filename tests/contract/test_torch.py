"""What torch offers means in a block what it means elsewhere, on every engine."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import jackfield as jf
from tests.contract.conftest import Subject

EAGERLY = functools.partial(torch.compile, backend="eager")


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.float64, torch.float32])
def test_an_edit_through_a_view_of_another_dtype_is_made(
    model: jf.Model, prompt: list[int], dtype: torch.dtype
) -> None:
    """Kills: a block in inference mode, where such a view counts its own version."""

    def block(m: jf.Model, t: Any) -> tuple[Tensor, Tensor]:
        m.layers[0].layer_output.view(dtype).zero_()
        return m.layers[1].layer_input, m.logits

    stream, logits = model.run(prompt, block).returned
    assert not stream.any()
    assert not torch.allclose(logits, model.run(prompt, lambda m, t: m.logits).returned)


def test_what_is_projected_in_a_block_may_be_written_to(model: jf.Model, prompt: list[int]) -> None:
    def block(m: jf.Model, t: Any) -> Tensor:
        projected = m.project_on_vocab(m.layers[0].layer_output)
        projected[..., 3] = 0.0
        return projected

    projected = model.run(prompt, block).returned
    assert projected.any()
    assert not projected[..., 3].any()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_a_tangent_of_a_block_is_its_own(model: jf.Model, prompt: list[int]) -> None:
    def block(m: jf.Model, t: Any) -> tuple[Tensor, Tensor, Tensor]:
        read = lambda a: (m.layers[0].layer_output * a).sum()  # noqa: E731
        value, tangent = torch.func.jvp(read, (torch.tensor(2.0),), (torch.tensor(1.0),))
        return m.layers[0].layer_output, value, tangent

    stream, value, tangent = model.run(prompt, block).returned
    torch.testing.assert_close(tangent, stream.sum())
    torch.testing.assert_close(value, 2 * stream.sum())


def test_a_gradient_of_a_block_is_its_own(model: jf.Model, prompt: list[int]) -> None:
    def block(m: jf.Model, t: Any) -> tuple[Tensor, Tensor | None]:
        stream = m.layers[0].layer_output.clone()
        with torch.enable_grad():
            leaf = stream.requires_grad_()
            (leaf**2).sum().backward()
        return leaf.detach(), leaf.grad

    stream, gradient = model.run(prompt, block).returned
    assert gradient is not None
    torch.testing.assert_close(gradient, 2 * stream)


@pytest.mark.slow
def test_a_block_may_read_in_a_function_that_it_has_compiled(model: jf.Model, prompt: list[int]) -> None:
    """Kills: torch compiling the model's frames as well, by the block's backend."""

    def block(m: jf.Model, t: Any) -> tuple[Tensor, Tensor, Tensor]:
        def backend(graph: Any, inputs: Any) -> Any:
            return lambda *given: [each * 0 if isinstance(each, Tensor) else each for each in graph(*given)]

        def reads() -> Tensor:
            return twice(m.layers[1].layer_output)

        def twice(x: Tensor) -> Tensor:
            return x * 2 + 1

        read = torch.compile(reads, backend=backend)()
        return read, m.layers[1].layer_output, m.logits

    read, stream, logits = model.run(prompt, block).returned
    torch._dynamo.reset()  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    assert not read.any()  # its own operations are compiled, and what it reads is not
    plain, other = model.run(prompt, lambda m, t: (m.layers[1].layer_output, m.logits)).returned
    torch.testing.assert_close(stream, plain)
    torch.testing.assert_close(logits, other)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_a_dual_tensor_is_no_edit(model: jf.Model, prompt: list[int]) -> None:
    """Its tangent would go through the model, and into what later reads see."""

    def assigned(m: jf.Model, t: Any) -> None:
        with forward_ad.dual_level():
            stream = m.layers[0].layer_output
            m.layers[0].layer_output = forward_ad.make_dual(stream.clone(), torch.ones_like(stream))

    def in_place(m: jf.Model, t: Any) -> None:
        with forward_ad.dual_level():
            stream = m.layers[0].layer_output
            stream.mul_(forward_ad.make_dual(torch.tensor(2.0), torch.tensor(1.0)))
            m.layers[1].layer_output.sum()

    for block in (assigned, in_place):
        with pytest.raises(jf.EditMismatch, match=r"layers.0.layer_output was given a dual tensor"):
            model.run(prompt, block)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_the_primal_of_a_dual_tensor_is_an_edit(model: jf.Model, prompt: list[int]) -> None:
    def block(m: jf.Model, t: Any) -> tuple[Tensor, Tensor, Any]:
        with forward_ad.dual_level():
            stream = m.layers[0].layer_output.clone()
            doubled = stream * forward_ad.make_dual(torch.tensor(2.0), torch.tensor(1.0))
            m.layers[0].layer_output = forward_ad.unpack_dual(doubled).primal
            following = m.layers[1].layer_input
            return stream, following.clone(), forward_ad.unpack_dual(following).tangent

    stream, following, tangent = model.run(prompt, block).returned
    torch.testing.assert_close(following, 2 * stream)
    assert tangent is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_a_block_compiles_is_compiled_for_each_request(model: jf.Model, prompt: list[int]) -> None:
    """Kills: compiled code that takes names out of another request's globals."""

    def block(m: jf.Model, t: Any) -> Tensor:
        doubled = torch.compile(lambda x: x * 2 + 1, backend="eager")
        return doubled(m.layers[0].layer_output) - 2 * m.layers[0].layer_output

    for _ in range(3):
        for result in model.run([prompt, prompt[:-1]], block):
            torch.testing.assert_close(result.returned, torch.ones_like(result.returned), rtol=0, atol=1e-4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_it_is_so_under_any_name(model: jf.Model, prompt: list[int]) -> None:
    def block(m: jf.Model, t: Any) -> Tensor:
        doubled = EAGERLY(lambda x: x * 2 + 1)
        return doubled(m.layers[0].layer_output) - 2 * m.layers[0].layer_output

    for _ in range(3):
        for result in model.run([prompt, prompt[:-1]], block):
            torch.testing.assert_close(result.returned, torch.ones_like(result.returned), rtol=0, atol=1e-4)


def slope(model: jf.Model, stream: Tensor) -> tuple[Tensor, Tensor]:
    """How a logit changes along its gradient, and the gradient's length: the same, where the gradient is right."""
    gradient = torch.func.grad(lambda x: model.project_on_vocab(x)[..., 3].sum())(stream)
    step = 1e-2 * gradient / gradient.norm()
    change = model.project_on_vocab(stream + step) - model.project_on_vocab(stream - step)
    return change[..., 3].sum() / 2e-2, gradient.norm()


def with_graph(model: jf.Model, stream: Tensor) -> tuple[Tensor, Tensor]:
    """The same by `backward`."""
    with torch.enable_grad():
        leaf = stream.clone().requires_grad_()
        logit = model.project_on_vocab(leaf)[..., 3].sum()
        (gradient,) = torch.autograd.grad(logit, leaf)
    step = 1e-2 * gradient / gradient.norm()
    change = model.project_on_vocab(stream + step) - model.project_on_vocab(stream - step)
    return change[..., 3].sum() / 2e-2, gradient.norm()


@pytest.mark.parametrize("derived", [slope, with_graph])
@pytest.mark.parametrize("inside", [True, False], ids=["in a block", "outside"])
def test_a_derivative_of_a_projection_is_right_or_refused(
    engine: Subject, prompt: list[int], derived: Any, inside: bool
) -> None:
    """Kills: a derivative of zero, or none, on an engine whose kernels have none."""
    model = engine.model
    stream = model.run(prompt, lambda m, t: m.layers[0].layer_output[:, -1:].clone()).returned

    def found() -> tuple[Tensor, Tensor]:
        return model.run(prompt, lambda m, t: derived(m, stream)).returned if inside else derived(model, stream)

    if engine.name == "vllm":
        with pytest.raises(jf.Unavailable, match="project_on_vocab is not available for derivatives"):
            found()
    else:
        change, length = found()
        torch.testing.assert_close(change, length, rtol=2e-2, atol=1e-4)
