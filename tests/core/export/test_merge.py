"""What is written equals what was trained: against the live model, and against stock transformers on reload."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import batch_of, tiny_gpt_oss, tiny_llama
from merge_cases import (
    ATTENTION,
    logits,
    randomise,
    reload,
    routing_gaps,
    save_llama,
    save_packed,
    small_tokenizer,
    stored,
    tensors,
    train_llama,
    train_packed,
)
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedTokenizerFast

from unsloth_plugins.core.errors import ConfigError, ExportError, UnsupportedError
from unsloth_plugins.core.export import export_gguf, merge, merge_model, record_base
from unsloth_plugins.core.export.base import Base, base_of_model, fingerprint, open_base
from unsloth_plugins.core.export.tensors import MemoryTensors, open_folder
from unsloth_plugins.core.mxfp4 import decode, load_mxfp4

PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(r=12, lora_alpha=7, use_rslora=True),
        dict(rank_pattern={"experts.down_proj": 2}, alpha_pattern={"experts.gate_up_proj": 3, "q_proj": 5}),
        dict(layers_to_transform=[1, 2]),
        dict(target_modules=[*ATTENTION, "down_proj"]),
        dict(target_modules=ATTENTION, target_parameters=PARAMETERS),
    ],
)
def test_case_4_merged_equals_the_live_adapter(tmp_path: Path, options: dict[str, object]) -> None:
    base = save_packed(tmp_path / "base")
    model = train_packed(base, tmp_path / "adapter", **options)
    want = logits(model)
    assert (want - logits(load_mxfp4(base, dtype=torch.float32))).abs().max() > 0.05
    merge(base, tmp_path / "adapter", tmp_path / "fp32", dtype="fp32")
    exact = reload(tmp_path / "fp32")
    gaps = routing_gaps(exact)
    torch.testing.assert_close(logits(exact), want, rtol=1e-4, atol=1e-4)
    merge(base, tmp_path / "adapter", tmp_path / "bf16")
    wide, narrow = tensors(tmp_path / "fp32"), tensors(tmp_path / "bf16")
    assert all(torch.equal(wide[name].bfloat16(), narrow[name]) for name in wide)
    clear = torch.stack(gaps).amin(0) > 0.02  # a nearer choice of experts may fall otherwise after rounding
    rounded = logits(reload(tmp_path / "bf16")).flatten(0, 1)
    assert clear.float().mean() > 0.3
    torch.testing.assert_close(rounded[clear], want.flatten(0, 1)[clear], rtol=2e-2, atol=2e-2)


def test_case_4_every_target_moves_by_its_delta(tmp_path: Path) -> None:
    base = save_packed(tmp_path / "base")
    train_packed(base, tmp_path / "adapter", lora_alpha=24)
    report = merge(base, tmp_path / "adapter", tmp_path / "out", dtype="fp32")
    assert len(report.merged) == 4 * (4 + 2)
    before, after, adapter = tensors(base), tensors(tmp_path / "out"), tensors(tmp_path / "adapter")
    for name in report.merged:
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        if name.endswith(".weight"):
            a, b = (adapter[f"{stem}.lora_{part}.weight"] for part in "AB")
            want, start = b @ a * 6, before[name]
        else:
            stem = stem.rpartition(".")[0] + (".base_layer" if name.endswith("gate_up_proj") else "")
            a, b = (adapter[f"{stem}.lora_{part}.weight"] for part in "AB")
            want = 6 * torch.einsum("ore,eri->eio", b.view(len(b), -1, 4), a.view(4, -1, a.shape[1]))
            start = decode(before[f"{name}_blocks"], before[f"{name}_scales"]).transpose(-1, -2)
        torch.testing.assert_close(after[name] - start, want, rtol=1e-4, atol=1e-5, msg=name)


def _edit(adapter: Path, change: object) -> None:
    path = adapter / "adapter_model.safetensors"
    content = load_file(path)
    change(content)  # type: ignore[operator]
    save_file(content, path)


_Q = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
_EXPERTS = "base_model.model.model.layers.2.mlp.experts"


def test_weights_that_are_no_numbers_and_adapters_given_twice_are_refused(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base")
    train_llama(base, tmp_path / "adapter")
    for adapter, message in (
        ({tmp_path / "adapter": float("nan")}, "finite"),
        ([tmp_path / "adapter", tmp_path / "base" / ".." / "adapter"], "twice"),
    ):
        with pytest.raises(ConfigError, match=message):
            merge(base, adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_adapter_file_beside_the_weights_is_no_part_of_the_base(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base")
    train_llama(base, tmp_path / "adapter")
    save_file({"lora": torch.zeros(1)}, base / "adapter_model.safetensors")
    (base / "model.safetensors").rename(base / "weights.safetensors")
    merge(base, tmp_path / "adapter", tmp_path / "out", dtype="fp32")
    assert not any("lora" in name for name in load_file(tmp_path / "out" / "model.safetensors"))


def test_an_adapter_kept_by_a_live_merge_fits_its_base_on_disk(tmp_path: Path) -> None:
    base, other = tmp_path / "base", tmp_path / "other"
    for folder, seed in ((base, 0), (other, 1)):
        tiny_llama(seed=seed).to(torch.bfloat16).save_pretrained(folder)
    model = train_llama(base, tmp_path / "unused")  # loaded in float32
    assert next(model.parameters()).dtype == torch.float32
    merge_model(model, tmp_path / "live", dtype="fp32", adapter_output=tmp_path / "kept")
    assert "fingerprint" in merge(base, tmp_path / "kept", tmp_path / "again", dtype="fp32").notes[0]
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("live", "again"))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    with pytest.raises(ExportError, match="fingerprint"):
        merge(other, tmp_path / "kept", tmp_path / "wrong")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop(_Q), "layers.1.self_attn.q_proj"),
        (lambda t: (t.pop(_Q), t.pop(_Q.replace("_A", "_B"))), "layers.1.self_attn.q_proj"),
        (lambda t: t.pop(f"{_EXPERTS}.lora_B.weight"), "layers.2.mlp.experts"),
        (lambda t: t.update({f"{_EXPERTS}.gate_up_projs.0.lora_A.weight": t[_Q].clone()}), "gate_up_projs.0"),
        (lambda t: t.update({"base_model.model.other.weight": t[_Q].clone()}), "other.weight"),
        (
            lambda t: [t.pop(f"{_EXPERTS}.base_layer.lora_{part}.weight") for part in "AB"],
            r"layers.2.mlp.experts.lora_A.weight",
        ),
        (lambda t: [t.pop(key) for key in list(t) if _EXPERTS in key], "layers.2.mlp.experts.*target_parameters"),
        (lambda t: t.update({_Q: t[_Q][:, :-1].clone()}), "layers.1.self_attn.q_proj"),
        (
            lambda t: t.update({f"{_EXPERTS}.lora_B.weight": t[f"{_EXPERTS}.lora_B.weight"][:, :-1].clone()}),
            "of one rank",
        ),
    ],
)
def test_case_4_keys_without_use_and_misfits_are_named(tmp_path: Path, change: object, named: str) -> None:
    base = save_packed(tmp_path / "base")
    train_packed(base, tmp_path / "adapter")
    _edit(tmp_path / "adapter", change)
    with pytest.raises(ExportError, match=named):
        merge(base, tmp_path / "adapter", tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


@pytest.mark.parametrize(
    "trained",
    [
        {"target_modules": r".*\.(q|k|v|o)_proj"},
        {"layers_to_transform": [0, 1]},
        {"layers_to_transform": [0, 1], "layers_pattern": "layers"},
        {"layers_to_transform": 1},
    ],
)
def test_case_4_a_layer_that_is_missing_is_named(tmp_path: Path, trained: dict[str, object]) -> None:
    base = save_llama(tmp_path / "base")
    train_llama(base, tmp_path / "adapter", **trained)
    merge(base, tmp_path / "adapter", tmp_path / "whole")
    _edit(tmp_path / "adapter", lambda t: [t.pop(key) for key in list(t) if ".layers.1." in key and "k_proj" in key])
    with pytest.raises(ExportError, match=r"layers.1.self_attn.k_proj.*target_modules"):
        merge(base, tmp_path / "adapter", tmp_path / "out")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_training_that_diverged_is_not_merged(tmp_path: Path, value: float) -> None:
    base = save_llama(tmp_path / "base")
    train_llama(base, tmp_path / "adapter")
    _edit(tmp_path / "adapter", lambda t: t[_Q].fill_(value))
    with pytest.raises(ExportError, match=r"layers.1.self_attn.q_proj.*diverged"):
        merge(base, tmp_path / "adapter", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_case_4_a_trained_head_that_is_missing_is_named(tmp_path: Path) -> None:
    base = save_packed(tmp_path / "base")
    train_packed(base, tmp_path / "adapter", modules_to_save=["lm_head"])
    _edit(tmp_path / "adapter", lambda t: [t.pop(key) for key in list(t) if "lm_head" in key])
    with pytest.raises(ExportError, match=r"lm_head.weight.*modules_to_save"):
        merge(base, tmp_path / "adapter", tmp_path / "out")


def test_case_7_shards_index_names_and_config(tmp_path: Path) -> None:
    base = save_packed(tmp_path / "base")
    train_packed(base, tmp_path / "adapter")
    reference = tiny_gpt_oss().to(torch.bfloat16)
    size = sum(t.numel() * 2 for t in reference.state_dict().values())
    report = merge(base, tmp_path / "adapter", tmp_path / "out", max_shard_bytes=int(size / 2.2))
    assert len(report.files) == 3
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    found = {name: (tensor, file) for name, tensor, file in stored(tmp_path / "out")}
    assert index["weight_map"] == {name: file for name, (_, file) in found.items()}
    assert index["metadata"]["total_size"] == size
    wanted = {name: (t.shape, t.dtype) for name, t in reference.state_dict().items()}
    assert {name: (t.shape, t.dtype) for name, (t, _) in found.items()} == wanted
    config = (tmp_path / "out" / "config.json").read_text()
    assert "quantization" not in config and json.loads(config)["dtype"] == "bfloat16"
    assert reload(tmp_path / "out", "auto").dtype == torch.bfloat16


def test_case_16_packed_again_only_where_merged(tmp_path: Path) -> None:
    base = save_packed(tmp_path / "base")
    targets = ["q_proj", "down_proj"]
    model = train_packed(base, tmp_path / "adapter", std=0.4, layers_to_transform=[1, 2], target_modules=targets)
    report = merge(base, tmp_path / "adapter", tmp_path / "out", dtype="mxfp4")
    before, after = tensors(base), tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    touched = {name for name in before if not torch.equal(before[name], after[name])}
    experts = {f"model.layers.{n}.mlp.experts.down_proj_{part}" for n in (1, 2) for part in ("blocks", "scales")}
    assert touched == experts | {f"model.layers.{n}.self_attn.q_proj.weight" for n in (1, 2)}
    assert {name.replace("_blocks", "") for name in experts if "blocks" in name} == report.requantised.keys()
    for error in report.requantised.values():
        assert 0.01 < error.relative_error < 0.15 and error.error_over_change < 1
    want, start = logits(model), logits(load_mxfp4(base, dtype=torch.float32))
    got = logits(load_mxfp4(tmp_path / "out", dtype=torch.float32))
    assert (got - want).norm() < 0.5 * (start - want).norm()
    manifest = json.loads((tmp_path / "out" / "export_manifest.json").read_text())
    assert manifest["requantised"].keys() == report.requantised.keys()
    for name, digest in manifest["base_sha256"].items():
        assert digest == hashlib.sha256(before[name].contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
    (file,) = report.files
    assert manifest["files"] == {file: hashlib.sha256((tmp_path / "out" / file).read_bytes()).hexdigest()}
    stored_adapter = (tmp_path / "adapter" / "adapter_model.safetensors").read_bytes()
    assert manifest["adapters"][0]["sha256"] == hashlib.sha256(stored_adapter).hexdigest()


@pytest.mark.parametrize("trained", [False, True])
def test_case_16_stock_transformers_loads_packed_output(tmp_path: Path, trained: bool) -> None:
    base = save_packed(tmp_path / "base")
    train_packed(base, tmp_path / "adapter")
    merge(base, tmp_path / "adapter" if trained else [], tmp_path / "out", dtype="mxfp4")
    code = """
import sys, torch
from transformers import AutoModelForCausalLM, Mxfp4Config
folder, ids, out = sys.argv[1:]
model, info = AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.float32, quantization_config=Mxfp4Config(dequantize=True), output_loading_info=True
)
assert "unsloth_plugins.core" not in sys.modules
assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
experts = [name for name, parameter in model.named_parameters() if "experts" in name and parameter.ndim == 3]
assert len(experts) == 8, experts
with torch.no_grad():
    torch.save(model.eval()(**torch.load(ids)).logits.float(), out)
"""
    torch.save(batch_of(2, 33, seed=0), tmp_path / "ids.pt")
    command = [sys.executable, "-c", code, *(str(tmp_path / name) for name in ("out", "ids.pt", "logits.pt"))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    want = logits(load_mxfp4(tmp_path / "out", dtype=torch.float32))
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), want, rtol=0, atol=1e-5)


def test_case_16_dense_base_can_be_packed(tmp_path: Path) -> None:
    tiny_gpt_oss().save_pretrained(tmp_path / "base")
    report = merge(tmp_path / "base", [], tmp_path / "out", dtype="mxfp4")
    want, packed = tensors(save_packed(tmp_path / "packed")), tensors(tmp_path / "out")
    assert want.keys() == packed.keys() and all(torch.equal(want[name], packed[name]) for name in want)
    assert len(report.requantised) == 8 and report.merged == []
    save_llama(tmp_path / "llama")
    with pytest.raises(UnsupportedError, match="gpt_oss"):
        merge(tmp_path / "llama", [], tmp_path / "none", dtype="mxfp4")


def test_case_16_bitsandbytes_base_is_dequantised_as_in_training(tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional", reason="needs bitsandbytes")
    # bitsandbytes itself dequantises wrongly on a CPU where a row is no multiple of its block of 64
    source = tensors(save_llama(tmp_path / "plain", intermediate_size=128))
    (tmp_path / "base").mkdir()
    for kind, nested in (("nf4", True), ("fp4", False)):
        content, dense = {}, {}
        for name, tensor in source.items():
            if ".q_proj." not in name and ".down_proj." not in name:
                content[name] = tensor
                continue
            packed, state = functional.quantize_4bit(tensor.bfloat16(), quant_type=kind, compress_statistics=nested)
            dense[name] = functional.dequantize_4bit(packed, state)
            content[name] = packed
            content |= {f"{name}.{key}": value for key, value in state.as_dict(packed=True).items()}
        save_file(content, tmp_path / "base" / "model.safetensors")
        config = json.loads((tmp_path / "plain" / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
        (tmp_path / "base" / "config.json").write_text(json.dumps(config))
        train_llama(tmp_path / "plain", tmp_path / kind, target_modules=["q_proj"])
        merge(tmp_path / "base", tmp_path / kind, tmp_path / f"out-{kind}", allow_other_base=True)
        adapter, got = tensors(tmp_path / kind), tensors(tmp_path / f"out-{kind}")
        assert got.keys() == source.keys() and len(dense) == 4
        for name, weight in dense.items():
            if "q_proj" in name:
                a, b = (adapter[f"base_model.model.{name.replace('weight', f'lora_{part}.weight')}"] for part in "AB")
                weight = (weight.float() + b @ a * 2).bfloat16()
            assert torch.equal(got[name], weight), name


class _Counting(MemoryTensors):
    """Counts the bytes that are read."""

    read_bytes = 0

    def read_numbers(self, name: str, begin: int, end: int) -> torch.Tensor:
        found = super().read_numbers(name, begin, end)
        self.read_bytes += found.nbytes
        return found

    def read(self, name: str, begin: int = 0, end: int | None = None) -> torch.Tensor:
        found = super().read(name, begin, end)
        self.read_bytes += found.nbytes
        return found


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
@pytest.mark.parametrize("nested", [True, False])
def test_case_16_rows_of_four_bits_read_their_own_blocks_only(nested: bool, storage: torch.dtype) -> None:
    functional = pytest.importorskip("bitsandbytes.functional", reason="needs bitsandbytes")
    rows, width = 300, 110  # rows begin and end within blocks of 64
    draw = torch.Generator().manual_seed(0)
    packed, state = functional.quantize_4bit(
        torch.randn(rows, width, generator=draw), compress_statistics=nested, quant_storage=storage
    )
    source = _Counting({"w": packed} | {f"w.{key}": value for key, value in state.as_dict(packed=True).items()})
    base = Base(source, {})
    # the same numbers in one row of whole blocks, which bitsandbytes decodes rightly on a CPU
    state.shape = torch.Size((1, -(-rows * width // 64) * 64))
    padded = torch.cat((packed.view(torch.uint8).flatten(), torch.zeros(32, dtype=torch.uint8)))
    flat = functional.dequantize_4bit(padded[: state.shape[1] // 2].view(storage).view(-1, 1), state)
    want = flat.flatten()[: rows * width].view(rows, width)
    source.read_bytes = 0
    assert torch.equal(base.read("w"), want)
    once = source.read_bytes
    source.read_bytes = 0
    for begin in range(0, rows, 25):
        assert torch.equal(base.read("w", begin, begin + 25), want[begin : begin + 25]), begin
    tables = 12 * 4 * (16 + 256)
    assert once < 1.2 * packed.nbytes + tables
    assert source.read_bytes < 1.3 * once + tables
    for begin, end in ((299, 300), (0, 1), (7, 7), (298, 400)):
        assert torch.equal(base.read("w", begin, end), want[begin:end])


def test_case_16_live_bitsandbytes_model_is_merged_as_it_computes(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    base = save_llama(tmp_path / "base", intermediate_size=128)
    quantised = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    loaded = AutoModelForCausalLM.from_pretrained(
        base, quantization_config=quantised, dtype=torch.float32, device_map={"": "cpu"}
    )
    for module in loaded.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # it would repack the weights in eval mode
    model = get_peft_model(loaded, LoraConfig(r=4, target_modules=["q_proj", "down_proj"])).eval()
    randomise(model)
    merge_model(model, tmp_path / "out", dtype="fp32")
    want, got = logits(model), logits(reload(tmp_path / "out"))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    divergence = torch.nn.functional.kl_div(got.log_softmax(-1), want.log_softmax(-1), log_target=True, reduction="sum")
    assert divergence / got[..., 0].numel() < 1e-3


def _dequantised(folder: Path) -> dict[str, torch.Tensor]:
    base = open_base(folder)
    return {name: base.read(name) for name in base.infos}


def _load_four_bit(folder: Path) -> torch.nn.Module:
    model, info = AutoModelForCausalLM.from_pretrained(folder, device_map={"": "cpu"}, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    return model.eval()


@pytest.mark.parametrize("shard", [4 << 30, 9_000])
def test_case_16_four_bits_of_bitsandbytes_on_request(tmp_path: Path, shard: int) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    base = save_llama(tmp_path / "base", intermediate_size=128)
    train_llama(base, tmp_path / "adapter", target_modules=["q_proj", "down_proj"])
    report = merge(base, tmp_path / "adapter", tmp_path / "out", dtype="nf4", max_shard_bytes=shard)
    merge(base, tmp_path / "adapter", tmp_path / "dense", dtype="fp32")
    dense, got = tensors(tmp_path / "dense"), _dequantised(tmp_path / "out")
    assert dense.keys() == got.keys() and report.requantised.keys() == {n for n in dense if n.endswith("_proj.weight")}
    for name, want in dense.items():
        if name not in report.requantised:
            assert torch.equal(got[name], want.bfloat16()), name
            continue
        packed, state = bitsandbytes.functional.quantize_4bit(want, quant_type="nf4", compress_statistics=True)
        state.dtype = torch.bfloat16
        assert torch.equal(got[name], bitsandbytes.functional.dequantize_4bit(packed, state)), name
        error = report.requantised[name]
        assert error.relative_error == pytest.approx(((got[name] - want).norm() / want.norm()).item(), rel=1e-3)
        assert (error.error_over_change is not None) is (name in report.merged)
    loaded = _load_four_bit(tmp_path / "out")
    assert isinstance(loaded.model.layers[1].mlp.up_proj, bitsandbytes.nn.Linear4bit)
    assert type(loaded.lm_head) is torch.nn.Linear
    unpacked = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base), dtype=torch.bfloat16).eval()
    unpacked.load_state_dict(got)
    torch.testing.assert_close(logits(loaded), logits(unpacked), rtol=2e-2, atol=2e-2)


def test_case_16_a_base_in_four_bits_keeps_its_settings_and_bytes(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    dense = save_llama(tmp_path / "dense", intermediate_size=128)
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_use_double_quant=False)
    base = tmp_path / "base"
    AutoModelForCausalLM.from_pretrained(
        dense, quantization_config=settings, dtype=torch.bfloat16, device_map={"": "cpu"}
    ).save_pretrained(base)
    train_llama(dense, tmp_path / "adapter", target_modules=["q_proj"])
    report = merge(base, tmp_path / "adapter", tmp_path / "out", dtype="nf4", allow_other_base=True)
    before, after = tensors(base), tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    touched = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name.split(".weight")[0] + ".weight" for name in touched} == set(report.merged) == report.requantised.keys()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"] == json.loads((base / "config.json").read_text())["quantization_config"]
    assert logits(_load_four_bit(tmp_path / "out")).isfinite().all()


def test_case_16_experts_stay_in_bf16_and_are_named(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    base = save_packed(tmp_path / "base")
    report = merge(base, [], tmp_path / "out", dtype="nf4")
    assert any("8 tensors of experts" in note and "mxfp4" in note for note in report.notes)
    assert len(report.requantised) == 4 * 4
    assert logits(_load_four_bit(tmp_path / "out")).isfinite().all()


def test_case_16_without_bitsandbytes_it_says_so_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = save_llama(tmp_path / "base")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"unsloth-plugins\[quant\]"):
        merge(base, [], tmp_path / "out", dtype="nf4")
    assert not (tmp_path / "out").exists()


_TIED = [
    (dict(modules_to_save=["embed_tokens"]), False),
    (dict(modules_to_save=["embed_tokens", "lm_head"]), False),
    (dict(modules_to_save=["embed_tokens"], ensure_weight_tying=True), True),
    (dict(target_modules=["q_proj", "embed_tokens"]), False),
    (dict(target_modules=["q_proj", "embed_tokens", "lm_head"]), False),
    (dict(target_modules=["q_proj", "embed_tokens"], ensure_weight_tying=True), True),
    (dict(target_modules=["q_proj", "lm_head"]), False),
    (dict(trainable_token_indices=[3, 77]), True),
    (dict(bias="all"), True),
]


@pytest.mark.parametrize(("options", "stays"), _TIED)
def test_case_22_tied_weights_stay_or_part(tmp_path: Path, options: dict[str, object], stays: bool) -> None:
    base = save_llama(tmp_path / "base", tie_word_embeddings=True, attention_bias=True)
    model = train_llama(base, tmp_path / "adapter", **options)
    want = logits(model)
    merge(base, tmp_path / "adapter", tmp_path / "out", dtype="fp32")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is stays and ("lm_head.weight" in tensors(tmp_path / "out")) is not stays
    torch.testing.assert_close(logits(reload(tmp_path / "out")), want, rtol=1e-5, atol=1e-5)
    merge_model(model, tmp_path / "live", dtype="fp32")
    live, out = tensors(tmp_path / "live"), tensors(tmp_path / "out")
    assert live.keys() == out.keys() and all(torch.equal(live[name], out[name]) for name in out)
    assert torch.equal(logits(model), want)


def test_trained_rows_that_the_base_lacks_are_an_error(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base")
    train_llama(base, tmp_path / "adapter", trainable_token_indices=[3, 77])
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"trainable_token_indices": [3, 160]}))
    with pytest.raises(ExportError, match=r"among the 160 of model.embed_tokens.weight; got row 160"):
        merge(base, tmp_path / "adapter", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("target", [["embed_tokens", "q_proj"], ["embed_tokens", "lm_head"]])
def test_case_22_new_rows_are_kept(tmp_path: Path, tied: bool, target: list[str]) -> None:
    base = save_llama(tmp_path / "base", tie_word_embeddings=tied)
    loaded = AutoModelForCausalLM.from_pretrained(base)
    loaded.resize_token_embeddings(168)
    model = get_peft_model(loaded, LoraConfig(r=4, target_modules=target))
    randomise(model)
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    if not tied and "lm_head" not in target:  # PEFT leaves the resized head out of the file
        with pytest.raises(ExportError, match="merge_model"):
            merge(base, tmp_path / "adapter", tmp_path / "out", dtype="fp32")
        merge_model(model, tmp_path / "out", dtype="fp32")
    else:
        merge(base, tmp_path / "adapter", tmp_path / "out", dtype="fp32")
    again = reload(tmp_path / "out")
    assert again.config.vocab_size == 168 and again.get_output_embeddings().weight.shape[0] == 168
    torch.testing.assert_close(logits(again), logits(model.eval()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {"modules_to_save": ["embed_tokens", "lm_head"]},
        {"modules_to_save": ["embed_tokens"]},
        {"trainable_token_indices": {"embed_tokens": [5, 160, 167]}},
    ],
    ids=["both", "embedding", "rows"],
)
def test_case_22_new_rows_trained_as_a_whole_or_alone(tmp_path: Path, tied: bool, options: dict[str, Any]) -> None:
    base = save_llama(tmp_path / "base", tie_word_embeddings=tied)
    loaded = AutoModelForCausalLM.from_pretrained(base)
    loaded.resize_token_embeddings(168)
    model = get_peft_model(loaded, LoraConfig(r=4, target_modules=["q_proj"], **options))
    randomise(model)
    model.save_pretrained(tmp_path / "adapter")
    merge(base, tmp_path / "adapter", tmp_path / "out", dtype="fp32")
    merge_model(model, tmp_path / "live", dtype="fp32")
    for folder in ("out", "live"):
        torch.testing.assert_close(logits(reload(tmp_path / folder)), logits(model.eval()), rtol=1e-5, atol=1e-5)


def test_two_saved_embeddings_that_differ_are_an_error(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base")
    loaded = AutoModelForCausalLM.from_pretrained(base)
    loaded.resize_token_embeddings(168)
    options: dict[str, Any] = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}
    get_peft_model(loaded, LoraConfig(r=4, **options)).save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    changed = load_file(file)
    changed["base_model.model.model.embed_tokens.modules_to_save.weight"] += 1
    save_file(changed, file)
    with pytest.raises(ExportError, match="to be equal in adapter_model.safetensors"):
        merge(base, tmp_path / "adapter", tmp_path / "out")


def test_modules_to_save_and_the_trained_router(tmp_path: Path) -> None:
    base = save_packed(tmp_path / "base")
    model = train_packed(base, tmp_path / "adapter", modules_to_save=["lm_head", "norm"])
    merge(base, tmp_path / "adapter", tmp_path / "out", dtype="fp32")
    torch.testing.assert_close(logits(reload(tmp_path / "out")), logits(model), rtol=1e-4, atol=1e-4)


def test_several_adapters_with_weights(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base")
    for name, options in (("one", dict(r=4)), ("two", dict(r=2, lora_alpha=5, target_modules=["q_proj", "up_proj"]))):
        model = train_llama(base, tmp_path / name, **options)
        randomise(model, seed=len(name) + options["r"])
        model.save_pretrained(tmp_path / name)
    merge(base, {str(tmp_path / "one"): 0.5, str(tmp_path / "two"): -1.0}, tmp_path / "out", dtype="fp32")
    merge(base, tmp_path / "one", tmp_path / "first", dtype="fp32")
    merge(base, [tmp_path / "two"], tmp_path / "second", dtype="fp32")
    start, first, second, both = (tensors(tmp_path / name) for name in ("base", "first", "second", "out"))
    for name in both:
        want = start[name] + 0.5 * (first[name] - start[name]) - (second[name] - start[name])
        torch.testing.assert_close(both[name], want, rtol=1e-5, atol=1e-6)
    train_llama(base, tmp_path / "saved", modules_to_save=["lm_head"])
    with pytest.raises(ConfigError, match="lm_head.weight with weight 0.5"):
        merge(base, {str(tmp_path / "saved"): 0.5}, tmp_path / "none")
    copy = shutil.copytree(tmp_path / "saved", tmp_path / "copy")
    with pytest.raises(ConfigError, match="from two adapters"):
        merge(base, [tmp_path / "saved", copy], tmp_path / "none")


def test_live_model_and_the_record_of_its_base(tmp_path: Path) -> None:
    base = save_packed(tmp_path / "base")
    model = train_packed(base, tmp_path / "adapter")
    report = merge_model(model, tmp_path / "live", dtype="fp32", adapter_output=tmp_path / "kept")
    torch.testing.assert_close(logits(reload(tmp_path / "live")), logits(model), rtol=1e-4, atol=1e-4)
    merge(base, tmp_path / "kept", tmp_path / "again", dtype="fp32")
    live, again = tensors(tmp_path / "live"), tensors(tmp_path / "again")
    assert len(report.merged) == 24 and all(torch.equal(live[name], again[name]) for name in again)
    other = save_packed(tmp_path / "other", seed=5)
    with pytest.raises(ExportError, match="fingerprint"):
        merge(other, tmp_path / "kept", tmp_path / "none")
    with pytest.raises(ConfigError, match="PEFT model"):
        merge_model(tiny_llama(), tmp_path / "none")


def test_a_relative_name_of_the_base_is_found_from_where_it_was_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = save_llama(tmp_path / "c" / "base")
    monkeypatch.chdir(tmp_path)
    train_llama(Path("c/base"), tmp_path / "adapter")
    merge("c/base", "adapter", "here")
    merge(base, "adapter", "absolute")
    monkeypatch.chdir(tmp_path / "c")
    with pytest.raises(ExportError, match=r"no folder 'c/base' here .* relative to where it was trained"):
        merge("base", tmp_path / "adapter", "out")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ExportError, match="differs by the name 'c/base'") as refused:
        merge(save_llama(tmp_path / "other", seed=1), "adapter", "out")
    assert "no folder" not in str(refused.value)


def test_another_base_is_refused_by_name_unless_allowed(tmp_path: Path) -> None:
    base, other = (save_llama(tmp_path / name, seed=seed) for name, seed in (("base", 0), ("other", 1)))
    copy = save_llama(tmp_path / "copy")
    train_llama(base, tmp_path / "adapter")
    with pytest.raises(ExportError, match="--allow-other-base"):
        merge(other, tmp_path / "adapter", tmp_path / "out")
    report = merge(other, tmp_path / "adapter", tmp_path / "out", allow_other_base=True)
    assert "another base" in report.notes[0]
    merge(copy, tmp_path / "adapter", tmp_path / "same")  # equal weights in another folder
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    for name in ("org/base", "/gone/base", "org/another"):  # a folder's own name says nothing
        config["base_model_name_or_path"] = name
        (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
        with pytest.raises(ExportError, match=f"by the name '{name}'"):
            merge(base, tmp_path / "adapter", tmp_path / "none")
    record_base(tmp_path / "adapter", base)
    merge(copy, tmp_path / "adapter", tmp_path / "recorded")


def test_the_fingerprint_sees_the_middle_of_a_tensor(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(8, 400, 30, generator=draw)
    content = {"w": weight, "empty": torch.empty(0, 3), "scalar": torch.tensor(1.0), "short": torch.arange(5)}
    save_file(content, tmp_path / "model.safetensors")
    before = fingerprint(MemoryTensors(content))
    assert fingerprint(open_folder(tmp_path)) == before
    for slices in ((slice(3, 5),), (slice(None), slice(200, 300)), (slice(None), slice(None), slice(7, 8))):
        other = weight.clone()
        other[slices] += 1e-3
        assert fingerprint(MemoryTensors(content | {"w": other})) != before, slices
    assert fingerprint(MemoryTensors(content | {"scalar": torch.tensor(2.0)})) != before
    source = _Counting(content | {"w": torch.zeros(300, 300, 30)})
    fingerprint(source)
    assert source.read_bytes < 40_000


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (dict(use_dora=True), "use_dora"),
        (dict(lora_bias=True), "lora_bias"),
        (dict(peft_type="LOHA"), "peft_type"),
        (dict(init_lora_weights="pissa_niter_4"), "pissa"),
    ],
)
def test_other_maths_is_refused(tmp_path: Path, change: dict[str, object], named: str) -> None:
    base = save_llama(tmp_path / "base")
    train_llama(base, tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UnsupportedError, match=named):
        merge(base, tmp_path / "adapter", tmp_path / "out")


def test_outputs_in_a_source_folder_are_no_part_of_it(tmp_path: Path) -> None:
    """Of the base and of the adapter, and what a killed or another export has there."""
    base, adapter = save_llama(tmp_path / "base"), tmp_path / "adapter"
    train_llama(base, adapter)
    small_tokenizer().save_pretrained(base)
    merge(base, adapter, tmp_path / "before")
    merge(base, [], base / "inside")
    merge(base, adapter, adapter / "inside")
    for name in ("Modelfile", "model.Modelfile", "model.gguf", ".x.gguf.lock", ".gitattributes"):
        (base / name).write_text("left behind")
    (base / ".inside.incomplete").mkdir()
    merge(base, adapter, tmp_path / "after")
    before, after = (
        {path.name: path.read_bytes() for path in sorted((tmp_path / name).iterdir())} for name in ("before", "after")
    )
    assert before == after


def test_side_files_come_along_and_the_adapters_tokenizer_wins(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base")
    for name in ("LICENSE", "README.md", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (base / name).write_text(f"base {name}")
    (base / "pytorch_model.bin").write_text("weights")
    train_llama(base, tmp_path / "adapter")
    merge(base, tmp_path / "adapter", tmp_path / "out")
    copied = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"LICENSE", "README.md", "tokenizer.json", "generation_config.json"} <= copied
    assert (tmp_path / "out" / "README.md").read_text() == "base README.md" and "pytorch_model.bin" not in copied
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / "adapter" / name).write_text(f"adapter {name}")
    notes = merge(base, tmp_path / "adapter", tmp_path / "second").notes
    assert any("copied unread" in note for note in notes)
    assert (tmp_path / "second" / "tokenizer.json").read_text() == "adapter tokenizer.json"
    assert not (tmp_path / "second" / "special_tokens_map.json").exists()  # the two sets are not mixed


@pytest.mark.parametrize(
    ("stops", "end", "rows", "told"),
    [(1, 5, 160, [1, 5]), (5, 5, 160, 5), (None, 5, 160, 5), ([1, 7], 5, 160, [1, 7, 5]), (1, 159, 159, 1)],
)
def test_the_merged_model_stops_where_the_adapters_tokenizer_does(
    stops: Any, end: int, rows: int, told: Any, tmp_path: Path
) -> None:
    base = save_llama(tmp_path / "base", vocab_size=rows, pad_token_id=None)
    for name in ("config.json", "generation_config.json"):
        (base / name).write_text(json.dumps(json.loads((base / name).read_text()) | {"eos_token_id": stops}))
    train_llama(base, tmp_path / "adapter")
    words = {f"w{number}": number for number in range(160)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), eos_token=f"w{end}", pad_token="w2"
    )
    tokenizer.save_pretrained(tmp_path / "adapter")
    notes = merge(base, tmp_path / "adapter", tmp_path / "out").notes
    for name in ("config.json", "generation_config.json"):
        config = json.loads((tmp_path / "out" / name).read_text())
        assert (config["eos_token_id"], config["pad_token_id"]) == (told, 2), name
    assert any("ids up to 159, the embedding 159 rows" in note for note in notes) is (rows == 159)


def test_half_a_tokenizer_beside_the_adapter_does_not_replace_the_bases(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base")
    train_llama(base, tmp_path / "adapter")
    small_tokenizer().save_pretrained(base)
    small_tokenizer(eos_token="<s>").save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter" / "tokenizer.json").unlink()
    notes = merge(base, tmp_path / "adapter", tmp_path / "out").notes
    assert "no vocabulary" in notes[-1]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (base / name).read_bytes()
    pytest.importorskip("gguf", reason="needs gguf")
    assert "no vocabulary" in export_gguf(base, tmp_path / "m.gguf", adapter=tmp_path / "adapter").notes[-1]


@pytest.mark.parametrize(
    ("file", "text", "named"),
    [
        ("generation_config.json", "{", "JSON in"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id in the model's generation_config.json"),
        ("config.json", '{"eos_token_id": [1.5]}', "eos_token_id in the model's config.json"),
    ],
)
def test_damaged_ends_are_found_before_anything_is_written(file: str, text: str, named: str, tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base")
    train_llama(base, tmp_path / "adapter")
    small_tokenizer().save_pretrained(tmp_path / "adapter")
    (base / file).write_text(text)
    written: list[str] = []
    with pytest.raises(ExportError, match=named):
        merge(base, tmp_path / "adapter", tmp_path / "out", progress=lambda done, total, name: written.append(name))
    assert not written and sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]


def test_float16_does_not_overflow_silently(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base")
    content = tensors(base)
    content["model.norm.weight"][3] = 1e5
    save_file(content, base / "model.safetensors")
    train_llama(base, tmp_path / "adapter")
    with pytest.raises(ExportError, match="model.norm.weight"):
        merge(base, tmp_path / "adapter", tmp_path / "out", dtype="fp16")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))
    with pytest.raises(ConfigError, match="'int3'"):
        merge(base, tmp_path / "adapter", tmp_path / "out", dtype="int3")


def test_everything_is_a_target_by_regular_expression(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base")
    model = train_llama(base, tmp_path / "adapter", target_modules=r".*\.layers\.\d\..*_proj")
    merge(base, tmp_path / "adapter", tmp_path / "out", dtype="fp32")
    torch.testing.assert_close(logits(reload(tmp_path / "out")), logits(model), rtol=1e-5, atol=1e-5)


def test_a_merge_loads_neither_transformers_nor_peft(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base")
    train_llama(base, tmp_path / "adapter")
    code = (
        "import sys; from unsloth_plugins.core.export import merge; merge(*sys.argv[1:]);"
        "assert not {'transformers', 'peft'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(base), str(tmp_path / "adapter"), str(tmp_path / "out")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_a_sharded_model_is_refused_by_every_process() -> None:
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model = fully_shard(tiny_llama(), mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(UnsupportedError, match="sharded over processes"):
            base_of_model(model)
    finally:
        distributed.destroy_process_group()
