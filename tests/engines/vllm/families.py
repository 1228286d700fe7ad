"""The zoo's models at widths that vLLM's attention on CPUs takes, each in a vLLM of its own, beside the raw reference.

Where a family is not what the reference is to the letter, the entry says so: what vLLM computes otherwise, what it
hands to its attention otherwise, and which values it cannot serve and why.
"""

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

import jackfield as jf
from tests import zoo
from tests.engines.transformers.reading import ALIBI, IN_ORDER, pairs, read_everything, tokens_of
from tests.engines.vllm.tiny import start_folder
from tests.reference.compare import BY_QUERY, assert_close
from tests.reference.record import Step, record

LENGTHS = (12, 5, 9)  # past a window of 8
SEED = 20
STEPS = 7
OPTIONS: Mapping[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 64, "num_gpu_blocks_override": 64}
WIDE: Mapping[str, Any] = {"hidden_size": 128}
TIED: Mapping[str, Any] = {"hidden_size": 128, "tie_word_embeddings": True}


@dataclass(frozen=True)
class Family:
    """One model of the zoo in vLLM.

    Attributes:
        zoo: its name there; `over` are the settings that differ from the zoo's.
        backend: vLLM's own model, or transformers' inside of vLLM.
        tolerance: of a row, where vLLM computes something else than transformers; `why` says what.
        missing: what is not served, and a part of the reason that `support()` gives.
        queries_factor: what vLLM's queries are of transformers'.
        told: settings in which what vLLM is told differs, so that it computes the same.
        pairs_apart: vLLM has the even places of queries and keys first, then the odd ones: of each pair that is rotated
            the two stand half a head apart.
        spoiled: changes transformers' model before vLLM reads it, in the one thing that vLLM does otherwise.
    """

    zoo: str
    over: Mapping[str, Any] = field(default_factory=lambda: dict(WIDE))
    backend: Literal["vllm", "transformers"] = "vllm"
    tolerance: float = 1e-4
    why: str = ""
    missing: Mapping[str, str] = field(default_factory=dict[str, str])
    queries_factor: float = 1.0
    told: Mapping[str, Any] = field(default_factory=dict[str, Any])
    pairs_apart: bool = False
    spoiled: Callable[[PreTrainedModel], None] = lambda _model: None

    def __str__(self) -> str:
        return self.zoo if self.backend == "vllm" else f"{self.zoo} by transformers"


def by_transformers(name: str, over: Mapping[str, Any] = WIDE, **rest: Any) -> Family:
    """A family that vLLM runs as transformers has it."""
    return Family(name, over, "transformers", **rest)


def without_rotary_keys(model: PreTrainedModel) -> None:
    """The rotated part of latent attention's keys is zero: the CPU's backend rotates otherwise than transformers.

    With it, vLLM 0.32 alone, without jackfield, makes other tokens than transformers; a first token, which sees one key
    and so no position, agrees to the last digits.
    """
    for layer in model.get_submodule("model.layers").children():
        projection: Any = layer.get_submodule("self_attn.kv_a_proj_with_mqa")
        projection.weight.data[model.config.kv_lora_rank :] = 0


SEVERAL_STREAMS = dict.fromkeys(
    ("layer_input", "attention_output", "layer_mid", "mlp_output", "layer_output"), "not one stream"
)
OF_ATTENTION = tuple(name for name in IN_ORDER if name.startswith("attention_") and "norm" not in name)
OF_HEADS = tuple(name for name in OF_ATTENTION if name != "attention_output")

FAMILIES: tuple[Family, ...] = (
    Family("llama"),
    Family("mistral"),
    Family("mixtral"),
    Family("qwen2", {"hidden_size": 128, "use_sliding_window": False, "sliding_window": None}),
    Family("qwen3"),
    Family("gemma2", TIED),
    Family("gemma3_text", TIED),
    Family("phi3"),
    Family("gpt2", {"n_embd": 128}),
    Family("gptj", {"n_embd": 128, "rotary_dim": 16}),
    Family("falcon/7b"),
    Family("falcon/40b"),
    Family("opt", queries_factor=32**0.5),  # transformers scales queries ahead of its attention
    Family("bloom", tolerance=2e-2, why="vLLM's GELU is exact, transformers' is the tanh approximation"),
    Family("stablelm", {"hidden_size": 128, "qk_layernorm": False, "use_parallel_residual": False}),
    Family("cohere", TIED),
    Family("cohere2", TIED, told={"sliding_window": 7}),  # vLLM adds one, as the model was trained
    Family("granite"),
    Family("granite_swa"),
    Family("gpt_oss"),
    Family("glm4", {"hidden_size": 128, "head_dim": 32}),
    Family("exaone4"),
    Family(
        "gemma3n_text",  # layers that share keys: vLLM knows the one arrangement that was trained
        {"hidden_size": 128, "head_dim": 32, "num_kv_shared_layers": 3},
        missing={
            "token_embeddings": "scales this model's embeddings",
            **SEVERAL_STREAMS,
            **{name: "keys of another layer" for name in OF_HEADS if name != "attention_keys_prerotary"},
        },
    ),
    Family(
        "llama4_text",  # vLLM tunes no temperature where max_model_len is short, and cuts chunks at whole blocks
        {"hidden_size": 128, "head_dim": 32, "attention_chunk_size": 32, "attn_temperature_tuning": False},
        pairs_apart=True,
        missing=dict.fromkeys(
            ("attention_scores", "attention_probabilities", "attention_cached_keys", "attention_cached_values"),
            "ChunkedLocalAttention, chooses its keys",
        ),
    ),
    Family(
        "deepseek_v3",  # the widths that the CPU's latent attention has; without experts, which vLLM weighs otherwise
        {
            **WIDE,
            "first_k_dense_replace": 4,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
        },
        spoiled=without_rotary_keys,
        missing=dict.fromkeys(OF_HEADS, "MLAAttention, is not given queries, keys and values of heads"),
    ),
    by_transformers("gpt_neox"),
    by_transformers("phi", {"hidden_size": 128, "qk_layernorm": False}),
    by_transformers("starcoder2"),
    by_transformers("olmo2"),
    by_transformers("olmo3"),
    by_transformers("smollm3"),
    by_transformers("vaultgemma"),
    by_transformers("gpt_bigcode", {"n_embd": 128}),
)


class Running:
    """A family in vLLM, what is read of it, and the reference. `hf` is transformers' model of the same weights."""

    def __init__(self, family: Family, model: jf.Model, hf: PreTrainedModel) -> None:
        self.family, self.model, self.hf = family, model, hf

    @cached_property
    def references(self) -> tuple[list[Step], ...]:
        """The reference's records of the prompts, each alone."""
        name = self.family.zoo
        return tuple(record(self.hf, name, zoo.prompt(name, n, seed=SEED + n), STEPS) for n in LENGTHS)

    @cached_property
    def alone(self) -> Any:
        """Everything read of the first prompt, by itself."""
        return self.model.run(self.prompts[0], read_everything, max_tokens=STEPS, ignore_eos=True)

    @cached_property
    def company(self) -> list[Any]:
        """Everything read of all prompts at once."""
        return self.model.run(self.prompts, read_everything, max_tokens=STEPS, ignore_eos=True)

    @property
    def prompts(self) -> list[list[int]]:
        """The token ids of the prompts."""
        return [zoo.prompt(self.family.zoo, n, seed=SEED + n)[0].tolist() for n in LENGTHS]

    def has(self, layer: int | None, name: str) -> bool:
        """Whether the reference has a value."""
        return self.references[0][0].get(name, layer) is not None

    def compare_alone(self) -> None:
        """Holds tokens and every value of one prompt's run against the reference's."""
        assert self.alone.token_ids == tokens_of(self.references[0])
        self.compare(self.alone.saved["steps"], self.references[0])

    def compare_company(self) -> None:
        """The same of all prompts at once."""
        for result, steps in zip(self.company, self.references, strict=True):
            assert result.token_ids == tokens_of(steps)
            self.compare(result.saved["steps"], steps)

    def compare(self, read: Sequence[Mapping[Any, Tensor]], steps: Sequence[Step]) -> None:
        """Holds every value of the reference against what was read."""
        assert len(read) == len(steps)
        for found, step in zip(read, steps, strict=True):
            for (layer, name), want in pairs(step):
                if (layer, name) not in found:
                    assert name in self.family.missing, f"step {step.index}: {name} of layer {layer} was not served"
                    continue
                self._compare_one(found[layer, name], self._wanted(want, name, layer, step, steps), name, layer, step)

    def _compare_one(self, got: Tensor, want: Tensor, name: str, layer: int | None, step: Step) -> None:
        where, tolerance = f"step {step.index}, layer {layer}, ", self.family.tolerance
        if name not in BY_QUERY and got.ndim == want.ndim == 4:
            got = got.repeat_interleave(want.shape[1] // got.shape[1], 1)  # transformers repeats key heads itself
        if name == "attention_scores" and got.shape == want.shape:
            got = _with_cancelled(got, want, tolerance / 10)
        assert_close(got, want, name, alibi=self.family.zoo in ALIBI, where=where, tolerance=tolerance)

    def _wanted(self, want: Tensor, name: str, layer: int | None, step: Step, steps: Sequence[Step]) -> Tensor:
        """vLLM lets go of whole blocks of positions, so that its cache holds more than a window: all so far, here."""
        if layer is not None and name.startswith("attention_cached"):
            new = name.replace("cached_", "")
            want = torch.cat([earlier.layers[layer][new] for earlier in steps[: step.index + 1]], 2)
        if name in ("attention_queries", "attention_queries_prerotary"):
            want = want * self.family.queries_factor
        if self.family.pairs_apart and ("queries" in name or "keys" in name):
            want = torch.cat([want[..., 0::2], want[..., 1::2]], -1)
        return want


def _with_cancelled(got: Tensor, want: Tensor, tolerance: float) -> Tensor:
    """`got` with what is right to a part of its head's largest score made exact.

    A score is a product of two long vectors: where a row of few keys has only products that cancel to near nothing,
    it has no precision of its own, and in no two ways of multiplying is it the same.
    """
    largest = want.nan_to_num(neginf=0.0).abs().amax((2, 3), keepdim=True)
    return torch.where((got - want).abs() <= tolerance * largest, want, got)


@contextmanager
def running(family: Family, **options: Any) -> Generator[Running]:
    """The family in an engine that is gone afterwards."""
    hf = zoo.build(family.zoo, fresh=True, **family.over)
    family.spoiled(hf)
    decoder: Any = hf.get_decoder()
    with TemporaryDirectory() as folder, _as_it_was(type(decoder)):
        hf.save_pretrained(folder)
        _tell(Path(folder, "config.json"), family.told)
        _inspect_in_this_process(hf, family)
        backend = "auto" if family.backend == "vllm" else "transformers"
        decoder.do_not_compile = True  # for what vLLM puts on its class
        with start_folder(folder, model_impl=backend, **{**OPTIONS, **options}) as model:
            yield Running(family, model, hf)


def _tell(settings: Path, told: Mapping[str, Any]) -> None:
    settings.write_text(json.dumps(json.loads(settings.read_text()) | told))


def _inspect_in_this_process(hf: PreTrainedModel, family: Family) -> None:
    """vLLM inspects each class of model that it has not seen in a process of its own, which takes half a minute."""
    from vllm import ModelRegistry

    names = {type(hf).__name__, "TransformersForCausalLM", "TransformersMoEForCausalLM"}
    for name in names & set(ModelRegistry.models):
        registered: Any = ModelRegistry.models[name]
        if hasattr(registered, "class_name"):
            ModelRegistry.register_model(name, registered.load_model_cls())


@contextmanager
def _as_it_was(kind: type) -> Generator[None]:
    """vLLM decorates the class of a decoder of transformers' for good; other tests want it as it was."""
    before, bases = dict(vars(kind)), kind.__bases__
    try:
        yield
    finally:
        if kind.__bases__ != bases:
            kind.__bases__ = bases
        for name in set(vars(kind)) - set(before):
            delattr(kind, name)
        for name, value in before.items():
            if vars(kind)[name] is not value:
                setattr(kind, name, value)
