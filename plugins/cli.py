"""The command line: plan, doctor, merge, export, tokenizer, show-mask.

Results go to standard output, the rest to standard error.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from unsloth_plugins.core.errors import ExportError, UnslothPluginsError
from unsloth_plugins.core.export.tensors import Progress as Report

app = typer.Typer(
    name="unsloth-plugins",
    help="Plan a fine-tune, look at the machine, and turn what was trained into what gets deployed.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    add_completion=False,
)
_err = Console(stderr=True)
_SHORT_S = 5.0

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and no progress.")]
OtherBase = Annotated[
    bool, typer.Option("--allow-other-base", help="Merge although the adapter was trained on another base.")
]
AdapterOption = Annotated[
    list[str] | None,
    typer.Option("--adapter", "-a", help="PEFT folder, or FOLDER=WEIGHT. Several are added up.", metavar="FOLDER"),
]


@contextlib.contextmanager
def _errors(as_json: bool, remedy: str = "") -> Iterator[None]:
    """Our own errors become one message and exit status 1; anything else is a defect and keeps its traceback.

    ``remedy`` is added to that of the system's errors.
    """
    handler = RichHandler(console=_err, show_path=False, show_time=False)
    handler.addFilter(lambda record: record.name != "unsloth_plugins.core.tokenizer.repair")  # printed as the result
    logger = logging.getLogger("unsloth_plugins")
    logger.addHandler(handler)
    propagate, level = logger.propagate, logger.level
    logger.propagate = False
    logger.setLevel(logging.WARNING if as_json else logging.INFO)
    try:
        yield
    except UnslothPluginsError as error:
        _show_error(type(error).__name__, error, as_json)
        raise typer.Exit(1) from error
    except OSError as error:
        shown = ExportError(
            expected="files that can be read, and a place where the result can be written",
            got=str(error),
            remedy=f"Check path, permissions and space. {remedy}".rstrip(),
        )
        _show_error(type(error).__name__, shown, as_json)
        raise typer.Exit(1) from error
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
        logger.setLevel(level)


def _show_error(kind: str, error: UnslothPluginsError, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"error": kind, "expected": error.expected, "got": error.got, "remedy": error.remedy}))
    else:
        _err.print(f"[bold red]{kind}[/]: ", end="")
        _err.print(str(error), markup=False, highlight=False)


@contextlib.contextmanager
def _bar(as_json: bool) -> Iterator[Report | None]:
    if as_json:
        yield None
        return
    if not _err.is_terminal:
        yield _lines()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    # Transient: no bar is left after an error.
    with Progress(*columns, TimeRemainingColumn(), console=_err, transient=True) as progress:
        task = progress.add_task("writing", total=None)

        def report(done: int, total: int, name: str) -> None:
            progress.update(task, completed=done, total=total, description=name[-48:])

        yield report


def _lines() -> Report:
    """For logs: a line each tenth of what takes longer than a few seconds."""
    begin, told = time.monotonic(), 0

    def report(done: int, total: int, name: str) -> None:
        nonlocal told
        tenths = 10 * done // max(total, 1)
        if tenths > told and time.monotonic() - begin > _SHORT_S:
            told = tenths
            _err.print(f"{10 * tenths} % of {total / 1e9:.2f} GB, at {name}", markup=False, highlight=False)

    return report


@contextlib.contextmanager
def _resumable(again: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as error:
        _err.print(f"Stopped. {again}", highlight=False)
        raise typer.Exit(130) from error


def _shard_bytes(gigabytes: float) -> int:
    if not math.isfinite(gigabytes) or gigabytes <= 0:
        raise typer.BadParameter(f"--max-shard-gb {gigabytes}: must be a number above 0.")
    return int(gigabytes * 1e9)


def _adapters(given: list[str] | None) -> dict[str, float]:
    """``FOLDER`` and ``FOLDER=WEIGHT``; a folder whose own name ends like that is taken as it is."""
    out: dict[str, float] = {}
    for each in given or ():
        folder, weight = _weighted(each)
        if folder in out:  # under two names: core.export refuses it
            raise typer.BadParameter(f"{folder!r} is given twice: name each adapter once, as FOLDER=WEIGHT.")
        out[folder] = weight
    return out


def _weighted(each: str) -> tuple[str, float]:
    folder, _, text = each.rpartition("=")
    if not folder or Path(each).exists():
        return each, 1.0
    try:
        return folder, float(text)
    except ValueError as error:
        raise typer.BadParameter(f"{each!r}: the weight after = must be a number.") from error


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, default=str))


def _options(given: list[str] | None) -> dict[str, Any]:
    """``NAME=VALUE`` pairs; values are JSON where they are that (numbers, true, null), text otherwise."""
    out: dict[str, Any] = {}
    for each in given or ():
        name, equals, value = each.partition("=")
        if not equals:
            raise typer.BadParameter(f"{each!r}: expected NAME=VALUE.")
        try:
            out[name] = json.loads(value)
        except json.JSONDecodeError:
            out[name] = value
    return out


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="Folder, cached hub id, or a built-in name such as gpt-oss-20b.")],
    gpu: Annotated[str | None, typer.Option(help='A card by name, as "RTX 4090".')] = None,
    vram: Annotated[float | None, typer.Option(help="Or its memory in GiB, of which 1 is left to the driver.")] = None,
    host_ram: Annotated[float | None, typer.Option(help="Host memory in GiB; any amount if not given.")] = None,
    ctx: Annotated[int | None, typer.Option(help="Wished context in tokens.")] = None,
    batch: Annotated[int, typer.Option(help="Rows on the card at once.")] = 1,
    dtype: Annotated[str | None, typer.Option(help="How the base is stored: mxfp4, nf4, bf16, fp16.")] = None,
    lora_rank: Annotated[int, typer.Option(help="r of the adapters.")] = 32,
    lora_targets: Annotated[str, typer.Option(help="all linear layers, or those of attention.")] = "all",
    optimizer: Annotated[str, typer.Option(help="adamw, adamw_8bit or sgd.")] = "adamw_8bit",
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", help="An option of `apply`, as memory_policy=min_memory.", metavar="NAME=VALUE"),
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Draw memory against context here (needs matplotlib).")] = None,
    as_json: Json = False,
) -> None:
    """Say what fits on which card, from the allocations of the code that would run. Nothing is loaded or downloaded.

    The exit status is 1 where a wished context does not fit.

    **Examples**

    `unsloth-plugins plan gpt-oss-20b --gpu "RTX 4090" --ctx 32768`

    `unsloth-plugins plan mistralai/Mistral-7B-v0.3 --dtype nf4 --vram 24 --host-ram 64 --png memory.png`

    `unsloth-plugins plan my-model --ctx 8192 -o memory_policy=min_memory --json`
    """
    from unsloth_plugins.core.planner import plan as run
    from unsloth_plugins.core.planner.show import plan_png, plan_text

    with _errors(as_json):
        report = run(
            model,
            gpu=gpu,
            vram_gib=vram,
            host_ram_gib=host_ram,
            ctx=ctx,
            batch=batch,
            dtype=dtype,  # type: ignore[arg-type]  # checked there
            lora_rank=lora_rank,
            lora_targets=lora_targets,  # type: ignore[arg-type]
            optimizer=optimizer,  # type: ignore[arg-type]
            **_options(option),
        )
        if png is not None:
            plan_png(report, png)
    if as_json:
        _print_json(asdict(report))
    else:
        Console(soft_wrap=True).print(plan_text(report), markup=False, highlight=False)
    if report.fits is False:
        raise typer.Exit(1)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Look at the GPU, packages, kernels, memory and disk: what works, what is broken, what would help.

    Every kernel that runs here is compared with its reference in float64. Status 1 when something is broken.

    **Examples**

    `unsloth-plugins doctor`

    `unsloth-plugins doctor --json`
    """
    from unsloth_plugins.core.doctor import examine

    with _errors(as_json):
        found = examine()
    if as_json:
        _print_json([asdict(finding) for finding in found])
    else:
        table = Table("", "state", "found", "would give")
        colours = {"ok": "green", "missing": "yellow", "broken": "bold red"}
        for finding in found:
            state = Text(finding.state, style=colours[finding.state])
            table.add_row(Text(finding.name), state, Text(finding.detail), Text(finding.gain))
        Console().print(table)
    if any(finding.state == "broken" for finding in found):
        raise typer.Exit(1)


@app.command()
def merge(
    base: Annotated[str, typer.Argument(help="Folder or hub id of the model that the adapter was trained on.")],
    output: Annotated[Path, typer.Argument(help="Folder to write. It must not exist.")],
    adapter: AdapterOption = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp16, fp32, mxfp4 (gpt-oss), or nf4 (bitsandbytes).")] = "bf16",
    max_shard_gb: Annotated[float, typer.Option(help="Largest weight file in GB (10^9 bytes).")] = 4.0,
    device: Annotated[str, typer.Option(help="Where the sums are computed: cpu or cuda.")] = "cpu",
    allow_other_base: OtherBase = False,
    as_json: Json = False,
) -> None:
    """Merge LoRA adapters into their base: safetensors that transformers and vLLM load.

    Dequantises the base, adds in float32, rounds once. The folder appears when it is complete; after a kill, the same
    command goes on where it was.

    **Examples**

    `unsloth-plugins merge openai/gpt-oss-20b merged -a outputs/checkpoint-300`

    `unsloth-plugins merge gpt-oss-20b merged-mxfp4 -a adapter --dtype mxfp4`

    `unsloth-plugins merge base merged -a style=0.7 -a facts=1.0 --json`
    """
    from unsloth_plugins.core.export import merge as run

    again = "The same command goes on where this one was."
    with _errors(as_json, again), _resumable(again), _bar(as_json) as progress:
        report = run(
            base,
            _adapters(adapter),
            output,
            dtype=dtype,
            max_shard_bytes=_shard_bytes(max_shard_gb),
            allow_other_base=allow_other_base,
            device=device,
            progress=progress,
        )
    if as_json:
        _print_json(asdict(report))
        return
    if report.requantised:
        table = Table("requantised tensor", "relative error", "error / change", title="Rounding to 4 bits")
        for name, error in report.requantised.items():
            over = "-" if error.error_over_change is None else f"{error.error_over_change:.3f}"
            table.add_row(name, f"{error.relative_error:.4f}", over)
        _err.print(table)
    what = f"{len(report.merged)} tensors merged" if adapter else "No adapter was given (-a): nothing was merged"
    if report.resumed:
        what += f"; {len(report.resumed)} of {len(report.files)} weight files were there from a run that was stopped"
    _finish(report.output, report.bytes_needed, report.notes, what)


@app.command()
def export(
    model: Annotated[str, typer.Argument(help="Folder or hub id: a merged model, or the base of the adapters.")],
    output: Annotated[Path, typer.Argument(help="GGUF file to write. It must not exist.")],
    adapter: AdapterOption = None,
    quant: Annotated[
        str | None,
        typer.Option(
            help="f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1, or mxfp4 (gpt-oss). Default: bf16; f16 for an adapter."
        ),
    ] = None,
    adapter_only: Annotated[
        bool, typer.Option("--adapter-only", help="Write the LoRA matrices alone, for llama.cpp's --lora.")
    ] = False,
    max_shard_gb: Annotated[
        float | None, typer.Option(help="Cut into files of at most so many GB (10^9 bytes). Default: one file.")
    ] = None,
    ollama: Annotated[bool, typer.Option("--ollama", help="Write a Modelfile for Ollama beside it.")] = False,
    allow_other_base: OtherBase = False,
    as_json: Json = False,
) -> None:
    """Write a GGUF file for llama.cpp and Ollama, straight from the base and the adapter if you like.

    No llama.cpp is needed. For gpt-oss, `--quant mxfp4` keeps the experts' codes as they are.

    **Examples**

    `unsloth-plugins export merged model.gguf --quant q8_0 --ollama`

    `unsloth-plugins export openai/gpt-oss-20b model.gguf -a outputs/checkpoint-300 --quant mxfp4`

    `unsloth-plugins export openai/gpt-oss-20b lora.gguf -a outputs/checkpoint-300 --adapter-only`
    """
    from unsloth_plugins.core.export import export_gguf, export_gguf_adapter

    if adapter_only and (ollama or max_shard_gb is not None):
        raise typer.BadParameter("--adapter-only goes without --ollama and --max-shard-gb.")
    with _errors(as_json), _bar(as_json) as progress:
        adapters = _adapters(adapter)
        options: dict[str, Any] = dict(allow_other_base=allow_other_base, progress=progress)
        if adapter_only:
            report = export_gguf_adapter(model, adapters, output, quant=quant or "f16", **options)
        else:
            shard = None if max_shard_gb is None else _shard_bytes(max_shard_gb)
            report = export_gguf(
                model, output, adapter=adapters, quant=quant or "bf16", max_shard_bytes=shard, ollama=ollama, **options
            )
    if as_json:
        _print_json(asdict(report))
        return
    what = f"{len(report.tensors)} tensors" + (f" and {report.modelfile}" if report.modelfile else "")
    _finish(report.output, report.bytes_needed, report.notes, what)


@app.command()
def tokenizer(
    model: Annotated[str, typer.Argument(help="Folder or hub id of a model with its tokenizer.")],
    repair: Annotated[
        Path | None, typer.Option(help="Write the repaired tokenizer and configs to this new folder.")
    ] = None,
    chat_template: Annotated[
        str | None, typer.Option(help="For a tokenizer without one: chatml, harmony, or a Jinja file.")
    ] = None,
    add_tokens: Annotated[
        bool, typer.Option("--add-tokens", help="Add ChatML's tokens where the chat template needs them.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what a repair would do, and write nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Find faults that ruin a fine-tune silently: padding that hides the end, wrong end tokens, double BOS, and more.

    Without `--repair` nothing is written. The exit status is 1 while faults are left; cautions are no faults.

    **Examples**

    `unsloth-plugins tokenizer my-model`

    `unsloth-plugins tokenizer my-model --repair my-model-tokenizer --chat-template chatml`

    `unsloth-plugins tokenizer my-model --dry-run --json`
    """
    from unsloth_plugins.core.tokenizer.folder import check_folder, repair_folder

    if chat_template and not (repair or dry_run):
        raise typer.BadParameter("--chat-template needs --repair or --dry-run.")
    if add_tokens and not (repair or dry_run):
        raise typer.BadParameter("--add-tokens needs --repair or --dry-run.")
    chat_template = _template(chat_template)
    with _errors(as_json):
        if repair or dry_run:
            report = repair_folder(model, repair, chat_template=chat_template, add_tokens=add_tokens, dry_run=dry_run)
            done, left = report.done, report.left
        else:
            done, left = [], check_folder(model)
    faults = [finding for finding in left if not finding.caution]
    if as_json:
        _print_json({"done": done, "left": [asdict(finding) for finding in left]})
    else:
        verb = "would repair" if dry_run else "repaired"
        for entry in done:
            print(f"{verb}  {entry}")
        for finding in left:
            kind = "caution" if finding.caution else "found"
            print(f"{kind}  {finding.code}: {finding.message}" + f" [repair: {finding.repair}]" * bool(finding.repair))
        if not done and not faults:
            print("no faults found")
    if faults or (done and dry_run):
        raise typer.Exit(1)


def _template(given: str | None) -> str | None:
    """A file's text; a known name and a template's text are left as they are."""
    from unsloth_plugins.core.tokenizer.templates import KNOWN

    if given is None or given in KNOWN or "{" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8") if Path(given).is_file() else given
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"--chat-template {given}: {error}") from error


@app.command("show-mask")
def show_mask(
    model: Annotated[
        str | None, typer.Argument(help="Folder, cached hub id or built-in name, as for plan: its windows and sinks.")
    ] = None,
    layer: Annotated[int | None, typer.Option(help="With MODEL: this layer only, from 0.")] = None,
    length: Annotated[int, typer.Option(help="Tokens of the row, padding included.")] = 16,
    window: Annotated[int | None, typer.Option(help="Keys that a token sees, itself included.")] = None,
    documents: Annotated[str | None, typer.Option(help="Lengths of packed documents, as 5,7,4.")] = None,
    left_padding: Annotated[int, typer.Option(help="Tokens of padding before the text.")] = 0,
    right_padding: Annotated[int, typer.Option(help="Tokens of padding after the text.")] = 0,
    sink: Annotated[
        bool | None,
        typer.Option("--sink/--no-sink", help="The layer has a learned sink, as in gpt-oss: so without MODEL."),
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option(help="Write a picture here as well, or one a kind of layer beside it (needs matplotlib)."),
    ] = None,
) -> None:
    """Show which keys each token of a row attends to, for a window or for each kind of layer of a model.

    **Examples**

    `unsloth-plugins show-mask --length 16 --window 5`

    `unsloth-plugins show-mask --window 5 --documents 9,7 --png mask.png`

    `unsloth-plugins show-mask gpt-oss-20b --length 160 --png mask.png`

    `unsloth-plugins show-mask my-model --layer 0`
    """
    from unsloth_plugins.core.sink_attention.show import mask_png, mask_text, visible

    if model is None and layer is not None:
        raise typer.BadParameter("--layer needs MODEL.")
    if model is not None and (window is not None or sink is not None):
        raise typer.BadParameter("--window and --sink go without MODEL, whose config says both.")
    try:
        lengths = None if documents is None else [int(part) for part in documents.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"--documents {documents!r}: lengths are numbers with commas between.") from error
    with _errors(as_json=False):
        kinds, sink = {"": window}, sink is not False
        if model is not None:
            kinds, sink = _kinds_of_layers(model, layer, length)
        for number, (title, keys) in enumerate(kinds.items()):
            mask = visible(
                length, window=keys, documents=lengths, left_padding=left_padding, right_padding=right_padding
            )
            if png is not None:
                path = png if len(kinds) == 1 else png.with_stem(f"{png.stem}-{'full' if keys is None else keys}")
                mask_png(mask, path, sink=sink, title=title)
            sys.stdout.write("\n" * (number > 0) + f"{title}\n" * bool(title) + mask_text(mask, sink=sink) + "\n")


def _kinds_of_layers(model: str, layer: int | None, length: int) -> tuple[dict[str, int | None], bool]:
    """Of the model, or of one layer: a title and the window of each kind, and whether there are sinks."""
    from unsloth_plugins.core.planner.shape import find_shape

    shape = find_shape(model)
    if layer is not None and not 0 <= layer < shape.layers:
        raise typer.BadParameter(f"--layer {layer}: {shape.name} has layers 0 to {shape.layers - 1}.")
    kinds: dict[str, int | None] = {}
    for window, layers in shape.layers_by_window().items():
        if layer is not None and layer not in layers:
            continue
        some = [str(index) for index in layers]
        which = f"layer {layer}" if layer is not None else f"layers {', '.join(some if len(some) < 6 else some[:3])}"
        which += f", ... {some[-1]} ({len(some)} of {shape.layers})" if layer is None and len(some) >= 6 else ""
        sees = "full attention" if window is None else f"a window of {window} keys"
        sees += ", more than the row has" if window is not None and window > length else ""
        kinds[f"{which} of {shape.name}: {sees}{', and a sink' if shape.has_sinks else ''}"] = window
    return kinds, shape.has_sinks


def _finish(output: Path, needed: int, notes: list[str], what: str) -> None:
    for note in notes:
        _err.print(f"- {note}", markup=False, highlight=False)
    _err.print(f"{what}; {needed:,} bytes were asked of the disk.", highlight=False)
    sys.stdout.write(f"{output}\n")
