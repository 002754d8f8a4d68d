"""Blocks of any architecture: a UNet with skip connections, Mamba, plain lists of modules, arbitrary code."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated_copies import SimulatedCopies
from torch import nn
from transformers import (
    MambaConfig,
    MambaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from unsloth_plugins.core import apply
from unsloth_plugins.core.errors import ConfigError, ConflictError
from unsloth_plugins.core.offload import HostStore, checkpoint_modules, offload_saved_tensors


def late() -> HostStore:
    copies = SimulatedCopies(eager=0.3)
    return HostStore(True, min_bytes=0, engine=lambda device: copies)


class Down(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(2, width)

    def forward(self, hidden: torch.Tensor, temb: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        hidden = hidden + nn.functional.silu(self.norm(self.conv(hidden))) * temb[:, :, None, None]
        return nn.functional.avg_pool2d(hidden, 2), (hidden,)


class Up(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2 * width, width, 3, padding=1)

    def forward(self, hidden: torch.Tensor, skips: tuple[torch.Tensor, ...], temb: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.interpolate(hidden, scale_factor=2)
        return nn.functional.silu(self.conv(torch.cat([hidden, *skips], 1))) * temb[:, :, None, None]


class UNet(nn.Module):
    """The shape of diffusers' UNet2D: keyword arguments, tuples of skips, the time embedding given to every block."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.time = nn.Linear(4, width)
        self.down_blocks = nn.ModuleList([Down(width) for _ in range(3)])
        self.up_blocks = nn.ModuleList([Up(width) for _ in range(3)])

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        temb, skips = self.time(time), []
        for block in self.down_blocks:
            x, skip = block(hidden=x, temb=temb)
            skips.append(skip)
        for block in self.up_blocks:
            x = block(x, skips=skips.pop(), temb=temb)
        return x


def unet_grads(unet: nn.Module, x: torch.Tensor, time: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    return list(torch.autograd.grad(unet(x, time).square().sum(), [x, *unet.parameters()]))


def test_a_unet_trains_with_equal_gradients_and_undo_gives_its_forwards_back() -> None:
    unet, store = UNet(), late()
    x, time = torch.randn(2, 8, 16, 16), torch.randn(2, 4)
    want = unet_grads(unet, x, time)
    done = checkpoint_modules(unet, r"(down|up)_blocks\.\d+", store)
    assert done.names[0] == "down_blocks.0" and len(done.names) == 6
    for _ in range(3):
        got = unet_grads(unet, x, time)
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    assert store.held_bytes == 0 and store.sent_bytes > 0
    kept = x.numel() * 4 * (1 + 1 / 4 + 1 / 16)  # inputs of the way down; skips are outputs, saved by the way up
    assert store.peak_bytes >= kept
    twin, sent = copy.deepcopy(unet), store.sent_bytes
    assert all(torch.equal(a, b) for a, b in zip(want, unet_grads(twin, x, time), strict=True))
    assert store.sent_bytes == sent  # the copy has a store of its own
    done.undo()
    assert not any("forward" in vars(module) for module in unet.modules())
    assert all(torch.equal(a, b) for a, b in zip(want, unet_grads(unet, x, time), strict=True))
    assert store.sent_bytes == sent


def test_blocks_without_gradient_or_in_evaluation_run_as_they_did() -> None:
    unet, store = UNet(), late()
    checkpoint_modules(unet, r"(down|up)_blocks\.\d+", store)
    x, time = torch.randn(2, 8, 16, 16), torch.randn(2, 4)
    with torch.no_grad():
        unet(x, time)
    unet.eval()(x, time)
    assert store.total_bytes == 0


def test_wrong_patterns_change_nothing() -> None:
    unet = UNet()
    with pytest.raises(ConfigError, match="down_blocks"):
        checkpoint_modules(unet, "layers")
    with pytest.raises(ConfigError, match="inside"):
        checkpoint_modules(unet, r"down_blocks.*")
    assert not any("forward" in vars(module) for module in unet.modules())
    done = checkpoint_modules(unet, r"down_blocks\.\d+")
    with pytest.raises(ConflictError, match="down_blocks.0"):
        checkpoint_modules(unet, r"down_blocks\.\d+")
    done.undo()


def mamba() -> MambaForCausalLM:
    torch.manual_seed(0)
    return MambaForCausalLM(MambaConfig(hidden_size=16, num_hidden_layers=3, vocab_size=64, state_size=4)).train()


def mamba_grads(model: MambaForCausalLM) -> list[torch.Tensor]:
    ids = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def test_mamba_trains_with_equal_gradients_by_apply_and_by_name() -> None:
    want = mamba_grads(mamba())
    by_apply = mamba()
    applied = apply(by_apply, gradient_checkpointing=True, memory_policy="offload_all", offload_min_bytes=0, loss=None)
    got = mamba_grads(by_apply)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    assert applied.store.sent_bytes >= 3 * 2 * 12 * 16 * 4 and applied.store.held_bytes == 0
    by_name, store = mamba(), late()
    checkpoint_modules(by_name, r"backbone\.layers\.\d+", store)
    assert all(torch.equal(a, b) for a, b in zip(want, mamba_grads(by_name), strict=True))
    assert store.sent_bytes >= 3 * 2 * 12 * 16 * 4 and store.held_bytes == 0


def test_saved_tensors_of_any_code_are_sent_once_and_backward_may_run_outside() -> None:
    torch.manual_seed(0)
    block, x = nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(2, 8, 16)
    results = []
    store = late()
    for ours in (False, True):
        leaf = x.clone().requires_grad_()
        if ours:
            with offload_saved_tensors(store) as used:
                out = torch.tanh(block(leaf, leaf, leaf)[0]) * leaf.exp()
                assert used is store and store.held_bytes > 0
        else:
            out = torch.tanh(block(leaf, leaf, leaf)[0]) * leaf.exp()
        results.append(torch.autograd.grad(out.sum(), [leaf, *block.parameters()]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    del out
    assert store.held_bytes == 0


def saved_bytes(run: Any) -> int:
    """What autograd keeps on the device for backward, by storage; what a store has taken is not among it."""
    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = run()
    assert kept.requires_grad
    return sum(sizes.values())


def diffusers_unet() -> tuple[Any, Callable[[], torch.Tensor]]:
    """A UNet of diffusers, and a loss of it."""
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    unet = diffusers.UNet2DConditionModel(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        cross_attention_dim=12,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    ).train()
    x, time, text = torch.randn(2, 4, 16, 16), torch.tensor([3, 7]), torch.randn(2, 5, 12)
    return unet, lambda: unet(x, time, encoder_hidden_states=text).sample.square().sum()


def test_diffusers_unet_trains_with_equal_gradients_and_keeps_less() -> None:
    unet, run = diffusers_unet()
    want, plain = torch.autograd.grad(run(), list(unet.parameters())), saved_bytes(run)
    store = late()
    done = checkpoint_modules(unet, r"(down|up)_blocks\.\d+|mid_block", store)
    assert len(done.names) == 5
    got = torch.autograd.grad(run(), list(unet.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    assert store.sent_bytes > 0 and store.held_bytes == 0
    assert saved_bytes(run) < 0.2 * plain


def diffusers_dit() -> tuple[Any, Callable[[], torch.Tensor]]:
    """A diffusion transformer of diffusers, and a loss of it."""
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    dit = diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        num_layers=3,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=10,
        norm_num_groups=4,
    ).train()
    x, time, label = torch.randn(2, 4, 8, 8), torch.tensor([1, 5]), torch.tensor([1, 2])
    return dit, lambda: dit(x, timestep=time, class_labels=label).sample.square().sum()


def vit() -> tuple[Any, Callable[[], torch.Tensor]]:
    """A vision transformer, and a loss of it."""
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32, image_size=16, patch_size=8
    )
    model, x = ViTForImageClassification(config).train(), torch.randn(2, 3, 16, 16)
    return model, lambda: model(x).logits.square().sum()


def whisper() -> tuple[Any, Callable[[], torch.Tensor]]:
    """An audio encoder with a decoder, and a loss of it."""
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=64,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    model, x, ids = WhisperForConditionalGeneration(config).train(), torch.randn(2, 8, 32), torch.arange(8).view(2, 4)
    return model, lambda: model(input_features=x, decoder_input_ids=ids, use_cache=False).logits.square().sum()


def switch_on(model: nn.Module) -> None:
    """By the model's own method, transformers' or diffusers'."""
    enable = getattr(model, "enable_gradient_checkpointing", None)
    if enable is not None:
        enable()
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]


@pytest.mark.parametrize("how", ["by apply", "by the model before", "by the model after"])
@pytest.mark.parametrize("make", [diffusers_unet, diffusers_dit, vit, whisper])
def test_apply_serves_the_checkpointing_of_other_architectures(make: Any, how: str) -> None:
    model, run = make()
    leaves, copies = [p for p in model.parameters() if p.requires_grad], SimulatedCopies(eager=0.3)

    def grads() -> tuple[torch.Tensor, ...]:
        torch.manual_seed(1)  # the DiT drops labels at random
        return torch.autograd.grad(run(), leaves, materialize_grads=True)

    def same_grads() -> bool:
        return all(map(torch.equal, want, grads()))

    want = grads()
    options: dict[str, Any] = dict(memory_policy="offload_all", offload_min_bytes=0)
    if how == "by the model before":
        switch_on(model)
        before = saved_bytes(run)
    applied = apply(model, gradient_checkpointing=True if how == "by apply" else "auto", **options)
    applied.store._engine = lambda device: copies
    if how == "by the model after":
        switch_on(model)
    assert same_grads() and same_grads()
    assert (
        applied.store.sent_bytes > 0
        and applied.store.held_bytes == 0
        and "\n  gradient checkpointing  on" in applied.report()
    )
    sent = applied.store.sent_bytes
    applied.undo()
    assert same_grads() and applied.store.sent_bytes == sent
    if how == "by the model before":
        assert saved_bytes(run) == before  # the model's own function is back


def test_a_checkpoint_function_that_was_given_to_diffusers_stays() -> None:
    unet, run = diffusers_unet()
    calls = []

    def own(module: nn.Module, *args: Any) -> Any:
        calls.append(module)
        return torch.utils.checkpoint.checkpoint(module, *args, use_reentrant=False)

    unet.enable_gradient_checkpointing(own)
    applied = apply(unet, memory_policy="offload_all", offload_min_bytes=0)
    run().backward()
    assert calls and applied.store.sent_bytes == 0 and "a checkpoint function of its own" in applied.report()


def test_mamba_keeps_less() -> None:
    ids = torch.arange(24)[None]
    model = mamba()

    def run() -> torch.Tensor:
        return model(input_ids=ids, labels=ids, use_cache=False).loss  # type: ignore[no-any-return]

    plain = saved_bytes(run)
    checkpoint_modules(model, r"backbone\.layers\.\d+", late())
    assert saved_bytes(run) < 0.2 * plain
