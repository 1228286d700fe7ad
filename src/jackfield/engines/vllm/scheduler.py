"""vLLM's scheduler, with habits more: a traced prompt runs whole, makes room for itself, and is preempted last.

And it ends the requests whose block has stopped or failed, by what the worker's output says of them.
"""

from collections.abc import Mapping
from typing import Any

from jackfield.engines.vllm.foreign import foreign, inherited
from jackfield.engines.vllm.interrupts import follow_client
from jackfield.engines.vllm.shipping import KEY, shipped

Scheduler: Any = foreign("vllm.v1.core.sched.scheduler", "Scheduler")
AsyncScheduler: Any = foreign("vllm.v1.core.sched.async_scheduler", "AsyncScheduler")
tokenizer_of: Any = foreign("vllm.tokenizers", "cached_tokenizer_from_config")
IncrementalDetokenizer: Any = foreign("vllm.v1.engine.detokenizer", "IncrementalDetokenizer")


def is_traced(request: Any) -> bool:
    """Whether a request of vLLM's has a block."""
    return shipped(request.sampling_params) is not None


class _Whole(Scheduler):
    """What is added. `allocate_slots` begins with the same two parameters in vLLM 0.25 to 0.33; None is "not now"."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        allocate = self.kv_cache_manager.allocate_slots

        def allocate_slots(request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
            if request.num_computed_tokens == 0 and request.num_output_tokens == 0 and is_traced(request):
                hit = kwargs.get("num_new_computed_tokens", 0)
                if hit + num_new_tokens < request.num_prompt_tokens:
                    return None
            return allocate(request, num_new_tokens, *args, **kwargs)

        self.kv_cache_manager.allocate_slots = allocate_slots
        self._in_vain: tuple[str, int] | None = None  # for which request, among how many, others have stepped aside
        self._texts: dict[str, Any] = {}  # the text so far of traced requests that a stop string may end

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """One step; where a traced prompt does not fit beside the running requests, some of these wait once."""
        self.running.sort(key=lambda request: not is_traced(request))  # the last is preempted first
        resting = [request for request in self.running if _is_ahead(request)]
        self.running = [request for request in self.running if request not in resting]
        head = self.waiting.peek_request() if self.waiting else None
        if head is None or not self._makes_room(head, len(self.running) + len(resting)):
            return self._scheduled(resting, *args, **kwargs)
        resting += self._step_aside(head)
        config = self.scheduler_config
        threshold, config.long_prefill_token_threshold = config.long_prefill_token_threshold, 0
        try:
            return self._scheduled(resting, *args, **kwargs)
        finally:
            config.long_prefill_token_threshold = threshold
            waits = self.waiting and self.waiting.peek_request() is head
            self._in_vain = (head.request_id, len(self.running)) if waits else None

    def _scheduled(self, resting: list[Any], *args: Any, **kwargs: Any) -> Any:
        """One step without these running requests, which keep their places."""
        self.max_num_running_reqs -= len(resting)
        try:
            return inherited(super()).schedule(*args, **kwargs)
        finally:
            self.max_num_running_reqs += len(resting)
            self.running.extend(resting)

    def _makes_room(self, head: Any, running: int) -> bool:
        """Whether requests step aside for a waiting one; where blocks were lacking, not before a request has ended."""
        known = self._in_vain == (head.request_id, running)
        return is_traced(head) and not known and running < self.max_num_running_reqs

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
        """Ends what the worker says has ended, and what its text ends: this step's token is the last."""
        ended: Mapping[str, str] = getattr(model_runner_output, KEY, {})
        for request_id in (*ended, *self._ended_by_text(model_runner_output)):
            request = self.requests.get(request_id)
            if request is not None:
                request.max_tokens = min(request.max_tokens, request.num_output_tokens + 1)
                request.sampling_params.min_tokens = 0
        return inherited(super()).update_from_output(scheduler_output, model_runner_output)

    def _ended_by_text(self, output: Any) -> list[str]:
        """Traced requests that this step's token gives a stop string.

        vLLM's client finds these as well, but when the next step may have begun, of which no block may see anything.
        """
        self._texts = {request_id: text for request_id, text in self._texts.items() if request_id in self.requests}
        found: list[str] = []
        for request_id, token_ids in zip(output.req_ids, output.sampled_token_ids, strict=False):
            request = self.requests.get(request_id)
            if request is None or not token_ids or not request.sampling_params.stop or not is_traced(request):
                continue
            if request_id not in self._texts:
                tokenizer = tokenizer_of(self.vllm_config.model_config)
                self._texts[request_id] = IncrementalDetokenizer.from_new_request(tokenizer, request)
            if self._texts[request_id].update(list(token_ids), False):
                found.append(request_id)
        return found


def _is_ahead(request: Any) -> bool:
    """Whether a step of a traced request is under way, whose token may be its last: the next one waits for it.

    Under asynchronous scheduling alone. The length that ends a request is known before.
    """
    if not request.num_output_placeholders or not is_traced(request):
        return False
    params = request.sampling_params
    return bool(params.stop or params.stop_token_ids or not params.ignore_eos)


class _Sync(_Whole): ...


class _Async(_Whole, AsyncScheduler): ...


def scheduler(*args: Any, vllm_config: Any, **kwargs: Any) -> Any:
    """The one that the configuration asks for: a factory, so that both of vLLM's keep their base."""
    follow_client()
    made = _Async if vllm_config.scheduler_config.async_scheduling else _Sync
    return made(*args, vllm_config=vllm_config, **kwargs)
