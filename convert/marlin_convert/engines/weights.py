"""A rank's shards on their way into a model that an engine has built: routed experts straight into its
parameters, everything else as tensors of full shape for its own weight loading.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from marlin_convert.documents.manifest import Origin, Shard, StoredTensor, Unit, read_manifest
from marlin_convert.engines.ranges import Copier, Range, flat
from marlin_convert.engines.torch_loader import torch_dtype, way
from marlin_convert.errors import OutputError, UsageError
from marlin_convert.limits import usable_cores
from marlin_convert.shards.reader import Shards, open_shards
from marlin_convert.slicing import Cut
from marlin_convert.storage.files import digest
from marlin_convert.storage.reads import Piece, plan_reads
from marlin_convert.threads import Workers

#: bytes of tensors beside the experts that are on the device at a time
STAGED = 1 << 30
NAN = float("nan")

#: a tensor, its file and what the file is read by
Placed = tuple[Shards, Shard, StoredTensor]


class ShardWeights:
    """What one rank loads. `bytes` counts what was read of whose files: `rank`, `common`, `other ranks`."""

    def __init__(self, shards: Shards, device: torch.device, path: str, verify: bool) -> None:
        self.shards, self.manifest, self.device, self._verify = shards, shards.manifest, device, verify
        chosen = shards.shards()
        for shard in chosen:
            shards.mapping(shard)  # checks size and identity before anything is copied
        path, threads = way(shards, chosen, path)
        self._copier = Copier(device, threads, path == "direct")
        self.bytes: Counter[str] = Counter()
        self.names: set[str] = set()
        self.experts = {
            tensor.name: (shards, shard, tensor)
            for shard in chosen
            for tensor in shard.tensors
            if tensor.experts is not None
        }

    def fill_experts(self, parameters: Mapping[str, Tensor]) -> None:
        """Fill the parameter of each stacked tensor, in the order of the files. They are contiguous, of the
        stored shape and dtype. Raises OutputError where `verify` finds other bytes.
        """
        self._copy(
            [
                (placed, Range(placed[0].out / placed[1].path, placed[2].offset, flat(parameters[name])))
                for name, placed in self.experts.items()
            ]
        )
        if self._verify:
            for name, placed in self.experts.items():
                self._check(placed, parameters[name].detach())

    def others(self, whole: bool) -> Iterator[tuple[str, Tensor]]:
        """Every other tensor once, by its source name, in its full shape on the device. Of a tensor that is
        cut only this rank's slice is filled and the rest is NaN, so that an engine that takes another part
        is seen; all of it with `whole`, or where the shards' attention is split apart: an engine that cuts it
        alike takes its slice out of the whole. That reads the slices of all ranks.
        """
        whole = whole or self.manifest.parallel.attn_tp is not None
        readers = [self.shards, open_shards(self.shards.out, None, self.manifest)]
        if whole:
            manifest = read_manifest(self.shards.out)  # the shards' own may be of their rank alone
            ranks = [rank for rank in manifest.ranks if rank != self.shards.rank]
            readers += [open_shards(self.shards.out, rank, manifest) for rank in ranks]
        for units in _batches(self.manifest.units, self._sizes()):
            wanted = {origin.tensor: origin for unit in units for origin in unit.tensors}
            staged = self._stage(readers, {unit.name for unit in units}, wanted)
            for name, slices in staged.items():
                if name in self.names:
                    raise OutputError(f"{self.shards.out}: {name} is in two files; run verify")
                self.names.add(name)
                yield name, self._full(wanted[name], slices)
        self.shards.close()

    def _sizes(self) -> Counter[str]:
        """Bytes beside the experts, by unit."""
        sizes: Counter[str] = Counter()
        for shard in self.manifest.shards:
            if shard.rank in (None, self.shards.rank):
                sizes[shard.unit] += sum(t.size for t in shard.tensors if t.experts is None)
        return sizes

    def _stage(
        self, readers: Sequence[Shards], units: set[str], wanted: Mapping[str, Origin]
    ) -> dict[str, dict[int | None, Tensor]]:
        """The slices of some units' tensors on the device, by name and rank, in the order of the files."""
        placed: list[Placed] = [
            (reader, shard, tensor)
            for reader in readers
            for shard in reader.shards()
            if shard.unit in units
            for tensor in shard.tensors
            if tensor.name in wanted
            and tensor.experts is None
            and self._wants(shard.rank, wanted[tensor.name])
        ]
        plan = plan_reads([Piece(shard.path, tensor.offset, tensor.size) for _, shard, tensor in placed])
        memory = torch.empty(plan.size, dtype=torch.uint8, device=self.device)
        by_path = {one[1].path: one for one in placed}
        for reader, shard, _ in by_path.values():
            reader.mapping(shard)
        self._copy(
            [
                (
                    by_path[run.file],
                    Range(self.shards.out / run.file, run.offset, memory[run.at : run.at + run.length]),
                )
                for run in plan.runs
            ]
        )
        staged: dict[str, dict[int | None, Tensor]] = {}
        for one, at in zip(placed, plan.places, strict=True):
            _, shard, stored = one
            tensor = memory[at : at + stored.size].view(torch_dtype(stored.dtype)).view(stored.shape)
            if self._verify:
                self._check(one, tensor)
            staged.setdefault(stored.name, {})[shard.rank] = tensor
        return staged

    def _cut(self, origin: Origin) -> Cut:
        if origin.axis is None:
            return Cut()
        return Cut(origin.axis, self.manifest.parallel.slices(origin), origin.replicas)

    def _wants(self, rank: int | None, origin: Origin) -> bool:
        """Whether a rank's part is read: this one's own, and each slice that it lacks of one rank, the first
        that holds it.
        """
        own, cut = self.shards.rank, self._cut(origin)
        if rank in (None, own):
            return True
        index = cut.index(rank)
        return index != cut.index(own) and rank == index * cut.replicas

    def _copy(self, ranges: Sequence[tuple[Placed, Range]]) -> None:
        for (reader, _, _), wanted in ranges:
            whose = {self.shards.rank: "rank", None: "common"}.get(reader.rank, "other ranks")
            self.bytes[whose] += wanted.target.numel()
        self._copier.copy([wanted for _, wanted in ranges])

    def _full(self, origin: Origin, slices: Mapping[int | None, Tensor]) -> Tensor:
        """A tensor as its source has it, out of the slices that were read."""
        rank = self.shards.rank
        own = slices[rank] if rank in slices else slices[None]
        cut = self._cut(origin)
        if cut.parts == 1:
            return own
        shape = [size * cut.parts if axis == origin.axis else size for axis, size in enumerate(own.shape)]
        full = own.new_full(shape, NAN)
        for holder, part in slices.items():
            block = cut.block(shape, cut.index(holder))
            full[tuple(slice(span.start, span.stop) for span in block)] = part
        return full

    def _check(self, placed: Placed, tensor: Tensor) -> None:
        """Hash a tensor where it arrived. Raises OutputError."""
        _, shard, stored = placed
        if stored.experts is None:
            found = _digest(tensor)
        else:
            with Workers(usable_cores()) as workers:
                found = digest(b"".join(workers.map(_digest, tensor)))
        if found.hex() != stored.digest:
            raise OutputError(
                f"{self.shards.out / shard.path}: {stored.name} arrived with the digest {found.hex()}, the"
                f" manifest says {stored.digest}; run verify"
            )


def _digest(tensor: Tensor) -> bytes:
    return digest(flat(tensor.contiguous()).cpu().numpy())


def _batches(units: Sequence[Unit], sizes: Mapping[str, int]) -> Iterator[list[Unit]]:
    """Units in order, as many together as are staged at a time."""
    batch: list[Unit] = []
    for unit in units:
        if batch and sum(sizes[one.name] for one in [*batch, unit]) > STAGED:
            yield batch
            batch = []
        batch.append(unit)
    if batch:
        yield batch


def moe_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Layers of routed experts by an engine's name."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "w13_weight_packed")}


def fill_routed_experts(model: nn.Module, layers: Mapping[str, nn.Module], weights: ShardWeights) -> None:
    """Everything of the routed experts of `layers`, by their names in the shards; NaN into all else, which
    the engine fills. The parameters keep their memory. Raises UsageError where the shards are of another
    model.
    """
    own = {name.rpartition(".")[2] for name in weights.experts}
    stacked = {
        f"{path}.{name}": parameter
        for path, layer in layers.items()
        for name, parameter in layer.named_parameters(recurse=False)
        if name in own
    }
    refuse_other_tensors(weights.shards.out, weights.experts, stacked)
    fill_with_nan(model)
    with torch.no_grad():
        for name, (_, _, stored) in weights.experts.items():
            stacked[name].resize_(stored.shape)
        weights.fill_experts(stacked)
        sizes = weights.manifest.model
        hidden, width = sizes["hidden_size"], sizes["moe_intermediate_size"]
        for layer in layers.values():
            for name, shape in (("w13_weight_shape", (width, hidden)), ("w2_weight_shape", (hidden, width))):
                parameter = layer.get_parameter(name)
                parameter.copy_(torch.tensor(shape).expand_as(parameter))


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """All parameters by name, those with two names under both."""
    return dict(model.named_parameters(remove_duplicate=False))


def fill_with_nan(model: nn.Module) -> None:
    """Make a parameter that nobody fills be seen. Single numbers keep what the engine gave them: it tells by
    them whether a checkpoint had one.
    """
    with torch.no_grad():
        for parameter in filter(_fillable, parameters_of(model).values()):
            parameter.fill_(NAN)


def refuse_nan(model: nn.Module, out: object) -> None:
    """Raise OutputError where a float parameter has a NaN."""
    found = {name: p.isnan().any() for name, p in parameters_of(model).items() if _fillable(p)}
    left = [name for name, any_nan in found.items() if any_nan]
    if left:
        raise OutputError(
            f"{out}: after loading, {len(left)} parameters have a NaN, the first is {left[0]}: this engine"
            " did not fill all of it from the slices of this rank, or the source has a NaN there"
            " (marlin-convert verify tells); serve without options that cut dense layers otherwise than into"
            " tp slices"
        )


def _fillable(parameter: Tensor) -> bool:
    return parameter.is_floating_point() and parameter.numel() > 1


def refuse_other_tensors(out: object, stored: Mapping[str, Placed], found: Mapping[str, Tensor]) -> None:
    """Raise UsageError where an engine's stacked parameters are not, one for one and by name, dtype and size,
    those of the shards.
    """
    if absent := sorted(stored.keys() ^ found.keys()):
        where = "the shards" if absent[0] in stored else "the engine's model"
        raise UsageError(
            f"{out}: {absent[0]} is in {where} only ({len(absent)} such names); the engine does not serve"
            " these routed experts in 4 bit, or the shards are of another model"
        )
    for name, (_, _, tensor) in stored.items():
        parameter, dtype = found[name], torch_dtype(tensor.dtype)
        if parameter.dtype != dtype:
            raise UsageError(
                f"{name} is {parameter.dtype} in the engine and {dtype} in {out}; serve with --dtype bfloat16"
            )
        if parameter.numel() != _elements(tensor):
            raise UsageError(
                f"{name} has {parameter.numel()} elements in the engine (shape {tuple(parameter.shape)}) and"
                f" {_elements(tensor)} in {out} (shape {tensor.shape}): the engine does not pad as the shards"
                " are padded; convert for a tp and ep that need no padding"
            )


def _elements(tensor: StoredTensor) -> int:
    return tensor.size // torch_dtype(tensor.dtype).itemsize
