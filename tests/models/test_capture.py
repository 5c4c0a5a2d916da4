"""Captured queries, keys and values are those that the model attends with, and capturing leaves no trace."""

import pytest
import torch
from torch import Tensor

from mva_ref.models.capture import NAME, capture

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 40, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 4, "pad_token_id": 0, "initializer_range": 0.5,
}  # fmt: skip
CONFIGURATIONS: dict[str, tuple[str, dict[str, float]]] = {
    "grouped heads": ("LlamaConfig", {}),
    "one head a group": ("LlamaConfig", {"num_key_value_heads": 6}),
    "sliding window": ("MistralConfig", {"sliding_window": 4}),
    "normalised queries and keys": ("Qwen3Config", {}),
    "a scale of its own": ("GraniteConfig", {"attention_multiplier": 1.5}),
}


def tiny(kind: str = "grouped heads", attention: str = "sdpa", **changes):
    torch.manual_seed(1)
    name, own = CONFIGURATIONS[kind]
    config = getattr(transformers, name)(**SMALL | own | changes)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(1, 40, (2, 11), generator=torch.Generator().manual_seed(2))


def attention_outputs(model, call) -> list[Tensor]:
    """What enters each output projection while `call` runs: [B, T, HQ V] for every layer, and last the final hidden state."""
    outputs: list[Tensor] = []
    hooks = [layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: outputs.append(args[0])) for layer in model.model.layers]
    hooks.append(model.model.norm.register_forward_hook(lambda _, args, output: outputs.append(output)))
    try:
        call()
    finally:
        for hook in hooks:
            hook.remove()
    return outputs


@pytest.mark.parametrize("kind", CONFIGURATIONS)
def test_the_model_computes_the_same_with_and_without_capture(kind, ids):
    model = tiny(kind)
    without = attention_outputs(model, lambda: model(ids))
    during = attention_outputs(model, lambda: capture(model, ids))
    after = attention_outputs(model, lambda: model(ids))
    assert len(without) == 4
    for a, b, c in zip(without, during, after, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        assert torch.equal(a, c), "capturing changed the model"


@pytest.mark.parametrize("kind", [kind for kind in CONFIGURATIONS if kind != "sliding window"])
def test_softmax_of_the_captured_tensors_is_the_attention_of_the_model(kind, ids):
    model = tiny(kind)
    expected = attention_outputs(model, lambda: model(ids))
    future = torch.ones(11, 11, dtype=torch.bool).triu(1)
    for layer, (q, k, v, scale) in capture(model, ids).items():
        k, v = (x.double().repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
        scores = scale * torch.einsum("bthd,bihd->bhti", q.double(), k)
        o = torch.einsum("bhti,bihv->bthv", scores.masked_fill(future, -torch.inf).softmax(-1), v)
        torch.testing.assert_close(o.flatten(2), expected[layer].double(), rtol=1e-5, atol=1e-5)


def test_keys_are_captured_after_the_rotary_embedding_and_per_group(ids):
    model = tiny()
    cached = model(ids, use_cache=True).past_key_values
    captured = capture(model, ids)
    assert list(captured) == [0, 1, 2]
    for layer, (q, k, v, scale) in captured.items():
        assert (q.shape, k.shape, v.shape, scale) == ((2, 11, 6, 4), (2, 11, 2, 4), (2, 11, 2, 4), 0.5)
        torch.testing.assert_close(k, cached.layers[layer].keys.transpose(1, 2))
        torch.testing.assert_close(v, cached.layers[layer].values.transpose(1, 2))
        assert not any(x.requires_grad for x in (q, k, v))


def test_only_the_layers_named_are_returned(ids):
    model = tiny()
    everything, some = capture(model, ids), capture(model, ids, layers=[2, 0])
    assert list(some) == [0, 2]
    assert all(torch.equal(some[layer].q, everything[layer].q) for layer in some)


def test_a_list_and_a_vector_are_one_sequence(ids):
    model = tiny()
    assert torch.equal(capture(model, ids[0].tolist())[2].v, capture(model, ids[0])[2].v)
    assert capture(model, ids[0])[2].v.shape == (1, 11, 2, 4)


def test_a_later_token_changes_nothing_before_it(ids):
    model, changed = tiny(), ids.clone()
    changed[:, 7:] = 39 - changed[:, 7:]
    a, b = capture(model, ids), capture(model, changed)
    assert all(torch.equal(x[:, :7], y[:, :7]) for layer in a for x, y in zip(a[layer][:3], b[layer][:3], strict=True))


def test_padding_is_not_attended_to(ids):
    model = tiny()
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), ids], 1)
    expected = capture(model, ids)[2].v  # of the last layer: it depends on the attention of the others, and has no rotation
    torch.testing.assert_close(capture(model, padded, attention_mask=(padded != 0).long())[2].v[:, 3:], expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(capture(model, padded)[2].v[:, 3:], expected, rtol=1e-2, atol=1e-2)


def test_half_precision_models_give_float32(ids):
    assert all(x.dtype == torch.float32 for x in capture(tiny().bfloat16(), ids)[1][:3])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_attention_implementation_is_put_back(attention, ids):
    model = tiny(attention=attention)
    capture(model, ids)
    assert model.config._attn_implementation == attention


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_attention_implementation_is_put_back_after_an_exception(attention, ids):
    model = tiny(attention=attention)

    def fail(*_):
        assert model.config._attn_implementation == NAME
        raise RuntimeError("in the middle of the model")

    hook = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        capture(model, ids)
    assert model.config._attn_implementation == attention
    hook.remove()
    assert list(capture(model, ids)) == [0, 1, 2]


@pytest.mark.parametrize("layer", [3, -1])
def test_a_layer_that_does_not_exist_fails_clearly(layer, ids):
    with pytest.raises(ValueError, match=rf"layers: no attention layer \[{layer}\]; the model has 0 to 2"):
        capture(tiny(), ids, layers=[0, layer])


def test_a_model_without_attention_fails_clearly(ids):
    config = transformers.MambaConfig(vocab_size=40, hidden_size=8, state_size=2, num_hidden_layers=1)
    with pytest.raises(ValueError, match="MambaForCausalLM called no attention function"):
        capture(transformers.AutoModelForCausalLM.from_config(config), ids)


def test_attention_that_q_k_v_do_not_determine_is_refused(ids):
    model = transformers.AutoModelForCausalLM.from_config(transformers.Gemma2Config(**SMALL), attn_implementation="eager")
    with pytest.raises(ValueError, match="attends with softcap"):
        capture(model, ids)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("bad", [[], torch.zeros(3), torch.zeros(1, 2, 3, dtype=torch.long)])
def test_token_ids_of_another_form_fail_clearly(bad):
    with pytest.raises(ValueError, match="token_ids: expected integers of shape"):
        capture(tiny(), bad)


@pytest.mark.model
def test_a_trained_model_attends_to_the_first_tokens():
    """The measured table of the theory, two cells: error of a window of 64 in layer 3, without and with 4 sinks."""
    from analysis import texts
    from mva_ref.models.load import find_smollm2, load

    try:
        find_smollm2()
    except FileNotFoundError as absent:
        pytest.skip(str(absent))
    q, k, v, scale = capture(load("smollm2")[0], texts.load("topics"), layers=[3])[3]
    assert (q.shape, k.shape, v.shape, scale) == ((1, 512, 9, 64), (1, 512, 3, 64), (1, 512, 3, 64), 0.125)
    q, k, v = (x.double().repeat_interleave(9 // x.shape[2], 2).transpose(1, 2) for x in (q, k, v))
    age = torch.arange(512)[:, None] - torch.arange(512)

    def attend(seen: Tensor) -> Tensor:
        return (scale * q @ k.mT).masked_fill(~seen, -torch.inf).softmax(-1) @ v

    exact = attend(age >= 0)
    window = (age >= 0) & (age < 64)
    sinks = (age >= 0) & (torch.arange(512) < 4)
    errors = [((attend(seen) - exact).norm() / exact.norm()).item() for seen in (window, window | sinks)]
    assert errors == pytest.approx([1.17, 0.365], abs=0.005)
