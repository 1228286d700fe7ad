"""What passes through a block outside its attention: the residual stream, the norms, the MLP and its router."""

from contextlib import ExitStack

from torch import Tensor, nn

from tests.reference.families import SHARED, Family, child
from tests.reference.places import Change, Visit, batched, indexed, input_of, output_of, router_logits_of, scaled


class BlockHooks:
    """The hooks of one block. Order of registration is order of call, where a module has several."""

    def __init__(self, family: Family, block: nn.Module, layer: int, visit: Visit) -> None:
        self._family = family
        self._block = block
        self._layer = layer
        self._visit = visit
        attention = child(block, family.attention) or child(block, family.mixer)
        mlp = child(block, family.mlp)
        assert attention is not None
        self._attention = attention
        self._mlp = mlp or child(block, family.mlp_output)

    def put(self, stack: ExitStack) -> None:
        """Put up all of them, to be taken down by `stack`."""
        self._put_stream(stack)
        self._put_norms(stack)
        self._put_sublayers(stack)
        if (router := child(self._block, self._family.router)) is not None:
            stack.enter_context(router_logits_of(router, self._at("router_logits")))
        if (down := child(self._block, self._family.down_projection)) is not None:
            stack.enter_context(input_of(down, self._at("mlp_activations")))

    def _at(self, name: str) -> Change:
        def visit(x: Tensor) -> Tensor:
            return self._visit(self._layer, name, x)

        return batched(visit)

    def _put_stream(self, stack: ExitStack) -> None:
        stream = self._family.active_stream
        stack.enter_context(input_of(self._block, indexed(self._at("layer_input"), stream)))
        stack.enter_context(output_of(self._block, indexed(self._at("layer_output"), stream)))
        if not self._family.parallel:
            reader = child(self._block, self._family.mlp_norm) or self._mlp
            assert reader is not None
            stack.enter_context(input_of(reader, self._at("layer_mid")))

    def _put_norms(self, stack: ExitStack) -> None:
        if (norm := child(self._block, self._family.attention_norm)) is not None:
            stack.enter_context(output_of(norm, self._at("attention_norm_output")))
        if self._family.mlp_norm == SHARED:
            assert self._mlp is not None
            stack.enter_context(input_of(self._mlp, self._at("mlp_norm_output")))
        elif (norm := child(self._block, self._family.mlp_norm)) is not None:
            stack.enter_context(output_of(norm, self._at("mlp_norm_output")))

    def _put_sublayers(self, stack: ExitStack) -> None:
        factor = self._family.residual_factor
        attention = child(self._block, self._family.attention_output) or self._attention
        mlp = child(self._block, self._family.mlp_output) or self._mlp
        assert mlp is not None
        stack.enter_context(output_of(attention, scaled(self._at("attention_output"), factor)))
        stack.enter_context(output_of(mlp, scaled(self._at("mlp_output"), factor)))
