"""The classes for ``lightning.pytorch``."""

from __future__ import annotations

from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from unsloth_plugins.lightning.callback import CallbackMixin, MetricsMixin
from unsloth_plugins.lightning.options import with_options_in_signature
from unsloth_plugins.lightning.strategy import ShardingMixin, StrategyMixin

__all__ = ["UnslothCallback", "UnslothDDPStrategy", "UnslothFSDPStrategy", "UnslothStrategy"]


class UnslothMetrics(MetricsMixin, Callback):
    """The metrics alone; the strategies bring it along."""

    _info = staticmethod(rank_zero_info)


class UnslothCallback(CallbackMixin, Callback):
    """``Trainer(callbacks=[UnslothCallback()])``, for those who keep their strategy.

    Checkpoints are then those of that strategy, with the frozen base in them.

    Args:
        config, options: as for ``unsloth_plugins.apply``.
        quiet: no report at the start, no summary at the end.

    Attributes:
        applied: what was done to each model.

    Raises:
        ConfigError: an option does not exist or has a wrong value.
    """

    _info = staticmethod(rank_zero_info)


class UnslothStrategy(StrategyMixin, DDPStrategy):
    """``Trainer(strategy="unsloth")``: a single device, or DDP where there are more processes.

    Args:
        config, options: as for ``unsloth_plugins.apply``; beyond those, keyword arguments of Lightning's
            ``DDPStrategy`` and torch's ``DistributedDataParallel``.
        quiet: no report at the start, no summary at the end.

    Attributes:
        applied: what was done to each model, once the trainer runs.

    Raises:
        ConfigError: an option does not exist or has a wrong value.
        UnsupportedError: a precision that would give wrong results, or a ``start_method`` other than ``popen``.
    """

    __init__ = with_options_in_signature(StrategyMixin.__init__, DDPStrategy)
    ddp_class = DDPStrategy
    metrics_class = UnslothMetrics
    _info = staticmethod(rank_zero_info)


class UnslothDDPStrategy(UnslothStrategy):
    """``Trainer(strategy="unsloth_ddp")``: DDP, with one process too."""

    alone_without_ddp = False


class UnslothFSDPStrategy(ShardingMixin, UnslothStrategy):
    """``Trainer(strategy="unsloth_fsdp")``: parameters sharded by FSDP2, packed ones as they are.

    Checkpoints are those of the other strategies, and can be resumed with any number of processes. The module stays
    sharded after the run.

    Args:
        config, options, quiet: as for ``UnslothStrategy``.

    Raises:
        ConfigError: an option does not exist or has a wrong value.
        UnsupportedError: a precision, an optimizer or a way to optimize that would give wrong results, or a
            ``start_method`` other than ``popen``.
    """
