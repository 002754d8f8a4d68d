"""Training in float16 under a gradient scaler where outputs of single experts leave its range."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from conftest import batch_of, tiny_gpt_oss
from peft import LoraConfig, get_peft_model

import unsloth_plugins

on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
WHERE = [("cpu", 25), pytest.param("cuda", 100, marks=[pytest.mark.gpu, on_cuda])]
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"])


def _large() -> Any:
    """TINY with two experts for every token in its second layer, that cancel but for a tenth: 80,000 and -72,000."""
    model = tiny_gpt_oss()
    mlp = model.model.layers[1].mlp
    with torch.no_grad():
        mlp.router.weight.zero_()
        mlp.router.bias.copy_(torch.tensor([5.0, 5.0, 0.0, 0.0]))
        for parameter in mlp.experts.parameters():
            parameter[1] = parameter[0]
        largest: list[float] = []
        seen: list[torch.Tensor] = []
        hook = mlp.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        model(**batch_of(2, 32))
        hook.remove()
        experts = mlp.experts
        flat, ones = seen[0].flatten(0, 1), torch.ones(64, 1)
        for scale in (1.0, None):
            alone = experts(flat, torch.zeros(64, 1, dtype=torch.long), ones)
            largest.append(alone.abs().max().item())
            if scale is not None:
                experts.down_proj *= 8e4 / largest[0]
                experts.down_proj_bias.zero_()
        assert largest[1] > 65_504
        experts.down_proj[1] = -0.9 * experts.down_proj[0]
    return model


def _train(model: Any, device: str, steps: int, half: bool) -> tuple[list[float], list[bool]]:
    """Losses, and which steps the scaler skipped."""
    if half:
        model = model.half()
    torch.manual_seed(0)
    model = get_peft_model(model.to(device), LORA)
    unsloth_plugins.apply(model)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert all(parameter.dtype == torch.float32 for parameter in trained)
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    scaler = torch.amp.GradScaler(device, init_scale=1024, enabled=half)
    losses, skipped = [], []
    for step in range(steps):
        batch = {name: tensor.to(device) for name, tensor in batch_of(2, 32, seed=step % 4).items()}
        with torch.autocast(device, dtype=torch.float16, enabled=half):
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        losses.append(loss.item())
        skipped.append(not norm.isfinite().item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return losses, skipped


@pytest.mark.parametrize(("device", "steps"), WHERE)
def test_case_1_training_in_float16_follows_float32(device: str, steps: int) -> None:
    model = _large()
    want, _ = _train(copy.deepcopy(model), device, steps, half=False)
    got, skipped = _train(model, device, steps, half=True)
    assert not any(skipped[10:]), skipped
    for ours, truth in zip(got, want, strict=True):
        assert abs(ours - truth) <= 0.02 * truth, (got, want)
    assert want[-1] < 0.995 * want[0]  # it learns something to follow
