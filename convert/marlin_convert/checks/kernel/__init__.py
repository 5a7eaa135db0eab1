"""The kernel check: the real Marlin MoE kernel on the converted shards against the dequantized originals.
Needs torch.

The exact check proves that the layout was inverted; only the kernel can prove that the layout is the one it
reads.
"""
