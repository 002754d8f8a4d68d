"""The key ``unsloth:`` and conflicts, through Axolotl's own loading and validation of a config."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from axolotl_runs import PLUGIN, config, write_assets
from conftest import tiny_gpt_oss, tiny_llama
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments

from unsloth_plugins.core import UnslothConfig, applied_to
from unsloth_plugins.core.device import DeviceMemory
from unsloth_plugins.core.errors import ConflictError, UnsupportedError
from unsloth_plugins.core.models.causal_lm import chunked_losses
from unsloth_plugins.core.mxfp4 import pack_experts
from unsloth_plugins.core.planner import live


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    write_assets(folder, tiny_llama())
    return folder


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    write_assets(folder, pack_experts(tiny_gpt_oss()))
    return folder


def load(folder: Path, **options: Any) -> Any:
    from axolotl.cli.config import load_cfg

    path = folder / "config.yml"
    path.write_text(yaml.safe_dump(config(folder, **options)))
    return load_cfg(str(path))


def test_options_arrive_with_the_same_names(folder: Path) -> None:
    from unsloth_plugins.axolotl.args import config_of

    cfg = load(folder, unsloth={"loss_chunk_mib": 64, "gradient_checkpointing": True, "attention": "eager"})
    assert config_of(cfg.unsloth) == UnslothConfig(loss_chunk_mib=64, gradient_checkpointing=True, attention="eager")
    assert config_of(load(folder).unsloth) == UnslothConfig()
    assert config_of(load(folder, unsloth={}).unsloth) == UnslothConfig()


@pytest.mark.parametrize("off", [None, False, "off"])
def test_off_survives_validation(off: Any, folder: Path) -> None:
    from unsloth_plugins.axolotl.args import config_of

    cfg = load(folder, unsloth={"attention": off, "experts": off, "loss": off, "quiet": True})
    assert config_of(cfg.unsloth) == UnslothConfig(attention=None, experts=None, loss=None)
    assert cfg.unsloth.quiet is True


def test_the_schema_refuses_by_itself_too() -> None:
    from unsloth_plugins.axolotl.args import UnslothArgs

    with pytest.raises(ValueError, match="Did you mean `loss_chunk_mib`"):
        UnslothArgs.model_validate({"unsloth": {"loss_chunk_mb": 1}})
    with pytest.raises(ValueError, match="Remove `tiled_mlp:`"):
        UnslothArgs.model_validate({"plugins": [PLUGIN], "tiled_mlp": True})
    assert UnslothArgs.model_validate({"tiled_mlp": True}).unsloth is None


def test_every_option_is_in_the_schema() -> None:
    from unsloth_plugins.axolotl.args import UnslothOptions

    own = {"quiet", "save_merged", "merged_dtype"}
    assert set(UnslothOptions.model_fields) == {*UnslothConfig.__dataclass_fields__, *own}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_chunk_mb": 64}, "Did you mean `loss_chunk_mib`"),
        ({"quite": True}, "Did you mean `quiet`"),
        ({"attention": "flash"}, "`attention` to be one of 'auto'"),
        ({"loss_chunk_mib": "many"}, "`loss_chunk_mib` to be an integer"),
        ("auto", "one a line"),
        ({"merged_dtype": "bf17"}, "mxfp4"),
    ],
)
def test_wrong_options_are_errors_with_the_right_name(options: Any, message: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load(folder, unsloth=options)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("unsloht", "Did you mean `unsloth`"),
        ("Unsloth", "Did you mean `unsloth`"),
        ("unsloth_plugins", "Did you mean `unsloth`"),
        ("loss_chunk_mib", "`loss_chunk_mib:` under the key `unsloth:`"),
        ("quiet", "`quiet:` under the key `unsloth:`"),
    ],
)
def test_keys_that_axolotl_would_drop(key: str, message: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load(folder, **{key: {"quiet": True}})
    assert key not in load(folder, plugins=None, **{key: {"quiet": True}})


CONFLICTS: list[tuple[dict[str, Any], str]] = [
    ({"activation_offloading": True}, "activation_offloading"),
    ({"activation_offloading": "legacy"}, "activation_offloading"),
    ({"activation_offloading": "disk"}, "activation_offloading"),
    ({"activation_offloading": "hidden_states"}, "activation_offloading"),
    ({"layer_offloading": True}, "layer_offloading"),
    ({"selective_checkpointing": True}, "selective_checkpointing"),
    ({"gradient_checkpointing": "offload"}, "gradient_checkpointing: offload"),
    ({"gradient_checkpointing": "offload_disk"}, "gradient_checkpointing: offload_disk"),
    ({"gradient_checkpointing_kwargs": {"use_reentrant": True}}, "use_reentrant: false"),
    ({"tiled_mlp": True}, "tiled_mlp"),
    ({"lora_mlp_kernel": True}, "lora_mlp_kernel"),
    ({"lora_qkv_kernel": True}, "lora_qkv_kernel"),
    ({"lora_o_kernel": True}, "lora_o_kernel"),
    ({"lora_embedding_kernel": True}, "lora_embedding_kernel"),
    ({"use_kernels": True}, "use_kernels"),
    ({"use_scattermoe": True}, "use_scattermoe"),
    ({"use_sonicmoe": True}, "use_sonicmoe"),
    ({"expert_backend": "scattermoe"}, "expert_backend"),
    ({"expert_parallel_size": 2}, "expert_parallel_size"),
    ({"quantize_moe_experts": True}, "quantize_moe_experts"),
    ({"chunked_cross_entropy": True}, "chunked_cross_entropy"),
    ({"torch_compile": True}, "torch_compile"),
    ({"torch_compile": "auto"}, "torch_compile"),
    ({"fsdp": ["full_shard"]}, "fsdp"),
    ({"fsdp_config": {"fsdp_version": 2}}, "fsdp_config"),
    ({"deepspeed": "zero2.json"}, "deepspeed"),
    ({"context_parallel_size": 2}, "context_parallel_size"),
    ({"context_parallel_size": "2"}, "context_parallel_size"),
    ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
]


@pytest.mark.parametrize(("options", "line"), CONFLICTS, ids=[str(options) for options, _ in CONFLICTS])
def test_conflicts_name_the_line(options: dict[str, Any], line: str, folder: Path) -> None:
    with pytest.raises(ValueError) as caught:
        load(folder, **options)
    text = str(caught.value)
    assert line in text and "UnslothPlugin" in text or "use_reentrant: false" in text
    assert ("Remove `" in text) != ("Change" in text) and text.count("; got ") == 1


@pytest.mark.parametrize(
    "other", ["axolotl.integrations.liger.LigerPlugin", "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"]
)
def test_plugins_that_replace_the_same_are_refused(other: str, folder: Path) -> None:
    from unsloth_plugins.axolotl.conflicts import check_config

    with pytest.raises(ConflictError, match=f"Remove `- {other}`"):
        check_config({"plugins": [PLUGIN, other]}, UnslothConfig())


def test_defaults_of_axolotl_that_are_in_the_way_are_set(folder: Path) -> None:
    cfg = load(folder)
    assert cfg.gradient_checkpointing_kwargs == {"use_reentrant": False}
    for key in ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel"):
        assert cfg[key] is False


def test_a_config_without_the_plugin_is_left_alone(folder: Path) -> None:
    """Axolotl calls the hooks of plugins that a former config of the process named."""
    from unsloth_plugins.axolotl import UnslothPlugin

    cfg = {"base_model": str(folder / "model"), "activation_offloading": True, "plugins": ["some.Other"]}
    before, plugin = dict(cfg), UnslothPlugin()
    plugin.register(cfg)
    assert cfg == before and plugin.add_callbacks_pre_trainer(cfg, None) == []
    load(folder, plugins=None, gradient_checkpointing="offload")


class FakeMemory(DeviceMemory):
    """A device of 64 MiB."""

    def is_known(self, device: torch.device) -> bool:
        return True

    def allowed(self, device: torch.device) -> int:
        return 64 << 20


def planned_trainer(folder: Path, tokens: int = 24, **options: Any) -> Any:
    """A trainer with what the plugin brings, in the order of Axolotl."""
    from unsloth_plugins.axolotl import UnslothPlugin

    cfg, plugin = load(folder), UnslothPlugin()
    model = get_peft_model(tiny_llama().bfloat16(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    plugin.post_model_load(cfg, model)
    options |= dict(use_cpu=True, report_to=[], max_steps=1, gradient_checkpointing=True, optim="adamw_torch")
    settings = TrainingArguments(str(folder / "out"), **options)
    rows = [dict.fromkeys(("input_ids", "labels"), torch.full((tokens,), 5))] * 8
    callbacks = [each for _ in range(2) for each in plugin.add_callbacks_pre_trainer(cfg, model)]
    trainer = Trainer(model, settings, train_dataset=rows, callbacks=callbacks)
    for _ in range(2):  # hooks that fire twice are harmless
        plugin.post_trainer_create(cfg, trainer)
    return trainer


def test_the_report_says_what_a_batch_takes_and_what_cannot_fit_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(live, "DeviceMemory", FakeMemory)
    planned_trainer(folder).train()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  memory")]
    assert "256 tokens a batch take about 0.03 of 0.06 GiB" in line  # two rows of sequence_len 128
    with pytest.raises(UnsupportedError, match="tokens to fit in 0.06 GiB"):
        planned_trainer(folder, 1 << 18).train()


def test_label_smoothing_works_on_chunks_of_the_logits(folder: Path) -> None:
    trainer = planned_trainer(folder, label_smoothing_factor=0.1)
    trainer.train()
    applied = applied_to(trainer.model)
    assert "the trainer's, on chunks of the logits" in applied.report()
    assert chunked_losses(applied.parts.causal_lm) == 1


def test_out_of_memory_says_what_to_change(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, failure = planned_trainer(folder), torch.OutOfMemoryError("full")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise failure

    monkeypatch.setattr(trainer.accelerator, "backward", fail)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.train()
    (note,) = failure.__notes__
    assert caught.value is failure and "192 tokens a batch" in note and "8-bit AdamW" in note


def test_case_25_qlora_on_a_packed_base(packed: Path) -> None:
    for options in ({"adapter": "qlora"}, {"adapter": "qlora", "load_in_4bit": True}, {"adapter": "lora"}):
        cfg = load(packed, **options)
        assert cfg.adapter == "lora" and not cfg.load_in_4bit
        assert cfg.overrides_of_model_config.quantization_config.quant_method == "unsloth_mxfp4"
    with pytest.raises(ConflictError, match="Remove `load_in_8bit:`"):
        load(packed, adapter="qlora", load_in_8bit=True)
    with pytest.raises(ConflictError, match="Remove `model_quantization_config:`"):
        load(packed, model_quantization_config="Mxfp4Config")


@pytest.mark.parametrize("experts", [False, True])
def test_merging_would_drop_adapters_on_packed_experts(experts: bool, packed: Path, tmp_path: Path) -> None:
    targets = {"target_parameters": ["mlp.experts.down_proj"] if experts else None}
    (tmp_path / "adapter_config.json").write_text(json.dumps(targets))
    options = {"merge_lora": True, "output_dir": str(tmp_path), "attn_implementation": None}
    if experts:
        with pytest.raises(UnsupportedError, match="mlp.experts.down_proj"):
            load(packed, **options)
    else:
        load(packed, **options)


def test_a_misspelt_class_stops_axolotl_and_names_the_right_line(folder: Path) -> None:
    from axolotl.integrations.base import PluginManager

    import unsloth_plugins.axolotl

    with pytest.raises(AttributeError, match=r"Write `- unsloth_plugins\.axolotl\.UnslothPlugin` under `plugins:`"):
        PluginManager.get_instance().register("unsloth_plugins.axolotl.UnsloothPlugin")
    assert not hasattr(unsloth_plugins.axolotl, "anything_else")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plugins", "answer"),
    [
        (None, "the key is gone"),
        (["unsloth_plugin.axolotl.UnslothPlugin"], "the key is gone"),
        (PLUGIN, "ValueError: not enough values to unpack (expected 2, got 1)"),
        (["unsloth_plugins.axolotl"], "AttributeError: module 'unsloth_plugins' has no attribute 'axolotl'"),
    ],
)
def test_lines_that_axolotl_answers_by_itself(plugins: Any, answer: str, folder: Path) -> None:
    """As the adapter's README says; in a process where nothing of ours is loaded."""
    path = folder / "lines.yml"
    path.write_text(yaml.safe_dump(config(folder, plugins=plugins, unsloth={"quiet": True})))
    code = f"from axolotl.cli.config import load_cfg\nassert 'unsloth' not in load_cfg({str(path)!r})\n"
    code += "print('the key is gone')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    output = done.stderr if done.returncode else done.stdout
    assert output.splitlines()[-1] == answer


def test_a_failed_import_of_ours_stops_axolotl(folder: Path) -> None:
    """Axolotl swallows ImportError and would train on without the plugin."""
    path = folder / "broken.yml"
    path.write_text(yaml.safe_dump(config(folder)))
    code = (
        "import sys\nfrom axolotl.cli.config import load_cfg\n"
        "sys.modules['unsloth_plugins.core.mxfp4'] = None\n"  # the next import of it is an ImportError
        f"load_cfg({str(path)!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode != 0
    assert "unsloth_plugins.axolotl to import beside the installed axolotl" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("value", [None, "off", False])
@pytest.mark.parametrize("name", ["attention", "host_memory_gib", "save_merged"])
def test_nothing_survives_axolotls_validation_as_nothing(name: str, value: object) -> None:
    """Axolotl dumps a validated config and drops ``None`` from it."""
    from unsloth_plugins.axolotl.args import UnslothOptions, config_of

    options = UnslothOptions(**{name: value})
    dumped = {key: each for key, each in options.model_dump().items() if each is not None}
    assert "save_merged" not in dumped
    if name != "save_merged":
        assert getattr(config_of(dumped), name) is None
