"""vLLM's worker with a host beside its model runner: named to vLLM as `worker_cls`, it is made where the others are.

Nothing of vLLM is patched: the runner's own methods are wrapped on the instance, in the worker of an engine that
jackfield started. An engine that was started otherwise has no such worker.
"""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from jackfield.engines.engine import Engine
from jackfield.engines.vllm.answers import PROOF, Lender, unsendable
from jackfield.engines.vllm.companion import Fate
from jackfield.engines.vllm.foreign import foreign, inherited
from jackfield.engines.vllm.interrupts import follow_client, is_apart
from jackfield.engines.vllm.salt import salted
from jackfield.engines.vllm.shipping import KEY, loads
from jackfield.engines.vllm.versions import check_version
from jackfield.engines.vllm.worker_engine import WorkerEngine
from jackfield.interventions.places import Place

_Base: Any = (
    foreign("vllm.v1.worker.cpu_worker", "CPUWorker")  # of which nothing may be imported beside a GPU
    if foreign("vllm.platforms", "current_platform").is_cpu()
    else foreign("vllm.v1.worker.gpu_worker", "Worker")
)


class Worker(_Base):
    """The worker of this platform, and what a client asks it by `collective_rpc`; answers are pickled.

    All ranks are asked, and do what is asked; the first one answers.

    `front` makes what blocks get as their `model` out of an engine.
    """

    front: Callable[[Engine], Any]

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        follow_client()
        check_version()
        self.vllm_config.additional_config = salted(self.vllm_config.additional_config)
        super().load_model(*args, **kwargs)
        self._lender = Lender()
        self.jackfield = WorkerEngine(self.model_runner, self.vllm_config, self.front)

    def compile_or_warm_up_model(self) -> Any:
        self.jackfield.settle_graphs()
        return inherited(super()).compile_or_warm_up_model()

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_from_config(*args, **kwargs)
        self.jackfield.read_caches()

    def shutdown(self) -> None:
        super().shutdown()
        self.jackfield.stop()

    def execute_model(self, scheduler_output: Any) -> Any:
        self.jackfield.arrive(scheduler_output)
        return inherited(super()).execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """The runner's output, and in it which requests end by their blocks; the logits have been computed by then."""
        output: Any = inherited(super()).sample_tokens(grammar_output)
        if ended := self.jackfield.settle():
            setattr(_told(output), KEY, ended)
        return output

    # -- asked by the client

    def jackfield_describe(self) -> bytes:
        """The Description, once the probe has run."""
        return self._answer(self.jackfield.describe())

    def jackfield_proof(self) -> bytes:
        """An anonymous file of this process, for the client to find out whether it can see it."""
        return b"" if self.jackfield.ranks.rank > 0 else self._answer(self._lender.lend([memoryview(PROOF)]))

    def jackfield_end(self, names: list[str], lending: bool) -> "list[bytes | Fate]":
        """The Fates of requests that have ended: each as an answer of its own, or, in the client's own process, as it
        is where it holds data alone.
        """
        ended = [self.jackfield.host.end(name) for name in names]
        return [each if each.is_data and not is_apart() else self._sent(each, lending=lending) for each in ended]

    def jackfield_drop(self, names: list[str]) -> None:
        """Nobody waits for these requests any more."""
        for name in names:
            self.jackfield.host.drop(name)

    def jackfield_release(self, descriptors: list[int]) -> None:
        """The client has mapped these files."""
        self._lender.release(descriptors)

    def jackfield_share(self, key: str, value: bytes) -> None:
        """An object for blocks to use, by what the client calls it."""
        host = self.jackfield.host
        host.share(key, loads(value, host.ends), self.device)

    def jackfield_forget(self, keys: list[str]) -> None:
        """Objects that the client has let go of."""
        for key in keys:
            self.jackfield.host.shared.pop(key, None)

    def jackfield_arm(self, values: list[tuple[str, int | None]]) -> None:
        """Graphs that are cut where these values pass, for every batch size that has a graph."""
        self.jackfield.arm([Place(name, layer) for name, layer in values])

    def jackfield_stats(self) -> bytes:
        """How many passes ran in which way."""
        return self._answer(asdict(self.jackfield.rows.stats))

    def jackfield_held(self) -> bytes:
        """What is alive here, of every rank."""
        held = {**self.jackfield.host.held, "files": len(self._lender)}
        return self._lender.answer(held, self.jackfield.host.ends, lending=False)

    def jackfield_project(self, x: bytes, norm: bool) -> bytes:
        """`project_on_vocab` of a tensor, as a tensor on the CPU."""
        given: Tensor = loads(x, self.jackfield.host.ends)
        with torch.inference_mode():
            return self._answer(self.jackfield.project_on_vocab(given.to(self.device), norm=norm).cpu())

    def _answer(self, value: Any, *, lending: bool = False) -> bytes:
        if self.jackfield.ranks.rank > 0:
            return b""
        return self._lender.answer(value, self.jackfield.host.ends, lending=lending)

    def _sent(self, fate: Fate, *, lending: bool) -> bytes:
        """A Fate on its way; one that cannot be sent becomes an error that says so."""
        try:
            return self._answer(fate, lending=lending)
        except Exception as error:
            return self._answer(Fate(error=unsendable(fate, error), printed=fate.printed))


def _told(output: Any) -> Any:
    """What the scheduler will get of an output: both runners may wrap it until its tokens are on the host."""
    for name in ("model_runner_output", "_model_runner_output"):  # V2's, V1's; 0.25 to 0.33
        if hasattr(output, name):
            return getattr(output, name)
    return output
