"""What both roots' callbacks have in common; ``for_lightning`` and ``for_pytorch_lightning`` give them their bases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from unsloth_plugins.core import Applied, UnslothConfig, check_optimizers, lacks_adapters
from unsloth_plugins.core.config import check_choice
from unsloth_plugins.core.errors import ConflictError
from unsloth_plugins.core.meter import Meter
from unsloth_plugins.core.planner.live import explain, optimizer_named
from unsloth_plugins.lightning.models import (
    apply_to_module,
    causal_lms,
    check_precision,
    report_of,
)
from unsloth_plugins.lightning.options import with_options_in_signature

_SHARDING = ("FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy")


class MetricsMixin:
    """Logs ``tokens_per_s``, ``peak_memory_gib``, ``host_gib``, ``sent_gib`` and ``exposed_copy_ms`` of this process
    (see ``Meter.read``), to the progress bar and the loggers.

    Sums up when training ends, through ``_info``, which prints on the first process.

    The values are renewed about once a second of training time: a device has to be waited for.
    """

    applied: tuple[Applied, ...] = ()
    quiet = False
    _info: Callable[[str], None]
    _meter: Meter | None = None
    _last: dict[str, float] | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start to measure."""
        self._meter, self._last = Meter(self.applied, pl_module.device), None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Loading of data, evaluation and saving are over: time counts from here."""
        assert self._meter is not None
        self._meter.start()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log, unless the Trainer is barebones, which has no logging at all."""
        assert self._meter is not None
        self._meter.stop(wait=self._last is None or self._meter.seconds >= 1)
        if self._last is None or self._meter.seconds >= 1:
            self._last = self._meter.read()
        if not trainer.barebones:
            pl_module.log_dict(self._last, prog_bar=True, on_step=True, on_epoch=False)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Out of device memory: a note on the error says what can be changed."""
        for each in self.applied:
            explain(exception, each, optimizer=optimizer_named(_optimizer_of(trainer)))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Sum up."""
        assert self._meter is not None
        if not self.quiet:
            self._info(self._meter.summary())


class CallbackMixin(MetricsMixin):
    """Everything that ``UnslothCallback`` does."""

    @with_options_in_signature
    def __init__(self, config: UnslothConfig | None = None, *, quiet: bool = False, **options: Any) -> None:
        super().__init__()
        check_choice("quiet", quiet)
        self.config, self.quiet = UnslothConfig.from_options(config, beside=("quiet",), **options), quiet
        self.applied = ()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Check for conflicts, and apply to models that were built in ``__init__``: before a checkpoint is restored."""
        self.applied = ()
        _check_strategy(trainer.strategy)
        _check_single(trainer.callbacks)
        check_precision(trainer.precision_plugin)
        if stage == "fit":
            _check_launcher(trainer.strategy, pl_module)
        if causal_lms(pl_module):
            self._apply(pl_module)
            if stage != "fit":
                self._report()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Apply to models that ``setup`` or ``configure_model`` built; report. Optimizers and device are known now."""
        if not self.applied:
            self._apply(pl_module)
            check_optimizers(
                trainer.optimizers,
                self.applied,
                "Use Trainer(strategy='unsloth') instead of UnslothCallback, or build the model in __init__.",
            )
        expect_memory(self.applied, trainer)
        self._report()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """As ``on_fit_start``, for ``Trainer.validate``."""
        self._apply_once(pl_module)

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """As ``on_fit_start``, for ``Trainer.test``."""
        self._apply_once(pl_module)

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        """As ``on_fit_start``, for ``Trainer.predict``."""
        self._apply_once(pl_module)

    def _apply_once(self, pl_module: nn.Module) -> None:
        if not self.applied:
            self._apply(pl_module)
            self._report()

    def _apply(self, pl_module: Any) -> None:
        self.applied = apply_to_module(pl_module, self.config)

    def _report(self) -> None:
        if not self.quiet:
            self._info(report_of(self.applied))


def _optimizer_of(trainer: Any) -> str:
    return type(trainer.optimizers[0]).__name__ if trainer.optimizers else ""


def expect_memory(applied: tuple[Applied, ...], trainer: Any) -> None:
    """The line of the report on memory, where one model trains: what several take together is not predicted."""
    if len(applied) == 1 and trainer.state.fn == "fit":
        applied[0].sync_checkpointing()
        applied[0].expect(optimizer=_optimizer_of(trainer))


def _check_single(callbacks: list[Any]) -> None:
    count = sum(isinstance(each, CallbackMixin) for each in callbacks)
    if count > 1:
        raise ConflictError(
            expected="one UnslothCallback",
            got=f"{count}, of which the last would overrule the options of the others",
            remedy="Remove all but one, from Trainer(callbacks=...) and from configure_callbacks.",
        )


def _check_launcher(strategy: Any, module: nn.Module) -> None:
    """Refuse adapters that only processes made from this one would have: it gets back no weight it has no place for."""
    launchers = [each.__name__ for each in type(strategy.launcher).__mro__]
    if "_MultiProcessingLauncher" in launchers and any(lacks_adapters(model) for model in causal_lms(module)):
        raise ConflictError(
            expected="adapters on experts to exist before the processes do",
            got=f"{type(strategy).__name__} with start_method={strategy.launcher._start_method!r}, whose "
            "processes would make them, train them and lose them at the end",
            remedy="Use Trainer(strategy='ddp'). In a notebook use 'ddp_notebook' and call "
            "unsloth_plugins.apply(self.model) at the end of the LightningModule's __init__.",
        )


def _check_strategy(strategy: Any) -> None:
    names = [each.__name__ for each in type(strategy).__mro__]
    for name in _SHARDING:
        if name in names:
            raise ConflictError(
                expected="whole parameters on each process",
                got=f"{type(strategy).__name__}, which shards them, beside UnslothCallback",
                remedy="Use Trainer(strategy='unsloth_ddp').",
            )
    if "StrategyMixin" in names:
        raise ConflictError(
            expected="one of strategy='unsloth' and UnslothCallback",
            got="both",
            remedy="Remove UnslothCallback and give its options to UnslothStrategy(...).",
        )
