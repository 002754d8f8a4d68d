"""A search through a model that is repeated before each step, where walking all modules would take milliseconds."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn


class ModuleSearch:
    """The modules below ``root``, itself included, that satisfy ``wanted``, in the order of ``root.modules()``.

    Walks through the model at the first call, and again once a module above one of those that were found, or ``root``,
    has other children: a layer was added, replaced or wrapped. What changes below them, as when PEFT wraps a linear
    layer, costs no walk; ``wanted`` should ask for what a module has from the start.
    """

    def __init__(self, root: nn.Module, wanted: Callable[[nn.Module], bool]) -> None:
        self.root, self.wanted = root, wanted
        self._found: list[nn.Module] = []
        self._above: list[tuple[nn.Module, list[nn.Module | None]]] = []

    def __call__(self) -> list[nn.Module]:
        """What is there now."""
        same = self._above and all(
            len(module._modules) == len(children)
            and all(now is then for now, then in zip(module._modules.values(), children, strict=True))
            for module, children in self._above
        )
        if not same:
            self._found = [module for module in self.root.modules() if self.wanted(module)]
            found = set(self._found)
            above = {self.root: None}  # in the order of the walk
            _note_above(self.root, found, above, set())
            self._above = [(module, list(module._modules.values())) for module in above]
        return list(self._found)


def _note_above(module: nn.Module, found: set[nn.Module], above: dict[nn.Module, None], seen: set[nn.Module]) -> bool:
    """Whether ``module`` or one below it was found; those with such a child go into ``above``."""
    if module in seen:
        return module in above or module in found
    seen.add(module)
    below = [_note_above(child, found, above, seen) for child in module.children()]
    if any(below):
        above[module] = None
    return any(below) or module in found
