"""The benchmark harness on a tiny model, on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
FIELDS = {
    *("bench", "impl", "gpu", "versions", "commit", "date", "model", "weights", "ctx", "layers", "lora_rank"),
    *("trainable_params", "optimizer", "policy", "backend", "routing", "cap_gib", "peak_gib", "reserved_gib"),
    *("host_gib", "step_s", "tok_s", "loss", "grad_norm"),
}
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def bench(*options: str, model: str = "tiny") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", "step", "--model", model, "--optimizer", "adamw", *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)


@pytest.mark.slow
@pytest.mark.parametrize("routing", ["balanced", "skewed"])
def test_rows_of_step_agree_with_transformers(tmp_path: Path, routing: str) -> None:
    file, kept = tmp_path / "rows.json", ["--checkpoint", str(tmp_path / "weights"), "--routing", routing]
    done = bench("--ctx", "64,32", "--repeats", "2", "--peers", "transformers", "--json", str(file), *kept)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(file.read_text())
    steps = [row for row in rows if row["bench"] == "step"]
    assert [(row["impl"], row["ctx"]) for row in steps] == [
        ("transformers", 32),
        ("transformers", 64),
        ("ours", 32),
        ("ours", 64),
    ]
    assert all(FIELDS <= row.keys() for row in steps) and "They differ" not in done.stdout
    for ours, stock in zip(steps[2:], steps[:2], strict=True):
        assert ours["trainable_params"] == stock["trainable_params"] > 0
        assert ours["loss"] == pytest.approx(stock["loss"], rel=0.01)
        assert ours["grad_norm"] == pytest.approx(stock["grad_norm"], rel=0.01)
    (load,) = [row for row in rows if row["bench"] == "load"]
    assert load["impl"] == "ours" and load["packed_gib"] >= 0

    other = bench("--ctx", "32", "--layers", "1", *kept)
    assert other.returncode != 0 and "Name another folder" in other.stderr


@pytest.mark.slow
def test_trainers_train_the_same(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    command = [sys.executable, "-m", "benchmarks", "adapters", "--model", "tiny", "--optimizer", "adamw", "--ctx", "64"]
    done = subprocess.run([*command, "--json", str(file)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(file.read_text())
    assert [row["impl"] for row in rows] == ["bare", "hf", "lightning"]
    fields = FIELDS - {"grad_norm", "routing"}
    assert all(fields <= row.keys() and row["tok_s"] > 0 and row["trainable_params"] > 0 for row in rows)
    assert [row["loss"] for row in rows[1:]] == pytest.approx([rows[0]["loss"]] * 2, abs=1e-4)
    assert "Apart by" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        ("tiny-mistral", "bfloat16"),
        pytest.param("tiny-mistral", "float16", marks=[pytest.mark.gpu, NEEDS_CUDA]),  # no autocast of it on a CPU
        ("tiny-gemma", "bfloat16"),
    ],
)
def test_dense_models_in_four_bits_agree_with_transformers(model: str, dtype: str, tmp_path: Path) -> None:
    file, options = tmp_path / "rows.json", ["--ctx", "64", "--repeats", "1", "--peers", "transformers"]
    done = bench(*options, "--dtype", dtype, "--json", str(file), model=model)
    assert done.returncode == 0, done.stdout + done.stderr
    stock, ours = (row for row in json.loads(file.read_text()) if row["bench"] == "step")
    assert (stock["impl"], ours["impl"], ours["weights"]) == ("transformers", "ours", "nf4")
    assert ours["dtype"] == dtype and ours["grad_norm"] > 0
    assert "They differ" not in done.stdout and ours["trainable_params"] == stock["trainable_params"] > 0
    assert bench("--weights", "mxfp4", model="tiny-mistral").returncode != 0


@pytest.mark.slow
def test_streamed_and_built_in_memory_are_the_same_model(tmp_path: Path) -> None:
    rows = []
    for number, more in enumerate(
        ([], ["--in-memory"], ["--in-memory", "--weights", "streamed", "--expert-layers", "1"])
    ):
        file = tmp_path / f"{number}.json"
        done = bench("--ctx", "64", "--repeats", "1", "--json", str(file), *more)
        assert done.returncode == 0, done.stdout + done.stderr
        rows += [row for row in json.loads(file.read_text()) if row["bench"] == "step"]
    assert [row["weights"] for row in rows] == ["mxfp4", "mxfp4", "streamed"]
    assert rows[0]["loss"] == pytest.approx(rows[1]["loss"], rel=0.02)
    assert rows[0]["trainable_params"] == rows[1]["trainable_params"] > rows[2]["trainable_params"] > 0
    assert bench("--in-memory", "--peers", "transformers").returncode != 0


def test_peers_that_do_not_exist_are_named() -> None:
    done = bench("--peers", "unslot")
    assert (
        done.returncode != 0
        and "expected any of ours_triton, transformers, unsloth" in done.stderr
        and "'unslot'" in done.stderr
    )


def test_what_makes_rows_incomparable_is_found() -> None:
    sys.path.insert(0, str(ROOT))
    try:
        from benchmarks.step import disagreements
    finally:
        sys.path.remove(str(ROOT))
    row = {"impl": "transformers", "ctx": 8, "trainable_params": 5, "loss": 2.0, "grad_norm": 1.0}
    assert disagreements([row, row | {"impl": "ours", "loss": 2.01}]) == []
    found = disagreements([row | {"impl": "ours", "grad_norm": 1.02, "trainable_params": 6}, row])
    assert len(found) == 2 and "trains 6" in found[0] and "1.0200 of ours" in found[1]


@pytest.mark.slow
def test_rows_of_experts(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    options = ["--model", "tiny", "--tokens", "16,40", "--blocks", "2", "--repeats", "2", "--lora-rank", "4"]
    command = [sys.executable, "-m", "benchmarks", "experts", *options, "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(file.read_text())
    kinds = [("ours", "mxfp4"), ("ours", "streamed"), ("ours", "bf16"), ("transformers", "bf16")]
    order = [(*kind, routing, tokens) for routing in ("balanced", "skewed") for kind in kinds for tokens in (16, 40)]
    assert [(row["impl"], row["weights"], row["routing"], row["tokens"]) for row in rows] == order
    assert all(row["fwd_ms"] > 0 and row["bwd_ms"] > 0 and {"fwd_tflops", "peak_gib"} <= row.keys() for row in rows)
    assert "ours: fwd 2M(HJ" in done.stdout


@pytest.mark.slow
def test_rows_of_merge(tmp_path: Path) -> None:
    options = ["--model", "tiny", "--lora-rank", "4", "--dtype", "mxfp4,bf16", "--folder", str(tmp_path / "kept")]
    command = [sys.executable, "-m", "benchmarks", "merge", *options, "--json", str(tmp_path / "rows.json")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    packed, dense = json.loads((tmp_path / "rows.json").read_text())
    assert (packed["dtype"], dense["dtype"]) == ("mxfp4", "bf16") and packed["merged_tensors"] == 2 * 6
    assert 0 < packed["relative_error"] < 0.15 and dense["relative_error"] is None
    assert packed["seconds"] > 0 and 0 < packed["peak_rss_gib"] < 2 and packed["cores"] > 0
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["adapter", "base"]


@pytest.mark.slow
def test_rows_of_offload(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    options = ["--layers", "3", "--ctx", "512", "--pairs", "2", "--peers", "save_on_cpu", "--json", str(file)]
    command = [sys.executable, "-m", "benchmarks", "offload", "--model", "tiny", *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(file.read_text())
    assert [(row["impl"], row["policy"]) for row in rows] == [
        ("checkpoint", None),
        ("ours", "offload_all"),
        ("ours", "auto"),
        ("save_on_cpu", None),
    ]
    assert rows[1]["host_gib"] == rows[1]["stored_gib"] > 0 and rows[0]["overhead"] == 0
    assert all(row["step_ms"] > 0 and row["pairs"] == 2 for row in rows)
