"""The base's record beside every adapter that a patched PEFT model saves."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_gpt_oss, tiny_llama
from merge_cases import ATTENTION, EVERYTHING, logits, randomise, reload, save_llama, save_packed
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Mxfp4Config

from unsloth_plugins.core import apply
from unsloth_plugins.core.errors import ExportError
from unsloth_plugins.core.export import merge, merge_model
from unsloth_plugins.core.mxfp4 import load_mxfp4, pack_experts


def llama(base: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(base, dtype=dtype)


def lora(model: Any, targets: list[str] = ATTENTION) -> PeftModel:
    return get_peft_model(model, LoraConfig(r=4, target_modules=targets))


def fingerprints(adapter: Path) -> list[str]:
    return json.loads((adapter / "base_record.json").read_text())["base_fingerprints"]


def check_merges(base: Path, other: Path, adapter: Path) -> None:
    """By the record, whatever name the adapter has for its base."""
    config = json.loads((adapter / "adapter_config.json").read_text()) | {"base_model_name_or_path": str(other)}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    assert "fingerprint" in merge(base, adapter, adapter / "merged").notes[0]
    with pytest.raises(ExportError, match="fingerprint"):
        merge(other, adapter, adapter / "none")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_save_pretrained_records_the_base(dtype: torch.dtype, tmp_path: Path) -> None:
    base, other = (save_llama(tmp_path / name, seed=seed) for name, seed in (("base", 0), ("other", 1)))
    model = lora(llama(base, dtype))
    report = apply(model).report()
    assert "base_record.json" in report
    model.save_pretrained(tmp_path / "adapter")
    check_merges(base, other, tmp_path / "adapter")


def test_weights_that_were_trained_and_are_in_no_file(tmp_path: Path) -> None:
    """A norm unfrozen by hand: the base is the right one, and a merge into it would be another model."""
    base, other = (save_llama(tmp_path / name, seed=seed) for name, seed in (("base", 0), ("other", 1)))
    model = lora(llama(base))
    apply(model)
    model.get_base_model().model.norm.weight.requires_grad_(True)
    randomise(model)
    model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ExportError, match=r"norms unfrozen by hand.*merge_model.*--allow-other-base") as raised:
        merge(base, tmp_path / "adapter", tmp_path / "out")
    assert "right base" not in raised.value.remedy and str(base) in raised.value.got
    with pytest.raises(ExportError, match="Give the right base"):
        merge(other, tmp_path / "adapter", tmp_path / "out")
    merge_model(model, tmp_path / "out", dtype="fp32")
    torch.testing.assert_close(logits(reload(tmp_path / "out")), logits(model.eval()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weights", ["resident", "streamed"])
def test_packed_experts_resident_and_streamed(weights: str, tmp_path: Path) -> None:
    base, other = (save_packed(tmp_path / name, seed=seed) for name, seed in (("base", 0), ("other", 1)))
    model = lora(load_mxfp4(base, dtype=torch.float32), EVERYTHING)
    apply(model, weights=weights)
    randomise(model)
    model.save_pretrained(tmp_path / "adapter")
    check_merges(base, other, tmp_path / "adapter")
    assert len(set(fingerprints(tmp_path / "adapter"))) == 1  # in memory as in the folder


def test_weights_that_are_no_longer_those_of_the_folder(tmp_path: Path) -> None:
    """Trained, merged into the model, and trained again: the second adapter is one of the merged weights."""
    base = save_llama(tmp_path / "base")
    first = lora(llama(base))
    randomise(first)
    tuned = first.merge_and_unload()
    tuned.save_pretrained(tmp_path / "tuned")
    second = lora(tuned)
    apply(second)
    randomise(second)
    second.save_pretrained(tmp_path / "adapter")
    check_merges(tmp_path / "tuned", base, tmp_path / "adapter")


def save_with_biases(folder: Path, family: str, seed: int = 0) -> Path:
    if family == "gpt_oss":
        return save_packed(folder, seed=seed)
    model = tiny_llama(seed=seed, attention_bias=True)
    randomise(model)  # transformers starts biases at zero, in every model
    model.save_pretrained(folder)
    return folder


def load(base: Path, family: str) -> Any:
    return load_mxfp4(base, dtype=torch.float32) if family == "gpt_oss" else llama(base)


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_biases_that_were_trained_in_place(bias: str, family: str, tmp_path: Path) -> None:
    """Saved after training, loaded to train on, and kept by a merge of the live model: the base is the same."""
    base, other = (save_with_biases(tmp_path / name, family, seed) for seed, name in enumerate(("base", "other")))
    model = get_peft_model(load(base, family), LoraConfig(r=4, target_modules=ATTENTION, bias=bias))
    apply(model)
    randomise(model)
    model.save_pretrained(tmp_path / "adapter")
    check_merges(base, other, tmp_path / "adapter")
    merge(base, tmp_path / "adapter", tmp_path / "exact", dtype="fp32")
    torch.testing.assert_close(logits(reload(tmp_path / "exact")), logits(model.eval()), rtol=1e-4, atol=1e-4)
    merge_model(model, tmp_path / "live", adapter_output=tmp_path / "kept")
    check_merges(base, other, tmp_path / "kept")
    again = PeftModel.from_pretrained(load(base, family), tmp_path / "adapter", is_trainable=True)
    apply(again)
    randomise(again, seed=4)
    again.save_pretrained(tmp_path / "again")
    check_merges(base, other, tmp_path / "again")


@pytest.mark.parametrize("first", ["none", "all"])
def test_trained_biases_do_not_hide_an_earlier_adapter(first: str, tmp_path: Path) -> None:
    """Merged into the model, which was trained again with biases: the old folder is not the base."""
    base = save_with_biases(tmp_path / "base", "llama")
    before = get_peft_model(llama(base), LoraConfig(r=4, target_modules=["q_proj"], bias=first))
    randomise(before)
    tuned = before.merge_and_unload()
    tuned.save_pretrained(tmp_path / "tuned")
    model = get_peft_model(tuned, LoraConfig(r=4, target_modules=["q_proj"], bias="all"))
    apply(model)
    randomise(model, seed=4)
    model.save_pretrained(tmp_path / "adapter")
    check_merges(tmp_path / "tuned", base, tmp_path / "adapter")


def test_biases_of_another_adapter_count(tmp_path: Path) -> None:
    base = save_with_biases(tmp_path / "base", "llama")
    trained = get_peft_model(llama(base), LoraConfig(r=4, target_modules=["q_proj"], bias="all"))
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            parameter.add_(name.endswith("bias"))
    tuned = trained.merge_and_unload()  # its LoRA is zero
    tuned.save_pretrained(tmp_path / "tuned")
    model = get_peft_model(tuned, LoraConfig(r=4, target_modules=["q_proj"], bias="lora_only"))
    apply(model)
    randomise(model)
    model.save_pretrained(tmp_path / "adapter")
    check_merges(tmp_path / "tuned", base, tmp_path / "adapter")


def save_converted(model: Any, folder: Path) -> None:
    """Trained from PiSSA, and saved as PEFT documents it: as LoRA over the base before."""
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(folder / "start")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder / "adapter", path_initial_model_for_weight_conversion=str(folder / "start"))


def pissa(model: Any) -> PeftModel:
    model = get_peft_model(model, LoraConfig(r=4, target_modules=ATTENTION, init_lora_weights="pissa"))
    apply(model)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_converted_from_pissa(dtype: torch.dtype, tmp_path: Path) -> None:
    base, other = (save_llama(tmp_path / name, seed=seed) for name, seed in (("base", 0), ("other", 1)))
    model = pissa(llama(base, dtype))
    before = {name: numbers.clone() for name, numbers in model.state_dict().items() if "lora_" not in name}
    save_converted(model, tmp_path)
    after = model.state_dict()
    assert all(torch.equal(after[name], numbers) for name, numbers in before.items())
    check_merges(base, other, tmp_path / "adapter")
    if dtype == torch.float32:
        merge(base, tmp_path / "adapter", tmp_path / "exact", dtype="fp32")
        torch.testing.assert_close(logits(reload(tmp_path / "exact")), logits(model.eval()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("targets", [["q_proj"], ["up_proj"]])
def test_conversion_does_not_hide_an_earlier_adapter(targets: list[str], dtype: torch.dtype, tmp_path: Path) -> None:
    """Merged into weights that PiSSA starts from, or into others."""
    base = save_llama(tmp_path / "base")
    first = lora(llama(base, dtype), targets)
    randomise(first, std=0.02)
    save_converted(pissa(first.merge_and_unload()), tmp_path)
    with pytest.raises(ExportError, match="differs by the fingerprint"):
        merge(base, tmp_path / "adapter", tmp_path / "none")


def test_packed_weights_of_the_folder_that_were_decoded_when_loaded(tmp_path: Path) -> None:
    base, other = (save_packed(tmp_path / name, seed=seed) for name, seed in (("base", 0), ("other", 1)))
    config = Mxfp4Config(dequantize=True)
    model = lora(AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16, quantization_config=config))
    apply(model)
    model.save_pretrained(tmp_path / "adapter")
    check_merges(base, other, tmp_path / "adapter")


@pytest.mark.parametrize("config", [None, {"model_type": "own"}])
def test_modules_without_a_transformers_config_are_saved(config: dict[str, str] | None, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    if config is not None:
        model.config = config  # type: ignore[assignment]
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["0"]))
    apply(wrapped)
    wrapped.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").is_file() and len(fingerprints(tmp_path)) == 1


def test_a_record_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = lora(tiny_llama())
    apply(model)
    (tmp_path / "base_record.json").mkdir()
    model.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").is_file() and "No base_record.json beside" in caplog.text


def test_each_saved_adapter_gets_it(tmp_path: Path) -> None:
    model = lora(tiny_llama())
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"]))
    apply(model)
    model.save_pretrained(str(tmp_path / "all"))
    model.save_pretrained(tmp_path / "one", True, ["second"])
    model.save_pretrained(tmp_path / "nobody", is_main_process=False)
    model.save_pretrained(tmp_path / "none", selected_adapters=[])
    scales = get_peft_model(tiny_llama(), IA3Config(target_modules=["k_proj"], feedforward_modules=[]))
    apply(scales)
    scales.save_pretrained(tmp_path / "scales")  # of a kind that is not merged
    found = sorted(str(path.parent.relative_to(tmp_path)) for path in tmp_path.rglob("base_record.json"))
    assert found == ["all", "all/second", "one/second"]
    assert (tmp_path / "scales" / "adapter_config.json").is_file()


def test_an_adapter_added_after_apply_is_followed_at_the_next_one(tmp_path: Path) -> None:
    base = tiny_llama()
    applied = apply(base)
    model = lora(base)
    assert apply(model) is applied
    before = model.save_pretrained
    assert apply(model) is applied and model.save_pretrained == before
    model.save_pretrained(tmp_path)
    assert fingerprints(tmp_path)


def test_undo_leaves_no_trace_and_what_was_there_is_called(tmp_path: Path) -> None:
    model = lora(tiny_llama())
    before = dict(vars(model))
    applied = apply(model)
    ours = model.save_pretrained
    applied.undo()
    assert vars(model) == before and list(vars(model)) == list(before)
    ours(tmp_path / "late")  # as the class does it
    assert (tmp_path / "late" / "adapter_config.json").is_file()

    calls = []

    def own(folder: Any, **options: Any) -> None:
        calls.append(options)
        type(model).save_pretrained(model, folder, **options)

    vars(model)["save_pretrained"] = own
    applied = apply(model)
    model.save_pretrained(tmp_path / "own", safe_serialization=False)
    assert calls == [{"safe_serialization": False}] and fingerprints(tmp_path / "own")
    applied.undo()
    assert vars(model)["save_pretrained"] is own
    assert not (tmp_path / "late" / "base_record.json").exists()


def test_a_deep_copy_records_its_own_base(tmp_path: Path) -> None:
    model = lora(tiny_llama())
    apply(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.get_base_model().model.norm.weight.add_(1)
        for parameter in twin.parameters():
            parameter.add_(parameter.requires_grad)
    for each, name in ((model, "model"), (twin, "twin")):
        each.save_pretrained(tmp_path / name)
    assert fingerprints(tmp_path / "model") != fingerprints(tmp_path / "twin")
    files = [(tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("model", "twin")]
    assert files[0] != files[1]


def quantised(base: Path, bits: int) -> Any:
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    settings = BitsAndBytesConfig(**{f"load_in_{bits}bit": True})
    return AutoModelForCausalLM.from_pretrained(
        base, quantization_config=settings, dtype=torch.bfloat16, device_map={"": "cpu"}
    )


@pytest.mark.parametrize("prepared", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_weights_that_were_quantised_when_loaded(bits: int, prepared: bool, tmp_path: Path) -> None:
    """Those of the folder are refused with their own words; 4 bits that were saved are what training saw."""
    base, other = (save_llama(tmp_path / name, seed=seed, intermediate_size=128) for seed, name in enumerate("bo"))
    model, adapter = quantised(base, bits), tmp_path / "adapter"
    model.save_pretrained(tmp_path / "quantised")
    model = lora(prepare_model_for_kbit_training(model) if prepared else model)
    apply(model)
    model.save_pretrained(adapter)
    with pytest.raises(ExportError, match=f"quantised to {bits}-bit bitsandbytes when loaded.*--allow-other") as error:
        merge(base, adapter, tmp_path / "none")
    assert ("Merge into the quantised model" in error.value.remedy) is (bits == 4)
    (note,) = merge(base, adapter, tmp_path / "rounded", allow_other_base=True).notes
    assert f"in {bits}-bit bitsandbytes: merged into the weights before that rounding" in note
    with pytest.raises(ExportError, match="which differs by the fingerprint"):
        merge(other, adapter, tmp_path / "none")
    if bits == 4:
        assert "by the fingerprint" in merge(tmp_path / "quantised", adapter, tmp_path / "merged").notes[0]
    record = json.loads((adapter / "base_record.json").read_text())
    del record["quantised_from"]  # as where the folder was not to be had
    (adapter / "base_record.json").write_text(json.dumps(record))
    with pytest.raises(ExportError, match="quantised to"):
        merge(base, adapter, tmp_path / "none")
    with pytest.raises(ExportError, match="which differs by the fingerprint"):
        merge(other, adapter, tmp_path / "none")


def test_a_base_that_is_stored_in_four_bits_was_not_quantised_when_loaded(tmp_path: Path) -> None:
    quantised(save_llama(tmp_path / "dense", intermediate_size=128), 4).save_pretrained(tmp_path / "base")
    model = lora(AutoModelForCausalLM.from_pretrained(tmp_path / "base", device_map={"": "cpu"}))
    apply(model)
    model.save_pretrained(tmp_path / "adapter")
    assert "quantised_when_loaded" not in json.loads((tmp_path / "adapter" / "base_record.json").read_text())
    check_merges(tmp_path / "base", tmp_path / "dense", tmp_path / "adapter")


def test_weights_packed_after_loading_are_not_those_of_the_folder(tmp_path: Path) -> None:
    tiny_gpt_oss().save_pretrained(tmp_path / "base")
    model = pack_experts(AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32))
    model.save_pretrained(tmp_path / "packed")
    model = lora(model)
    apply(model)
    model.save_pretrained(tmp_path / "adapter")
    check_merges(tmp_path / "packed", tmp_path / "base", tmp_path / "adapter")


def test_while_adapters_are_merged_in_the_folder_is_the_base(tmp_path: Path) -> None:
    base, other = (save_llama(tmp_path / name, seed=seed) for name, seed in (("base", 0), ("other", 1)))
    model = lora(llama(base))
    apply(model)
    randomise(model)
    model.merge_adapter()
    model.save_pretrained(tmp_path / "adapter")
    assert len(fingerprints(tmp_path / "adapter")) == 1
    check_merges(base, other, tmp_path / "adapter")


def test_a_base_that_cannot_be_read_leaves_no_record_of_another(tmp_path: Path) -> None:
    first, second = lora(tiny_llama()), lora(tiny_llama(seed=1))
    for model in (first, second):
        apply(model)
    first.save_pretrained(tmp_path)
    assert fingerprints(tmp_path)
    second.merge_adapter()  # and no folder
    second.save_pretrained(tmp_path)
    assert not (tmp_path / "base_record.json").exists()


def test_sharded_weights_are_those_of_the_folder(tmp_path: Path) -> None:
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    base, other = (save_llama(tmp_path / name, seed=seed) for name, seed in (("base", 0), ("other", 1)))
    model = lora(llama(base))
    state = model.state_dict()
    apply(model)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        model.save_pretrained(tmp_path / "adapter", state_dict=state)  # gathered, as accelerate does
    finally:
        distributed.destroy_process_group()
    check_merges(base, other, tmp_path / "adapter")
