"""When a request ends, and its text."""

import pytest

from jackfield.engines.progress import Detokenizer, Progress
from jackfield.engines.request import Sampling
from tests.engines import tiny_tokenizers

BYTES = tiny_tokenizers.byte_level()
EOS = frozenset({2})


def ids(text: str) -> list[int]:
    return BYTES.encode(text)


def run(token_ids: list[int], prompt: str = "p", **arguments: object) -> Progress:
    progress = Progress(ids(prompt), Sampling.parse(**{"max_tokens": 50, **arguments}), EOS, BYTES)
    for token_id in token_ids:
        if progress.finish_reason is None:
            progress.push(token_id)
    return progress


def test_the_text_is_the_same_however_the_tokens_come() -> None:
    text = "naïve → 日本語 🙂 ok"
    one_by_one = Detokenizer(BYTES, ids("é"), skip_special_tokens=True)
    pieces = [one_by_one.feed([token]) for token in ids(text)]
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    assert Detokenizer(BYTES, ids("é"), skip_special_tokens=True).feed(ids(text)) == text


def test_the_first_half_of_a_character_is_no_text_yet() -> None:
    assert run(ids("é")[:1], max_tokens=1).completion().text == ""


def test_a_character_begun_in_the_prompt_is_shown_when_it_is_whole() -> None:
    first, second = ids("é")
    assert Detokenizer(BYTES, [*ids("ab"), first], skip_special_tokens=True).feed([second, *ids("x")]) == "éx"


def test_a_leading_space_survives_a_tokenizer_that_drops_it() -> None:
    tokenizer = tiny_tokenizers.metaspace("the", "capital", "Paris")
    assert tokenizer.decode([3]) == "Paris"
    assert Detokenizer(tokenizer, [1, 2], skip_special_tokens=True).feed([3]) == " Paris"


def test_max_tokens_ends_with_length() -> None:
    completion = run(ids("abcdef"), max_tokens=3).completion()
    assert (completion.text, completion.finish_reason) == ("abc", "length")


@pytest.mark.parametrize(
    ("arguments", "reason", "count", "text"),
    [
        ({}, "stop", 2, "a"),
        ({"include_stop_str_in_output": True}, "stop", 2, "a" + BYTES.decode([2])),
        ({"ignore_eos": True}, "length", 3, "a" + BYTES.decode([2]) + "b"),
        ({"min_tokens": 2}, "stop", 2, "a"),
        ({"min_tokens": 3}, "length", 3, "a" + BYTES.decode([2]) + "b"),
        ({"stop_token_ids": ids("a")}, "stop", 1, ""),
        ({"ignore_eos": True, "stop_token_ids": [2]}, "stop", 2, "a"),
    ],
)
def test_stop_tokens(arguments: dict[str, object], reason: str, count: int, text: str) -> None:
    completion = run([*ids("a"), 2, *ids("b")], max_tokens=3, **arguments).completion()
    assert (completion.finish_reason, len(completion.token_ids), completion.text) == (reason, count, text)


def test_a_stop_token_at_max_tokens_is_a_stop() -> None:
    assert run([*ids("a"), 2], max_tokens=2).finish_reason == "stop"


@pytest.mark.parametrize(
    ("arguments", "count", "text"),
    [
        ({"stop": "cd"}, 4, "ab"),
        ({"stop": "cd", "include_stop_str_in_output": True}, 4, "abcd"),
        ({"stop": ["zz", "d", "bcd"]}, 4, "a"),
        ({"stop": "a"}, 1, ""),
        ({"stop": "cd", "min_tokens": 5}, 7, "abcdefg"),
        ({"stop": "gone"}, 7, "abcdefg"),
    ],
)
def test_stop_strings_are_cut_from_the_text_and_not_from_the_tokens(
    arguments: dict[str, object], count: int, text: str
) -> None:
    completion = run(ids("abcdefg"), max_tokens=7, **arguments).completion()
    assert (len(completion.token_ids), completion.text) == (count, text)


def test_a_stop_string_does_not_reach_into_the_prompt() -> None:
    assert run(ids("bc"), prompt="a", stop="ab", max_tokens=2).finish_reason == "length"


def test_a_verdict_from_outside_wins_and_keeps_the_token() -> None:
    progress = Progress(ids("p"), Sampling.parse(max_tokens=5, stop="x"), EOS, BYTES)
    progress.push(ids("a")[0], "stopped")
    assert progress.completion().token_ids == ids("a")
    assert (progress.completion().text, progress.finish_reason) == ("a", "stopped")


def test_no_text_without_a_tokenizer_or_on_request() -> None:
    progress = Progress([5], Sampling.parse(), EOS, None)
    progress.push(7)
    assert progress.completion().text == ""
    assert run(ids("abc"), max_tokens=3, detokenize=False).completion().text == ""
