"""Loading converted shards where they are used: as torch tensors here, into published engines beside it.

`torch_loader` is the entry point; importing it, or this package, loads neither torch nor numba. It uses one
of two ways to a GPU: `ring` (threads, pinned buffers, the compiled `copy_loop`), which fills any tensors it
is given, an engine's existing parameters too, and `mapped` (a file's mapping registered with CUDA).
"""
