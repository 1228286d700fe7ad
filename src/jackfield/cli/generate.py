"""`jackfield generate`: text, steered by a vector that is added to the residual stream, or with interventions."""

from pathlib import Path
from typing import Annotated, Any

import typer
from torch import Tensor

from jackfield.cli.loading import EngineOption, ModelOption, check_layer, load
from jackfield.cli.terminal import JsonOption, busy, print_json, print_line
from jackfield.cli.vector import read_vector
from jackfield.errors import InvalidIntervention
from jackfield.interventions.documents import from_json
from jackfield.interventions.kinds import Intervention, Steer
from jackfield.model import Model


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to go on from.")],
    steer: Annotated[Path | None, typer.Option(help="A .safetensors or .pt file with one vector [d_model].")] = None,
    layer: Annotated[int | None, typer.Option(help="The layer whose output the vector is added to.")] = None,
    scale: Annotated[float | None, typer.Option(help="What the vector is multiplied by.", show_default="1.0")] = None,
    interventions: Annotated[
        Path | None, typer.Option(help="A JSON file of edits, as jackfield.to_json wrote it.")
    ] = None,
    model: ModelOption = None,
    engine: EngineOption = "transformers",
    max_tokens: Annotated[int, typer.Option(help="How many tokens to generate at most.", min=1)] = 32,
    temperature: Annotated[float, typer.Option(help="0 takes the most probable token.", min=0.0)] = 0.0,
    seed: Annotated[int | None, typer.Option(help="For a temperature above 0.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt as a user's message.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Generate text. With --steer, SCALE times a vector is added to LAYER's output at every token.

    The edits of --interventions come before it. What captures and probes among them keep is not printed.
    """
    if (steer is None) != (layer is None):
        raise typer.BadParameter("give both --steer and --layer, or neither.", param_hint="--steer")
    if scale is not None and steer is None:
        raise typer.BadParameter("it is of a vector: give --steer too.", param_hint="--scale")
    scale = 1.0 if scale is None else scale
    vector = None if steer is None else read_vector(steer)
    edits = [] if interventions is None else _read_interventions(interventions)
    with load(model, engine) as loaded:
        if vector is not None and layer is not None:
            edits.append(_steering(loaded, vector, layer, scale))
        sampling: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature}
        if seed is not None:
            sampling["seed"] = seed
        with busy("generating"):
            (result,) = loaded.generate([{"role": "user", "content": prompt}] if chat else prompt, edits, **sampling)
    if as_json:
        steering = None if steer is None else {"file": str(steer), "layer": layer, "scale": scale}
        kept = {name: getattr(result, name) for name in ("text", "token_ids", "prompt_token_ids", "finish_reason")}
        given = {"steer": steering, "interventions": None if interventions is None else str(interventions)}
        print_json({"prompt": prompt, **kept, **given})
    else:
        print_line(result.text if chat else prompt + result.text)


def _steering(model: Model, vector: Tensor, layer: int, scale: float) -> Steer:
    check_layer(model, layer)
    if len(vector) != model.hidden_size:
        found = f"the file has a vector of {len(vector)}, and the model's stream is {model.hidden_size} wide."
        raise typer.BadParameter(found, param_hint="--steer")
    return Steer(f"layers.{layer}.layer_output", vector, scale)


def _read_interventions(file: Path) -> list[Intervention]:
    """What a JSON file has, one or several."""
    if not file.is_file():
        raise typer.BadParameter(f"there is no file {file}.", param_hint="--interventions")
    try:
        read = from_json(file.read_bytes())
    except InvalidIntervention as error:
        raise typer.BadParameter(f"{file}: {error}", param_hint="--interventions") from None
    return [read] if isinstance(read, Intervention) else read
