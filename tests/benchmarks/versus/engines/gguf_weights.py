"""A Llama-shaped model of transformers as a GGUF file in float32, for llama.cpp.

`metadata` and `tensors` are plain functions; `write` needs the packages gguf and safetensors.

    python -m versus.engines.gguf_weights SOURCE_FOLDER FILE.gguf     with a text for each token, for llama.cpp's server
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ARCHITECTURE = "llama"
WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
OF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def metadata(config: Mapping[str, Any], has_tokens: bool = False) -> dict[str, str | int | float]:
    """Return the keys of the file for a config.json. There is no tokenizer: requests are token ids.

    has_tokens: whether the file has a text for each token.
    """
    heads = config["num_attention_heads"]
    rotary = config.get("rope_parameters") or {}
    return {
        "tokenizer.ggml.model": "llama" if has_tokens else "none",
        f"{ARCHITECTURE}.vocab_size": config["vocab_size"],
        f"{ARCHITECTURE}.context_length": config["max_position_embeddings"],
        f"{ARCHITECTURE}.embedding_length": config["hidden_size"],
        f"{ARCHITECTURE}.block_count": config["num_hidden_layers"],
        f"{ARCHITECTURE}.feed_forward_length": config["intermediate_size"],
        f"{ARCHITECTURE}.attention.head_count": heads,
        f"{ARCHITECTURE}.attention.head_count_kv": config.get("num_key_value_heads") or heads,
        f"{ARCHITECTURE}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{ARCHITECTURE}.rope.dimension_count": config["hidden_size"] // heads,
        f"{ARCHITECTURE}.rope.freq_base": float(rotary.get("rope_theta") or config.get("rope_theta") or 1e4),
    }


def tensors(config: Mapping[str, Any], weights: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the name in the file and the array of each weight. ValueError for a weight that has no place in it."""
    heads = config["num_attention_heads"]
    rotated = {"attn_q": heads, "attn_k": config.get("num_key_value_heads") or heads}
    for name, array in weights.items():
        if name in WHOLE:
            yield WHOLE[name], array
            continue
        prefix, _, rest = name.removeprefix("model.layers.").partition(".")
        part = OF_LAYER.get(rest.removesuffix(".weight"))
        if part is None or not prefix.isdigit():
            raise ValueError(f"{name} has no place in a GGUF file of a Llama")
        yield f"blk.{prefix}.{part}.weight", interleaved(array, rotated[part]) if part in rotated else array


def interleaved(weight: Any, heads: int) -> Any:
    """Return the rows of a projection in the order of llama.cpp.

    transformers rotates position i of a head with position i + half; llama.cpp rotates 2i with 2i + 1.
    """
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def write(source: Path, path: Path, has_tokens: bool = False) -> None:
    """Write the model of a transformers folder as a GGUF file.

    has_tokens: whether each token gets a text, its number: llama.cpp's server writes no answer without texts.
    """
    import gguf
    import numpy as np
    from safetensors.numpy import load_file

    config = json.loads((source / "config.json").read_text())
    weights: dict[str, Any] = {}
    for file in sorted(source.glob("*.safetensors")):
        weights |= load_file(file)
    writer = gguf.GGUFWriter(path, ARCHITECTURE)
    add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
    for key, value in metadata(config, has_tokens).items():
        add[type(value)](key, value)
    if has_tokens:
        size = config["vocab_size"]
        writer.add_token_list([f"t{id_}" for id_ in range(size)])
        writer.add_token_scores([0.0] * size)
        writer.add_token_types([gguf.TokenType.NORMAL] * size)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for name, array in tensors(config, weights):
        writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]), has_tokens=True)
