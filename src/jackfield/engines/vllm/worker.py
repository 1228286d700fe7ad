"""vLLM's worker with a host beside its model runner: named to vLLM as `worker_cls`, it is made where the others are.

Nothing of vLLM is patched: the runner's own methods are wrapped on the instance, in the worker of an engine that
jackfield started. An engine that was started otherwise has no such worker.
"""

import pickle
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker as GPUWorker

from jackfield.engines.vllm.companion import Fate
from jackfield.engines.vllm.description import Description
from jackfield.engines.vllm.scheduler import KEY
from jackfield.engines.vllm.worker_engine import WorkerEngine

if TYPE_CHECKING:
    _Base = GPUWorker
else:
    _Base = CPUWorker if current_platform.is_cpu() else GPUWorker


class Worker(_Base):
    """The worker of this platform, and what a client asks it by `collective_rpc`; answers are pickled."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        self.jackfield = WorkerEngine(self.model_runner, self.vllm_config)

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_from_config(*args, **kwargs)
        self.jackfield.read_caches()

    def shutdown(self) -> None:
        super().shutdown()
        self.jackfield.stop()

    def execute_model(self, scheduler_output: Any) -> Any:
        self.jackfield.arrive(scheduler_output)
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """The runner's output, and in it which requests end by their blocks; the logits have been computed by then."""
        output: Any = super().sample_tokens(grammar_output)
        if ended := self.jackfield.settle():
            setattr(_told(output), KEY, ended)
        return output

    # -- asked by the client

    def jackfield_describe(self) -> bytes:
        """The Description, once the probe has run."""
        description: Description = self.jackfield.describe()
        return pickle.dumps(description)

    def jackfield_end(self, names: list[str]) -> bytes:
        """The Fates of requests that have ended."""
        fates: list[Fate] = [self.jackfield.host.end(name) for name in names]
        return pickle.dumps(fates)

    def jackfield_held(self) -> bytes:
        """What is alive here."""
        return pickle.dumps(dict(self.jackfield.host.held))

    def jackfield_project(self, x: bytes, norm: bool) -> bytes:
        """`project_on_vocab` of a tensor, as a tensor on the CPU."""
        given: Tensor = pickle.loads(x)
        with torch.inference_mode():
            return pickle.dumps(self.jackfield.project_on_vocab(given.to(self.device), norm=norm).cpu())


def _told(output: Any) -> Any:
    """What the scheduler will get of an output: both runners may wrap it until its tokens are on the host."""
    for name in ("model_runner_output", "_model_runner_output"):  # V2's, V1's; 0.25 to 0.33
        if hasattr(output, name):
            return getattr(output, name)
    return output
