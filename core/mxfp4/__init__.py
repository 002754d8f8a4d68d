"""MXFP4: the packed format of gpt-oss's experts, and models that keep it packed while they train."""

from typing import TYPE_CHECKING, Any

from unsloth_plugins.core.mxfp4.codec import decode, encode
from unsloth_plugins.core.mxfp4.weight import PackedWeight

if TYPE_CHECKING:
    from unsloth_plugins.core.mxfp4.loader import load_mxfp4, packed_config
    from unsloth_plugins.core.mxfp4.quantizer import pack_experts

__all__ = ["PackedWeight", "decode", "encode", "load_mxfp4", "pack_experts", "packed_config"]


def __getattr__(name: str) -> Any:  # these need transformers
    if name in ("load_mxfp4", "packed_config"):
        from unsloth_plugins.core.mxfp4 import loader

        return getattr(loader, name)
    if name == "pack_experts":
        from unsloth_plugins.core.mxfp4.quantizer import pack_experts

        return pack_experts
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
