"""Merges whose sums are computed elsewhere than on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from merge_cases import save_llama, save_packed, tensors, train_llama, train_packed

from unsloth_plugins.core.errors import ConfigError
from unsloth_plugins.core.export import merge


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_named(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base")
    train_llama(base, tmp_path / "adapter")
    for device in ("cuda", "nowhere"):
        with pytest.raises(ConfigError, match=f"'{device}'"):
            merge(base, tmp_path / "adapter", tmp_path / "out", device=device)
    assert not (tmp_path / "out").exists()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "mxfp4", "nf4"])
def test_cuda_writes_what_the_cpu_writes(tmp_path: Path, dtype: str) -> None:
    base = save_packed(tmp_path / "base")
    train_packed(base, tmp_path / "adapter", layers_to_transform=[1, 2], modules_to_save=["lm_head"])
    reports = [merge(base, tmp_path / "adapter", tmp_path / name, dtype=dtype, device=name) for name in ("cpu", "cuda")]
    ours, wanted = tensors(tmp_path / "cuda"), tensors(tmp_path / "cpu")
    assert ours.keys() == wanted.keys() and reports[0].files == reports[1].files
    for name, tensor in wanted.items():
        if "quant_state" in name:  # JSON, with a mean of floats in it
            got, want = (json.loads(bytes(each.tolist())) for each in (ours[name], tensor))
            assert got == {key: pytest.approx(v, rel=1e-4) if isinstance(v, float) else v for key, v in want.items()}
        elif tensor.dtype == torch.uint8:  # codes: a sum next to a border may round to either side
            assert (ours[name] != tensor).sum() <= max(1, 1e-3 * tensor.numel()), name
        else:
            torch.testing.assert_close(ours[name], tensor, rtol=1e-2 if dtype == "bf16" else 1e-4, atol=1e-5)
    for name, error in reports[0].requantised.items():
        assert reports[1].requantised[name].relative_error == pytest.approx(error.relative_error, rel=1e-3)
