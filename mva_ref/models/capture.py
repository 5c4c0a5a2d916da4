"""Capture the queries, keys and values of a pretrained decoder, exactly as its softmax attention receives them."""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "mva_ref_capture"
BEYOND_QK = ("softcap", "s_aux", "position_bias")  # what else can enter the scores: soft capping, learned sinks, a bias


class QKV(NamedTuple):
    """Input of one attention layer, float32, after the rotary embedding.

    Shapes:    q [B, T, HQ, D], k [B, T, H, D], v [B, T, H, V]; the scores are scale * q . k
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float


class _Recording(NamedTuple):
    wanted: frozenset[int] | None  # None: every layer
    layers: dict[int, QKV]
    seen: set[int]


# The attention function is registered once for the process; what it records into belongs to one call, and to one thread.
_recording: ContextVar[_Recording] = ContextVar("recording")


def capture(
    model: PreTrainedModel, token_ids: list[int] | Tensor, layers: Iterable[int] | None = None, attention_mask: Tensor | None = None
) -> dict[int, QKV]:
    """q, k, v of every layer, or of the layers named, while the model reads the tokens.

    The model computes its true attention meanwhile, so that each layer sees the input it would see otherwise. Its attention
    implementation is put back afterwards, whatever happens. Call it in evaluation mode: dropout would act here as in training.

    Shapes:    token_ids a list of T, [T] or [B, T]; attention_mask [B, T], 0 at padding -> {layer: QKV}, in order of layers
    Numerics:  the tensors as the model computes them, in its dtype, then float32. Rows at padding are captured and mean nothing.
               A layer with a sliding window gives all its keys; the window is not part of the result.
    Errors:    ValueError for a layer that does not exist; for a model that does not dispatch through AttentionInterface; for attention
               that q, k and v do not determine (soft capping, learned sinks, a position bias); for token ids of another form.
    """
    ids = torch.as_tensor(token_ids)
    if ids.ndim not in (1, 2) or ids.numel() == 0 or ids.is_floating_point():
        raise ValueError(f"token_ids: expected integers of shape [T] or [B, T], got {ids.dtype} of shape {list(ids.shape)}")
    ids = ids.long().to(model.device).view(-1, ids.shape[-1])
    mask = None if attention_mask is None else attention_mask.to(model.device)
    recording = _Recording(None if layers is None else frozenset(layers), {}, set())

    before = _implementations(model)
    _register()
    token = _recording.set(recording)
    try:
        model.set_attn_implementation(NAME)
        with torch.no_grad():
            model.base_model(input_ids=ids, attention_mask=mask, use_cache=False)
    finally:
        _recording.reset(token)
        model.set_attn_implementation(before)

    if not recording.seen:
        raise ValueError(f"model: {type(model).__name__} called no attention function through the AttentionInterface of transformers")
    if missing := sorted((recording.wanted or frozenset()) - recording.seen):
        raise ValueError(f"layers: no attention layer {missing}; the model has {_spans(recording.seen)}")
    return dict(sorted(recording.layers.items()))


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, _attention)
    # Without a mask function of the same name, padding would be dropped silently.
    AttentionMaskInterface.register(NAME, sdpa_mask)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Record q, k, v, then attend.

    Shapes:    query [B, HQ, T, D], key [B, H, T, D], value [B, H, T, V], attention_mask [B, 1, T, T] or None -> [B, T, HQ, V]
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    _record(module, query, key, value, scale, options)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = causal and attention_mask is None  # a mask, where there is one, holds causality already
    grouped = query.shape[1] != key.shape[1]
    o = nn.functional.scaled_dot_product_attention(
        query, key, value, attention_mask, dropout, is_causal=causal, scale=scale, enable_gqa=grouped
    )
    return o.transpose(1, 2).contiguous(), None


def _record(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float, options: dict[str, Any]) -> None:
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise ValueError(f"model: {type(module).__name__} has no layer_idx, so its layers cannot be told apart")
    if beyond := [name for name in BEYOND_QK if options.get(name) is not None]:
        raise ValueError(f"model: {type(module).__name__} attends with {', '.join(beyond)}, which q, k and v do not determine")
    recording = _recording.get()
    if layer in recording.seen:
        raise ValueError(f"model: layer {layer} attended twice in one pass; only decoders with one attention a layer can be captured")
    recording.seen.add(layer)
    if recording.wanted is None or layer in recording.wanted:
        q, k, v = (x.transpose(1, 2).float().contiguous() for x in (query, key, value))
        recording.layers[layer] = QKV(q, k, v, float(scale))


def _implementations(model: PreTrainedModel) -> dict[str, str | None]:
    """The attention implementation of the model and of each part that has a configuration of its own."""
    config = model.config
    parts = {name: part for name in config.sub_configs if (part := getattr(config, name, None)) is not None}
    return {"": config._attn_implementation} | {name: part._attn_implementation for name, part in parts.items()}


def _spans(numbers: set[int]) -> str:
    """{0, 1, 2, 5} -> "0 to 2, 5"."""
    spans: list[list[int]] = []
    for n in sorted(numbers):
        if spans and n == spans[-1][1] + 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in spans)
