"""``python -m benchmarks step ...``: one subcommand a benchmark, one JSON list of rows a run."""

from __future__ import annotations

import argparse
import sys

from benchmarks import step


def main() -> int:
    """Parse the command line and run one benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    step.add_arguments(commands.add_parser("step", help="one training step of gpt-oss", description=step.__doc__))
    return step.run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
