"""`jackfield look`: what a model makes of a prompt, on one page."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from jackfield.cli.loading import EngineOption, ModelOption, check_layer, load
from jackfield.cli.reading import Reading, read
from jackfield.cli.terminal import JsonOption, busy, new_table, print_json, print_line, print_table, quoted, talk
from jackfield.plots import attention_heads
from jackfield.plots.canvas import new_figure

_PICTURE = Path("jackfield-look.png")
_FORMATS = (".png", ".pdf", ".svg")
_BAR_CELLS = 20

Token = Callable[[int], str]


def look(
    prompt: Annotated[str, typer.Argument(help="The text to read.")],
    model: ModelOption = None,
    engine: EngineOption = "transformers",
    layer: Annotated[int | None, typer.Option(help="Only this layer's attention.", show_default="all layers")] = None,
    edges: Annotated[int, typer.Option(help="How many attention edges to print.", min=1)] = 12,
    picture: Annotated[Path, typer.Option(help="Where to draw the patterns: .png, .pdf or .svg.")] = _PICTURE,
    no_picture: Annotated[bool, typer.Option("--no-picture", help="Draw nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what a model makes of a prompt.

    Prints its tokens, the logit lens and the strongest attention edges, and draws a layer's patterns: without --layer,
    those of the layer of the strongest edge. Edges to the first token, where heads rest, and to the query's own token
    are left out of the list.
    """
    if not no_picture:
        _check_picture(picture)
    with load(model, engine) as loaded:

        def token(number: int) -> str:
            return loaded.tokenizer.decode([number])

        if layer is not None:
            check_layer(loaded, layer)
        with busy("reading"):
            reading = read(loaded, prompt, layer, edges)
        drawn = None if no_picture or reading.pattern is None else picture
        if drawn:
            _draw(reading, token, drawn)
        print_json(_as_json(reading, token, drawn)) if as_json else _print(reading, token)
    _tell(reading, drawn)


def _check_picture(picture: Path) -> None:
    new_figure(1.0, 1.0)  # without matplotlib, says so before the model is loaded
    if picture.suffix not in _FORMATS:
        raise typer.BadParameter(f"{picture} should end in {', '.join(_FORMATS)}.", param_hint="--picture")
    if not picture.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {picture.absolute().parent}.", param_hint="--picture")


def _draw(reading: Reading, token: Token, picture: Path) -> None:
    tokens = [token(number) for number in reading.prompt_ids]
    attention_heads(reading.pattern, tokens, title=f"Attention, layer {reading.layer}").savefig(picture, dpi=150)


def _tell(reading: Reading, picture: Path | None) -> None:
    if picture:
        talk(f"The patterns of layer {reading.layer} are in {picture}")
    elif reading.pattern is None:
        talk("No layer of this model serves attention patterns; `jackfield support` says why.")


def _as_json(reading: Reading, token: Token, picture: Path | None) -> dict[str, Any]:
    ids = reading.prompt_ids
    return {
        "tokens": [{"position": place, "id": number, "text": token(number)} for place, number in enumerate(ids)],
        "next": {"id": reading.next_id, "text": token(reading.next_id)},
        "lens": [{**asdict(top), "texts": [token(number) for number in top.ids]} for top in reading.lens],
        "edges": [asdict(edge) for edge in reading.edges],
        "layer": reading.layer,
        "picture": str(picture) if picture else None,
    }


def _print(reading: Reading, token: Token) -> None:
    texts = [quoted(token(number)) for number in reading.prompt_ids]
    print_line("Tokens  " + "  ".join(f"{place} {text}" for place, text in enumerate(texts)))
    print_line(f"Next    {quoted(token(reading.next_id))}\n")
    _print_lens(reading, token)
    _print_edges(reading, texts)


def _print_lens(reading: Reading, token: Token) -> None:
    title = f"Logit lens, read at the last token {quoted(token(reading.prompt_ids[-1]))}"
    table = new_table(title, "layer", "top token", "probability", "", numbers=(0, 2))
    for top in reading.lens:
        probability = top.probabilities[-1]
        bar = "█" * round(probability * _BAR_CELLS)
        table.add_row(str(top.layer), quoted(token(top.ids[-1])), f"{probability:.3f}", bar)
    print_table(table)


def _print_edges(reading: Reading, texts: list[str]) -> None:
    titles = ("layer", "head", "query", "", "key", "", "probability")
    table = new_table("Strongest attention edges", *titles, numbers=(0, 1, 2, 4, 6))
    for edge in reading.edges:
        query, key = (str(edge.query), texts[edge.query]), (str(edge.key), texts[edge.key])
        table.add_row(str(edge.layer), str(edge.head), *query, *key, f"{edge.probability:.3f}")
    print_table(table)
