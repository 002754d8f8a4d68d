"""UnslothCallback in TRL's trainers, against the trainers alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_gpt_oss, tiny_llama
from peft import LoraConfig, get_peft_model

from unsloth_plugins.core import applied_to, apply
from unsloth_plugins.core.models.causal_lm import chunked_losses
from unsloth_plugins.core.mxfp4 import pack_experts
from unsloth_plugins.hf_trainer import UnslothCallback

pytestmark = pytest.mark.slow
TEXTS = ["the quick brown fox jumps"[: 9 + 2 * (i % 8)] for i in range(24)]
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
)


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {chr(97 + i): 3 + i for i in range(26)}
    vocab |= {f"<{i}>": i for i in range(29, 160)}  # generated ids have to decode
    raw = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    made.chat_template = TEMPLATE
    return made


def conversations() -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": t[:4]}, {"role": "assistant", "content": t[4:]}] for t in TEXTS]


SFT_DATA = {
    "text": {"text": TEXTS},
    "completion_only_loss": {"prompt": [t[:4] for t in TEXTS], "completion": [t[4:] for t in TEXTS]},
    "assistant_only_loss": {"messages": conversations()},
}
DATA = {
    "SFT": SFT_DATA["text"],
    "DPO": {
        "prompt": [t[:4] for t in TEXTS],
        "chosen": [t[4:] for t in TEXTS],
        "rejected": [t[:3:-1] for t in TEXTS],
    },
    "GRPO": {"prompt": [t[:4] for t in TEXTS]},
}


def run(
    kind: str,
    make: Any,
    folder: Path,
    ours: bool,
    data: dict[str, Any],
    experts: bool = False,
    **options: Any,
) -> Any:
    """A few steps of ``SFT``, ``DPO`` or ``GRPO`` with LoRA on attention, or on experts too, then put on by TRL."""
    import trl
    from datasets import Dataset

    settings: dict[str, Any] = dict(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        report_to=[],
        max_steps=3,
        logging_steps=1,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        save_strategy="no",
        disable_tqdm=True,
    )
    torch.manual_seed(0)
    targets = ["q_proj", "v_proj", *(("gate_proj", "up_proj", "down_proj") if experts else ())]
    lora = LoraConfig(r=4, target_modules=targets)
    rewards = {"reward_funcs": lambda completions, **_: [float(len(set(c))) for c in completions]}
    trainer = getattr(trl, f"{kind}Trainer")(
        make() if experts else get_peft_model(make(), lora),
        args=getattr(trl, f"{kind}Config")(**(settings | options)),
        train_dataset=Dataset.from_dict(data),
        processing_class=tokenizer(),
        callbacks=[UnslothCallback(offload_min_bytes=0)] if ours else [],
        peft_config=lora if experts else None,
        **(rewards if kind == "GRPO" else {}),
    )
    trainer.train()
    return trainer


def curve(trainer: Any, key: str = "loss") -> list[float]:
    return [log[key] for log in trainer.state.log_history if key in log]


def agree(kind: str, make: Any, folder: Path, data: dict[str, Any], keys: tuple[str, ...] = (), **options: Any) -> Any:
    """Ours, after its curves were found equal to those of the trainer alone."""
    stock, ours = (run(kind, make, folder, flag, data, **options) for flag in (False, True))
    for key in ("loss", "grad_norm", *keys):
        assert curve(ours, key) == pytest.approx(curve(stock, key), abs=2e-4, rel=1e-3) and curve(ours, key), key
    assert len(curve(ours)) == 3 and curve(ours, "grad_norm")[-1] > 0
    assert applied_to(ours.model) is not None and applied_to(stock.model) is None
    assert curve(ours, "tokens_per_s") and not curve(stock, "tokens_per_s")
    return ours


@pytest.mark.parametrize("make", [tiny_gpt_oss, tiny_llama])
def test_sft_trainer_gives_the_same_curve(make: Any, tmp_path: Path) -> None:
    trainer = agree("SFT", make, tmp_path, SFT_DATA["text"], gradient_accumulation_steps=2)
    applied = applied_to(trainer.model)
    assert applied is not None and applied.tokens_seen > 0 and applied.store.total_bytes > 0
    if chunked_losses(applied.parts.causal_lm) == 0:  # newer TRL has a fused head of its own: the report says so
        assert "loss                    left alone  the trainer" in applied.report()
    else:
        assert "chunked cross entropy" in applied.report()
    trainer.save_model(str(tmp_path / "final"))
    assert (tmp_path / "final" / "base_record.json").is_file()
    batch = {"input_ids": torch.arange(2, 12)[None], "labels": torch.arange(2, 12)[None]}
    apply(trainer.model, loss_chunk_mib=4)
    assert trainer.model(**batch).loss.isfinite()  # TRL's wrapper around the former forward is still there


@pytest.mark.parametrize("make", [tiny_gpt_oss, tiny_llama])
@pytest.mark.parametrize("option", ["completion_only_loss", "assistant_only_loss"])
def test_sft_on_answers_only(option: str, make: Any, tmp_path: Path) -> None:
    ours = agree("SFT", make, tmp_path, SFT_DATA[option], **{option: True})
    masked = next(iter(ours.get_train_dataloader()))["labels"] == -100
    assert masked.any() and not masked.all()


def test_sft_with_label_smoothing_never_computes_all_logits(tmp_path: Path) -> None:
    ours = agree("SFT", tiny_llama, tmp_path, SFT_DATA["completion_only_loss"], label_smoothing_factor=0.1)
    applied = applied_to(ours.model)
    assert applied is not None and "the trainer's, on chunks of the logits" in applied.report()
    assert chunked_losses(applied.parts.causal_lm) == 3


def test_sft_padding_free_is_sft_with_padding(tmp_path: Path) -> None:
    """gpt-oss in transformers leaks across packed documents, so the padded batch is what is right."""
    padded = run("SFT", tiny_gpt_oss, tmp_path, False, SFT_DATA["text"])
    flat = run("SFT", tiny_gpt_oss, tmp_path, True, SFT_DATA["text"], padding_free=True, max_length=None)
    assert next(iter(flat.get_train_dataloader()))["input_ids"].shape[0] == 1
    assert curve(flat) == pytest.approx(curve(padded), abs=2e-4)
    leaking = run("SFT", tiny_gpt_oss, tmp_path, False, SFT_DATA["text"], padding_free=True, max_length=None)
    assert curve(leaking) != pytest.approx(curve(padded), abs=2e-4)


def test_sft_packing(tmp_path: Path) -> None:
    ours = agree("SFT", tiny_llama, tmp_path, SFT_DATA["text"], packing=True, max_length=64)
    positions = next(iter(ours.get_train_dataloader()))["position_ids"]
    assert (positions == 0).sum() > 2  # several documents in a row


@pytest.mark.parametrize("make", [tiny_gpt_oss, tiny_llama])
def test_dpo(make: Any, tmp_path: Path) -> None:
    """The reference is the model without its adapter: forwards of both before one backward."""
    agree("DPO", make, tmp_path, DATA["DPO"], ("rewards/margins", "logps/chosen"), gradient_checkpointing=True)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["SFT", "DPO", "GRPO"])
def test_adapters_on_experts_are_trained(kind: str, packed: bool, tmp_path: Path) -> None:
    """PEFT does not make them, and TRL puts the adapter on itself: they come last, and yet before the optimizer."""

    def make() -> Any:
        return pack_experts(tiny_gpt_oss()) if packed else tiny_gpt_oss()

    options = dict(num_generations=2, max_completion_length=8) if kind == "GRPO" else {}
    trainer = run(kind, make, tmp_path, True, DATA[kind], experts=True, gradient_checkpointing=True, **options)
    b = {name: p for name, p in trainer.model.named_parameters() if ".experts." in name and "lora_B.default" in name}
    assert len(b) == 4 * 2 and all(p.any() for p in b.values()), [name for name, p in b.items() if not p.any()]


@pytest.mark.parametrize("make", [tiny_gpt_oss, tiny_llama])
def test_grpo(make: Any, tmp_path: Path) -> None:
    """Generation inside training with a KV cache, a reference, and two updates for each batch of samples."""
    options = dict(num_generations=4, per_device_train_batch_size=4, num_iterations=2, max_completion_length=12)
    keys = ("kl", "reward", "reward_std", "completions/mean_length")
    ours = agree("GRPO", make, tmp_path, DATA["GRPO"], keys, beta=0.1, gradient_checkpointing=True, **options)
    assert max(curve(ours, "reward_std")) > 0 and max(curve(ours, "kl")) > 0
