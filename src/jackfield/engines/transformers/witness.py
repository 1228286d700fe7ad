"""At load: does the pattern that will be served give what the heads write?

A reader sees `attention_probabilities` computed beside the model's own op, from what the op was given. An op may do
more than its arguments tell (a bias of its own, another scale, a sparse choice of keys). So one short prompt and one
decode step run with a block per layer, and a layer whose pattern times values is not its head outputs does not serve
scores and pattern, and says why.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from jackfield.engines.transformers.gates import Gates
from jackfield.engines.transformers.run import DYNAMIC_NAMES, OF_THE_OP, Run
from jackfield.engines.transformers.serving import Serving
from jackfield.errors import JackfieldError
from jackfield.interleave.step import Rows
from jackfield.interleave.worker import Worker
from jackfield.values.anatomy import Anatomy, AttentionAnatomy

TOKENS = 11
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}  # of a row's largest entry; other dtypes round: 5e-2
ORDER = ("attention_cached_values", "attention_probabilities", "attention_head_outputs")


class _Disagreement(Exception):
    """The pattern is not what the heads used."""


def refuse_unwitnessed(model: PreTrainedModel, anatomy: Anatomy, serving: Serving) -> None:
    """Takes off, layer by layer, attention values that the model's own run does not bear out."""
    attending = {
        number: layer.attention
        for number, layer in enumerate(anatomy.layers)
        if isinstance(layer.attention, AttentionAnatomy)
    }
    workers = {number: _worker(serving, number, attention) for number, attention in attending.items()}
    if not workers:
        return
    _run(Gates(model, anatomy), list(workers.values()))
    for number, worker in workers.items():
        error, worker.error = worker.error, None
        for name in _unwitnessed(error):
            serving.refuse(name, number, str(error))


def _unwitnessed(error: Exception | None) -> Sequence[str]:
    if error is None:
        return ()
    if isinstance(error, _Disagreement):
        return ("attention_scores", "attention_probabilities")
    if isinstance(error, JackfieldError):
        return tuple(OF_THE_OP - {"attn"})
    raise error


def _run(gates: Gates, workers: list[Worker]) -> None:
    model = gates.model
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.arange(3, 3 + TOKENS + 1, device=model.device)[None] % vocabulary
    run = Run(gates, workers, TOKENS, DYNAMIC_NAMES)
    try:
        try:
            run.start()
            with torch.no_grad():
                cache = model(input_ids=ids[:, :-1], use_cache=True).past_key_values
                model(input_ids=ids[:, -1:], past_key_values=cache, use_cache=True)
            for worker in workers:
                run.interleaver.finish(worker)
        finally:
            run.close()
    finally:
        run.close()  # again, in case that Ctrl-C ended the first


def _worker(serving: Serving, number: int, attention: AttentionAnatomy) -> Worker:
    worker = Worker(Rows(0, 0, TOKENS))
    worker.body = _body(worker, serving, number, attention)
    return worker


def _body(worker: Worker, serving: Serving, number: int, attention: AttentionAnatomy) -> Callable[[], None]:
    calls = [None] if attention.calls == 1 else list(range(attention.calls))

    def body() -> None:
        for step in (0, 1):
            worker.reach_step(step)
            for call in calls:
                values, pattern, outputs = _read(worker, serving, number, call)
                _compare(values, pattern, outputs)

    return body


def _read(worker: Worker, serving: Serving, number: int, call: int | None) -> Iterator[Tensor]:
    for name in ORDER:
        yield worker.read(serving.channel(name, number, call))


def _compare(values: Tensor, pattern: Tensor, outputs: Tensor) -> None:
    """Of values [1, kv_head, key, d_value], pattern [1, head, token, key], outputs [1, token, head, d_value]."""
    groups = pattern.shape[1] // values.shape[1]
    kept = values.float().nan_to_num(0.0).repeat_interleave(groups, 1)  # what a window dropped has no weight
    mixed = (pattern @ kept).transpose(1, 2)
    largest = outputs.float().abs().amax((-2, -1), keepdim=True).clamp(min=1e-12)
    error = float(((mixed - outputs.float()).abs() / largest).max())
    if not error <= TOLERANCE.get(outputs.dtype, 5e-2):
        raise _Disagreement(
            "what this attention computes is more than its arguments tell: the pattern times the values differs from "
            f"its head outputs by {error:.1e} of the largest"
        )
