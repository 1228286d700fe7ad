"""The values of one layer's MLP."""

from jackfield.values.tree import Module
from jackfield.values.value import Value


class MlpValues:
    """What a layer and its MLP answer for."""

    __slots__ = ()

    router_logits = Value(
        "1 t experts", "rw", "where the layer has a router: what its softmax or top-k receives", on="mlp"
    )
    mlp_activations = Value("1 t intermediate", "rw", "the down projection's input: the neurons", on="mlp")


class Mlp(MlpValues, Module):
    """The feed-forward sublayer of one layer."""

    __slots__ = ()
