"""What a caller may give as prompts, and their token ids.

A prompt is text, token ids or chat messages. `parse_prompts` says which, and whether it is one prompt, several, or a
stream of them; `tokenize` makes token ids. Whether these fit a model is `request.admit`'s business.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeGuard, cast, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from jackfield.errors import InvalidRequest

FORMS = "text, token ids (a list of ints) or chat messages (a list of dicts with a 'role')"


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt as text; the tokenizer adds its special tokens."""

    text: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """A prompt as token ids, taken as they are."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chat:
    """A prompt as messages for the tokenizer's chat template."""

    messages: tuple[Mapping[str, object], ...]


Prompt: TypeAlias = Text | Tokens | Chat


@dataclass(frozen=True, slots=True)
class One:
    """One prompt: one result."""

    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Many:
    """A list of prompts: a list of results."""

    prompts: tuple[Prompt, ...]


@dataclass(frozen=True, slots=True)
class Stream:
    """An iterator of prompts, each read and parsed when its turn comes: an iterator of results."""

    prompts: Iterator[Prompt]


@runtime_checkable  # beartype, in tests, asks isinstance
class Tokenizer(Protocol):
    """What is asked of a tokenizer: transformers' have it, and so have vLLM's."""

    chat_template: Any  # a template, several by name, or None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...

    def apply_chat_template(self, conversation: list[Any], **options: Any) -> Any: ...


def parse_prompts(prompts: object) -> One | Many | Stream:
    """One prompt, several, or a stream of them.

    A list of ints or of messages is one prompt; a list of strings, lists or arrays is several; an iterator is a
    stream. InvalidRequest says what else it was.

    >>> parse_prompts(["a", [5, 6]])
    Many(prompts=(Text(text='a'), Tokens(token_ids=(5, 6))))
    """
    if isinstance(prompts, Iterator):
        return Stream(map(parse_prompt, cast("Iterator[object]", prompts)))
    if _is_list(prompts) and prompts and (isinstance(prompts[0], str) or _is_list(prompts[0]) or _is_array(prompts[0])):
        return Many(tuple(_member(i, prompt) for i, prompt in enumerate(prompts)))
    return One(parse_prompt(prompts))


def parse_prompt(prompt: object) -> Prompt:
    """One prompt; InvalidRequest where it is none, or several."""
    if isinstance(prompt, str):
        return Text(prompt)
    if _is_array(prompt):
        return Tokens(_token_ids(_listed(prompt)))
    if not _is_list(prompt):
        raise InvalidRequest(_no_prompt(prompt))
    if not prompt:
        raise InvalidRequest(f"An empty list is no prompt: give {FORMS}.")
    if isinstance(prompt[0], Mapping):
        return Chat(tuple(_message(i, message) for i, message in enumerate(prompt)))
    return Tokens(_token_ids(prompt))


def _is_list(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, list | tuple | range)


def _is_array(value: object) -> TypeGuard[torch.Tensor | npt.NDArray[Any]]:
    return isinstance(value, torch.Tensor | np.ndarray)


def _member(index: int, prompt: object) -> Prompt:
    try:
        return parse_prompt(prompt)
    except InvalidRequest as error:
        raise InvalidRequest(f"Prompt {index}: {error}") from None


def _no_prompt(value: object) -> str:
    found = f"{type(value).__name__} is no prompt: give {FORMS}"
    if isinstance(value, bytes):
        return f"{found}; write prompt.decode() for text."
    if isinstance(value, Mapping):
        return f"{found}; of a tokenizer's output write encoded['input_ids'], one message goes in a list."
    if hasattr(value, "__iter__"):
        return f"{found}; for several prompts write list(prompts), or iter(prompts) for a stream."
    return f"{found}."


def _listed(array: "torch.Tensor | npt.NDArray[Any]") -> Sequence[object]:
    if array.ndim != 1:
        raise InvalidRequest(
            f"An array of shape {list(array.shape)} is no prompt: one prompt has one axis. "
            "Write ids[0] for a batch of one, list(ids) for several without padding."
        )
    return cast("Sequence[object]", array.tolist())


def _token_ids(values: Sequence[object]) -> tuple[int, ...]:
    if set(map(type, values)) == {int}:
        return cast("tuple[int, ...]", tuple(values))
    return tuple(_token_id(i, value) for i, value in enumerate(values))


def _token_id(index: int, value: object) -> int:
    if isinstance(value, bool | torch.Tensor) or not hasattr(value, "__index__"):
        raise InvalidRequest(
            f"Item {index} of the prompt is {value!r} ({type(value).__name__}), not a token id: "
            "token ids are ints; several prompts are all strings, lists or arrays."
        )
    return operator.index(cast("int", value))


def _message(index: int, message: object) -> Mapping[str, object]:
    if not isinstance(message, Mapping) or "role" not in message:
        raise InvalidRequest(
            f"Message {index} is {message!r}: a chat message is a dict such as {{'role': 'user', 'content': 'Hello'}}."
        )
    return cast("Mapping[str, object]", message)


def tokenize(
    prompt: Prompt, tokenizer: Tokenizer | None, chat_template_kwargs: Mapping[str, object] | None = None
) -> tuple[int, ...]:
    """The prompt's token ids.

    Text gets the tokenizer's special tokens. A chat template writes its own, so nothing is added to what it writes;
    it ends with the header of the model's turn unless `chat_template_kwargs` say otherwise. InvalidRequest without a
    tokenizer or a chat template, or for messages that the template refuses.
    """
    if isinstance(prompt, Tokens):
        return prompt.token_ids
    if tokenizer is None:
        raise InvalidRequest("The model came without a tokenizer: give token ids, or the model a tokenizer=.")
    if isinstance(prompt, Text):
        return tuple(tokenizer.encode(prompt.text, add_special_tokens=True))
    return tuple(tokenizer.encode(_written(prompt, tokenizer, chat_template_kwargs or {}), add_special_tokens=False))


def _written(chat: Chat, tokenizer: Tokenizer, options: Mapping[str, object]) -> str:
    for name in ("tokenize", "return_dict", "return_tensors"):
        if name in options:
            raise InvalidRequest(f"chat_template_kwargs {name!r}: prompts are tokenized here, leave it out.")
    if tokenizer.chat_template is None and "chat_template" not in options:
        raise InvalidRequest(
            "The tokenizer has no chat template: give text, or a chat_template in chat_template_kwargs."
        )
    messages = [dict(message) for message in chat.messages]
    try:
        return tokenizer.apply_chat_template(messages, **{"add_generation_prompt": True, **options, "tokenize": False})
    except Exception as error:  # whatever a template, which is a program, raises
        raise InvalidRequest(f"The chat template refuses these messages: {error}") from error
