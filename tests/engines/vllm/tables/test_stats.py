"""How many passes ran in which way."""

import torch

import jackfield as jf
from tests.engines.vllm import tiny

PROMPT = [6, 20, 13, 28, 9]


def test_stats_say_which_way_passes_ran() -> None:
    """Of the first runner, which has no graphs for blocks and tables."""
    with tiny.llama() as model:
        before = model.stats()
        model.run(PROMPT, max_tokens=3, ignore_eos=True)
        between = model.stats()
        steer = jf.Steer("layers.0.layer_output", torch.ones(model.hidden_size))
        model.generate(PROMPT, [steer], max_tokens=3, ignore_eos=True)
        after = model.stats()
    assert between["plain"] - before["plain"] >= 3
    assert after["eager"] - between["eager"] >= 3
    assert after["armed"] == after["tabled"] == after["captured"] == 0
