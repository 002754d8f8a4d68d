"""Axolotl: ``plugins: [unsloth_plugins.axolotl.UnslothPlugin]``, options under the key ``unsloth:``."""

from importlib.util import find_spec

try:
    from unsloth_plugins.axolotl.plugin import UnslothPlugin
except ImportError as error:
    if find_spec("axolotl.integrations") is None:
        raise
    # Axolotl catches an ImportError, logs it and trains on without the plugin. It lets any other kind through.
    raise RuntimeError(
        "expected unsloth_plugins.axolotl to import beside the installed axolotl; "
        f"got {type(error).__name__}: {error}. Install what is missing (pip install 'unsloth-plugins[axolotl]'), "
        "or remove unsloth_plugins.axolotl.UnslothPlugin from `plugins:`."
    ) from error

__all__ = ["UnslothPlugin"]


def __getattr__(name: str) -> object:
    """For a misspelt class under ``plugins:``, which Axolotl looks up here."""
    raise AttributeError(
        f"expected UnslothPlugin in {__name__}; got {name!r}. "
        f"Write `- {__name__}.UnslothPlugin` under `plugins:` in the config."
    )
