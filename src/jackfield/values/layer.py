"""One decoder block, the row of all of them, and which class of part stands at which module."""

from collections.abc import Iterator
from typing import cast, overload

from jackfield.interleave.reference import Bound
from jackfield.values.anatomy import Anatomy
from jackfield.values.attention import Attention, AttentionValues
from jackfield.values.mlp import Mlp, MlpValues
from jackfield.values.part import Part, Server, numbered
from jackfield.values.root import RootValues
from jackfield.values.tree import Module
from jackfield.values.value import Value, declared


class LayerValues:
    """The stream through one block, and what its sublayers add."""

    __slots__ = ()

    layer_input = Value("1 t h", "rw", "the residual stream entering")
    attention_norm_output = Value("1 t h", "rw", "the norm feeding the attention")
    attention_output = Value("1 t h", "rw", "what the attention adds to the stream, post-norm and multipliers included")
    layer_mid = Value("1 t h", "rw", "the stream after the attention add")
    mlp_norm_output = Value("1 t h", "rw", "the norm feeding the MLP")
    mlp_output = Value("1 t h", "rw", "what the MLP adds to the stream, post-norm and multipliers included")
    layer_output = Value("1 t h", "rw", "the stream leaving")


class Layer(LayerValues, AttentionValues, MlpValues, Module):
    """One decoder block. It answers for its attention and its MLP too."""

    __slots__ = ()

    @property
    def attention(self) -> Attention:
        """The attention of this layer."""
        return Attention(self._server, self._server.sublayer_path(self._number, "attention"), self._layer)

    @property
    def mlp(self) -> Mlp:
        """The MLP of this layer."""
        return Mlp(self._server, self._server.sublayer_path(self._number, "mlp"), self._layer)

    def skip(self, hidden: object = None) -> None:
        """Hands the block's input on as its output, or `hidden` [1, t, d_model]; this request alone is skipped.

        The block still computes its keys and values, so that later steps may attend to these positions.
        """
        self.layer_output = self.layer_input if hidden is None else hidden

    @property
    def _number(self) -> int:
        assert self._layer is not None
        return self._layer


class Layers(Bound):
    """The decoder blocks, in order: a length, iteration, an index, slices."""

    __slots__ = ("_count", "_server")

    def __init__(self, server: Server, count: int) -> None:
        self._server, self._count = server, count

    def __repr__(self) -> str:
        return f"<{self._count} layers>"

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Layer]:
        return cast("Iterator[Layer]", map(self._server.layer_part, range(self._count)))

    @overload
    def __getitem__(self, index: int) -> Layer: ...
    @overload
    def __getitem__(self, index: slice) -> list[Layer]: ...
    def __getitem__(self, index: int | slice) -> Layer | list[Layer]:
        if isinstance(index, slice):
            return [self[number] for number in range(self._count)[index]]
        layer = self._server.layer_part(numbered("layer", index, self._count))
        assert isinstance(layer, Layer)
        return layer


def values() -> tuple[Value, ...]:
    """Every name of the contract, in the order of the forward pass as far as it has one.

    Each has `name`, `on` (the part it belongs to), `axes`, `dtype`, `access` ("r" or "rw") and `meaning`.
    """
    return (*declared(RootValues), *declared(LayerValues), *declared(AttentionValues), *declared(MlpValues))


def part_at(server: Server, anatomy: Anatomy, path: str) -> Part:
    """The part at a module's path: a Layer at a block, an Attention or Mlp at a sublayer, else a raw Module."""
    for index, layer in enumerate(anatomy.layers):
        if path == layer.path:
            return Layer(server, path, index)
        if path == layer.attention_path:
            return Attention(server, path, index)
        if path == layer.mlp_path:
            return Mlp(server, path, index)
    return Module(server, path)
