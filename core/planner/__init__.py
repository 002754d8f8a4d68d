"""What fits on which card, from the runtime's own allocations, before anything is loaded."""

from unsloth_plugins.core.planner.memory import Setup, predict
from unsloth_plugins.core.planner.plan import PlanReport, plan
from unsloth_plugins.core.planner.shape import ModelShape, find_shape

__all__ = ["ModelShape", "PlanReport", "Setup", "find_shape", "plan", "predict"]
