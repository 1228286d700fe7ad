"""vLLM: continuous batches, CUDA graphs, many GPUs. The client's side: prompts and results, and no weights."""

import functools
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, cast

from torch import Tensor

from jackfield.engines.engine import Outcome, Request
from jackfield.engines.request import Completion, FinishReason, Limits, Logprob, Sampling, admit
from jackfield.engines.vllm.answers import can_map, heard
from jackfield.engines.vllm.companion import Fate
from jackfield.engines.vllm.description import Description, outline
from jackfield.engines.vllm.driver import CLOSED, Driver, Ended, Sample
from jackfield.engines.vllm.foreign import foreign
from jackfield.engines.vllm.recorder import PLAIN, PROBE
from jackfield.engines.vllm.served import Served, refuse_derivatives
from jackfield.engines.vllm.shipping import KEY, Ends, Interventions, Shipment, dumps, pack
from jackfield.engines.vllm.starting import start
from jackfield.errors import EngineDied, InvalidRequest, RequestTooLong, TracingError
from jackfield.interleave.channel import Channel
from jackfield.interleave.reference import Shared
from jackfield.interleave.worker import Worker
from jackfield.interventions.block import InterventionBlock
from jackfield.interventions.places import Place
from jackfield.trace.capture import Block

SAME_NAMES: Final = (
    *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "seed", "ignore_eos", "include_stop_str_in_output", "logit_bias", "logprobs"),
    *("detokenize", "skip_special_tokens", "spaces_between_special_tokens"),
)
REFUSED: Final = ("prompt_logprobs",)


class SharedObjects:
    """What the workers have of the objects that the model shares: each is sent once, when a block first uses it."""

    def __init__(self, send: Callable[[str, Any], None]) -> None:
        self._send, self._numbers = send, itertools.count()
        self._keys: weakref.WeakKeyDictionary[Shared, str] = weakref.WeakKeyDictionary()
        self._gone: deque[str] = deque()
        self._lock = threading.Lock()

    def key(self, shared: Any) -> Any:
        """What an object is called there, or the object that is called so; sends what is not there yet."""
        if not isinstance(shared, Shared):
            return next(each for each, key in self._keys.items() if key == shared)
        with self._lock:
            if shared not in self._keys:
                key = f"shared-{next(self._numbers)}"
                self._send(key, shared.value)
                self._keys[shared] = key
                weakref.finalize(shared, self._gone.append, key)
            return self._keys[shared]

    def gone(self) -> list[str]:
        """Those that nobody has any more, told once."""
        return [self._gone.popleft() for _ in range(len(self._gone))]


@dataclass(frozen=True, slots=True)
class _Sent:
    """A request on its way: its samples, and what each will have ended in."""

    samples: Sequence[Sample]
    futures: "Sequence[Future[Ended]]"

    def outcome(self) -> Outcome:
        """Waits for all of its samples. An interrupt that a block has raised goes on here."""
        outcome = Outcome()
        for future in self.futures:
            _add(outcome, future.result())
        return outcome


class VllmEngine(Served):
    """vLLM behind a model's front. Options are those of `vllm.LLM`, by their own names."""

    def __init__(
        self, model: Any, *, dtype: Any = None, device: Any = None, family: Any = None, **options: Any
    ) -> None:
        self._names = itertools.count()
        self._packed: tuple[object, bytes] | None = None  # the interventions of the newest request that had some
        self._shared = SharedObjects(self._send_shared)
        self._front: Callable[[], Any] = lambda: None  # the model over this engine, which owns it
        making = functools.partial(start, model, dtype=dtype, device=device, family=family, options=options)
        self._driver = Driver(making, self._fates)
        try:
            self.description = self._driver.do(self._described)
            self._lending = self._driver.do(self._can_map)
        except BaseException:
            self.close()
            raise
        self.tokenizer = None if options.get("skip_tokenizer_init") else self.llm.get_tokenizer()
        self.config = self.llm.llm_engine.model_config.hf_config
        self.facts, self.tree, self.channels = self.description.facts, outline(self.description.modules), {}

    @property
    def llm(self) -> Any:
        """The `vllm.LLM`; EngineDied after `close`."""
        if self._driver.llm is None:
            raise EngineDied(CLOSED)
        return self._driver.llm

    def close(self) -> None:
        self._driver.close()

    # -- running

    def admit(self, prompt_token_ids: Sequence[int], sampling: Sampling) -> None:
        sampling.refuse(REFUSED, "vLLM")
        limits = self.description.limits
        admit(prompt_token_ids, sampling, Limits(self.facts.vocab_size, limits["max_model_len"], "max_model_len"))
        for name in ("stop", "bad_words"):
            if self.tokenizer is None and getattr(sampling, name):
                raise InvalidRequest(f"{name} needs a tokenizer: load the model without skip_tokenizer_init.")
        most = self.llm.llm_engine.model_config.max_logprobs
        if most >= 0 and sampling.logprobs is not None and not 0 <= sampling.logprobs <= most:
            raise InvalidRequest(f"logprobs={sampling.logprobs}: this model was loaded with max_logprobs={most}.")

    def admit_block(self, prompt_token_ids: Sequence[int]) -> None:
        if self.description.untraceable is not None:
            raise InvalidRequest(f"No block can run beside this engine's requests: {self.description.untraceable}.")
        most = self.description.limits["max_num_batched_tokens"]
        if len(prompt_token_ids) > most:
            raise RequestTooLong(
                f"{len(prompt_token_ids)} prompt tokens with a block run in one pass, which holds "
                f"max_num_batched_tokens={most}: load the model with a larger one."
            )

    def outcomes(self, requests: Iterator[Request]) -> Iterator[Outcome]:
        """So many samples are on their way that vLLM's batch stays full while the first of them is waited for."""
        if Worker.current() is not None:
            raise TracingError("A trace cannot run inside a block: the model is busy with this one.")
        window: deque[_Sent] = deque()
        room = 2 * self.description.limits["max_num_seqs"]
        try:
            while True:
                room -= self._fill(window, requests, room)
                if not window:
                    return
                outcome = window[0].outcome()
                room += len(window.popleft().samples)
                yield outcome
                del outcome  # it is the caller's, who may let go of it while the next is waited for
        finally:
            if window and self._driver.llm is not None:
                self._driver.abandon([sample for sent in window for sample in sent.samples])

    def execute(self, requests: Sequence[Request]) -> list[Outcome]:
        return list(self.outcomes(iter(requests)))

    def batches(self, requests: Iterator[Request]) -> Iterator[list[Request]]:
        """One by one: vLLM makes batches of its own."""
        return ([request] for request in requests)

    def _fill(self, window: "deque[_Sent]", requests: Iterator[Request], room: int) -> int:
        """Sends what has room: as many requests at once as one pass of vLLM takes, so that the first pass is a full one
        and the next requests are made ready while it runs. How many samples these are.
        """
        sent, tokens, ready = 0, 0, list[Sequence[Sample]]()
        while sent < room and (request := next(requests, None)) is not None:
            ready.append(self._samples(request))
            sent += len(ready[-1])
            tokens += len(request.prompt_token_ids) * len(ready[-1])
            if tokens >= self.description.limits["max_num_batched_tokens"]:
                self._send(window, ready)
                tokens, ready = 0, []
        self._send(window, ready)
        return sent

    def _send(self, window: "deque[_Sent]", ready: Sequence[Sequence[Sample]]) -> None:
        if ready:
            futures = iter(self._driver.submit([sample for samples in ready for sample in samples]))
            window.extend(_Sent(samples, [next(futures) for _ in samples]) for samples in ready)

    def _samples(self, request: Request) -> list[Sample]:
        self._front = weakref.ref(request.model)
        if gone := self._shared.gone():
            self._driver.do(self._tell, "jackfield_forget", gone)
        return [self._sample(request, sampling) for sampling in request.sampling.samples()]

    def _sample(self, request: Request, sampling: Sampling) -> Sample:
        """Traced prompts have a salt of their own: what a block edits enters no cache that another request reads."""
        name = f"{KEY}-{next(self._names)}"
        prompt: dict[str, Any] = {"prompt_token_ids": list(request.prompt_token_ids)}
        if request.block is None:
            return Sample(name, prompt, _params(**self._arguments(sampling)), traced=False)
        text = getattr(request.prompt, "text", None)
        data = pack(Shipment(name, self._block_of(request), text, request.prompt_token_ids), self._ends)
        params = _params(**self._arguments(sampling), extra_args={KEY: [name, data]}, skip_reading_prefix_cache=True)
        return Sample(name, prompt | {"cache_salt": name}, params, traced=True)

    def _arguments(self, sampling: Sampling) -> dict[str, Any]:
        """Those of vLLM, which refuses a token or a number of tokens past the vocabulary: no such token ever comes."""
        given: dict[str, Any] = {name: getattr(sampling, name) for name in SAME_NAMES}
        for name in ("stop", "bad_words", "allowed_token_ids"):
            value = getattr(sampling, name)
            given[name] = None if value is None or value == () else list(value)
        size = self.facts.vocab_size
        given["stop_token_ids"] = [token for token in sampling.stop_token_ids if token < size] or None
        if sampling.logprobs is not None:
            given["logprobs"] = min(sampling.logprobs, size)
        return given

    def _block_of(self, request: Request) -> "Block | Interventions":
        """What is sent for a block; interventions that many requests have are packed once."""
        if not isinstance(request.block, InterventionBlock):
            return cast("Block", request.block)
        mine = request.block.interventions
        if self._packed is None or self._packed[0] is not mine:
            self._packed = mine, Interventions.of(request.block).payload
        return Interventions(self._packed[1], request.block.prompt_length, request.block.max_tokens)

    # -- asking the workers

    def _ask(self, method: str, *arguments: Any) -> Any:
        """The first rank's answer. On the driver's thread."""
        return self._heard(self.llm.collective_rpc(method, args=arguments)[0])

    def _heard(self, answer: bytes) -> Any:
        return heard(answer, self._ends, self._release)

    @property
    def _ends(self) -> Ends:
        return Ends(self, self._front(), self._shared.key)

    def _send_shared(self, key: str, value: Any) -> None:
        self._driver.do(self._tell, "jackfield_share", key, dumps(value, self._ends))

    def _tell(self, method: str, *arguments: Any) -> None:
        self.llm.collective_rpc(method, args=arguments)

    def _release(self, descriptor: int) -> None:
        self._tell("jackfield_release", [descriptor])

    def _fates(self, names: Sequence[str]) -> Sequence[Fate]:
        """What became of the blocks of samples that have ended; the workers forget them."""
        answers = self.llm.collective_rpc("jackfield_end", args=(list(names), self._lending))[0]
        return [each if isinstance(each, Fate) else self._heard(each) for each in answers]

    def _described(self) -> Description:
        """Runs a short prompt, uncompiled and as it comes, of which the workers see what passes where."""
        engine = self.llm.llm_engine
        ids = [(7 * i + 3) % engine.model_config.get_vocab_size() for i in range(6)]
        for probe in (PLAIN, PROBE):
            params = _params(temperature=0.0, max_tokens=1, detokenize=False, extra_args={KEY: ["", probe]})
            engine.add_request(f"{KEY}-{probe.decode()}", {"prompt_token_ids": ids}, params)
            while engine.has_unfinished_requests():
                engine.step()
        return self._ask("jackfield_describe")

    def _can_map(self) -> bool:
        proof = self._ask("jackfield_proof")
        mapped = can_map(proof)
        if proof is not None:
            self._release(proof.descriptor)
        return mapped

    @property
    def held(self) -> Mapping[str, int]:
        """What is alive in the workers, for tests of what is left over."""
        of_ranks = [self._heard(each) for each in self._driver.do(self.llm.collective_rpc, "jackfield_held")]
        return {what: sum(held[what] for held in of_ranks) for what in of_ranks[0]}

    def project_on_vocab(self, x: Tensor, *, norm: bool) -> Tensor:
        refuse_derivatives(x)
        made: Tensor = self._driver.do(self._ask, "jackfield_project", dumps(x.detach(), self._ends), norm)
        return made.to(x.device)

    def arm(self, places: Sequence[Place]) -> None:
        super().arm(places)
        self._driver.do(self._tell, "jackfield_arm", [(place.name, place.layer) for place in places])

    def stats(self) -> Mapping[str, int]:
        return self._driver.do(self._ask, "jackfield_stats")

    # -- what only a block can do

    def channel(self, name: str, layer: int | None, call: int | None) -> Channel:
        raise TracingError(f"{name} has a value only in vLLM's workers: read it inside a block.")

    def raw_channel(self, path: str, port: str) -> Channel:
        raise TracingError(f"{path}.{port} has a value only in vLLM's workers: read it inside a block.")

    def step_value(self, name: str, worker: Worker) -> Any:
        raise TracingError(f"{name} has a value only in vLLM's workers: read it inside a block.")


def _params(**given: Any) -> Any:
    """The `vllm.SamplingParams` of these arguments, for one request: vLLM need make no copy of them."""
    return foreign("vllm", "SamplingParams")(**given, skip_clone=True)


def _add(outcome: Outcome, ended: Ended) -> None:
    fate = Fate() if ended.fate is None else ended.fate
    if fate.printed:
        print(fate.printed, end="")
    if fate.interrupt is not None:
        raise fate.interrupt
    (made,) = ended.output.outputs
    reason: FinishReason = "error" if fate.error is not None else "stopped" if fate.stopped else made.finish_reason
    logprobs = None if made.logprobs is None else [_logprobs(each) for each in made.logprobs]
    ids = list(ended.output.prompt_token_ids)
    outcome.completions.append(Completion(ids, list(made.token_ids), made.text, reason, logprobs))
    outcome.saved.append(fate.saved)
    outcome.returned.append(fate.returned)
    outcome.errors.append(fate.error)


def _logprobs(of_token: Mapping[int, Any]) -> dict[int, Logprob]:
    return {token: Logprob(each.logprob, each.rank, each.decoded_token) for token, each in of_token.items()}
