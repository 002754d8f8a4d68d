"""Write what ``axolotl.yml`` trains on to runs/axolotl: the model, tokenized rows and a fresh LoRA adapter."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from assets import smollm2_dir, sotu_texts
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

CTX, STEPS = 256, 12


def main() -> None:
    """The rows are those of ``train.py``: windows of each 20th speech, without the four that are held out there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("runs/axolotl"), help="folder (%(default)s)")
    folder: Path = parser.parse_args().output
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(smollm2_dir(), folder / "model", dirs_exist_ok=True)

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    rows: list[list[int]] = []
    for path in sotu_texts()[::20]:
        ids = tokenizer(path.read_text())["input_ids"]
        rows += [ids[start : start + CTX] for start in range(0, len(ids) - CTX + 1, CTX)]
    with (folder / "rows.jsonl").open("w") as file:
        for ids in rows[:STEPS]:
            file.write(json.dumps({"input_ids": ids, "attention_mask": [1] * CTX, "labels": ids}) + "\n")

    set_seed(0)
    config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "model"), config).save_pretrained(folder / "adapter")
    print(f"{folder}: model, adapter, {STEPS} rows of {CTX} tokens")


if __name__ == "__main__":
    main()
