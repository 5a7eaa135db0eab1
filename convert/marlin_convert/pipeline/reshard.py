"""`reshard`: another conversion of the same checkpoint, out of one that is there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from marlin_convert.arguments import refuse_odd
from marlin_convert.errors import OutputError, UsageError
from marlin_convert.pipeline.conversion import Confirm, Conversion, Converted
from marlin_convert.pipeline.remote import Origin
from marlin_convert.pipeline.run import request_of
from marlin_convert.planning.needs import source_tensors
from marlin_convert.planning.output_plan import Options, OutputPlan, plan_output
from marlin_convert.progress import Progress
from marlin_convert.shards.inspect import lost_shards
from marlin_convert.shards.stored_source import ConvertedStore
from marlin_convert.spread import Spread
from marlin_convert.words import count, ranges


def reshard(
    out: str | os.PathLike[str],
    new: str | os.PathLike[str],
    *,
    tp: int,
    ep: int = 1,
    attn_tp: int | None = None,
    pp: int = 1,
    expert_map: str | os.PathLike[str] | None = None,
    layers: Sequence[int] | None = None,
    ranks: Sequence[int] | None = None,
    layout: str | None = None,
    threads: int | None = None,
    memory: int | None = None,
    verify: str = "exact",
    overwrite: bool = False,
    direct_io: bool = True,
    progress: Progress | None = None,
    confirm: Confirm | None = None,
    shard: str | None = None,
    engine: str | None = None,
    ray_address: str | None = None,
) -> Converted:
    """Make of the converted folder OUT the folder that `convert` makes of its source with these options, byte
    for byte but for provenance.json, without the source. Run again, it continues; so does `convert`, and it
    continues what `convert` began.

    Each source tensor is put together again and compared with the digest that OUT keeps of it, before any
    file gets its name. The options are those of `convert`; `verify` is "exact" or "none".

    Raises UsageError for options that conflict with each other, with what NEW holds or with what OUT does not
    hold, such as layers that were not converted; OutputError where OUT is damaged; MachineError.
    """
    refuse_odd(places={"out": out, "new": new})
    spread = Spread.of((shard, engine, ray_address), threads, memory, overwrite)
    if verify == "kernel":
        raise UsageError(
            "--verify kernel compares with the checkpoint's own files, which are not here; reshard, then run"
            f" marlin-convert verify {os.fspath(new)} --kernel"
        )
    options = Options.of((tp, ep, attn_tp, pp), layers, ranks, layout, expert_map)
    store = ConvertedStore.open(out)
    source = store.source()
    plan = plan_output(source, options)
    _refuse_missing(store, plan)
    if overwrite:
        _refuse_lost(store, plan)
    request = request_of(source, plan, Path(new), verify, overwrite)
    conversion = Conversion.of(request, threads, memory, direct_io, progress)
    origin = Origin(os.path.abspath(out), options, converted=True)
    return conversion.over(spread, origin).run(None, confirm)


def _refuse_lost(store: ConvertedStore, plan: OutputPlan) -> None:
    """Raise OutputError where a shard that is to be read is gone or of another size: seen before anything is
    removed for it.
    """
    wanted = {unit.source.layer for unit in plan.units}
    units = {unit.name for unit in store.manifest.units if unit.layer in wanted}
    lost = lost_shards(store.out, store.manifest)
    if here := [shard.path for shard in store.manifest.shards if shard.path in lost and shard.unit in units]:
        raise OutputError(
            f"{store.out} has lost {count(len(here), 'shard')}, such as {here[0]}: run the convert command"
            " again that made it"
        )


def _refuse_missing(store: ConvertedStore, plan: OutputPlan) -> None:
    """Raise UsageError where the folder does not hold all that is asked for, naming the layers that it
    does.
    """
    by_unit = {unit.name: store.index.missing(source_tensors(plan, unit)) for unit in plan.units}
    whole = [unit.source.layer for unit in plan.units if not by_unit[unit.name]]
    missing = store.index.missing(name for each in by_unit.values() for name in each.tensors)
    if missing:
        layers = ranges([layer for layer in whole if layer is not None])
        offer = f"it holds --layers {layers}, else " if layers else ""
        raise UsageError(
            f"{store.out} does not hold all that is asked for: {missing} are missing; {offer}convert the"
            " checkpoint itself"
        )
