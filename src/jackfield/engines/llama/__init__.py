"""The native Llama, small enough to read in an evening: `layers` (what it is and computes), `parallel` (how ranks share
it, how its values are announced), `checkpoint` (where it comes from), `engine` (how requests run on it), in this order.
"""
