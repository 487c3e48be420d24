"""Our forward pass against transformers' own, on random tiny checkpoints of each family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from engine_adapter.engine.checkpoint.loader import expected_shapes
from engine_adapter.engine.kv.kv_storage import KVStorage
from engine_adapter.engine.model.linear import _PackedLinear, is_halvable, make_linear, product_works
from engine_adapter.engine.model.model import LlamaModel, rms_norm
from engine_adapter.engine.model.model_config import ModelConfig, RopeType, UnsupportedModel
from paged_kv.batch import AttentionBatch
from paged_kv.layout import KVDtype

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("LlamaConfig", {"num_key_value_heads": 4}),
    "llama_biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama3": (
        "LlamaConfig",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "rope_theta": 5000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "llama_linear": ("LlamaConfig", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "smollm2": ("LlamaConfig", {"tie_word_embeddings": True, "rope_theta": 100_000.0}),
    "mistral": ("MistralConfig", {"sliding_window": None, "head_dim": 16}),
    "mistral_window": ("MistralConfig", {"sliding_window": 7}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2_window": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "qwen3_bias": ("Qwen3Config", {"head_dim": 8, "attention_bias": True}),
    "qwen3_yarn": (
        "Qwen3Config",
        {
            "head_dim": 16,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "llama_yarn_mscale": (
        "LlamaConfig",
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
                "beta_fast": 16.0,
                "truncate": False,
            }
        },
    ),
}


def reference_model(family: str) -> Any:
    class_name, extra = FAMILIES[family]
    config = getattr(transformers, class_name)(**{**SMALL, **extra})
    config._attn_implementation = "eager"
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Larger than the default: norms and biases must matter, attention must be peaked.
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (1.0 if "norm" in name else 0.0))
    return model


def paged_logits(
    model: LlamaModel, config: ModelConfig, token_ids: list[int], chunks: list[int]
) -> torch.Tensor:
    """Run the tokens in chunks through paged KV and return all logits."""
    block_size, num_blocks = 4, 40
    storage = KVStorage(
        config,
        num_blocks=num_blocks,
        block_size=block_size,
        layer_dtypes=[KVDtype.FLOAT32] * config.num_hidden_layers,
    )
    table = list(range(num_blocks))[::-1]
    pieces, start = [], 0
    for length in chunks:
        end = start + length
        batch = AttentionBatch.build(
            query_lens=[length], context_lens=[end], block_tables=[table], block_size=block_size
        )
        with torch.inference_mode():
            logits = model.forward(
                torch.tensor(token_ids[start:end]),
                torch.arange(start, end),
                batch,
                storage.layers,
                torch.arange(length),
            )
        assert logits is not None
        pieces.append(logits)
        start = end
    assert start == len(token_ids)
    return torch.cat(pieces)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str) -> None:
    """Every position's logits equal those of transformers, for one chunk and for chunks and decodes."""
    reference = reference_model(family)
    config = ModelConfig.from_hf_config(reference.config.to_dict())
    weights = {
        name: tensor for name, tensor in reference.state_dict().items() if name in expected_shapes(config)
    }
    assert set(weights) == set(expected_shapes(config))
    unused = {name for name in reference.state_dict() if name not in weights} - {"lm_head.weight"}
    assert not unused, "a tensor that the forward pass never reads"
    token_ids = [(17 * i * i + 3 * i) % SMALL["vocab_size"] for i in range(90)]
    with torch.inference_mode():
        expected = reference(torch.tensor([token_ids])).logits[0]
    model = LlamaModel(config, dict(weights))
    for chunks in ([90], [13, 1, 1, 30, 45]):
        actual = paged_logits(model, config, token_ids, chunks)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-4)


def test_plain_and_packed_linears_agree() -> None:
    """The packed product, where the machine has it, equals the plain one to fp32 rounding."""
    weight, bias, rows = torch.randn(24, 16), torch.randn(24), torch.randn(5, 16)
    plain = make_linear([weight], bias, allow_packed=False)(rows)
    packed = make_linear([weight], bias)(rows)
    torch.testing.assert_close(packed, plain, rtol=1e-5, atol=1e-5)


def test_broken_private_operators_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch's private packing operator raises, the plain product is used."""

    def refuse(*_: object) -> None:
        raise RuntimeError("no such operator here")

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", refuse)
    product_works.cache_clear()
    try:
        assert product_works(_PackedLinear, torch.float32) is False
        rows, weight = torch.randn(2, 8), torch.randn(4, 8)
        torch.testing.assert_close(make_linear([weight], None)(rows), rows @ weight.T)
    finally:
        product_works.cache_clear()


def test_weights_that_are_fp16_numbers_are_kept_as_such() -> None:
    """A bf16 checkpoint gives the fp32 product for any number of rows, with a bias or without."""
    weight, bias = torch.randn(5000, 24).bfloat16().float(), torch.randn(5000)
    weight[0, 0] = 2.0**-18 * 1.4921875  # a bf16 number below fp16's normal range
    assert is_halvable(weight)
    for num_rows in (1, 2, 7, 40):
        rows = torch.randn(num_rows, 24)
        for given in (None, bias):
            product = make_linear([weight], given)(rows)
            torch.testing.assert_close(
                product, torch.nn.functional.linear(rows, weight, given), rtol=1e-5, atol=1e-5
            )


@pytest.mark.parametrize("value", [0.1, 70_000.0, float("inf"), float("nan")])
def test_other_weights_keep_all_their_bits(value: float) -> None:
    """One number that fp16 does not have, too long or too large, and the weight stays fp32."""
    weight = torch.ones(5000, 4)
    assert is_halvable(weight)
    weight[4999, 3] = value
    assert not is_halvable(weight)


def test_rms_norm_computes_in_fp32() -> None:
    """A bf16 row whose squares overflow nothing in fp32 is scaled to unit mean square."""
    rows = torch.full((1, 8), 3e4, dtype=torch.bfloat16)
    normed = rms_norm(rows, torch.ones(8, dtype=torch.bfloat16), 1e-6)
    torch.testing.assert_close(normed, torch.ones(1, 8, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"model_type": "gemma3"}, "gemma3"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": "twice"}, "rope_scaling"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"head_dim": 7}, "head_dim"),
    ],
)
def test_unknown_variants_are_refused_by_name(change: dict[str, object], word: str) -> None:
    """A config that the forward pass cannot honour raises and names the field."""
    raw = {**SMALL, "model_type": "llama", **change}
    with pytest.raises(UnsupportedModel, match=word):
        ModelConfig.from_hf_config(raw)


def test_both_spellings_of_rope_are_read_alike() -> None:
    """`rope_parameters` and the older `rope_theta` + `rope_scaling` give the same config."""
    scaling = {"type": "linear", "factor": 2}
    old = {**SMALL, "model_type": "llama", "rope_theta": 5e5, "rope_scaling": scaling}
    new = {
        **SMALL,
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
    }
    assert ModelConfig.from_hf_config(old) == ModelConfig.from_hf_config(new)
    assert ModelConfig.from_hf_config(old).rope_scaling.rope_type is RopeType.LINEAR


def test_end_of_text_ids_may_be_one_many_or_none() -> None:
    """Config files spell the end-of-sequence id in three ways."""
    raw = {**SMALL, "model_type": "llama"}
    assert ModelConfig.from_hf_config(raw).eos_token_ids == ()
    assert ModelConfig.from_hf_config({**raw, "eos_token_id": 2}).eos_token_ids == (2,)
    assert ModelConfig.from_hf_config({**raw, "eos_token_id": [2, 5]}).eos_token_ids == (2, 5)
