"""Front door of sink attention: checks every argument once, and chooses the implementation.

Shape suffixes: B batch, T queries, S keys, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from unsloth_plugins.core.errors import ShapeError, UnsupportedError
from unsloth_plugins.core.sink_attention.backends import Backend, Call, resolve_backend
from unsloth_plugins.core.sink_attention.masks import number_runs
from unsloth_plugins.core.sink_attention.reference import sink_attention_reference


def sink_attention(
    q_BTHD: torch.Tensor,
    k_BSKD: torch.Tensor,
    v_BSKD: torch.Tensor,
    sink_H: torch.Tensor | None = None,
    *,
    window: int | None = None,
    documents_BS: torch.Tensor | None = None,
    key_mask_BS: torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    block_size: int = 256,
    head_groups: int = 1,
    backend: Backend = "auto",
    deterministic: bool | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Causal attention whose softmax has one more column per head, the sink, that owns no value.

    Args:
        q_BTHD: [B, T, H, D] floating point queries, T <= S; query t sits at key position S - T + t.
        k_BSKD: [B, S, K, D] keys of the same dtype; K divides H.
        v_BSKD: [B, S, K, D] values of the same dtype.
        sink_H: [H] sink logits, one per query head, any floating dtype; None for ordinary attention.
        window: number of keys that a query sees, itself included (transformers' ``sliding_window``); None for all.
        documents_BS: [B, S] integer ids; a document is a run of equal ids, and a query sees only keys of its own. An id
            that comes back after another one is a new document.
        key_mask_BS: [B, S]; keys where it is False (or zero) are never seen.
        scale: factor of q . k; None means D ** -0.5.
        softcap: logits become softcap * tanh(logits / softcap); None means off.
        block_size: queries that the reference handles at a time; its memory is proportional to it.
        head_groups: the kernels' backward pass takes the key/value heads in so many groups, one after the other, so
            that copies of the gradient of o, and the float32 sums of ``fa4`` and ``cudnn``, exist for one group at a
            time; the row sums of ``triton``, one float32 per query and head, exist for all. Same result.
        backend: ``triton`` for our kernels (CUDA, D <= 256, fp16, bf16 or fp32), ``fa4`` for flash-attn-4,
            ``cudnn`` for the kernels that torch brings and ``flex`` for torch's flex attention where they can run,
            ``eager`` for plain PyTorch. ``auto`` is ``triton`` wherever it can run, or ``fa4`` or ``cudnn`` where they
            are there and measured faster (`backends`).
        deterministic: whether equal inputs give equal bits also from ``fa4``, whose sums are in no fixed order
            otherwise; ``None`` follows ``torch.are_deterministic_algorithms_enabled()``. ``triton`` and ``eager``
            always are; ``cudnn`` and ``flex`` promise nothing: ``cudnn`` is not taken then, ``flex`` refuses ``True``.
        return_lse: also return the log normaliser.

    Returns:
        o_BTHD [B, T, H, D] in the dtype of q; with ``return_lse`` also lse_BHT [B, H, T] in float32 (float64 for
        float64 inputs), the sink included. Both are differentiable, once. A query that sees no key gives o = 0 and
        lse = sink (-inf without one).

    Raises:
        ShapeError: an argument does not fit the others.
        UnsupportedError: ``backend`` can't run these inputs.
    """
    _check(q_BTHD, k_BSKD, v_BSKD, sink_H)
    for name, mask in (("documents_BS", documents_BS), ("key_mask_BS", key_mask_BS)):
        if mask is not None:
            _check_row_mask(name, mask, k_BSKD)
    _check_number("window", window, at_least_one=True)
    _check_number("block_size", block_size, at_least_one=True)
    _check_number("head_groups", head_groups, at_least_one=True)
    _check_number("softcap", softcap, at_least_one=False)
    key_mask_BS = None if key_mask_BS is None else key_mask_BS.to(torch.bool)
    scale = q_BTHD.shape[-1] ** -0.5 if scale is None else scale
    same_bits = deterministic
    if same_bits is None:
        same_bits = torch.are_deterministic_algorithms_enabled()
    call = Call(
        q_BTHD.device,
        q_BTHD.dtype,
        q_BTHD.shape[-1],
        q_BTHD.shape[1],
        k_BSKD.shape[1],
        window,
        softcap is not None or scale <= 0,
        q_BTHD.numel(),
        lse=return_lse,
        deterministic=same_bits,
    )
    resolved, _ = resolve_backend(backend, call)
    if resolved in ("fa4", "cudnn"):  # what the masks say is on the device
        from unsloth_plugins.core.sink_attention.fa4 import boundaries, has_holes

        padded, packed = has_holes(key_mask_BS), boundaries(documents_BS) is not None
        if padded or packed:
            resolved, _ = resolve_backend(backend, replace(call, padded=padded, packed=packed))
    given: dict[str, Any] = {"window": window, "documents_BS": documents_BS, "scale": scale}
    capped: dict[str, Any] = {"key_mask_BS": key_mask_BS, "softcap": softcap}
    if resolved == "cudnn":
        from unsloth_plugins.core.sink_attention.cudnn import sink_attention_cudnn

        return sink_attention_cudnn(q_BTHD, k_BSKD, v_BSKD, sink_H, scale=scale, head_groups=head_groups)
    if resolved == "fa4":
        from unsloth_plugins.core.sink_attention.fa4 import sink_attention_fa4

        o_BTHD, lse_BHT = sink_attention_fa4(
            q_BTHD, k_BSKD, v_BSKD, sink_H, **given, deterministic=same_bits, head_groups=head_groups
        )
    elif resolved == "flex":
        from unsloth_plugins.core.sink_attention.flex import sink_attention_flex

        if deterministic:
            raise UnsupportedError(
                expected="a backend that promises the same bits, for deterministic=True",
                got="'flex', which does not",
                remedy="Choose 'triton' or 'fa4'.",
            )
        o_BTHD, lse_BHT = sink_attention_flex(q_BTHD, k_BSKD, v_BSKD, sink_H, **given, **capped)
    elif resolved == "triton":
        from unsloth_plugins.core.sink_attention.triton_op import sink_attention_triton

        o_BTHD, lse_BHT = sink_attention_triton(
            q_BTHD, k_BSKD, v_BSKD, sink_H, **given, **capped, head_groups=head_groups
        )
    else:
        given["documents_BS"] = None if documents_BS is None else number_runs(documents_BS)
        o_BTHD, lse_BHT = sink_attention_reference(
            q_BTHD, k_BSKD, v_BSKD, sink_H, **given, **capped, block_size=block_size
        )
    return (o_BTHD, lse_BHT) if return_lse else o_BTHD


def _check(q_BTHD: torch.Tensor, k_BSKD: torch.Tensor, v_BSKD: torch.Tensor, sink_H: torch.Tensor | None) -> None:
    shapes = f"q {list(q_BTHD.shape)}, k {list(k_BSKD.shape)}, v {list(v_BSKD.shape)}"
    if not q_BTHD.dim() == k_BSKD.dim() == v_BSKD.dim() == 4:
        raise ShapeError(
            expected="q, k and v with 4 dimensions [batch, tokens, heads, head size]",
            got=shapes,
            remedy="Add the batch dimension, or transpose [batch, heads, tokens, head size] with .transpose(1, 2).",
        )
    if k_BSKD.shape != v_BSKD.shape:
        raise ShapeError(
            expected="k and v of one shape", got=shapes, remedy="Pad v to the head size of k, or pass matching tensors."
        )
    if q_BTHD.shape[0] != k_BSKD.shape[0] or q_BTHD.shape[3] != k_BSKD.shape[3]:
        raise ShapeError(
            expected="q and k with one batch size and one head size",
            got=shapes,
            remedy="Use the layout [batch, tokens, heads, head size] for all three.",
        )
    if k_BSKD.shape[2] == 0 or q_BTHD.shape[2] % k_BSKD.shape[2] != 0:
        raise ShapeError(
            expected="a number of query heads that the number of key heads divides",
            got=f"{q_BTHD.shape[2]} query heads, {k_BSKD.shape[2]} key heads",
            remedy="Check that heads are dimension 2: the layout is [batch, tokens, heads, head size].",
        )
    if q_BTHD.shape[1] > k_BSKD.shape[1]:
        raise ShapeError(
            expected="no more queries than keys, since query t sits at key position S - T + t",
            got=f"T = {q_BTHD.shape[1]}, S = {k_BSKD.shape[1]}",
            remedy="Pass the cached keys together with the new ones.",
        )
    if not (q_BTHD.is_floating_point() and q_BTHD.dtype == k_BSKD.dtype == v_BSKD.dtype):
        raise ShapeError(
            expected="q, k and v of one floating dtype",
            got=f"q {q_BTHD.dtype}, k {k_BSKD.dtype}, v {v_BSKD.dtype}",
            remedy="Cast them to one dtype.",
        )
    if sink_H is not None and (sink_H.dim() != 1 or sink_H.shape[0] != q_BTHD.shape[2]):
        raise ShapeError(
            expected=f"sink_H of shape [{q_BTHD.shape[2]}]",
            got=str(list(sink_H.shape)),
            remedy="Pass one sink per query head, not per key head.",
        )


def _check_row_mask(name: str, mask: torch.Tensor, k_BSKD: torch.Tensor) -> None:
    if mask.shape != k_BSKD.shape[:2]:
        raise ShapeError(
            expected=f"{name} of shape {list(k_BSKD.shape[:2])}, one entry per key",
            got=str(list(mask.shape)),
            remedy="Expand it over the batch and cover the cached keys too.",
        )


def _check_number(name: str, value: float | None, *, at_least_one: bool) -> None:
    if value is None:
        return
    if at_least_one:
        good, expected = isinstance(value, int) and not isinstance(value, bool) and value >= 1, "an integer >= 1"
    else:
        good, expected = value > 0, "a number > 0"
    if not good:
        raise ShapeError(expected=f"{name} to be {expected}", got=repr(value), remedy=f"Change {name}.")
