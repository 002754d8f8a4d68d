"""The import hook: a bare ``Trainer(strategy="unsloth")``, and no harm to ``import torch`` whatever happens."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from fitting import ROOTS, root_of

ENTRY_POINT = "unsloth_plugins.autoload:install"
NAMES = ["unsloth", "unsloth_ddp", "unsloth_fsdp"]


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """An environment in which torch finds our entry point, as after ``pip install``."""
    info = tmp_path / "site" / "hook_probe-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hook-probe\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[torch.backends]\nhook_probe = {ENTRY_POINT}\n")
    path = os.pathsep.join([str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "UNSLOTH_PLUGINS_AUTOLOAD": "1"}


def python(code: str, env: dict[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=cwd)


def printed(code: str, env: dict[str, str], cwd: Path) -> str:
    done = python(code, env, cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_pyproject_declares_it() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    assert list(project["project"]["entry-points"]["torch.backends"].values()) == [ENTRY_POINT]


@pytest.mark.slow
@pytest.mark.parametrize("root", ROOTS)
def test_the_name_works_without_an_import_of_ours(root: str, installed: dict[str, str], tmp_path: Path) -> None:
    root_of(root)
    code = (
        f"from {root} import Trainer; import sys\n"
        "t = Trainer(strategy='unsloth', accelerator='cpu', logger=False, enable_checkpointing=False)\n"
        "print(type(t.strategy).__module__, [f for f in sys.meta_path if type(f).__name__ == '_Finder'] != [])\n"
        f"import {root}.strategies as s\n"
        "print(type(s.__loader__).__name__, s.__spec__.loader is s.__loader__)"
    )
    module = "for_lightning" if root == "lightning.pytorch" else "for_pytorch_lightning"
    lines = printed(code, installed, tmp_path).splitlines()
    assert lines[-2:] == [f"unsloth_plugins.lightning.{module} True", "SourceFileLoader True"]


def test_importing_torch_loads_nothing_more(installed: dict[str, str], tmp_path: Path) -> None:
    code = (
        "import sys, torch\n"
        "print([m for m in sys.modules if m.partition('.')[0] in ('lightning', 'pytorch_lightning', 'transformers')])\n"
        "print(sorted(m for m in sys.modules if m.startswith('unsloth_plugins')))"
    )
    others, ours = printed(code, installed, tmp_path).splitlines()
    assert others == "[]"
    assert ours == str(
        ["unsloth_plugins", "unsloth_plugins.autoload"]
        + ["unsloth_plugins.lightning", "unsloth_plugins.lightning.registration"]
    )


def test_importing_us_loads_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys, unsloth_plugins, unsloth_plugins.autoload, unsloth_plugins.lightning\n"
        "print([m for m in ('torch', 'lightning', 'pytorch_lightning') if m in sys.modules])"
    )
    assert printed(code, dict(os.environ), tmp_path) == "[]"


@pytest.mark.slow
@pytest.mark.parametrize(
    "sabotage",
    [
        "sys.modules['unsloth_plugins.lightning.registration'] = None",  # its import raises ImportError
        "sys.modules['unsloth_plugins.lightning'] = type(sys)('unsloth_plugins.lightning')",  # not a package
        "import unsloth_plugins.lightning.registration as r; r.register = lambda root: 1 / 0",
    ],
)
def test_a_failure_breaks_neither_torch_nor_lightning(sabotage: str, installed: dict[str, str], tmp_path: Path) -> None:
    root_of("lightning.pytorch")
    code = (
        f"import sys\n{sabotage}\nimport torch, lightning.pytorch\n"
        "print(torch.ones(1).item(), 'unsloth' in lightning.pytorch.strategies.StrategyRegistry)"
    )
    done = python(code, installed, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "1.0 False" and "strategy='unsloth' could not be" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("switch", ["UNSLOTH_PLUGINS_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD"])
def test_the_off_switches(switch: str, installed: dict[str, str], tmp_path: Path) -> None:
    root_of("lightning.pytorch")
    code = (
        "import torch, lightning.pytorch, lightning.pytorch.strategies as s\n"
        "print('unsloth' in s.StrategyRegistry)\n"
        "import unsloth_plugins.lightning, unsloth_plugins.lightning.registration as r\n"
        f"print(all(name in s.StrategyRegistry for name in {NAMES}))"
    )
    assert printed(code, {**installed, switch: "0"}, tmp_path).splitlines()[-2:] == ["False", "True"]


@pytest.mark.parametrize("root", ROOTS)
def test_a_strategy_of_the_other_root_is_named_by_lightning(root: str) -> None:
    """As the README quotes it; the object's own module says where it is from."""
    trainer = {name: root_of(name).Trainer for name in ROOTS}[root]
    from unsloth_plugins.lightning import for_lightning, for_pytorch_lightning

    other = for_lightning if root == "pytorch_lightning" else for_pytorch_lightning
    with pytest.raises(ValueError, match=rf"selected an invalid strategy name: `strategy=<{other.__name__}"):
        trainer(strategy=other.UnslothStrategy(), accelerator="cpu", logger=False)


@pytest.mark.slow
@pytest.mark.parametrize("first", ROOTS)
def test_only_one_root_is_needed(first: str, installed: dict[str, str], tmp_path: Path) -> None:
    """The other one can't be imported, as when it is not installed."""
    root_of(first)
    other = next(root for root in ROOTS if root != first)
    code = (
        f"import sys; sys.modules[{other.partition('.')[0]!r}] = None\n"
        f"import unsloth_plugins.lightning, {first} as pl\n"
        "print(issubclass(unsloth_plugins.lightning.UnslothStrategy, pl.strategies.DDPStrategy))"
    )
    assert printed(code, installed, tmp_path).splitlines()[-1] == "True"
