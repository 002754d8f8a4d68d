"""Load a published MXFP4 checkpoint with its experts kept packed."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch

from unsloth_plugins.core.errors import ModelError

_HUB_OPTIONS = ("revision", "token", "cache_dir", "local_files_only", "force_download", "proxies", "subfolder")


def packed_config(path_or_id: str | os.PathLike[str], **hub_options: Any) -> Any:
    """The config of an MXFP4 checkpoint that makes plain ``from_pretrained`` keep its experts packed.

    ``AutoModelForCausalLM.from_pretrained(path, config=packed_config(path))``

    Args:
        path_or_id: folder or hub id.
        hub_options: ``revision``, ``token``, ``cache_dir``, ... of ``AutoConfig.from_pretrained``.

    Raises:
        ModelError: the checkpoint is not MXFP4.
    """
    from transformers import AutoConfig

    return _packed(AutoConfig.from_pretrained(path_or_id, **hub_options))


def _packed(config: Any) -> Any:
    """The same config with our method in the place of the published one; a copy where it must change."""
    from unsloth_plugins.core.mxfp4 import quantizer  # registers the method with transformers

    stored: Any = getattr(config, "quantization_config", None)
    method = stored.get("quant_method") if isinstance(stored, dict) else getattr(stored, "quant_method", None)
    if method not in ("mxfp4", quantizer.METHOD):
        raise ModelError(
            expected="a checkpoint whose config.json has quant_method 'mxfp4'",
            got=f"quant_method {method!r}" if stored is not None else "no quantization_config",
            remedy="Load it with from_pretrained alone, or pack it with pack_experts.",
        )
    stored = copy.deepcopy(stored) if isinstance(stored, dict) else stored.to_dict()
    config = copy.deepcopy(config)
    config.quantization_config = {**stored, "quant_method": quantizer.METHOD}
    return config


def load_mxfp4(
    path_or_id: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str = "auto",
    device_map: Any = None,
    **options: Any,
) -> Any:
    """A causal LM with its experts packed as on disk: 4.25 bits a weight, frozen, ready for LoRA.

    Tensors are read one by one to where they stay, so the peak is the size of the packed model. All names, shapes and
    kinds are checked against the files' headers before the first weight is read.

    Args:
        path_or_id: folder or hub id of a published gpt-oss checkpoint.
        dtype: of everything that is not packed; ``"auto"`` for the checkpoint's own (bf16).
        device_map: ``None`` for the CPU, ``{"": 0}`` for the first GPU, or as in transformers.
        options: further keyword arguments of ``from_pretrained``.

    Returns:
        The model, in eval mode. ``save_pretrained`` gives back the same bytes under the same names.

    Raises:
        ModelError: not an MXFP4 checkpoint, or a tensor is missing, misshapen or unknown.
        UnsupportedError: not in safetensors.
    """
    from transformers import AutoModelForCausalLM

    hub = {key: options[key] for key in _HUB_OPTIONS if key in options}
    given = options.pop("config", None)
    config = packed_config(path_or_id, **hub) if given is None else _packed(given)
    dtype = options.pop("torch_dtype", dtype)  # its former name
    return AutoModelForCausalLM.from_pretrained(
        path_or_id, config=config, dtype=dtype, device_map=device_map, **options
    )
