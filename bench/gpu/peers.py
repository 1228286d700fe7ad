"""The peers' rows, each as its own documentation has it. Runs in the peer's own environment, without jackfield."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.gpu.plain import PlainVllm, Prompts
from bench.gpu.scales import COMMON, Scale, shape_of

Runs = dict[str, Callable[[Prompts], int]]
# vllm-lens and nnsight read prompts as they are computed, not out of the prefix cache. No prompt comes twice here.
OPTIONS = {"enable_prefix_caching": False}


def runs(peer: str, folder: str, scale: Scale) -> Runs:
    """A peer's rows: each runs a batch, and gives back how many tokens it made."""
    return {
        "vLLM eager": _eager,
        "nnsight": _nnsight,
        "nnsight taps": _nnsight_taps,
        "vllm-lens": _vllm_lens,
        "hotwire": _hotwire,
    }[peer](folder, scale)


def _eager(folder: str, scale: Scale) -> Runs:
    return {"idle": PlainVllm(folder, scale, enforce_eager=True).generate}


def _vllm_lens(folder: str, scale: Scale) -> Runs:
    plain, layer = PlainVllm(folder, scale, **OPTIONS), middle(folder)
    from vllm_lens import SteeringVector

    vector = torch.ones(1, shape_of(folder)["hidden_size"]) * 0.01

    def steer(prompts: Prompts) -> int:
        steering = SteeringVector(activations=vector, layer_indices=[layer], scale=1.0)
        return plain.generate(prompts, {"apply_steering_vectors": [steering]})

    def capture(prompts: Prompts) -> int:
        return plain.generate(prompts, {"output_residual_stream": [layer]})

    return {"idle": plain.generate, "steer-one-layer": steer, "capture": capture}


def _hotwire(folder: str, scale: Scale) -> Runs:
    """Its vectors are files of [layers, width] in a folder that it takes from HOTWIRE_VECTORS."""
    vectors = Path(folder) / "hotwire"
    vectors.mkdir(exist_ok=True)
    torch.save(
        torch.ones(shape_of(folder)["num_hidden_layers"], shape_of(folder)["hidden_size"]) * 0.01, vectors / "v.pt"
    )
    os.environ["HOTWIRE_VECTORS"] = str(vectors)
    plain, layer = PlainVllm(folder, scale, **OPTIONS), middle(folder)
    asked = {"hotwire": json.dumps({"id": "v", "layer": layer, "scale": 1.0})}
    return {"idle": plain.generate, "steer-one-layer": lambda prompts: plain.generate(prompts, asked)}


def _nnsight(folder: str, scale: Scale, **taps: Any) -> Runs:
    from nnsight.modeling.vllm import VLLM

    # It reads the tokenizer beside the model, whatever is asked.
    common = {name: value for name, value in COMMON.items() if name != "skip_tokenizer_init"}
    model: Any = VLLM(folder, dispatch=True, **{**common, **scale.options, **OPTIONS, **taps})
    layer, tokens = model.model.layers[middle(folder)], scale.new
    vector = (torch.ones(shape_of(folder)["hidden_size"]) * 0.01).to(getattr(torch, scale.options["dtype"]))
    sampling = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True}

    def steer(prompts: Prompts) -> int:
        with model.trace(**sampling) as tracer:
            for prompt in prompts:
                with tracer.invoke(prompt):
                    for _ in tracer.iter[:tokens]:
                        half = layer.output[0]
                        half.add_(vector.to(half.device))
        return tokens * len(prompts)

    def capture(prompts: Prompts) -> int:
        with model.trace(**sampling) as tracer:
            kept = list().save()  # noqa: C408  # nnsight's own `save` is of such a call
            for prompt in prompts:
                with tracer.invoke(prompt):
                    for _ in tracer.iter[:tokens]:
                        out = layer.output
                        kept.append((out[0] + out[1]).cpu())
        return tokens * len(prompts)

    return {"block-each": steer, "capture": capture}


def _nnsight_taps(folder: str, scale: Scale) -> Runs:
    return _nnsight(folder, scale, taps=[f"model.layers.{middle(folder)}.output"])


def middle(folder: str) -> int:
    """The layer that is read and edited where it is one."""
    return shape_of(folder)["num_hidden_layers"] // 2
