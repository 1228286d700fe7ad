"""jackfield's rows, in its public names alone: `run`, `generate` with interventions, and blocks that are functions."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

import jackfield as jf
from bench.gpu.plain import Prompts
from bench.gpu.scales import COMMON, Scale

DIRECTIONS = 8


class Ours:
    """jackfield's engine over vLLM, with the options that plain vLLM has. `layer` is the middle one."""

    def __init__(self, folder: str, scale: Scale) -> None:
        options = {**COMMON, **scale.options}
        self.model = jf.Model(folder, engine="vllm", **options)
        self.scale, self.layer = scale, self.model.num_layers // 2
        self.site, self.every = f"layers.{self.layer}.layer_output", "layers.*.layer_output"
        made = torch.Generator().manual_seed(0)
        width = self.model.hidden_size
        self.vectors = torch.randn(max(scale.batches), width, generator=made) * 0.01
        self.directions = torch.randn(DIRECTIONS, width, generator=made)

    def run(self, row: str, prompts: Prompts) -> list[Any]:
        """The results of a row over a batch."""
        return self._rows()[row](prompts)

    def _rows(self) -> dict[str, Callable[[Prompts], list[Any]]]:
        one = self.edit_one_layer()
        return {
            "idle": lambda prompts: self._run(prompts, None),
            "block-one": lambda prompts: self._one_of(prompts, one),
            "steer-one-layer": lambda prompts: self._generate(prompts, self._steers(self.site, len(prompts))),
            "steer-all-layers": lambda prompts: self._generate(prompts, self._steers(self.every, len(prompts))),
            "probe": lambda prompts: self._generate(prompts, [jf.Probe(self.every, self.directions)]),
            "capture": lambda prompts: self._generate(prompts, [jf.Capture(self.site)]),
            "block-each": lambda prompts: self._run(prompts, one),
            "block-all-layers": lambda prompts: self._run(prompts, self._edit_all_layers()),
            "pattern": lambda prompts: self._run(prompts, self._read_pattern()),
            "pattern-long": lambda prompts: self._run(prompts, self._read_pattern()),
        }

    # -- blocks: each gives back what shows that it ran

    def edit_one_layer(self) -> Callable[[Any, Any], Any]:
        """A block that adds a vector to the last row at one layer on every step, and counts the steps."""
        vector, layer = self.vectors[0].to(self.model.dtype), self.layer

        def block(model: Any, t: Any) -> int:
            steps = 0
            for _ in t.iter[:]:
                model.layers[layer].layer_output[:, -1] += vector
                steps += 1
            return steps

        return block

    def _edit_all_layers(self) -> Callable[[Any, Any], Any]:
        vector = self.vectors[0].to(self.model.dtype)

        def block(model: Any, t: Any) -> int:
            edits = 0
            for _ in t.iter[:]:
                for layer in model.layers:
                    layer.layer_output[:, -1] += vector
                    edits += 1
            return edits

        return block

    def _read_pattern(self) -> Callable[[Any, Any], Any]:
        layer = self.layer

        def block(model: Any, t: Any) -> tuple[int, ...]:
            shape: tuple[int, ...] = ()
            for step in t.iter[:]:
                if step:
                    shape = tuple(model.layers[layer].attention_probabilities.shape)
            return shape

        return block

    # -- ways to run

    def _run(self, prompts: Prompts, block: Any) -> list[Any]:
        return self.model.run(list(prompts), block, **asked(self.scale.new))

    def _one_of(self, prompts: Prompts, block: Any) -> list[Any]:
        """The first prompt with a block, the others without, in one batch: two calls at a time, as two callers make."""
        if len(prompts) == 1:
            return self._run(prompts, block)
        with ThreadPoolExecutor(1) as caller:
            first = caller.submit(self._run, prompts[:1], block)
            others = self._run(prompts[1:], None)
            return [*first.result(), *others]

    def _generate(self, prompts: Prompts, interventions: Sequence[Any]) -> list[Any]:
        return self.model.generate(list(prompts), interventions, **asked(self.scale.new))

    def _steers(self, site: str, count: int) -> list[list[Any]]:
        return [[jf.Steer(site, self.vectors[i], 1.0 + i / 256)] for i in range(count)]

    # -- whether what was asked came

    def check(self, row: str, prompts: Prompts, results: Sequence[Any]) -> None:
        """ValueError where a row made another number of tokens, or gave back something else than it is timed for."""
        made = [len(result.token_ids) for result in results]
        if made != [self.scale.new] * len(prompts):
            raise ValueError(f"{row}: {made} tokens, where each of {len(prompts)} should have {self.scale.new}")
        wanted = self._wanted(row, len(prompts[0]))
        found = [evidence(result) for result in (results[:1] if row == "block-one" else results)]
        if any(each != wanted for each in found):
            raise ValueError(f"{row}: {found[0]} came back, where it should have been {wanted}")

    def _wanted(self, row: str, prompt: int) -> Any:
        """The evidence of a row; without a block or something to keep there is none."""
        new, rows, model = self.scale.new, prompt + self.scale.new - 1, self.model
        return {
            "block-one": new,
            "block-each": new,
            "block-all-layers": new * model.num_layers,
            "pattern": (1, model.num_heads, 1, rows),
            "pattern-long": (1, model.num_heads, 1, rows),
            "probe": {f"layers.{i}.layer_output": (rows, DIRECTIONS) for i in range(model.num_layers)},
            "capture": {self.site: (rows, model.hidden_size)},
        }.get(row)


def asked(new: int) -> dict[str, Any]:
    """Sampling as plain vLLM's here."""
    return {"max_tokens": new, "ignore_eos": True, "detokenize": False}


def evidence(result: Any) -> Any:
    """What a block gave back, or the shapes of what was kept; None of neither."""
    return {name: tuple(kept.shape) for name, kept in result.saved.items()} or result.returned
