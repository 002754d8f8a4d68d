"""Cross entropy of a linear head that never holds the logits of all tokens."""

from unsloth_plugins.core.loss.lazy import LazyLogits
from unsloth_plugins.core.loss.op import linear_cross_entropy

__all__ = ["LazyLogits", "linear_cross_entropy"]
