"""What the structure of a model does not tell, stated: as data, for one or several model types."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from jackfield.values.anatomy import Formula, Missing


@dataclass(frozen=True, slots=True)
class Family:
    """Facts about the models of some types, which stand above what is found. Leave out what is found right.

    Attributes:
        model_types: the `model_type`s of the configurations that it is for; a family handed to a model is for that one.
        blocks: the path of the list of decoder blocks.
        attention: the path of the module that attends, below a block.
        mlp: the path of the MLP, below a block.
        values: per name of the layer's values, where it is, or why it is missing. Paths of sites are below the block,
            and "" is the block itself.
        root: the same of the model's own values. Paths of sites are whole.
        broken: per identity of the contract that does not hold, why. The identities are "residual_stream"
            (layer_input + attention_output + mlp_output = layer_output), "layer_chain" (layer_output = the next
            layer_input) and "head_outputs" (probabilities @ values = head outputs).
    """

    model_types: tuple[str, ...] = ()
    blocks: str | None = None
    attention: str | None = None
    mlp: str | None = None
    values: Mapping[str, Formula | Missing] = field(default_factory=dict[str, Formula | Missing])
    root: Mapping[str, Formula | Missing] = field(default_factory=dict[str, Formula | Missing])
    broken: Mapping[str, str] = field(default_factory=dict[str, str])
