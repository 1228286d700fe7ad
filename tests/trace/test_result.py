import torch

from jackfield.trace.result import Result


def shown(saved: object) -> str:
    return repr(
        Result(
            prompt_token_ids=[504, 3575],
            text=" Paris",
            token_ids=[7042],
            finish_reason="length",
            logprobs=None,
            saved=saved,
            returned=None,
            error=None,
        )
    )


def test_a_result_shows_tensors_by_shape_and_not_by_their_numbers() -> None:
    text = shown({"pattern": torch.rand(1, 9, 5, 5), "rows": [torch.zeros(3, dtype=torch.bfloat16)]})
    assert "text=' Paris', token_ids=[7042]" in text
    assert "saved={'pattern': <Tensor (1, 9, 5, 5) float32>, 'rows': [<Tensor (3,) bfloat16>]}" in text


def test_a_long_list_is_cut_short() -> None:
    assert len(shown({"rows": [torch.zeros(3)] * 1000})) < 700
