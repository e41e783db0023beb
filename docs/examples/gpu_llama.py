"""Save a small Llama with seeded random weights: gpu_llama.py FOLDER."""

import sys

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

transformers.logging.disable_progress_bar()
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=1000, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256,
)  # fmt: skip
LlamaForCausalLM(config).eval().save_pretrained(sys.argv[1])
