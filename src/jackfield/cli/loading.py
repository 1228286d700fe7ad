"""The model that a command works on."""

from collections.abc import Callable, Generator, Iterator, Sized
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.status import Status
from rich.text import Text
from transformers.utils import logging

from jackfield.cli.terminal import busy
from jackfield.engines.named import ENGINES
from jackfield.model import Model
from jackfield.settings import settings

ModelOption = Annotated[
    str | None,
    typer.Option("--model", help="A hub name or a folder.", show_default="the sample model"),
]


EngineOption = Annotated[str, typer.Option("--engine", help="What runs it: transformers, vllm or llama.")]


def load(name: str | None, engine: str = "transformers", max_num_seqs: int | None = None) -> Model:
    """The model of that name, the sample model without one, while a spinner on stderr says how far it is.

    `max_num_seqs` is how many prompts run beside each other; without it the engine says. Under `torchrun` the model is
    shared by the ranks: the first goes on, the others follow it and then end.
    """
    if engine not in ENGINES:
        raise typer.BadParameter(f"there is no engine {engine!r}: write {' or '.join(ENGINES)}.", param_hint="--engine")
    options: dict[str, Any] = {"engine": engine}
    if max_num_seqs is not None:
        options["max_batch_size" if engine == "llama" else "max_num_seqs"] = max_num_seqs
    if settings().world_size > 1:
        options |= _ranks(engine)
    doing = f"loading {name or 'the sample model'}"
    with busy(doing) as spinner, _counting(spinner, doing):
        return Model.demo(**options) if name is None else Model(name, **options)


def _ranks(engine: str) -> dict[str, Any]:
    """The option that shares a model among the ranks of `torchrun`."""
    if engine != "llama":
        raise typer.BadParameter("torchrun shares a model among ranks for llama alone.", param_hint="--engine")
    from jackfield.engines.ranks import Ranks
    from jackfield.engines.transformers.loading import parse_device

    return {"tensor_parallel_size": Ranks.of_torchrun(parse_device(None))}


@contextmanager
def _counting(spinner: Status, doing: str) -> Generator[None]:
    """One talker is enough on a terminal: what transformers would draw a bar of, the spinner says in per cent."""

    def counted(items: Any) -> Iterator[Any]:  # any mapping or list of transformers'
        for number, item in enumerate(items):
            spinner.update(Text(f"{doing} ... {100 * number // len(items)} %"))
            yield item

    def hook(bar: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args and isinstance(args[0], Sized):
            args = (counted(args[0]), *args[1:])
        return bar(*args, **kwargs)

    logging.disable_progress_bar()
    previous = logging.set_tqdm_hook(hook)
    try:
        yield
    finally:
        logging.set_tqdm_hook(previous)


def check_layer(model: Model, layer: int) -> None:
    """Refuse a layer that the model has not, as a bad argument."""
    if not 0 <= layer < model.num_layers:
        found = f"the model has layers 0 to {model.num_layers - 1}, and {layer} was asked for."
        raise typer.BadParameter(found, param_hint="--layer")
