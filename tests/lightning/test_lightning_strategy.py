"""The strategies in the real Trainer, on tiny models, against Lightning's own strategy."""

from __future__ import annotations

import functools
import importlib
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import batch_of, tiny_gpt2, tiny_gpt_oss, tiny_llama
from fitting import EXPERTS, ROOTS, batches, classes, lora, module_of, root_of, trainer_of
from torch.utils.data import DataLoader, RandomSampler
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

import unsloth_plugins.lightning
from unsloth_plugins.core import UnslothConfig, applied_to
from unsloth_plugins.core.errors import ConfigError, ConflictError, ExportError, ModelError, UnsupportedError
from unsloth_plugins.core.export import merge
from unsloth_plugins.lightning.checkpoints import BASE_SUMS, sums
from unsloth_plugins.lightning.models import apply_to_module, report_of

pl = root_of("lightning.pytorch")
README = Path(unsloth_plugins.lightning.__file__).with_name("README.md")


def curve(make: Any, folder: Path, strategy: Any, **options: Any) -> list[float]:
    module = module_of(pl, make)
    trainer_of(pl, folder, strategy=strategy, **options).fit(module, batches())
    return module.losses


@pytest.mark.parametrize("make", [tiny_gpt_oss, tiny_llama, tiny_gpt2])
def test_the_name_alone_is_enough_and_gives_the_same_curve(make, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    stock, ours = (curve(make, tmp_path, strategy) for strategy in ("auto", "unsloth"))
    assert ours == pytest.approx(stock, abs=2e-5) and len(ours) == 3


PRECISIONS = [("32-true", 1e-5), ("bf16-mixed", 5e-3), ("bf16-true", 2e-2), ("64-true", 1e-6)]


@pytest.mark.parametrize(("precision", "rel"), PRECISIONS)
def test_precisions(precision: str, rel: float, tmp_path: Path) -> None:
    stock, ours = (curve(lambda: lora(tiny_llama()), tmp_path, s, precision=precision) for s in ("auto", "unsloth"))
    assert ours == pytest.approx(stock, rel=rel)


def test_mixed_float16_on_a_cpu_is_lightnings_bfloat16(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="bf16-mixed"):
        trainer = trainer_of(pl, tmp_path, strategy="unsloth", precision="16-mixed")
    assert trainer.precision == "bf16-mixed"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_mixed_float16_agrees_with_stock_and_skips_a_step_that_overflows(tmp_path: Path) -> None:
    options = dict(accelerator="gpu", precision="16-mixed")
    stock, ours = (curve(lambda: lora(tiny_llama()), tmp_path, s, **options) for s in ("auto", "unsloth"))
    assert ours == pytest.approx(stock, rel=5e-3)

    module = module_of(pl, lambda: lora(tiny_llama()))
    before = [p.detach().cpu().clone() for p in module.parameters()]
    trainer = trainer_of(pl, tmp_path, strategy="unsloth", **(options | {"max_steps": 1}))
    trainer.precision_plugin.scaler = torch.amp.GradScaler("cuda", init_scale=2.0**60)
    trainer.fit(module, batches())
    assert trainer.precision_plugin.scaler.get_scale() == 2.0**59
    assert all(torch.equal(p.detach().cpu(), old) for p, old in zip(module.parameters(), before, strict=True))


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_accumulation_and_clipping_agree_with_stock(algorithm: str, tmp_path: Path) -> None:
    limit = 0.05 if algorithm == "norm" else 0.001
    options = dict(accumulate_grad_batches=2, gradient_clip_val=limit, gradient_clip_algorithm=algorithm)
    stock, ours = (curve(lambda: lora(tiny_gpt_oss()), tmp_path, s, **options) for s in ("auto", "unsloth"))
    assert ours == pytest.approx(stock, abs=2e-5) and len(ours) == 6


def test_float16_weights_are_refused_when_the_trainer_is_built(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="bf16-mixed"):
        trainer_of(pl, tmp_path, strategy="unsloth", precision="16-true")


@pytest.mark.parametrize("root", ROOTS)
def test_case_24_each_root_gets_classes_of_its_own(root: str, tmp_path: Path) -> None:
    pl = root_of(root)
    import unsloth_plugins.lightning.registration as registration

    registration.install_finder()  # a second time
    for name in ("unsloth", "unsloth_ddp", "unsloth_fsdp"):
        trainer = trainer_of(pl, tmp_path, strategy=name)
        assert isinstance(trainer.strategy, pl.strategies.DDPStrategy)
        assert type(trainer.strategy) is getattr(classes(pl), registration.STRATEGIES[name])
    module = module_of(pl, lambda: lora(tiny_gpt_oss()))
    trainer_of(pl, tmp_path, strategy="unsloth", max_steps=2).fit(module, batches())
    assert len(module.losses) == 2
    callback, module = classes(pl).UnslothCallback(), module_of(pl, lambda: lora(tiny_gpt_oss()))
    trainer_of(pl, tmp_path, callbacks=[callback], max_steps=2).fit(module, batches())
    assert len(module.losses) == 2 and len(callback.applied) == 1


def test_options_have_the_names_of_the_config(tmp_path: Path) -> None:
    import inspect

    from unsloth_plugins.lightning import UnslothStrategy

    strategy = UnslothStrategy(UnslothConfig(loss=None), loss_chunk_mib=64, find_unused_parameters=True)
    assert strategy.config == UnslothConfig(loss=None, loss_chunk_mib=64)
    assert strategy._ddp_kwargs == {"find_unused_parameters": True}
    spelt = inspect.signature(UnslothStrategy).parameters
    assert [name for name in UnslothConfig.__dataclass_fields__ if name not in spelt] == []
    for wrong, right in (("loss_chunk_mb", "loss_chunk_mib"), ("find_unused_params", "find_unused_parameters")):
        with pytest.raises(ConfigError, match=f"Did you mean `{right}`"):
            UnslothStrategy(**{wrong: 1})


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """Lightning makes one of a single process; it must not outlive the test."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_what_sharding_refuses(tmp_path: Path) -> None:
    from unsloth_plugins.lightning.models import check_sharded_precision

    def fit(module: Any) -> None:
        trainer_of(pl, tmp_path, strategy="unsloth_fsdp").fit(module, batches())

    manual = module_of(pl, lambda: lora(tiny_llama()))
    manual.automatic_optimization = False
    with pytest.raises(UnsupportedError, match="automatic_optimization"):
        fit(manual)
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    module = module_of(pl, lambda: lora(tiny_llama()))
    module.configure_optimizers = lambda: bitsandbytes.optim.AdamW8bit(
        [p for p in module.parameters() if p.requires_grad]
    )
    with pytest.raises(UnsupportedError, match="torch.optim.AdamW"):
        fit(module)
    with pytest.raises(UnsupportedError, match="16-mixed"):
        check_sharded_precision(type("Plugin", (), {"precision": "16-mixed"})())


@pytest.mark.parametrize("strategy", ["unsloth", "unsloth_fsdp"])
def test_an_optimizer_made_before_its_parameters_is_refused(strategy: str, tmp_path: Path) -> None:
    """It would leave adapters on experts untrained, and all that is sharded."""
    module = module_of(pl, lambda: lora(tiny_gpt_oss(), EXPERTS))
    early = module.configure_optimizers()
    module.configure_optimizers = lambda: early
    with pytest.raises(ConflictError, match="configure_optimizers"):
        trainer_of(pl, tmp_path, strategy=strategy).fit(module, batches())


def test_a_trainable_copy_that_no_optimizer_has_is_let_through(tmp_path: Path) -> None:
    module = module_of(pl, lambda: lora(tiny_gpt_oss(), EXPERTS))
    module.reference = lora(tiny_gpt_oss(), EXPERTS)
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    module.configure_optimizers = lambda: sgd([p for p in module.model.parameters() if p.requires_grad])
    trainer_of(pl, tmp_path, strategy="unsloth").fit(module, batches())
    assert len(module.losses) == 3


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("name", ["UnslothStrategy", "UnslothDDPStrategy", "UnslothFSDPStrategy"])
def test_processes_made_by_multiprocessing_are_refused(root: str, name: str) -> None:
    """They would hand back neither adapters on experts nor what is sharded."""
    kind = getattr(classes(root_of(root)), name)
    for method in ("spawn", "fork", "forkserver"):
        with pytest.raises(UnsupportedError, match=f"start_method='popen'.*start_method='{method}'"):
            kind(start_method=method)
    assert kind(start_method="popen")._start_method == "popen"


@pytest.mark.parametrize("root", ROOTS)
def test_options_of_a_wrapper_that_is_not_there_are_refused(root: str) -> None:
    kinds = classes(root_of(root))
    for options in ({"find_unused_parameters": True}, {"bucket_cap_mb": 5}, {"model_averaging_period": 2}):
        kinds.UnslothDDPStrategy(**options)
        with pytest.raises(UnsupportedError, match=f"no options of DistributedDataParallel.*{next(iter(options))}="):
            kinds.UnslothFSDPStrategy(**options)
    kinds.UnslothFSDPStrategy(find_unused_parameters=False, process_group_backend="gloo")  # as LightningCLI gives them


def test_gradient_checkpointing_follows_the_model_or_the_option(tmp_path: Path) -> None:
    def checkpointed() -> Any:
        model = lora(tiny_gpt_oss())
        model.gradient_checkpointing_enable()
        return model

    losses = []
    for make, strategy in (
        (lambda: lora(tiny_gpt_oss()), classes(pl).UnslothStrategy(offload_min_bytes=0)),
        (checkpointed, classes(pl).UnslothStrategy(offload_min_bytes=0)),
        (lambda: lora(tiny_gpt_oss()), classes(pl).UnslothStrategy(offload_min_bytes=0, gradient_checkpointing=True)),
    ):
        losses.append(curve(make, tmp_path, strategy))
        (applied,) = strategy.applied
        assert (applied.store.total_bytes > 0) == (len(losses) > 1)
    assert losses[0] == losses[1] == losses[2]


def test_several_models_are_all_patched_and_frozen_ones_too(tmp_path: Path) -> None:
    module = module_of(pl, lambda: lora(tiny_llama()))
    module.reference = torch.nn.ModuleDict({"inner": tiny_gpt_oss().requires_grad_(False)})
    trainer = trainer_of(pl, tmp_path, strategy="unsloth")
    trainer.fit(module, batches())
    assert len(trainer.strategy.applied) == 2
    assert all(applied_to(model) is not None for model in (module.model, module.reference["inner"]))


def plain_module(**parts: torch.nn.Module) -> Any:
    """A LightningModule without a causal LM: its parts one after the other, up to a linear layer."""

    class Plain(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[float] = []
            for name, part in parts.items():
                self.add_module(name, part)

        def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            out = batch["input_ids"]
            for part in self.children():
                out = part(out)
                out = getattr(out, "logits", out)
            loss = out.float().square().mean()
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)

    return Plain()


def torch_parts() -> dict[str, torch.nn.Module]:
    torch.manual_seed(0)
    body = torch.nn.Sequential(torch.nn.Embedding(160, 16), torch.nn.Linear(16, 16)).requires_grad_(False)
    return {"body": body, "act": torch.nn.Tanh(), "head": torch.nn.Linear(16, 4)}


def classifier_parts() -> dict[str, torch.nn.Module]:
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=160,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(config).requires_grad_(False)
    model.score.requires_grad_(True)
    model.name_or_path = "a/base"  # as from_pretrained leaves it
    return {"model": model}


KINDS = [  # with the weights that checkpoints hold: nothing else does of parts that are made in place
    (
        torch_parts,
        ["Sequential", "Linear"],
        {"body.0.weight", "body.1.weight", "body.1.bias", "head.weight", "head.bias"},
    ),
    (classifier_parts, ["LlamaForSequenceClassification"], {"model.score.weight"}),
]


@pytest.mark.parametrize("strategy", ["unsloth", "unsloth_fsdp", "callback"])
@pytest.mark.parametrize(("parts", "taken", "held"), KINDS)
def test_models_without_a_language_head_train_as_in_stock(
    parts: Any, taken: list[str], held: set[str], strategy: str, tmp_path: Path
) -> None:
    stock, module = plain_module(**parts()), plain_module(**parts())
    trainer_of(pl, tmp_path).fit(stock, batches())
    callbacks = [classes(pl).UnslothCallback()] if strategy == "callback" else []
    trainer = trainer_of(
        pl,
        tmp_path,
        strategy="auto" if callbacks else strategy,
        callbacks=callbacks,
        use_distributed_sampler=False,
    )
    trainer.fit(module, batches())
    assert module.losses == pytest.approx(stock.losses, rel=1e-5) and len(set(stock.losses)) == 3
    applied = (callbacks or [trainer.strategy])[0].applied
    assert [type(each.model).__name__ for each in applied] == taken
    assert all("left alone" in each.report() for each in applied)
    if not callbacks:
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        stored = torch.load(tmp_path / "last.ckpt", weights_only=False)
        assert stored["state_dict"].keys() == held
        again = plain_module(**parts())
        base = {name for name, _ in again.named_parameters()} - held
        assert stored.get(BASE_SUMS, {}) == sums(again, base)  # those of the whole where it was sharded
        trainer_of(pl, tmp_path, strategy="unsloth", max_steps=4).fit(
            again, batches(), ckpt_path=tmp_path / "last.ckpt"
        )
        assert len(again.losses) == 1


def test_without_a_model_there_is_one_clear_message(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="without a submodule.*__init__ or configure_model"):
        trainer_of(pl, tmp_path, strategy="unsloth").fit(module_of(pl, torch.nn.Identity), batches())


def test_compiled_modules_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="torch.compile"):
        trainer_of(pl, tmp_path, strategy="unsloth").fit(module_of(pl, lambda: torch.compile(tiny_llama())), batches())
    with pytest.raises(ConflictError, match="torch.compile"):
        trainer_of(pl, tmp_path, strategy="unsloth").fit(torch.compile(module_of(pl, tiny_llama)), batches())


def test_metrics_reach_progress_bar_and_logger(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(tmp_path)
    trainer = trainer_of(pl, tmp_path, strategy="unsloth", logger=logger, log_every_n_steps=1)
    trainer.fit(module_of(pl, tiny_llama), batches())
    for name in ("tokens_per_s", "peak_memory_gib"):
        assert trainer.progress_bar_metrics[name] > 0
    for name in ("host_gib", "sent_gib", "exposed_copy_ms"):
        assert trainer.progress_bar_metrics[name] == 0
    header, *rows = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    assert "tokens_per_s" in header and len(rows) == 3
    assert [type(c).__name__ for c in trainer.callbacks].count("UnslothMetrics") == 0  # gone with the run
    trainer_of(pl, tmp_path, strategy="unsloth", barebones=True, logger=None, enable_checkpointing=None).fit(
        module_of(pl, tiny_llama), batches()
    )


def test_report_at_the_start_and_quiet(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for strategy, reports in (("unsloth", 1), (classes(pl).UnslothStrategy(quiet=True), 0)):
        caplog.clear()
        with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
            trainer_of(pl, tmp_path, strategy=strategy).fit(module_of(pl, tiny_llama), batches())
        lines = [r for r in caplog.records if "rank_zero" in r.name and "unsloth-plugins on Llama" in r.getMessage()]
        assert len(lines) == reports
        ends = [r for r in caplog.records if "144 tokens in" in r.getMessage() and "tokens/s" in r.getMessage()]
        assert len(ends) == reports


@pytest.mark.parametrize("way", ["strategy", "callback"])
def test_models_to_which_the_same_was_done_share_a_table(
    way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each attribute of a plain torch module counts as a model."""
    layers = {f"layer{number}": torch.nn.Linear(16, 16) for number in range(12)}
    module = plain_module(body=torch.nn.Embedding(160, 16), **layers)
    ours = {"strategy": "unsloth"} if way == "strategy" else {"callbacks": [classes(pl).UnslothCallback()]}
    with caplog.at_level(logging.INFO):
        trainer_of(pl, tmp_path, **ours).fit(module, batches())
    reports = [r.getMessage() for r in caplog.records if "rank_zero" in r.name]
    (report,) = [each for each in reports if "unsloth-plugins on" in each]
    embedding, linear, *rows = report.splitlines()
    assert "on Embedding" in embedding and "on Linear" in linear and linear.endswith("12 times")
    assert len(rows) == len({row.split()[0] for row in rows}) > 0 and all("left alone" in row for row in rows)

    pair = plain_module(**torch_parts())
    pair.add_module("model", tiny_llama())
    pair.add_module("other", lora(tiny_llama()))
    texts = [each.report() for each in apply_to_module(pair, UnslothConfig())]
    assert report_of(apply_to_module(pair, UnslothConfig())) == "\n".join(texts)  # not alike: the adapter has a row


def test_a_shuffling_sampler_stays_with_one_process(tmp_path: Path) -> None:
    trainer = trainer_of(pl, tmp_path, strategy="unsloth")
    trainer.fit(module_of(pl, tiny_llama), DataLoader([batch_of(24, seed=i) for i in range(8)], 2, shuffle=True))
    assert type(trainer.train_dataloader.sampler) is RandomSampler
    assert trainer.world_size == 1 and not torch.distributed.is_initialized()


def test_validate_test_and_predict_agree_with_stock(tmp_path: Path) -> None:
    results = []
    for strategy in ("auto", "unsloth"):
        trainer, module = trainer_of(pl, tmp_path, strategy=strategy), module_of(pl, tiny_gpt_oss)
        (metrics,) = trainer.validate(module, batches(2), verbose=False)
        (tested,) = trainer.test(module, batches(2), verbose=False)
        assert tested["test_loss"] == metrics["val_loss"]
        results.append((metrics["val_loss"], trainer.predict(module, batches(2))))
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


def test_case_15_accumulation_weighs_tokens_not_batches(tmp_path: Path) -> None:
    """By the line that the README gives: Lightning divides by the number of micro-batches."""
    line = re.search(r"`loss = (self\.model\(.*)`", README.read_text())
    assert line is not None
    generator = torch.Generator().manual_seed(0)
    rows = []
    for length in (3, 50, 7, 120):
        ids = torch.randint(2, 160, (1, 120), generator=generator)
        rows.append({"input_ids": ids, "labels": ids.where(torch.arange(120) < length, -100)})
    whole = {key: torch.cat([row[key] for row in rows]) for key in rows[0]}
    count = sum((row["labels"][:, 1:] != -100).sum() for row in rows)

    def step(module: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return eval(line[1], {"self": module, "batch": batch, "count": count})

    def sgd(module: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=1e-2)

    grads = []
    for data, accumulate in (([whole], 1), (rows, 4)):
        module = module_of(pl, lambda: lora(tiny_gpt_oss()))
        module.training_step = functools.partial(step, module)
        module.configure_optimizers = functools.partial(sgd, module)
        trainer = trainer_of(pl, tmp_path, strategy="unsloth", accumulate_grad_batches=accumulate, max_steps=1)
        trainer.fit(module, DataLoader(data, batch_size=None))
        grads.append({name: p.detach() for name, p in module.named_parameters() if p.requires_grad})
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=1e-6)


def by_cli(pl: Any, folder: Path, trainer: str) -> Any:
    """The Trainer that LightningCLI makes."""
    pytest.importorskip("jsonargparse", reason="jsonargparse, which LightningCLI needs, is not installed")
    (folder / "config.yaml").write_text(f"trainer: {{accelerator: cpu, logger: false, {trainer}}}")
    cli = importlib.import_module(f"{pl.__name__}.cli").LightningCLI
    return cli(type(module_of(pl, tiny_llama)), run=False, args=["--config", str(folder / "config.yaml")]).trainer


@pytest.mark.parametrize("root", ROOTS)
def test_lightning_cli_takes_our_options_and_those_of_ddp(root: str, tmp_path: Path) -> None:
    pl = root_of(root)
    module = classes(pl).__name__
    options = "init_args: {loss_chunk_mib: 64, attention: null, quiet: true"
    for name, unused in (("UnslothStrategy", "true"), ("UnslothFSDPStrategy", "false")):  # which has no wrapper
        further = f"find_unused_parameters: {unused}, process_group_backend: gloo, timeout: '0:05:00'}}"
        strategy = f"strategy: {{class_path: {module}.{name}, {options}, {further}}}"
        ours = by_cli(pl, tmp_path, strategy).strategy
        assert type(ours) is getattr(classes(pl), name) and ours.quiet
        assert ours.config == UnslothConfig(loss_chunk_mib=64, attention=None)
        assert ours.process_group_backend == "gloo" and ours._timeout.seconds == 300
        stock = (
            f"strategy: {{class_path: {root}.strategies.DDPStrategy, init_args: {{find_unused_parameters: {unused}}}}}"
        )
        assert ours._ddp_kwargs == by_cli(pl, tmp_path, stock).strategy._ddp_kwargs
        assert ours._ddp_kwargs["find_unused_parameters"] is (unused == "true")
    callback = f"callbacks: [{{class_path: {module}.UnslothCallback, {options}}}}}]"
    ours = [each for each in by_cli(pl, tmp_path, callback).callbacks if isinstance(each, classes(pl).UnslothCallback)]
    assert [(each.config, each.quiet) for each in ours] == [(UnslothConfig(loss_chunk_mib=64, attention=None), True)]


@pytest.mark.parametrize("name", ["UnslothStrategy", "UnslothCallback"])
def test_lightning_cli_takes_no_config_that_its_defaults_would_overrule(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = f"{{class_path: unsloth_plugins.lightning.{name}, init_args: {{config: {{loss_chunk_mib: 64}}}}}}"
    with pytest.raises(SystemExit):
        by_cli(pl, tmp_path, f"strategy: {ours}" if name == "UnslothStrategy" else f"callbacks: [{ours}]")
    assert "config" in capsys.readouterr().err


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("late", [False, True])
def test_an_adapter_saved_after_fit_knows_its_base(root: str, late: bool, tmp_path: Path) -> None:
    pl = root_of(root)
    for seed in (0, 1):
        tiny_llama(seed=seed).save_pretrained(tmp_path / str(seed))
    load = functools.partial(LlamaForCausalLM.from_pretrained, tmp_path / "0", dtype=torch.float32)
    module = module_of(pl, lambda: lora(load()), late)
    trainer_of(pl, tmp_path, strategy="unsloth").fit(module, batches())
    module.model.save_pretrained(tmp_path / "adapter")
    assert "fingerprint" in merge(tmp_path / "0", tmp_path / "adapter", tmp_path / "merged").notes[0]
    with pytest.raises(ExportError, match="fingerprint"):
        merge(tmp_path / "1", tmp_path / "adapter", tmp_path / "none")


def test_the_merged_model_is_saved_after_fit(tmp_path: Path) -> None:
    pl = root_of("lightning.pytorch")
    base = tiny_llama()
    base.save_pretrained(tmp_path / "base")
    base.config.name_or_path = str(tmp_path / "base")
    module, trainer = module_of(pl, lambda: lora(base)), trainer_of(pl, tmp_path, strategy="unsloth")
    with pytest.raises(ConfigError, match="trainer.fit"):
        trainer.strategy.save_merged(tmp_path / "out")
    trainer.fit(module, batches())
    report = trainer.strategy.save_merged(tmp_path / "out", dtype="fp32")
    assert len(report.merged) == 2 * 2
    batch = batch_of(2, 24)
    with torch.no_grad():
        again = LlamaForCausalLM.from_pretrained(tmp_path / "out").eval()(**batch).logits
        torch.testing.assert_close(again, module.model.eval()(**batch).logits + 0, rtol=1e-5, atol=1e-5)
