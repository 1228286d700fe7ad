"""vLLM's scheduler, with three habits more: a traced prompt runs whole, makes room for itself, and is preempted last.

And it ends the requests whose block has stopped or failed, by what the worker's output says of them.
"""

from collections.abc import Mapping
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

KEY = "jackfield"
"""Under which a request's extra_args carry its block, and the runner's output the requests that end."""


def is_traced(request: Any) -> bool:
    """Whether a request of vLLM's has a block."""
    return KEY in ((request.sampling_params and request.sampling_params.extra_args) or ())


class _Whole(Scheduler):
    """What is added. `allocate_slots` has the same first two parameters in all of vLLM 0.25 to 0.33; None is "not now"."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        allocate = self.kv_cache_manager.allocate_slots

        def allocate_slots(request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
            if is_traced(request) and request.num_computed_tokens == 0 and request.num_output_tokens == 0:
                hit = kwargs.get("num_new_computed_tokens", 0)
                if hit + num_new_tokens < request.num_prompt_tokens:
                    return None
            return allocate(request, num_new_tokens, *args, **kwargs)

        self.kv_cache_manager.allocate_slots = allocate_slots

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """One step; where a traced prompt waits and does not fit beside the running requests, some of these wait once."""
        self.running.sort(key=lambda request: not is_traced(request))  # the last is preempted first
        head = self.waiting.peek_request() if self.waiting else None
        if head is None or not is_traced(head) or len(self.running) >= self.max_num_running_reqs:
            return super().schedule(*args, **kwargs)
        waiting = self._step_aside(head)
        config, most = self.scheduler_config, self.max_num_running_reqs
        threshold, config.long_prefill_token_threshold = config.long_prefill_token_threshold, 0
        self.max_num_running_reqs = most - len(waiting)
        try:
            return super().schedule(*args, **kwargs)
        finally:
            config.long_prefill_token_threshold, self.max_num_running_reqs = threshold, most
            self.running.extend(waiting)

    def _step_aside(self, head: Any) -> list[Any]:
        """Takes out of `running` what leaves no room for the prompt of `head`, and returns it."""
        room = self.max_num_scheduled_tokens - head.num_prompt_tokens
        staying: list[Any] = []
        aside: list[Any] = []
        for request in self.running:
            due = request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
            fits = min(due, self.max_num_scheduled_tokens) <= room
            (staying if fits else aside).append(request)
            room -= due if fits else 0
        self.running = staying
        return aside

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Ends what the worker says has ended: its next token, which is this step's, is its last."""
        ended: Mapping[str, str] = getattr(model_runner_output, KEY, {})
        for request_id in ended:
            request = self.requests.get(request_id)
            if request is not None:
                request.max_tokens = min(request.max_tokens, request.num_output_tokens + 1)
        return super().update_from_output(scheduler_output, model_runner_output)


class _Sync(_Whole): ...


class _Async(_Whole, AsyncScheduler): ...


def scheduler(*args: Any, vllm_config: Any, **kwargs: Any) -> Scheduler:
    """The one that the configuration asks for: a factory, so that both of vLLM's keep their base."""
    made = _Async if vllm_config.scheduler_config.async_scheduling else _Sync
    return made(*args, vllm_config=vllm_config, **kwargs)
