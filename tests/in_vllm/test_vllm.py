"""What vLLM makes of our files: merged gpt-oss in both layouts, and an adapter that it loads beside its base."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from merge_cases import EVERYTHING, reload, save_llama, save_packed, train_llama, train_packed

from unsloth_plugins.core.export import merge

PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
if not PYTHON.exists():
    pytest.skip("vLLM has an environment of its own: `make test-vllm`", allow_module_level=True)
pytestmark = pytest.mark.slow

SIZES: dict[str, Any] = dict(hidden_size=128, head_dim=64, intermediate_size=128)  # head sizes that vLLM has on a CPU
PROMPTS = [
    torch.randint(2, 160, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in (5, 21)
]


def continuations(folder: Path, model: Path, lora: Path | None = None) -> list[dict[str, Any]]:
    """vLLM's own, on two cores of a CPU."""
    job = dict(model=str(model), dtype="bfloat16", lora=lora and str(lora), prompts=PROMPTS, count=4)
    (folder / "job.json").write_text(json.dumps(job))
    script = Path(__file__).with_name("run_vllm.py")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    env |= {"VLLM_NO_USAGE_STATS": "1"}
    line = [str(PYTHON), str(script), str(folder / "job.json"), str(folder / "out.json")]
    # In the project's own folder an editable install may have left metadata that vLLM's torch can't follow.
    done = subprocess.run(line, capture_output=True, text=True, env=env, timeout=280, cwd=folder)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads((folder / "out.json").read_text())


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
    if dtype == "mxfp4" and not torch.cpu._is_amx_tile_supported():
        pytest.skip("vLLM runs MXFP4 experts on CPUs with AMX only")
    base = save_packed(tmp_path / "base", **SIZES)
    train_packed(base, tmp_path / "adapter", std=0.3)
    merge(base, tmp_path / "adapter", tmp_path / "out", dtype=dtype)
    merge(tmp_path / "out", [], tmp_path / "merged", dtype="fp32")
    merge(base, [], tmp_path / "untrained", dtype="fp32")
    found = continuations(tmp_path, tmp_path / "out")
    assert_as_in_transformers(found, tmp_path / "merged", tmp_path / "untrained")


def test_an_adapter_beside_its_base(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base", **SIZES)
    train_llama(base, tmp_path / "adapter", r=8, target_modules=EVERYTHING)
    merge(base, tmp_path / "adapter", tmp_path / "merged", dtype="fp32")
    found = continuations(tmp_path, base, lora=tmp_path / "adapter")
    assert_as_in_transformers(found, tmp_path / "merged", base)
