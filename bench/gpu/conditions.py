"""What a session was measured on."""

import os
import platform
from collections.abc import Mapping
from datetime import date
from typing import Any

from bench.conditions import jackfield, processor
from bench.gpu.rows import ONE_IN, OURS
from bench.gpu.scales import shape_of
from bench.gpu.session import Numbers, Plan


def conditions(plan: Plan, found: Numbers, *, took_s: float) -> dict[str, str]:
    """One line for each thing that the numbers depend on. `took_s` is how long the session took."""
    scale, load = plan.scale, plan.scale.load
    about = dict(found.about[OURS])
    device = about.pop("device")
    return {
        "date": f"{date.today():%Y-%m-%d}; the session took {took_s / 60:.0f} minutes",
        "device": device,
        "processor": f"{processor()}, {os.cpu_count()} cores; {plan.threads} threads",
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "jackfield": jackfield(),
        "vLLM's process": _listed(about),
        **{f"{name}'s process": _listed(versions) for name, versions in found.about.items() if name != OURS},
        "model": _model(shape_of(plan.folder), scale.options["dtype"]),
        "lengths": f"prompts of {scale.prompt} random tokens, {scale.long_prompt:,} where the context is long; "
        f"{scale.new} generated, greedy, the end of sequence ignored; no prompt comes twice",
        "vLLM's options": ", ".join(f"{name}={value}" for name, value in scale.options.items()),
        "mixed load": f"{load.requests} requests, {load.rate:g} a second on average, prompts of {load.prompt[0]} to "
        f"{load.prompt[1]:,} tokens, {load.new[0]} to {load.new[1]} generated; one in {ONE_IN} traced",
        "times": f"medians (quartiles) of {plan.rounds} rounds after {plan.warm_up} that warm up; "
        f"of the mixed load {plan.mixed_rounds} after 1",
    }


def _model(config: Mapping[str, Any], dtype: str) -> str:
    layers, width = config["num_hidden_layers"], config["hidden_size"]
    heads = f"{config['num_attention_heads']} heads, {config['num_key_value_heads']} of keys"
    return f"{config['architectures'][0]}, {layers} layers, width {width:,}, {heads}; random weights, {dtype}"


def _listed(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{package} {version}" for package, version in versions.items() if package != "device")
