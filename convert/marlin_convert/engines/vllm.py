"""The plugin for vLLM, experimental: `--load-format marlin-convert`. It has not run on a GPU; its own
post-processing was compared without one.

    vllm serve OUT --hf-config-path OUT/source --load-format marlin-convert --moe-backend marlin

vLLM calls `register` in each of its processes, used or not: it imports neither torch nor numba and never
raises.
"""

from __future__ import annotations

import logging
from typing import Any

from marlin_convert.storage.shard_file import FORMAT

logger = logging.getLogger(__name__)

#: versions whose post-processing was compared with the shards, byte for byte
TESTED = ("0.31.0", "0.33.0")


def register() -> None:
    """The entry point `vllm.general_plugins`."""
    try:
        from vllm.model_executor.model_loader import register_model_loader
        from vllm.model_executor.model_loader.base_loader import BaseModelLoader

        class ShardLoader(BaseModelLoader):  # type: ignore[misc]  # vLLM has no types here
            def download_model(self, model_config: Any) -> None:
                """Nothing: the shards are local."""

            def load_weights(self, model: Any, model_config: Any) -> None:
                from marlin_convert.engines.vllm_loader import load_weights

                load_weights(model, model_config, self.load_config)

        register_model_loader(FORMAT)(ShardLoader)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "vllm":
            return  # there is none to register with
        logger.exception("%s cannot be registered with this vLLM; it starts without", FORMAT)
