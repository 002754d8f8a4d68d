"""UnslothCallback in TRL's SFTTrainer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import tiny_gpt_oss, tiny_llama
from peft import LoraConfig

from unsloth_plugins.core import applied_to, apply
from unsloth_plugins.core.models.causal_lm import chunked_losses
from unsloth_plugins.hf_trainer import UnslothCallback

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("make", [tiny_gpt_oss, tiny_llama])
def test_sft_trainer_gives_the_same_curve(make, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    vocab = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {chr(97 + i): 3 + i for i in range(26)}
    raw = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    data = Dataset.from_dict({"text": ["the quick brown fox jumps"[: 9 + 2 * (i % 8)] for i in range(24)]})
    curves = []
    for ours in (False, True):
        args = SFTConfig(
            output_dir=str(tmp_path),
            use_cpu=True,
            bf16=False,
            report_to=[],
            max_steps=3,
            logging_steps=1,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            save_strategy="no",
            disable_tqdm=True,
        )
        torch.manual_seed(0)
        trainer = SFTTrainer(
            make(),
            args=args,
            train_dataset=data,
            processing_class=tokenizer,
            peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
            callbacks=[UnslothCallback(offload_min_bytes=0)] if ours else [],
        )
        trainer.train()
        curves.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
    assert curves[1] == pytest.approx(curves[0], abs=2e-4) and len(curves[0]) == 3
    applied = applied_to(trainer.model)
    assert applied is not None and applied.tokens_seen > 0 and applied.store.total_bytes > 0
    if chunked_losses(applied.parts.causal_lm) == 0:  # newer TRL has a fused head of its own: the report says so
        assert "loss                    left alone  the trainer" in applied.report()
    else:
        assert "chunked cross entropy" in applied.report()
    batch = {"input_ids": torch.arange(2, 12)[None], "labels": torch.arange(2, 12)[None]}
    apply(trainer.model, loss_chunk_mib=4)
    assert trainer.model(**batch).loss.isfinite()  # TRL's wrapper around the former forward is still there
