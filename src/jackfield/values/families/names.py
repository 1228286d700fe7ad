"""What the world calls its modules. Asked only where neither structure nor numbers tell."""

MIXERS = ("attn", "attention", "mixer", "mamba", "ssm", "recurrent", "delta", "conv", "retention", "rwkv")
"""In the name or the class of a sublayer that mixes tokens, in lower case."""

MLPS = ("mlp", "ffn", "feedforward", "feed_forward", "moe")
"""In the name or the class of a sublayer that does not."""

EXPERTS = ("expert", "moe")
"""In the name or the class of a module that holds experts."""

CLIPS = ("clip_qkv",)
"""An attention's attribute, or its configuration's, that its projections are clamped to."""

LAYER_NUMBERS = ("layer_idx", "layer_id", "layer_index")
"""An attention's attribute that says which layer of the cache is its own."""

MULTIPLIERS = ("residual_multiplier", "residual_scale", "scale_depth")
"""In a configuration: what a block may multiply its summands with."""
