"""`jackfield harvest`: a layer's values, or several layers', on many prompts, to safetensors files."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from jackfield.cli.loading import EngineOption, ModelOption, load
from jackfield.cli.prompts import PromptFile
from jackfield.cli.terminal import JsonOption, print_json, print_line, talk
from jackfield.cli.vector import read_directions
from jackfield.errors import InvalidIntervention
from jackfield.harvest.reading import Harvest
from jackfield.harvest.running import Tally
from jackfield.interventions.kinds import Capture, Intervention, Probe
from jackfield.interventions.places import named_values


class Reduce(StrEnum):
    """What is kept of a prompt's tokens."""

    last = "last"
    mean = "mean"


def harvest(
    prompts: Annotated[Path, typer.Argument(help="A text file, one prompt a line, or .jsonl.")],
    out: Annotated[Path, typer.Option(help="The folder to write, or to go on with.")],
    model: ModelOption = None,
    engine: EngineOption = "transformers",
    layers: Annotated[str, typer.Option(help="18, 4-8 (both ends count) or * for all.")] = "*",
    value: Annotated[list[str] | None, typer.Option(help="A value's name; may be given again.")] = None,
    reduce: Annotated[
        Reduce | None,
        typer.Option(help="One row a prompt: its last token, or the mean of all.", show_default="all tokens"),
    ] = None,
    probe: Annotated[
        Path | None, typer.Option(help="Keep products with the directions [n, d_model] in this file.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Keep the K largest of these products, and which they are.", min=1)
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Store in this dtype.", show_default="each value's own")] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="How many prompts run together.", min=1, show_default="the engine's")
    ] = None,
    shard_mb: Annotated[float, typer.Option(help="A file is full at so many megabytes ...", min=0.001)] = 512,
    shard_prompts: Annotated[int, typer.Option(help="... or so many prompts.", min=1)] = 4096,
    as_json: JsonOption = False,
) -> None:
    """Write what layers hold on many prompts to safetensors files.

    The same command goes on where the last one ended. Lines of a .jsonl file are objects with "text", "token_ids" or
    "messages". A prompt that cannot be run is named in manifest.json, and the others go on.
    """
    if top_k is not None and probe is None:
        raise typer.BadParameter("it is of a probe's products: give --probe too.", param_hint="--top-k")
    given = PromptFile(prompts)
    directions = None if probe is None else read_directions(probe, "--probe")
    kept = _kept(layers, value or ["layer_output"], reduce, directions, top_k)
    with load(model, engine, max_num_seqs) as loaded, _bar(len(given)) as on_progress:
        written = loaded.harvest(
            iter(given), out, kept, dtype=dtype, shard_mb=shard_mb, shard_prompts=shard_prompts, on_progress=on_progress
        )
    _tell(written, as_json)


def _tell(written: Harvest, as_json: bool) -> None:
    print_json(_as_json(written)) if as_json else print_line(_said(written))
    if written.failed:
        first = written.failed[0]
        failed = f"{len(written.failed)} of {written.prompts} prompts failed"
        talk(f"{failed}. Number {first.prompt}: {first.error}: {first.message}")
    if not written.rows:
        raise typer.Exit(1)


def _kept(
    layers: str, names: list[str], reduce: Reduce | None, directions: Tensor | None, top_k: int | None
) -> list[Intervention]:
    # The last row is read alone: to reduce to it, all would be.
    rows: dict[str, Any] = {"positions": "last"} if reduce is Reduce.last else {"reduce": reduce and reduce.value}
    try:
        sites = [_site(layers, name) for name in names]
        if directions is None:
            return [Capture(site, **rows) for site in sites]
        return [Probe(site, directions, **rows, top_k=top_k) for site in sites]
    except InvalidIntervention as error:
        raise typer.BadParameter(str(error), param_hint="--layers, --value") from None


def _site(layers: str, name: str) -> str:
    value = named_values().get(name)
    return name if value is not None and value.on == "model" else f"layers.{layers}.{name}"


@contextmanager
def _bar(total: int) -> Generator[Callable[[Tally], None]]:
    """A bar on stderr; what it is given moves it. Tokens per second are those of this run."""
    columns = (TextColumn("harvesting"), BarColumn(), TextColumn("{task.fields[said]}"), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total, said=f"0/{total} prompts")
        before: list[int] = []

        def move(tally: Tally) -> None:
            if not before:
                progress.reset(task, completed=tally.prompts - 1)  # what was there is no speed of this run
                before.append(tally.tokens)
            elapsed = progress.tasks[0].elapsed or 0.0
            speed = f"{(tally.tokens - before[0]) / elapsed:,.0f} tokens/s" if elapsed else ""
            failed = f", {tally.failed} failed" if tally.failed else ""
            said = f"{tally.prompts:,}/{total:,} prompts{failed}  {speed}"
            progress.update(task, completed=tally.prompts, said=said)

        yield move


def _said(written: Harvest) -> str:
    megabytes = sum((written.folder / shard.file).stat().st_size for shard in written.shards) / 10**6
    return (
        f"{written.prompts - len(written.failed):,} prompts, {written.tokens:,} tokens, {written.rows:,} rows in "
        f"{len(written)} {'file' if len(written) == 1 else 'files'}, {megabytes:,.1f} MB, in {written.folder}"
    )


def _as_json(written: Harvest) -> dict[str, Any]:
    return {
        "folder": str(written.folder),
        **{name: getattr(written, name) for name in ("prompts", "tokens", "rows", "finished")},
        "shards": [shard.file for shard in written.shards],
        "tensors": {name: [stored.dtype, ["rows", *stored.shape]] for name, stored in written.tensors.items()},
        "failed": [{"prompt": each.prompt, "error": each.error, "message": each.message} for each in written.failed],
    }
