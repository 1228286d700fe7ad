"""Rows of many requests at one tap: each has its own, as it would have alone, however they were copied and put back."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import jackfield as jf
from jackfield.engines.vllm import gathering
from jackfield.engines.vllm.gathering import Halves, Tapped, gather, in_groups, write_back
from jackfield.engines.vllm.passing import HeadsChannel, StreamChannel
from jackfield.interleave.channel import WHOLE, Channel, Selection
from jackfield.interleave.site import Port, Site
from tests import zoo
from tests.engines.tiny_tokenizers import words
from tests.engines.vllm import tiny
from tests.engines.vllm.asking import close, nothing_is_left, prompt_of

SITE = Site("layer", Port.OUTPUT)
STREAM = StreamChannel("layer_output", SITE, summed=True)
HALF = StreamChannel("mlp_output", SITE)
SCALED = StreamChannel("attention_output", SITE, summed=True, factor=0.37)
HEADS = HeadsChannel("attention_premix", SITE, 4)
CHANNELS = pytest.mark.parametrize("channel", [STREAM, HALF, SCALED, HEADS], ids=lambda channel: channel.name)
ROWS = (slice(2, 3), slice(3, 8), slice(9, 10), slice(14, 16))  # beside each other, and not; of 17


@dataclass
class Beside:
    """What a tap knows of a worker."""

    awaited: Channel | None
    gathered: tuple[Channel, Tensor] | None = None
    failures: list[Exception] = field(default_factory=list[Exception])


def tapped(rows: Sequence[slice] = ROWS, channel: Channel | None = STREAM) -> tuple[Tapped, list[Halves]]:
    """A batch in bfloat16, of which one half is far larger than the other, and the requests that wait in it."""
    draw = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        x = torch.randn(17, 8, generator=draw).bfloat16()
        residual = (300 * torch.randn(17, 8, generator=draw)).bfloat16()
    batch = Tapped(x, residual, delays=True)
    beside = [cast("Any", SimpleNamespace(worker=Beside(channel))) for _ in rows]
    return batch, [Halves(batch, each, companion) for each, companion in zip(rows, beside, strict=True)]


def copies(waiting: Sequence[Halves]) -> list[Tensor]:
    gather(waiting)
    found = [each.companion.worker.gathered for each in waiting]
    return [each[1] for each in found if each is not None]


@CHANNELS
def test_copies_made_together_are_those_made_alone(channel: StreamChannel) -> None:
    _, waiting = tapped(channel=channel)
    alone = [channel.read(each, cast("Any", None), WHOLE) for each in waiting]
    together = copies(waiting[::-1])[::-1]  # whoever came first
    assert len(together) == len(ROWS)
    for one, other in zip(together, alone, strict=True):
        assert one.shape == other.shape
        assert one.equal(other)


@CHANNELS
def test_a_copy_has_memory_and_a_version_of_its_own(channel: StreamChannel) -> None:
    _, waiting = tapped(channel=channel)
    with torch.inference_mode():  # as vLLM runs
        made = copies(waiting)
        assert not any(each.is_inference() for each in made)
        versions = [each._version for each in made]
        made[1].add_(1)
    assert [each._version - before for each, before in zip(made, versions, strict=True)] == [0, 1, 0, 0]
    assert [each.untyped_storage().nbytes() for each in made] == [each.nbytes for each in made]
    assert all(each.is_contiguous() for each in made)


@CHANNELS
def test_edits_put_back_together_are_those_put_back_alone(channel: StreamChannel) -> None:
    """Of requests beside each other and apart; rows that nobody changed, and those of others, stay to the bit."""
    (one, apart), (other, beside) = tapped(), tapped()
    before = one.x.clone(), cast("Tensor", one.residual).clone()
    with torch.inference_mode():
        for waiting, delays in ((apart, False), (beside, True)):
            waiting[0].tapped.delays = delays
            values = [channel.read(each, cast("Any", None), WHOLE) for each in waiting]
            values[1][:, 2:4] += 1.5  # two rows of five
            values[3][:, 0] = 2.5
            for each, value in zip(waiting[::-1], values[::-1], strict=True):
                channel.write(each, cast("Any", None), WHOLE, value)
        assert other.x.equal(before[0])  # nothing has gone back yet
        write_back(beside[::-1], lambda each: pytest.fail(f"{each} went back alone"))
    assert not any(each.edit for each in beside)
    assert other.x.equal(one.x)
    assert cast("Tensor", other.residual).equal(cast("Tensor", one.residual))
    same = [row for row in range(17) if row not in (5, 6, 14)]
    assert other.x[same].equal(before[0][same])
    assert cast("Tensor", other.residual)[same].equal(before[1][same])
    assert not other.x[[5, 6, 14]].equal(before[0][[5, 6, 14]])
    is_zero = cast("Tensor", other.residual)[[5, 6, 14]].eq(0).all()
    assert is_zero == channel.summed


def test_a_row_that_is_looked_at_again_has_its_edit() -> None:
    _, waiting = tapped()
    mid = StreamChannel("layer_mid", SITE, summed=True)
    with torch.inference_mode():
        value = HALF.read(waiting[1], cast("Any", None), WHOLE)
        value += 1
        HALF.write(waiting[1], cast("Any", None), WHOLE, value)
        seen = mid.read(waiting[1], cast("Any", None), Selection(tokens=(0, 1, 2, 3, 4)))
    assert seen.equal(value + cast("Tensor", waiting[1].residual))


def test_an_edit_of_another_kind_goes_back_alone() -> None:
    _, waiting = tapped()
    with torch.inference_mode():
        STREAM.write(waiting[0], cast("Any", None), WHOLE, torch.ones(1, 1, 8))
    assert waiting[0].edit is None
    assert waiting[0].x.eq(1).all()


def test_where_edits_cannot_go_back_together_each_goes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    _, waiting = tapped()
    for each in waiting:
        STREAM.write(each, cast("Any", None), WHOLE, torch.ones(1, each.rows.stop - each.rows.start, 8).bfloat16())
    monkeypatch.setattr(StreamChannel, "write_together", lambda self, edited: edited[len(edited)])
    with torch.inference_mode():
        write_back(waiting, lambda each: each.settle())
    assert all(each.x.eq(1).all() for each in waiting)


@pytest.mark.parametrize(("rows", "groups"), [(5, [2, 1, 1]), (1, [1, 1, 1, 1]), (8, [3, 1]), (17, [4])])
def test_not_more_is_copied_together_than_there_is_room_for(
    rows: int, groups: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, waiting = tapped([slice(0, 1), slice(1, 4), slice(4, 8), slice(8, 17)])
    monkeypatch.setattr(gathering, "GATHERED_BYTES", rows * 16)
    found = list(in_groups(waiting))
    assert [len(group) for group in found] == groups
    assert [each for group in found for each in group] == waiting


# -- in an engine


PROMPTS = [prompt_of(length, seed) for seed, length in enumerate((12, 3, 7, 20, 5, 1, 9, 4))]


@pytest.fixture(scope="module")
def model() -> Iterator[jf.Model]:
    with tiny.llama() as model:
        yield model


@pytest.fixture(scope="module")
def reference() -> jf.Model:
    return jf.Model(zoo.build("llama", head_dim=32), tokenizer=words(zoo.VOCAB))


def steers(m: jf.Model, t: Any) -> Any:
    streams = []
    for step in t.iter[:]:
        m.layers[1].layer_output[:, -1] += 0.5 + step
        streams.append(m.layers[2].layer_output)
    return streams


def reads(m: jf.Model, t: Any) -> Any:
    return [(m.layers[1].layer_output, m.layers[2].layer_output) for _ in t.iter[:]]


def assigns(m: jf.Model, t: Any) -> Any:
    """And changes what it assigned, at once: that is not the model's any more."""
    streams = []
    for _ in t.iter[:]:
        mine = m.layers[1].layer_output * 1.5
        m.layers[1].layer_output = mine
        mine.zero_()
        streams.append(m.layers[2].layer_output)
    return streams


def edits_twice(m: jf.Model, t: Any) -> Any:
    """At one tap: two values, the second of which is made of the first, and one that is read after it was assigned."""
    found = []
    for _ in t.iter[:]:
        layer = m.layers[1]
        layer.attention_premix[:, -1] *= 3
        found.append(layer.attention_head_results)
        layer.layer_mid = layer.layer_mid * 1.2
        mid = layer.layer_mid
        seen = mid.clone()
        mid[:, 0] += 1
        found += [seen, layer.layer_output]
    return found


def edits_heads(m: jf.Model, t: Any) -> Any:
    found = []
    for _ in t.iter[:]:
        m.layers[1].attention_premix[:, :, 1] *= 2
        found.append(m.layers[1].layer_output)
    return found


def edits_some(m: jf.Model, t: Any) -> Any:
    """Rows by their numbers, on some steps."""
    found = []
    for step in t.iter[:]:
        if step != 1:
            row = m.layers[1].read("layer_output", queries=[-1])
            m.layers[1].write("layer_output", row * 2, queries=[-1])
        found.append(m.layers[2].layer_output)
    return found


def is_elsewhere(m: jf.Model, t: Any) -> Any:
    """It comes by the tap at which the others wait, and waits at another."""
    return [m.layers[2].mlp_output for _ in t.iter[:]]


BLOCKS = (steers, reads, assigns, edits_twice, edits_heads, edits_some, is_elsewhere, steers)


def together(model: jf.Model, blocks: Sequence[Any]) -> list[jf.Result]:
    with model.trace(max_tokens=5, ignore_eos=True) as t:
        for prompt, block in zip(PROMPTS, blocks, strict=True):
            with t.invoke(prompt):
                t.save(found=block(model, t))
    return t.results


@pytest.mark.slow
def test_in_company_each_is_what_it_is_alone_and_elsewhere(model: jf.Model, reference: jf.Model) -> None:
    results = together(model, BLOCKS)
    for prompt, block, result in zip(PROMPTS, BLOCKS, results, strict=True):
        alone = model.run(prompt, block, max_tokens=5, ignore_eos=True)
        other = reference.run(prompt, block, max_tokens=5, ignore_eos=True)
        assert result.token_ids == alone.token_ids == other.token_ids
        close(result.saved["found"], alone.returned)
        for one, another in zip(flat(result.saved["found"]), flat(other.returned), strict=True):
            assert_rows(one, another)
    nothing_is_left(model)


def flat(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else [each for item in found for each in flat(item)]


def assert_rows(one: Tensor, other: Tensor) -> None:
    """Within 1e-4 of each row's size, as docs/vllm.md promises."""
    assert one.shape == other.shape
    assert ((one - other).norm(dim=-1) <= 1e-4 * other.norm(dim=-1)).all()


@pytest.mark.slow
def test_all_who_wait_are_served_together(model: jf.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """On every step, however long the prompts: no copy and no edit is made of one request alone."""
    served: list[int] = []
    for name in ("read_together", "write_together"):
        made = getattr(StreamChannel, name)
        monkeypatch.setattr(
            StreamChannel, name, lambda self, those, made=made: (served.append(len(those)), made(self, those))[1]
        )
    for name in ("read", "_write"):
        monkeypatch.setattr(StreamChannel, name, lambda *_: pytest.fail("one alone"))

    def block(m: jf.Model, t: Any) -> None:
        for _ in t.iter[:]:
            m.layers[1].layer_output[:, -1] += 1

    model.run(PROMPTS, block, max_tokens=12, ignore_eos=True)
    assert max(served) == len(PROMPTS)
    assert sum(served) == 2 * 12 * len(PROMPTS)


def raises_at_the_tap(m: jf.Model, t: Any) -> None:
    for step in t.iter[:]:
        m.layers[1].layer_output[:, -1] += 100
        if step == 2:
            raise KeyError("of its own")


def raises_behind_the_tap(m: jf.Model, t: Any) -> None:
    for step in t.iter[:]:
        row = m.layers[1].layer_output
        row += 100
        m.layers[2].layer_output.sum()
        if step == 1:
            row += 1


def resizes(m: jf.Model, t: Any) -> None:
    row = m.layers[1].layer_output
    row += 1
    row.resize_(1, 2, 2)
    m.layers[2].layer_output.sum()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block", "error", "message"),
    [
        pytest.param(raises_at_the_tap, KeyError, "of its own", id="at the tap"),
        pytest.param(raises_behind_the_tap, jf.OutOfOrder, "after the block had moved past it", id="too late"),
        pytest.param(resizes, jf.EditMismatch, r"changed in place to \(1, 2, 2\)", id="of another shape"),
    ],
)
def test_the_edits_of_others_stand_beside_one_that_fails(
    model: jf.Model, block: Any, error: type[Exception], message: str
) -> None:
    blocks = (steers, assigns, block, edits_twice, block, steers, reads, edits_heads)
    with pytest.raises(ExceptionGroup) as caught, model.trace(max_tokens=5, ignore_eos=True) as t:  # noqa: PT012
        for prompt, each in zip(PROMPTS, blocks, strict=True):
            with t.invoke(prompt):
                t.save(found=each(model, t))
    assert caught.group_contains(error, match=message)
    assert [result.finish_reason == "error" for result in t.results] == [each is block for each in blocks]
    for prompt, each, result in zip(PROMPTS, blocks, t.results, strict=True):
        if each is not block:
            alone = model.run(prompt, each, max_tokens=5, ignore_eos=True)
            assert result.token_ids == alone.token_ids
            close(result.saved["found"], alone.returned)
    nothing_is_left(model)


@pytest.mark.slow
def test_a_saved_row_does_not_keep_the_batch(model: jf.Model) -> None:
    def block(m: jf.Model, t: Any) -> Any:
        sizes = []
        for _ in t.iter[:]:
            row, heads = m.layers[1].attention_premix, m.layers[1].layer_output
            sizes += [(each.untyped_storage().nbytes(), each.nbytes) for each in (row, heads)]
        return sizes

    for result in model.run(PROMPTS, block, max_tokens=4, ignore_eos=True):
        assert all(kept == own for kept, own in result.returned)
        assert len(result.returned) == 8
