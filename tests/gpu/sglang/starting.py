"""How the runs start SGLang: the server's arguments, and one ModelRunner in this process as SGLang's own
one_batch benchmark has it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("SGLANG_IS_FLASHINFER_AVAILABLE", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

#: what needs no package that the machine lacks, and little memory
ARGUMENTS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_radix_cache": True,
    "mem_fraction_static": 0.5,  # of what is free, which a dozen processes share
    "max_total_tokens": 4096,
    "max_running_requests": 8,
    "context_length": 2048,
    "chunked_prefill_size": 2048,
    "disable_custom_all_reduce": True,
    "log_level": "info",
    "random_seed": 1,
}
EAGER = {"disable_cuda_graph": True, "disable_overlap_schedule": True}


def server_args(path: str, **more: Any) -> Any:
    """SGLang's ServerArgs, without CUDA graphs."""
    from sglang.srt.server_args import ServerArgs

    return ServerArgs(model_path=path, **ARGUMENTS, **EAGER, **more)


def runner(arguments: Any) -> Any:
    """A ModelRunner with its model loaded; also what sets up SGLang's process-wide state."""
    from sglang.benchmark import one_batch
    from sglang.srt.server_args import PortArgs

    one_batch._set_envs_and_config(arguments)
    one_batch.initialize_moe_config(arguments)
    one_batch.initialize_fp8_gemm_config(arguments)
    one_batch.initialize_fp4_gemm_config(arguments)
    # load_model asks for a tokenizer that nothing here uses
    one_batch.get_tokenizer = lambda *_, **__: None
    one_batch.suppress_other_loggers = lambda *_, **__: None
    bench, _ = one_batch.load_model(arguments, PortArgs.init_new(arguments), 0, 0)
    return bench


def logits(bench: Any, prompts: Sequence[Sequence[int]], steps: int) -> list[Any]:
    """Logits of the last tokens of some prompts of one length, then of `steps` more tokens each."""
    import torch
    from sglang.benchmark import one_batch

    with torch.no_grad():
        bench.clear()
        requests = one_batch.prepare_synthetic_inputs_for_latency_test(
            len(prompts), len(prompts[0]), [list(prompt) for prompt in prompts]
        )
        tokens, found, batch = bench.extend(requests)
        seen = [found.clone()]
        for _ in range(steps):
            tokens, found = one_batch.decode(tokens, batch, bench.torch_runner)
            seen.append(found.clone())
    return seen
