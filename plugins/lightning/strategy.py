"""What both roots' strategies have in common; ``for_lightning`` and ``for_pytorch_lightning`` give them their bases."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from unsloth_plugins.core import Applied, UnslothConfig, check_optimizers
from unsloth_plugins.core.config import check_choice
from unsloth_plugins.core.errors import ConfigError, ConflictError, ModelError, UnsupportedError
from unsloth_plugins.core.export import MergeReport, check_whole, merge_bar, merge_model
from unsloth_plugins.core.models import recognise
from unsloth_plugins.core.models.adapters import add_missing_adapters
from unsloth_plugins.lightning.callback import MetricsMixin, expect_memory
from unsloth_plugins.lightning.checkpoints import BASE_SUMS, ModuleWeights, Sum, reloadable
from unsloth_plugins.lightning.models import (
    apply_to_module,
    check_averaging,
    check_precision,
    check_sharded_precision,
    models_of,
    report_of,
)
from unsloth_plugins.lightning.options import check_no_wrapper, check_start_method, split
from unsloth_plugins.lightning.sharding import shard, sharded_state, whole

_NOT_BROADCAST = "_ddp_params_and_buffers_to_ignore"  # torch's name
_MAKE_IT = "Make the optimizer in configure_optimizers, from the parameters as they are there."
_Base: Any = object  # each root's DDPStrategy comes in beside it


class StrategyMixin(_Base):
    """Everything that ``UnslothStrategy`` does on top of Lightning's ``DDPStrategy``.

    With one process there is no process group, no wrapper and no launcher: it is a single-device strategy. It derives
    from DDP because Lightning makes the strategy before it knows the number of devices.
    """

    alone_without_ddp = True
    has_wrapper = True
    ddp_class: type
    metrics_class: type[MetricsMixin]
    _info: Callable[[str], None]

    def __init__(self, config: UnslothConfig | None = None, *, quiet: bool = False, **options: Any) -> None:
        check_choice("quiet", quiet)
        self.config, others = split(config, options, self.ddp_class)
        check_start_method(others)
        if not self.has_wrapper:
            check_no_wrapper(others)
        super().__init__(**others)
        self.quiet = quiet
        self.applied: tuple[Applied, ...] = ()
        self._left_out: dict[str, Sum] = {}  # of the checkpoint in the making
        self._trainer: Any = None
        self._metrics: MetricsMixin | None = None

    # --- one process or several

    @property
    def _alone(self) -> bool:
        return self.alone_without_ddp and self.num_processes * self.num_nodes == 1

    def _configure_launcher(self) -> None:
        check_precision(self.precision_plugin)
        if not self._alone:
            super()._configure_launcher()

    def setup_distributed(self) -> None:
        """A process group, if there is somebody to talk to."""
        if self._alone:
            self.set_world_ranks()
        else:
            super().setup_distributed()

    def _setup_model(self, model: Any) -> Any:
        return model if self._alone else super()._setup_model(model)

    # --- lifecycle

    def setup(self, trainer: Any) -> None:
        """Lightning's setup, in the middle of which ``model_to_device`` applies; then the report and the metrics."""
        self._trainer = trainer
        if self._alone:
            # Lightning takes every child of DDPStrategy for distributed, and would replace a shuffling sampler.
            trainer._accelerator_connector.use_distributed_sampler = False
            super(self.ddp_class, self).setup(trainer)  # type: ignore[arg-type]  # Strategy's: no wrapper
        else:
            super().setup(trainer)
        expect_memory(self.applied, trainer)
        if not self.quiet:
            self._info(report_of(self.applied))
        weights = ModuleWeights.of(self.lightning_module)
        if trainer.state.fn != "fit":
            weights.compare(self.lightning_module)
        else:
            weights.begin(self.lightning_module)
            self._metrics = self.metrics_class()
            self._metrics.applied, self._metrics.quiet = self.applied, self.quiet
            trainer.callbacks.insert(0, self._metrics)  # ahead of the progress bar, which shows what is logged

    def model_to_device(self) -> None:
        """Apply to the models in their final dtype and place, before DDP wraps them and the optimizers are made."""
        super().model_to_device()
        assert self.lightning_module is not None
        if self._trainer is not None:
            check_averaging(self._trainer.callbacks, self.lightning_module)
        self.applied = apply_to_module(self.lightning_module, self.config)

    def setup_optimizers(self, trainer: Any) -> None:
        """Lightning's; one that was made before the adapters on experts is refused."""
        super().setup_optimizers(trainer)
        check_optimizers(self.optimizers, self.applied, _MAKE_IT)

    def teardown(self) -> None:
        """The metrics go with the run; the models stay patched, for evaluation after it."""
        if self._metrics is not None and self._metrics in self._trainer.callbacks:
            self._trainer.callbacks.remove(self._metrics)
        self._metrics = self._trainer = None
        super().teardown()

    # --- results

    def save_merged(self, output: str | Path, *, dtype: str = "bf16", **options: Any) -> MergeReport | None:
        """Write the merged model of the PEFT model in the module: ``trainer.strategy.save_merged("merged")`` after fit.

        Args:
            output, dtype, options: as for ``unsloth_plugins.core.export.merge_model``, such as ``tokenizer``.

        Returns:
            The report; ``None`` on processes other than the first, which do nothing.

        Raises:
            ConfigError: there is no module yet, or no PEFT model in it; else see ``merge_model``.
        """
        if self.lightning_module is None:
            raise ConfigError(expected="a trained module", got="none", remedy="Call trainer.fit first.")
        check_whole(self.lightning_module)  # on every process: one that raised alone would leave the others waiting
        if not self.is_global_zero:
            return None
        with merge_bar(quiet=self.quiet) as progress:
            return merge_model(self.lightning_module, output, dtype=dtype, **({"progress": progress} | options))

    # --- checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """What was trained, and whatever else is not loaded again with the base; see ``lightning.checkpoints``."""
        assert self.lightning_module is not None
        self._left_out = ModuleWeights.of(self.lightning_module).left_out(self.lightning_module)
        state: dict[str, Any] = super().lightning_module_state_dict()
        return {key: value for key, value in state.items() if not _of_any(key, self._left_out)}

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Lightning's; sums of the weights that the checkpoint does without go along."""
        if self._left_out:
            checkpoint[BASE_SUMS] = self._left_out
        if "current_model_state" in checkpoint:  # of Lightning's WeightAveraging, which loads it strictly and by itself
            checkpoint["current_model_state"] = super().lightning_module_state_dict()
        super().save_checkpoint(checkpoint, *args, **kwargs)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Restore what a checkpoint holds. Weights of the base may be missing from it.

        Raises:
            ModelError: anything else is missing, or something is there that the module does not have.
        """
        module = self.lightning_module
        assert module is not None
        for model in models_of(module):
            add_missing_adapters(recognise(model))  # those that setup would add come too late for this checkpoint
        stored = checkpoint["state_dict"]
        if strict:
            base, known = reloadable(module), module.state_dict().keys()
            missing = [key for key in known if key not in stored and not _of_any(key, base)]
            unknown = [key for key in stored if key not in known]
            for what, keys in (("an unknown tensor", unknown), ("a tensor that the checkpoint lacks", missing)):
                if keys:
                    raise ModelError(
                        expected="a checkpoint with every tensor of this module but its frozen base, and no other",
                        got=f"{what}, {keys[0]}" + (f" and {len(keys) - 1} more" if len(keys) > 1 else ""),
                        remedy="Build the same adapters as in the run that wrote it, or set strict_loading = False on "
                        "the LightningModule.",
                    )
        module.load_state_dict(stored, strict=False)
        ModuleWeights.of(module).restored(module, checkpoint, strict)


class ShardingMixin(StrategyMixin):
    """What ``UnslothFSDPStrategy`` does instead of DDP: FSDP2. Checkpoints are whole files, those of the others.

    It derives from DDP for the processes, the samplers and the order of things; there is no wrapper.
    """

    alone_without_ddp = False
    has_wrapper = False

    def _configure_launcher(self) -> None:
        check_sharded_precision(self.precision_plugin)
        super()._configure_launcher()

    def model_to_device(self) -> None:
        """Shard, unit by unit, in place of moving everything; then apply."""
        module = self.lightning_module
        assert module is not None
        if not module.automatic_optimization:
            raise UnsupportedError(
                expected="automatic optimization under strategy='unsloth_fsdp'",
                got="automatic_optimization = False",
                remedy="Use strategy='unsloth_ddp': FSDP has to see the end of training_step before backward.",
            )
        for model in models_of(module):
            add_missing_adapters(recognise(model))  # parameters can't be added to what is sharded
        shard(module, init_device_mesh(self.root_device.type, (self.world_size,)))
        names = [name for name, _ in [*module.named_parameters(), *module.named_buffers()]]
        module.__dict__[_NOT_BROADCAST] = names  # Lightning would, where it does not fit
        self.applied = apply_to_module(module, self.config)

    def setup(self, trainer: Any) -> None:
        """As without sharding, except that there is nothing to broadcast: each process holds a part of its own."""
        try:
            super().setup(trainer)
        finally:
            self.lightning_module.__dict__.pop(_NOT_BROADCAST, None)

    def configure_ddp(self) -> None:
        """Nothing: the parameters bring their communication with them."""

    def setup_optimizers(self, trainer: Any) -> None:
        """Lightning's; optimizers over whole parameters, or whose kernels take only those, are refused."""
        super().setup_optimizers(trainer)
        assert self.lightning_module is not None
        held = {id(p) for p in self.lightning_module.parameters()}
        for optimizer in self.optimizers:
            if any(id(p) not in held for group in optimizer.param_groups for p in group["params"]):
                raise ConflictError(
                    expected="an optimizer over the sharded parameters",
                    got=f"{type(optimizer).__name__} over others, as they were before sharding",
                    remedy=_MAKE_IT,
                )
            if type(optimizer).__module__.startswith("bitsandbytes"):
                raise UnsupportedError(
                    expected="an optimizer for sharded parameters, such as torch.optim.AdamW",
                    got=f"bitsandbytes' {type(optimizer).__name__}, whose kernels take whole ones",
                    remedy="Use torch.optim.AdamW: its states are sharded too. Or use strategy='unsloth_ddp'.",
                )

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """What was trained, whole, on the CPU."""
        state: dict[str, Any] = whole(super().lightning_module_state_dict())
        return state

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Whole, on the CPU."""
        state: dict[str, Any] = whole(super().optimizer_state(optimizer))
        return state

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """As with whole parameters, where the module is not sharded yet.

        Raises:
            UnsupportedError: it is, by a former run.
        """
        if isinstance(self.lightning_module, FSDPModule):
            raise UnsupportedError(
                expected="a LightningModule as it was built, to restore a checkpoint into",
                got="one that a former run has sharded",
                remedy="Build it anew and pass ckpt_path again.",
            )
        super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Each process keeps its part."""
        pairs = zip(self.optimizers, checkpoint["optimizer_states"], strict=True)
        for optimizer, state in pairs:
            optimizer.load_state_dict(sharded_state(optimizer, state))


def _of_any(key: str, parameters: Collection[str]) -> bool:
    """Whether ``key`` names one of ``parameters``, or what a quantizer keeps below it (``weight.absmax``)."""
    return key in parameters or any(key[:end] in parameters for end in _dots(key))


def _dots(key: str) -> list[int]:
    return [index for index, char in enumerate(key) if char == "."]
