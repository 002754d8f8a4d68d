"""The command line as a user meets it."""

from __future__ import annotations

import errno
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_gpt_oss, tiny_llama
from merge_cases import logits, reload, save_llama, save_packed, small_tokenizer, train_llama, train_packed
from safetensors.torch import load_file, save_file
from tokenizers import processors
from typer.testing import CliRunner

from unsloth_plugins.cli import app
from unsloth_plugins.core import doctor
from unsloth_plugins.core.tokenizer.templates import CHATML


def run(*arguments: object, status: int = 0) -> Any:
    """The result of one command."""
    done = CliRunner().invoke(app, [str(each) for each in arguments])
    assert done.exit_code == status, done.output
    return done


@pytest.mark.parametrize("command", ["plan", "doctor", "merge", "export", "tokenizer", "show-mask"])
def test_help_shows_examples(command: str) -> None:
    assert f"unsloth-plugins {command} " in run(command, "--help").output.replace("│", "")
    assert command in run("--help").output


def test_merge_writes_what_the_function_writes(tmp_path: Path) -> None:
    base = save_packed(tmp_path / "base")
    model = train_packed(base, tmp_path / "adapter")
    done = run("merge", base, tmp_path / "out", "-a", tmp_path / "adapter", "--dtype", "fp32")
    assert done.stdout == f"{tmp_path / 'out'}\n" and "24 tensors merged" in done.stderr
    assert (logits(reload(tmp_path / "out")) - logits(model)).abs().max() < 1e-4
    done = run("merge", base, tmp_path / "packed", "-a", f"{tmp_path / 'adapter'}=0.5", "--dtype", "mxfp4", "--json")
    report = json.loads(done.stdout)
    assert len(report["requantised"]) == 8 and report["output"] == str(tmp_path / "packed") and not done.stderr


def test_errors_are_one_message_and_status_1(tmp_path: Path) -> None:
    base, other = save_llama(tmp_path / "base"), save_llama(tmp_path / "other", seed=1)
    train_llama(base, tmp_path / "adapter")
    done = run("merge", other, tmp_path / "out", "-a", tmp_path / "adapter", status=1)
    assert "ExportError" in done.stderr and "Traceback" not in done.output and not done.stdout
    done = run("merge", other, tmp_path / "out", "-a", tmp_path / "adapter", "--json", status=1)
    assert json.loads(done.stdout)["error"] == "ExportError"
    run("merge", base, tmp_path / "out", "-a", f"{tmp_path / 'adapter'}=much", status=2)
    run("merge", other, tmp_path / "out", "-a", tmp_path / "adapter", "--allow-other-base")


@pytest.mark.parametrize(
    ("file", "text", "named"),
    [
        ("adapter/adapter_config.json", "{", "JSON in"),
        ("adapter/adapter_config.json", '{"peft_type": "LORA"}', "lora_alpha in"),
        ("base/config.json", "[]", "config.json"),
        ("base/config.json", '{"quantization_config": "x"}', "quantization_config in"),
        ("base/config.json", '{"text_config": [3]}', "text_config in"),
        ("base/config.json", '{"tie_word_embeddings": "no"}', "tie_word_embeddings in"),
        ("base/config.json", '{"text_config": {"tie_word_embeddings": 0}}', "tie_word_embeddings in"),
        ("base/model.safetensors.index.json", "{}", "weight_map in"),
        ("base/model.safetensors.index.json", '{"weight_map": []}', "weight_map in"),
        ("base/model.safetensors.index.json", '{"weight_map": {"a": 3}}', "weight_map in"),
        ("base/model.safetensors", "\x02\0\0\0\0\0\0\0no", "JSON in"),
        ("adapter/base_record.json", "{}", "base_fingerprints in"),
        ("adapter/adapter_model.safetensors", '\x0f\0\0\0\0\0\0\0{"a.weight": 3}', "data_offsets of a.weight"),
        ("", "", "Not a directory"),
    ],
)
def test_damaged_files_and_places_are_errors_of_ours(file: str, text: str, named: str, tmp_path: Path) -> None:
    base, out = save_llama(tmp_path / "base"), tmp_path / "out"
    train_llama(base, tmp_path / "adapter")
    if file:
        (tmp_path / file).write_bytes(text.encode())
    else:
        (tmp_path / "file").touch()
        out = tmp_path / "file" / "out"
    done = run("merge", base, out, "-a", tmp_path / "adapter", "--json", status=1)
    report = json.loads(done.stdout)
    assert named in report["expected"] + report["got"] and report["remedy"] and not out.exists()


@pytest.mark.parametrize("content", [b"junk", b"", [1, 2], {"a.weight": 3}])
def test_damaged_pickles_are_errors_of_ours(content: Any, tmp_path: Path) -> None:
    base, adapter = save_llama(tmp_path / "base"), tmp_path / "adapter"
    train_llama(base, adapter)
    (adapter / "adapter_model.safetensors").unlink()
    file = adapter / "adapter_model.bin"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)
    report = json.loads(run("merge", base, tmp_path / "out", "-a", adapter, "--json", status=1).stdout)
    assert report["error"] == "ExportError" and report["expected"].startswith(f"tensors by name in {file}")


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="no /proc, where nobody can make files")
@pytest.mark.parametrize("place", ["/proc/out", "/proc/out/deeper"])
@pytest.mark.parametrize("command", ["merge", "export", "tokenizer"])
def test_a_place_that_takes_no_files_is_called_that(command: str, place: str, tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base", eos_token_id=1)
    small_tokenizer().save_pretrained(base)
    place += ".gguf" * (command == "export")
    output = ("--repair", place, "--chat-template", "{{ messages }}") if command == "tokenizer" else (place,)
    report = json.loads(run(command, base, *output, "--json", status=1).stdout)
    assert report["error"] == "ExportError" and "not writable" in report["got"] and place in report["expected"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lora_alpha", "x"),
        ("lora_alpha", None),
        ("lora_alpha", float("nan")),
        ("r", "x"),
        ("r", 0),
        ("r", True),
        ("rank_pattern", ["q_proj"]),
        ("rank_pattern", {"q_proj": 2.5}),
        ("alpha_pattern", {"q_proj": "x"}),
        ("alpha_pattern", {"(": 1}),
        ("use_rslora", "false"),
        ("fan_in_fan_out", 1),
        ("target_modules", 3),
        ("target_modules", "("),
        ("exclude_modules", {"q_proj": 1}),
        ("target_parameters", "experts.down_proj"),
        ("modules_to_save", "lm_head"),
        ("layers_to_transform", ["1"]),
        ("layers_pattern", 3),
        ("trainable_token_indices", {"embed_tokens": 3}),
        ("base_model_name_or_path", 3),
        ("base_fingerprints", 3),
        ("base_fingerprints", [3]),
        ("base_fingerprints", {"a": "b"}),
        ("quantised_when_loaded", 4),
        ("quantised_from", ["a"]),
    ],
)
def test_wrong_types_beside_an_adapter_are_errors_of_ours(name: str, value: Any, tmp_path: Path) -> None:
    base, adapter = save_llama(tmp_path / "base"), tmp_path / "adapter"
    train_llama(base, adapter)
    config = json.loads((adapter / "adapter_config.json").read_text())
    of_record = name.startswith(("base_fingerprints", "quantised_"))
    file = adapter / ("base_record.json" if of_record else "adapter_config.json")
    file.write_text(json.dumps(({"base_fingerprints": []} if of_record else config) | {name: value}))
    done = run("merge", base, tmp_path / "out", "-a", adapter, "--json", status=1)
    report = json.loads(done.stdout)
    assert report["error"] == "ExportError" and report["expected"].startswith(f"{name} in {file} to be ")
    assert report["got"] == repr(value) and "damaged" in report["remedy"] and not (tmp_path / "out").exists()


@pytest.mark.parametrize("file", ["adapter_config.json", "base_record.json"])
@pytest.mark.parametrize("text", ["[]", "null", '"x"', "3"])
def test_a_file_that_is_no_object_is_called_that(text: str, file: str, tmp_path: Path) -> None:
    base, adapter = save_llama(tmp_path / "base"), tmp_path / "adapter"
    train_llama(base, adapter)
    (adapter / file).write_text(text)
    done = run("merge", base, tmp_path / "out", "-a", adapter, status=1)
    shown = " ".join(done.stderr.split())
    assert "ExportError: expected an object in" in shown and f"got {json.loads(text)!r}." in shown and not done.stdout
    report = json.loads(run("export", base, tmp_path / "x.gguf", "-a", adapter, "--json", status=1).stdout)
    assert report["expected"] == f"an object in {adapter / file}" and not (tmp_path / "x.gguf").exists()


@pytest.mark.parametrize(
    ("file", "text"), [("tokenizer.json", "{"), ("tokenizer_config.json", "{"), ("config.json", None)]
)
@pytest.mark.parametrize("command", ["export", "tokenizer"])
def test_damaged_tokenizers_are_errors_of_ours(command: str, file: str, text: str | None, tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base")
    small_tokenizer().save_pretrained(base)
    (base / file).unlink() if text is None else (base / file).write_text(text)
    out = [tmp_path / "out.gguf"] if command == "export" else []
    report = json.loads(run(command, base, *out, "--json", status=1).stdout)
    assert report["error"] == "ExportError" and str(base) in report["expected"] + report["got"] and report["remedy"]
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_attention_heads", None),
        ("num_attention_heads", 2),
        ("num_key_value_heads", "x"),
        ("hidden_size", 64.5),
        ("head_dim", [16]),
        ("intermediate_size", True),
        ("max_position_embeddings", -1),
        ("rms_norm_eps", "x"),
        ("rope_parameters", "x"),
        ("rope_theta", {}),
    ],
)
def test_wrong_sizes_in_a_config_are_errors_of_ours(name: str, value: Any, tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base")
    small_tokenizer().save_pretrained(base)
    config = json.loads((base / "config.json").read_text())
    if name in ("rope_theta", "head_dim"):
        del config["rope_parameters"]
    (base / "config.json").write_text(json.dumps(config | {name: value}))
    report = json.loads(run("export", base, tmp_path / "m.gguf", "--json", status=1).stdout)
    assert report["error"] == "ExportError" and name in report["expected"] + report["got"] and report["remedy"]
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_a_model_without_an_embedding_is_no_gguf(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base")
    small_tokenizer().save_pretrained(base)
    weights = load_file(base / "model.safetensors")
    del weights["model.embed_tokens.weight"]
    save_file(weights, base / "model.safetensors")
    report = json.loads(run("export", base, tmp_path / "m.gguf", "--json", status=1).stdout)
    assert report["error"] == "ExportError" and "an embedding" in report["expected"]


@pytest.mark.parametrize(
    ("file", "change", "named"),
    [
        ("config.json", {"vocab_size": "x"}, "vocab_size"),
        ("config.json", None, "vocab_size in"),
        ("config.json", {"eos_token_id": [1, "x"]}, "eos_token_id"),
        ("generation_config.json", {"eos_token_id": 3.5}, "eos_token_id in the model's generation_config.json"),
        ("tokenizer_config.json", {"model_max_length": "x"}, "a tokenizer that transformers loads"),
        ("config.json", [], "config.json in"),
        ("generation_config.json", [], "generation_config.json in"),
        ("generation_config.json", "x", "generation_config.json in"),
        ("config.json", {"rms_norm_eps": "x"}, "Correct config.json"),
        ("tokenizer.json", {"model": 3}, "save its tokenizer there again"),
    ],
)
def test_damaged_configs_beside_a_tokenizer_are_errors_of_ours(
    file: str, change: Any, named: str, tmp_path: Path
) -> None:
    base = save_llama(tmp_path / "base")
    (base / "model.safetensors").unlink()
    small_tokenizer().save_pretrained(base)
    config = json.loads((base / file).read_text())
    config = {"model_type": "vit"} if change is None else config | change if isinstance(change, dict) else change
    (base / file).write_text(json.dumps(config))
    report = json.loads(run("tokenizer", base, "--json", status=1).stdout)
    assert report["error"] == "ExportError" and named in " ".join(report.values())


def test_a_bad_number_in_a_config_is_not_blamed_on_the_tokenizer(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base")
    small_tokenizer().save_pretrained(base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"rms_norm_eps": "x"}))
    for line in (("export", base, tmp_path / "m.gguf"), ("tokenizer", base)):
        report = json.loads(run(*line, "--json", status=1).stdout)
        assert "config.json" in report["expected"] and "rms_norm_eps" in report["got"]
        assert "Correct config.json" in report["remedy"] and "tokenizer" not in report["expected"] + report["remedy"]


@pytest.mark.parametrize("template", [3, {"default": 3}])
def test_a_chat_template_that_is_no_text(template: Any, tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base")
    small_tokenizer().save_pretrained(base)
    told = json.loads((base / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(json.dumps(told | {"chat_template": template}))
    for option in ([], ["--ollama"]):
        done = run("export", base, tmp_path / "m.gguf", *option, "--json", status=1)
        report = json.loads(done.stdout)
        assert report["error"] == "ExportError" and "chat_template in tokenizer_config.json" in report["expected"]
        assert [path.name for path in tmp_path.iterdir()] == ["base"]
    found = json.loads(run("tokenizer", base, "--json", status=1).stdout)["left"]
    assert [each["code"] for each in found] == ["chat-template-broken"]


@pytest.mark.parametrize("command", ["merge", "export"])
def test_only_a_merge_is_said_to_go_on(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(f"unsloth_plugins.core.export.{'merge' if command == 'merge' else 'export_gguf'}", full)
    report = json.loads(run(command, tmp_path, tmp_path / "out", "--json", status=1).stdout)
    assert "No space left" in report["got"] and report["remedy"].startswith("Check path, permissions and space.")
    assert ("goes on" in report["remedy"]) is (command == "merge")


def test_what_needs_no_base_is_refused_before_it_is_read(tmp_path: Path) -> None:
    for command, output, options, named in (
        ("merge", tmp_path / "out", ["--dtype", "bf17"], "'bf17'"),
        ("merge", tmp_path, [], "does not exist yet"),
        ("merge", tmp_path / "m.gguf", [], "m.gguf, the name of a file"),
        ("merge", tmp_path / "model.safetensors", [], "model.safetensors, the name of a file"),
        ("export", tmp_path / "m.txt", [], "ends in .gguf"),
        ("export", tmp_path, [], "does not exist yet"),
        ("export", tmp_path, ["-a", "adapter", "--adapter-only"], "does not exist yet"),
    ):
        report = json.loads(run(command, tmp_path / "gone", output, *options, "--json", status=1).stdout)
        assert named in report["expected"] + report["got"], report


def test_a_folder_that_holds_no_adapter_is_told_from_one_that_is_not_there(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base")
    model = train_llama(base, tmp_path / "adapter")
    model.add_adapter("sft", model.peft_config["default"])
    model.add_adapter("dpo", model.peft_config["default"])
    model.save_pretrained(tmp_path / "named", selected_adapters=["sft", "dpo"])
    for adapter, got, remedy in (
        ("org/adapter", "no such folder", "hf download"),
        (tmp_path / "named", "no adapter_config.json", f"{tmp_path / 'named' / 'dpo'}, {tmp_path / 'named' / 'sft'}"),
        (base, "no adapter_config.json", "save_pretrained or the trainer wrote."),
    ):
        report = json.loads(run("merge", base, tmp_path / "out", "-a", adapter, "--json", status=1).stdout)
        assert report["got"] == got and remedy in report["remedy"]
    run("merge", base, tmp_path / "out", "-a", tmp_path / "named" / "sft")


def test_progress_without_a_terminal_is_a_line_each_tenth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = save_llama(tmp_path / "base")
    train_llama(base, tmp_path / "adapter")
    assert " % of " not in run("merge", base, tmp_path / "quick", "-a", tmp_path / "adapter").stderr
    monkeypatch.setattr("unsloth_plugins.cli._SHORT_S", -1.0)
    done = run("merge", base, tmp_path / "out", "-a", tmp_path / "adapter")
    told = re.findall(r"^(\d+) % of 0\.00 GB, at ", done.stderr, re.M)
    assert 4 < len(told) < 11 and told[-1] == "100" and sorted(set(told), key=int) == told
    quiet = run("merge", base, tmp_path / "json", "-a", tmp_path / "adapter", "--json")
    assert not quiet.stderr


def test_numbers_that_are_none_are_refused(tmp_path: Path) -> None:
    for wrong in (["-a", "adapter=much"], ["--max-shard-gb", "nan"], ["--max-shard-gb", "0"]):
        assert "Usage" in run("merge", tmp_path, tmp_path / "out", *wrong, status=2).output
    assert (
        "finite" in run("merge", save_llama(tmp_path / "base"), tmp_path / "out", "-a", "adapter=nan", status=1).stderr
    )


def test_merging_nothing_is_said_and_an_adapter_twice_is_refused(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base")
    train_llama(base, tmp_path / "adapter")
    assert "nothing was merged" in run("merge", base, tmp_path / "out").stderr.replace("\n", " ")
    for again, status in ((tmp_path / "adapter", 2), (tmp_path / "base" / ".." / "adapter", 1)):
        twice = ("-a", tmp_path / "adapter", "-a", f"{again}=0.5")
        assert "twice" in run("merge", base, tmp_path / "two", *twice, status=status).output.replace("\n", " ")
    assert not (tmp_path / "two").exists()


def test_a_stopped_merge_says_how_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: Any, progress: Any, **__: Any) -> None:
        progress(1, 2, "a.weight")
        raise KeyboardInterrupt

    monkeypatch.setattr("unsloth_plugins.core.export.merge", stopped)
    done = run("merge", tmp_path, tmp_path / "out", status=130)
    assert done.stderr == "Stopped. The same command goes on where this one was.\n"


def test_an_adapter_beside_the_base_is_not_part_of_it(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base")
    train_llama(base, tmp_path / "adapter")
    for file in (tmp_path / "adapter").iterdir():
        file.rename(base / file.name)
    run("merge", base, tmp_path / "out", "-a", base)
    assert not any("lora" in name for name in load_file(tmp_path / "out" / "model.safetensors"))


def test_export_writes_a_gguf(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base")
    small_tokenizer().save_pretrained(base)
    train_llama(base, tmp_path / "adapter")
    done = run("export", base, tmp_path / "m.gguf", "-a", tmp_path / "adapter", "--quant", "Q8_0", "--json")
    assert json.loads(done.stdout)["tensors"]["blk.0.attn_q.weight"] == "q8_0"
    assert (tmp_path / "m.gguf").read_bytes()[:4] == b"GGUF"
    done = run("export", base, tmp_path / "n.gguf", "--ollama")
    assert "No Modelfile" in done.stderr and done.stdout == f"{tmp_path / 'n.gguf'}\n"
    done = run(
        "export", base, tmp_path / "lora.gguf", "-a", tmp_path / "adapter", "--adapter-only", "--quant", "F16", "--json"
    )
    assert json.loads(done.stdout)["tensors"]["blk.0.attn_q.weight.lora_a"] == "f16"
    run("export", base, tmp_path / "lora.gguf", "-a", tmp_path / "adapter", "--adapter-only", "--ollama", status=2)
    done = run("export", base, tmp_path / "part.gguf", "--max-shard-gb", "0.0001")
    assert done.stdout == f"{tmp_path / 'part-00001-of-00002.gguf'}\n"
    assert len(list(tmp_path.glob("part-*.gguf"))) == 2
    done = run("export", base, tmp_path / "k.gguf", "--quant", "q4_k_m", status=1)
    assert "llama-quantize" in done.stderr.replace("\n", " ")


def test_tokenizer_checks_and_repairs(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base", eos_token_id=1)
    broken = small_tokenizer(pad_token="</s>")
    broken.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<|reserved_0|>"]})
    broken.save_pretrained(base)
    before = sorted((path.name, path.stat().st_mtime_ns) for path in base.iterdir())
    done = run("tokenizer", base, status=1)
    assert "found  pad-is-eos" in done.stdout and "found  chat-template-missing" in done.stdout
    plan = run("tokenizer", base, "--dry-run", "--chat-template", "chatml", "--json", status=1)
    assert len(json.loads(plan.stdout)["done"]) == 2 and json.loads(plan.stdout)["left"] == []
    done = run("tokenizer", base, "--repair", tmp_path / "out", "--chat-template", "chatml", "--json")
    assert json.loads(done.stdout) == json.loads(plan.stdout)
    assert sorted((path.name, path.stat().st_mtime_ns) for path in base.iterdir()) == before
    shown = run("tokenizer", base, "--repair", tmp_path / "told", "--chat-template", "chatml")
    assert "repaired  " in shown.stdout and "Repaired" not in shown.stderr  # once
    stops = json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"]
    assert stops == [broken.convert_tokens_to_ids("<|im_end|>"), 1]
    assert "no faults found" in run("tokenizer", tmp_path / "out").stdout
    assert "--chat-template" in run("tokenizer", base, status=1).stdout
    file = tmp_path / "mine.jinja"
    file.write_text("{{ bos_token }}" + CHATML)
    run("tokenizer", base, "--repair", tmp_path / "filed", "--chat-template", file)
    assert (tmp_path / "filed" / "chat_template.jinja").read_text() == file.read_text()
    file.write_text("{% for message in messages %}\n{{ message.content }\n{% endfor %}")
    for way in (["--dry-run"], ["--repair", tmp_path / "refused"]):
        done = run("tokenizer", base, *way, "--chat-template", file, status=1)
        assert "unexpected '}' (line 2 of the template)" in " ".join(done.stderr.split())
    assert not (tmp_path / "refused").exists()
    file.write_bytes(b"\xff{{")
    run("tokenizer", base, "--dry-run", "--chat-template", file, status=2)
    run("tokenizer", base, "--chat-template", "chatml", status=2)
    run("tokenizer", base, "--add-tokens", status=2)


def test_module_runs_and_importing_the_package_needs_no_typer() -> None:
    done = subprocess.run([sys.executable, "-m", "unsloth_plugins", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "merge" in done.stdout
    code = (
        "import sys; sys.modules['typer'] = None; sys.argv = ['x']; from unsloth_plugins.__main__ import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and "unsloth-plugins[cli]" in done.stderr


def test_show_mask_prints_the_mask_and_draws_it(tmp_path: Path) -> None:
    done = run("show-mask", "--length", 4, "--window", 2, "--png", tmp_path / "mask.png")
    assert done.stdout.splitlines() == ["◆ │ ■ · · ·", "◆ │ ■ ■ · ·", "◆ │ · ■ ■ ·", "◆ │ · · ■ ■"]
    assert (tmp_path / "mask.png").read_bytes()[:4] == b"\x89PNG"
    assert "add up to 5" in run("show-mask", "--length", 4, "--documents", "2,3", status=1).stderr
    assert "commas" in run("show-mask", "--documents", "2;3", status=2).output


def test_show_mask_draws_a_picture_a_kind_of_layer_of_a_config(tmp_path: Path) -> None:
    tiny_gpt_oss(sliding_window=2).config.save_pretrained(tmp_path / "model")
    windows = ["◆ │ ■ · ·", "◆ │ ■ ■ ·", "◆ │ · ■ ■"]
    full = ["◆ │ ■ · ·", "◆ │ ■ ■ ·", "◆ │ ■ ■ ■"]
    lines = run("show-mask", tmp_path / "model", "--length", 3, "--png", tmp_path / "mask.png").stdout.splitlines()
    assert lines[0].startswith("layers 0, 2 of ") and lines[0].endswith(": a window of 2 keys, and a sink")
    assert lines[5].startswith("layers 1, 3 of ") and lines[5].endswith(": full attention, and a sink")
    assert lines[1:4] == windows and lines[4] == "" and lines[6:] == full
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["mask-2.png", "mask-full.png"]
    one = run("show-mask", tmp_path / "model", "--layer", 1, "--length", 3, "--png", tmp_path / "one.png")
    assert one.stdout.splitlines()[1:] == full and (tmp_path / "one.png").exists()
    tiny_llama().config.save_pretrained(tmp_path / "llama")
    assert run("show-mask", tmp_path / "llama", "--length", 1).stdout.splitlines()[1:] == ["■"]
    built_in = run("show-mask", "gpt-oss-20b").stdout
    assert "layers 0, 2, 4, ... 22 (12 of 24) of gpt-oss-20b: a window of 128 keys, more than the row has" in built_in
    run("show-mask", tmp_path / "model", "--layer", 4, status=2)
    run("show-mask", tmp_path / "model", "--window", 4, status=2)
    run("show-mask", tmp_path / "model", "--no-sink", status=2)
    run("show-mask", "--layer", 0, status=2)
    assert "built-in name" in run("show-mask", tmp_path / "none", status=1).stderr


def test_plan_says_what_fits(tmp_path: Path) -> None:
    done = run("plan", "gpt-oss-20b", "--gpu", "RTX 4090", "--ctx", 8192, "--png", tmp_path / "memory.png")
    assert "fits in 23.0 GiB" in done.stdout and "not measured" in done.stdout and "H200" in done.stdout
    assert (tmp_path / "memory.png").read_bytes()[:4] == b"\x89PNG"
    asked = ("plan", "mistral-7b", "--dtype", "nf4", "--vram", 24, "--ctx", 1_000_000, "--host-ram", 64)
    report = json.loads(run(*asked, "-o", "memory_policy=offload_all", "--json", status=1).stdout)
    assert report["fits"] is False and report["remedies"]
    assert report["setup"]["config"]["memory_policy"] == "offload_all"
    assert [limit["gb"] for limit in report["limits"]] == [8, 12, 16, 24, 32, 40, 48, 80, 96, 141, 192]
    fast = json.loads(run("plan", "gpt-oss-20b", "--gpu", "H200", "--ctx", 8192, "--json").stdout)
    assert {row["attention"] for row in fast["measured"]} >= {"triton", "fa4"}
    assert "under a cap of 79 GiB" in " ".join(
        run("plan", "gpt-oss-20b", "--gpu", "H200", "--ctx", 8192).stdout.split()
    )
    assert "memory_policy" in run("plan", "gpt-oss-20b", "-o", "memory_polcy=auto", status=1).stderr
    run("plan", "gpt-oss-20b", "-o", "memory_policy", status=2)


@pytest.mark.parametrize(("state", "status"), [("ok", 0), ("missing", 0), ("broken", 1)])
def test_doctor_fails_when_something_is_broken(state: Any, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: [doctor.Finding("[a] thing", state, "detail", "gain")])
    assert "[a] thing" in run("doctor", status=status).stdout
    assert json.loads(run("doctor", "--json", status=status).stdout)[0]["state"] == state


def test_cautions_about_a_healthy_tokenizer_are_no_faults(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base", eos_token_id=1)
    tokenizer = small_tokenizer()
    tokenizer.chat_template = "{{ bos_token }}" + CHATML.replace("<|im_end|>", "</s>")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    tokenizer.save_pretrained(base)
    done = run("tokenizer", base)
    assert "caution  double-bos-in-chats" in done.stdout and "no faults found" in done.stdout
