"""What one training step with LoRA holds on the device and on the host, in bytes, term by term.

The terms are the allocations of the runtime: the tile of ``experts.fused``, the chunk of the loss, what each autograd
function saves, the choice of ``offload.policy``. A step is walked through from the loss to the first layer, because
what is held shrinks (activations) and grows (gradients) on the way; the largest moment is the peak.

All products are in 16 bits, the batch is one stretch of T tokens. Sizes as in ``ModelShape``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from unsloth_plugins.core.config import UnslothConfig
from unsloth_plugins.core.errors import ConfigError, UnsupportedError
from unsloth_plugins.core.experts.fused import TILE
from unsloth_plugins.core.experts.matmul import RANK_STEP, group_size
from unsloth_plugins.core.layers import tiled_mlp
from unsloth_plugins.core.loss.op import IN_PLACE_MIB
from unsloth_plugins.core.models.experts import GROUP_BYTES, GROUPS_FROM
from unsloth_plugins.core.models.streaming import TRAINED_BYTES
from unsloth_plugins.core.mxfp4.codec import BLOCK, BYTES
from unsloth_plugins.core.offload.budget import MARGIN
from unsloth_plugins.core.offload.host import PLENTY, HostStore
from unsloth_plugins.core.offload.policy import Plan, choose
from unsloth_plugins.core.planner.shape import ATTENTION_LINEARS, ModelShape
from unsloth_plugins.core.sink_attention import cudnn, fa4

Dtype = Literal["mxfp4", "nf4", "bf16", "fp16"]
Optimizer = Literal["adamw", "adamw_8bit", "sgd"]
Targets = Literal["all", "attention"]

HALF, FULL = 2, 4  # bytes of a 16-bit and of a 32-bit number
_STATES = {"adamw": 8.0, "adamw_8bit": 2 + 8 / 256, "sgd": 0.0}  # bytes a parameter; 8-bit ones have scales by 256
_NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)  # bytes a weight: codes, 8-bit scales by 64, their own float32 scales by 256
_MXFP4 = (BYTES + 1) / BLOCK
RESERVED = 1.02  # times what is in tensors is what torch's allocator takes in expandable segments; measured up to 1.01
STATES_ADAM = TRAINED_BYTES - FULL  # bytes a parameter of Adam's moments in float32, which nobody knows of beforehand
_WORKSPACE = 32 << 20  # of cuBLAS, which torch's allocator provides


@dataclass(frozen=True)
class Setup:
    """How a model is trained.

    Attributes:
        dtype: how the frozen base is stored: ``mxfp4`` (experts packed, the rest in 16 bits), ``nf4`` (linear layers in
            bitsandbytes' 4 bits, quantised twice), ``bf16``, ``fp16``.
        lora_rank: r of the adapters, float32 as PEFT makes them.
        lora_targets: ``all`` linear layers, experts included, or those of the ``attention``.
        optimizer: ``adamw`` (float32 states), ``adamw_8bit`` of bitsandbytes, or ``sgd`` without momentum.
        config: the options of ``apply``.
    """

    dtype: Dtype
    lora_rank: int = 32
    lora_targets: Targets = "all"
    optimizer: Optimizer = "adamw_8bit"
    config: UnslothConfig = field(default_factory=UnslothConfig)

    def __post_init__(self) -> None:
        for name, choices in (
            ("dtype", get_args(Dtype)),
            ("optimizer", get_args(Optimizer)),
            ("lora_targets", get_args(Targets)),
        ):
            if getattr(self, name) not in choices:
                raise ConfigError(
                    expected=f"`{name}` to be one of {', '.join(choices)}",
                    got=repr(getattr(self, name)),
                    remedy="Leave it out for the default.",
                )
        if isinstance(self.lora_rank, bool) or not isinstance(self.lora_rank, int) or self.lora_rank < 1:
            raise ConfigError(
                expected="`lora_rank` to be an integer >= 1",
                got=repr(self.lora_rank),
                remedy="Full fine-tuning is not planned; run one step and read the peak from the trainer's log.",
            )


def check(shape: ModelShape, setup: Setup) -> None:
    """Refuse what the formulas do not describe.

    Raises:
        ConfigError: the base can't be stored so.
        UnsupportedError: an option leads to code that is not described.
    """
    if shape.experts and setup.dtype == "nf4":
        raise ConfigError(
            expected="dtype mxfp4, bf16 or fp16 for a model with experts",
            got=setup.dtype,
            remedy="bitsandbytes leaves experts as they are: use mxfp4.",
        )
    if setup.config.weights == "streamed" and setup.dtype != "mxfp4":
        raise ConfigError(
            expected="packed experts for weights='streamed'",
            got=f"dtype {setup.dtype}",
            remedy="Use weights='resident'.",
        )
    if not shape.experts and setup.dtype == "mxfp4":
        raise ConfigError(expected="dtype nf4, bf16 or fp16 for a dense model", got="mxfp4", remedy="Use nf4.")
    described = {
        "attention": ("auto", "triton", "fa4", "cudnn"),
        "experts": ("auto", "grouped_mm", "triton"),
        "lora": ("auto", "fused"),
    }
    described |= {"layers": ("auto", "triton"), "loss": ("auto", "chunked")}
    for name, values in described.items():
        if getattr(setup.config, name) not in values:
            raise UnsupportedError(
                expected=f"`{name}` to be one of {', '.join(values)}: the formulas describe this project's kernels",
                got=repr(getattr(setup.config, name)),
                remedy="Leave it out, or run one step and read the peak from the trainer's log.",
            )


def packed_bytes(shape: ModelShape) -> int:
    """The packed experts of one layer, without their biases."""
    return int(shape.experts * sum(inputs * outputs for inputs, outputs in shape.expert_linears()) * _MXFP4)


def embedding_bytes(shape: ModelShape) -> int:
    """The input embedding, where it is not the head as well: it goes to the host with streamed experts."""
    return 0 if shape.tied else shape.vocab * shape.hidden * HALF


def _streams(setup: Setup) -> bool:
    return setup.config.weights == "streamed"


def with_weights_placed(shape: ModelShape, setup: Setup, tokens: int, device_bytes: int | None) -> Setup:
    """``weights="auto"`` as it is decided: by what is free beside the model and its adapters when ``apply`` runs
    (``models.streaming``), and before a longer step than any (``planner.live``)."""
    if setup.config.weights != "auto":
        return setup
    streams = False
    if setup.dtype == "mxfp4" and device_bytes is not None:
        adapters = shape.layers * adapter_parameters(shape, setup)
        need = RESERVED * (least_bytes(shape, _resident(setup), tokens) + STATES_ADAM * adapters)
        streams = _streams_from_the_start(shape, setup, device_bytes) or _free_bytes(shape, setup, device_bytes) < need
    return replace(setup, config=replace(setup.config, weights="streamed" if streams else "resident"))


def _resident(setup: Setup) -> Setup:
    return replace(setup, config=replace(setup.config, weights="resident"))


def _free_bytes(shape: ModelShape, setup: Setup, device_bytes: int) -> int:
    """Beside the model and its adapters."""
    return device_bytes - base_bytes(shape, setup) - shape.layers * adapter_parameters(shape, setup) * FULL


def _streams_from_the_start(shape: ModelShape, setup: Setup, device_bytes: int) -> bool:
    """Whether ``apply`` already puts packed experts on the host."""
    a_layer = shape.experts * sum(inputs * outputs for inputs, outputs in shape.expert_linears()) * HALF
    trained = shape.layers * adapter_parameters(shape, setup)
    return _free_bytes(shape, setup, device_bytes) < 2 * a_layer + TRAINED_BYTES * trained


def base_bytes(shape: ModelShape, setup: Setup) -> int:
    """The frozen model, wherever its parts are."""
    a_linear = {"nf4": _NF4}.get(setup.dtype, HALF)
    an_expert = {"mxfp4": _MXFP4}.get(setup.dtype, HALF)
    linears = sum(inputs * outputs for inputs, outputs in shape.linears().values())
    experts = shape.experts * sum(inputs * outputs for inputs, outputs in shape.expert_linears())
    layer = linears * a_linear + experts * an_expert + shape.small_parameters() * HALF
    outside = shape.vocab * shape.hidden * (1 if shape.tied else 2) + shape.hidden
    return int(shape.layers * layer + outside * HALF)


def _adapted(shape: ModelShape, setup: Setup) -> dict[str, tuple[int, int]]:
    """The linear layers with an adapter."""
    everywhere = setup.lora_targets == "all"
    return {name: size for name, size in shape.linears().items() if everywhere or name in ATTENTION_LINEARS}


def _adapts_experts(shape: ModelShape, setup: Setup) -> bool:
    return bool(shape.experts) and setup.lora_targets == "all"


def adapter_parameters(shape: ModelShape, setup: Setup) -> int:
    """Trainable parameters of one layer."""
    count = sum(inputs + outputs for inputs, outputs in _adapted(shape, setup).values())
    return setup.lora_rank * count + _expert_adapters(shape, setup)


def _expert_ranks(shape: ModelShape, setup: Setup) -> tuple[int, ...]:
    """Of the adapters on gate and up together, and on down. Old checkpoints of other models than gpt-oss have gate and
    up by themselves: PEFT, asked for adapters by those names, makes one of twice the rank."""
    if not _adapts_experts(shape, setup):
        return 0, 0
    return setup.lora_rank * (1 if shape.family == "gpt_oss" else 2), setup.lora_rank


def _expert_adapters(shape: ModelShape, setup: Setup) -> int:
    """Trainable parameters on the experts of one layer."""
    ranks = zip(shape.expert_linears(), _expert_ranks(shape, setup), strict=False)  # dense models have no experts
    return shape.experts * sum(rank * (inputs + outputs) for (inputs, outputs), rank in ranks)


def input_bytes(shape: ModelShape, tokens: int) -> int:
    """The input of one layer, which is all that a checkpointed layer keeps."""
    return tokens * shape.hidden * HALF


def _saved_by_attention(shape: ModelShape, setup: Setup) -> int:
    """Bytes a token from the first norm to the output projection: q, k, v, o, log-sum-exp and what LoRA reads again."""
    sizes = 2 * (shape.query_size + shape.kv_size)
    rows = shape.heads + 1  # log-sum-exp, 1 / rms
    if shape.norms_query_and_key:
        sizes += shape.query_size + shape.kv_size
        rows += shape.heads + shape.kv_heads
    adapted = len(set(ATTENTION_LINEARS) & set(_adapted(shape, setup)))
    sizes += adapted * setup.lora_rank  # x A of each; the norm's output is made again from the layer's input
    return sizes * HALF + rows * FULL


def _saved_by_mlp(shape: ModelShape) -> int:
    """Bytes a token behind attention: the residual, and of experts how they were routed. What was normalised is made
    again from the residual."""
    sizes = shape.hidden * (3 if shape.norms_outputs else 1)
    norms = (3 if shape.norms_outputs else 1) * FULL  # 1 / rms
    if shape.experts:
        norms += shape.top_k * (8 + FULL)  # indices and weights of the router
        norms += (shape.experts + 1) * FULL * shape.routes_over_all  # its logits and their log-sum-exp
    return sizes * HALF + norms


def saved_bytes(shape: ModelShape, setup: Setup, tokens: int) -> int:
    """What a layer keeps for backward when it is not checkpointed, its input included."""
    each = _saved_by_attention(shape, setup) + _saved_by_mlp(shape)
    return tokens * each + input_bytes(shape, tokens)


def holding_bytes(shape: ModelShape, setup: Setup, tokens: int) -> int:
    """What a layer's experts or MLP projected first, where it is held instead of computed again; experts have it in
    float32 where the others are float16."""
    width = FULL if shape.experts and setup.dtype == "fp16" else HALF
    return tokens * max(shape.top_k, 1) * 2 * shape.intermediate * width


def surviving_bytes(shape: ModelShape, setup: Setup, tokens: int) -> list[int]:
    """By layer, the output and the normalisers of full attention, where it is ours."""
    each = tokens * (shape.query_size * HALF + shape.heads * FULL) if _is_ours(shape, setup) else 0
    return [each * shape.has_full_attention(index) for index in range(shape.layers)]


def _attention(shape: ModelShape, setup: Setup) -> str | None:
    """The option as ``apply`` understands it for this model. Without sinks ``auto`` counts as torch's ``sdpa``, which
    holds the most of what it may choose."""
    config = setup.config
    sparing = config.attention == "auto" and config.memory_policy == "min_memory" and not shape.has_sinks
    return "triton" if sparing else config.attention


def _is_ours(shape: ModelShape, setup: Setup) -> bool:
    """Whether attention runs by this project's kernels."""
    return shape.has_sinks or _attention(shape, setup) != "auto"


def _padded(shape: ModelShape, setup: Setup) -> tuple[tuple[int, int, int], ...]:
    """Inputs, outputs and padded rank of the adapter of the projections of one expert."""
    ranks = (-(-rank // RANK_STEP) * RANK_STEP for rank in _expert_ranks(shape, setup))
    return tuple((*sizes, rank) for sizes, rank in zip(shape.expert_linears(), ranks, strict=False))


def _by_groups(shape: ModelShape, setup: Setup) -> bool:
    """Whether a few experts are decoded at a time, as ``apply`` decides it."""
    weights = shape.experts * sum(inputs * outputs for inputs, outputs in shape.expert_linears()) * HALF
    sparing = setup.config.memory_policy == "min_memory" and setup.config.experts in ("auto", "triton")
    return sparing and weights > GROUPS_FROM


def decoded_bytes(shape: ModelShape, setup: Setup) -> int:
    """Weights in 16 bits for the pass of one layer, LoRA's rows included; zero where they are used as they lie. By
    groups they are those of one group, and beside them the packed bytes of the layer where they are streamed."""
    if shape.experts:
        if setup.dtype != "mxfp4" and not _adapts_experts(shape, setup):
            return 0
        each = [(inputs + rank) * outputs * HALF for inputs, outputs, rank in _padded(shape, setup)]
        if _by_groups(shape, setup):
            group = max(size * group_size(shape.experts, size, GROUP_BYTES) for size in each)
            return group + (packed_bytes(shape) if _streams(setup) else 0)
        return shape.experts * sum(each)
    if setup.dtype == "nf4":
        return max(inputs * outputs for inputs, outputs in shape.linears().values()) * HALF
    return 0


def staying_bytes(shape: ModelShape, setup: Setup) -> int:
    """What the experts of one layer take when they stay decoded; zero where they can't."""
    if not shape.experts or setup.dtype != "mxfp4" or _streams(setup):
        return 0
    return decoded_bytes(shape, setup) + _scaled_a_bytes(shape, setup)


def _scaled_a_bytes(shape: ModelShape, setup: Setup) -> int:
    return shape.experts * sum(rank * inputs for inputs, _, rank in _padded(shape, setup)) * HALF


def _every(setup: Setup) -> int:
    """Of so many checkpointed layers one input waits."""
    return 2 if setup.config.checkpoint_pairs else 1


def _expert_tile(shape: ModelShape, setup: Setup, tokens: int) -> int:
    """Backward of one tile of tokens through the experts, and the sums of the adapters' gradients."""
    rows = min(tokens, TILE)
    (hidden, twice, first), (size, _, second) = _padded(shape, setup)
    row = (hidden + first) + twice + hidden + (size + second) + size  # x, gate and up, dout, dh, activation
    routing = 4 * 8 + 2 * FULL  # token, expert, order, place; weights and their gradient
    tile = rows * (shape.top_k * (row * HALF + routing) + hidden * FULL)
    return tile + _expert_adapters(shape, setup) * FULL + _scaled_a_bytes(shape, setup)


def _mlp_tile(shape: ModelShape, setup: Setup, tokens: int) -> int:
    """Backward of one tile of tokens through a dense MLP, decoded weights and the sums of the gradients."""
    rows = min(tokens, tiled_mlp.TILE)
    tile = rows * (4 * shape.intermediate + 3 * shape.hidden) * HALF  # gate, up, h, dh; normalised twice, its gradient
    sizes = [size for name, size in shape.linears().items() if name not in ATTENTION_LINEARS]
    decoded = decoded_bytes(shape, setup)
    if decoded and tokens > tiled_mlp.TILE:
        decoded = sum(inputs * outputs for inputs, outputs in sizes) * HALF
    sums = setup.lora_rank * sum(inputs + outputs for inputs, outputs in sizes) if setup.lora_targets == "all" else 0
    return tile + decoded + sums * FULL


def _mlp_backward(shape: ModelShape, setup: Setup, tokens: int) -> int:
    """Beyond what is saved, while the gradient passes the experts or the MLP; the residual's gradient included."""
    residual = 2 * input_bytes(shape, tokens)
    if shape.experts:
        return residual + _expert_tile(shape, setup, tokens) + decoded_bytes(shape, setup)
    return residual + _mlp_tile(shape, setup, tokens)


def _head_group_bytes(shape: ModelShape, setup: Setup, tokens: int) -> int:
    """What flash-attn-4 or cuDNN sum the gradients of one group of heads in, and those before they are copied to their
    places. ``auto`` counts as cuDNN, which takes the most of what it may choose."""
    work = tokens * shape.query_size * (fa4 if setup.config.attention == "fa4" else cudnn).WORK_BYTES
    at_once = fa4.heads_at_once(shape.kv_heads, work)
    whole = work if at_once == shape.kv_heads else work + tokens * (shape.query_size + 2 * shape.kv_size) * HALF
    return whole * at_once // shape.kv_heads


def _attention_backward(shape: ModelShape, setup: Setup, tokens: int) -> int:
    """Beyond what is saved up to there, while the gradient passes attention."""
    query, kv = tokens * shape.query_size, tokens * shape.kv_size
    gradients = 2 * query + 2 * kv  # of o and q, of k and v
    if _is_ours(shape, setup):
        sums = tokens * shape.heads * FULL
        if _attention(shape, setup) == "triton":
            gradients -= query  # o is let go before dq is made
        else:
            sums += _head_group_bytes(shape, setup, tokens)
    else:  # flash attention of torch: dq summed in float32, dk and dv of every query head
        sums = query * FULL + (2 * query * HALF if shape.heads != shape.kv_heads else 0)
    return input_bytes(shape, tokens) + gradients * HALF + sums


def backward_bytes(shape: ModelShape, setup: Setup, tokens: int, coming: int = 0) -> int:
    """The most that one layer's backward holds beside its input: what it saved, and what is being computed.

    Args:
        coming: bytes of the next layer's input on its way, which ``min_memory`` sends for when the tail is over.
    """
    attention = tokens * _saved_by_attention(shape, setup)
    mlp = tokens * _saved_by_mlp(shape) + _mlp_backward(shape, setup, tokens)
    late = setup.config.memory_policy == "min_memory"
    return attention + max(mlp + (0 if late else coming), _attention_backward(shape, setup, tokens) + coming)


def loss_bytes(shape: ModelShape, setup: Setup, tokens: int) -> int:
    """Around the head: the last hidden states, their norm, their gradient, and one chunk of logits."""
    if shape.softcap:  # differentiated by torch: the capped logits and their gradient beside the logits
        chunk = 2 * min(setup.config.loss_mib << 20, tokens * shape.vocab * HALF)
    else:
        chunk = min(min(setup.config.loss_mib, IN_PLACE_MIB) << 20, tokens * shape.vocab * HALF)
    return 3 * input_bytes(shape, tokens) + chunk


@dataclass(frozen=True)
class Peak:
    """The largest moment of a step.

    Attributes:
        device_bytes: in tensors at that moment.
        moment: ``loss``, ``layer N``, ``optimizer``, or before the experts leave the device.
        terms: what the bytes are.
        host_bytes: of layer inputs that wait in host memory.
        streamed_bytes: of weights there.
        plan: which layers are checkpointed, and where their inputs are.
    """

    device_bytes: int
    moment: str
    terms: dict[str, int]
    host_bytes: int
    streamed_bytes: int
    plan: Plan


def streamed_bytes(shape: ModelShape, setup: Setup) -> int:
    """Of weights in host memory."""
    return shape.layers * packed_bytes(shape) + embedding_bytes(shape) if _streams(setup) else 0


def fixed_terms(shape: ModelShape, setup: Setup) -> dict[str, int]:
    """What is on the device all the time."""
    count = shape.layers * adapter_parameters(shape, setup)
    return {
        "base weights": base_bytes(shape, setup) - streamed_bytes(shape, setup),
        "streamed weights": packed_bytes(shape) if _streams(setup) else 0,  # one layer's, on their way
        "adapters": count * FULL,
        "optimizer states": int(count * _STATES[setup.optimizer]),
        "cuBLAS workspace": _WORKSPACE,
    }


def step_peak(shape: ModelShape, setup: Setup, tokens: int, plan: Plan) -> Peak:
    """Walk through one step under ``plan``; ``weights`` of the config is ``resident`` or ``streamed``."""
    layers, one = shape.layers, input_bytes(shape, tokens)
    first = min(plan.first_kept, layers)
    moves = plan.inputs_on_host and one >= setup.config.offload_min_bytes
    in_flight = HostStore.for_policy(setup.config.memory_policy, 0).hold
    kept, holding = saved_bytes(shape, setup, tokens), holding_bytes(shape, setup, tokens)
    surviving = surviving_bytes(shape, setup, tokens)
    staying = staying_bytes(shape, setup)
    fixed = fixed_terms(shape, setup) | {"decoded experts": plan.decoded * staying}
    gradients = adapter_parameters(shape, setup) * FULL

    def inputs(done: int) -> int:
        """How many wait of the checkpointed layers before layer ``done``."""
        return -(-min(done, first) // _every(setup))

    def activations(done: int) -> dict[str, int]:
        """Of the layers before layer ``done``, on the device."""
        return {
            "inputs of checkpointed layers": one * (min(inputs(done), in_flight) if moves else inputs(done)),
            "results of full attention": sum(surviving[plan.first_surviving : min(done, first)]),
            "layers without a checkpoint": kept * max(done - first, 0),
            "first projections held": holding * max(done - max(plan.first_holding, first), 0),
        }

    moments = {"loss": activations(layers) | {"loss": loss_bytes(shape, setup, tokens)}}
    for index in range(layers - 1, -1, -1):
        now = activations(index) | {"gradients": gradients * (layers - 1 - index)}
        coming = one if moves and 0 < index < first else 0
        if moves and index < first:
            now["inputs of checkpointed layers"] = 0  # but for the next, which is in the term below
        if index >= max(plan.first_holding, first):
            now["first projections held"] += holding
        pass_bytes = backward_bytes(shape, setup, tokens, coming) - staying * (index >= layers - plan.decoded)
        moments[f"layer {index}"] = now | {"backward of one layer": one + pass_bytes}
    moments["optimizer"] = {"gradients": gradients * layers}
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    terms = {name: size for name, size in (fixed | moments[moment]).items() if size}
    host = one * inputs(layers) if moves else 0
    return Peak(sum(terms.values()), moment, terms, host, streamed_bytes(shape, setup), plan)


def least_plan(shape: ModelShape, setup: Setup, tokens: int) -> Plan:
    """The plan that holds least on the device under the policy asked for; ``auto`` puts no more inputs on the host than
    ``host_memory_gib`` lets it, and then all stay on the device.
    """
    on_host, limit = setup.config.memory_policy != "on_device", _host_bytes(setup)
    if setup.config.memory_policy == "auto" and limit is not None:
        on_host = input_bytes(shape, tokens) * -(-shape.layers // _every(setup)) <= limit
    return Plan(shape.layers, on_host)


def _host_bytes(setup: Setup) -> int | None:
    limit = setup.config.host_memory_gib
    return None if limit is None else int(limit * 2**30)


def least_bytes(shape: ModelShape, setup: Setup, tokens: int) -> int:
    """What a step takes at the least, beside what is on the device all the time."""
    peak = step_peak(shape, setup, tokens, least_plan(shape, setup, tokens))
    return peak.device_bytes - sum(fixed_terms(shape, setup).values())


def predict(shape: ModelShape, setup: Setup, tokens: int, device_bytes: int | None = None, spend: bool = False) -> Peak:
    """The peak of a step.

    Args:
        tokens: T, of all rows together.
        device_bytes: what the process may have; ``weights="auto"`` goes by it, and streams nothing without.
        spend: under ``memory_policy="auto"``, with what is left spent on layers without a checkpoint; otherwise the
            least that the policy can do with.
    """
    asked, setup = setup, with_weights_placed(shape, setup, tokens, device_bytes)
    peak = _predict(shape, setup, tokens, device_bytes, spend)
    leave = asked.config.weights == "auto" and _streams(setup)
    if device_bytes is None or not leave or _streams_from_the_start(shape, asked, device_bytes):
        return peak
    terms = {name: size for name, size in fixed_terms(shape, _resident(setup)).items() if size}
    if (before := sum(terms.values())) <= peak.device_bytes:
        return peak
    return replace(peak, device_bytes=before, moment="before the experts leave the device", terms=terms)


def _predict(shape: ModelShape, setup: Setup, tokens: int, device_bytes: int | None, spend: bool) -> Peak:
    """``predict`` with the weights in their place."""
    least = step_peak(shape, setup, tokens, least_plan(shape, setup, tokens))
    if device_bytes is None or not spend or setup.config.memory_policy != "auto":
        return least
    one, fixed = input_bytes(shape, tokens), sum(fixed_terms(shape, setup).values())
    every = _every(setup)
    waiting = one * -(-shape.layers // every)
    bare = step_peak(shape, setup, tokens, Plan(shape.layers, True)).device_bytes  # what the plan comes on top of
    if fixed + waiting < device_bytes * PLENTY:  # in the step that is measured, inputs stay on the device
        bare = step_peak(shape, setup, tokens, Plan(shape.layers, False)).device_bytes - waiting
    free = int(device_bytes * (1 - MARGIN)) - bare
    plan = choose(
        max(free, 0),
        [saved_bytes(shape, setup, tokens)] * shape.layers,
        [one * (index % every == 0) for index in range(shape.layers)],
        None,
        [holding_bytes(shape, setup, tokens)] * shape.layers,
        surviving_bytes(shape, setup, tokens),
        staying_bytes(shape, setup),
        _host_bytes(setup),
    )
    return step_peak(shape, setup, tokens, plan)
