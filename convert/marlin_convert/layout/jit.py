"""One decorator for all compiled functions: releases the GIL, and caches on disk where that is possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., Any])


def jit(function: F) -> F:
    """Compile `function` with numba, without the GIL and with a disk cache.

    A machine where neither the package folder nor the user's cache folder can be written (a read-only image)
    makes numba refuse the cache when decorating; then the function is compiled anew in each process, which
    takes seconds and is no error.
    """
    try:
        return cast(F, numba.njit(nogil=True, cache=True)(function))
    except RuntimeError:
        return cast(F, numba.njit(nogil=True)(function))


def inline(function: F) -> F:
    """Like `jit`, for a small function that other compiled functions call: always inlined by LLVM, cached
    with its caller.
    """
    return cast(F, numba.njit(nogil=True, forceinline=True)(function))
