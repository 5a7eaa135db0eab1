"""The plugin for SGLang: `--load-format marlin-convert`.

    python -m sglang.launch_server --model-path OUT --load-format marlin-convert

SGLang calls `register` in each of its processes, used or not: it imports neither torch nor numba and never
raises. What it puts in place, by SGLang's own hooks: the name of the format, the loader behind it, and for a
converted folder the quantization_config of its source, which SGLang builds the model from.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from marlin_convert.storage.shard_file import FORMAT

logger = logging.getLogger(__name__)

#: versions whose post-processing was compared with the shards, byte for byte; tests/engines runs each
TESTED = ("0.5.17", "0.5.23")


def register() -> None:
    """The entry point `sglang.srt.plugins`."""
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
        from sglang.srt.server_args import add_load_format_choices

        add_load_format_choices([FORMAT])
        for target, hook in HOOKS.items():
            HookRegistry.register(target, hook, HookType.AROUND)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "sglang":
            return  # there is none to register with
        logger.exception("%s cannot be registered with this SGLang; it starts without", FORMAT)


def keep_our_format(original: Callable[[Any], None], config: Any) -> None:
    """Around the check of a load format: ours is none of SGLang's own."""
    if config.load_format != FORMAT:
        original(config)


def choose_loader(original: Callable[..., Any], load_config: Any, model_config: Any = None) -> Any:
    """Around the choice of a loader: ours for our format, but for a draft model, which is no conversion.
    Raises UsageError for a converted folder under another format.
    """
    from marlin_convert.engines.serving import is_conversion
    from marlin_convert.errors import UsageError

    if load_config.load_format == FORMAT:
        if not getattr(model_config, "is_draft_model", False):
            from marlin_convert.engines.sglang_loader import ShardLoader

            return ShardLoader(load_config)
        load_config = as_default(load_config)
    path = getattr(model_config, "model_path", None)
    if isinstance(path, str) and is_conversion(path):
        raise UsageError(
            f"{path} was made by {FORMAT}, the load format {_name(load_config.load_format)} cannot read it:"
            f" add --load-format {FORMAT}"
        )
    return original(load_config, model_config)


def source_quantization(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Around the reading of a model's config: where a converted folder says `marlin-convert`, what its source
    said, so that SGLang builds the very model it builds for the source.
    """
    config = original(model, *args, **kwargs)
    sections: tuple[Any, ...] = (config, getattr(config, "text_config", None))
    for section in sections:
        found = getattr(section, "quantization_config", None)
        if isinstance(found, dict) and found.get("quant_method") == FORMAT:
            section.quantization_config = deepcopy(_kept_quantization(Path(model)))
    return config


def as_default(load_config: Any) -> Any:
    """The same for SGLang's default loader, which takes none of our options."""
    return replace(load_config, load_format="auto", model_loader_extra_config={})


def _kept_quantization(out: Path) -> Any:
    from marlin_convert.documents.manifest import read_manifest
    from marlin_convert.engines.serving import kept_config

    section = read_manifest(out).source.quantization_config_at
    config = kept_config(out)
    return (config[section] if section else config)["quantization_config"]


def _name(load_format: Any) -> str:
    return str(getattr(load_format, "value", load_format))


HOOKS: dict[str, Callable[..., Any]] = {
    "sglang.srt.configs.load_config.LoadConfig._verify_load_format": keep_our_format,
    "sglang.srt.model_loader.loader.get_model_loader": choose_loader,
    "sglang.srt.utils.hf_transformers.config.get_config": source_quantization,
}
