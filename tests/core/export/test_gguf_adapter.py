"""LoRA alone as GGUF, and GGUF in several files, as the ``gguf`` package reads them."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from merge_cases import ATTENTION, save_llama, save_packed, small_tokenizer, tensors, train_llama, train_packed

from unsloth_plugins.core.errors import ConfigError, ExportError, UnsupportedError
from unsloth_plugins.core.export import export_gguf, export_gguf_adapter


def _read(file: Path) -> tuple[dict[str, np.ndarray], dict[str, object]]:
    reader = gguf.GGUFReader(file)
    values = {one.name: one.data.reshape([int(n) for n in reversed(one.shape)]) for one in reader.tensors}
    return values, {name: field.contents() for name, field in reader.fields.items()}


def test_products_of_an_adapter_are_the_difference_of_two_models(tmp_path: Path) -> None:
    """Whatever the layout, alpha and rank: what llama.cpp adds is what a merge adds, for every tensor of the file."""
    llama, gpt_oss = save_llama(tmp_path / "llama"), save_packed(tmp_path / "gpt_oss")
    patterns = dict(use_rslora=True, lora_alpha=5, rank_pattern={"q_proj": 3}, alpha_pattern={"v_proj": 9})
    train_llama(llama, tmp_path / "llama-lora", target_modules=[*ATTENTION, "lm_head"], **patterns)
    train_packed(gpt_oss, tmp_path / "gpt_oss-lora", lora_alpha=7, target_modules=[*ATTENTION, "gate_proj", "up_proj"])
    for name, base, count in (("llama", llama, 9), ("gpt_oss", gpt_oss, 4 * 6)):
        small_tokenizer().save_pretrained(base)
        adapter = tmp_path / f"{name}-lora"
        report = export_gguf_adapter(base, adapter, tmp_path / f"{name}-lora.gguf", quant="f32")
        export_gguf(base, tmp_path / f"{name}.gguf", quant="f32")
        export_gguf(base, tmp_path / f"{name}-merged.gguf", adapter=adapter, quant="f32")
        lora, fields = _read(tmp_path / f"{name}-lora.gguf")
        before, after = (_read(tmp_path / f"{name}{end}.gguf")[0] for end in ("", "-merged"))
        changed = {key for key in before if not np.array_equal(before[key], after[key])}
        assert {f"{key}.lora_{part}" for key in changed for part in "ab"} == lora.keys() == report.tensors.keys()
        assert len(changed) == count
        for key in changed:
            a, b = lora[f"{key}.lora_a"], lora[f"{key}.lora_b"]
            added = fields["adapter.lora.alpha"] / a.shape[-2] * (b @ a)
            np.testing.assert_allclose(added, after[key] - before[key], rtol=1e-3, atol=1e-5, err_msg=key)
        assert fields["general.type"] == "adapter" and fields["adapter.type"] == "lora"
        assert fields["general.architecture"] == name.replace("_", "-")


def test_a_plain_adapter_keeps_its_numbers(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base")
    train_llama(base, tmp_path / "adapter", target_modules=["o_proj", "embed_tokens"])
    export_gguf_adapter(base, tmp_path / "adapter", tmp_path / "lora.gguf", quant="f32")
    lora, fields = _read(tmp_path / "lora.gguf")
    stored = {
        name.removeprefix("base_model.model.model."): one.numpy() for name, one in tensors(tmp_path / "adapter").items()
    }
    for part in "ab":
        want = stored[f"layers.1.self_attn.o_proj.lora_{part.upper()}.weight"]
        assert np.array_equal(lora[f"blk.1.attn_output.weight.lora_{part}"], want)
    assert np.array_equal(lora["token_embd.weight.lora_a"], stored["embed_tokens.lora_embedding_A"].T)
    assert np.array_equal(lora["token_embd.weight.lora_b"], stored["embed_tokens.lora_embedding_B"])
    assert fields["adapter.lora.alpha"] == 8.0 and len(lora) == 2 * 3


def test_several_adapters_become_one_of_their_ranks(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base")
    train_llama(base, tmp_path / "one", target_modules=["o_proj"])
    train_llama(base, tmp_path / "two", target_modules=["o_proj", "v_proj"], r=2, lora_alpha=3)
    weights = {str(tmp_path / "one"): 0.5, str(tmp_path / "two"): 2.0}
    export_gguf_adapter(base, weights, tmp_path / "lora.gguf", quant="f32")
    lora, fields = _read(tmp_path / "lora.gguf")
    assert lora["blk.0.attn_output.weight.lora_a"].shape == (6, 64) and lora["blk.0.attn_v.weight.lora_a"].shape == (
        2,
        64,
    )
    both = {name: tensors(tmp_path / name) for name in ("one", "two")}
    want = torch.zeros(64, 64)
    for name, scaling in (("one", 0.5 * 2), ("two", 2.0 * 1.5)):
        stem = "base_model.model.model.layers.0.self_attn.o_proj.lora_"
        want += scaling * both[name][f"{stem}B.weight"] @ both[name][f"{stem}A.weight"]
    a, b = (lora[f"blk.0.attn_output.weight.lora_{part}"] for part in "ab")
    np.testing.assert_allclose(fields["adapter.lora.alpha"] / 6 * (b @ a), want.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("tied", "options", "named"),
    [
        (False, dict(modules_to_save=["lm_head"]), "lm_head.weight resized, or trained"),
        (False, dict(trainable_token_indices=[3]), "embed_tokens.weight resized, or trained"),
        (True, dict(target_modules=["embed_tokens"]), "tied embedding"),
        (True, dict(target_modules=["lm_head"]), "tied embedding"),
    ],
)
def test_what_the_format_cannot_hold_is_refused(
    tmp_path: Path, tied: bool, options: dict[str, object], named: str
) -> None:
    base = save_llama(tmp_path / "base", tie_word_embeddings=tied)
    train_llama(base, tmp_path / "adapter", **options)
    with pytest.raises(UnsupportedError, match=named):
        export_gguf_adapter(base, tmp_path / "adapter", tmp_path / "lora.gguf")
    with pytest.raises(ConfigError, match="'q8_0'"):
        export_gguf_adapter(base, tmp_path / "adapter", tmp_path / "lora.gguf", quant="q8_0")
    with pytest.raises(ConfigError, match="got none"):
        export_gguf_adapter(base, [], tmp_path / "lora.gguf")
    assert not list(tmp_path.glob("*.gguf"))


def test_files_of_a_split_model_say_which_they_are(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base")
    small_tokenizer().save_pretrained(base)
    whole = export_gguf(base, tmp_path / "whole.gguf", quant="f32")
    assert whole.files == [whole.output] == [tmp_path / "whole.gguf"]
    size = sum(array.nbytes for array in _read(whole.output)[0].values())
    (tmp_path / "m-00002-of-00003.gguf").write_text("left by a killed run")
    report = export_gguf(base, tmp_path / "m.gguf", quant="f32", max_shard_bytes=int(size / 2.5))
    names = [f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    assert [path.name for path in report.files] == names and report.output == report.files[0]
    assert sorted(path.name for path in tmp_path.glob("m*")) == names and not list(tmp_path.glob(".m*"))
    parts = [_read(path) for path in report.files]
    for number, (values, fields) in enumerate(parts):
        assert [fields[f"split.{key}"] for key in ("no", "count", "tensors.count")] == [number, 3, len(report.tensors)]
        assert ("tokenizer.ggml.tokens" in fields) is (number == 0)
        assert sum(array.nbytes for array in values.values()) <= size / 2.5
    together = {name: array for values, _ in parts for name, array in values.items()}
    want = _read(whole.output)[0]
    assert together.keys() == want.keys() and all(np.array_equal(together[name], want[name]) for name in want)
    with pytest.raises(ExportError, match="m-00001-of-00003.gguf"):
        export_gguf(base, tmp_path / "m.gguf", quant="f32", max_shard_bytes=int(size / 2.5))
    with pytest.raises(ExportError, match="m-00001-of-00003.gguf"):  # another number of them: which belong together?
        export_gguf(base, tmp_path / "m.gguf", quant="f32", max_shard_bytes=int(size / 1.5))
    export_gguf(base, tmp_path / "m.gguf", quant="f32")  # one file beside them is told by its name
    (tmp_path / "m-00001-of-00003.gguf").unlink()
    (tmp_path / "m-1-of-3.gguf").touch()
    (tmp_path / "m.gguf").unlink()
    files = export_gguf(base, tmp_path / "m.gguf", quant="f32", max_shard_bytes=int(size / 1.5)).files
    assert [file.name for file in files] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    assert sorted(tmp_path.glob("m*.gguf")) == sorted([*files, tmp_path / "m-1-of-3.gguf"])
    with pytest.raises(ConfigError, match="positive shard size"):
        export_gguf(base, tmp_path / "n.gguf", max_shard_bytes=0)


def test_the_base_of_an_adapter_alone_is_checked(tmp_path: Path) -> None:
    base, other = (save_llama(tmp_path / name, seed=seed) for name, seed in (("base", 0), ("other", 1)))
    train_llama(base, tmp_path / "adapter")
    with pytest.raises(ExportError, match="allow_other_base"):
        export_gguf_adapter(other, tmp_path / "adapter", tmp_path / "lora.gguf")
    report = export_gguf_adapter(other, tmp_path / "adapter", tmp_path / "lora.gguf", allow_other_base=True)
    assert "another base" in report.notes[0]
