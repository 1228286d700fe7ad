"""Families that compute their own attention, heard beside transformers' own answers.

Truth: `output_attentions`, the cache, forward hooks, and `by_hand`, which is one attention written out from queries,
keys and values. Batches hold a prompt of 9 tokens and one of 5, left-padded.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache

from jackfield.engines.transformers.listening import Listening, listen
from tests import zoo

PADDING = 4
PARTS = ("q", "k", "v", "scores", "pattern", "heads")


@dataclass(frozen=True)
class Family:
    zoo_name: str
    attention: str  # the attention's class
    projection: str  # its output projection
    num_kv_heads: int
    implementation: str = "eager"
    scale: Callable[[int], float] = lambda layer: 0.25
    alibi: float = 0.0  # what the slopes are multiplied with
    windows: tuple[int | None, ...] = (None,)  # by layer, repeated

    def __str__(self) -> str:
        return f"{self.zoo_name}-{self.implementation}"


OWN = (
    Family("bloom", "BloomAttention", "dense", 4, alibi=1.0),
    Family("bloom/6h", "BloomAttention", "dense", 6, alibi=1.0),
    Family("mpt", "MptAttention", "out_proj", 4, alibi=1.0),
    Family("gptj", "GPTJAttention", "out_proj", 4),
    Family("codegen", "CodeGenAttention", "out_proj", 4),
    Family("gpt_neo", "GPTNeoSelfAttention", "out_proj", 4, scale=lambda layer: 1.0, windows=(None, 8)),
    Family("falcon/7b", "FalconAttention", "dense", 1),
    Family("falcon/40b", "FalconAttention", "dense", 2),
    # transformers 5.19 adds Falcon's ALiBi twice under eager: in the mask, and to the scores.
    Family("falcon/rw", "FalconAttention", "dense", 4, alibi=2 * 0.25),
    Family("gpt2/upcast", "GPT2Attention", "c_proj", 4, scale=lambda layer: 0.25 / (layer + 1)),
)
DISPATCHED = (
    Family("falcon/7b", "FalconAttention", "dense", 1, "sdpa"),
    Family("falcon/40b", "FalconAttention", "dense", 2, "sdpa"),
    Family("falcon/rw", "FalconAttention", "dense", 4, "sdpa", alibi=0.25),
)
LAYER = 1

own = pytest.mark.parametrize("family", OWN, ids=str)
dispatched = pytest.mark.parametrize("family", DISPATCHED, ids=str)
every = pytest.mark.parametrize("family", [*OWN, *DISPATCHED], ids=str)


@dataclass
class Ear:
    """Keeps copies of what it is told, and puts `edits[part](it)` in its place."""

    edits: dict[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    told: dict[str, Tensor] = field(default_factory=dict)
    mask: Tensor | None = None
    scale: float = 0.0

    def _tell(self, part: str, tensor: Tensor) -> Tensor | None:
        self.told[part] = tensor.clone()
        edit = self.edits.get(part)
        return None if edit is None else edit(tensor.clone())

    def inputs(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return self._tell("q", q), self._tell("k", k), self._tell("v", v)

    def scores(self, scores: Tensor) -> Tensor | None:
        return self._tell("scores", scores)

    def pattern(self, pattern: Tensor) -> Tensor | None:
        return self._tell("pattern", pattern)

    def heads(self, z: Tensor) -> Tensor | None:
        return self._tell("heads", z)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, run: Callable[..., Tensor]
    ) -> Tensor:
        self.mask, self.scale = mask, scale
        edits = zip((q, k, v), self.inputs(q, k, v), strict=True)
        z = run(*(given if edit is None else edit for given, edit in edits))
        edited = self._tell("heads", z.transpose(1, 2))
        return z if edited is None else edited.transpose(1, 2)


@contextmanager
def heard(module: nn.Module, ear: Ear, cache: Any, heads: tuple[int, int], batch: int) -> Iterator[list[Listening]]:
    """Listens to every forward of `module` in the block."""
    forward, listenings = module.forward, []
    layer = None if cache is None else lambda: (cache.layers[LAYER].keys, cache.layers[LAYER].values)

    def listened(*args: Any, **kwargs: Any) -> Any:
        with listen(module, ear, layer, *heads, batch) as listening:
            listenings.append(listening)
            return forward(*args, **kwargs)

    module.forward = listened
    try:
        yield listenings
    finally:
        del module.forward


class Bench:
    """A model of the zoo with a padded batch, of which one layer's attention is heard."""

    def __init__(self, family: Family, dtype: torch.dtype = torch.float32, steps: int = 1) -> None:
        self.family = family
        self.model = zoo.build(family.zoo_name, attn=family.implementation, dtype=dtype)
        self.num_heads = self.model.config.num_attention_heads
        self.attention = [item for item in self.model.modules() if type(item).__name__ == family.attention][LAYER]
        length = 8 + steps
        self.ids = torch.cat([zoo.prompt(family.zoo_name, length), zoo.prompt(family.zoo_name, length, seed=1)])
        self.seen = torch.ones_like(self.ids)
        self.seen[1, :PADDING] = 0
        self.cache = DynamicCache()

    @torch.no_grad()
    def run(self, ear: Ear | None, tokens: slice = slice(None), **options: Any) -> Any:
        seen = self.seen[:, : tokens.stop]
        arguments = {"attention_mask": seen, "past_key_values": self.cache, **options}
        if not self.family.zoo_name.startswith(("bloom", "mpt")):
            arguments["position_ids"] = (seen.cumsum(-1) - 1).clamp(min=0)[:, tokens]
        self.projected: list[Tensor] = []
        projection = getattr(self.attention, self.family.projection)
        hook = projection.register_forward_pre_hook(lambda _, args: self.projected.append(args[0]))
        heads = (self.num_heads, self.family.num_kv_heads)
        try:
            if ear is None:
                return self.model(self.ids[:, tokens], **arguments)
            with heard(self.attention, ear, arguments["past_key_values"], heads, 2) as self.listenings:
                return self.model(self.ids[:, tokens], **arguments)
        finally:
            hook.remove()

    @property
    def head_outputs(self) -> Tensor:
        """[B, t, H, dv], out of a hook on the output projection."""
        return self.projected[0].unflatten(-1, (self.num_heads, -1))

    @property
    def cached(self) -> tuple[Tensor, Tensor]:
        return self.cache.layers[LAYER].keys, self.cache.layers[LAYER].values

    def bias(self, rows: int) -> Tensor:
        """What is added to scaled scores, [B, H, rows, n]: ALiBi, and -inf for what may not be seen."""
        keys = self.seen.shape[1]
        query, key = torch.arange(keys - rows, keys)[:, None], torch.arange(keys)
        window = self.family.windows[LAYER % len(self.family.windows)] or keys
        allowed = (key <= query) & (key > query - window) & self.seen[:, None, None].bool()
        alibi = self.family.alibi * slopes(self.num_heads)[:, None, None] * (key - query)
        return alibi.masked_fill(~allowed, -torch.inf)

    def real(self, by_row: Tensor) -> Tensor:
        """The rows [row, ...] of a tensor [B, t, ...] that are no padding."""
        return by_row[self.seen[:, -by_row.shape[1] :].bool()]


def slopes(num_heads: int) -> Tensor:
    """ALiBi's slopes (Press et al. 2022, section 3 and its footnote on head counts that are no power of two)."""
    whole = 2 ** (num_heads.bit_length() - 1)
    first = [2 ** (-8 * (head + 1) / whole) for head in range(whole)]
    between = [2 ** (-4 * (2 * head + 1) / whole) for head in range(num_heads - whole)]
    return torch.tensor(first + between)


def by_hand(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The pattern [B, H, t, n] and the head outputs [B, t, H, dv]."""
    k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], dim=1) for tensor in (k, v))
    pattern = torch.softmax(torch.einsum("bhtd,bhnd->bhtn", q, k) * scale + bias, dim=-1)
    return pattern, torch.einsum("bhtn,bhnd->bthd", pattern, v)


def assert_close(got: Tensor, wanted: Tensor, tolerance: float = 1e-5) -> None:
    assert got.shape == wanted.shape
    assert (got - wanted).abs().max() <= tolerance * wanted.abs().max()


EDITS: dict[str, Callable[[Tensor], Tensor]] = {
    "q": lambda q: q.index_fill(1, torch.tensor([2]), 0.3),
    "k": lambda k: k.index_add(2, torch.tensor([6]), torch.ones_like(k[:, :, :1]) * 0.2),
    "v": lambda v: v.index_fill(2, torch.tensor([5]), 2.0),
    "scores": lambda scores: scores * 0.5,
    "pattern": lambda pattern: pattern.index_fill(1, torch.tensor([1]), 0.1),
    "heads": lambda heads: heads.index_fill(2, torch.tensor([3]), 1.5),
}


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_read_changes_no_bit(family: Family, dtype: torch.dtype) -> None:
    plain = Bench(family, dtype).run(None)
    bench = Bench(family, dtype)
    assert torch.equal(bench.run(Ear()).logits, plain.logits)
    assert [listening.calls for listening in bench.listenings] == [1]
    assert bench.listenings[0].missing is None


@own
@pytest.mark.parametrize("steps", [1, 3])
def test_parts_are_those_of_transformers(family: Family, steps: int) -> None:
    bench, ear = Bench(family, steps=steps), Ear()
    for step in range(steps):
        bench.run(ear, slice(8 + step if step else 0, 9 + step))
    truth = Bench(family, steps=steps).run(None, past_key_values=None, output_attentions=True)
    rows = ear.told["q"].shape[2]
    assert_close(ear.told["pattern"], truth.attentions[LAYER][:, :, -rows:])
    assert_close(ear.told["scores"].softmax(-1), ear.told["pattern"])
    assert torch.equal(bench.head_outputs, ear.told["heads"])
    pattern, heads = by_hand(*(ear.told[part] for part in "qkv"), family.scale(LAYER), bench.bias(rows))
    assert_close(bench.real(ear.told["pattern"].transpose(1, 2)), bench.real(pattern.transpose(1, 2)))
    assert_close(bench.real(ear.told["heads"]), bench.real(heads))


@every
def test_keys_and_values_are_those_of_the_cache(family: Family) -> None:
    bench, ear = Bench(family, steps=2), Ear()
    bench.run(ear, slice(0, 9))
    bench.run(ear, slice(9, 10))
    for part, cached in zip("kv", bench.cached, strict=True):
        assert ear.told[part].shape == (2, family.num_kv_heads, 10, 16)
        repeats = cached.shape[1] // family.num_kv_heads  # falcon's newer architecture caches every repeat
        assert torch.equal(ear.told[part].repeat_interleave(repeats, dim=1), cached)


@pytest.mark.parametrize(
    ("family", "part"),
    [(family, part) for family in OWN for part in PARTS]
    # The listener has the whole of a dispatched attention in its hands: scores and pattern are its own.
    + [(family, part) for family in DISPATCHED for part in ("q", "k", "v", "heads")],
    ids=str,
)
@pytest.mark.parametrize("step", ["prefill", "decode"])
def test_an_edit_is_what_it_is_by_hand(family: Family, part: str, step: str) -> None:
    bench, ear = Bench(family, steps=1 if step == "prefill" else 2), Ear({part: EDITS[part]})
    if step == "decode":
        bench.run(None, slice(0, 9))
    bench.run(ear, slice(0 if step == "prefill" else 9, bench.ids.shape[1]))
    told = {name: EDITS[name](tensor) if name == part else tensor for name, tensor in ear.told.items()}
    q, k, v = told["q"], told["k"], told["v"]
    bias = bench.bias(q.shape[2])
    scale = family.scale(LAYER)
    if part == "scores":
        bias, scale = bias * 0.5, scale * 0.5
    _, heads = by_hand(q, k, v, scale, bias)
    if part == "pattern":
        heads = torch.einsum("bhtn,bhnd->bthd", told["pattern"], v.repeat_interleave(q.shape[1] // v.shape[1], dim=1))
    if part == "heads":
        heads = EDITS["heads"](heads)
    assert_close(bench.real(bench.head_outputs), bench.real(heads))
    for name, edited, cached in zip("kv", (k, v), bench.cached, strict=True):
        assert torch.equal(edited.repeat_interleave(cached.shape[1] // edited.shape[1], dim=1), cached), name


@every
@pytest.mark.parametrize("part", ["q", "k", "v", "heads"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_identity_edit_changes_no_bit(family: Family, part: str, dtype: torch.dtype) -> None:
    plain, edited = Bench(family, dtype), Bench(family, dtype)
    assert torch.equal(plain.run(None).logits, edited.run(Ear({part: torch.clone})).logits)
    assert all(torch.equal(*pair) for pair in zip(plain.cached, edited.cached, strict=True))


@dispatched
@pytest.mark.parametrize("padded", [True, False])
def test_a_dispatched_call_comes_with_its_mask_and_scale(family: Family, padded: bool) -> None:
    bench, ear = Bench(family), Ear()
    if not padded:  # transformers then passes no mask, and is_causal, but for ALiBi
        bench.seen.fill_(1)
    bench.run(ear)
    assert ear.mask is not None
    bias = torch.zeros(ear.mask.shape).masked_fill(~ear.mask, -torch.inf) if ear.mask.dtype == torch.bool else ear.mask
    _, heads = by_hand(*(ear.told[part] for part in "qkv"), ear.scale, bias)
    assert_close(bench.real(bench.head_outputs), bench.real(heads))
    _, wanted = by_hand(*(ear.told[part] for part in "qkv"), family.scale(LAYER), bench.bias(9))
    assert_close(bench.real(heads), bench.real(wanted))


def _bloom(fused: Tensor) -> tuple[Tensor, ...]:
    return tuple(part.transpose(1, 2) for part in fused.unflatten(-1, (4, 3, 16)).unbind(3))


def _falcon_7b(fused: Tensor) -> tuple[Tensor, ...]:
    heads = fused.unflatten(-1, (6, 16)).transpose(1, 2)
    return heads[:, :4], heads[:, 4:5], heads[:, 5:]


def _falcon_40b(fused: Tensor) -> tuple[Tensor, ...]:
    groups = fused.unflatten(-1, (2, 4, 16))  # two queries, a key and a value in each
    return groups[..., :2, :].flatten(2, 3).transpose(1, 2), *(groups[..., at, :].transpose(1, 2) for at in (2, 3))


def _mpt(fused: Tensor) -> tuple[Tensor, ...]:
    return tuple(part.unflatten(-1, (4, 16)).transpose(1, 2) for part in fused.chunk(3, dim=-1))


@pytest.mark.parametrize(
    ("name", "projection", "split", "rotated"),
    [
        ("bloom", "query_key_value", _bloom, False),
        ("falcon/rw", "query_key_value", _bloom, False),
        ("falcon/7b", "query_key_value", _falcon_7b, True),
        ("falcon/40b", "query_key_value", _falcon_40b, True),
        ("mpt", "Wqkv", _mpt, False),
    ],
)
def test_fused_projections_are_taken_apart_as_the_family_does(
    name: str, projection: str, split: Callable[[Tensor], tuple[Tensor, ...]], rotated: bool
) -> None:
    bench, ear = Bench(next(family for family in OWN if family.zoo_name == name)), Ear()
    fused: list[Tensor] = []
    hook = getattr(bench.attention, projection).register_forward_hook(lambda _m, _a, out: fused.append(out))
    bench.run(ear)
    hook.remove()
    for part, wanted in zip("qkv", split(fused[0]), strict=True):
        got = ear.told[part]
        if rotated and part != "v":  # a rotation keeps lengths
            got, wanted = got.norm(dim=-1), wanted.norm(dim=-1)
        assert_close(got, wanted, 1e-6)


def test_alibi_of_a_padded_prompt_is_that_of_the_prompt_alone() -> None:
    bench, ear = Bench(OWN[1]), Ear()
    bench.run(ear)
    alone = Ear()
    ids = bench.ids[1:, PADDING:]
    with torch.no_grad(), heard(bench.attention, alone, None, (6, 6), 1):
        bench.model(ids)
    assert_close(ear.told["pattern"][1:, :, PADDING:, PADDING:], alone.told["pattern"])
    padded, single = ear.told["scores"][1:, :, PADDING:, PADDING:], alone.told["scores"]
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    assert_close(*((item - item[..., :1]).masked_fill(~causal, 0.0) for item in (padded, single)))


def test_generation_is_heard_step_by_step() -> None:
    bench = Bench(OWN[0])
    shapes: list[torch.Size] = []
    ear = Ear({"pattern": lambda pattern: shapes.append(pattern.shape) or pattern})
    with heard(bench.attention, ear, None, (4, 4), 1):
        bench.model.generate(bench.ids[:1], max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert [tuple(shape) for shape in shapes] == [(1, 4, 9, 9), (1, 4, 1, 10), (1, 4, 1, 11)]


def test_gradients_are_those_of_an_edit_in_the_projection() -> None:
    bench = Bench(OWN[0])

    def gradient(steps: Tensor, ear: Ear | None) -> Tensor:
        with torch.enable_grad(), heard(bench.attention, ear or Ear(), None, (4, 4), 2):
            loss = bench.model(bench.ids, use_cache=False).logits.logsumexp(-1).sum()
            return torch.autograd.grad(loss, steps)[0]

    def projected(_module: nn.Module, _args: Any, fused: Tensor) -> Tensor:
        query = torch.nn.functional.pad(steps.transpose(1, 2)[..., None, :], (0, 0, 0, 2))
        return fused + query.flatten(2)

    steps = torch.zeros(2, 4, 9, 16, requires_grad=True)
    got = gradient(steps, Ear({"q": lambda q: q + steps}))
    hook = bench.attention.query_key_value.register_forward_hook(projected)
    wanted = gradient(steps, None)
    hook.remove()
    assert_close(got, wanted, 1e-4)


def test_the_mode_is_gone_after_the_forward() -> None:
    bench, ear = Bench(OWN[0]), Ear()
    bench.run(ear)
    told = dict(ear.told)
    q, k, v = (ear.told[part] for part in "qkv")
    F.softmax(q @ k.mT, dim=-1) @ v
    assert all(ear.told[part] is tensor for part, tensor in told.items())
