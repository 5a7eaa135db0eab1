"""Names that sglang's sampler imports on every CUDA machine; with sampling_backend=pytorch none is called."""


def _absent(*_args: object, **_kwargs: object) -> None:
    raise NotImplementedError("flashinfer is not here")


min_p_sampling_from_probs = top_k_top_p_sampling_from_probs = top_k_renorm_probs = top_p_renorm_probs = (
    _absent
)
