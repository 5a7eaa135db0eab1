"""Stand-in (SGLANG_IS_FLASHINFER_AVAILABLE=false): sglang's fp8 module imports this name all the same."""


def bmm_fp8(*_args: object, **_kwargs: object) -> None:
    raise NotImplementedError("flashinfer is not here")
