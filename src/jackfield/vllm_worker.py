"""The worker that vLLM is told to make: the vLLM engine's, with the front that blocks get as their `model`.

It stands above both, because a worker's process begins here, and nothing below knows what a `Model` is.
"""

from jackfield.engines.vllm.worker import Worker as EngineWorker
from jackfield.model import Model


class Worker(EngineWorker):
    """Named to vLLM as its `worker_cls`."""

    front = staticmethod(Model.over)
