"""Attention modules written by hand, in the ways that people write them; and what listening refuses.

Truth: the tensors that the module itself keeps.
"""

import math
from collections.abc import Callable
from typing import Any

import greenlet
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from jackfield.engines.transformers.function_mode import ListeningMode
from jackfield.engines.transformers.listening import Listening, listen
from jackfield.errors import EditMismatch, Unavailable
from tests.engines.transformers.test_listening import EDITS, Ear, assert_close

BATCH, HEADS, GROUPS, WIDTH, TOKENS = 2, 4, 2, 8, 7

Product = Callable[[Tensor, Tensor], Tensor]


def _folded(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, *tensor.shape[-2:])


def _baddbmm(q: Tensor, k: Tensor) -> Tensor:
    unused = torch.empty(BATCH * HEADS, q.shape[2], k.shape[2])
    return torch.baddbmm(unused, _folded(q), _folded(k).mT, beta=0, alpha=1.0).view(BATCH, HEADS, *unused.shape[1:])


def _grouped(q: Tensor, k: Tensor) -> Tensor:
    groups = q.unflatten(1, (GROUPS, HEADS // GROUPS))
    return (groups @ k[:, :: HEADS // GROUPS, None].mT).flatten(1, 2)


SCORES: dict[str, Product] = {
    "matmul": lambda q, k: torch.matmul(q, k.transpose(-1, -2)),
    "method": lambda q, k: q.matmul(k.mT),
    "operator": lambda q, k: q @ k.permute(0, 1, 3, 2),
    "keyword": lambda q, k: torch.matmul(q, other=k.mT),
    "bmm": lambda q, k: torch.bmm(_folded(q), _folded(k).mT),
    "bmm method": lambda q, k: _folded(q).bmm(_folded(k).transpose(1, 2)),
    "baddbmm": _baddbmm,
    "einsum": lambda q, k: torch.einsum("bhtd,bhnd->bhtn", q, k),
    "einsum, tokens first": lambda q, k: torch.einsum("bthd, bnhd -> bhtn", q.transpose(1, 2), k.transpose(1, 2)),
    "einsum, keys first": lambda q, k: torch.einsum("bhnd,bhtd->bhtn", [k, q]),
    "einsum, grouped": lambda q, k: torch.einsum(
        "bgrtd,bgnd->bgrtn", q.unflatten(1, (GROUPS, -1)), k[:, :: HEADS // GROUPS]
    ).flatten(1, 2),
    "grouped": _grouped,
}
SOFTMAXES: dict[str, Callable[[Tensor], Tensor]] = {
    "F.softmax": lambda scores: F.softmax(scores, dim=-1),
    "torch.softmax": lambda scores: torch.softmax(scores, -1),
    "torch.softmax, by keyword": lambda scores: torch.softmax(input=scores, dim=scores.ndim - 1),
    "method": lambda scores: scores.softmax(dim=-1),
    "nn.Softmax": nn.Softmax(dim=-1),
    "in float32": lambda scores: F.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype),
}
BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda scores: scores,
    "in place": lambda scores: scores.mul_(0.7).masked_fill_(torch.ones(TOKENS, TOKENS).triu(1).bool(), -torch.inf),
    "in place, through a view": lambda scores: (scores.view(-1)[::3].mul_(0.5), scores)[1],
    "an item set": lambda scores: (scores.__setitem__((..., 3), -1.0), scores)[1],
    "where": lambda scores: torch.where(scores > 0, scores, torch.tensor(-0.5)),
    "soft cap": lambda scores: 2.0 * torch.tanh(scores / 2.0),
    "less its maximum": lambda scores: scores - scores.amax(-1, keepdim=True),
    "through halves": lambda scores: torch.cat(scores.chunk(2, dim=-1), dim=-1),
    "mixed over heads": lambda scores: torch.einsum("bgtn,gh->bhtn", scores.view(BATCH, HEADS, TOKENS, -1), MIXING),
}
MIXING = torch.eye(HEADS) + 0.3
AFTER: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda pattern: pattern,
    "masked in place": lambda pattern: pattern.masked_fill_(torch.eye(TOKENS).bool(), 0.0),
    "dropout": lambda pattern: F.dropout(pattern, 0.5, training=False),
    "head mask": lambda pattern: pattern * torch.tensor(0.5),
}
OUTPUTS: dict[str, Product] = {
    "operator": lambda pattern, v: pattern @ v,
    "bmm": lambda pattern, v: torch.bmm(_folded(pattern), _folded(v)),
    "einsum": lambda pattern, v: torch.einsum("bhtn,bhnd->bthd", pattern, v).transpose(1, 2),
    "einsum, values first": lambda pattern, v: torch.einsum("bnhd,bhtn->bhtd", v.transpose(1, 2), pattern),
}


class Attention(nn.Module):
    """Attention over given queries and grouped keys and values; keeps what it computes in `seen`."""

    def __init__(self, **ways: str) -> None:
        super().__init__()
        self.ways = {"scores": "matmul", "softmax": "F.softmax", "between": "nothing", "after": "nothing"} | ways
        self.seen: dict[str, Tensor] = {}

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        scores = BETWEEN[self.ways["between"]](SCORES[self.ways["scores"]](q, k) / math.sqrt(WIDTH))
        self.seen["scores"] = scores.clone().view(BATCH, HEADS, TOKENS, -1)
        pattern = SOFTMAXES[self.ways["softmax"]](scores)
        self.seen["pattern"] = pattern.clone().view(BATCH, HEADS, TOKENS, -1)
        pattern = AFTER[self.ways["after"]](pattern).view(BATCH, HEADS, TOKENS, -1)
        heads = OUTPUTS[self.ways.get("output", "operator")](pattern, v).view(BATCH, HEADS, TOKENS, -1)
        return heads.transpose(1, 2).contiguous()


@pytest.fixture
def qkv() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(BATCH, HEADS, TOKENS, WIDTH, generator=generator)
    k, v = torch.randn(2, BATCH, GROUPS, TOKENS, WIDTH, generator=generator).unbind()
    return q, k, v


def hear(module: nn.Module, ear: Any, *args: Tensor, cache: Any = None) -> tuple[Tensor, Listening]:
    with listen(module, ear, cache, HEADS, GROUPS, BATCH) as listening:
        return module(*args), listening


WAYS = [
    *({"scores": way} for way in SCORES),
    *({"softmax": way} for way in SOFTMAXES),
    *({"between": way} for way in BETWEEN),
    *({"after": way} for way in AFTER),
    *({"output": way} for way in OUTPUTS),
]
ways = pytest.mark.parametrize("way", WAYS, ids=lambda way: ": ".join(*way.items()))


@ways
def test_every_way_is_heard(way: dict[str, str], qkv: tuple[Tensor, ...]) -> None:
    module, ear = Attention(**way), Ear()
    plain = module(*qkv)
    result, listening = hear(module, ear, *qkv)
    assert listening.missing is None
    assert listening.calls == 1
    assert torch.equal(result, plain)
    for part, wanted in {**dict(zip("qkv", qkv, strict=True)), **module.seen, "heads": plain}.items():
        assert torch.equal(ear.told[part], wanted), part


@ways
@pytest.mark.parametrize("part", ["q", "k", "v"])
def test_edited_inputs_are_as_good_as_given_ones(way: dict[str, str], part: str, qkv: tuple[Tensor, ...]) -> None:
    module = Attention(**way)
    wanted = module(*(EDITS[name](given) if name == part else given for name, given in zip("qkv", qkv, strict=True)))
    result, _ = hear(module, Ear({part: EDITS[part]}), *qkv)
    assert_close(result, wanted)


@ways
def test_edited_scores_and_pattern_go_on_the_module_s_own_way(way: dict[str, str], qkv: tuple[Tensor, ...]) -> None:
    module, ear = Attention(**way), Ear({"scores": EDITS["scores"], "pattern": EDITS["pattern"]})
    result, _ = hear(module, ear, *qkv)
    assert_close(ear.told["pattern"], (ear.told["scores"] * 0.5).softmax(-1))
    pattern = AFTER[module.ways["after"]](EDITS["pattern"](ear.told["pattern"]))
    assert_close(result, (pattern @ qkv[2].repeat_interleave(2, dim=1)).transpose(1, 2))


def test_a_replacement_is_not_written_over(qkv: tuple[Tensor, ...]) -> None:
    """The module masks its pattern in place: its own, or a copy of the listener's."""
    mine = torch.full((BATCH, HEADS, TOKENS, TOKENS), 0.5)
    hear(Attention(after="masked in place"), Ear({"pattern": lambda _: mine}), *qkv)
    assert torch.equal(mine, torch.full_like(mine, 0.5))


class Dispatching(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.repeat = not options.get("enable_gqa", False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.repeat:
            k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
        return F.scaled_dot_product_attention(q, k, v, **self.options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.1},
        {"enable_gqa": True},
        {"attn_mask": torch.eye(TOKENS).bool().logical_not()},
        {"attn_mask": torch.linspace(-3, 3, HEADS * TOKENS * TOKENS).view(HEADS, TOKENS, TOKENS)},
    ],
    ids=lambda options: ", ".join(options) or "plain",
)
@pytest.mark.parametrize("part", [None, "q", "k", "v"])
def test_a_module_that_dispatches_itself(options: dict[str, Any], part: str | None, qkv: tuple[Tensor, ...]) -> None:
    module, ear = Dispatching(**options), Ear({} if part is None else {part: EDITS[part]})
    wanted = module(*(EDITS[name](given) if name == part else given for name, given in zip("qkv", qkv, strict=True)))
    result, listening = hear(module, ear, *qkv)
    assert torch.equal(result, wanted)
    assert listening.missing is None
    q, k, v = (EDITS[name](ear.told[name]) if name == part else ear.told[name] for name in "qkv")
    scores = q @ k.repeat_interleave(2, dim=1).mT * ear.scale
    if ear.mask is not None:
        assert ear.mask.ndim == 4
        scores = scores.masked_fill(~ear.mask, -torch.inf) if ear.mask.dtype == torch.bool else scores + ear.mask
    assert_close(scores.softmax(-1) @ v.repeat_interleave(2, dim=1), wanted)


# -- the cache


def test_a_window_s_cache_takes_its_own_rows(qkv: tuple[Tensor, ...]) -> None:
    keys, values = qkv[1][:, :, -3:].clone(), qkv[2][:, :, -3:].clone()
    ear = Ear({"k": lambda k: k + 1.0})
    hear(Attention(), ear, *qkv, cache=lambda: (keys, values))
    assert torch.equal(keys, qkv[1][:, :, -3:] + 1.0)
    assert torch.equal(values, qkv[2][:, :, -3:])


def test_this_forward_sees_what_the_cache_s_dtype_keeps(qkv: tuple[Tensor, ...]) -> None:
    q, k, v = (tensor.bfloat16().float() for tensor in qkv)
    cache = (k.bfloat16(), v.bfloat16())
    result, _ = hear(Attention(), Ear({"v": lambda v: v + 1e-3}), q, k, v, cache=lambda: cache)
    assert torch.equal(cache[1], (v + 1e-3).bfloat16())
    assert_close(result, Attention()(q, k, cache[1].float()))


def test_keys_that_are_not_the_cache_s_cannot_be_edited(qkv: tuple[Tensor, ...]) -> None:
    cache = (qkv[1] + 1.0, qkv[2].clone())
    hear(Attention(), Ear(), *qkv, cache=lambda: cache)
    hear(Attention(), Ear({"v": EDITS["v"]}), *qkv, cache=lambda: cache)
    with pytest.raises(Unavailable, match=r"keys of Attention cannot be edited: .* not those in its cache"):
        hear(Attention(), Ear({"k": EDITS["k"]}), *qkv, cache=lambda: cache)


# -- what is refused


class Told(nn.Module):
    """A module out of one function."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(*args)


def _repeat(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)


def _tiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(q @ k.repeat(1, 2, 1, 1).mT, dim=-1) @ v.repeat(1, 2, 1, 1)


def _disentangled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = _repeat(k, v)
    return F.softmax(q @ k.mT + (q * 2) @ k.flip(2).mT, dim=-1) @ v


def _with_sink(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = _repeat(k, v)
    return F.softmax(torch.cat([q @ k.mT, torch.zeros(BATCH, HEADS, TOKENS, 1)], dim=-1), dim=-1)[..., :-1] @ v


def _turned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = _repeat(k, v)
    return F.softmax((q @ k.mT).transpose(-1, -2), dim=-1) @ v


def _buffered(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = _repeat(k, v)
    buffer = torch.zeros(BATCH, HEADS, TOKENS, TOKENS)
    buffer += q @ k.mT
    return F.softmax(buffer, dim=-1) @ v


def _twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = _repeat(k, v)
    pattern = F.softmax(q @ k.mT, dim=-1)
    return pattern @ v + pattern @ k


def _subtracted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = _repeat(k, v)
    return (F.softmax(q @ k.mT, dim=-1) - 0.5 * F.softmax(k @ q.mT, dim=-1)) @ v


def _exponents(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = _repeat(k, v)
    weights = torch.exp(q @ k.mT)
    return weights / weights.sum(-1, keepdim=True) @ v


def _over_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = _repeat(k, v)
    return F.softmax(q @ k.mT, dim=-2) @ v


def _dispatched_tiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))


@pytest.mark.parametrize(
    ("function", "reason", "calls"),
    [
        (_tiled, "differ within a group", 0),
        (_dispatched_tiled, "differ within a group", 0),
        (_disentangled, "several products", 0),
        (_with_sink, "its softmax has shape", 0),
        (_turned, "moves the axes of its scores", 0),
        (_buffered, "buffer that already exists", 0),
        (_subtracted, "several patterns", 0),
        (_exponents, "no product of queries and keys, softmax", 0),
        (_over_rows, "no product of queries and keys, softmax", 0),
        (_twice, "more than once", 1),
    ],
)
def test_what_is_not_understood_goes_on_untouched_and_says_why(
    function: Callable[..., Tensor], reason: str, calls: int, qkv: tuple[Tensor, ...]
) -> None:
    result, listening = hear(Told(function), Ear(), *qkv)
    assert torch.equal(result, function(*qkv))
    assert listening.calls == calls
    assert listening.missing is not None
    assert "Told cannot be read" in listening.missing
    assert reason in listening.missing


def test_half_an_edit_is_refused(qkv: tuple[Tensor, ...]) -> None:
    with pytest.raises(Unavailable, match="cannot be edited: it multiplies one pattern with values more than once"):
        hear(Told(_twice), Ear({"pattern": EDITS["pattern"]}), *qkv)


def test_two_attentions_in_one_forward_are_heard_in_turn(qkv: tuple[Tensor, ...]) -> None:
    attention = Attention()
    module = Told(lambda q, k, v: attention(q, k, v) + attention(q * 2, k, v))
    heads: list[Tensor] = []
    _, listening = hear(module, Ear({"heads": lambda z: heads.append(z) or z}), *qkv)
    assert listening.calls == 2
    assert torch.equal(heads[1], attention(qkv[0] * 2, *qkv[1:]))


@pytest.mark.parametrize("part", ["q", "k", "v", "scores", "pattern", "heads"])
def test_an_edit_of_another_shape_is_refused(part: str, qkv: tuple[Tensor, ...]) -> None:
    with pytest.raises(EditMismatch, match=r"edited with shape \(1, .*they have shape \(2, "):
        hear(Attention(), Ear({part: lambda tensor: tensor[:1]}), *qkv)
    assert _get_current_function_mode_stack() == []


# -- whose calls are heard


def test_an_error_passes_and_the_mode_is_gone(qkv: tuple[Tensor, ...]) -> None:
    def fail(_: Tensor) -> Tensor:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        hear(Attention(), Ear({"pattern": fail}), *qkv)
    assert _get_current_function_mode_stack() == []


def test_a_callback_s_own_attention_is_not_heard(qkv: tuple[Tensor, ...]) -> None:
    own: list[list[Any]] = []

    def attend(scores: Tensor) -> Tensor:
        own.append(_get_current_function_mode_stack())
        Attention()(*qkv)
        return scores

    with listen(nn.Identity(), outer := Ear(), None, HEADS, GROUPS, BATCH) as outside:
        _, listening = hear(Attention(), Ear({"scores": attend}), *qkv)
    assert own == [[]]
    assert listening.calls == 1
    assert (outside.calls, outer.told) == (0, {})


def test_a_block_beside_the_forward_is_not_heard(qkv: tuple[Tensor, ...]) -> None:
    """It runs in its own greenlet, resumed from a hook inside the forward, and parks inside a mode of its own."""
    beside: list[Tensor] = []

    def block() -> None:
        with torch.device("cpu"):
            while True:
                beside.append(Attention()(*qkv))
                greenlet.getcurrent().parent.switch()

    worker, attention = greenlet.greenlet(block), Attention()
    resumed = Told(lambda *args: (worker.switch(), attention(*args))[1])
    result, listening = hear(resumed, ear := Ear(), *qkv)
    assert listening.calls == 1
    assert torch.equal(result, beside[0])
    assert torch.equal(ear.told["heads"], result)
    assert not any(isinstance(mode, ListeningMode) for mode in _get_current_function_mode_stack())
    worker.throw()
    assert _get_current_function_mode_stack() == []


@pytest.mark.parametrize("part", ["q", "scores", "pattern", "heads"])
def test_modes_are_as_they_were_when_a_greenlet_comes_back(part: str, qkv: tuple[Tensor, ...]) -> None:
    """The callback's greenlet waits inside a mode of its own, which is not to reach the model's forward."""

    def block() -> None:
        mode = torch.device("meta")
        mode.__enter__()
        greenlet.getcurrent().parent.switch()

    worker = greenlet.greenlet(block)
    devices: list[str] = []
    module = Told(lambda *args: (Attention()(*args), devices.append(torch.zeros(1).device.type))[0])
    result, listening = hear(module, Ear({part: lambda tensor: (worker.switch(), tensor)[1]}), *qkv)
    assert devices == ["cpu"]
    assert_close(result, Attention()(*qkv))
    assert listening.calls == 1
    assert _get_current_function_mode_stack() == []
