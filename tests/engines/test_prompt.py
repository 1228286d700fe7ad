"""What counts as a prompt, and its token ids."""

import numpy as np
import pytest
import torch

from jackfield.engines.prompt import Chat, Many, One, Stream, Text, Tokens, parse_prompts, tokenize
from jackfield.errors import InvalidRequest
from tests.engines import tiny_tokenizers

HELLO = {"role": "user", "content": "Hello"}


@pytest.mark.parametrize(
    ("given", "parsed"),
    [
        ("Hello", One(Text("Hello"))),
        ([5, 6], One(Tokens((5, 6)))),
        ((5, np.int64(6)), One(Tokens((5, 6)))),
        (range(3), One(Tokens((0, 1, 2)))),
        (torch.tensor([5, 6]), One(Tokens((5, 6)))),
        (np.array([5, 6]), One(Tokens((5, 6)))),
        ([HELLO], One(Chat((HELLO,)))),
        (["a", "b"], Many((Text("a"), Text("b")))),
        (["a"], Many((Text("a"),))),
        ([[5, 6], [7]], Many((Tokens((5, 6)), Tokens((7,))))),
        ([[HELLO], "a"], Many((Chat((HELLO,)), Text("a")))),
        ([torch.tensor([5]), [6]], Many((Tokens((5,)), Tokens((6,))))),
    ],
)
def test_one_prompt_or_several(given: object, parsed: One | Many) -> None:
    assert parse_prompts(given) == parsed


def test_an_iterator_is_read_when_its_turn_comes() -> None:
    read: list[object] = []

    def prompts():
        for prompt in ("a", [5]):
            read.append(prompt)
            yield prompt

    stream = parse_prompts(prompts())
    assert isinstance(stream, Stream)
    assert read == []
    assert next(stream.prompts) == Text("a")
    assert read == ["a"]
    assert next(stream.prompts) == Tokens((5,))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "NoneType is no prompt: give text, token ids"),
        (7, "int is no prompt"),
        (b"bytes", r"write prompt\.decode\(\)"),
        (HELLO, "dict is no prompt.*one message goes in a list"),
        ({"input_ids": [5]}, r"write encoded\['input_ids'\]"),
        ({"a", "b"}, r"write list\(prompts\)"),
        ([], "An empty list is no prompt"),
        ([5, 6.0], r"Item 1 of the prompt is 6.0 \(float\), not a token id"),
        ([5, True], "Item 1 of the prompt is True"),
        ([5, "a"], "Item 1 of the prompt is 'a'.*several prompts are all strings"),
        (["a", 5], "Prompt 1: int is no prompt"),
        (["a", []], "Prompt 1: An empty list"),
        ([HELLO, {"content": "?"}], "Message 1 is .*a chat message is a dict such as"),
        ([HELLO, "a"], "Message 1 is 'a'"),
        (torch.tensor([[5, 6]]), r"shape \[1, 2\] is no prompt.*Write ids\[0\]"),
        (torch.tensor([0.5]), "Item 0 of the prompt is 0.5"),
    ],
)
def test_what_is_no_prompt_is_refused_with_what_to_write(given: object, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        parse_prompts(given)


def test_text_gets_the_special_tokens_and_ids_none() -> None:
    tokenizer = tiny_tokenizers.words()
    assert tokenize(Text("Hello t9"), tokenizer) == (1, 5, 9)
    assert tokenize(Tokens((5, 9)), tokenizer) == (5, 9)


def test_a_chat_has_one_bos_and_ends_with_the_models_turn() -> None:
    tokenizer = tiny_tokenizers.words(chat_template=tiny_tokenizers.CHAT.replace("<s>", "<s> "))
    chat = Chat((HELLO,))
    assert tokenize(chat, tokenizer) == (1, 3, 5, 4)
    assert tokenize(chat, tokenizer, {"add_generation_prompt": False}) == (1, 3, 5)


@pytest.mark.parametrize(
    ("template", "options", "message"),
    [
        (None, {}, "no chat template: give text"),
        ("{{ raise_exception('roles must alternate') }}", {}, "refuses these messages: roles must alternate"),
        ("{{ 1 / 0 }}", {}, "refuses these messages: division by zero"),
        ("x", {"tokenize": False}, "'tokenize'.*leave it out"),
    ],
)
def test_a_chat_that_cannot_be_written_is_refused(
    template: str | None, options: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        tokenize(Chat((HELLO,)), tiny_tokenizers.words(chat_template=template), options)


def test_text_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="without a tokenizer: give token ids"):
        tokenize(Text("Hello"), None)
