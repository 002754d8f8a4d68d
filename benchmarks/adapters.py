"""The same training steps in transformers' Trainer, Lightning, Axolotl and a bare loop: what an adapter costs.

Each runs in a process of its own from the same checkpoint of random weights: LoRA on all linear layers and experts,
bf16 autocast, gradient checkpointing, batch 1, learning rate zero. The measured steps are timed together, from the end
of the last one for warming up, so that the trainer's own work counts. The device is waited for before and after them
alone: what trainers can be told not to wait for in every step (logs, a look whether the loss is a number, tokens
counted) is switched off in all of them.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import rows
from benchmarks.models import SIZES, config_of, find_or_write_checkpoint
from benchmarks.worker import MARK, POLICIES, TARGETS, _checkpointed, _memory, _optimizer, _reset_memory

_COLUMNS = ("impl", "ctx", "peak_gib", "reserved_gib", "host_gib", "step_s", "tok_s", "loss")
WITHIN = 0.03


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", choices=sorted(SIZES), default="gpt-oss-20b")
    parser.add_argument("--ctx", type=int, default=16384, help="tokens of a step (%(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="measured, after two for warming up (%(default)s)")
    parser.add_argument("--cap-gib", type=float, default=79.0, help="memory cap (%(default)s, an 80 GB card)")
    parser.add_argument("--policy", choices=sorted(POLICIES), default="auto")
    parser.add_argument("--lora-rank", type=int, default=32)
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--optimizer", choices=("adamw_8bit", "adamw"), default="adamw_8bit")
    parser.add_argument("--trainers", default="bare,hf,lightning", help=f"any of {', '.join(TRAINERS)}")
    parser.add_argument("--checkpoint", type=Path, help="keep the random weights here, and use them if they are there")
    parser.add_argument("--commit", help="shown in the rows (default: git's)")
    parser.add_argument("--json", type=Path, help="write the rows here")


class Clock:
    """Time of the measured steps, and their memory.

    Axolotl starts new high-water marks whenever it logs, so they are looked at when each step ends.
    """

    def __init__(self, warm_up: int, steps: int) -> None:
        self.warm_up, self.steps, self.seconds = warm_up, steps, 0.0
        self.memory: dict[str, float] = {}
        self._count, self._start = 0, 0.0

    def step_is_over(self) -> None:
        """Called by each trainer, after its optimizer's step."""
        self._count += 1
        if self._count == self.warm_up:
            _synchronise()
            gc.collect()
            _reset_memory()
            self._start = time.perf_counter()
        elif self._count > self.warm_up:
            if self._count == self.steps:
                _synchronise()
                self.seconds = (time.perf_counter() - self._start) / (self.steps - self.warm_up)
            now = _memory()
            self.memory = {key: max(value, self.memory.get(key, 0.0)) for key, value in now.items()}


def _synchronise() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _model(options: dict[str, Any]) -> Any:
    import torch
    from peft import LoraConfig, get_peft_model

    from unsloth_plugins.core.mxfp4 import load_mxfp4

    torch.manual_seed(0)
    base = load_mxfp4(options["path"], device_map={"": 0} if torch.cuda.is_available() else None)
    rank = options["rank"]
    return get_peft_model(base, LoraConfig(r=rank, lora_alpha=rank, target_modules=TARGETS))


def _row(options: dict[str, Any]) -> dict[str, Any]:
    """The one row of tokens that every step trains on."""
    import torch

    draw = torch.Generator().manual_seed(options["ctx"])
    ids = torch.randint(3, options["vocab"], (options["ctx"],), generator=draw)
    return {"input_ids": ids, "labels": ids}


def _bare(options: dict[str, Any], clock: Clock) -> tuple[Any, float]:
    import torch

    import unsloth_plugins

    model = _model(options)
    _checkpointed(model)
    unsloth_plugins.apply(model, **POLICIES[options["policy"]])
    optimizer = _optimizer(options["optimizer"], [p for p in model.parameters() if p.requires_grad])
    device = next(model.parameters()).device
    batch = {name: value[None].to(device) for name, value in _row(options).items()}
    loss = torch.zeros(())
    for _ in range(options["steps"]):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        clock.step_is_over()
    return model, loss.item()


def _hf(options: dict[str, Any], clock: Clock) -> tuple[Any, float]:
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from unsloth_plugins.hf_trainer import UnslothCallback

    class Ticks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            clock.step_is_over()

    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            max_steps=options["steps"],
            per_device_train_batch_size=1,
            learning_rate=0.0,
            lr_scheduler_type="constant",
            optim="adamw_8bit" if options["optimizer"] == "adamw_8bit" else "adamw_torch",
            max_grad_norm=0.0,
            bf16=True,
            gradient_checkpointing=True,
            logging_steps=options["steps"],
            logging_nan_inf_filter=False,
            save_strategy="no",
            report_to=[],
            dataloader_num_workers=1,
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        )
        callbacks = [UnslothCallback(**POLICIES[options["policy"]]), Ticks()]
        data: Any = [_row(options)] * options["steps"]
        trainer = Trainer(_model(options), args, train_dataset=data, callbacks=callbacks)
        trainer.train()
    return trainer.model, [log["loss"] for log in trainer.state.log_history if "loss" in log][-1]


def _lightning(options: dict[str, Any], clock: Clock) -> tuple[Any, float]:
    import torch
    from lightning.pytorch import Callback, LightningModule, Trainer
    from torch.utils.data import DataLoader

    from unsloth_plugins.lightning import UnslothStrategy

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.last = _model(options), torch.zeros(())
            _checkpointed(self.model)

        def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch, use_cache=False).loss
            self.last = loss.detach()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            optimizer: torch.optim.Optimizer = _optimizer(
                options["optimizer"], [p for p in self.parameters() if p.requires_grad]
            )
            return optimizer

    class Ticks(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            clock.step_is_over()

    module = Module()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            strategy=UnslothStrategy(**POLICIES[options["policy"]]),
            accelerator="gpu" if torch.cuda.is_available() else "cpu",
            devices=1,
            precision="bf16-mixed",
            max_steps=options["steps"],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            callbacks=[Ticks()],
        )
        trainer.fit(module, DataLoader([_row(options)] * options["steps"], batch_size=1, num_workers=1))  # type: ignore[arg-type]
    return module.model, module.last.item()


def _axolotl(options: dict[str, Any], clock: Clock) -> tuple[Any, float]:
    import torch
    import yaml
    from axolotl.cli.config import load_cfg
    from axolotl.common.datasets import load_datasets
    from axolotl.train import train

    from benchmarks import axolotl_clock

    axolotl_clock.step_is_over = clock.step_is_over
    policy = POLICIES[options["policy"]]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        row = {key: value.tolist() for key, value in _row(options).items()}
        row["attention_mask"] = [1] * options["ctx"]
        (folder / "data.jsonl").write_text((json.dumps(row) + "\n") * options["steps"])
        settings = {
            "base_model": options["path"],
            "plugins": ["unsloth_plugins.axolotl.UnslothPlugin", "benchmarks.axolotl_clock.ClockPlugin"],
            "datasets": [{"path": str(folder / "data.jsonl"), "ds_type": "json", "type": None}],
            "dataset_prepared_path": str(folder / "prepared"),
            "output_dir": str(folder / "out"),
            "sequence_len": options["ctx"],
            "adapter": "lora",
            "lora_r": options["rank"],
            "lora_alpha": options["rank"],
            "lora_target_modules": TARGETS,
            "micro_batch_size": 1,
            "gradient_accumulation_steps": 1,
            "max_steps": options["steps"],
            "learning_rate": 0.0,
            "lr_scheduler": "constant",
            "optimizer": "adamw_8bit" if options["optimizer"] == "adamw_8bit" else "adamw_torch",
            "max_grad_norm": 0.0,
            "bf16": torch.cuda.is_available(),  # Axolotl refuses it elsewhere
            "attn_implementation": "eager",
            "gradient_checkpointing": True,
            "logging_steps": options["steps"],
            "include_tkps": False,
            "save_strategy": "no",
            "dataloader_num_workers": 1,
            **({"unsloth": policy} if policy else {}),
        }
        (folder / "config.yml").write_text(yaml.safe_dump(settings))
        cfg = load_cfg(str(folder / "config.yml"))
        model, _, trainer = train(cfg=cfg, dataset_meta=load_datasets(cfg=cfg))
    return model, [log["loss"] for log in trainer.state.log_history if "loss" in log][-1]


TRAINERS: dict[str, Callable[[dict[str, Any], Clock], tuple[Any, float]]] = {
    "bare": _bare,
    "hf": _hf,
    "lightning": _lightning,
    "axolotl": _axolotl,
}


def _child(options: dict[str, Any]) -> dict[str, Any]:
    """One trainer, in this process."""
    import torch

    from unsloth_plugins.core import applied_to

    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory / 2**30
        torch.cuda.set_per_process_memory_fraction(min(1.0, options["cap_gib"] / total))
    clock = Clock(options["warm_up"], options["steps"])
    model, loss = TRAINERS[options["impl"]](options, clock)
    applied = applied_to(model)
    assert applied is not None
    print(applied.report(), file=sys.stderr, flush=True)
    return {
        **clock.memory,
        "step_s": round(clock.seconds, 4),
        "tok_s": round(options["ctx"] / clock.seconds, 1),
        "loss": loss,
        "trainable_params": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "backend": next((row.detail for row in applied.rows if row.feature == "attention"), ""),
        "versions": rows.versions() | rows.versions_of("lightning", "accelerate", "axolotl"),
    }


def _measure(name: str, settings: dict[str, Any], log: Path) -> dict[str, Any]:
    """The row of one trainer, from a process of its own."""
    environment = dict(
        os.environ, HF_HUB_OFFLINE="1", AXOLOTL_DO_NOT_TRACK="1", PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"
    )
    command = [sys.executable, "-m", "benchmarks.adapters", json.dumps(settings | {"impl": name})]
    with log.open("w") as errors:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, cwd=Path(__file__).parent.parent
        )
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            answer: dict[str, Any] = json.loads(line[len(MARK) :])
            return answer
    return {"error": f"the process ended with status {done.returncode}: see {log}"}


def spread(measured: list[dict[str, Any]], key: str) -> float:
    """How far the largest value is above the smallest, as a fraction of that."""
    found = [row[key] for row in measured]
    return max(found) / min(found) - 1


def run(options: argparse.Namespace) -> int:
    """Write or find the checkpoint, run the trainers one after the other, print a table and how far they differ."""
    import torch

    names = [name for name in options.trainers.split(",") if name]
    for name in names:
        if name not in TRAINERS:
            sys.exit(f"--trainers: expected any of {', '.join(TRAINERS)}; got {name!r}.")
    config = config_of(options.model, options.layers)
    head = rows.common("adapters", options.commit)
    head |= {key: getattr(options, key) for key in ("model", "ctx", "policy", "lora_rank", "optimizer", "cap_gib")}
    head |= {"layers": config.num_hidden_layers, "weights": "mxfp4", "repeats": options.steps}
    out: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.checkpoint or Path(scratch) / "model"
        find_or_write_checkpoint(folder, options.model, options.layers, "balanced")
        settings = {
            "path": str(folder.resolve()),
            "rank": options.lora_rank,
            "policy": options.policy,
            "optimizer": options.optimizer,
            "cap_gib": options.cap_gib,
            "ctx": options.ctx,
            "vocab": min(200_000, config.vocab_size),
            "warm_up": 2,
            "steps": 2 + options.steps,
        }
        logs = options.json.parent if options.json else Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        for name in names:
            out.append(head | {"impl": name} | _measure(name, settings, logs / f"adapters-{name}.log"))
            print(rows.table(out[-1:], _COLUMNS), out[-1].get("error", ""), flush=True)
            rows.write(out, options.json)
    print(rows.table(out, _COLUMNS))
    measured = [row for row in out if "error" not in row]
    if not measured or len(measured) < len(out):
        return 1
    apart = {key: spread(measured, key) for key in ("tok_s", "peak_gib")}
    print("Apart by", ", ".join(f"{100 * value:.1f} % in {key}" for key, value in apart.items()))
    same = {row["trainable_params"] for row in measured}
    if len(same) > 1 or spread(measured, "loss") > 0.001:
        print("They do not train the same: parameters", same, "losses", [row["loss"] for row in measured])
        return 1
    return int(torch.cuda.is_available() and max(apart.values()) > WITHIN)


if __name__ == "__main__":
    try:
        answer = _child(json.loads(sys.argv[1]))
    except Exception as error:
        traceback.print_exc()
        answer = {"error": repr(error)[:500]}
    print(MARK + json.dumps(answer), flush=True)
