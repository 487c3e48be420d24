"""Tiny random checkpoints: exactness tests need a model, not trained weights.

Weights are larger than a trained model's would be, so that greedy choices are far apart and every token
depends visibly on the whole context.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from engine_adapter.engine.checkpoint.loader import LoadedModel, expected_shapes
from engine_adapter.engine.core.config import EngineConfig
from engine_adapter.engine.core.llm_engine import LLMEngine
from engine_adapter.engine.core.step_output import StepOutput
from engine_adapter.engine.kv.block_hash import root_hash
from engine_adapter.engine.kv.sequence import EngineRequest
from engine_adapter.engine.model.model_config import ModelConfig
from engine_adapter.engine.model.sampling import SamplingParams

TINY = ModelConfig(
    model_type="llama",
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=512,
)


def random_weights(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return fp32 weights under Hugging Face's names, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in expected_shapes(config).items():
        if name.endswith("norm.weight"):
            weights[name] = 1 + 0.2 * torch.randn(shape, generator=generator)
        else:
            weights[name] = torch.randn(shape, generator=generator) * 0.25
    return weights


def tiny_loaded(config: ModelConfig = TINY, seed: int = 0) -> LoadedModel:
    """Return a fresh tiny model; the engine takes its weights over, so make one per engine."""
    fingerprint = root_hash({"config": repr(config), "seed": str(seed)}).hex()
    return LoadedModel(
        config=config, weights=random_weights(config, seed), dtype=torch.float32, fingerprint=fingerprint
    )


def tiny_engine(model: ModelConfig = TINY, *, seed: int = 0, **settings: Any) -> LLMEngine:
    """Return an fp32 engine, by default with 64 blocks of 4 tokens."""
    return LLMEngine(tiny_loaded(model, seed), tiny_settings(**settings))


def tiny_settings(**settings: Any) -> EngineConfig:
    return EngineConfig(**{"dtype": "fp32", "block_size": 4, "num_kv_blocks": 64, **settings})


def engine_like(reference: PreTrainedModel, **settings: Any) -> LLMEngine:
    """Return an fp32 engine with the weights of a model of transformers."""
    config = ModelConfig.from_hf_config(reference.config.to_dict())
    names = expected_shapes(config)
    weights = {name: tensor.clone() for name, tensor in reference.state_dict().items() if name in names}
    loaded = LoadedModel(config=config, weights=weights, dtype=torch.float32, fingerprint="00" * 32)
    return LLMEngine(
        loaded, EngineConfig(**{"dtype": "fp32", "block_size": 4, "num_kv_blocks": 64, **settings})
    )


def greedy_request(request_id: str, prompt: list[int], max_tokens: int = 8, **fields: Any) -> EngineRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return EngineRequest(
        **{"request_id": request_id, "prompt_token_ids": prompt, "sampling": sampling, **fields}
    )


def run_all(engine: LLMEngine, requests: list[EngineRequest]) -> dict[str, list[StepOutput]]:
    """Add the requests, step until idle, and return each one's outputs."""
    for request in requests:
        engine.add_request(request)
    outputs: dict[str, list[StepOutput]] = {request.request_id: [] for request in requests}
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id].append(output)
    return outputs


def tokens_of(outputs: list[StepOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def generate(engine: LLMEngine, prompt: list[int], max_tokens: int = 8, **fields: Any) -> list[int]:
    """Run one greedy request alone and return its tokens."""
    request = greedy_request("only", prompt, max_tokens, **fields)
    return tokens_of(run_all(engine, [request])["only"])
