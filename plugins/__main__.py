"""``python -m unsloth_plugins`` and the console script."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line, or say what it needs."""
    try:
        import typer  # noqa: F401
    except ImportError:
        sys.exit("The command line needs typer and rich. Install them: pip install 'unsloth-plugins[cli]'.")
    from unsloth_plugins.cli import app

    app()


if __name__ == "__main__":
    main()
