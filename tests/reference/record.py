"""One prompt alone, generated greedily by transformers, with every value of the contract recorded at every step."""

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from tests.reference.attention import AttentionTap, Facts
from tests.reference.families import Family, blocks_of, child, family_of
from tests.reference.places import Change, Visit, output_of
from tests.reference.stream import BlockHooks


@dataclass(frozen=True, slots=True)
class Step:
    """The values of one forward. A name that the model has no value for is absent.

    Keys and values have as many heads as the attention is given: Falcon's new architecture and multi-head latent
    attention repeat theirs before. Cached ones are what it attends to in this step: a whole prompt, and afterwards
    what a window has kept. Layers that attend twice number their calls: `attention_scores/0`, `attention_scores/1`.

    Attributes:
        index: 0 is the whole prompt, n the n-th generated token going back in.
        input_ids: [1, t].
        positions: [t], absolute.
        next_token: what greedy decoding picks.
        root: the model's own values by name.
        layers: each layer's values by name. All are copies, in the model's dtype (scores and pattern in float32).
        facts: what each layer's attention was called with, where it has one.
    """

    index: int
    input_ids: Tensor
    positions: Tensor
    next_token: int
    root: dict[str, Tensor]
    layers: tuple[dict[str, Tensor], ...]
    facts: tuple[Facts | None, ...]

    def get(self, name: str, layer: int | None = None) -> Tensor | None:
        """The value, or None where the model has none."""
        return (self.root if layer is None else self.layers[layer]).get(name)


def keep(_layer: int | None, _name: str, x: Tensor) -> Tensor:
    """The visitor that changes nothing."""
    return x


@torch.no_grad()
def record(
    model: PreTrainedModel,
    name: str,
    prompt_ids: Tensor,
    steps: int,
    *,
    edit: Visit = keep,
    first_position: int = 0,
) -> list[Step]:
    """Run `prompt_ids` [1, t] alone for `steps` forwards; no token ends it early.

    `name` is a zoo name or a `model_type`. What `edit` answers is put into the model, and is what is recorded.
    `first_position` is the position id of the first token: a mistake, unless it is 0.
    """
    if model.config._attn_implementation != "eager":
        raise ValueError(f"the reference is eager attention, and this model runs {model.config._attn_implementation!r}")
    return list(Recording(model, family_of(model, name), edit, first_position).run(prompt_ids, steps))


class Recording:
    """A model with the hooks of its family, and what they have seen in this step."""

    def __init__(self, model: PreTrainedModel, family: Family, edit: Visit, first_position: int) -> None:
        self._model = model
        self._family = family
        self._edit = edit
        self._first_position = first_position
        self._blocks = blocks_of(model, family)
        self._tap = AttentionTap(family, self._visit)
        self._root: dict[str, Tensor] = {}
        self._layers: list[dict[str, Tensor]] = []

    def run(self, prompt_ids: Tensor, steps: int) -> Iterator[Step]:
        """Each step as it is done."""
        cache = DynamicCache(config=self._model.config.get_text_config(decoder=True))
        input_ids, seen = prompt_ids, 0
        with self._hooks(cache):
            for index in range(steps):
                self._root, self._layers = {}, [{} for _ in self._blocks]
                positions = torch.arange(seen, seen + input_ids.shape[1])
                logits = self._forward(input_ids, positions, cache)
                token = int(logits[0, -1].argmax())
                facts = tuple(self._tap.facts.get(layer) for layer in range(len(self._blocks)))
                yield Step(index, input_ids, positions, token, self._root, tuple(self._layers), facts)
                seen += input_ids.shape[1]
                input_ids = torch.tensor([[token]])

    def _forward(self, input_ids: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """The call that `generate` makes, and the logits row that is sampled from: [1, 1, vocab]."""
        keys = int(positions[-1]) + 1
        self._tap.begin(tokens=len(positions), keys=keys)
        accepted = inspect.signature(self._model.forward).parameters
        optional = {"position_ids": positions[None] + self._first_position, "logits_to_keep": 1}
        logits = self._model(
            input_ids=input_ids,
            attention_mask=torch.ones(1, keys, dtype=torch.long),
            past_key_values=cache,
            use_cache=True,
            **{name: value for name, value in optional.items() if name in accepted},
        ).logits[:, -1:]
        logits = self._visit(None, "logits", logits)
        self._visit(None, "next_token_probabilities", logits[:, -1].float().softmax(-1))
        return logits

    def _visit(self, layer: int | None, name: str, x: Tensor) -> Tensor:
        changed = self._edit(layer, name, x)
        values = self._root if layer is None else self._layers[layer]
        values[name] = changed.detach().clone()
        return changed

    @contextmanager
    def _hooks(self, cache: Cache) -> Iterator[None]:
        attends = {i: m for i, b in enumerate(self._blocks) if (m := child(b, self._family.attention)) is not None}
        with ExitStack() as stack:
            self._hook_root(stack)
            for layer, block in enumerate(self._blocks):
                BlockHooks(self._family, block, layer, self._visit).put(stack)
            stack.enter_context(self._tap.listening(attends, cache))
            yield

    def _hook_root(self, stack: ExitStack) -> None:
        def at(name: str) -> Change:
            return lambda x: self._visit(None, name, x)

        stack.enter_context(output_of(self._model.get_input_embeddings(), at("token_embeddings")))
        norm = self._model.get_submodule(self._family.final_norm)
        stack.enter_context(output_of(norm, at("final_norm_output")))
