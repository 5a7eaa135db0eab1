"""The checkpoints that the runs load: make_sources.py FORM FOLDER.

flat and k26: three layers that SGLang's kernels take. layers: two MoE layers of K2.6's full size.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))

from checkpoints import make_layers, make_small

SMALL: dict[str, Any] = {
    "hidden": 2048,
    "intermediate": 1024,
    "experts": 16,
    "heads": 16,
    "nope": 128,
    "rope": 64,
    "v": 128,
    "q_lora": 512,
    "kv_lora": 512,
    "vocab": 1024,
    "vt_hidden": 96,
    "vt_intermediate": 192,
    "vt_heads": 8,
    "patch": 14,
}


def main(form: str, folder: Path) -> None:
    """Make one."""
    if form == "layers":
        make_layers(folder, layers=2)
    else:
        make_small(folder, form="k2-thinking" if form == "flat" else "k26", **SMALL)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for section in (config, config.get("text_config", {})):
        section.pop("auto_map", None)  # the code it names is a stand-in
    if "vision_config" in config:
        config["vision_config"] |= plain(config["vision_config"])
    path.write_text(json.dumps(config, indent=2))


def plain(vision: dict[str, Any]) -> dict[str, Any]:
    """SGLang's vision tower reads the plain names, whose defaults are the full size. Eight heads for tp 8."""
    return {
        "hidden_size": vision["vt_hidden_size"],
        "intermediate_size": vision["vt_intermediate_size"],
        "num_attention_heads": 8,
        "num_hidden_layers": vision["vt_num_hidden_layers"],
    }


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
