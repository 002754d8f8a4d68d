"""Packed experts on a CUDA device: the decoding kernel, memory of loading, and training in bf16."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from conftest import batch_of, loss_and_grads, tiny_gpt_oss
from peft import LoraConfig, get_peft_model

from unsloth_plugins.core import apply
from unsloth_plugins.core.experts import ExpertLora
from unsloth_plugins.core.experts.grouped import experts_grouped
from unsloth_plugins.core.experts.reference import experts_loop
from unsloth_plugins.core.layers import GPT_OSS
from unsloth_plugins.core.mxfp4 import PackedWeight, decode, encode, load_mxfp4, pack_experts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 255, 257, 4000])
def test_kernel_decodes_every_byte_like_the_definition(dtype: torch.dtype, rows: int) -> None:
    draw = torch.Generator().manual_seed(rows)
    blocks = torch.randint(0, 256, (1, rows, 3, 16), dtype=torch.uint8, generator=draw)
    scales = (torch.arange(rows * 3) % 256).to(torch.uint8).view(1, rows, 3)
    truth = decode(blocks, scales, dtype)
    got = PackedWeight(blocks.cuda(), scales.cuda()).dense(dtype).transpose(-1, -2).cpu()
    whole = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(got.isnan(), truth.isnan())
    assert torch.equal(got.nan_to_num(0).view(whole), truth.nan_to_num(0).view(whole))


def test_loading_takes_the_packed_size(tmp_path: Path) -> None:
    options = dict(
        num_hidden_layers=2,
        hidden_size=1024,
        intermediate_size=2048,
        num_local_experts=32,
        vocab_size=512,
        layer_types=["sliding_attention", "full_attention"],
    )
    pack_experts(tiny_gpt_oss(**options).bfloat16().cuda()).save_pretrained(tmp_path, max_shard_size="50MB")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model = load_mxfp4(tmp_path, device_map={"": 0})
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    assert size > 200e6 and model.device.type == "cuda"
    assert torch.cuda.max_memory_allocated() - before <= 1.05 * size


@pytest.mark.parametrize("rank", [4, 32])
def test_grouped_packed_experts_with_lora_within_eagers_error(rank: int) -> None:
    """Forward and every gradient in bf16 against float64 on the decoded weights; twice the loop's own error is room."""
    torch.manual_seed(0)
    experts, hidden, size, tokens = 8, 256, 128, 700
    gate_up, down = torch.randn(experts, 2 * size, hidden) * 0.1, torch.randn(experts, hidden, size) * 0.1
    packed = [PackedWeight(*(part.cuda() for part in encode(w))) for w in (gate_up, down)]
    dense = [w.dense(torch.float32).double() for w in packed]
    shapes = [(experts, rank, hidden), (experts, rank, 2 * size), (experts, rank, size), (experts, rank, hidden)]
    leaves = [torch.randn(tokens, hidden), *(torch.randn(s) * 0.1 for s in shapes)]
    biases = [torch.randn(experts, 2 * size).cuda(), torch.randn(experts, hidden).cuda()]
    index = torch.rand(tokens, experts, device="cuda").topk(4, dim=1).indices
    index[index == 5] = 3  # one expert without tokens
    weight = torch.rand(tokens, 4, device="cuda").softmax(-1)
    dy = torch.randn(tokens, hidden, device="cuda")

    def run(kind, weights, dtype):  # type: ignore[no-untyped-def]
        x, a1, b1, a2, b2 = (leaf.to("cuda", dtype).requires_grad_() for leaf in leaves)
        out = kind(
            x,
            weights[0],
            biases[0].to(dtype),
            weights[1],
            biases[1].to(dtype),
            index,
            weight,
            activation=GPT_OSS,
            gate_up_lora=(ExpertLora(a1, b1, 0.5),),
            down_lora=(ExpertLora(a2, b2, 0.5),),
        )
        return [out, *torch.autograd.grad(out, (x, a1, b1, a2, b2), dy.to(out.dtype))]

    truth = run(experts_loop, dense, torch.float64)
    loop = run(experts_loop, packed, torch.bfloat16)
    grouped = run(experts_grouped, packed, torch.bfloat16)
    for name, want, eager, got in zip(("y", "dx", "da1", "db1", "da2", "db2"), truth, loop, grouped, strict=True):
        error, eager_error = ((each.double() - want).norm() / want.norm() for each in (got, eager))
        assert error <= 2 * eager_error + 1e-4, f"{name}: {error:.2e} against {eager_error:.2e}"


def test_lora_step_in_bf16_equals_the_cpu_in_float32() -> None:
    packed = pack_experts(tiny_gpt_oss())
    config = dict(r=8, target_modules=["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"])
    batch = batch_of(2, 65)
    truth = get_peft_model(copy.deepcopy(packed), LoraConfig(**config))
    ours = get_peft_model(packed.bfloat16().cuda(), LoraConfig(**config))
    for model in (truth, ours):
        apply(model)
    ours.load_state_dict({k: v for k, v in truth.state_dict().items() if "lora_" in k}, strict=False)
    want, _, wanted = loss_and_grads(truth, **batch)
    before = {k: v.clone() for k, v in ours.named_parameters() if v.dtype == torch.uint8}
    got, _, grads = loss_and_grads(ours, **{name: tensor.cuda() for name, tensor in batch.items()})
    assert abs(got.item() - want.item()) < 0.05
    assert grads.keys() == wanted.keys()
    total = torch.stack([g.norm() for g in wanted.values()]).norm()
    difference = torch.stack([(grads[k].float().cpu() - wanted[k]).norm() for k in wanted]).norm()
    assert difference < 0.25 * total  # single tokens may be routed to other experts in bf16
    assert all(torch.equal(v, before[k]) for k, v in ours.named_parameters() if k in before)


def test_decoding_token_by_token_gives_what_the_whole_row_gives() -> None:
    """Single tokens take the matrices of their own experts, rows of many all of them."""
    packed = pack_experts(tiny_gpt_oss(num_local_experts=16)).bfloat16().cuda()
    apply(packed)
    ids = batch_of(1, 24)["input_ids"].cuda()
    with torch.no_grad():
        whole = packed(input_ids=ids, use_cache=False).logits
        cache, steps = None, []
        for n in range(24):
            out = packed(input_ids=ids[:, n : n + 1], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            steps.append(out.logits)
    difference = (torch.cat(steps, 1).float() - whole.float()).norm() / whole.float().norm()
    assert difference < 0.1  # single tokens may be routed to other experts in bf16
