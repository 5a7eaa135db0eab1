"""The quantization_config of config.json, as compressed-tensors writes it, wherever it is: the same for every
family of models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from marlin_convert.errors import SourceError
from marlin_convert.models.config_values import number, shown
from marlin_convert.models.patterns import MAX_LENGTH, Patterns, UnknownFormError

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
        return module in self.ignore or self._patterns.match(module)

    @property
    def unread(self) -> list[str]:
        """Patterns of the ignore list that `ignores` does not follow."""
        return [pattern for pattern in _patterns_of(self.ignore) if not _is_known(pattern)]

    @cached_property
    def _patterns(self) -> Patterns:
        return Patterns([pattern for pattern in _patterns_of(self.ignore) if _is_known(pattern)])


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
                f" {shown(quant.get('config_groups'))}"
            )
        raise SourceError(
            f"config.json: quantization_config is of method {shown(method)}, not compressed-tensors{hint}"
        )
    expected = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    for key, value in expected.items():
        if quant.get(key) != value:
            raise SourceError(
                f"config.json: quantization_config.{key} is {shown(quant.get(key))}, only {value!r} is"
                " converted"
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
                f"config.json: quantization weights.{key} is {shown(weights.get(key))}, only {values[0]!r} is"
                " converted"
            )
    return Quantization(number(weights, "group_size"), at, _ignore(quant.get("ignore") or []))


def _ignore(entries: Any) -> tuple[str, ...]:
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise SourceError("config.json: quantization_config.ignore should be a list of names")
    for pattern in _patterns_of(entries):
        try:
            _is_known(pattern)
        except ValueError as error:
            raise SourceError(
                f"config.json: quantization_config.ignore has the pattern {shown(pattern)}, which is none"
                f" ({error})"
            ) from error
    if (length := sum(map(len, _patterns_of(entries)))) > MAX_LENGTH:
        raise SourceError(
            f"config.json: quantization_config.ignore has patterns of {length} characters, expected at most"
            f" {MAX_LENGTH}"
        )
    return tuple(entries)


def _patterns_of(entries: Sequence[str]) -> list[str]:
    return [entry[3:] for entry in entries if entry.startswith("re:")]


def _is_known(pattern: str) -> bool:
    """Whether a pattern can be followed. Raises ValueError where it is none."""
    try:
        Patterns([pattern])
    except UnknownFormError:
        return False
    return True


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
