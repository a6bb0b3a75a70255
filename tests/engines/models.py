"""A model for real engines that needs no download: a small random Qwen2 with a byte-level tokenizer.

It is written file by file in the public formats (config.json, tokenizer.json, safetensors), so no engine is needed to
create it. The spread of the weights is wide on purpose: greedy output of two seeds differs from the first tokens on.
"""

import json
from pathlib import Path
from typing import Final, NamedTuple

import torch
from safetensors.torch import save_file

HIDDEN, LAYERS, HEADS, KV_HEADS, VOCABULARY = 256, 12, 4, 2, 320
"""vLLM's attention on CPU refuses heads of 16; 256 / 4 = 64 is one that it takes."""
EOS = 256


class Size(NamedTuple):
    """Of a model. A head has 64 numbers."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int


SMALL: Final = Size(HIDDEN, LAYERS, HEADS, KV_HEADS)


def save_model(directory: Path, seed: int, size: Size = SMALL) -> Path:
    """Write config, tokenizer and weights of `seed`. Returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    _write(directory / "config.json", _config(size))
    _write(directory / "tokenizer.json", _tokenizer())
    _write(directory / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"})
    _write(directory / "generation_config.json", {"eos_token_id": EOS})
    return save_weights(directory, weights(seed, size))


def save_weights(directory: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Write weights alone, as a trainer does for a sync. Returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def weights(seed: int, size: Size = SMALL) -> dict[str, torch.Tensor]:
    """The tensors of one model, named as Qwen2 checkpoints name them; float32."""
    draw = torch.Generator().manual_seed(seed)

    hidden = size.hidden

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw) * 0.5

    kv = hidden // size.heads * size.kv_heads
    made = {"model.embed_tokens.weight": normal(VOCABULARY, hidden), "lm_head.weight": normal(VOCABULARY, hidden)}
    made["model.norm.weight"] = torch.ones(hidden)
    for layer in range(size.layers):
        at = f"model.layers.{layer}"
        for name, rows in (("q", hidden), ("k", kv), ("v", kv)):
            made[f"{at}.self_attn.{name}_proj.weight"] = normal(rows, hidden)
            made[f"{at}.self_attn.{name}_proj.bias"] = normal(rows)
        made[f"{at}.self_attn.o_proj.weight"] = normal(hidden, hidden)
        for name in ("gate", "up", "down"):
            made[f"{at}.mlp.{name}_proj.weight"] = normal(hidden, hidden)
        for name in ("input_layernorm", "post_attention_layernorm"):
            made[f"{at}.{name}.weight"] = torch.ones(hidden)
    return made


def _write(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=1))


def _config(size: Size) -> dict[str, object]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": VOCABULARY,
        "hidden_size": size.hidden,
        "intermediate_size": size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "max_position_embeddings": 4096,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "initializer_range": 0.5,
        "bos_token_id": EOS,
        "eos_token_id": EOS,
        "torch_dtype": "float32",
    }


def _tokenizer() -> dict[str, object]:
    """Byte-level BPE without merges: one token a byte, spelled with GPT-2's printable letters."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letter = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    eos = {"id": EOS, "content": "<eos>", "special": True, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [eos | {"single_word": False, "lstrip": False, "rstrip": False}],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {letter[byte]: byte for byte in range(256)} | {"<eos>": EOS},
            "merges": [],
        },
    }
