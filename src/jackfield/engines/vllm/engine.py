"""vLLM: continuous batches, CUDA graphs, many GPUs. The client's side, which holds prompts and results and no weights."""

import io
import itertools
import pickle
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor

from jackfield.engines.engine import Outcome, Request
from jackfield.engines.request import Completion, FinishReason, Limits, Logprob, Sampling, admit
from jackfield.engines.vllm.companion import Fate
from jackfield.engines.vllm.description import Description, outline
from jackfield.engines.vllm.recorder import PROBE
from jackfield.engines.vllm.served import Served, closed
from jackfield.engines.vllm.shipping import Shipment, pack
from jackfield.engines.vllm.starting import start
from jackfield.errors import EngineDied, RequestTooLong, TracingError
from jackfield.interleave.worker import Channel, Worker

KEY: Final = "jackfield"  # in extra_args; scheduler.py, which imports vLLM, has it too
SAME_NAMES: Final = (
    *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "seed", "ignore_eos", "include_stop_str_in_output", "logit_bias", "logprobs"),
    *("prompt_logprobs", "detokenize", "skip_special_tokens", "spaces_between_special_tokens"),
)


@dataclass(frozen=True, slots=True)
class _Sample:
    """One sample of a request on its way through vLLM."""

    name: str
    request: int
    traced: bool


class VllmEngine(Served):
    """vLLM behind a model's front. Options are those of `vllm.LLM`, by their own names."""

    def __init__(
        self, model: Any, *, dtype: Any = None, device: Any = None, family: Any = None, **options: Any
    ) -> None:
        self._lock = threading.Lock()
        self._names = itertools.count()
        self._llm: Any = start(model, dtype=dtype, device=device, family=family, options=options)
        self.tokenizer = None if options.get("skip_tokenizer_init") else self._llm.get_tokenizer()
        self.config = self._llm.llm_engine.model_config.hf_config
        self._probe()
        self.description = cast("Description", self._ask("jackfield_describe")[0])
        self.facts, self.tree, self.channels = self.description.facts, outline(self.description.modules), {}

    @property
    def llm(self) -> Any:
        """vLLM's own `LLM`; EngineDied after `close`."""
        if self._llm is None:
            raise closed()
        return self._llm

    def close(self) -> None:
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()

    # -- running

    def admit(self, prompt_token_ids: Sequence[int], sampling: Sampling) -> None:
        limits = self.description.limits
        admit(prompt_token_ids, sampling, Limits(self.facts.vocab_size, limits["max_model_len"], "max_model_len"))

    def batches(self, requests: Iterator[Request]) -> Iterator[list[Request]]:
        """vLLM makes its own batches; this bounds how many requests, and what they saved, are held at a time."""
        most = 4 * self.description.limits["max_num_seqs"]
        while batch := list(itertools.islice(requests, most)):
            for request in batch:
                self._admit_whole(request)
            yield batch

    def _admit_whole(self, request: Request) -> None:
        most = self.description.limits["max_num_batched_tokens"]
        if request.block is not None and len(request.prompt_token_ids) > most:
            raise RequestTooLong(
                f"{len(request.prompt_token_ids)} prompt tokens with a block run in one pass, which holds "
                f"max_num_batched_tokens={most}: load the model with a larger one."
            )

    def execute(self, requests: Sequence[Request]) -> list[Outcome]:
        if Worker.current() is not None:
            raise TracingError("A trace cannot run inside a block: the model is busy with this one.")
        with self._lock:
            return self._execute(requests)

    def _execute(self, requests: Sequence[Request]) -> list[Outcome]:
        samples = self._samples(requests)
        finished: dict[str, Any] = {}
        try:
            for sample, (prompt, params) in samples.items():
                self.llm.llm_engine.add_request(sample.name, prompt, params)
            while len(finished) < len(samples):
                finished |= {output.request_id: output for output in self._step() if output.finished}
        except BaseException:
            self._abandon([sample for sample in samples if sample.name not in finished])
            raise
        finally:
            fates = self._fates([sample for sample in samples if sample.traced])
        outcomes = [Outcome() for _ in requests]
        for sample in samples:
            _add(outcomes[sample.request], finished[sample.name], fates.get(sample.name))
        return outcomes

    def _samples(self, requests: Sequence[Request]) -> Mapping[_Sample, tuple[Any, Any]]:
        samples: dict[_Sample, tuple[Any, Any]] = {}
        for number, request in enumerate(requests):
            for sampling in request.sampling.samples():
                sample = _Sample(f"{KEY}-{next(self._names)}", number, request.block is not None)
                samples[sample] = self._prompt(sample, request), self._params(sample, request, sampling)
        return samples

    @staticmethod
    def _prompt(sample: _Sample, request: Request) -> dict[str, Any]:
        """Traced prompts have a salt of their own: what a block edits enters no cache that another request reads."""
        prompt: dict[str, Any] = {"prompt_token_ids": list(request.prompt_token_ids)}
        return prompt | {"cache_salt": sample.name} if sample.traced else prompt

    def _params(self, sample: _Sample, request: Request, sampling: Sampling) -> Any:
        from vllm import SamplingParams

        if request.block is None:
            return SamplingParams(**_arguments(sampling))
        text = getattr(request.prompt, "text", None)
        shipment = Shipment(sample.name, cast("Any", request.block), text, request.prompt_token_ids)
        data = pack(shipment, self, request.model)
        return SamplingParams(**_arguments(sampling), extra_args={KEY: data}, skip_reading_prefix_cache=True)

    def _step(self) -> list[Any]:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            return self.llm.llm_engine.step()
        except EngineDeadError as error:
            raise EngineDied(f"vLLM's engine died: {error}") from error

    def _abandon(self, samples: Sequence[_Sample]) -> None:
        if self._llm is not None:
            self._llm.llm_engine.abort_request([sample.name for sample in samples])

    def _fates(self, samples: Sequence[_Sample]) -> dict[str, Fate]:
        """What became of the blocks, which are ended by being asked."""
        if not samples or self._llm is None:
            return {}
        names = [sample.name for sample in samples]
        return dict(zip(names, self._ask("jackfield_end", names)[0], strict=True))

    # -- asking the workers

    def _ask(self, method: str, *arguments: Any) -> list[Any]:
        """One answer per rank."""
        return [_loads(answer) for answer in self.llm.collective_rpc(method, args=arguments)]

    def _probe(self) -> None:
        from vllm import SamplingParams

        vocab = self._llm.llm_engine.model_config.get_vocab_size()
        ids = [(7 * i + 3) % vocab for i in range(6)]
        params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, extra_args={KEY: PROBE})
        self._llm.llm_engine.add_request(f"{KEY}-probe", {"prompt_token_ids": ids}, params)
        while self._llm.llm_engine.has_unfinished_requests():
            self._step()

    @property
    def held(self) -> list[Mapping[str, int]]:
        """What is alive in each worker, for tests of what is left over."""
        return self._ask("jackfield_held")

    def project_on_vocab(self, x: Tensor, *, norm: bool) -> Tensor:
        return self._ask("jackfield_project", pickle.dumps(x.detach().cpu()), norm)[0].to(x.device)

    # -- what only a block can do

    def channel(self, name: str, layer: int | None, call: int | None, step: int) -> Channel:
        raise TracingError(f"{name} has a value only in vLLM's workers: read it inside a block.")

    def raw_channel(self, path: str, port: str) -> Channel:
        raise TracingError(f"{path}.{port} has a value only in vLLM's workers: read it inside a block.")

    def step_value(self, name: str, worker: Worker) -> Any:
        raise TracingError(f"{name} has a value only in vLLM's workers: read it inside a block.")


def _arguments(sampling: Sampling) -> dict[str, Any]:
    given: dict[str, Any] = {name: getattr(sampling, name) for name in SAME_NAMES}
    for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids"):
        value = getattr(sampling, name)
        given[name] = None if value is None or value == () else list(value)
    return given


def _add(outcome: Outcome, output: Any, fate: Fate | None) -> None:
    (made,) = output.outputs
    reason: FinishReason = made.finish_reason
    if fate is not None:
        reason = "error" if fate.error is not None else "stopped" if fate.stopped else reason
    logprobs = None if made.logprobs is None else [_logprobs(each) for each in made.logprobs]
    ids = list(output.prompt_token_ids)
    outcome.completions.append(Completion(ids, list(made.token_ids), made.text, reason, logprobs))
    outcome.saved.append({} if fate is None else fate.saved)
    outcome.returned.append(None if fate is None else fate.returned)
    outcome.errors.append(None if fate is None else fate.error)


def _logprobs(of_token: Mapping[int, Any]) -> dict[int, Logprob]:
    return {token: Logprob(each.logprob, each.rank, each.decoded_token) for token, each in of_token.items()}


def _loads(answer: bytes) -> Any:
    with torch.inference_mode(False):
        return pickle.load(io.BytesIO(answer))
