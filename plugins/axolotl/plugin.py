"""The plugin: edits the raw config where its defaults are in the way, applies when the model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from axolotl.integrations.base import BasePlugin
from axolotl.utils.distributed import is_main_process
from axolotl.utils.logging import get_logger
from torch import nn
from transformers import AutoConfig, AutoTokenizer, TrainerCallback

from unsloth_plugins.axolotl.args import config_of, uses_plugin
from unsloth_plugins.axolotl.conflicts import check_config, check_packed
from unsloth_plugins.core import applied_to, apply
from unsloth_plugins.core.export import check_model, merge_bar, merge_model
from unsloth_plugins.core.mxfp4 import packed_config
from unsloth_plugins.trainer_metrics import TrainerMetrics, explain_out_of_memory, report_first

LOG = get_logger("axolotl.unsloth_plugins")  # Axolotl shows only loggers below its own
_EXPERTS = ("gate_proj", "up_proj", "down_proj")
_LORA_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")


class UnslothPlugin(BasePlugin):
    """``plugins: [unsloth_plugins.axolotl.UnslothPlugin]`` is all it takes; options go under ``unsloth:``.

    Axolotl's plugin manager lives as long as the process and calls the hooks of all plugins that any config has named,
    some of them twice: everything here looks at the config it is given, and keeps nothing.
    """

    def get_input_args(self) -> str:
        """The pydantic model with the key ``unsloth:`` and the checks for conflicts."""
        return "unsloth_plugins.axolotl.args.UnslothArgs"

    def register(self, cfg: dict[str, Any]) -> None:
        """Before validation: keep Axolotl from switching on what we replace, and an MXFP4 base packed.

        Conflicts are looked for here already, ahead of Axolotl's own checks, which would send the user elsewhere.

        Raises:
            ConfigError: an option under ``unsloth:`` does not exist or has a wrong value.
            ConflictError: a line that can't go with ours, or with a packed base; it is named.
        """
        if not uses_plugin(cfg):
            return
        check_config(cfg, config_of(cfg.get("unsloth")))
        for key in _LORA_KERNELS:
            if cfg.get(key) is None:
                cfg[key] = False
        if cfg.get("gradient_checkpointing") and cfg.get("gradient_checkpointing_kwargs") is None:
            cfg["gradient_checkpointing_kwargs"] = {"use_reentrant": False}  # Axolotl's default is re-entrant
        if _is_mxfp4(cfg):
            _keep_packed(cfg)

    def post_model_load(self, cfg: Any, model: nn.Module) -> None:
        """Adapters are there, the trainer and its optimizer are not. A second time changes nothing."""
        if not uses_plugin(cfg):
            return
        apply(model, config_of(cfg.unsloth))

    def add_callbacks_pre_trainer(self, cfg: Any, model: nn.Module) -> list[TrainerCallback]:
        """The report, tokens per second, peak and host memory in the logs, and the summary.

        What would prevent a merge at the end stops here.

        Raises:
            ConfigError, UnsupportedError, ExportError: see ``unsloth_plugins.core.export.check_model``.
        """
        if not uses_plugin(cfg):
            return []
        options = cfg.unsloth or {}
        if options.get("save_merged"):
            check_model(model, options["save_merged"], dtype=options.get("merged_dtype") or "bf16")
        tokens = cfg.sequence_len * cfg.micro_batch_size if cfg.sequence_len and cfg.micro_batch_size else None
        return [TrainerMetrics(quiet=bool(options.get("quiet")), most_tokens=tokens)]

    def post_train(self, cfg: Any, model: nn.Module) -> None:
        """Write the merged model to ``save_merged``, with the tokenizer that Axolotl put into ``output_dir``.

        Axolotl calls this twice: after the last step, and after it has saved the adapter.
        """
        output = (cfg.unsloth or {}).get("save_merged") if uses_plugin(cfg) else None
        if not output or not is_main_process() or Path(output).exists():
            return
        tokenizer = AutoTokenizer.from_pretrained(cfg.output_dir)
        dtype = cfg.unsloth.get("merged_dtype") or "bf16"
        with merge_bar(quiet=bool(cfg.unsloth.get("quiet"))) as progress:
            report = merge_model(model, output, dtype=dtype, tokenizer=tokenizer, progress=progress)
        LOG.info("Merged model in %s", report.output)

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """The measurements reach Axolotl's integrations too, and out-of-memory errors say what can be changed."""
        if uses_plugin(cfg):
            ours = [each for each in trainer.callback_handler.callbacks if type(each) is TrainerMetrics]
            for again in ours[1:]:  # the hook before may have been called twice
                trainer.callback_handler.callbacks.remove(again)
            report_first(trainer)
            explain_out_of_memory(trainer)
            if (applied := applied_to(trainer.model)) is not None:
                applied.expect_label_smoothing(trainer.args.label_smoothing_factor != 0)


def _is_mxfp4(cfg: dict[str, Any]) -> bool:
    """Whether the base checkpoint has packed experts."""
    base = cfg.get("base_model_config") or cfg.get("base_model")
    if not base or cfg.get("reinit_weights") or cfg.get("cls_model_config"):
        return False
    config = AutoConfig.from_pretrained(
        base, revision=cfg.get("revision_of_model"), trust_remote_code=cfg.get("trust_remote_code") is True
    )
    stored: Any = getattr(config, "quantization_config", None)
    method = stored.get("quant_method") if isinstance(stored, dict) else getattr(stored, "quant_method", None)
    return method == "mxfp4"


def _keep_packed(cfg: dict[str, Any]) -> None:
    """Select our quantizer, and let ``lora_target_linear`` mean the experts as well.

    ``adapter: qlora`` means 4-bit base here too; the base just has its 4 bits already.
    """
    stored = cfg.get("overrides_of_model_config") or {}
    if (stored.get("quantization_config") or {}).get("quant_method") == "unsloth_mxfp4":
        return  # a config that went through here before
    check_packed(cfg)
    packed = packed_config(
        cfg.get("base_model_config") or cfg["base_model"], revision=cfg.get("revision_of_model")
    ).quantization_config
    cfg["overrides_of_model_config"] = {**stored, "quantization_config": packed}
    if cfg.get("lora_target_linear"):  # Axolotl looks for linear layers, PEFT's "all-linear" finds packed experts too
        given = cfg.get("lora_target_modules") or []
        named = [given] if isinstance(given, str) else list(given)
        cfg["lora_target_modules"] = [*named, *(name for name in _EXPERTS if name not in named)]
    if cfg.get("adapter") == "qlora" or cfg.get("load_in_4bit"):
        cfg["adapter"], cfg["load_in_4bit"] = "lora", False
        LOG.info("The base is MXFP4: experts stay packed in 4 bits instead of bitsandbytes' NF4; the rest is 16 bit.")
