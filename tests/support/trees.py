"""Converted folders as a loader sees them, read with nothing but the format page; and as a forger would leave
them.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from checkpoints import Checkpoint, Tensor, expected_codes, expected_scales, pack_codes
from oracle import Matrix, RankExpert, oracle_experts, oracle_rank_slices, read_scales, read_weights

NUMPY = {"BF16": "<u2", "F32": "<f4", "I32": "<i4", "I64": "<i8", "U8": "u1"}
PROJECTIONS = ("gate", "up", "down")

# The cut of every tensor that is not a routed expert's, said again: rows, columns, or none.
ROWS = (
    "q_b_proj.weight",
    "kv_b_proj.weight",
    "gate_proj.weight",
    "up_proj.weight",
    "embed_tokens.weight",
    "lm_head.weight",
)
COLUMNS = ("o_proj.weight", "down_proj.weight")

#: how paths begin of what is a rank's, a stage's, or no rank's
OF_A_PART = re.compile("(rank-.*|stage-.*|common)/")

Document = dict[str, Any]


def digest(data: bytes) -> str:
    """As the format page has it."""
    return xxhash.xxh3_128_hexdigest(data)


def tree(out: Path, *, without: tuple[str, ...] = ("provenance.json",)) -> dict[str, bytes]:
    """All files of a folder and their bytes; provenance.json may differ between runs."""
    files = {
        str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()
    }
    return {path: data for path, data in files.items() if whole(path) not in without}


def whole(path: str) -> str:
    """The path, or that of the whole manifest where it is the manifest of a rank, which says the same."""
    return "manifest.json" if path.startswith("rank-") and path.endswith("/manifest.json") else path


def manifest_of(out: Path) -> Document:
    """The manifest as plain JSON."""
    document: Document = json.loads((out / "manifest.json").read_bytes())
    return document


@dataclass(frozen=True)
class RawShard:
    """A shard file taken apart by hand; `entries` are (name, dtype, shape, offset in the file, size) in file
    order.
    """

    start: int
    metadata: dict[str, str]
    entries: list[tuple[str, str, list[int], int, int]]
    data: bytes

    def array(self, name: str) -> NDArray[Any]:
        """A tensor by name; BF16 as bits."""
        _, dtype, shape, offset, size = next(entry for entry in self.entries if entry[0] == name)
        return np.frombuffer(self.data[offset : offset + size], NUMPY[dtype]).reshape(shape)


def read_shard(path: Path) -> RawShard:
    """Take a safetensors file apart."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    metadata = header.pop("__metadata__", {})
    entries = []
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        entries.append((name, entry["dtype"], entry["shape"], start + begin, end - begin))
    return RawShard(start, metadata, sorted(entries, key=lambda entry: entry[3]), data)


def cut(array: NDArray[Any], name: str, rank: int, tp: int) -> NDArray[Any]:
    """A rank's share of a tensor that keeps its name."""
    if name.startswith(("vision_tower.", "mm_projector.")):
        return array
    if name.endswith(ROWS):
        share = array.shape[0] // tp
        return array[rank * share : (rank + 1) * share]
    if name.endswith(COLUMNS):
        share = array.shape[1] // tp
        return array[:, rank * share : (rank + 1) * share]
    return array


def expert_of(checkpoint: Checkpoint, layer: int, expert: int) -> dict[str, Matrix]:
    """An expert's matrices as the checkpoint must have them."""
    dims, made = checkpoint.dims, {}
    for projection in PROJECTIONS:
        rows, columns = dims.expert_shape(projection)
        codes = expected_codes(layer, expert, projection, rows, columns, group=dims.group)
        made[projection] = Matrix(
            codes, expected_scales(layer, expert, projection, rows, columns // dims.group)
        )
    return made


def slices_of(
    checkpoint: Checkpoint, layer: int, rank: int, tp: int, ep: int, placed: Sequence[int] | None = None
) -> list[RankExpert]:
    """What a rank must hold of a layer's experts, in order; `placed` is the expert in each slot."""
    made = []
    slots = range(checkpoint.dims.experts) if placed is None else placed
    for slot in oracle_experts(rank, tp, ep, len(slots)):
        expert = slots[slot]
        matrices = expert_of(checkpoint, layer, expert)
        made.append(
            oracle_rank_slices(matrices["gate"], matrices["up"], matrices["down"], rank=rank, tp=tp, ep=ep)
        )
    return made


def read_experts(shard: RawShard, prefix: str, group: int) -> list[RankExpert]:
    """What a GPU reads in a shard, expert by expert."""
    stacked = {
        name: shard.array(f"{prefix}.mlp.experts.{name}")
        for name in ("w13_weight_packed", "w13_weight_scale", "w2_weight_packed", "w2_weight_scale")
    }
    read = []
    for i in range(len(stacked["w13_weight_packed"])):
        w13, w2 = read_weights(stacked["w13_weight_packed"][i]), read_weights(stacked["w2_weight_packed"][i])
        scales = [
            read_scales(stacked[f"{w}_weight_scale"][i], group, codes.shape[0])
            for w, codes in (("w13", w13), ("w2", w2))
        ]
        read.append(RankExpert(w13, scales[0], w2, scales[1]))
    return read


def seal(document: Document) -> bytes:
    """A document with its own digest, as the format page has it."""
    document["digest"] = "0" * 32
    raw = json.dumps(document, separators=(",", ":")).encode()
    return raw.replace(b'"digest":"' + b"0" * 32, b'"digest":"' + digest(raw).encode(), 1)


def reseal(out: Path, change: Callable[[Document], object] = lambda document: None) -> None:
    """Make every digest of OUT fit what is there now, after `change` to the manifest: what a forger would
    do.
    """
    document = manifest_of(out)
    change(document)
    blob = bytearray((out / "digests.bin").read_bytes())
    for shard in document["shards"]:
        path = out / shard["path"]
        if not path.exists():
            continue
        data = path.read_bytes()
        shard["header"] = digest(data[: 8 + int.from_bytes(data[:8], "little")])
        for tensor in shard["tensors"]:
            stored = data[tensor["offset"] : tensor["offset"] + tensor["size"]]
            if "experts" in tensor:
                count, at = tensor["shape"][0], tensor["experts"]
                one = len(stored) // count
                joined = b"".join(
                    bytes.fromhex(digest(stored[i * one : (i + 1) * one])) for i in range(count)
                )
                blob[at : at + len(joined)] = joined
                tensor["digest"] = digest(joined)
            else:
                tensor["digest"] = digest(stored)
        shard["digest"] = digest(
            bytes.fromhex(shard["header"] + "".join(tensor["digest"] for tensor in shard["tensors"]))
        )
    (out / "digests.bin").write_bytes(blob)
    of_ranks = [file for file in document["files"] if file["path"].endswith("/manifest.json")]
    _list_again(out, [file for file in document["files"] if file not in of_ranks])
    for file in of_ranks:
        _reseal_rank(out, file["path"], document)
    _list_again(out, of_ranks)
    (out / "manifest.json").write_bytes(seal(document))


def _list_again(out: Path, files: list[Document]) -> None:
    for file in files:
        if (out / file["path"]).exists():
            data = (out / file["path"]).read_bytes()
            file["size"], file["digest"] = len(data), digest(data)


def _reseal_rank(out: Path, path: str, whole: Document) -> None:
    """Make a rank's manifest what the whole one says of it."""
    folder, kept = path.removesuffix("manifest.json"), json.loads((out / path).read_bytes())
    common = f"{folder.rpartition('rank-')[0]}common/"
    mine = whole | {"ranks": kept["ranks"], "complete": kept["complete"]}
    for key in ("shards", "files"):
        mine[key] = [
            each
            for each in whole[key]
            if each["path"] != path
            and (each["path"].startswith((folder, common)) or not OF_A_PART.match(each["path"]))
        ]
    if "stages" in whole["parallel"]:
        names = {shard["unit"] for shard in mine["shards"]}
        mine["units"] = [unit for unit in whole["units"] if unit["name"] in names]
        mine["layers"] = [unit["layer"] for unit in mine["units"] if unit["layer"] is not None]
    (out / path).write_bytes(seal(mine))


def rewrite_header(path: Path, change: Callable[[Document], object]) -> None:
    """Change the JSON of a shard's header, keeping its length."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    change(header)
    raw = json.dumps(header, separators=(",", ":")).encode()
    assert len(raw) <= start - 8
    path.write_bytes(data[:8] + raw.ljust(start - 8) + data[start:])


def restored(out: Path, tensor: Tensor, group: int) -> bytes | None:
    """The bytes of a source tensor put together from all ranks, by the oracle's reading; None for a
    weight_shape.
    """
    document = manifest_of(out)
    tp, moe_tp = document["parallel"]["tp"], document["parallel"]["moe_tp"]
    if tensor.expert < 0:
        shards = [
            shard for shard in document["shards"] if any(t["name"] == tensor.name for t in shard["tensors"])
        ]
        parts = [read_shard(out / shard["path"]).array(tensor.name) for shard in shards]
        if parts[0].shape == tensor.shape:
            return parts[0].tobytes()
        return np.concatenate(parts, axis=1 if tensor.name.endswith(COLUMNS) else 0).tobytes()
    prefix, kind = tensor.name.split(".mlp.experts.")[0], tensor.name.rpartition(".")[2]
    if kind == "weight_shape":
        return None
    local = len(oracle_experts(0, tp, tp // moe_tp, document["model"]["n_routed_experts"]))
    parts = []
    for rank in range(tensor.expert // local * moe_tp, (tensor.expert // local + 1) * moe_tp):
        path = next(
            s["path"]
            for s in document["shards"]
            if s["rank"] == rank and s["unit"] == f"layer-{tensor.layer:03d}"
        )
        stacked = read_shard(out / path)
        w = "w2" if tensor.projection == "down" else "w13"
        values = stacked.array(f"{prefix}.mlp.experts.{w}_{kind}")[tensor.expert % local]
        inputs = stacked.array(f"{prefix}.mlp.experts.{w}_weight_packed").shape[1] * 16
        read = read_weights(values) if kind == "weight_packed" else read_scales(values, group, inputs)
        half = read.shape[1] // 2
        parts.append({"gate": read[:, :half], "up": read[:, half:], "down": read}[tensor.projection])
    whole = np.concatenate(parts, axis=0 if tensor.projection == "down" else 1).T
    return (
        pack_codes(np.ascontiguousarray(whole)).tobytes()
        if kind == "weight_packed"
        else np.ascontiguousarray(whole).tobytes()
    )


def forge_source_digests(out: Path, checkpoint: Checkpoint) -> None:
    """Make source/digests.bin say that the source is what OUT holds."""
    kept = bytearray((out / "source" / "digests.bin").read_bytes())
    tensors = [tensor for name in sorted(checkpoint.files) for tensor in checkpoint.files[name]]
    assert len(kept) == 16 * len(tensors)
    for i, tensor in enumerate(tensors):
        if (data := restored(out, tensor, checkpoint.dims.group)) is not None:
            kept[16 * i : 16 * i + 16] = bytes.fromhex(digest(data))
    (out / "source" / "digests.bin").write_bytes(kept)


def rewrite_unseen(path: Path, data: bytes) -> None:
    """Write other bytes of the same length to a file and put its time of modification back."""
    before = path.stat()
    assert before.st_size == len(data)
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    while path.stat().st_ctime_ns == before.st_ctime_ns:  # the clock of files goes in steps of a few ms
        time.sleep(0.001)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
