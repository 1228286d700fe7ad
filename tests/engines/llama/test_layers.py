"""The native Llama against transformers' eager one: every value, the cache, edits, gradients."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from jackfield.engines.inline import OPERANDS
from jackfield.engines.llama import checkpoint, layers
from jackfield.engines.llama.layers import Attention, ModelArgs, Transformer, precompute_freqs_cis
from jackfield.errors import InvalidRequest, RequestTooLong
from tests import zoo
from tests.engines.llama.native import CASES, LAYER, PART_OF, ROOT, Recorder, both, errors
from tests.reference.compare import TOKEN_AXIS, TOLERANCE, row_error
from tests.reference.record import record

PROMPT_TOKENS, STEPS = 12, 4
CLOSE = TOLERANCE[torch.float32]
Patch = pytest.MonkeyPatch


def tiny(**over: object) -> Transformer:
    torch.manual_seed(0)
    sizes = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 61, "multiple_of": 16}
    return Transformer(ModelArgs(**{**sizes, "max_batch_size": 3, "max_seq_len": 24, **over})).requires_grad_(False)


def tokens(batch: int = 1, length: int = 9) -> Tensor:
    return torch.randint(3, 61, (batch, length), generator=torch.Generator().manual_seed(1))


# Against transformers.


@pytest.mark.parametrize("case", CASES)
def test_every_value_is_that_of_transformers(case: str, tmp_path: Path) -> None:
    theirs, ours = both(case, tmp_path)
    steps = record(theirs, CASES[case][0], zoo.prompt("llama", PROMPT_TOKENS), STEPS)
    found = errors(ours, steps)
    assert found.keys() == {*ROOT, *LAYER}
    assert max(found.values()) <= CLOSE, found


@pytest.mark.parametrize("case", ["grouped heads", "free head width", "llama 3 scaling"])
@torch.no_grad()
def test_every_value_of_a_prompt_in_two_parts_is_that_of_transformers(case: str, tmp_path: Path) -> None:
    theirs, ours = both(case, tmp_path)
    (step,) = record(theirs, CASES[case][0], zoo.prompt("llama", PROMPT_TOKENS), 1)
    ours(step.input_ids[:, :5])
    recorder = Recorder()
    ours.listen(recorder)
    ours(step.input_ids[:, 5:], 5)
    for (name, layer), got in recorder.values.items():
        want, axis = step.get(name, layer), TOKEN_AXIS.get(name, 2)  # of scores and pattern: the queries'
        rows = min(want.shape[axis], got.shape[axis])  # the reference has the logits of the last row
        got, want = (x.narrow(axis, x.shape[axis] - rows, rows) for x in (got, want))
        assert row_error(got, want, name) <= CLOSE, (name, layer)


def tiled_heads(patch: Patch) -> None:
    patch.setattr(layers, "repeat_kv", lambda x, n_rep: x.repeat(1, 1, n_rep, 1))


def heads_tiled_in_the_fused_operation(patch: Patch) -> None:
    fused = F.scaled_dot_product_attention

    def tiled(q: Tensor, k: Tensor, v: Tensor, *mask: Tensor, is_causal: bool, enable_gqa: bool) -> Tensor:
        n_rep = q.shape[1] // k.shape[1]
        return fused(q, k.repeat(1, n_rep, 1, 1), v.repeat(1, n_rep, 1, 1), *mask, is_causal=is_causal)

    patch.setattr(F, "scaled_dot_product_attention", tiled)


def scale_of_the_model_width(patch: Patch) -> None:
    patch.setattr(F, "scaled_dot_product_attention", partial(F.scaled_dot_product_attention, scale=16**-0.5))


def unpermuted_queries_and_keys(patch: Patch) -> None:
    patch.setattr(checkpoint, "interleaved", lambda x: x)


def decoding_turned_one_position_late(patch: Patch) -> None:
    right = Transformer._positions

    def late(self: Transformer, stream: Tensor, start_pos: int, padding: Tensor | None) -> tuple[Tensor, object]:
        turns, mask = right(self, stream, start_pos, padding)
        return (self.freqs_cis[start_pos + 1 : start_pos + 2] if start_pos else turns), mask

    patch.setattr(Transformer, "_positions", late)


def frequencies_left_as_they_are(patch: Patch) -> None:
    patch.setattr(layers, "_scaled", lambda frequencies, scaling: frequencies)


@pytest.mark.parametrize(
    ("mistake", "case", "spoilt"),
    [
        (tiled_heads, "eight heads", "attention_scores"),
        (heads_tiled_in_the_fused_operation, "eight heads", "logits"),
        (scale_of_the_model_width, "free head width", "logits"),
        (unpermuted_queries_and_keys, "grouped heads", "attention_queries"),
        (decoding_turned_one_position_late, "grouped heads", "attention_scores"),
        (frequencies_left_as_they_are, "llama 3 scaling", "attention_scores"),
        (frequencies_left_as_they_are, "linear scaling", "attention_scores"),
    ],
)
def test_a_mistake_shows(
    mistake: Callable[[Patch], None], case: str, spoilt: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    mistake(monkeypatch)
    theirs, ours = both(case, tmp_path)
    steps = record(theirs, CASES[case][0], zoo.prompt("llama", PROMPT_TOKENS), STEPS)
    assert errors(ours, steps)[spoilt] > 10 * CLOSE


def test_announces_values_in_the_order_of_the_contract() -> None:
    model, recorder = tiny(), Recorder()
    model.listen(recorder)
    model(tokens())
    per_layer = [(name, layer) for layer in range(2) for name in LAYER]
    expected = [("token_embeddings", None), *per_layer, ("final_norm_output", None), ("logits", None)]
    operands = {*OPERANDS, *PART_OF}  # these come together
    assert [name for name in recorder.order if name[0] not in operands] == [n for n in expected if n[0] not in operands]
    at = [place for place, name in enumerate(recorder.order) if name[0] in operands and name[1] == 0]
    assert recorder.order[at[0] - 1][0] == "attention_norm_output"
    assert recorder.order[at[-1] + 1][0] == "attention_scores"


# The cache.


@pytest.mark.parametrize("cut", [1, 4, 8])
def test_a_prompt_in_two_parts_is_the_prompt(cut: int) -> None:
    model, ids = tiny(), tokens(batch=2)
    whole = model(ids)
    parts = torch.cat([model(ids[:, :cut], 0), model(ids[:, cut:], cut)], 1)
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-5)


def test_the_cache_has_its_place_before_the_first_token() -> None:
    attention = Attention(ModelArgs(dim=32, n_heads=4, n_kv_heads=2, max_batch_size=3, max_seq_len=24))
    assert attention.cache_k.shape == attention.cache_v.shape == (3, 24, 2, 8)
    assert (attention.n_local_heads, attention.n_local_kv_heads, attention.n_rep) == (4, 2, 2)
    place = attention.cache_k.data_ptr()
    with torch.no_grad():
        attention(torch.randn(2, 5, 32), 0, precompute_freqs_cis(8, 5), None)
    assert attention.cache_k.data_ptr() == place
    written = torch.zeros(3, 24, dtype=torch.bool)
    written[:2, :5] = True
    assert torch.equal(attention.cache_k.flatten(2).any(-1), written)


def test_a_request_longer_than_the_cache_is_refused() -> None:
    with pytest.raises(RequestTooLong, match=r"25 tokens do not fit the cache: max_seq_len is 24"):
        tiny()(tokens(length=20)[:, :5], 20)


def test_a_batch_larger_than_the_cache_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"4 requests do not fit the cache: max_batch_size is 3"):
        tiny()(tokens(batch=4))


def test_an_additive_mask_hides_what_it_says() -> None:
    model, mask = tiny(), torch.zeros(5, 5)
    mask[:, 2] = -torch.inf
    block, turns = model.layers[0], precompute_freqs_cis(8, 5)
    x, y = torch.randn(1, 5, 32), torch.randn(32)
    before = block(x, 0, turns, mask)
    x[:, 2] += y
    changed = (block(x, 0, turns, mask) - before).abs().amax(-1)[0] > 1e-6
    assert changed.tolist() == [False, False, True, False, False]


# Reading and editing.


@torch.no_grad()
def test_reading_everything_changes_no_bit() -> None:
    model, ids = tiny(), tokens(batch=2)
    quiet = [model(ids), model(ids[:, :1], 9)]
    model.listen(Recorder())
    assert all(torch.equal(a, b) for a, b in zip(quiet, [model(ids), model(ids[:, :1], 9)], strict=True))


@pytest.mark.parametrize("name", [*ROOT, *LAYER])
@torch.no_grad()
def test_an_identity_edit_changes_no_bit(name: str) -> None:
    model, ids = tiny(), tokens(batch=2)
    quiet = model(ids)
    model.listen(Recorder((), **{name: torch.clone}))
    assert torch.equal(model(ids), quiet)


@pytest.mark.parametrize("name", [name for name in (*ROOT, *LAYER) if "prerotary" not in name])
@torch.no_grad()
def test_an_edit_reaches_the_logits(name: str) -> None:
    model, ids = tiny(), tokens()
    quiet = model(ids)
    model.listen(Recorder((), **{name: lambda value: value + value.roll(1, -1)}))
    assert not torch.allclose(model(ids), quiet, atol=1e-4)


@torch.no_grad()
def test_an_edited_pattern_is_what_the_head_writes() -> None:
    model, ids = tiny(), tokens()
    first = Recorder(("attention_values", "attention_head_outputs"))
    model.listen(first)
    model(ids)

    def only_the_first_key(pattern: Tensor) -> Tensor:
        edited = pattern.clone()
        edited[:, 3, -1] = F.one_hot(torch.tensor(0), pattern.shape[-1]).float()
        return edited

    second = Recorder(("attention_head_outputs",), attention_probabilities=only_the_first_key)
    model.listen(second)
    model(ids)
    was, now = (r.values["attention_head_outputs", 0] for r in (first, second))
    torch.testing.assert_close(now[0, -1, 3], first.values["attention_values", 0][0, 1, 0])
    now[0, -1, 3] = was[0, -1, 3]
    assert torch.equal(now, was)


@torch.no_grad()
def test_what_is_masked_stays_masked_and_a_blind_row_writes_zeros() -> None:
    model = tiny(n_layers=1)

    def future_only(scores: Tensor) -> Tensor:
        return torch.where(torch.isneginf(scores), 5.0, -torch.inf)

    recorder = Recorder(("attention_head_outputs", "attention_probabilities"), attention_scores=future_only)
    model.listen(recorder)
    assert model(tokens()).isfinite().all()
    assert not recorder.values["attention_probabilities", 0].any()
    assert not recorder.values["attention_head_outputs", 0].any()


@torch.no_grad()
def test_an_edited_cache_is_read_at_the_next_step() -> None:
    model, ids = tiny(), tokens()
    quiet = [model(ids), model(ids[:, :1], 9)][1]
    model.listen(Recorder((), attention_cached_values=lambda value: 2 * value))
    model(ids)
    model.listen(None)
    assert not torch.allclose(model(ids[:, :1], 9), quiet, atol=1e-4)


def test_in_the_open_is_the_fused_operation() -> None:
    model, ids = tiny(), tokens(batch=2)
    with torch.no_grad():
        fused = model(ids)
    torch.testing.assert_close(model(ids), fused, rtol=0, atol=1e-5)


# Gradients.


def put_first(model: Transformer, name: str, change: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Changes the first `name` of the next run alone; the list then holds what it was changed to."""
    put: list[Tensor] = []

    def edit(value: Tensor) -> Tensor:
        if put:
            return value
        put.append(change(value.detach()))
        return put[0]

    model.listen(Recorder((), **{name: edit}))
    return put


@pytest.mark.parametrize("start_pos", [0, 4])
@pytest.mark.parametrize("name", ["token_embeddings", "attention_keys", "attention_probabilities", "mlp_activations"])
def test_gradients_are_finite_differences(name: str, start_pos: int) -> None:
    model, ids = tiny().double(), tokens()
    model(ids[:, : start_pos or 1])

    def logit(change: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        put = put_first(model, name, change)
        return model(ids[:, start_pos:], start_pos)[0, -1, 7], put[0]

    loss, value = logit(lambda value: value.clone().requires_grad_())
    (gradient,) = torch.autograd.grad(loss, value)
    direction = torch.randn(value.shape, generator=torch.Generator().manual_seed(3)).to(value)
    above, below = (logit(lambda value, step=step: value + step * direction)[0] for step in (1e-3, -1e-3))
    torch.testing.assert_close((gradient * direction).sum().double(), (above - below) / 2e-3, rtol=2e-3, atol=1e-5)


def test_a_graph_survives_the_next_step() -> None:
    model, ids = tiny().requires_grad_(True), tokens()
    first = model(ids)
    second = model(ids[:, :1], 9)
    (first.sum() + second.sum()).backward()
    assert model.layers[0].attention.wk.weight.grad.abs().sum() > 0


def test_a_prompt_from_the_start_is_a_graph_of_its_own() -> None:
    """Kills: an empty part of the last prompt's rows, by which its graph is a part of the next one's."""
    model, ids, found = tiny().requires_grad_(True), tokens(), list[Tensor]()
    for _ in range(3):
        model.zero_grad()
        model(ids).logsumexp(-1).sum().backward()
        weight = model.layers[0].attention.wk.weight
        assert weight.grad is not None
        found.append(weight.grad.clone())
    assert found[0].any()
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_a_cache_that_is_replaced_is_the_one_that_is_attended_to(before: bool, gradients: bool) -> None:
    def after_edit(*, replaces: bool, grad_before: bool, grad_after: bool) -> Tensor:
        model, ids = tiny().requires_grad_(True), tokens()
        attention = model.layers[0].attention
        with torch.set_grad_enabled(grad_before):
            model(ids[:, :5])
        if replaces:
            attention.cache_k = attention.cache_k.clone()
            attention.cache_v = attention.cache_v.clone()
            attention.cache_k[:, 2], attention.cache_v[:, 3] = 0.5, -9.0
        with torch.set_grad_enabled(grad_after):
            return model(ids[:, 5:], 5).detach()

    expected = after_edit(replaces=True, grad_before=False, grad_after=False)
    assert row_error(after_edit(replaces=False, grad_before=False, grad_after=False), expected, "logits") > 0.01
    assert row_error(after_edit(replaces=True, grad_before=before, grad_after=gradients), expected, "logits") < CLOSE


@pytest.mark.parametrize("batch", [1, 2])
def test_a_graph_is_none_of_what_is_in_the_cache_now(batch: int) -> None:
    """Kills: keys and values of an earlier request, or of a smaller batch, that the graph has kept."""
    model, other = tiny(), (tokens(batch) + 7) % 61
    model(tokens())
    with torch.no_grad():
        expected = model(torch.cat([other, other[:, :1]], 1))[:, -1:]
        model(other)
    torch.testing.assert_close(model(other[:, :1], 9).detach(), expected)


def test_what_is_written_to_the_cache_by_hand_is_read_with_gradients_too() -> None:
    model = tiny()
    model(tokens())
    for layer in model.layers:
        layer.attention.cache_v[:, :9] *= -1
    found = model(tokens()[:, :1], 9).detach()
    with torch.no_grad():
        torch.testing.assert_close(found, model(tokens()[:, :1], 9))


# Precision.


@torch.no_grad()
def test_bfloat16_keeps_its_norms_turns_and_softmax_in_float32() -> None:
    wide, narrow = tiny(), tiny().bfloat16()
    recorder = Recorder(("attention_scores", "attention_probabilities", "layer_output"))
    narrow.listen(recorder)
    logits = narrow(tokens())
    dtypes = {name: value.dtype for (name, _), value in recorder.values.items()}
    assert dtypes["attention_scores"] == dtypes["attention_probabilities"] == torch.float32
    assert dtypes["layer_output"] == logits.dtype == narrow.layers[0].attention.cache_k.dtype == torch.bfloat16
    assert narrow.freqs_cis.dtype == torch.complex64
    error = (logits.float() - wide(tokens())).abs().amax(-1) / wide(tokens()).abs().amax(-1)
    assert error.max() < 5e-2
