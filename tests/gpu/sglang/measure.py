"""Seconds that SGLang takes to load weights: measure.py SMALL SRC OUT RESULT.

SRC are layers of full size, OUT rank 0 of their split, SMALL a model that fits them to start SGLang with. The
process plays rank 0. Timed is `load_model` without building the model: for the default reading, slicing,
copying and repacking, for ours reading, copying and what is checked.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import compare_models
import starting
from marlin_convert.bench.cold import evict, resident

ROUNDS = 2


def files_of(folder: Path) -> list[Path]:
    """All weight files below a folder."""
    return sorted(folder.rglob("*.safetensors"))


def timed(load_format: str, model_config: Any) -> float:
    """Seconds of one load after the model was built."""
    import torch
    from sglang.srt.model_loader import loader

    build, built = loader._initialize_model, 0.0

    def note(*args: Any, **kwargs: Any) -> Any:
        nonlocal built
        model = build(*args, **kwargs)
        torch.cuda.synchronize()
        built = time.perf_counter()
        return model

    loader._initialize_model = note
    try:
        compare_models.load(load_format, model_config)
        torch.cuda.synchronize()
        return time.perf_counter() - built
    finally:
        loader._initialize_model = build


def main(small: str, source: str, out: str, result: str) -> None:
    """Rounds of both, warm, then cold."""
    from sglang.srt.eplb import expert_location
    from sglang.srt.plugins import load_plugins

    load_plugins()
    starting.runner(starting.server_args(small))
    loads = (
        ("default", "auto", compare_models.config_of(source), files_of(Path(source))),
        ("ours", "marlin-convert", compare_models.config_of(out), files_of(Path(out))),
    )
    found: dict[str, Any] = {
        f"GB {name}": round(sum(path.stat().st_size for path in files) / 1e9, 2)
        for name, _, _, files in loads
    }
    with compare_models.played(out, 0):
        # where the small model's experts are is told of it alone
        placement = expert_location.ExpertLocationMetadata.init_trivial(
            starting.server_args(source), loads[0][2], 0
        )
        expert_location.set_global_expert_location_metadata(placement, allow_overwrite=True)
        compare_models.poison = lambda: None  # not what is measured
        for temperature in ("warm", "cold"):
            for _ in range(ROUNDS + (temperature == "warm")):
                for name, load_format, config, files in loads:
                    if temperature == "cold":
                        evict(files)
                        found.setdefault(f"resident {name}", []).append(round(resident(files), 3))
                    seconds = timed(load_format, config)
                    found.setdefault(f"{temperature} {name}", []).append(round(seconds, 3))
                    print(f"{temperature} {name} {seconds:.3f} s", flush=True)
                    Path(result).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
