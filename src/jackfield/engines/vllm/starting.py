"""Starts vLLM with jackfield's worker and scheduler, and refuses what could not be right with them."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from jackfield.engines.transformers.loading import parse_dtype
from jackfield.engines.vllm.foreign import foreign
from jackfield.engines.vllm.refusals import refusal
from jackfield.engines.vllm.versions import check_version
from jackfield.errors import InvalidRequest, JackfieldError, UnknownModel

OURS: Final = ("worker_cls", "scheduler_cls")


def start(model: Any, *, dtype: Any, device: Any, family: Any, options: Mapping[str, Any]) -> Any:
    """A `vllm.LLM`.

    MissingExtra without vLLM, UnsupportedVersion, UnknownModel, UnsupportedModel for what vLLM cannot run,
    InvalidRequest for an option that jackfield sets itself or vLLM does not take.
    """
    check_version()
    if not isinstance(model, str | Path):
        raise UnknownModel(f"A {type(model).__name__} is no model for vLLM to load: give a hub name or a folder.")
    if device is not None or family is not None:
        raise InvalidRequest("vLLM chooses its device by itself, and knows its own families: leave both out.")
    for name in OURS:
        if name in options:
            raise InvalidRequest(f"{name} is set by jackfield.")
    asked = str(parse_dtype(dtype)).removeprefix("torch.")
    try:
        with _groups_taken_down():
            return foreign("vllm", "LLM")(
                str(model),
                dtype=asked,
                worker_cls="jackfield.vllm_worker.Worker",
                scheduler_cls="jackfield.engines.vllm.scheduler.scheduler",
                **{"max_logprobs": -1, **options},  # any number of them, as on the other engines
            )
    except JackfieldError:  # of the worker
        raise
    except Exception as error:
        raise refusal(str(model), {"dtype": asked, **options}, error) from error


@contextmanager
def _groups_taken_down() -> Generator[None]:
    """Takes the process's groups down where vLLM has set them up, and then failed: the next model would be given them,
    without the group that its experts need. Those of another engine in this process stay.
    """
    are_up = foreign("vllm.distributed.parallel_state", "model_parallel_is_initialized")
    before = are_up()
    try:
        yield
    except BaseException:
        if are_up() and not before:
            foreign("vllm.distributed.parallel_state", "cleanup_dist_env_and_memory")()
        raise
