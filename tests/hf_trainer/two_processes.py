"""Run as a script under a launcher, or alone: train on every process, and write what each rank ends up with.

argv: "ddp" or "fsdp2", gradient accumulation steps, "lora" or "head" (modules_to_save, experts without tokens), folder.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import torch  # noqa: E402
from accelerate.state import AcceleratorState, DistributedType, PartialState  # noqa: E402
from conftest import batch_of, tiny_gpt_oss  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from transformers import Trainer, TrainingArguments, set_seed  # noqa: E402

from unsloth_plugins.core.loss import LazyLogits  # noqa: E402
from unsloth_plugins.core.mxfp4 import pack_experts  # noqa: E402
from unsloth_plugins.hf_trainer import UnslothCallback  # noqa: E402

TARGETS = ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]


def let_accelerate_shard_on_a_cpu() -> None:
    """accelerate reads FSDP's settings on a CPU too, and then leaves them out: put them back where it looks."""
    original = AcceleratorState.__init__

    def patched(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = patched


def make(kind: str, folder: Path) -> Any:
    """Packed gpt-oss from a folder, with LoRA on experts; ``"head"``: top-1 routing, two experts without tokens."""
    base = tiny_gpt_oss(num_experts_per_tok=1) if kind == "head" else tiny_gpt_oss()
    if kind == "head":
        for layer in base.model.layers:
            torch.nn.init.zeros_(layer.mlp.router.weight)
            layer.mlp.router.bias.data = torch.tensor([1.0, 1.0, -1e4, -1e4])
            layer.mlp.router.weight.data[:2] = torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
    set_seed(3)
    extra = {"modules_to_save": ["lm_head"]} if kind == "head" else {}
    packed = pack_experts(base)
    packed.config.name_or_path = str(folder / f"base{os.environ.get('RANK', 0)}")
    packed.save_pretrained(packed.config.name_or_path)
    return get_peft_model(packed, LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, **extra))


def main() -> None:
    mode, accumulate, kind, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    if mode == "fsdp2":
        let_accelerate_shard_on_a_cpu()
    args = TrainingArguments(
        output_dir=str(folder / "out"),
        use_cpu=True,
        report_to=[],
        per_device_train_batch_size=1,
        gradient_accumulation_steps=accumulate,
        max_steps=3,
        logging_steps=1,
        learning_rate=0.1,
        lr_scheduler_type="constant",
        optim="sgd",
        gradient_checkpointing=True,
        max_grad_norm=1e9,
        save_strategy="steps",
        save_steps=3,
        disable_tqdm=True,
    )
    materialized: list[int] = []
    original = LazyLogits.materialize
    LazyLogits.materialize = lambda self: (materialized.append(1), original(self))[1]  # type: ignore[method-assign]
    model = make(kind, folder)
    rows = [{key: value[0] for key, value in batch_of(1, 24, seed=i).items()} for i in range(6)]
    callback = UnslothCallback(offload_min_bytes=0)
    trainer = Trainer(model, args, train_dataset=rows, callbacks=[callback])
    trainer.train()
    trainer.save_model(str(folder / "final"))
    trained, packed = {}, {}
    for name, parameter in trainer.model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if parameter.requires_grad:
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            trained[name.removeprefix("module.")] = whole.detach().clone()
        elif parameter.dtype == torch.uint8:
            packed[name] = (parameter.numel(), local.numel())
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    result = {"trained": trained, "losses": losses, "packed": packed, "materialized": len(materialized)}
    if mode == "ddp":
        result["has_merged"] = callback.save_merged(folder / "merged", dtype="fp32") is not None
    torch.save(result, folder / f"rank{trainer.args.process_index}.pt")


if __name__ == "__main__":
    main()
