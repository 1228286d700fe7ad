"""What a run with gradients has around the model: where its graph begins, and how it survives what is written in place.

The weights need no gradients: a graph begins at the token embeddings, and each read takes the place of what passes, so
that what comes later depends on it. Reads and edits are written over tensors that the model holds, and that autograd
may have saved for the way back; it is given copies to save.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from jackfield.engines.transformers.heads import cut
from jackfield.values.anatomy import Anatomy, Formula, Projection


@contextmanager
def graph_kept(model: nn.Module) -> Generator[None]:
    """In which forward passes of `model` can be differentiated, whatever the caller has set of torch's modes."""
    with torch.inference_mode(False), torch.enable_grad(), saved_tensors_hooks(_copies(model), lambda tensor: tensor):
        yield


def beginning(anatomy: Anatomy) -> str | None:
    """The path of the module whose results a graph begins with; None where it is not known."""
    embeddings = anatomy.values["token_embeddings"]
    return embeddings.site.path if isinstance(embeddings, Formula) else None


def begun(embeddings: Tensor) -> Tensor:
    """`embeddings` as a node of a graph that may be written to in place: a leaf may not."""
    return embeddings if embeddings.requires_grad else embeddings.requires_grad_().clone()


def heads_of(result: Tensor, projection: Projection) -> tuple[Tensor, Tensor]:
    """The heads of a projection's result, [batch, head, token, width], and a result that is made of them."""
    heads = cut(result, projection).clone()
    numbers = torch.arange(result.numel(), dtype=torch.float64, device=result.device).view(result.shape)
    places = cut(numbers, replace(projection, clip=None, factor=1.0)).long()
    made = result.flatten().index_put((places.flatten(),), (heads / projection.factor).flatten())
    return heads, made.view(result.shape)


def _copies(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """What is saved for the way back: a weight itself, which nothing writes to, and a copy of anything else."""
    weights = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    return lambda tensor: tensor if tensor.untyped_storage().data_ptr() in weights else tensor.clone()
