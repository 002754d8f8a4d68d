"""What vLLM makes of our files: merged gpt-oss in both layouts, and an adapter that it loads beside its base."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_gpt_oss
from merge_cases import EVERYTHING, reload, save_llama, tensors, train_llama, train_packed
from safetensors import safe_open
from transformers import AutoModelForCausalLM, Mxfp4Config

from unsloth_plugins.core.export import merge
from unsloth_plugins.core.mxfp4 import pack_experts

PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
if not PYTHON.exists():
    pytest.skip("vLLM has an environment of its own: `make test-vllm`", allow_module_level=True)
pytestmark = pytest.mark.slow

SIZES: dict[str, Any] = dict(hidden_size=128, head_dim=64, intermediate_size=128)  # head sizes that vLLM has on a CPU
PROMPTS = [
    torch.randint(2, 160, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in (5, 21)
]


def save_gpt_oss(folder: Path) -> Path:
    """A packed base, no bias of which is zero, as all would be in a new model."""
    model = tiny_gpt_oss(**SIZES)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    pack_experts(model).save_pretrained(folder)
    return folder


def run_vllm(folder: Path, model: Path, **options: Any) -> Path:
    """What vLLM made of a job, on two cores of a CPU."""
    job = dict(model=str(model), dtype="bfloat16", lora=None, prompts=PROMPTS, count=4, without_amx=False) | options
    (folder / "job.json").write_text(json.dumps(job))
    script = Path(__file__).with_name("run_vllm.py")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    env |= {"VLLM_NO_USAGE_STATS": "1"}
    line = [str(PYTHON), str(script), str(folder / "job.json"), str(folder / "found")]
    # In the project's own folder an editable install may have left metadata that vLLM's torch can't follow.
    done = subprocess.run(line, capture_output=True, text=True, env=env, timeout=280, cwd=folder)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder / "found"


def decoded(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """MXFP4 by its specification: 32 numbers under a power of two, the first of each byte in its low nibble."""
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = torch.stack((packed % 16, packed // 16), -1).flatten(-2).long()
    numbers = magnitudes[codes % 8] * torch.where(codes < 8, 1.0, -1.0)
    return numbers * torch.exp2(scales.float() - 127).repeat_interleave(32, -1)


@torch.no_grad()
def assert_as_in_transformers(found: list[dict[str, Any]], merged: Path, other: Path) -> None:
    """First log probabilities are those of the merged model, and further from those of the base.

    vLLM computes in bfloat16: it may be off by twice as much as transformers is, which does so too.
    """
    want, base = (reload(folder) for folder in (merged, other))
    rounded = reload(merged, torch.bfloat16)
    for ids, one in zip(PROMPTS, found, strict=True):
        models = (want, base, rounded)
        near, far, bf16 = (model(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1) for model in models)
        rounding = (bf16 - near).abs().max().item()
        first = {int(token): value for token, value in one["logprobs"][0].items()}
        assert max(abs(value - near[token].item()) for token, value in first.items()) < 2 * rounding < 0.15
        assert max(abs(value - far[token].item()) for token, value in first.items()) > 0.2
        assert one["tokens"][0] == near.argmax().item()


@pytest.mark.parametrize("dtype", ["bf16", "mxfp4"])
def test_a_merged_gpt_oss_in_both_layouts(tmp_path: Path, dtype: str) -> None:
    without_amx = dtype == "mxfp4" and not torch.cpu._is_amx_tile_supported()
    if without_amx and not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("vLLM's MXFP4 experts need a CPU with AMX or AVX512-BF16")
    base = save_gpt_oss(tmp_path / "base")
    train_packed(base, tmp_path / "adapter", std=0.3)
    merge(base, tmp_path / "adapter", tmp_path / "out", dtype=dtype)
    merge(tmp_path / "out", [], tmp_path / "merged", dtype="fp32")
    merge(base, [], tmp_path / "untrained", dtype="fp32")
    found = json.loads(run_vllm(tmp_path, tmp_path / "out", without_amx=without_amx).read_text())
    assert_as_in_transformers(found, tmp_path / "merged", tmp_path / "untrained")


def test_where_vllm_puts_each_tensor_of_an_mxfp4_folder(tmp_path: Path) -> None:
    base = save_gpt_oss(tmp_path / "base")
    train_packed(base, tmp_path / "adapter", std=0.3)
    merge(base, tmp_path / "adapter", tmp_path / "dense", dtype="fp32")
    merge(base, tmp_path / "adapter", tmp_path / "out", dtype="mxfp4")
    merged = tensors(tmp_path / "dense")
    dequantised = Mxfp4Config(dequantize=True)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out", quantization_config=dequantised).state_dict()
    with safe_open(run_vllm(tmp_path, tmp_path / "out", prompts=[], without_amx=True), "pt") as file:
        went_to, loaded = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}
    assert went_to.keys() == tensors(tmp_path / "out").keys() and all(went_to.values())
    assert set(went_to.values()) == loaded.keys()

    def assert_equal(name: str, wanted: torch.Tensor) -> None:
        value = loaded.pop(name)
        assert value.dtype == torch.bfloat16 and wanted.any()
        assert torch.equal(value[: len(wanted)], wanted.bfloat16()), name
        assert not value[len(wanted) :].any()  # rows of the vocabulary up to a multiple of 64

    assert_equal("model.embedding.weight", merged["model.embed_tokens.weight"])
    assert_equal("model.norm.weight", merged["model.norm.weight"])
    assert_equal("lm_head.weight", merged["lm_head.weight"])
    for layer in (f"model.layers.{index}." for index in range(4)):
        for name in ("input_layernorm", "post_attention_layernorm", "mlp.router"):
            assert_equal(f"{layer}{name}.weight", merged[f"{layer}{name}.weight"])
        assert_equal(f"{layer}mlp.router.bias", merged[f"{layer}mlp.router.bias"])
        for name in ("sinks", "o_proj.weight", "o_proj.bias"):
            assert_equal(f"{layer}attn.{name}", merged[f"{layer}self_attn.{name}"])
        for kind in ("weight", "bias"):
            parts = [merged[f"{layer}self_attn.{part}_proj.{kind}"] for part in "qkv"]
            assert_equal(f"{layer}attn.qkv_proj.{kind}", torch.cat(parts))
        for ours, theirs in (("gate_up_proj", "w13"), ("down_proj", "w2")):
            ours, theirs = f"{layer}mlp.experts.{ours}", f"{layer}mlp.experts.routed_experts.{theirs}"
            assert_equal(f"{theirs}_bias", merged[f"{ours}_bias"])
            numbers = decoded(loaded.pop(f"{theirs}_weight"), loaded.pop(f"{theirs}_weight_scale")).transpose(-1, -2)
            assert torch.equal(numbers, stock[ours].float()), ours
            # Each row of weights on its own, so that no two can have changed places. 4 bits are off by an eighth or so.
            off, size = (each.norm(dim=1) for each in (numbers - merged[ours], merged[ours]))
            assert (off < 0.25 * size).all(), (ours, (off / size).max())
    assert not loaded, sorted(loaded)


def test_an_adapter_beside_its_base(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base", **SIZES)
    train_llama(base, tmp_path / "adapter", r=8, target_modules=EVERYTHING)
    merge(base, tmp_path / "adapter", tmp_path / "merged", dtype="fp32")
    found = json.loads(run_vllm(tmp_path, base, lora=str(tmp_path / "adapter")).read_text())
    assert_as_in_transformers(found, tmp_path / "merged", base)
