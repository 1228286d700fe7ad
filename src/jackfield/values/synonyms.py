"""What other libraries call our values, so that a name carried over from one of them is answered with ours.

Suggestions only: no synonym is ever served. Sources: TransformerLens 4.3's hook points, nnterp 1.3's accessors, and
the arguments and outputs of transformers' own forwards.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

from jackfield.errors import near
from jackfield.values.root import RootValues
from jackfield.values.value import declared

_THEIRS: Final = {
    "token_embeddings": "embed embeddings embedding inputs_embeds input_embeddings",
    "final_norm_output": "final_norm final_layer_norm ln_final ln_f",
    "logits": "lm_head_output next_token_logits output_logits",
    "next_token_probabilities": "next_token_probs probs probabilities",
    "layer_input": "resid_pre residual_pre layers_input block_input",
    "attention_norm_output": "attn_in attention_input attentions_input",
    "attention_queries_prerotary": "hook_q",
    "attention_keys_prerotary": "hook_k",
    "attention_queries": "q query queries query_states attn_queries rot_q",
    "attention_keys": "k key keys key_states attn_keys rot_k",
    "attention_values": "v value values value_states attn_values",
    "attention_cached_keys": "key_cache cache_k cached_keys past_key_values",
    "attention_cached_values": "value_cache cache_v cached_values",
    "attention_scores": "attn_scores attn_logits attention_logits scores",
    "attention_probabilities": (
        "attention_pattern attention_patterns attn_pattern attn_patterns pattern patterns attention_weights "
        "attn_weights attn_probs attention_probs attentions"
    ),
    "attention_head_outputs": "z head_output head_outputs heads",
    "attention_premix": "attn_concat o_proj_input",
    "attention_head_results": "result head_results",
    "attention_output": "attn_out attn_output attention_out attentions_output self_attn_output",
    "layer_mid": "resid_mid residual_mid mlp_in",
    "mlp_norm_output": "mlp_input mlps_input",
    "router_logits": "gate_logits router",
    "mlp_activations": "post mlp_post mlp_acts neurons mlp_neurons neuron_activations",
    "mlp_output": "mlp_out mlps_output ffn_output ffn_out",
    "layer_output": (
        "resid_post residual_post resid residual residual_stream hidden_state hidden_states layers_output block_output"
    ),
}
SYNONYMS: Final[Mapping[str, str]] = MappingProxyType(
    {theirs: ours for ours, names in _THEIRS.items() for theirs in names.split()}
)


def suggestion(name: str, known: Iterable[str]) -> str:
    """` Did you mean ...?`: our name for what other libraries call `name`, else those of `known` nearest to it.

    A path, and the `hook_` of a hook point, are left out: `blocks.3.attn.hook_pattern` is the pattern. A value of
    another part than the one that was asked is named by where it is.
    """
    known = list(known)
    last = name.rpartition(".")[2]
    ours = SYNONYMS.get(last) or SYNONYMS.get(last.removeprefix("hook_"))
    if ours is None:
        return near(name, known)
    if ours in known:
        return f" Did you mean {ours!r}?"
    of_the_model = any(value.name == ours for value in declared(RootValues))
    return f" Did you mean model.{'' if of_the_model else 'layers[i].'}{ours}?"
