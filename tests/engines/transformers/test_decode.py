"""Batches through `generate`: padding, ends, and what must not leak in."""

import warnings

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from jackfield.engines.request import Completion, FinishReason, Sampling
from jackfield.engines.transformers.decode import Layout, Row, decode, end_of_sequence, together
from jackfield.errors import InvalidRequest
from tests import zoo
from tests.engines import tiny_tokenizers

LENGTHS = (14, 9, 3)
ABSOLUTE = ("gpt2", "gpt_neo", "opt")  # learned positions: padding that counted would move every one of them
OTHERS = ("bloom", "mpt", "falcon/rw", "falcon/40b", "llama", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_next")


def row(name: str, length: int, **arguments: object) -> Row:
    ids = zoo.prompt(name, length, seed=length)[0].tolist()
    return Row(tuple(ids), Sampling.parse(**{"ignore_eos": True, **arguments}))


def with_logits(model: PreTrainedModel, rows: list[Row]) -> tuple[list[Completion], Tensor]:
    """Completions, and the logits of every step [row, step, vocab]."""
    steps: list[Tensor] = []
    hook = model.register_forward_hook(lambda module, args, output: steps.append(output.logits[:, -1]))
    try:
        completions = decode(model, None, rows)
    finally:
        hook.remove()
    return completions, torch.stack(steps, dim=1)


class Watcher:
    """A control that notes what it is asked and ends rows as it is told to: {(row, nth question): reason}."""

    def __init__(self, ends: dict[tuple[int, int], FinishReason] | None = None, abort_at: int = 0) -> None:
        self.layouts: list[Layout] = []
        self.asked: list[int] = []
        self.told: list[int] = []
        self.steps = 0
        self._ends = ends or {}
        self._abort_at = abort_at

    def begin(self, layout: Layout) -> None:
        self.layouts.append(layout)

    def finished(self, row: int) -> FinishReason | None:
        self.asked.append(row)
        return self._ends.get((row, self.asked.count(row)))

    def ended(self, row: int) -> None:
        self.told.append(row)

    def should_abort(self) -> bool:
        self.steps += 1
        return self.steps == self._abort_at


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", [*ABSOLUTE, *OTHERS])
def test_a_padded_batch_equals_its_members_alone(name: str) -> None:
    model = zoo.build(name)
    rows = [row(name, length, max_tokens=4) for length in LENGTHS]
    completions, logits = with_logits(model, rows)
    for i, each in enumerate(rows):
        (alone,), expected = with_logits(model, [each])
        assert completions[i] == alone
        assert (logits[i] - expected[0]).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", ABSOLUTE)
def test_columns_taken_for_positions_fail_that_test(name: str) -> None:
    model = zoo.build(name)
    rows = [row(name, length) for length in LENGTHS]

    def by_column(module, args, kwargs):
        return args, {**kwargs, "position_ids": torch.arange(kwargs["input_ids"].shape[1])[None]}

    hook = model.register_forward_pre_hook(by_column, with_kwargs=True)
    try:
        _, shifted = with_logits(model, rows)
    finally:
        hook.remove()
    _, logits = with_logits(model, rows)
    assert torch.equal(shifted[0], logits[0])
    assert (shifted[1:] - logits[1:]).abs().max() > 1e-3 * logits.abs().max()


def test_greedy_tokens_are_the_models_own_argmax() -> None:
    model = zoo.build("llama")
    (completion,), logits = with_logits(model, [row("llama", 9, max_tokens=6)])
    assert completion.token_ids == logits[0].argmax(-1).tolist()
    ids = torch.tensor([completion.prompt_token_ids + completion.token_ids[:-1]])
    with torch.no_grad():
        whole = model(ids).logits[0, 8:]
    assert completion.token_ids == whole.argmax(-1).tolist()


def test_pad_tokens_inside_a_prompt_are_tokens() -> None:
    """`generate` without a mask takes them for padding."""
    model = zoo.build("llama")
    ids = (0, 0, 17, 0, 23)
    _, logits = with_logits(model, [Row(ids, Sampling.parse())])
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[:, -1]
        guessed = model(torch.tensor([ids]), attention_mask=(torch.tensor([ids]) != 0).long()).logits[:, -1]
    assert (logits[:, 0] - expected).abs().max() <= 1e-5
    assert (guessed - expected).abs().max() > 1e-2


def test_the_models_own_generation_defaults_stay_out() -> None:
    model = zoo.build("llama", fresh=True)
    expected = decode(model, None, [row("llama", 9, max_tokens=6)])
    leaky = model.generation_config
    leaky.do_sample, leaky.temperature, leaky.top_k = True, 5.0, 3
    leaky.repetition_penalty, leaky.no_repeat_ngram_size, leaky.max_length, leaky.min_length = 9.0, 1, 11, 10
    leaky.suppress_tokens = expected[0].token_ids
    leaky.forced_eos_token_id, leaky.exponential_decay_length_penalty = 2, (1, 9.0)
    before = leaky.to_dict()
    assert decode(model, None, [row("llama", 9, max_tokens=6)]) == expected
    assert model.generation_config is leaky
    assert leaky.to_dict() == before
    plain = model.generate(torch.tensor([expected[0].prompt_token_ids]), max_new_tokens=6, do_sample=False)
    assert plain[0, 9:].tolist() != expected[0].token_ids, "these defaults change nothing: the test shows nothing"


def test_nothing_warns(caplog: pytest.LogCaptureFixture) -> None:
    model = zoo.build("llama")
    logger = logging.get_logger("transformers")
    logger.addHandler(caplog.handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            rows = [row("llama", n, max_tokens=n, temperature=1.0, logprobs=1) for n in LENGTHS]
            decode(model, None, [*rows, row("llama", 250, max_tokens=6), row("llama", 5, ignore_eos=False)])
    finally:
        logger.removeHandler(caplog.handler)
    assert caplog.messages == []


def test_every_row_has_an_end_of_its_own() -> None:
    model = zoo.build("llama")
    free = decode(model, None, [row("llama", 9, max_tokens=8)])[0].token_ids
    fifth = free[4]
    assert fifth not in free[:4]
    rows = [
        row("llama", 9, max_tokens=8, stop_token_ids=[fifth]),
        row("llama", 9, max_tokens=3),
        row("llama", 9, max_tokens=8, stop_token_ids=[fifth], min_tokens=8),
        row("llama", 14, max_tokens=8),
    ]
    ended, short, longer, other = decode(model, None, rows)
    assert (ended.token_ids, ended.finish_reason) == (free[:5], "stop")
    assert (short.token_ids, short.finish_reason) == (free[:3], "length")
    assert fifth not in longer.token_ids
    assert len(longer.token_ids) == len(other.token_ids) == 8


def test_generation_ends_when_the_last_row_does() -> None:
    model = zoo.build("llama")
    free = decode(model, None, [row("llama", 9, max_tokens=8)])[0].token_ids
    steps: list[int] = []
    hook = model.register_forward_hook(lambda *_: steps.append(1))
    try:
        rows = [row("llama", 9, max_tokens=200, stop_token_ids=free[4:5]), row("llama", 3, max_tokens=6)]
        decode(model, None, rows)
    finally:
        hook.remove()
    assert len(steps) == 6


def test_the_end_of_sequence_ids_are_the_models_and_the_tokenizers() -> None:
    model = zoo.build("llama", fresh=True)
    assert end_of_sequence(model, None) == {2}
    model.generation_config.eos_token_id = [7, 9]
    assert end_of_sequence(model, tiny_tokenizers.words()) == {2, 7, 9}
    model.generation_config.eos_token_id = None
    assert end_of_sequence(model, None) == frozenset()
    assert decode(model, None, [row("llama", 9, max_tokens=3, ignore_eos=False)])[0].finish_reason == "length"


@pytest.mark.parametrize("together_with", [0, 1], ids=["alone", "in company"])
def test_the_models_own_end_ends_a_row(together_with: int) -> None:
    model = zoo.build("llama", fresh=True)
    free = decode(model, None, [row("llama", 9, max_tokens=8)])[0].token_ids
    model.generation_config.eos_token_id = [free[4], 127]
    rows = [row("llama", 9, max_tokens=8, ignore_eos=False)] + [row("llama", 3, max_tokens=8)] * together_with
    completion = decode(model, None, rows)[0]
    assert (completion.token_ids, completion.finish_reason) == (free[:5], "stop")


def test_stop_strings_end_a_row() -> None:
    model, tokenizer = zoo.build("llama"), tiny_tokenizers.words()
    free = decode(model, tokenizer, [row("llama", 9, max_tokens=8)])[0]
    stop = f"t{free.token_ids[4]}"
    completion, other = decode(
        model, tokenizer, [row("llama", 9, max_tokens=8, stop=stop), row("llama", 3, max_tokens=8)]
    )
    assert completion.token_ids == free.token_ids[:5]
    assert completion.text == free.text[: free.text.index(stop)]
    assert len(other.token_ids) == 8


def test_the_watcher_is_told_the_layout_and_asked_after_every_step() -> None:
    model = zoo.build("llama")
    watcher = Watcher()
    decode(model, None, [row("llama", 9, max_tokens=3), row("llama", 3, max_tokens=2)], watcher)
    assert watcher.layouts == [Layout(rows=(0, 1), pads=(0, 6))]
    assert watcher.asked == [0, 1, 0, 1, 0]
    assert watcher.told == [1, 0]


def test_a_row_that_the_watcher_ends_keeps_its_token_and_forces_none() -> None:
    model = zoo.build("llama")
    rows = [row("llama", 9, max_tokens=6), row("llama", 3, max_tokens=6), row("llama", 5, max_tokens=1)]
    free = decode(model, None, rows)
    ends: dict[tuple[int, int], FinishReason] = {(0, 2): "stopped", (1, 1): "error", (2, 1): "stopped"}
    watcher = Watcher(ends)
    stopped, failed, last = decode(model, None, rows, watcher)
    assert (stopped.token_ids, stopped.finish_reason) == (free[0].token_ids[:2], "stopped")
    assert (failed.token_ids, failed.finish_reason) == (free[1].token_ids[:1], "error")
    assert (last.token_ids, last.finish_reason) == (free[2].token_ids, "stopped")
    assert watcher.steps == 2
    assert watcher.told == [1, 2, 0]


def test_an_abort_ends_every_row_that_goes_on() -> None:
    rows = [row("llama", 9, max_tokens=6), row("llama", 3, max_tokens=1)]
    watcher = Watcher(abort_at=2)
    completions = decode(zoo.build("llama"), None, rows, watcher)
    assert watcher.told == [1, 0]
    assert [(c.finish_reason, len(c.token_ids)) for c in completions] == [("abort", 2), ("length", 1)]


def test_an_interrupt_passes_through_and_leaves_the_model_as_it_was() -> None:
    class Interrupter(Watcher):
        def finished(self, row: int) -> FinishReason | None:
            raise KeyboardInterrupt

    model = zoo.build("llama")
    free = decode(model, None, [row("llama", 9, max_tokens=3)])
    with pytest.raises(KeyboardInterrupt):
        decode(model, None, [row("llama", 9, max_tokens=3)], Interrupter())
    assert decode(model, None, [row("llama", 9, max_tokens=3)]) == free


def test_rows_whose_padding_would_run_past_the_context_run_apart() -> None:
    """gpt2 here holds 32: beside 20 new tokens, a prompt of 28 would go on as padding to position 46."""
    model = zoo.build("gpt2", n_positions=32)
    rows = [row("gpt2", 28, max_tokens=4), row("gpt2", 3, max_tokens=20), row("gpt2", 4, max_tokens=4)]
    assert together(model, rows) == [[0], [1, 2]]
    watcher = Watcher()
    completions = decode(model, None, rows, watcher)
    assert [layout.rows for layout in watcher.layouts] == [(0,), (1, 2)]
    assert completions[2] == decode(model, None, rows[2:])[0]
    assert [len(c.token_ids) for c in completions] == [4, 20, 4]


def test_models_in_which_neighbours_would_meet_run_rows_apart() -> None:
    rows = [row("llama", n) for n in (9, 9, 3)]
    assert together(zoo.build("llama"), rows) == [[0, 1, 2]]
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert together(zoo.build("llama", rope_parameters=dynamic), rows) == [[0], [1], [2]]
    assert together(zoo.build("llama4_text"), rows) == [[0, 1], [2]]


def test_gradients_reach_the_parameters_on_request() -> None:
    model = zoo.build("llama", fresh=True).requires_grad_(True)
    kept: list[Tensor] = []
    hook = model.register_forward_hook(lambda module, args, output: kept.append(output.logits))
    try:
        decode(model, None, [row("llama", 9, max_tokens=2)])
        assert not kept[0].requires_grad
        kept.clear()
        decode(model, None, [row("llama", 9, max_tokens=2, temperature=1.0)], gradients=True)
    finally:
        hook.remove()
    assert kept[1].requires_grad
    kept[1].sum().backward()
    assert model.get_input_embeddings().weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt_logprobs": 1}, "prompt_logprobs=1: the transformers engine cannot honour it"),
        ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens=False"),
        ({"stop": "x"}, "stop needs a tokenizer"),
        ({"bad_words": ["x"]}, "bad_words needs a tokenizer"),
    ],
)
def test_what_cannot_be_honoured_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        decode(zoo.build("llama"), None, [row("llama", 3, **arguments)])
