"""Small models that several rooms test on."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import copy  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402
from transformers import (  # noqa: E402
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

torch.set_num_threads(1)  # the models are tiny: threads only get into each other's way on a busy machine


def tiny_gpt_oss(seed: int = 0, **options: object) -> GptOssForCausalLM:
    """Random gpt-oss: window, full, window, full; sinks ~ N(0, 2); float32."""
    settings = dict(
        num_hidden_layers=4,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        vocab_size=160,
        layer_types=["sliding_attention", "full_attention"] * 2,
        pad_token_id=0,
        eos_token_id=1,
        use_cache=True,
    )
    torch.manual_seed(seed)
    model = GptOssForCausalLM(GptOssConfig(**(settings | options)))
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, std=2.0)
        for name in ("gate_up_proj", "down_proj"):
            torch.nn.init.normal_(getattr(layer.mlp.experts, name), std=0.3)
    return model.eval()


def tiny_llama(seed: int = 0, **options: object) -> LlamaForCausalLM:
    """Random two-layer Llama with grouped heads; float32."""
    settings = dict(
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=160,
        pad_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**(settings | options))).eval()


def tiny_gpt2(seed: int = 0) -> GPT2LMHeadModel:
    """A model that no binding knows."""
    torch.manual_seed(seed)
    config = GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=160, n_positions=64, embd_pdrop=0, attn_pdrop=0, resid_pdrop=0
    )
    return GPT2LMHeadModel(config).eval()


def tiny_gemma(seed: int = 0) -> GemmaForCausalLM:
    """A Llama-like model with tied embeddings."""
    torch.manual_seed(seed)
    config = GemmaConfig(
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=160,
        pad_token_id=0,
    )
    return GemmaForCausalLM(config).eval()


TINY = {"gpt_oss": tiny_gpt_oss, "llama": tiny_llama, "gemma": tiny_gemma, "gpt2": tiny_gpt2}


@pytest.fixture(params=list(TINY))
def tiny(request: pytest.FixtureRequest) -> PreTrainedModel:
    """Each tiny model in turn."""
    return TINY[request.param]()


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """An independent copy with equal weights."""
    return copy.deepcopy(model)


def loss_and_grads(
    model: torch.nn.Module, train: bool = True, **batch: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Loss, logits and every gradient of one step, in training mode unless told otherwise."""
    model.train(train)
    model.zero_grad(set_to_none=True)
    out = model(**batch)
    out.loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return out.loss.detach(), out.logits.detach() + 0, grads


def batch_of(*shape: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random ids with labels."""
    ids = torch.randint(2, 160, shape, generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}
