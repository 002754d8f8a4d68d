"""Checkpoints hold what was trained, and resuming from them goes on bit-equal."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import batch_of, tiny_gpt_oss, tiny_llama
from fitting import EXPERTS, batches, lora, module_of, root_of, trainer_of
from peft import LoraConfig
from transformers import LlamaForCausalLM

import unsloth_plugins
import unsloth_plugins.lightning
from unsloth_plugins.core.errors import ConflictError, ModelError
from unsloth_plugins.core.mxfp4 import pack_experts
from unsloth_plugins.lightning.checkpoints import sums

pl = root_of("lightning.pytorch")
README = Path(unsloth_plugins.lightning.__file__).with_name("README.md")


def packed() -> Any:
    return lora(pack_experts(tiny_gpt_oss()), EXPERTS)


def fit(make: Any, folder: Path, steps: int, late: bool = False, **options: Any) -> tuple[Any, Any]:
    """The batch is chosen by the step: Lightning starts plain loaders anew when it resumes."""
    module = module_of(pl, make, late)
    step = module.training_step
    module.training_step = lambda batch: step(batch_of(2, 24, seed=module.global_step))
    trainer = trainer_of(pl, folder, strategy="unsloth", max_steps=steps)
    trainer.fit(module, batches(8), **options)
    return trainer, module


def state_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(state_bytes(each) for each in value.values())
    return sum(state_bytes(each) for each in value) if isinstance(value, list | tuple) else 0


@pytest.mark.parametrize("late", [False, True])
def test_case_32_adapters_on_a_packed_base(late: bool, tmp_path: Path) -> None:
    """The experts' adapters do not exist when Lightning restores: PEFT does not create them."""
    before = {n: p.clone() for n, p in packed().named_parameters() if p.dtype == torch.uint8}
    assert len(before) == 4 * 4
    _, whole = fit(packed, tmp_path, 6, late)
    trainer, _ = fit(packed, tmp_path, 3, late)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    _, rest = fit(packed, tmp_path, 6, late, ckpt_path=tmp_path / "half.ckpt")
    assert rest.losses == whole.losses[3:]
    wanted = dict(whole.named_parameters())
    trained = [name for name, p in rest.named_parameters() if p.requires_grad]
    assert len(trained) == 4 * (2 + 2) * 2 and all(torch.equal(rest.get_parameter(n), wanted[n]) for n in trained)
    after = {n.removeprefix("model."): p for n, p in rest.named_parameters() if p.dtype == torch.uint8}
    assert len(after) == len(before)
    for name, now in after.items():  # the experts moved below the wrappers of their adapters
        assert torch.equal(now, before[name.replace(".experts.base_layer.base_layer.", ".experts.")])

    stored = torch.load(tmp_path / "half.ckpt", weights_only=False)
    assert sorted(stored["state_dict"]) == sorted(trained)
    size = sum(wanted[name].nbytes for name in trained) + state_bytes(stored["optimizer_states"])
    assert (tmp_path / "half.ckpt").stat().st_size <= 1.1 * size + 40_000  # 40 kB for a pickle of some 100 names

    name = next(key for key in stored["state_dict"] if ".experts." in key)
    del stored["state_dict"][name]
    torch.save(stored, tmp_path / "broken.ckpt")
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        fit(packed, tmp_path, 6, late, ckpt_path=tmp_path / "broken.ckpt")


def test_case_17_resume_with_trained_embeddings(tmp_path: Path) -> None:
    def make() -> Any:
        return lora(tiny_llama(), modules_to_save=["embed_tokens", "lm_head"])

    _, whole = fit(make, tmp_path, 6)
    trainer, _ = fit(make, tmp_path, 3)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    trainer, rest = fit(make, tmp_path, 6, ckpt_path=tmp_path / "half.ckpt")
    assert rest.losses == whole.losses[3:]
    wanted = dict(whole.named_parameters())
    assert all(torch.equal(p, wanted[name]) for name, p in rest.named_parameters())


def test_unknown_keys_raise_and_strict_loading_can_be_switched_off(tmp_path: Path) -> None:
    trainer, _ = fit(lambda: lora(tiny_llama()), tmp_path, 1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    with pytest.raises(ModelError, match="unknown tensor"):
        fit(tiny_llama, tmp_path, 2, ckpt_path=tmp_path / "one.ckpt")
    with pytest.raises(ModelError, match="k_proj"):
        fit(lambda: lora(tiny_llama(), ["q_proj", "v_proj", "k_proj"]), tmp_path, 2, ckpt_path=tmp_path / "one.ckpt")
    module = module_of(pl, lambda: lora(tiny_llama(), ["q_proj", "v_proj", "k_proj"]))
    module.strict_loading = False
    trainer_of(pl, tmp_path, strategy="unsloth").validate(
        module, batches(1), ckpt_path=tmp_path / "one.ckpt", verbose=False
    )


def test_a_checkpoint_of_another_strategy_can_be_resumed(tmp_path: Path) -> None:
    module = module_of(pl, lambda: lora(tiny_llama()))
    trainer = trainer_of(pl, tmp_path)
    trainer.fit(module, batches())
    trainer.save_checkpoint(tmp_path / "full.ckpt")
    _, rest = fit(lambda: lora(tiny_llama()), tmp_path, 6, ckpt_path=tmp_path / "full.ckpt")
    assert len(rest.losses) == 3


def test_what_was_trained_and_then_frozen_is_saved_too(tmp_path: Path) -> None:
    trainer, module = fit(tiny_llama, tmp_path, 1)
    module.model.lm_head.requires_grad_(False)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    assert "model.lm_head.weight" in torch.load(tmp_path / "one.ckpt", weights_only=False)["state_dict"]


def test_a_trainer_used_again_saves_what_its_last_module_trained(tmp_path: Path) -> None:
    trainer, _ = fit(tiny_llama, tmp_path, 1)
    tiny_llama().save_pretrained(tmp_path / "base")
    head = module_of(pl, lambda: LlamaForCausalLM.from_pretrained(tmp_path / "base").requires_grad_(False))
    head.model.lm_head.requires_grad_(True)
    trainer.fit_loop.epoch_loop.max_steps = 2
    trainer.fit(head, batches())
    assert len(head.losses) == 1
    trainer.save_checkpoint(tmp_path / "head.ckpt")
    assert list(torch.load(tmp_path / "head.ckpt", weights_only=False)["state_dict"]) == ["model.lm_head.weight"]


def test_a_module_that_is_evaluated_in_between_keeps_what_it_trained(tmp_path: Path) -> None:
    trainer, module = fit(tiny_llama, tmp_path, 1)
    module.model.lm_head.requires_grad_(False)
    trainer.validate(module, batches(1), verbose=False)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    assert "model.lm_head.weight" in torch.load(tmp_path / "one.ckpt", weights_only=False)["state_dict"]


def test_what_an_earlier_trainer_trained_is_saved_after_it_was_frozen(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "base")
    _, module = fit(lambda: LlamaForCausalLM.from_pretrained(tmp_path / "base"), tmp_path, 1)
    module.model.model.requires_grad_(False)
    second = trainer_of(pl, tmp_path, strategy="unsloth", max_steps=1)
    second.fit(module, batches())
    second.save_checkpoint(tmp_path / "two.ckpt")
    stored = torch.load(tmp_path / "two.ckpt", weights_only=True)["state_dict"]
    assert stored.keys() == module.state_dict().keys()


@pytest.mark.parametrize("by_data", [False, True])
def test_frozen_weights_that_nothing_else_holds_are_saved_and_restored(by_data: bool, tmp_path: Path) -> None:
    """A teacher that follows its student, a random projection, an adapter that is only compared with."""
    tiny_llama().save_pretrained(tmp_path / "base")

    class Distilled(pl.LightningModule):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.model = lora(LlamaForCausalLM.from_pretrained(tmp_path / "base")).train()
            torch.manual_seed(seed)
            self.model.add_adapter("reference", LoraConfig(r=4, target_modules=["v_proj"], init_lora_weights=False))
            self.teacher = LlamaForCausalLM.from_pretrained(tmp_path / "base").requires_grad_(False)
            self.projection = torch.nn.Linear(64, 64).requires_grad_(False)

        def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            out = self.model(**batch)
            return out.loss + (out.logits - self.teacher(input_ids=batch["input_ids"]).logits).square().mean()

        def on_train_batch_end(self, *args: Any) -> None:
            weight = self.teacher.model.layers[1].mlp.up_proj.weight
            (weight.data if by_data else weight.detach()).mul_(0.5)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)

    module = Distilled(1)
    trainer = trainer_of(pl, tmp_path, strategy="unsloth", max_steps=2)
    trainer.fit(module, batches())
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    saved = torch.load(tmp_path / "two.ckpt", weights_only=True)["state_dict"]
    teachers = {name for name in saved if name.startswith("teacher.")}
    assert teachers == {"teacher.model.layers.1.mlp.up_proj.weight"}
    assert {"projection.weight", "projection.bias"} < saved.keys()
    assert not any("base_layer" in name or "norm" in name for name in saved)

    again = Distilled(2)
    assert not torch.equal(again.projection.weight, module.projection.weight)
    trainer = trainer_of(pl, tmp_path, strategy="unsloth", max_steps=2)  # it has been: nothing trains
    trainer.fit(again, batches(), ckpt_path=tmp_path / "two.ckpt")
    wanted = module.state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in again.state_dict().items())
    trainer.save_checkpoint(tmp_path / "again.ckpt")
    assert torch.load(tmp_path / "again.ckpt", weights_only=True)["state_dict"].keys() == saved.keys()


def test_a_merge_into_the_base_is_saved(tmp_path: Path) -> None:
    module = module_of(pl, lambda: lora(tiny_llama()))
    module.on_train_batch_end = lambda *_: module.model.model.model.layers[0].self_attn.q_proj.merge()
    trainer = trainer_of(pl, tmp_path, strategy="unsloth", max_steps=1)
    trainer.fit(module, batches())
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    stored = torch.load(tmp_path / "one.ckpt", weights_only=True)["state_dict"]
    (base,) = [name for name in stored if ".lora_" not in name]
    assert base.endswith("layers.0.self_attn.q_proj.base_layer.weight")


def test_averaged_weights(tmp_path: Path) -> None:
    """Lightning's callback writes a model of its own into the checkpoint and restores the other one itself."""
    averaging = pytest.importorskip("lightning.pytorch.callbacks.weight_averaging", reason="came with Lightning 2.6")
    half = tmp_path / "half.ckpt"

    def losses(steps: int, prepare: bool = True, **options: Any) -> list[float]:
        module = module_of(pl, packed)
        step = module.training_step
        module.training_step = lambda batch: step(batch_of(2, 24, seed=module.global_step))
        module.on_train_batch_end = lambda *_: module.global_step != 2 or module.trainer.save_checkpoint(half)
        if prepare:
            unsloth_plugins.apply(module.model)
        callback = averaging.EMAWeightAveraging(decay=0.5)
        trainer = trainer_of(pl, tmp_path, strategy="unsloth", max_steps=steps, callbacks=[callback])
        trainer.fit(module, batches(8), **options)
        return module.losses

    with pytest.raises(ConflictError, match=r"EMAWeightAveraging.*apply\(self.model\)"):
        losses(1, prepare=False)
    whole = losses(4)
    assert losses(4, ckpt_path=half) == whole[2:]


@pytest.mark.parametrize("run", ["fit", "validate"])
def test_another_base_is_refused(run: str, tmp_path: Path) -> None:
    trainer, _ = fit(packed, tmp_path, 1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")

    def other() -> Any:
        return lora(pack_experts(tiny_gpt_oss(seed=1)), EXPERTS)

    def go_on(module: Any) -> None:
        there = trainer_of(pl, tmp_path, strategy="unsloth", max_steps=2)
        getattr(there, run)(module, batches(2), ckpt_path=tmp_path / "one.ckpt")

    module = module_of(pl, other)
    with pytest.raises(ModelError, match=r"other numbers in model\..* and \d+ more.*base"):
        go_on(module)
    assert module.losses == []
    module = module_of(pl, other)
    module.strict_loading = False
    go_on(module)


def test_a_checkpoint_in_another_precision_goes_on(tmp_path: Path) -> None:
    """The base has other bits then, though it is the same."""
    trainer, _ = fit(lambda: lora(tiny_llama()), tmp_path, 1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    there = trainer_of(pl, tmp_path, strategy="unsloth", max_steps=2, precision="bf16-true")
    module = module_of(pl, lambda: lora(tiny_llama()))
    there.fit(module, batches(), ckpt_path=tmp_path / "one.ckpt")
    assert len(module.losses) == 1


def test_sums_of_the_base_see_one_bit(tmp_path: Path) -> None:
    module = torch.nn.ModuleDict({name: torch.nn.Linear(width, 3) for name, width in [("words", 4), ("odd", 3)]})
    module["bits"] = torch.nn.Linear(4, 3, dtype=torch.bfloat16)
    names = {name for name, _ in module.named_parameters()}
    before = sums(module, names)
    assert before.keys() == names and before["bits.weight"][:2] == ("bfloat16", "cpu")
    assert sums(module, names) == before and sums(module, {"odd.weight"}) == {"odd.weight": before["odd.weight"]}
    for name, parameter in module.named_parameters():
        at = parameter.detach().view(torch.uint8)
        at[(-1,) * at.ndim] ^= 1
        assert [n for n, total in sums(module, names).items() if total != before[n]] == [name]
        at[(-1,) * at.ndim] ^= 1


def test_a_checkpoint_alone_evaluates(tmp_path: Path) -> None:
    trainer, module = fit(packed, tmp_path, 3)
    trainer.save_checkpoint(tmp_path / "three.ckpt")
    (here,) = trainer.validate(module, batches(2), verbose=False)
    (there,) = trainer_of(pl, tmp_path, strategy="unsloth").validate(
        module_of(pl, packed), batches(2), ckpt_path=tmp_path / "three.ckpt", verbose=False
    )
    assert here == there


def test_load_from_checkpoint_by_the_words_of_the_readme(tmp_path: Path) -> None:
    """No strategy sees it: the adapters on experts have to be there when it loads."""
    sentence = r"load_from_checkpoint.*?`(strict=\w+)`.*?experts call `(\S+)` at the end of `__init__`"
    words = re.search(sentence, README.read_text(), re.S)
    assert words is not None
    strict = eval(f"dict({words[1]})")
    trainer, module = fit(packed, tmp_path, 3)
    trainer.save_checkpoint(tmp_path / "three.ckpt")

    class Without(type(module)):  # type: ignore[misc]
        pass

    class With(type(module)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            eval(words[2], {"self": self, "unsloth_plugins": unsloth_plugins})

    loaded = With.load_from_checkpoint(tmp_path / "three.ckpt", **strict)
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    assert len(trained) == 4 * (2 + 2) * 2 and any(".experts." in name for name in trained)
    assert all(torch.equal(loaded.get_parameter(name), p) for name, p in trained.items())
    (here,) = trainer.validate(module, batches(2), verbose=False)
    (there,) = trainer_of(pl, tmp_path, strategy="unsloth").validate(loaded, batches(2), verbose=False)
    assert here == there
    with pytest.warns(UserWarning, match=r"keys that are not in the model state dict.*\.experts\."):
        Without.load_from_checkpoint(tmp_path / "three.ckpt", **strict)
