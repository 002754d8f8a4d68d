"""Axolotl's command line with the plugin, on a CPU."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from axolotl_runs import PLUGIN, axolotl, config, losses, state, write_adapter, write_assets
from conftest import tiny_gpt_oss, tiny_llama
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from recorder import IDS_BT
from safetensors.torch import load_file

from unsloth_plugins.core import apply
from unsloth_plugins.core.mxfp4 import pack_experts

pytestmark = pytest.mark.slow
EXPERTS = ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]
SAVE = {"save_strategy": "steps", "save_steps": 3}


@pytest.mark.parametrize("make", [tiny_gpt_oss, tiny_llama])
def test_the_plugin_line_is_enough_and_gives_the_same_curve(make: Any, tmp_path: Path) -> None:
    write_assets(tmp_path, make())
    start = {"lora_model_dir": write_adapter(tmp_path, make(), ["q_proj", "v_proj"])}
    stock = config(tmp_path, plugins=None, output_dir=str(tmp_path / "stock"), lora_mlp_kernel=False, **start, **SAVE)
    stock |= {"lora_qkv_kernel": False, "lora_o_kernel": False, "lora_embedding_kernel": False}
    axolotl("train", stock, tmp_path)
    printed = axolotl("train", config(tmp_path, unsloth={"offload_min_bytes": 0}, **start, **SAVE), tmp_path)
    assert losses(tmp_path / "out") == pytest.approx(losses(tmp_path / "stock"), abs=2e-5)
    (first, *_) = state(tmp_path / "out")["log_history"]
    assert first["tokens_per_s"] > 0 and first["peak_memory_gib"] > 0 and first["host_gib"] > 0
    assert printed.count("unsloth-plugins on ") == 1 and printed.count("unsloth-plugins: ") == 1


def test_sample_packing_evaluation_and_quiet(tmp_path: Path) -> None:
    write_assets(tmp_path, tiny_gpt_oss())
    options = dict(sample_packing=True, pad_to_sequence_len=True, micro_batch_size=1, val_set_size=0.2, eval_steps=3)
    printed = axolotl("train", config(tmp_path, unsloth={"quiet": True}, **options, **SAVE), tmp_path)
    logs = state(tmp_path / "out")["log_history"]
    assert len([log for log in logs if "loss" in log]) == 3 and any("eval_loss" in log for log in logs)
    assert "unsloth-plugins on " not in printed and "unsloth-plugins: " not in printed


def losses_of_rows(model: Any, ids_T: torch.Tensor, labels_T: torch.Tensor, starts: list[int]) -> float:
    """The mean over the targets of one row whose documents begin at ``starts``, each run through the model alone."""
    ends = [*starts[1:], len(ids_T)]
    with torch.no_grad():
        apart = [model(input_ids=ids_T[None, a:b]).logits[0] for a, b in zip(starts, ends, strict=True)]
    return torch.nn.functional.cross_entropy(torch.cat(apart)[:-1], labels_T[1:]).item()


@pytest.mark.parametrize(("make", "attention"), [(tiny_gpt_oss, "eager"), (tiny_llama, "sdpa")])
def test_packed_documents_do_not_see_each_other(make: Any, attention: str, tmp_path: Path) -> None:
    write_assets(tmp_path, make())
    options: dict[str, Any] = dict(sample_packing=True, pad_to_sequence_len=True, micro_batch_size=1, max_steps=1)
    plugins = [PLUGIN, "recorder.Recorder"]
    axolotl("train", config(tmp_path, plugins=plugins, attn_implementation=attention, **options), tmp_path)
    ((batch, loss),) = torch.load(tmp_path / "out" / "batches.pt")  # LoRA's B is zero: the base's own loss
    ids, labels, positions = (batch[name][0] for name in ("input_ids", "labels", "position_ids"))
    starts = (positions == 0).nonzero().flatten().tolist()
    assert len(starts) > 2
    assert loss == pytest.approx(losses_of_rows(make(), ids, labels, starts), abs=1e-5)
    assert loss != pytest.approx(losses_of_rows(make(), ids, labels, [0]), abs=1e-3)  # what a leak would give


def test_linear_targets_on_a_packed_base_are_those_of_peft(tmp_path: Path) -> None:
    """``lora_target_linear`` of Axolotl names linear layers, which packed experts are not."""
    write_assets(tmp_path, pack_experts(tiny_gpt_oss()))
    linear = dict(lora_target_modules=None, lora_target_linear=True)
    axolotl("train", config(tmp_path, adapter="qlora", learning_rate=0.1, **linear), tmp_path)
    saved = load_file(tmp_path / "out" / "adapter_model.safetensors")
    wanted = get_peft_model(pack_experts(tiny_gpt_oss()), LoraConfig(r=4, target_modules="all-linear"))
    apply(wanted)
    assert {name: tensor.shape for name, tensor in saved.items()} == {
        name: tensor.shape for name, tensor in get_peft_model_state_dict(wanted).items()
    }
    assert sum(".experts." in name for name in saved) == 4 * 2 * 2
    assert all(tensor.any() for name, tensor in saved.items() if "lora_B" in name)


def test_inference_on_a_packed_base_uses_adapters_on_experts(tmp_path: Path) -> None:
    write_assets(tmp_path, pack_experts(tiny_gpt_oss()))
    settings = config(tmp_path, lora_target_modules=EXPERTS, learning_rate=0.1, plugins=[PLUGIN, "recorder.Recorder"])
    axolotl("train", settings, tmp_path)
    said = axolotl("inference", settings | {"lora_model_dir": str(tmp_path / "out")}, tmp_path, answers="the quick")
    assert "Traceback" not in said
    logits = torch.load(tmp_path / "out" / "logits.pt")
    adapted = PeftModel.from_pretrained(pack_experts(tiny_gpt_oss()), tmp_path / "out")
    with torch.no_grad():
        torch.testing.assert_close(logits, adapted(input_ids=IDS_BT).logits, rtol=0, atol=1e-4)
        for name, module in adapted.named_modules():
            if ".experts" in name and hasattr(module, "lora_B"):
                assert module.lora_B["default"].weight.any(), name
                module.lora_B["default"].weight.zero_()
        assert (logits - adapted(input_ids=IDS_BT).logits).abs().max() > 0.1  # without the experts' part


def test_case_25_one_step_on_a_packed_base(tmp_path: Path) -> None:
    """Experts stay in 4 bits, and their adapters, which PEFT does not create, are trained and saved."""
    write_assets(tmp_path, pack_experts(tiny_gpt_oss()))
    before = load_file(tmp_path / "model" / "model.safetensors")
    printed = axolotl(
        "train", config(tmp_path, adapter="qlora", load_in_4bit=True, lora_target_modules=EXPERTS, **SAVE), tmp_path
    )
    assert "packed MXFP4" in printed
    saved = load_file(tmp_path / "out" / "adapter_model.safetensors")
    experts = [name for name in saved if ".experts." in name]
    assert len(experts) == 4 * 2 * 2 and all(saved[name].abs().max() > 0 for name in experts)
    after = load_file(tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("packed", [False, True])
def test_case_17_resume_continues_bit_equal(packed: bool, tmp_path: Path) -> None:
    def make() -> Any:
        return pack_experts(tiny_gpt_oss()) if packed else tiny_llama()

    extra: dict[str, Any] = {} if packed else dict(modules_to_save=["embed_tokens", "lm_head"], lora_dropout=0.3)
    write_assets(tmp_path, make())
    options: dict[str, Any] = dict(lora_model_dir=write_adapter(tmp_path, make(), EXPERTS, **extra), **SAVE)
    whole, half = tmp_path / "whole", tmp_path / "half"
    axolotl("train", config(tmp_path, output_dir=str(whole), max_steps=6, **options), tmp_path)
    axolotl("train", config(tmp_path, output_dir=str(half), max_steps=3, **options), tmp_path)
    resume = dict(max_steps=6, resume_from_checkpoint=str(half / "checkpoint-3"))
    axolotl("train", config(tmp_path, output_dir=str(half), **resume, **options), tmp_path)
    assert losses(half) == losses(whole)
    for name in ("adapter_model.safetensors",):
        ours, wanted = (load_file(folder / "checkpoint-6" / name) for folder in (half, whole))
        assert ours.keys() == wanted.keys() and all(torch.equal(ours[key], wanted[key]) for key in wanted)
    moments, wanted = (
        torch.load(folder / "checkpoint-6" / "optimizer.pt", weights_only=False)["state"] for folder in (half, whole)
    )
    assert moments.keys() == wanted.keys()
    for key, values in wanted.items():
        assert all(torch.equal(torch.as_tensor(moments[key][name]), torch.as_tensor(values[name])) for name in values)


def test_preprocess_then_train_with_accumulation(tmp_path: Path) -> None:
    write_assets(tmp_path, tiny_llama())
    settings = config(tmp_path, gradient_accumulation_steps=2, **SAVE)
    axolotl("preprocess", settings, tmp_path)
    axolotl("train", settings, tmp_path)
    assert len(losses(tmp_path / "out")) == 3


def test_the_merged_model_is_saved_at_the_end_and_by_the_command_that_a_refusal_names(tmp_path: Path) -> None:
    write_assets(tmp_path, pack_experts(tiny_gpt_oss()))
    options: dict[str, Any] = dict(lora_target_modules=EXPERTS, **SAVE)
    options["unsloth"] = {"save_merged": str(tmp_path / "merged"), "merged_dtype": "fp32"}
    printed = axolotl("train", config(tmp_path, **options), tmp_path)
    assert f"Merged model in {tmp_path / 'merged'}" in printed
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert (tmp_path / "merged" / "tokenizer.json").is_file()
    refusal = axolotl("merge-lora", config(tmp_path, attn_implementation=None, **options), tmp_path, check=False)
    command = re.search(r"`unsloth-plugins (merge [^`]+)`", refusal)
    assert command, refusal[-3000:]
    main = [sys.executable, "-m", "unsloth_plugins", *command[1].split(), "--dtype", "fp32", "--json"]
    done = subprocess.run(main, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "fingerprint" in json.loads(done.stdout)["notes"][0]
    assert all((tmp_path / each / "base_record.json").is_file() for each in ("out", "out/checkpoint-3"))
    again = load_file(tmp_path / "out" / "merged" / "model.safetensors")
    assert again.keys() == merged.keys() and all(torch.equal(again[name], merged[name]) for name in again)


@pytest.mark.parametrize("packed", [False, True])
def test_two_ranks_train_as_one_with_all_the_batches(
    packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")

    def make() -> Any:
        return pack_experts(tiny_gpt_oss()) if packed else tiny_llama()

    write_assets(tmp_path, make())
    start = {"lora_model_dir": write_adapter(tmp_path, make(), EXPERTS)}
    options: dict[str, Any] = dict(micro_batch_size=1, optimizer="sgd", max_grad_norm=1e9, **start, **SAVE)
    one, two = tmp_path / "one", tmp_path / "two"
    axolotl("train", config(tmp_path, output_dir=str(one), gradient_accumulation_steps=2, **options), tmp_path)
    launch = ("--launcher", "torchrun", "--", "--standalone", "--nproc-per-node=2")
    plugins = [PLUGIN, "cpu_ranks.CpuRanks"]
    printed = axolotl("train", config(tmp_path, output_dir=str(two), plugins=plugins, **options), tmp_path, *launch)
    assert losses(two) == pytest.approx(losses(one), abs=1e-5) and len(losses(two)) == 3
    both = [load_file(folder / "adapter_model.safetensors") for folder in (two, one)]
    torch.testing.assert_close(*both, rtol=0, atol=1e-6)  # SGD: also the gradients
    assert printed.count("unsloth-plugins on ") == 1
    ranks = [load_file(two / f"rank{rank}.safetensors") for rank in range(2)]
    assert ranks[0].keys() == ranks[1].keys() and len(ranks[0]) == len(both[0])
    assert all(torch.equal(ranks[0][name], ranks[1][name]) for name in ranks[0])


def test_merge_lora_and_inference(tmp_path: Path) -> None:
    """The plugin changes neither: the merged model is base plus adapter, and an adapter answers."""
    from transformers import AutoModelForCausalLM

    write_assets(tmp_path, tiny_llama())
    settings = config(tmp_path, lora_model_dir=write_adapter(tmp_path, tiny_llama(), ["q_proj", "v_proj"]))
    axolotl("train", settings, tmp_path)
    trained = {"lora_model_dir": str(tmp_path / "out")}
    axolotl("merge-lora", settings | trained, tmp_path)
    ids = torch.arange(3, 20)[None]
    adapted = PeftModel.from_pretrained(tiny_llama(), tmp_path / "out")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "merged", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, rtol=0, atol=1e-2)
        assert (merged(ids).logits - tiny_llama()(ids).logits).abs().max() > 1e-2
    said = axolotl("inference", settings | trained, tmp_path, answers="the quick")
    assert "Traceback" not in said


def test_qlora_with_bitsandbytes(tmp_path: Path) -> None:
    write_assets(tmp_path, tiny_llama())
    start = {"lora_model_dir": write_adapter(tmp_path, tiny_llama(), ["q_proj", "v_proj"])}
    options: dict[str, Any] = dict(adapter="qlora", load_in_4bit=True, **start, **SAVE)
    stock = config(tmp_path, plugins=None, output_dir=str(tmp_path / "stock"), lora_mlp_kernel=False, **options)
    stock |= {"lora_qkv_kernel": False, "lora_o_kernel": False, "lora_embedding_kernel": False}
    axolotl("train", stock, tmp_path)
    printed = axolotl("train", config(tmp_path, **options), tmp_path)
    assert losses(tmp_path / "out") == pytest.approx(losses(tmp_path / "stock"), abs=2e-3)
    assert "chunked cross entropy" in printed


def test_case_15_accumulation_is_that_of_axolotl_alone(tmp_path: Path) -> None:
    """Axolotl alone does not give the same for 1 x 4 and 4 x 1 rows of different lengths; we add nothing to it."""
    write_assets(tmp_path, tiny_llama())
    options: dict[str, Any] = dict(gradient_accumulation_steps=4, micro_batch_size=1, optimizer="sgd", **SAVE)
    options["lora_model_dir"] = write_adapter(tmp_path, tiny_llama(), ["q_proj", "v_proj"])
    stock = config(tmp_path, plugins=None, output_dir=str(tmp_path / "stock"), lora_mlp_kernel=False, **options)
    stock |= {"lora_qkv_kernel": False, "lora_o_kernel": False, "lora_embedding_kernel": False}
    axolotl("train", stock, tmp_path)
    axolotl("train", config(tmp_path, **options), tmp_path)
    assert losses(tmp_path / "out") == pytest.approx(losses(tmp_path / "stock"), abs=1e-5)
    both = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("out", "stock")]
    torch.testing.assert_close(*both, rtol=0, atol=1e-6)
