"""The engine that blocks have in a worker process: it serves values out of the passes of the runner beside it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from torch import Tensor, nn

from jackfield.engines.engine import Outcome, Request
from jackfield.engines.vllm.attention import op_facts
from jackfield.engines.vllm.cache import probe
from jackfield.engines.vllm.describing import Describer
from jackfield.engines.vllm.description import Description
from jackfield.engines.vllm.forward_pass import ForwardPass
from jackfield.engines.vllm.host import Host
from jackfield.engines.vllm.op_tap import OpTap
from jackfield.engines.vllm.raw import Gates, RawChannel
from jackfield.engines.vllm.rows import runner_of
from jackfield.engines.vllm.scheduler import KEY
from jackfield.engines.vllm.served import Served
from jackfield.engines.vllm.structure import is_listened_to, put_taps, read_structure
from jackfield.engines.vllm.taps import named
from jackfield.errors import TracingError
from jackfield.interleave.worker import Channel, Worker
from jackfield.model import Model


class WorkerEngine(Served):
    """Made when the model is loaded, before it first runs: taps are put then, and compiled along."""

    def __init__(self, runner: Any, vllm_config: Any) -> None:
        self.runner, self.vllm_config = runner, vllm_config
        self.rows = runner_of(runner)
        self.loaded: nn.Module = runner.get_model()
        self.tree = self.loaded
        paths = {id(module): path for path, module in named(self.loaded).items()}
        context: Mapping[str, Any] = vllm_config.compilation_config.static_forward_context
        self.ops = {name: layer for name, layer in context.items() if id(layer) in paths and hasattr(layer, "impl")}
        self.structure = read_structure(self.loaded, self.ops)
        self.host = Host(put_taps(self.loaded, self.structure).all)
        self.compute_logits = self.loaded.compute_logits
        self._real = False  # whether the pass that goes on is one of the scheduler's, and not a warm-up or a capture
        self._gates = Gates(self.loaded, self.host)
        self._raw: dict[tuple[str, str], RawChannel] = {}
        self._op_taps = [
            OpTap(name, layer, paths[id(layer)], op_facts(layer), self.host.slot, self._blocks)
            for name, layer in self.ops.items()
            if is_listened_to(layer)
        ]
        for tap in self._op_taps:
            tap.put_up()
        self._wrap_runner()
        self.host.server, self.host.model = self, Model.over(self)

    def read_caches(self) -> None:
        """Finds how each layer's paged cache is read; to be called when there are caches."""
        for tap in self._op_taps:
            tap.reader = probe(tap.layer, tap.layer.kv_cache)

    # -- the runner

    def arrive(self, scheduler_output: Any) -> None:
        """A step has been scheduled: traced requests that are new begin, and how the pass is run is settled."""
        for new in scheduler_output.scheduled_new_reqs:
            extra: Mapping[str, Any] = (new.sampling_params and new.sampling_params.extra_args) or {}
            if KEY in extra:
                self.host.begin(new.req_id, extra[KEY])
        running = self.host.running(scheduler_output.num_scheduled_tokens)
        self.rows.eager = bool(running) or self.host.recorder is not None
        self.rows.uncompiled = any(companion.raw for companion in running)
        self._real = True

    def settle(self) -> Mapping[str, str]:
        """The step is over: requests that end by their blocks, and why."""
        self._real = False
        return self.host.settle()

    def stop(self) -> None:
        """The worker is shut down: nothing of vLLM's that outlives it stays wrapped."""
        self.rows.close()

    def _wrap_runner(self) -> None:
        forward, compute_logits = self.loaded.forward, self.compute_logits

        def watched(*args: Any, **kwargs: Any) -> Any:
            if not self._real:
                return forward(*args, **kwargs)
            given = next(each for each in (kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if each is not None)
            with self.host.watching(self.rows.rows(), given.shape[0]), self._gates.put_up(self.rows.uncompiled):
                hidden = forward(*args, **kwargs)
                self.host.final_norm(hidden)
            return hidden

        def with_logits(*args: Any, **kwargs: Any) -> Any:
            logits = compute_logits(*args, **kwargs)
            self.host.logits(logits)
            return logits

        self.loaded.forward = watched
        self.loaded.compute_logits = with_logits

    def _blocks(self, layer: str, now: ForwardPass, worker: Worker) -> tuple[list[int], int]:
        placed = now.of[worker]
        return self.rows.blocks(layer, placed.index), placed.position + placed.count

    # -- what is served

    def describe(self) -> Description:
        """What the probe has shown. UnsupportedModel where a tap was never heard of."""
        recorder = self.host.recorder
        assert recorder is not None
        describer = Describer(self, recorder.seen)
        self.host.recorder = None
        self.description, self.channels = describer.description(), describer.channels()
        self.host.early = describer.early()
        self.facts, self.config = self.description.facts, self.runner.model_config.hf_config
        return self.description

    def project_on_vocab(self, x: Tensor, *, norm: bool) -> Tensor:
        rows = x.flatten(0, -2)
        if norm and self.structure.final_norms:
            rows = self.loaded.get_submodule(self.structure.final_norms[-1])(rows)
        return self.compute_logits(rows).unflatten(0, x.shape[:-1])

    def raw_channel(self, path: str, port: str) -> Channel:
        if (path, port) not in self._raw:
            self._raw[path, port] = RawChannel(path, port)
        return self._raw[path, port]

    def step_value(self, name: str, worker: Worker) -> Tensor:
        now = self.host.now
        assert now is not None
        ids: Tensor = self.rows.input_ids()
        return ids[now.rows_of(worker)].long()[None].clone()

    # -- what a client does

    def admit(self, prompt_token_ids: Sequence[int], sampling: Any) -> NoReturn:
        raise TracingError("A trace cannot run inside a block: the model is busy with this one.")

    def execute(self, requests: Sequence[Request]) -> list[Outcome]:
        raise TracingError("A trace cannot run inside a block: the model is busy with this one.")

    def batches(self, requests: Iterator[Request]) -> Iterator[list[Request]]:
        raise TracingError("A trace cannot run inside a block: the model is busy with this one.")

    def close(self) -> None:
        raise TracingError("A block cannot close its model.")
