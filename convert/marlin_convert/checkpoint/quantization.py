"""The quantization_config of config.json, as compressed-tensors writes it, wherever it is: the same for every
family of models.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from marlin_convert.errors import SourceError

if TYPE_CHECKING:
    from marlin_convert.layout.protocol import QuantScheme


@dataclass(frozen=True)
class Quantization:
    """The one weight scheme of the checkpoint; `found_at` is the key path of its config, "" for the top
    level.
    """

    group_size: int
    found_at: str
    ignore: tuple[str, ...]

    @property
    def scheme(self) -> QuantScheme:
        """How the weights are quantized: 4 bit, symmetric, in groups; nothing else is converted."""
        from marlin_convert.layout.protocol import QuantScheme  # imports numpy, which not all need

        return QuantScheme(self.group_size)

    def ignores(self, module: str) -> bool:
        """Whether the ignore list names a module: `re:` entries are anchored at the start, others are whole
        names.
        """
        return any(
            re.match(entry[3:], module) if entry.startswith("re:") else entry == module
            for entry in self.ignore
        )


def number(section: dict[str, Any], key: str, default: int | None = None) -> int:
    """A size of a section of config.json; `default` where it is not there or null. Raises SourceError for
    anything else than a whole number of 0 or more.
    """
    value = section.get(key, default)
    if value is None and default is not None:
        value = default
    if type(value) is not int or value < 0:
        raise SourceError(f"config.json: {key} should be a whole number, found {value!r}")
    return value


def read_quantization(config: dict[str, Any]) -> Quantization:
    """The one scheme of a config.json. Raises SourceError where there is none, or one not converted."""
    nested = isinstance(config.get("text_config"), dict)
    places = {"": config} | ({"text_config": config["text_config"]} if nested else {})
    found = {
        at: section["quantization_config"]
        for at, section in places.items()
        if section.get("quantization_config")
    }
    if not found:
        raise SourceError(
            "config.json: no quantization_config, neither at the top level nor in text_config; this is not an"
            " INT4 release"
        )
    at = "text_config" if "text_config" in found else ""
    if len(found) == 2 and found[""] != found["text_config"]:
        raise SourceError(
            "config.json: the quantization_config at the top level and the one in text_config differ"
        )
    quant = found[at]
    if not isinstance(quant, dict) or not isinstance(quant.get("config_groups"), dict):
        method = quant.get("quant_method") if isinstance(quant, dict) else quant
        hint = "; this folder is a conversion already" if method == "marlin-convert" else ""
        if method == "compressed-tensors":
            raise SourceError(
                "config.json: config_groups of quantization_config should be an object, found"
                f" {quant.get('config_groups')!r}"
            )
        raise SourceError(
            f"config.json: quantization_config is of method {method!r}, not compressed-tensors{hint}"
        )
    expected = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    for key, value in expected.items():
        if quant.get(key) != value:
            raise SourceError(
                f"config.json: quantization_config.{key} is {quant.get(key)!r}, only {value!r} is converted"
            )
    if len(quant["config_groups"]) != 1:
        raise SourceError(
            f"config.json: quantization_config has {len(quant['config_groups'])} config groups; exactly one"
            " is understood"
        )
    ((name, group),) = quant["config_groups"].items()
    weights = (group.get("weights") or {}) if isinstance(group, dict) else group
    if not isinstance(weights, dict):
        raise SourceError(f"config.json: config group {name} is not an object with an object of weights")
    for key, values in {
        "num_bits": (4,),
        "type": ("int",),
        "strategy": ("group",),
        "symmetric": (True,),
        "dynamic": (False, None),
        "actorder": (None, False, "static"),
    }.items():
        if weights.get(key) not in values:
            raise SourceError(
                f"config.json: quantization weights.{key} is {weights.get(key)!r}, only {values[0]!r} is"
                " converted"
            )
    return Quantization(number(weights, "group_size"), at, _ignore(quant.get("ignore") or []))


def _ignore(entries: Any) -> tuple[str, ...]:
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise SourceError("config.json: quantization_config.ignore should be a list of names")
    for entry in entries:
        try:
            re.compile(entry[3:] if entry.startswith("re:") else "")
        except (re.error, RecursionError, OverflowError) as error:
            raise SourceError(
                f"config.json: quantization_config.ignore has the pattern {entry[3:]!r}, which is none"
                f" ({error})"
            ) from error
    return tuple(entries)


def rewritten(
    config: dict[str, Any], quantization: Quantization, replacement: dict[str, Any]
) -> dict[str, Any]:
    """config.json for the output: `replacement` where the quantization_config was, and nowhere else."""
    result = {key: value for key, value in config.items() if key != "quantization_config"}
    if quantization.found_at:
        result["text_config"] = {**config["text_config"], "quantization_config": replacement}
    else:
        result["quantization_config"] = replacement
        if isinstance(result.get("text_config"), dict):
            result["text_config"] = {
                k: v for k, v in config["text_config"].items() if k != "quantization_config"
            }
    return result
