"""What the runs found, and whether it is as expected: report.py RESULTS. Exit status 1 where it is not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

#: runs that must be there
MODELS = ("model-flat", "model-k26")
SERVED = ("engine-flat", "engine-k26", "graphs-flat", "http-flat", "http-k26")


def of_model(name: str, found: dict[str, Any]) -> list[str]:
    """What is wrong with a comparison of models."""
    yes = ("repeat of the default equal", "logits finite", "logits equal", "exchanged experts seen")
    wrong = [f"{name}: {key} is {found.get(key)}" for key in yes if found.get(key) is not True]
    wrong += [f"{name}: differs in {found['different'][:4]}"] if found["different"] else []
    splits = found.get("splits", {})
    wrong += [f"{name}: {split} differs in {unequal[:4]}" for split, unequal in splits.items() if unequal]
    print(
        f"{name}: {found['tensors']} tensors, {found['attributes']} attributes and the logits equal;"
        f" {len(splits)} ranks of other splits loaded and compared"
    )
    return wrong


def of_served(name: str, default: Any, ours: Any) -> list[str]:
    """What is wrong with token ids of the default and of ours, each asked two times."""
    ids = [answer["ids"] for answer in [*default, *ours]]
    first = [[one[0] for one in answer["logprobs"]] for answer in (default[0], ours[0])]
    print(f"{name}: token ids {ids[0]}, first logprobs {first}")
    if any(one != ids[0] for one in ids):
        return [f"{name}: token ids differ: {ids}"]
    return [] if first[0] == first[1] else [f"{name}: first logprobs differ: {first}"]


def main(folder: Path) -> None:
    """Everything that is there; what is not is wrong."""
    found = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    wrong: list[str] = []
    for name in MODELS:
        wrong += of_model(name, found[name]) if name in found else [f"{name}: no result"]
    on_two_gpus = sorted({name.rpartition("-")[0] for name in found if name.startswith("tp2")})
    for name in (*SERVED, *on_two_gpus):
        default, ours = (found.get(f"{name}-{whose}") for whose in ("default", "ours"))
        wrong += of_served(name, default, ours) if default and ours else [f"{name}: no result of both"]
    for key, value in found.get("measure", {}).items():
        print(f"{key}: {value}" + (f", median {median(value)}" if isinstance(value, list) else ""))
    if "measure" not in found:
        wrong.append("measure: no result")
    print(*[f"WRONG {line}" for line in wrong] or ["ALL AS EXPECTED"], sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
