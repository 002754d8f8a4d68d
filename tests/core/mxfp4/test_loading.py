"""Packed checkpoints: loading, refusing, saving, memory."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from conftest import batch_of, loss_and_grads, tiny_gpt_oss, twin
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GptOssForCausalLM, Mxfp4Config

import unsloth_plugins
from unsloth_plugins.core.errors import ModelError, UnsupportedError
from unsloth_plugins.core.models.experts import PackedExperts
from unsloth_plugins.core.mxfp4 import decode, load_mxfp4, pack_experts, packed_config
from unsloth_plugins.core.mxfp4.quantizer import check_checkpoint, replace_experts

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_CUDA])]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A tiny gpt-oss in the published packed layout, one file."""
    pack_experts(tiny_gpt_oss()).save_pretrained(tmp_path)
    return tmp_path


def _dequantised(packed: GptOssForCausalLM) -> GptOssForCausalLM:
    """The same model with dense experts."""
    dense = tiny_gpt_oss().to(packed.dtype)
    state = {name: tensor for name, tensor in packed.state_dict().items() if not name.endswith(("_blocks", "_scales"))}
    for number, layer in enumerate(packed.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            state[f"model.layers.{number}.mlp.experts.{name}"] = layer.mlp.experts.packed(name).dense(packed.dtype)
    dense.load_state_dict(state)
    return dense


def test_published_names_and_layout(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "mxfp4"
    state = load_file(checkpoint / "model.safetensors")
    experts = {
        name.rpartition(".")[2]: (tensor.dtype, list(tensor.shape))
        for name, tensor in state.items()
        if "layers.1.mlp.experts" in name
    }
    assert experts == {
        "gate_up_proj_blocks": (torch.uint8, [4, 192, 2, 16]),
        "gate_up_proj_scales": (torch.uint8, [4, 192, 2]),
        "gate_up_proj_bias": (torch.float32, [4, 192]),
        "down_proj_blocks": (torch.uint8, [4, 64, 3, 16]),
        "down_proj_scales": (torch.uint8, [4, 64, 3]),
        "down_proj_bias": (torch.float32, [4, 64]),
    }


def test_transformers_reads_what_we_write(checkpoint: Path) -> None:
    stock = GptOssForCausalLM.from_pretrained(
        checkpoint, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.float32
    )
    ours = load_mxfp4(checkpoint)
    experts = stock.model.layers[2].mlp.experts
    for name in ("gate_up_proj", "down_proj"):
        want = getattr(experts, name)
        assert torch.equal(ours.model.layers[2].mlp.experts.packed(name).dense(want.dtype), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sharded", [False, True])
def test_bytes_come_back(tmp_path: Path, checkpoint: Path, dtype: torch.dtype, sharded: bool) -> None:
    if sharded:
        again = load_mxfp4(checkpoint)
        checkpoint = tmp_path / "sharded"
        again.save_pretrained(checkpoint, max_shard_size="100KB")
        assert len(list(checkpoint.glob("*.safetensors"))) > 2
    model = load_mxfp4(checkpoint, dtype=dtype)
    assert {p.dtype for p in model.parameters() if p.dtype != torch.uint8} <= {dtype, torch.float32}
    assert model.model.layers[0].mlp.experts.gate_up_proj_bias.dtype == dtype
    assert not model.model.layers[0].mlp.experts.gate_up_proj_blocks.requires_grad
    assert torch.isfinite(model(**batch_of(1, 9)).logits).all()
    model.save_pretrained(tmp_path / "again")
    before = {k: v for file in checkpoint.glob("*.safetensors") for k, v in load_file(file).items()}
    after = load_file(tmp_path / "again" / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor if tensor.dtype == torch.uint8 else tensor.to(after[name].dtype)), name
    assert (
        json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"]["quant_method"] == "mxfp4"
    )


def test_plain_from_pretrained_with_our_config(checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, config=packed_config(checkpoint))
    assert isinstance(model.model.layers[0].mlp.experts, PackedExperts)
    assert json.loads((checkpoint / "config.json").read_text())["quantization_config"]["quant_method"] == "mxfp4"


@pytest.mark.parametrize("device", DEVICES)
def test_case_9_stays_packed_and_equals_the_dequantised_model(checkpoint: Path, device: str) -> None:
    packed = load_mxfp4(checkpoint, dtype=torch.float32, device_map={"": device})
    dense = _dequantised(packed).to(device)
    batch = {name: tensor.to(device) for name, tensor in batch_of(2, 21).items()}
    torch.testing.assert_close(packed(**batch).logits, dense(**batch).logits, rtol=1e-4, atol=1e-4)
    before = {name: p.clone() for name, p in packed.named_parameters() if p.dtype == torch.uint8}
    assert len(before) == 16
    unsloth_plugins.apply(packed)
    _, _, grads = loss_and_grads(packed, **batch)
    _, _, wanted = loss_and_grads(dense, **batch)
    shared = grads.keys() & wanted.keys()
    assert "model.embed_tokens.weight" in shared and len(shared) == len(grads)
    for name in shared:
        torch.testing.assert_close(grads[name], wanted[name], rtol=1e-4, atol=1e-4)
    assert all(torch.equal(p, before[name]) for name, p in packed.named_parameters() if name in before)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("train", [False, True])
def test_case_36_clamped_inputs_agree_packed_and_dense(checkpoint: Path, train: bool, device: str) -> None:
    packed = load_mxfp4(checkpoint, dtype=torch.float32, device_map={"": device})
    for layer in packed.model.layers:
        with torch.no_grad():
            layer.mlp.experts.gate_up_proj_bias.copy_(torch.randn(4, 192) * 12)
    dense = _dequantised(packed).to(device)
    assert sum(int((layer.mlp.experts.gate_up_proj_bias.abs() > 7).sum()) for layer in dense.model.layers) > 100
    batch = {name: tensor.to(device) for name, tensor in batch_of(3, 11).items()}
    want = dense.train(train)(**batch, use_cache=not train).logits
    for applied in (False, True):
        if applied:
            unsloth_plugins.apply(packed)
        got = packed.train(train)(**batch, use_cache=not train).logits + 0
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_generates_like_the_dequantised_model(checkpoint: Path) -> None:
    packed = load_mxfp4(checkpoint, dtype=torch.float32)
    ids = batch_of(2, 5)["input_ids"]
    options = dict(max_new_tokens=12, do_sample=False)
    assert torch.equal(packed.generate(ids, **options), _dequantised(packed).generate(ids, **options))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("model.layers.1.mlp.experts.down_proj_scales"), "layers.1.mlp.experts.down_proj_scales"),
        (lambda s: s.update({"model.layers.9.extra": torch.zeros(1)}), "model.layers.9.extra"),
        (
            lambda s: s.update(
                {"model.layers.0.mlp.experts.down_proj_blocks": torch.zeros(4, 64, 2, 16, dtype=torch.uint8)}
            ),
            r"down_proj_blocks of shape \[4, 64, 3, 16\]; got \[4, 64, 2, 16\]",
        ),
        (
            lambda s: s.update({"model.layers.0.mlp.experts.down_proj_scales": torch.zeros(4, 64, 3)}),
            "down_proj_scales as uint8; got F32",
        ),
    ],
)
def test_case_9_a_wrong_tensor_is_named(checkpoint: Path, change, message: str) -> None:  # type: ignore[no-untyped-def]
    state = load_file(checkpoint / "model.safetensors")
    change(state)
    save_file(state, checkpoint / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=message):
        load_mxfp4(checkpoint)
    with pytest.raises(ModelError, match=message):
        AutoModelForCausalLM.from_pretrained(checkpoint, config=packed_config(checkpoint))


def test_case_9_damaged_files_are_named(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    whole = file.read_bytes()
    for content in (b"", whole[:-100], whole[:40]):
        file.write_bytes(content)
        with pytest.raises(ModelError, match="model.safetensors"):
            load_mxfp4(checkpoint)


def test_case_9_other_number_formats_and_double_tensors_are_named(checkpoint: Path) -> None:
    state = load_file(checkpoint / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    save_file(state | {name: state[name].int()}, checkpoint / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="q_proj.weight as floating point; got I32"):
        load_mxfp4(checkpoint)
    other = checkpoint / "more.safetensors"
    save_file({name: state[name]}, other)
    with pytest.raises(ModelError, match="q_proj.weight in two"):
        check_checkpoint(load_skeleton(checkpoint), [str(checkpoint / "model.safetensors"), str(other)])


def load_skeleton(checkpoint: Path) -> GptOssForCausalLM:
    """The packed model on the meta device."""
    with torch.device("meta"):
        model = GptOssForCausalLM(AutoConfig.from_pretrained(checkpoint))
        replace_experts(model)
    return model


def test_tied_embeddings_need_one_of_the_two(tmp_path: Path) -> None:
    model = pack_experts(tiny_gpt_oss(tie_word_embeddings=True))
    model.save_pretrained(tmp_path)
    assert torch.equal(load_mxfp4(tmp_path).lm_head.weight, model.lm_head.weight)
    state = load_file(tmp_path / "model.safetensors")
    state.pop("lm_head.weight", None)
    state.pop("model.embed_tokens.weight", None)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="embed_tokens.weight|lm_head.weight"):
        load_mxfp4(tmp_path)


def test_options_of_from_pretrained_are_honoured(tmp_path: Path, checkpoint: Path) -> None:
    given = load_mxfp4(checkpoint, config=AutoConfig.from_pretrained(checkpoint), torch_dtype=torch.float16)
    assert isinstance(given.model.layers[0].mlp.experts, PackedExperts)
    assert given.model.embed_tokens.weight.dtype == torch.float16
    given.save_pretrained(tmp_path / "outer" / "inner")
    assert load_mxfp4(tmp_path / "outer", subfolder="inner").dtype == torch.float16
    with pytest.raises(ModelError, match="no quantization_config"):
        load_mxfp4(checkpoint, config=tiny_gpt_oss().config)


def test_other_checkpoints_are_refused(tmp_path: Path, checkpoint: Path) -> None:
    tiny_gpt_oss().save_pretrained(tmp_path / "dense")
    with pytest.raises(ModelError, match="no quantization_config"):
        load_mxfp4(tmp_path / "dense")
    model = load_mxfp4(checkpoint)
    with pytest.raises(ModelError, match="once"):
        pack_experts(model)
    with pytest.raises(ModelError, match="multiple of 32"):
        pack_experts(tiny_gpt_oss(intermediate_size=80))
    with pytest.raises(ModelError, match="gpt-oss"):
        pack_experts(torch.nn.Linear(2, 2))
    with pytest.raises(UnsupportedError, match="grouped_mm"):
        unsloth_plugins.apply(model, experts="grouped_mm")


def test_undo_leaves_a_working_packed_model(checkpoint: Path) -> None:
    model = load_mxfp4(checkpoint, dtype=torch.float32)
    batch = batch_of(2, 9)
    before = model(**batch).logits
    unsloth_plugins.apply(model).undo()
    assert torch.equal(model(**batch).logits, before)
    assert torch.equal(twin(model)(**batch).logits, before)


def test_packing_rounds_to_the_format(checkpoint: Path) -> None:
    dense, packed = tiny_gpt_oss(), load_mxfp4(checkpoint)
    want = dense.model.layers[0].mlp.experts.down_proj
    experts = packed.model.layers[0].mlp.experts
    got = decode(experts.down_proj_blocks, experts.down_proj_scales).transpose(1, 2)
    assert 0.05 < (got - want).norm() / want.norm() < 0.2


def test_case_9_peak_memory_of_loading(tmp_path: Path, checkpoint: Path) -> None:
    """Resident memory in a process of its own, warmed up on a small model: at most 1.05 times the packed bytes."""
    options = dict(
        num_hidden_layers=2,
        hidden_size=1024,
        intermediate_size=1024,
        num_local_experts=24,
        vocab_size=512,
        layer_types=["sliding_attention", "full_attention"],
    )
    pack_experts(tiny_gpt_oss(**options).bfloat16()).save_pretrained(tmp_path / "large", max_shard_size="40MB")
    script = """
        import sys, threading, time
        import torch
        from unsloth_plugins.core.mxfp4 import load_mxfp4

        def resident():
            fields = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
            return int(fields["VmRSS"].split()[0]) * 1024

        def load(path):
            model = load_mxfp4(path)
            for parameter in model.parameters():
                parameter.view(torch.uint8).count_nonzero()  # the loader may map files: touch every page
            return model

        load(sys.argv[1])
        before, peak, done = resident(), [0], threading.Event()

        def watch():
            while not done.is_set():
                peak[0] = max(peak[0], resident())
                time.sleep(0.001)

        watcher = threading.Thread(target=watch)
        watcher.start()
        model = load(sys.argv[2])
        done.set()
        watcher.join()
        print(sum(p.numel() * p.element_size() for p in model.parameters()), max(peak[0], resident()) - before)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(checkpoint), str(tmp_path / "large")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    size, peak = map(int, done.stdout.split())
    assert 0.5 * size < peak <= 1.05 * size, f"{peak / size:.2f} times the packed bytes"
