"""Names carried over from other libraries are answered with ours."""

import pytest

import jackfield as jf
from jackfield.values.synonyms import SYNONYMS, suggestion
from tests import zoo

NAMES = [value.name for value in jf.values()]


def test_every_value_has_a_name_elsewhere_and_none_is_one_of_ours() -> None:
    assert set(SYNONYMS.values()) | {"input_ids"} == set(NAMES)
    assert not set(SYNONYMS) & set(NAMES)


def test_no_name_stands_for_two_values() -> None:
    from jackfield.values import synonyms

    listed = [name for names in synonyms._THEIRS.values() for name in names.split()]
    assert sorted(listed) == sorted(SYNONYMS)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("attention_pattern", "attention_probabilities"),
        ("attn_weights", "attention_probabilities"),
        ("hook_pattern", "attention_probabilities"),
        ("blocks.3.attn.hook_pattern", "attention_probabilities"),
        ("hook_resid_post", "layer_output"),
        ("resid_mid", "layer_mid"),
        ("mlp_out", "mlp_output"),
        ("hook_z", "attention_head_outputs"),
        ("hook_q", "attention_queries_prerotary"),
        ("rot_q", "attention_queries"),
        ("hidden_states", "layer_output"),
    ],
)
def test_what_others_call_a_value_is_suggested_by_our_name(theirs: str, ours: str) -> None:
    assert suggestion(theirs, NAMES) == f" Did you mean {ours!r}?"


@pytest.mark.parametrize(
    ("name", "text"), [("layer_outptu", "Did you mean 'layer_output'"), ("frobnicate", "^$"), ("", "^$")]
)
def test_other_names_are_answered_by_what_is_near(name: str, text: str) -> None:
    import re

    assert re.search(text, suggestion(name, NAMES))


def test_a_model_and_its_parts_say_where_the_value_is() -> None:
    model = jf.Model(zoo.build("llama"))
    layer = model.layers[1]
    ours = "Did you mean 'attention_probabilities'"
    for part in (layer, layer.attention):
        with pytest.raises(jf.UnknownValue, match=ours):
            _ = part.attention_pattern
    with pytest.raises(jf.UnknownValue, match=r"Did you mean model\.layers\[i\]\.attention_probabilities\?"):
        _ = model.attention_pattern
    with pytest.raises(jf.UnknownValue, match=r"Did you mean model\.token_embeddings\?"):
        _ = layer.hook_embed
    with pytest.raises(jf.UnknownValue, match=ours):
        layer.attn_weights = 0
    with pytest.raises(jf.UnknownValue, match=ours):
        model.run([3, 4], lambda m, t: m.layers[1].read("attn.hook_pattern"))
