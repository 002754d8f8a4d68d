"""The planner: sizes of models, agreement with committed measurements, what fits and what would make it fit."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import planner_rows
import pytest
import torch
import transformers
from conftest import tiny_gpt_oss, tiny_llama
from peft import LoraConfig, get_peft_model

import unsloth_plugins
from unsloth_plugins.core.config import UnslothConfig
from unsloth_plugins.core.errors import ConfigError, ModelError, UnsupportedError
from unsloth_plugins.core.mxfp4 import pack_experts
from unsloth_plugins.core.offload.policy import Plan
from unsloth_plugins.core.planner import memory, plan
from unsloth_plugins.core.planner.cards import find_card
from unsloth_plugins.core.planner.memory import Setup, predict
from unsloth_plugins.core.planner.plan import fits
from unsloth_plugins.core.planner.shape import ATTENTION_LINEARS, BUILT_IN, find_shape, shape_of_config

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
GIB = 2**30
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def rows_of(file: str, **wanted: object) -> list[dict[str, Any]]:
    rows = json.loads((RESULTS / file).read_text())
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


# --- sizes


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt-oss-20b", 20_914_757_184),
        ("gpt-oss-120b", 116_829_156_672),
        ("mistral-7b-v0.3", 7_248_023_552),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("llama-3.2-1b", 1_235_814_400),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-8b", 8_190_735_360),
        ("gemma-7b", 8_537_680_896),
        ("gemma-2-9b", 9_241_705_984),
        ("gemma-3-1b", 999_885_952),
        ("smollm2-135m", 134_515_008),
        ("smollm3-3b", 3_075_098_624),
        ("phi-4", 14_659_507_200),
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen3-30b-a3b", 30_532_122_624),
    ],
)
def test_published_parameter_counts(name: str, parameters: int) -> None:
    assert BUILT_IN[name].parameters() == parameters


@pytest.mark.parametrize(
    ("family", "more"),
    [
        *((family, {}) for family in ("Llama", "Mistral", "Qwen2", "Qwen3", "SmolLM3", "Phi3", "Gemma", "Gemma2")),
        *((family, {}) for family in ("Gemma3Text", "GptOss", "Mixtral", "Qwen3Moe")),
        *((family, {"attention_bias": True}) for family in ("Llama", "Qwen3", "SmolLM3", "Qwen3Moe")),
    ],
)
def test_parameters_of_real_classes(family: str, more: dict[str, Any]) -> None:
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, head_dim=32)
    sizes |= dict(num_key_value_heads=2, vocab_size=160, num_local_experts=4, moe_intermediate_size=40, pad_token_id=0)
    config = getattr(transformers, f"{family}Config")(**sizes | more)
    if family == "Qwen2":  # has no head_dim of its own
        config.head_dim = 16
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert find_shape(config).parameters() == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("more", [{"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}])
def test_experts_in_some_layers_only_are_refused(more: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="layers of both kinds"):
        find_shape(transformers.Qwen3MoeConfig(**more))


def test_sizes_from_a_folder_an_id_and_a_config(tmp_path: Path) -> None:
    config = tiny_llama().config
    config.save_pretrained(tmp_path / "gpt-oss-20b")  # a folder goes before a built-in name
    assert replace(find_shape(str(tmp_path / "gpt-oss-20b")), name="") == replace(find_shape(config), name="")
    assert find_shape("meta-llama/Llama-3.1-8B-Instruct") is BUILT_IN["llama-3.1-8b"]
    with pytest.raises(ModelError, match=r"qwen3-8b"):
        find_shape("no/qwen3-88b")
    with pytest.raises(UnsupportedError, match="gpt2"):
        shape_of_config({"model_type": "gpt2"}, "x")


# --- bytes of real tensors


def build(family: str) -> Any:
    """A tiny model of a class without a fixture of its own."""
    sizes = dict(hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2, head_dim=16)
    sizes |= dict(num_attention_heads=4, num_key_value_heads=2, vocab_size=160, num_local_experts=4, pad_token_id=0)
    config = getattr(transformers, f"{family}Config")(**sizes, bos_token_id=1, eos_token_id=2)
    return transformers.AutoModelForCausalLM.from_config(config)


FAMILIES = {
    "llama": (tiny_llama, TARGETS[4:]),
    "gpt_oss": (tiny_gpt_oss, TARGETS[4:]),
    "phi3": (functools.partial(build, "Phi3"), ["gate_up_proj", "down_proj"]),
    "smollm3": (functools.partial(build, "SmolLM3"), TARGETS[4:]),
    "mixtral": (functools.partial(build, "Mixtral"), ["w1", "w2", "w3"]),
    "qwen3_moe": (functools.partial(build, "Qwen3Moe"), TARGETS[4:]),
}


@pytest.mark.parametrize("targets", ["all", "attention"])
@pytest.mark.parametrize("family", FAMILIES)
def test_trainable_parameters_and_states(family: str, targets: Any) -> None:
    build, beyond = FAMILIES[family]
    model = build()
    shape, setup = find_shape(model.config), Setup("bf16", 4, targets, "adamw")
    names = [name for name in shape.linears() if name in ATTENTION_LINEARS] + beyond * (targets == "all")
    peft = get_peft_model(model, LoraConfig(r=4, target_modules=names))
    unsloth_plugins.apply(peft)
    trained = [p for p in peft.parameters() if p.requires_grad]
    told = memory.fixed_terms(shape, setup)
    assert shape.layers * memory.adapter_parameters(shape, setup) == sum(p.numel() for p in trained)
    assert told["adapters"] == sum(p.numel() * p.element_size() for p in trained)
    optimizer = torch.optim.AdamW(trained)
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    states = [x for state in optimizer.state.values() for x in state.values() if torch.is_tensor(x) and x.dim()]
    assert told["optimizer states"] == sum(x.numel() * x.element_size() for x in states)


@pytest.mark.parametrize("family", ["gpt_oss", "mixtral", "qwen3_moe"])
def test_packed_base(family: str) -> None:
    model = pack_experts(FAMILIES[family][0]().to(torch.bfloat16))
    counted = sum(p.numel() * p.element_size() for p in model.parameters())
    assert memory.base_bytes(find_shape(model.config), Setup("mxfp4")) == counted


def test_nf4_weights() -> None:
    from bitsandbytes.functional import quantize_4bit

    packed, state = quantize_4bit(torch.randn(1024, 1024), compress_statistics=True, quant_type="nf4")
    counted = packed.numel() + state.absmax.numel() + 4 * state.state2.absmax.numel()
    assert memory._NF4 * 1024**2 == counted


# --- measured peaks


def save_normalised_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """As layers with experts do where their norms are trained."""
    saved = memory._saved_by_mlp
    monkeypatch.setattr(memory, "_saved_by_mlp", lambda shape: saved(shape) + shape.hidden * memory.HALF)


@pytest.mark.parametrize("row", planner_rows.newest(), ids=lambda row: f"{row['file']}-{row['impl']}-{row['ctx']}")
def test_every_newest_step_is_as_predicted_or_named(row: dict[str, Any]) -> None:
    told = planner_rows.prediction(row)
    named = planner_rows.name_of(row) in planner_rows.LEFT_OUT
    if isinstance(told, str):
        assert told.startswith("not described: ") and not named
        return
    off = told.device_bytes / GIB / row["peak_gib"] - 1
    assert (planner_rows.LOW <= off <= planner_rows.HIGH) != named, f"{off:+.1%}: see planner_rows.LEFT_OUT"


def test_rows_that_are_named_are_among_the_newest() -> None:
    rows = planner_rows.newest()
    assert {planner_rows.name_of(row) for row in rows} >= set(planner_rows.LEFT_OUT)
    assert not {row["file"] for row in rows} & planner_rows.OLDER


def test_the_newest_of_equal_rows_counts(tmp_path: Path) -> None:
    (row,) = rows_of("h200-2026-12-02-step-mistral.json", impl="ours", ctx=8192)
    others = [row | {"impl": "unsloth"}, row | {"bench": "load"}, row | {"peak_gib": None}]
    for name, peak in (("12-01-z", 1.0), ("12-03-a", 2.0), ("12-03-b", 3.0)):
        (tmp_path / f"h200-2026-{name}.json").write_text(json.dumps([row | {"peak_gib": peak}, *others]))
    (tmp_path / "h200-2026-12-04.json").write_text(json.dumps([row | {"ctx": 512}]))
    assert [(found["ctx"], found["peak_gib"]) for found in planner_rows.newest(tmp_path)] == [
        (8192, 3.0),
        (512, row["peak_gib"]),
    ]
    single = [row | {"steps": 1, "peak_gib": 4.0, "ctx": ctx} for ctx in (8192, 1024)]
    (tmp_path / "h200-2026-12-05.json").write_text(json.dumps(single))
    assert {(found["ctx"], found["peak_gib"]) for found in planner_rows.newest(tmp_path)} == {
        (8192, 3.0),
        (512, row["peak_gib"]),
        (1024, 4.0),
    }


@pytest.mark.parametrize("change", [{"impl": "ours_flex"}, {"trainable_params": 1}])
def test_rows_of_what_is_not_described_say_so(change: dict[str, Any]) -> None:
    told = planner_rows.prediction(planner_rows.newest()[0] | change)
    assert isinstance(told, str) and told.startswith("not described: ")


def test_table_and_speeds_are_those_of_the_rows() -> None:
    for path, text in planner_rows.files().items():
        assert path.read_text() == text, "run `make measured`"


@pytest.mark.parametrize(
    ("file", "dtype"), [("h200-2026-12-02-step-fa4.json", "mxfp4"), ("h200-2026-12-02-step-mistral.json", "nf4")]
)
def test_measured_base(file: str, dtype: Any) -> None:
    for load in rows_of(file, bench="load"):
        told = memory.base_bytes(BUILT_IN[load["model"]], Setup(dtype)) / GIB
        assert told == pytest.approx(load["peak_gib"], abs=0.01)


@pytest.mark.parametrize("tokens", [8192, 16384])
def test_weights_are_streamed_where_they_were(tokens: int) -> None:
    (row,) = rows_of("h200-2026-12-02-memory.json", cap_gib=15.0, ctx=tokens)
    told = predict(BUILT_IN["gpt-oss-20b"], Setup("mxfp4"), tokens, 15 * GIB, spend=True)
    assert row["weights"] == "streamed" and told.streamed_bytes > 0


@pytest.mark.parametrize("policy", ["on_device", "offload_all", "auto"])
@pytest.mark.parametrize("tokens", [2048, 8192])
def test_measured_layers_of_gpt_oss(tokens: int, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six layers in bf16 whose norms train; the formulas take a LoRA of rank 1 on attention in their place."""
    save_normalised_tokens(monkeypatch)
    asked = {"impl": "checkpoint"} if policy == "on_device" else {"policy": policy}
    (row,) = rows_of("h200-2026-12-02-offload-gpt-oss.json", ctx=tokens, **asked)
    shape = replace(BUILT_IN["gpt-oss-20b"], layers=6, vocab=512)
    config = unsloth_plugins.UnslothConfig(memory_policy=policy, offload_min_bytes=0)  # type: ignore[arg-type]
    setup = Setup("bf16", 1, "attention", config=config)
    chosen = (
        Plan(0, False) if policy == "auto" else memory.least_plan(shape, setup, tokens)
    )  # the row says: all layers kept
    told = memory.step_peak(shape, setup, tokens, chosen)
    assert -0.01 <= told.device_bytes / GIB / row["peak_gib"] - 1 <= 0.02
    if policy == "offload_all":
        assert told.host_bytes / GIB == pytest.approx(row["host_gib"], rel=0.01)


def test_measured_speeds_are_shown_with_their_cap() -> None:
    found = plan("gpt-oss-20b", gpu="H200", ctx=8192).measured
    assert {row.cap_gib for row in found} == {15.0, 79.0} and {row.tokens for row in found} == {8192}
    assert not plan("gpt-oss-20b", gpu="H200", ctx=8192, lora_rank=16).measured


def test_models_without_a_measured_peak_are_pointed_out() -> None:
    assert not plan("mistral-7b", dtype="nf4").notes
    assert "not yet against a measured peak: qwen3" in plan("qwen3-8b", dtype="nf4").notes[0]


# --- what fits


@pytest.mark.parametrize("policy", ["auto", "min_memory", "offload_all", "on_device"])
@pytest.mark.parametrize(
    ("model", "dtype"), [("gpt-oss-20b", "mxfp4"), ("mistral-7b", "nf4"), ("qwen3-30b-a3b", "mxfp4"), ("phi-4", "nf4")]
)
def test_the_longest_context_is_the_longest(model: str, dtype: Any, policy: Any) -> None:
    report = plan(model, gpu="RTX 4090", dtype=dtype, memory_policy=policy, host_ram_gib=48)
    assert report.longest and report.longest % 256 == 0
    shape = find_shape(model)
    assert report.usable_gib is not None
    assert fits(shape, report.setup, report.longest, report.usable_gib, 48)
    assert not fits(shape, report.setup, report.longest + 256, report.usable_gib, 48)
    limits = [limit.tokens for limit in report.limits if limit.usable_gib >= report.usable_gib]
    assert limits == sorted(limits) and report.longest in limits


def test_memory_grows_with_tokens_under_every_policy() -> None:
    shape = BUILT_IN["mistral-7b"]
    for policy in ("auto", "min_memory", "offload_all", "on_device"):
        setup = Setup("nf4", config=unsloth_plugins.UnslothConfig(memory_policy=policy))  # type: ignore[arg-type]
        peaks = [predict(shape, setup, tokens).device_bytes for tokens in range(512, 100_000, 5000)]
        assert peaks == sorted(peaks)


def test_min_memory_is_planned_with_our_attention_kernels() -> None:
    """57.6 kB a token by the table in docs/architecture.md, and under 60 with LoRA's inner products and the rest."""
    shape = BUILT_IN["mistral-7b"]
    for attention in ("auto", "triton"):
        config = unsloth_plugins.UnslothConfig(memory_policy="min_memory", attention=attention)  # type: ignore[arg-type]
        few, many = (predict(shape, Setup("nf4", config=config), tokens).device_bytes for tokens in (262_144, 524_288))
        assert 57_600 <= (many - few) / 262_144 < 60_000


def test_min_memory_is_planned_with_few_of_many_experts_decoded_at_a_time() -> None:
    shape = BUILT_IN["gpt-oss-120b"]
    whole, groups = (
        Setup("mxfp4", config=unsloth_plugins.UnslothConfig(memory_policy="min_memory", experts=experts))  # type: ignore[arg-type]
        for experts in ("grouped_mm", "auto")
    )
    each = [(inputs + 32) * outputs * 2 for inputs, outputs in shape.expert_linears()]
    assert memory.decoded_bytes(shape, whole) == shape.experts * sum(each)
    assert 256 << 20 < memory.decoded_bytes(shape, groups) <= 512 << 20
    streamed = replace(groups, config=replace(groups.config, weights="streamed"))
    more = memory.decoded_bytes(shape, streamed) - memory.decoded_bytes(shape, groups)
    assert more == memory.packed_bytes(shape)  # they stay there for the pass


def test_auto_spends_what_is_left_and_no_more() -> None:
    shape, setup = BUILT_IN["gpt-oss-20b"], Setup("mxfp4")
    before = 0
    for cap in (24, 32, 40, 79):
        told = predict(shape, setup, 8192, cap * GIB, spend=True).device_bytes
        assert before <= told <= cap * GIB
        before = told
    chosen = predict(shape, setup, 8192, 79 * GIB, spend=True).plan
    assert chosen.first_kept == 0 and chosen.decoded > 0


def test_remedies_make_it_fit() -> None:
    report = plan("gpt-oss-120b", gpu="H100", ctx=8192, weights="resident")
    assert report.fits is False and report.need is not None
    changes = [remedy.change for remedy in report.remedies]
    assert "lora_rank=8" in changes and plan("gpt-oss-120b", gpu="H100", ctx=8192, weights="resident", lora_rank=8).fits
    assert any("GH200" in change for change in changes)
    shorter = plan("mistral-7b", dtype="nf4", vram_gib=24, ctx=2_000_000)
    assert shorter.longest is not None and f"a context of {shorter.longest:,} tokens" in [
        remedy.change for remedy in shorter.remedies
    ]


def test_streamed_weights_leave_room() -> None:
    small = plan("gpt-oss-20b", gpu="RTX 4080", ctx=16384)  # `auto` streams there
    assert small.fits and small.need is not None and small.need.terms_gib["base weights"] < 4
    on_host = memory.packed_bytes(BUILT_IN["gpt-oss-20b"]) * 24 + 201088 * 2880 * 2
    assert small.need.host_gib > on_host / GIB
    resident, streamed = (
        memory.fixed_terms(BUILT_IN["gpt-oss-20b"], Setup("mxfp4", config=unsloth_plugins.UnslothConfig(weights=where)))
        for where in ("resident", "streamed")
    )
    assert resident["base weights"] - streamed["base weights"] == on_host
    assert not plan("gpt-oss-20b", gpu="RTX 4080", ctx=16384, weights="resident").fits
    short, long = (plan("gpt-oss-20b", gpu="RTX 4090", ctx=tokens) for tokens in (8192, 131072))
    assert short.need is not None and long.need is not None and short.fits and long.fits
    assert "streamed weights" in long.need.terms_gib and "streamed weights" not in short.need.terms_gib
    resident = plan("gpt-oss-20b", gpu="RTX 4090", ctx=131072, weights="resident")
    assert not resident.fits and 'weights="streamed"' in [remedy.change for remedy in resident.remedies]
    with pytest.raises(ConfigError, match="streamed"):
        plan("mistral-7b", dtype="nf4", weights="streamed")


def test_a_step_before_which_the_experts_leave_begins_with_them() -> None:
    """Unless `apply` put them on the host: then no step sees them."""
    shape = BUILT_IN["gpt-oss-20b"]
    sparing = UnslothConfig(memory_policy="min_memory")
    setup = Setup("mxfp4", config=sparing)
    streamed = Setup("mxfp4", config=replace(sparing, weights="streamed"))
    resident = memory.fixed_terms(shape, Setup("mxfp4", config=replace(sparing, weights="resident")))
    short, longer = (predict(shape, setup, tokens, 23 * GIB) for tokens in (131_072, 262_144))
    assert short.moment == "before the experts leave the device" and short.device_bytes == sum(resident.values())
    assert longer == predict(shape, streamed, 262_144, 23 * GIB) and longer.device_bytes > short.device_bytes
    assert predict(shape, setup, 16_384, 15 * GIB) == predict(shape, streamed, 16_384, 15 * GIB)
    assert predict(shape, setup, 131_072, 79 * GIB).streamed_bytes == 0


def test_pairs_halve_what_waits_on_the_host() -> None:
    one, two = (plan("mistral-7b", dtype="nf4", ctx=65536, checkpoint_pairs=pairs).need for pairs in (False, True))
    assert one is not None and two is not None and two.inputs_gib == one.inputs_gib / 2 > 0


def test_host_memory_limits_too() -> None:
    free, tight = (plan("mistral-7b", dtype="nf4", gpu="H100", host_ram_gib=ram) for ram in (None, 16))
    assert free.longest is not None and tight.longest is not None and tight.longest < free.longest
    on_host = 8 * GIB // (32 * 4096 * 2)  # tokens
    budget = plan("mistral-7b", dtype="nf4", gpu="H100", host_memory_gib=8, memory_policy="offload_all")
    assert budget.longest is not None and budget.longest <= on_host
    either = plan("mistral-7b", dtype="nf4", gpu="H100", host_memory_gib=8)  # more wait on the device
    assert free.longest is not None and either.longest is not None and on_host < either.longest < free.longest


def test_auto_keeps_what_the_host_does_not_take_on_the_device() -> None:
    shape, tokens = BUILT_IN["mistral-7b"], 65536
    told = {}
    for gib in (None, 8, 17):
        config = unsloth_plugins.UnslothConfig(host_memory_gib=gib)
        told[gib] = predict(shape, Setup("nf4", config=config), tokens, int(40 * GIB), spend=True)
        assert gib is None or told[gib].host_bytes <= gib * GIB
    assert told[17] == told[None] and told[None].host_bytes > 8 * GIB
    assert told[8].device_bytes <= 40 * GIB


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu": "RTX 4091"}, "4090"),
        ({"gpu": "H100", "vram_gib": 24}, "both"),
        ({"ctx": 0}, "ctx"),
        ({"vram_gib": -1}, "vram_gib"),
        ({"lora_rank": 0}, "Full fine-tuning"),
        ({"dtype": "int8"}, "nf4"),
        ({"dtype": "nf4"}, "experts"),
        ({"optimizer": "lion"}, "adamw_8bit"),
        ({"memory_polcy": "auto"}, "memory_policy"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan("gpt-oss-20b", **options)


def test_what_is_not_described_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="loss"):
        plan("gpt-oss-20b", loss=None)
    with pytest.raises(ConfigError, match="mxfp4"):
        plan("mistral-7b", dtype="mxfp4")


def test_cards_without_bf16_are_pointed_out() -> None:
    assert any("T4 has no bf16" in note for note in plan("gpt-oss-20b", gpu="T4").notes)
    assert not any("bf16" in note for note in plan("gpt-oss-20b", gpu="L4").notes)


def test_cards_are_found_as_people_write_them() -> None:
    for name in ("rtx4090", "NVIDIA GeForce RTX 4090", "4090"):
        assert find_card(name)[0].gb == 24
    assert find_card("nvidia a100 80gb")[0].gb == 80 and find_card("A100 40GB")[0].gb == 40


def test_windows_are_those_of_the_config() -> None:
    for name, family, every in (
        ("gpt-oss-20b", "gpt_oss", 2),
        ("gemma-2-9b", "gemma2", 2),
        ("gemma-3-1b", "gemma3_text", 6),
    ):
        shape = BUILT_IN[name]
        assert shape.family == family and len(shape.windows) == shape.layers
        assert [shape.has_full_attention(index) for index in range(6)] == [
            (index + 1) % every == 0 for index in range(6)
        ]
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, vocab_size=160)
    mistral = sizes | {"model_type": "mistral", "sliding_window": 32}
    assert shape_of_config(mistral, "").windows == (32,) * 4
    assert shape_of_config(mistral | {"sliding_window": None}, "").layers_by_window() == {None: [0, 1, 2, 3]}
    qwen = sizes | {"model_type": "qwen2", "sliding_window": 32, "use_sliding_window": False}
    assert shape_of_config(qwen, "").has_full_attention(0)
    old = sizes | {"model_type": "gemma2", "sliding_window": 32}
    assert shape_of_config(old, "").layers_by_window() == {32: [0, 2], None: [1, 3]}
    new = old | {"layer_types": ["full_attention", "sliding_attention"] * 2}
    assert shape_of_config(new, "").layers_by_window() == {None: [0, 2], 32: [1, 3]}
