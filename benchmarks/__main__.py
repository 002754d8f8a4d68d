"""``python -m benchmarks step ...``: one subcommand a benchmark, one JSON list of rows a run."""

from __future__ import annotations

import argparse
import sys

from benchmarks import adapters, attention, experts, layers, loss, merge, offload, records, step, training


def main() -> int:
    """Parse the command line and run one benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    about = {
        "step": (step, "one training step of gpt-oss or Mistral-7B"),
        "attention": (attention, "attention kernels"),
        "experts": (experts, "the expert blocks of gpt-oss"),
        "merge": (merge, "merging LoRA into gpt-oss"),
        "adapters": (adapters, "the same steps in each trainer"),
        "offload": (offload, "offloaded checkpointing beside plain checkpointing"),
        "loss": (loss, "the loss head"),
        "layers": (layers, "norms, rotary embedding and gated activations"),
        "records": (records, "all runs behind the README's tables, and the tables"),
        "training": (training, "long training, stock against patched"),
    }
    for name, (module, summary) in about.items():
        module.add_arguments(commands.add_parser(name, help=summary, description=module.__doc__))
    options = parser.parse_args()
    return about[options.command][0].run(options)


if __name__ == "__main__":
    sys.exit(main())
