"""The Marlin MoE kernel: where it can be had, a CPU model of it, and the fused MoE around it.

Importing this package, `providers`, `quant_types` or `fragments` loads no torch. `reference`, `fused_moe` and
`one_hot` work on torch tensors and load it.
"""

#: of a call, in speculative decoding: one; a draft of 8 and one; ten streams of that; ten of 33
TOKENS = (1, 9, 90, 330)
