"""The planner's formulas against tensors that are counted: tiny models, kernels in triton's interpreter on the CPU.

The interpreter is chosen by the environment when triton is imported, so this file runs itself in a process.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import transformers
from conftest import tiny_gpt_oss
from peft import LoraConfig, get_peft_model
from torch.profiler import ProfilerActivity, profile

import unsloth_plugins
from unsloth_plugins.core.config import UnslothConfig
from unsloth_plugins.core.experts import ExpertLora, fused
from unsloth_plugins.core.experts.gemm import GEMMS
from unsloth_plugins.core.layers import op, tiled_mlp
from unsloth_plugins.core.layers.lora_linear import LoraProjection, LoraTerm
from unsloth_plugins.core.layers.swiglu import Swiglu
from unsloth_plugins.core.models import experts as models_experts
from unsloth_plugins.core.models import layers as binding
from unsloth_plugins.core.offload.tail import holding
from unsloth_plugins.core.planner import memory
from unsloth_plugins.core.planner.memory import Setup
from unsloth_plugins.core.planner.shape import ATTENTION_LINEARS, find_shape
from unsloth_plugins.core.sink_attention import cudnn, fa4

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs in the process of test_in_the_interpreter")
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SIZES: dict[str, Any] = dict(
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=160,
    pad_token_id=0,
)
FAMILIES = {
    "Llama": {},
    "Mistral": {"sliding_window": None},
    "Qwen2": {"head_dim": 16},
    "Qwen3": {},
    "SmolLM3": {"head_dim": 16},
    "Phi3": {"head_dim": 16},
    "Gemma": {},
    "Gemma2": {"final_logit_softcapping": None, "attn_logit_softcapping": None},
    "Gemma3Text": {},
}
EXPERTS: dict[str, dict[str, Any]] = {
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True},
}
RANK = 4
TOKENS = 24


@pytest.mark.skipif(INTERPRETED, reason="is that process")
@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_in_the_interpreter(which: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", which, __file__]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and " passed" in done.stdout and "no tests ran" not in done.stdout, done.stdout[-3000:]


def build(family: str, **more: Any) -> Any:
    config = getattr(transformers, f"{family}Config")(**(SIZES | (FAMILIES | EXPERTS)[family] | more))
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float16)


def with_lora(model: Any, targets: list[str]) -> Any:
    return get_peft_model(model, LoraConfig(r=RANK, lora_alpha=RANK, target_modules=targets))


def saved_by_autograd(run: Any, leave_out: set[int]) -> int:
    """Bytes of the storages that ``run()`` saves for backward, each counted once."""
    seen: dict[int, int] = {}
    keep = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in leave_out:
            seen[storage.data_ptr()] = storage.nbytes()
            keep.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        keep.append(run())
    return sum(seen.values())


def counted_by_layer(base: Any, targets: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """What three layers save less what two save, so that nothing outside of layers counts, and what is told."""
    for module in (op, binding):
        monkeypatch.setattr(module, "why_reference", lambda device, dtype: None)
    model = with_lora(
        base, [name for name in find_shape(base.config).linears() if targets == "all" or name in ATTENTION_LINEARS]
    )
    model.train()
    unsloth_plugins.apply(model, attention="triton", layers="triton", lora="fused", loss=None)
    decoder = base.model
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    model.enable_input_require_grads()
    counted, layers = [], list(decoder.layers)
    for count in (2, 3):
        decoder.layers = torch.nn.ModuleList(layers[:count])
        decoder.config.num_hidden_layers = count
        ids = torch.randint(3, 160, (1, TOKENS), generator=torch.Generator().manual_seed(0))

        def run(ids: torch.Tensor = ids) -> torch.Tensor:
            with holding(True):
                return decoder(input_ids=ids, use_cache=False).last_hidden_state

        counted.append(saved_by_autograd(run, parameters))
    shape = find_shape(base.config)
    dtype: Any = "bf16" if shape.experts else "fp16"
    setup = Setup(dtype, RANK, targets, config=UnslothConfig(attention="triton"))
    told = memory.saved_bytes(shape, setup, TOKENS) + memory.holding_bytes(shape, setup, TOKENS)
    return counted[1] - counted[0], told


@needs_interpreter
@pytest.mark.parametrize(
    ("family", "targets"),
    [
        (family, targets)
        if (family, targets) in (("Llama", "all"), ("Qwen3", "attention"), ("Phi3", "all"))
        else pytest.param(family, targets, marks=pytest.mark.slow)
        for family in FAMILIES
        for targets in ("all", "attention")
    ],
)
def test_saved_by_a_dense_layer(family: str, targets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counted, told = counted_by_layer(build(family), targets, monkeypatch)
    assert counted / told == pytest.approx(1, abs=0.002)


@needs_interpreter
@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("Mixtral", {}),
        pytest.param("GptOss", {}, marks=pytest.mark.slow),
        pytest.param("Qwen3Moe", {}, marks=pytest.mark.slow),
        pytest.param("Qwen3Moe", {"norm_topk_prob": False}, marks=pytest.mark.slow),
    ],
)
def test_saved_by_a_layer_with_experts(family: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16: in float16 what experts projected first is float32. On a CPU the router's weights are saved too."""

    def fused_experts(*given: Any, implementation: str, decoded: Any, **options: Any) -> torch.Tensor:
        return fused.experts_fused(*given, gemm=GEMMS["triton"], **options)

    monkeypatch.setattr(models_experts, "experts", fused_experts)
    base = build(family, **more).bfloat16()
    router = base.config.num_local_experts * SIZES["hidden_size"] * memory.FULL
    counted, told = counted_by_layer(base, "all", monkeypatch)
    assert (counted - router) / told == pytest.approx(1, abs=0.002)


def most_allocated(run: Any) -> int:
    """Bytes of torch's CPU allocator at the highest moment of ``run()``, over what there was before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        kept = run()
    assert kept is not None
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@needs_interpreter
def test_backward_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoded weights, one tile and the sums of the adapters' gradients, in 16 bits."""
    tokens = 320  # three tiles: what is left of one must not be there in the next
    monkeypatch.setattr(fused, "TILE", 128)
    monkeypatch.setattr(memory, "TILE", 128)
    route = fused._route

    def after_collecting(*arguments: Any) -> Any:
        gc.collect()  # the interpreter holds what its kernels were given in cycles
        return route(*arguments)

    monkeypatch.setattr(fused, "_route", after_collecting)
    shape = find_shape(tiny_gpt_oss(hidden_size=256, intermediate_size=384).config)
    setup = Setup("bf16", 8)
    hidden, experts = shape.hidden, shape.experts
    torch.manual_seed(0)
    weights = [torch.randn(experts, i, o).half() for i, o in shape.expert_linears()]
    biases = [torch.zeros(experts, o, dtype=torch.float16) for _, o in shape.expert_linears()]
    loras = []
    for inputs, outputs in shape.expert_linears():
        a, b = torch.randn(experts, 8, inputs), torch.randn(experts, 8, outputs)
        loras.append((ExpertLora(a.requires_grad_(), b.requires_grad_(), 1.0),))
    x = torch.randn(tokens, hidden, dtype=torch.float16, requires_grad=True)
    index = torch.rand(tokens, experts).topk(shape.top_k, 1).indices
    weight = torch.rand(tokens, shape.top_k).requires_grad_()
    y = fused.experts_fused(
        x,
        weights[0],
        biases[0],
        weights[1],
        biases[1],
        index,
        weight,
        activation=Swiglu(alpha=1.702, limit=7.0, offset=1.0, interleaved=True),
        gate_up_lora=loras[0],
        down_lora=loras[1],
    )
    dy = torch.randn_like(y)
    leaves = [x, weight, loras[0][0].a_ErI, loras[0][0].b_ErO, loras[1][0].a_ErI, loras[1][0].b_ErO]
    counted = most_allocated(lambda: torch.autograd.grad(y, leaves, dy))
    told = memory._mlp_backward(shape, setup, tokens) - memory.input_bytes(shape, tokens)  # without the gradient given
    assert counted / told == pytest.approx(1, abs=0.08)  # within a tile the interpreter holds a little


@needs_interpreter
@pytest.mark.parametrize("tokens", [128, 320])
def test_backward_of_a_dense_mlp(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One tile of tokens and the sums of the adapters' gradients, in 16 bits."""
    monkeypatch.setattr(tiled_mlp, "TILE", 128)
    real = tiled_mlp.LinearPass.inner

    def after_collecting(*arguments: Any) -> Any:
        gc.collect()  # the interpreter holds what its kernels were given in cycles
        return real(*arguments)

    monkeypatch.setattr(tiled_mlp.LinearPass, "inner", after_collecting)
    sizes = SIZES | {"hidden_size": 256, "intermediate_size": 640}
    shape = find_shape(transformers.LlamaConfig(**sizes))
    setup = Setup("fp16", RANK)
    linears = shape.linears()
    torch.manual_seed(0)

    def projection(name: str) -> LoraProjection:
        inputs, outputs = linears[name]
        weight = torch.randn(outputs, inputs).half() * 0.02
        term = LoraTerm(torch.randn(RANK, inputs).requires_grad_(), torch.randn(outputs, RANK).requires_grad_(), 1.0)
        return LoraProjection(lambda dtype: weight, outputs, None, (term,))

    gate, up, down = (projection(name) for name in ("gate_proj", "up_proj", "down_proj"))
    x = torch.randn(tokens, shape.hidden, dtype=torch.float16, requires_grad=True)
    y = tiled_mlp.tiled_mlp(x, (gate, up), down, activation="silu", implementation="triton")
    dy = torch.randn_like(y)
    leaves = [x, *(part for each in (gate, up, down) for part in (each.terms[0].a_rI, each.terms[0].b_Or))]
    counted = most_allocated(lambda: torch.autograd.grad(y, leaves, dy))
    told = memory._mlp_backward(shape, setup, tokens) - memory.input_bytes(shape, tokens)  # without the gradient given
    told -= min(tokens, 128) * 3 * shape.hidden * memory.HALF  # no norm before it here, whose tokens are made again
    assert counted / told == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_backward_of_attention_by_groups_of_heads(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels' own memory is what ``WORK_BYTES`` says; with more groups than heads each head is one."""

    def backward(do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, scale: float) -> tuple[torch.Tensor, ...]:
        work = torch.empty(q.numel() * cudnn.WORK_BYTES, dtype=torch.uint8)
        grads = tuple(torch.zeros_like(x) for x in (q, k, v))
        assert work.numel()
        return grads

    forward = lambda q, k, v, scale: (torch.zeros_like(q), torch.zeros(q.shape[:3]))  # noqa: E731
    monkeypatch.setattr(cudnn, "_forward", forward)
    monkeypatch.setattr(cudnn, "_backward", backward)
    shape = find_shape(transformers.LlamaConfig(**SIZES | {"num_attention_heads": 16, "num_key_value_heads": 4}))
    setup = Setup("bf16", RANK, config=UnslothConfig(attention="cudnn"))
    tokens = 512
    monkeypatch.setattr(fa4, "GROUP_BYTES", tokens * shape.query_size * cudnn.WORK_BYTES // groups)
    q, k, v = (
        torch.zeros(1, tokens, heads, shape.head_size, dtype=torch.bfloat16).requires_grad_() for heads in (16, 4, 4)
    )
    y = cudnn.sink_attention_cudnn(q, k, v, None, scale=1.0)
    dy = torch.zeros_like(y)
    counted = most_allocated(lambda: torch.autograd.grad(y, (q, k, v), dy))
    told = memory._attention_backward(shape, setup, tokens) - memory.input_bytes(shape, tokens) - dy.nbytes
    rows = tokens * shape.heads * memory.FULL  # of all heads at once, where the groups have their own
    assert told - rows <= counted <= told
