"""The native Llama: attention, cache and parallel layers written out, small enough to read in an evening.

Read `args` (what a model is), `layers`, `attention` and `rotary` (what it computes), `tapped` (how its values are
announced), `parallel` (how ranks share it), `checkpoint` (where its weights come from), `engine` (how requests run on
it), in this order. transformers' eager Llama is what it is checked against, value by value.
"""
