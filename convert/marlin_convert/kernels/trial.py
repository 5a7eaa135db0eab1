"""A small matrix through a kernel: whether it runs at all, and reads what is there."""

from __future__ import annotations

import torch

from marlin_convert.errors import MachineError
from marlin_convert.kernels.gemm_call import Matrix
from marlin_convert.kernels.one_hot import read_back
from marlin_convert.kernels.providers import REFERENCE, Provider, load


def wrongly_read(provider: Provider) -> tuple[int, int]:
    """Of how many random weights a provider reads how many otherwise than the model on the CPU, and that
    number. Raises whatever the kernel raises.
    """
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**31), 2**31, (2, 8, 256), generator=generator).to(torch.int32)
    scales = (torch.rand((2, 4, 128), generator=generator) + 0.5).to(torch.bfloat16)
    matrix = Matrix(words, scales)
    expected = next(read_back(load(REFERENCE), matrix, experts_a_call=2))[1]
    on_device = matrix.map(lambda tensor: tensor.to(provider.device))
    read = next(read_back(provider, on_device, experts_a_call=2))[1]
    return int((read.cpu() != expected).sum()), expected.numel()


def try_kernel(provider: Provider) -> None:
    """Run it once, so that what compiles at first use does so now. Raises MachineError where it reads wrongly
    or cannot be compiled.
    """
    wrong, number = wrongly_read(provider)
    if wrong:
        raise MachineError(
            f"the kernel of {provider.name} reads {wrong} of {number} weights wrongly on this machine; run"
            " `marlin-convert doctor --kernel`"
        )
