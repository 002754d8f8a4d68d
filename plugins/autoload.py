"""The one import hook of this package: makes ``Trainer(strategy="unsloth")`` work without an import of ours.

Lightning has no entry point for strategies. torch calls every entry point of the group ``torch.backends`` at the end of
``import torch``, and turns an exception there into a failed import; so this module imports nothing at its top, and
``install`` lets none out. It only puts a finder in place that adds three names to Lightning's registry of strategies
when Lightning is imported. ``UNSLOTH_PLUGINS_AUTOLOAD=0`` switches it off.
"""


def install() -> None:
    """Called by torch."""
    try:
        import os

        if os.environ.get("UNSLOTH_PLUGINS_AUTOLOAD", "1").lower() in ("0", "false", "off", "no"):
            return
        from unsloth_plugins.lightning.registration import install_finder

        install_finder()
    except Exception as error:
        import logging

        logging.getLogger("unsloth_plugins").warning(
            "strategy='unsloth' could not be offered to Lightning (%r); `import unsloth_plugins.lightning` says why.",
            error,
        )
