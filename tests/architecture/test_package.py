"""What is shipped, what an import loads, and what an import leaves alone."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FRAMEWORKS = ("lightning", "pytorch_lightning", "axolotl", "trl")


def run_python(code: str, *arguments: str, python: str = sys.executable, cwd: Path = ROOT) -> str:
    """Standard output of ``code`` in a fresh interpreter."""
    done = subprocess.run([python, "-c", code, *arguments], capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def package_folders() -> dict[str, Path]:
    """Dotted name -> folder, for every folder with an ``__init__.py`` under core/ and plugins/."""
    found = {}
    for top, name in (("plugins", "unsloth_plugins"), ("core", "unsloth_plugins.core")):
        for init in (ROOT / top).rglob("__init__.py"):
            inner = init.parent.relative_to(ROOT / top).parts
            found[".".join((name, *inner))] = init.parent
    return found


# --- what is shipped


def test_pyproject_lists_every_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert sorted(project["tool"]["setuptools"]["packages"]) == sorted(package_folders())


def test_every_folder_with_code_is_a_package() -> None:
    folders = set(package_folders().values())
    modules = [path for top in ("core", "plugins") for path in (ROOT / top).rglob("*.py")]
    assert [str(path.relative_to(ROOT)) for path in modules if path.parent not in folders] == []


@pytest.mark.slow
def test_wheel_is_complete_and_imports(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a copy, so that no stale build folder adds to the wheel
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("core", "plugins"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(source)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")

    shipped = set(zipfile.ZipFile(wheel).namelist())
    expected = {"unsloth_plugins/py.typed", "unsloth_plugins/core/py.typed"}
    for name, folder in package_folders().items():
        expected |= {f"{name.replace('.', '/')}/{module.name}" for module in folder.glob("*.py")}
    assert sorted(expected - shipped) == []

    empty = tmp_path / "empty"
    subprocess.run([sys.executable, "-m", "venv", str(empty)], check=True)
    python = str(empty / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", str(wheel)], check=True)
    where = run_python("import unsloth_plugins; print(unsloth_plugins.__file__)", python=python, cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(empty)


# --- what an import loads


def loaded_by_import(module: str, candidates: tuple[str, ...], cwd: Path = ROOT) -> list[str]:
    """Those of ``candidates`` that importing ``module`` loads."""
    code = "import importlib, json, sys; importlib.import_module(sys.argv[1]); print(json.dumps(list(sys.modules)))"
    loaded = json.loads(run_python(code, module, cwd=cwd).splitlines()[-1])
    return [name for name in candidates if name in loaded]


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("unsloth_plugins", ("torch", "transformers", "triton", *FRAMEWORKS)),
        ("unsloth_plugins.autoload", ("torch", "transformers", "triton", *FRAMEWORKS)),
        ("unsloth_plugins.lightning", ("torch", "transformers", "triton", *FRAMEWORKS)),
        ("unsloth_plugins.core", FRAMEWORKS),
        ("unsloth_plugins.hf_trainer", FRAMEWORKS),
    ],
)
def test_import_does_not_load(module: str, forbidden: tuple[str, ...]) -> None:
    assert loaded_by_import(module, forbidden) == []


def test_the_import_check_can_fail(tmp_path: Path) -> None:
    (tmp_path / "eager_module.py").write_text("import torch\n", encoding="utf-8")
    assert loaded_by_import("eager_module", ("torch", "lightning"), cwd=tmp_path) == ["torch"]


# --- what an import leaves alone

# argv: the statement to run between two snapshots. Prints the names that changed, one a line.
SNAPSHOT = """
import importlib, importlib.util, inspect, sys, types

WATCHED = [
    "torch", "torch.nn.functional", "torch.utils.checkpoint", "transformers.modeling_utils", "transformers.trainer",
    "transformers.models.gpt_oss.modeling_gpt_oss", "peft", "lightning.pytorch", "lightning.pytorch.strategies",
    "pytorch_lightning", "pytorch_lightning.strategies", "trl.trainer.base_trainer", "trl.trainer.sft_trainer",
    "axolotl.integrations.base", "axolotl.core.trainers.base", "axolotl.loaders.model", "axolotl.utils.schemas.config",
]
WATCHED = [name for name in WATCHED if importlib.util.find_spec(name.partition(".")[0])]
if importlib.util.find_spec("axolotl") and importlib.util.find_spec("axolotl.integrations") is None:
    WATCHED = [name for name in WATCHED if not name.startswith("axolotl.")]  # a folder of that name
for name in WATCHED:
    importlib.import_module(name)

# Objects are kept, so that an id can't be reused by a new object.
KEEP = []

def remember(value):
    KEEP.append(value)
    return id(value)

def snapshot():
    seen = {}
    for name in WATCHED:
        for key, value in list(vars(sys.modules[name]).items()):
            if key.startswith("__") or isinstance(value, types.ModuleType):
                continue
            seen[f"{name}.{key}"] = remember(value)
            if inspect.isclass(value):
                for attribute, member in list(vars(value).items()):
                    if callable(member) or isinstance(member, (classmethod, staticmethod, property)):
                        seen[f"{name}.{key}.{attribute}"] = remember(member)
    return seen

before = snapshot()
exec(sys.argv[1])
after = snapshot()
lost = [name for name in before if name not in after]
other = [name for name in before if name in after and before[name] != after[name]]
# A name that is new is a patch only on a class; a module may load its own names lazily.
new = [name for name in after if name not in before and name.rsplit(".", 1)[0] in before]
print(f"watched {len(before)}")
print("\\n".join(sorted(lost + other + new)))
"""


def changed_by(statement: str) -> list[str]:
    """Public attributes of torch, transformers and PEFT that ``statement`` replaces, removes or adds to a class."""
    watched, *changed = run_python(SNAPSHOT, statement).rpartition("watched ")[2].splitlines()
    assert int(watched) > 1000
    return [name for name in changed if name]


def test_import_patches_nothing() -> None:
    names = ("", ".core", ".autoload", ".hf_trainer", ".lightning.for_lightning", ".lightning.for_pytorch_lightning")
    if find_spec("axolotl.integrations" if find_spec("axolotl") else "axolotl") is not None:
        names += (".axolotl",)
    assert changed_by("\n".join(f"import unsloth_plugins{name}" for name in names)) == []


@pytest.mark.slow
def test_apply_and_undo_patch_nothing_global() -> None:
    """Nor does applying, while it lasts."""
    use = (
        "sys.path.insert(0, 'tests')\n"
        "from conftest import batch_of, tiny_gpt_oss, tiny_llama\n"
        "from unsloth_plugins import apply\n"
        "from unsloth_plugins.core.mxfp4 import pack_experts\n"
        "for model in (tiny_gpt_oss(), pack_experts(tiny_gpt_oss()), tiny_llama()):\n"
        "    applied = apply(model.train(), gradient_checkpointing=True)\n"
        "    model(**batch_of(1, 9)).loss.backward()\n"
    )
    assert changed_by(use) == changed_by(use + "    applied.undo()\n") == []


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["hf_trainer", "lightning"])
def test_training_patches_nothing_global(framework: str) -> None:
    """Beyond what the framework changes by itself, which is found by training without ours."""
    head = (
        "sys.path[:0] = ['tests', 'tests/hf_trainer', 'tests/lightning']\n"
        "import tempfile, torch, lightning.pytorch, trl\n"
        "from pathlib import Path\n"
        "from conftest import tiny_gpt_oss\n"
        "import unsloth_plugins.hf_trainer, unsloth_plugins.lightning.for_lightning\n"
    )
    uses = {
        "hf_trainer": (
            "from test_callback import Rows, arguments, lora\n"
            "from transformers import Trainer\n"
            "callbacks = [unsloth_plugins.hf_trainer.UnslothCallback(quiet=True)] if OURS else []\n"
            "args = arguments(Path(tempfile.mkdtemp()), gradient_checkpointing=True)\n"
            "Trainer(lora(tiny_gpt_oss()), args, train_dataset=Rows([24] * 8), callbacks=callbacks).train()\n"
        ),
        "lightning": (
            "import lightning.pytorch as pl\n"
            "from fitting import batches, module_of, trainer_of\n"
            "folder = Path(tempfile.mkdtemp())\n"
            "options = {'strategy': 'unsloth'} if OURS else {}\n"
            "trainer_of(pl, folder, **options).fit(module_of(pl, tiny_gpt_oss), batches())\n"
        ),
    }
    stock, ours = (changed_by(head + f"OURS = {use}\n" + uses[framework]) for use in (False, True))
    assert set(ours) <= set(stock), sorted(set(ours) - set(stock))


def test_the_patch_check_can_fail() -> None:
    patches = (
        "import torch, transformers, peft\n"
        "torch.nn.functional.cross_entropy = lambda *a: None\n"
        "transformers.modeling_utils.PreTrainedModel.save_pretrained = lambda self: None\n"
        "transformers.trainer.Trainer.brand_new = lambda self: None\n"
        "del peft.get_peft_model"
    )
    changed = changed_by(patches)
    assert "torch.nn.functional.cross_entropy" in changed
    assert "transformers.modeling_utils.PreTrainedModel.save_pretrained" in changed
    assert "transformers.trainer.Trainer.brand_new" in changed
    assert "peft.get_peft_model" in changed
