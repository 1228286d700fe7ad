"""Sampling row by row: the reference is `generate` with the same arguments, for one prompt, and plain formulas."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from jackfield.engines.request import Sampling
from jackfield.engines.transformers.decode import Row, decode
from tests import zoo
from tests.engines import tiny_tokenizers
from tests.engines.transformers.test_decode import row, with_logits

MANY = 2000


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """A llama that has opinions: the tiny ones' logits are so even that a lost temperature would not show."""
    sure = zoo.build("llama", fresh=True)
    sure.get_output_embeddings().weight.data.mul_(10)
    return sure


def frequencies(model: PreTrainedModel, prompt: Row) -> Float[Tensor, " vocab"]:
    """How often each token comes first."""
    completions = decode(model, None, [seeded(prompt, seed) for seed in range(MANY)])
    return torch.bincount(torch.tensor([c.token_ids[0] for c in completions]), minlength=zoo.VOCAB) / MANY


def seeded(each: Row, seed: int) -> Row:
    return Row(each.prompt_token_ids, dataclasses.replace(each.sampling, seed=seed))


def largest(logits: Tensor, count: int) -> Tensor:
    return logits.masked_fill(logits < logits.topk(count).values[-1], -torch.inf)


def likelier_than(logits: Tensor, share: float) -> Tensor:
    probabilities = logits.softmax(-1)
    return logits.masked_fill(probabilities < share * probabilities.max(), -torch.inf)


def nucleus(logits: Tensor, mass: float) -> Tensor:
    """The likeliest tokens up to the one that completes the mass."""
    probabilities, order = logits.softmax(-1).sort(descending=True)
    before = probabilities.cumsum(-1) - probabilities
    return logits.index_fill(-1, order[before >= mass], -torch.inf)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "warp"),
    [
        ({"temperature": 1.0}, lambda x: x),
        ({"temperature": 0.5}, lambda x: x / 0.5),
        ({"temperature": 1.0, "top_k": 3}, lambda x: largest(x, 3)),
        ({"temperature": 1.0, "top_p": 0.6}, lambda x: nucleus(x, 0.6)),
        ({"temperature": 1.0, "min_p": 0.3}, lambda x: likelier_than(x, 0.3)),
        ({"temperature": 2.0, "top_k": 5, "top_p": 0.6}, lambda x: nucleus(largest(x / 2, 5), 0.6)),
    ],
    ids=["temperature 1", "temperature 0.5", "top_k", "top_p", "min_p", "all in order"],
)
def test_tokens_come_as_often_as_their_probability_says(
    model: PreTrainedModel, arguments: dict[str, object], warp: Callable[[Tensor], Tensor]
) -> None:
    prompt = row("llama", 4, **arguments)
    _, logits = with_logits(model, [row("llama", 4)])
    expected = warp(logits[0, 0]).softmax(-1)
    spread = 5 * (expected * (1 - expected) / MANY).sqrt()
    assert ((frequencies(model, prompt) - expected).abs() <= spread + 1e-9).all()


def test_a_seeded_row_draws_the_same_in_any_company(model: PreTrainedModel) -> None:
    chosen = row("llama", 9, max_tokens=8, temperature=1.5, top_p=0.9, seed=11)
    others = [row("llama", n, max_tokens=8, temperature=2.0) for n in (14, 3)]
    alone = decode(model, None, [chosen])
    assert decode(model, None, [others[0], chosen, others[1]])[1] == alone[0]
    assert decode(model, None, [seeded(chosen, 12)]) != alone


def test_without_a_seed_torchs_own_decides(model: PreTrainedModel) -> None:
    free = [row("llama", 9, max_tokens=8, temperature=1.5)]

    def drawn(seed: int):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return decode(model, None, free)

    assert drawn(0) == drawn(0)
    assert drawn(0) != drawn(1)


def test_a_greedy_row_is_untouched_by_a_sampled_neighbour(model: PreTrainedModel) -> None:
    greedy = row("llama", 9, max_tokens=6)
    sampled = row("llama", 9, max_tokens=6, temperature=2.0, seed=1)
    assert decode(model, None, [sampled, greedy])[1] == decode(model, None, [greedy])[0]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"repetition_penalty": 1.7}, {"repetition_penalty": 1.7}),
        (
            {"repetition_penalty": 1.7, "logit_bias": {0: 30.0, 50: 20.0}},
            {"repetition_penalty": 1.7, "sequence_bias": [[[0], 30.0], [[50], 20.0]]},
        ),
        ({"logit_bias": {17: 3.0, 90: 2.5}}, {"sequence_bias": [[[17], 3.0], [[90], 2.5]]}),
        ({"bad_words": ["t43", "t126 t83"]}, {"bad_words_ids": [[43], [126, 83]]}),
    ],
)
def test_greedy_shifts_are_those_of_generate(
    model: PreTrainedModel, ours: dict[str, object], theirs: dict[str, object]
) -> None:
    """Beside a longer neighbour, so that padding that counted would show."""
    tokenizer = tiny_tokenizers.words()
    prompt = row("llama", 9, max_tokens=12, **ours)
    ids = torch.tensor([prompt.prompt_token_ids])
    expected = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=None, **theirs
    )
    _, completion = decode(model, tokenizer, [row("llama", 14, max_tokens=12), prompt])
    assert completion.token_ids == expected[0, 9:].tolist()
    assert completion.token_ids != decode(model, tokenizer, [row("llama", 9, max_tokens=12)])[0].token_ids


def test_frequency_and_presence_penalties_count_what_was_generated(model: PreTrainedModel) -> None:
    """After a prompt that ends with what the model likes to write, beside a longer one."""
    liked = decode(model, None, [row("llama", 9, max_tokens=12)])[0]
    ids = tuple(liked.prompt_token_ids + liked.token_ids)
    arguments = {"max_tokens": 12, "ignore_eos": True, "frequency_penalty": 0.7, "presence_penalty": 0.4}
    rows = [row("llama", 40, max_tokens=12), Row(ids, Sampling.parse(**arguments))]
    (_, completion), logits = with_logits(model, rows)
    seen = torch.zeros(zoo.VOCAB)
    for step, token in enumerate(completion.token_ids):
        assert token == int((logits[1, step] - 0.7 * seen - 0.4 * (seen > 0)).argmax())
        seen[token] += 1
    assert (logits[1].argmax(-1) != torch.tensor(completion.token_ids)).any()
    assert set(completion.token_ids) & set(liked.token_ids)


def test_allowed_tokens_are_the_only_ones(model: PreTrainedModel) -> None:
    (completion,), logits = with_logits(model, [row("llama", 9, max_tokens=4, allowed_token_ids=[40, 41, 99])])
    allowed = torch.tensor([40, 41, 99])
    assert completion.token_ids == allowed[logits[0][:, allowed].argmax(-1)].tolist()


def test_log_probabilities_are_the_models_own_before_any_argument_shifts_them(model: PreTrainedModel) -> None:
    tokenizer = tiny_tokenizers.words()
    prompt = row("llama", 9, max_tokens=3, logprobs=2, temperature=3.0, seed=4, logit_bias={50: 9.0})
    (completion,), logits = with_logits(model, [prompt])
    expected = logits[0].double().log_softmax(-1)
    (completion,) = decode(model, tokenizer, [prompt])
    assert completion.logprobs is not None
    for step, (token, listed) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
        assert next(iter(listed)) == token
        assert set(listed) == {token, *expected[step].topk(2).indices.tolist()}
        for each, noted in listed.items():
            assert noted.logprob == pytest.approx(float(expected[step, each]), abs=1e-5)
            assert noted.rank == int((expected[step] >= expected[step, each]).sum())
            assert noted.decoded_token == tokenizer.decode([each])


@pytest.mark.parametrize(("count", "listed"), [(0, 1), (-1, 128)])
def test_log_probabilities_of_the_token_alone_or_of_all(model: PreTrainedModel, count: int, listed: int) -> None:
    (completion,) = decode(model, None, [row("llama", 9, max_tokens=3, logprobs=count)])
    assert completion.logprobs is not None
    assert [len(each) for each in completion.logprobs] == [listed] * 3


def test_log_probabilities_end_where_the_row_does(model: PreTrainedModel) -> None:
    rows = [row("llama", 9, max_tokens=2, logprobs=1), row("llama", 9, max_tokens=5)]
    completion, plain = decode(model, None, rows)
    assert completion.logprobs is not None
    assert len(completion.logprobs) == 2
    assert plain.logprobs is None


def test_an_edited_logit_that_is_no_number_ends_nothing(model: PreTrainedModel) -> None:
    """An edit can write NaN; torch.multinomial would raise for the whole batch."""

    def spoil(module, args, output):
        output.logits[0] = torch.nan

    rows = [row("llama", 9, max_tokens=3, temperature=1.0), row("llama", 9, max_tokens=3, temperature=1.0, seed=3)]
    expected = decode(model, None, rows)[1]
    hook = model.register_forward_hook(spoil)
    try:
        assert decode(model, None, rows)[1] == expected
    finally:
        hook.remove()
