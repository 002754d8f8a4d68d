"""The benchmark harness on a tiny model, on the CPU."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

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


@pytest.mark.usefixtures("benchmarks")
@pytest.mark.parametrize(
    ("model", "weights"),
    [("tiny", "mxfp4"), ("tiny", "bf16"), ("tiny-mistral", "nf4"), ("tiny-gemma", "nf4")],
)
def test_a_model_built_in_memory_is_that_of_the_checkpoint(model: str, weights: str, tmp_path: Path) -> None:
    from benchmarks.models import build, config_of, write_checkpoint
    from benchmarks.worker import _dequantised, _four_bit

    folder, ids = tmp_path / "weights", torch.arange(3, 40)[None]
    write_checkpoint(folder, model, None, "balanced")
    if weights == "nf4":
        stored = _four_bit(str(folder), None, torch.bfloat16)
    else:
        stored = _dequantised(str(folder), None)
    built = build(config_of(model, None), weights, "balanced", torch.device("cpu"))
    with torch.no_grad():
        ours, kept = built.eval()(ids).logits.float(), stored.eval()(ids).logits.float()
    assert ours.std().item() == pytest.approx(kept.std().item(), rel=0.05)  # experts are drawn in another order
    if weights == "nf4":
        assert torch.equal(ours, kept)


@pytest.mark.slow
@pytest.mark.usefixtures("benchmarks")
def test_one_step_after_a_short_one_gives_a_whole_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No checkpoint is written, and the timed step is the only one of its length."""
    from benchmarks import step
    from benchmarks.worker import Stepper

    lengths: list[int] = []
    layer = torch.nn.Linear(8, 8)
    monkeypatch.setattr(Stepper, "step", lambda self, ctx, **more: lengths.append(ctx) or (0.5, more.get("norm")))
    stepper = Stepper(layer, "adamw")
    answer = stepper.measure(64, warm_up=16, steps=1, report=True)
    assert lengths == [16, 64] and answer["loss"] == 0.5 and answer["grad_norm"] is True
    assert "loss" not in stepper.measure(64, warm_up=0, steps=2, report=False) and lengths[2:] == [64] * 3
    monkeypatch.setattr(step, "find_or_write_checkpoint", lambda *_: pytest.fail("a checkpoint was asked for"))
    parser = argparse.ArgumentParser()
    step.add_arguments(parser)
    file = tmp_path / "rows.json"
    line = "--model tiny-mistral --in-memory --optimizer adamw --policy min_memory --pairs --ctx 64 --warm-up 16"
    assert step.run(parser.parse_args([*line.split(), "--steps", "1", "--repeats", "1", "--json", str(file)])) == 0
    (row,) = json.loads(file.read_text())
    assert FIELDS <= row.keys() and (row["weights"], row["warm_up"], row["pairs"]) == ("nf4", 16, True)
    assert row["loss"] > 0 and row["grad_norm"] > 0 and row["tok_s"] > 0


@pytest.mark.slow
@pytest.mark.usefixtures("benchmarks")
def test_the_longest_context_of_a_dense_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import records

    def one_step(options: argparse.Namespace, ctx: int, log: Path) -> dict[str, object]:
        asked.append(ctx)
        return real(options, 64, log) | ({} if len(asked) % 2 else {"oom": True})  # the first fits

    real, asked = records.one_step, list[int]()
    monkeypatch.setattr(records, "one_step", one_step)
    line = "--model tiny-mistral --in-memory --policy min_memory --cap-gib 0.2 --optimizer adamw --warm-up 16"
    found = [records.measure_longest(records.step_options(line + more), 2.12, tmp_path) for more in ("", " --pairs")]
    for (row,), pairs in zip(found, (False, True), strict=True):
        assert (row["weights"], row["pairs"], row["ctx"]) == ("nf4", pairs, row["predicted"])
        assert row["loss"] > 0 and row["grad_norm"] > 0 and row["trainable_params"] > 0
    assert found[0][0]["predicted"] < found[1][0]["predicted"]  # host memory limits it there


@pytest.mark.slow
def test_all_weights_train_as_in_transformers(tmp_path: Path) -> None:
    file, full = tmp_path / "rows.json", ("--train", "full", "--weights", "bf16", "--repeats", "1", "--ctx", "64")
    done = bench(*full, "--peers", "transformers", "--json", str(file))
    assert done.returncode == 0 and "They differ" not in done.stdout, done.stdout + done.stderr
    stock, ours = (row for row in json.loads(file.read_text()) if row["bench"] == "step")
    assert (stock["impl"], ours["impl"], ours["weights"]) == ("transformers", "ours", "bf16")
    assert ours["trainable_params"] == stock["trainable_params"] > 0
    assert all((row["train"], row["lora_rank"]) == ("full", None) and row["grad_norm"] > 0 for row in (ours, stock))


@pytest.mark.slow
@pytest.mark.usefixtures("benchmarks")
def test_weights_gradients_and_states_of_full_training_are_of_16_and_8_bits() -> None:
    import unsloth_plugins
    from benchmarks.models import build, config_of
    from benchmarks.worker import Stepper, _checkpointed

    model = build(config_of("tiny", None), "bf16", "balanced", torch.device("cpu")).requires_grad_(True)
    _checkpointed(model)
    unsloth_plugins.apply(model)
    stepper = Stepper(model, "adamw_8bit")
    dtypes: set[torch.dtype] = set()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: dtypes.add(p.grad.dtype))  # type: ignore[union-attr]
    stepper.step(32)
    assert dtypes == {p.dtype for p in model.parameters()} == {torch.bfloat16}
    states = stepper.optimizer.state[model.model.layers[0].mlp.experts.gate_up_proj]
    assert states["state1"].dtype == states["state2"].dtype == torch.uint8


@pytest.mark.usefixtures("benchmarks")
def test_every_run_of_the_records_can_be_run() -> None:
    from benchmarks import records, step

    for name, run in records.RUNS.items():
        options = records.step_options(run.arguments)
        step.check(options)
        assert options.weights and not (run.longest and options.train == "full"), name
        assert options.in_memory or not run.longest, name


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--train full", "expected --weights bf16"),
        ("--train full --weights bf16 --peers unsloth", "no --peers but transformers and ours_...; got unsloth"),
        ("--in-memory --peers ours_flex,unsloth", "no --peers but ours_...; got unsloth"),
        ("--expert-layers 1 --peers transformers", "the others adapt all layers"),
    ],
)
@pytest.mark.usefixtures("benchmarks")
def test_options_of_step_that_exclude_each_other(line: str, message: str) -> None:
    from benchmarks import records, step

    with pytest.raises(SystemExit, match=re.escape(message)):
        step.check(records.step_options(line))


def test_peers_that_do_not_exist_are_named() -> None:
    done = bench("--peers", "unslot")
    assert (
        done.returncode != 0
        and "expected any of ours_flex, ours_triton, transformers, unsloth" in done.stderr
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


def rows_of_experts(file: Path, *options: str) -> tuple[list[dict[str, Any]], str]:
    tiny = ["--model", "tiny", "--blocks", "2", "--repeats", "2", "--lora-rank", "4", "--json", str(file)]
    command = [sys.executable, "-m", "benchmarks", "experts", *tiny, *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(file.read_text()), done.stdout


@pytest.mark.slow
def test_rows_of_experts(tmp_path: Path) -> None:
    rows, printed = rows_of_experts(tmp_path / "rows.json", "--tokens", "16,40")
    train, kernel = rows[:16], rows[16:]
    kinds = [("ours", "mxfp4"), ("ours", "streamed"), ("ours", "bf16"), ("transformers", "bf16")]
    order = [(*kind, routing, tokens) for routing in ("balanced", "skewed") for kind in kinds for tokens in (16, 40)]
    assert [(row["impl"], row["weights"], row["routing"], row["tokens"]) for row in train] == order
    assert all(row["op"] == "train" and row["fwd_ms"] > 0 and row["bwd_ms"] > 0 for row in train)
    assert all({"fwd_tflops", "peak_gib", "working_gib"} <= row.keys() for row in train)
    assert "ours: fwd 2M(HJ" in printed
    kinds = [(impl, dtype) for dtype in ("bfloat16", "float16", "float32") for impl in ("ours", "copy")]
    assert [(row["impl"], row["dtype"]) for row in kernel] == kinds
    numbers = 4 * 128 * 64  # experts, outputs and inputs of a layer: half a byte and a 32nd of one, read; written
    for row, width in zip(kernel[::2], (2, 2, 4), strict=True):
        n_bytes = numbers * (1 / 2 + 1 / 32 + width)
        assert row["op"] == "dequantise" and row["gb_s"] == pytest.approx(n_bytes / row["ms"] / 1e6, rel=0.05, abs=0.06)


@pytest.mark.slow
def test_rows_of_experts_of_new_tokens(tmp_path: Path) -> None:
    rows, _ = rows_of_experts(tmp_path / "rows.json", "--decode", "--routing", "balanced")
    kinds = [("ours", "mxfp4"), ("ours", "streamed"), ("ours", "bf16")]
    kinds += [("transformers_eager", "bf16"), ("transformers_batched_mm", "bf16")]
    order = [(*kind, rank, batch) for rank in (0, 4) for kind in kinds for batch in (1, 8)]
    assert [(row["impl"], row["weights"], row["lora_rank"], row["batch"]) for row in rows] == order
    assert all(row["op"] == "decode" and row["ms"] > 0 for row in rows)


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


@pytest.mark.parametrize(("model", "ctx"), [("tiny", 128), ("tiny-mamba", 64), ("tiny-unet", 256)])
def test_rows_of_offload(model: str, ctx: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    main = importlib.import_module("benchmarks.__main__").main
    file = tmp_path / "rows.json"
    options = ["--model", model, "--ctx", str(ctx), "--pairs", "2", "--peers", "save_on_cpu,transformers"]
    if model != "tiny-unet":
        options += ["--layers", "3"]
    monkeypatch.setattr(sys, "argv", ["benchmarks", "offload", *options, "--json", str(file)])
    assert main() == 0
    rows = json.loads(file.read_text())
    kinds = [("checkpoint", None), ("ours", "offload_all"), ("ours", "auto"), ("save_on_cpu", None)]
    assert [(row["impl"], row["policy"]) for row in rows] == [*kinds, ("transformers", None)]
    assert rows[1]["host_gib"] == rows[1]["stored_gib"] > 0 and rows[0]["overhead"] == 0
    measured = rows if rows[-1].get("skipped") is None else rows[:-1]
    assert all(row["step_ms"] > 0 and row["pairs"] == 2 for row in measured)
    on_cuda = torch.cuda.is_available() and model != "tiny-unet"
    assert on_cuda == (measured is rows) or "offload=True" in rows[-1]["skipped"]


def test_a_unet_takes_squares_only_and_has_its_own_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    main = importlib.import_module("benchmarks.__main__").main
    for wrong, message in ((["--ctx", "128"], "squares"), (["--ctx", "64", "--layers", "2"], "--layers")):
        monkeypatch.setattr(sys, "argv", ["benchmarks", "offload", "--model", "tiny-unet", "--pairs", "1", *wrong])
        with pytest.raises(SystemExit, match=message):
            main()


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package can be imported."""
    monkeypatch.syspath_prepend(str(ROOT))


def test_both_models_of_the_training_proof_learn_the_same(tmp_path: Path) -> None:
    """Unpacked rows on stock, one packed row on ours; and a window of a document on both."""
    file = tmp_path / "rows.json"
    options = [
        "--cases",
        "gpt-oss-lora-float32,llama-lora-float32",
        "--steps",
        "3",
        "--ctx",
        "64",
        "--control",
        "--json",
        str(file),
    ]
    command = [sys.executable, "-m", "benchmarks", "training", *options, "--data", "README.md", "CONTRIBUTING.md"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(file.read_text())
    assert [row["case"] for row in rows] == ["gpt-oss-lora-float32", "llama-lora-float32"]
    for row in rows:
        assert len(row["stock"]) == len(row["ours"]) == 3 and len(set(row["stock"])) == 3
        assert row["ours"] == pytest.approx(row["stock"], abs=1e-5) and row["max_diff"] < 1e-5
        assert row["control"] == pytest.approx(row["stock"], abs=1e-5) and row["control_max_diff"] < 1e-5
        assert row["trainable_params"] > 0 and "eager sink attention" in row["patched"]
    assert file.with_suffix(".png").stat().st_size > 10_000


@pytest.mark.usefixtures("benchmarks")
def test_the_control_is_moved_by_one_rounding() -> None:
    from benchmarks.training import CASES, Learner

    layer = torch.nn.Linear(32, 8)
    before = layer.weight.detach().clone()
    Learner(layer, CASES["llama-lora-float32"], "cpu").move_by_a_rounding(seed=0)
    moved = (layer.weight / before - 1).abs()
    assert 0 < moved.min() and moved.max() <= 2**-22 and not torch.equal(layer.weight > before, before > 0)


def test_training_refuses_what_it_cannot_run() -> None:
    for options, message in (
        (["--cases", "smollm2-lora-int8"], "expected any of smollm2-lora-float32"),
        (["--cases", "smollm2-lora-float16"], "expected --device cuda for float16"),
    ):
        command = [sys.executable, "-m", "benchmarks", "training", *options]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode != 0 and message in done.stderr


@pytest.mark.usefixtures("benchmarks")
def test_curves_that_part_are_found() -> None:
    from benchmarks.training import add_rounding, compare, faults

    exact = [3.0 - 0.01 * step for step in range(40)]
    row = {"case": "a", "model": "m", "method": "full", "dtype": "float32", "device": "cpu"}
    row |= {"ctx": 8, "steps": 40, "seed": 0, "learning_rate": 1e-3, "stock": exact}
    same = row | compare(exact, exact) | {"ours": exact}
    assert faults([same]) == []
    one = exact[:20] + [exact[20] + 0.01] + exact[21:]
    assert faults([row | compare(exact, one) | {"control_max_diff": 0.006}]) == []
    assert len(faults([row | compare(exact, one)])) == 1  # a single step of float32
    ends = [loss + 0.03 * (step >= 20) for step, loss in enumerate(exact)]
    narrow = row | {"dtype": "bfloat16", "stock": [loss + 0.5 for loss in exact]}
    assert faults([narrow | compare(exact, one)]) == []
    assert len(faults([narrow | compare(exact, ends)])) == 1
    assert len(faults([narrow | compare(exact, [float("nan")] * 40)])) == 1
    add_rounding(found := [narrow, same, narrow | {"seed": 1}])
    assert found[0]["rounding"] == pytest.approx(0.5) and not {"rounding"} & (found[1].keys() | found[2].keys())


@pytest.mark.usefixtures("benchmarks")
def test_packed_and_padded_rows_hold_the_same_documents() -> None:
    import itertools

    from benchmarks.training import flattened, packs, padded

    texts = ["first paragraph of a text\nshort\nthe second one of it, which is longer than the first"]
    for pack in itertools.islice(packs(texts, 64, seed=3), 4):
        rows, row = padded(pack), flattened(pack)
        assert 48 < row["input_ids"].shape[1] <= 64 and len(pack) == len(rows["input_ids"]) > 1
        assert torch.equal(rows["input_ids"][rows["attention_mask"] == 1], row["input_ids"][0])
        assert (row["labels"] == -100).sum() == len(pack) == (row["position_ids"] == 0).sum()
        assert (rows["labels"] != -100).sum() - len(pack) == (row["labels"] != -100).sum()


def test_tables_of_committed_rows(tmp_path: Path) -> None:
    file, picture = ROOT / "benchmarks/results/h200-2026-12-02-step.json", tmp_path / "records.png"
    command = [sys.executable, "-m", "benchmarks", "records", "--table", str(file), "--plot", str(picture)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "gpt-oss-20b, 24 layers, LoRA r=32, adamw_8bit, NVIDIA H200 capped to 79 GiB, 2026-12-02" in done.stdout
    assert "unsloth 2026.10.9" in done.stdout and "losses differ by at most 0.15%" in done.stdout
    lines = [line for line in done.stdout.splitlines() if line.startswith("|")]
    labels = ("unsloth", "ours", "ours_triton")
    assert lines[0] == f"| tokens | {' | '.join(f'{label}: tokens/s (peak GiB)' for label in labels)} |"
    assert lines[-1] == "| 32,768 | 8,376 (28.6) | 16,722 (63.8), 2.00x | 14,008 (63.8), 1.67x |"
    assert picture.stat().st_size > 10_000

    command[command.index(str(file))] = str(ROOT / "benchmarks/results/h200-2026-12-01-attention.json")
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode != 0 and "expected rows of `step` or of longest contexts; got none" in done.stderr


@pytest.mark.usefixtures("benchmarks")
@pytest.mark.parametrize(
    ("limit", "start", "answer"),
    [
        (100_000, 100_000, (100_000, 103_072)),  # strides of 3,072, a 32nd in whole 256s
        (99_999, 100_000, (96_928, 100_000)),
        (106_000, 100_000, (103_072, 106_144)),
        (10**6, 100_000, (115_360, None)),
        (10, 100_000, (None, 84_640)),
        (300, 512, (256, 512)),
        (0, 512, (None, 256)),
    ],
)
def test_search_for_the_longest_context(limit: int, start: int, answer: tuple[int | None, int | None]) -> None:
    from benchmarks.records import search

    tried: list[int] = []
    assert search(lambda ctx: tried.append(ctx) or ctx <= limit, start) == answer
    assert len(tried) == len(set(tried)) <= 6


@pytest.mark.slow
@pytest.mark.usefixtures("benchmarks")
def test_records_measure_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import records

    tiny = "--model tiny --optimizer adamw --lora-rank 4 --repeats 1"
    runs = {
        "steps": records.Run(f"{tiny} --ctx 32,64"),
        "longest": records.Run(f"{tiny} --in-memory --policy min_memory --cap-gib 0.2", longest=True),
        "wrong": records.Run(f"{tiny} --weights nf4"),
    }
    monkeypatch.setattr(records, "RUNS", runs)
    asked: list[int] = []

    def one_step(options: argparse.Namespace, ctx: int, log: Path) -> dict[str, object]:
        """A real step of 64 tokens, and a limit as if there were one."""
        asked.append(ctx)
        return real(options, 64, log) | ({} if ctx <= asked[0] else {"oom": True})

    real = records.one_step
    monkeypatch.setattr(records, "one_step", one_step)
    parser = argparse.ArgumentParser()
    records.add_arguments(parser)
    line = ["--only", "steps,longest,wrong", "--out", str(tmp_path), "--host-ram-gib", "8"]
    assert records.run(parser.parse_args(line)) == 1  # one of them is wrong
    out = capsys.readouterr()
    assert "wrong: failed: --weights: expected mxfp4" in out.err and "tiny, 2 layers" in out.out
    assert "Longest context" in out.out and f"| {asked[0]:,} |" in out.out and f"| {asked[1]:,} |" in out.out
    assert json.loads((tmp_path / "longest.json").read_text())[0]["too_long"] == asked[1] > asked[0]
    assert not (tmp_path / "wrong.json").exists() and len(asked) == 2

    assert records.run(parser.parse_args(["--only", "steps,longest", "--out", str(tmp_path)])) == 0
    assert len(asked) == 2 and "steps: there already" in (tmp_path / "progress.txt").read_text()
