"""The model that a command works on."""

from typing import Annotated

import typer
from transformers.utils import logging

from jackfield.cli.terminal import busy
from jackfield.model import Model

ModelOption = Annotated[
    str | None,
    typer.Option("--model", help="A hub name or a folder.", show_default="the sample model"),
]


def load(name: str | None) -> Model:
    """The model of that name, the sample model without one, while a spinner turns on stderr."""
    # One talker is enough on a terminal: transformers draws bars of its own.
    logging.disable_progress_bar()
    with busy(f"loading {name or 'the sample model'}"):
        return Model.demo() if name is None else Model(name)


def check_layer(model: Model, layer: int) -> None:
    """Refuse a layer that the model has not, as a bad argument."""
    if not 0 <= layer < model.num_layers:
        found = f"the model has layers 0 to {model.num_layers - 1}, and {layer} was asked for."
        raise typer.BadParameter(found, param_hint="--layer")
