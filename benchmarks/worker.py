"""One implementation in a process of its own: builds the model, then measures one step whenever it is told to.

Reads one JSON request a line from standard input, answers with one line that starts with ``MARK``.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
import traceback
import zlib
from pathlib import Path
from typing import Any

from benchmarks.rows import versions

MARK = "@row "
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
POLICIES: dict[str, dict[str, Any]] = {
    "auto": {},
    "min_memory": {"memory_policy": "min_memory"},
    "offload_all": {"memory_policy": "offload_all", "offload_min_bytes": 0},
    "on_device": {"memory_policy": "on_device"},
}


def _ours(options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    import torch
    from peft import LoraConfig, get_peft_model

    import unsloth_plugins
    from benchmarks.models import build, config_of
    from unsloth_plugins.core.mxfp4 import load_mxfp4

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device_map = {"": 0} if device.type == "cuda" else None
    started = time.perf_counter()
    dtype = getattr(torch, options["dtype"])
    if options["path"] is None:
        config = config_of(options["model"], options["layers"])
        base = build(config, options["weights"], options["routing"], device, dtype)
    elif options["weights"] in ("mxfp4", "streamed"):
        base = load_mxfp4(options["path"], device_map=device_map)
    elif options["weights"] == "nf4":
        base = _four_bit(options["path"], device_map, dtype)
    else:
        base = _dequantised(options["path"], device_map)
    load = _memory() | {"load_s": round(time.perf_counter() - started, 1)}
    if options["train"] == "full":
        model = base.requires_grad_(True)
    else:
        targets = _targets(base.config.num_hidden_layers, options["expert_layers"])
        model = get_peft_model(base, LoraConfig(r=options["rank"], lora_alpha=options["rank"], target_modules=targets))
    _checkpointed(model)
    given = dict(POLICIES[options["policy"]], checkpoint_pairs=options["pairs"])
    if options["impl"] != "ours":
        given["attention"] = options["impl"].removeprefix("ours_")
    if options["weights"] == "streamed":
        given["weights"] = "streamed"
    applied = unsloth_plugins.apply(model, **given)
    print(applied.report(), file=sys.stderr, flush=True)
    _deterministic_adapters(model)
    backend = next((row.detail for row in applied.rows if row.feature == "attention"), "")
    return model, {"load": load, "backend": backend, "streamed": applied.stream is not None}


def _targets(layers: int, expert_layers: int | None) -> list[str]:
    """All linear layers, with experts only in the last ``expert_layers`` where that is given."""
    if expert_layers is None:
        return TARGETS
    fused = ("gate_up_proj", "down_proj")
    last = range(layers - expert_layers, layers)
    return TARGETS[:4] + [f"layers.{number}.mlp.experts.{name}" for number in last for name in fused]


def _transformers(options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    import torch
    from peft import LoraConfig, get_peft_model

    device_map = {"": 0} if torch.cuda.is_available() else None
    if options["weights"] == "nf4":
        config = LoraConfig(r=options["rank"], lora_alpha=options["rank"], target_modules=TARGETS)
        base = _four_bit(options["path"], device_map, getattr(torch, options["dtype"]))
        model = get_peft_model(base, config)
        _checkpointed(model)
        _deterministic_adapters(model)
        return model, {"backend": model.config._attn_implementation}
    base = _dequantised(options["path"], device_map)
    if options["train"] == "full":
        model = base.requires_grad_(True)
        _checkpointed(model)
        return model, {"backend": "eager"}
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = LoraConfig(
        r=options["rank"], lora_alpha=options["rank"], target_modules=TARGETS[:4], target_parameters=parameters
    )
    model = get_peft_model(base, config)
    _checkpointed(model)
    _deterministic_adapters(model)
    return model, {"backend": "eager"}


def _unsloth(options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    import torch
    import unsloth  # noqa: F401  # must come before torch
    from unsloth import FastLanguageModel

    model, _ = FastLanguageModel.from_pretrained(
        model_name=options["path"],
        max_seq_length=options["longest"],
        dtype=getattr(torch, options["dtype"]),
        load_in_4bit=options["weights"] in ("mxfp4", "streamed", "nf4"),
        local_files_only=True,
        **({"unsloth_tiled_mlp": True} if options["impl"] == "unsloth_tiled" else {}),
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=options["rank"],
        lora_alpha=options["rank"],
        target_modules=TARGETS,
        use_gradient_checkpointing="unsloth",
        random_state=1,
    )
    FastLanguageModel.for_training(model)
    _deterministic_adapters(model)
    return model, {"backend": "its own"}


BUILDERS = {
    "ours": _ours,
    "ours_flex": _ours,
    "ours_triton": _ours,
    "transformers": _transformers,
    "unsloth": _unsloth,
    "unsloth_tiled": _unsloth,
}


def _dequantised(path: str, device_map: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, Mxfp4Config

    config = Mxfp4Config(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(
        path, quantization_config=config, dtype=torch.bfloat16, device_map=device_map
    )


def _four_bit(path: str, device_map: Any, dtype: Any) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, device_map=device_map)
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            module.compute_dtype = dtype  # the checkpoint names one, which need not be this card's
    return model


def _checkpointed(model: Any) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    model.train()


def _deterministic_adapters(model: Any) -> None:
    """Fill the adapters by their names, so that implementations with PEFT's names see the same ones."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                draw = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()))
                parameter.normal_(std=0.01, generator=draw)


def _memory() -> dict[str, float]:
    import torch

    status = Path("/proc/self/status").read_text()
    host = round(int(status.split("VmHWM:")[1].split()[0]) / 2**20, 2)  # since `_reset_memory`
    if not torch.cuda.is_available():
        return {"peak_gib": host, "reserved_gib": host, "host_gib": host}
    return {
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3),
        "reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 3),
        "host_gib": host,
    }


def _reset_memory() -> None:
    """Start new high-water marks, on the device and of the process."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    Path("/proc/self/clear_refs").write_text("5")


class Stepper:
    """A model with an optimizer of learning rate zero: every step does the full work and sees the same weights."""

    def __init__(self, model: Any, optimizer: str, dtype: str = "bfloat16") -> None:
        import torch

        self.torch, self.model = torch, model
        self.device = next(model.parameters()).device
        self.trainable = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = _optimizer(optimizer, self.trainable)
        self.dtype = getattr(torch, dtype)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)

    def step(self, ctx: int, *, norm: bool = False) -> tuple[float, float | None]:
        """One whole step on ``ctx`` random tokens; loss and, where asked, the gradient's norm."""
        torch = self.torch
        draw = torch.Generator(self.device).manual_seed(ctx)
        highest = min(200_000, self.model.config.vocab_size)
        ids = torch.randint(3, highest, (1, ctx), device=self.device, generator=draw)
        with torch.autocast(self.device.type, dtype=self.dtype):
            loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        self.scaler.scale(loss).backward()
        length = None
        if norm:
            self.scaler.unscale_(self.optimizer)
            grads = [p.grad for p in self.trainable if p.grad is not None]
            norms = [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in grads]  # no copy in float32
            length = torch.stack(norms).norm().item()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item(), length

    def measure(self, ctx: int, warm_up: int, steps: int, report: bool) -> dict[str, Any]:
        """Median seconds of ``steps`` steps in a row.

        One step goes before several, so that no time of theirs goes into getting memory from the driver.

        Args:
            ctx: tokens of a step.
            warm_up: tokens of an untimed step before all others; 0 for none.
            steps: that are timed.
            report: loss and norm of the first step of ``ctx`` tokens as well.
        """
        torch = self.torch
        cuda = self.device.type == "cuda"
        answer: dict[str, Any] = {}

        def step(length: int) -> None:
            first = report and length == ctx and "loss" not in answer
            found = self.step(length, norm=first)
            if first:
                answer["loss"], answer["grad_norm"] = found

        try:
            _reset_memory()  # `auto` learns from the peak of a step, which a longer one's would hide
            if warm_up:
                step(warm_up)
            gc.collect()
            _reset_memory()
            if steps > 1:
                step(ctx)
            times = []
            for _ in range(steps):
                if cuda:
                    torch.cuda.synchronize()
                started = time.perf_counter()
                step(ctx)
                if cuda:
                    torch.cuda.synchronize()
                times.append(time.perf_counter() - started)
            answer["step_s"] = statistics.median(times)
            answer |= _memory()
        except torch.OutOfMemoryError:
            traceback.print_exc()
            answer["oom"] = True
            self.optimizer.zero_grad(set_to_none=True)
        self._make_room()
        return answer

    def _make_room(self) -> None:
        """The other implementations share this card and take turns: what only saves time goes."""
        if "unsloth_plugins" in sys.modules:  # else the model is a peer's
            from unsloth_plugins.core import applied_to

            applied = applied_to(self.model)
            if applied is not None and applied.budget is not None:
                applied.budget.rest()
        gc.collect()
        if self.device.type == "cuda":
            self.torch.cuda.empty_cache()


def _optimizer(name: str, parameters: Any) -> Any:
    if name == "adamw_8bit":
        import bitsandbytes

        return bitsandbytes.optim.AdamW8bit(parameters, lr=0.0)
    import torch

    return torch.optim.AdamW(parameters, lr=0.0, fused=parameters[0].is_cuda)


def main() -> None:
    """Import, build the model after the first line of standard input, then serve requests until it ends."""
    options = json.loads(sys.argv[1])
    if options["impl"].startswith("unsloth"):
        import unsloth  # noqa: F401  # must come before torch
    import peft  # noqa: F401  # half a minute of imports that several processes can have at the same time
    import torch

    if not sys.stdin.readline():
        return

    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory / 2**30
        torch.cuda.set_per_process_memory_fraction(min(1.0, options["cap_gib"] / total))
    try:
        model, about = BUILDERS[options["impl"]](options)
        stepper = Stepper(model, options["optimizer"], options["dtype"])
        about["trainable_params"] = sum(p.numel() for p in stepper.trainable)
        about["versions"] = versions()
        answer = about
    except Exception as error:
        traceback.print_exc()
        answer = {"error": repr(error)[:500]}
    print(MARK + json.dumps(answer), flush=True)
    if "error" in answer:
        return
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = stepper.measure(**request)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": repr(error)[:500]}
        print(MARK + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
