"""Transformers in plain PyTorch, and their training by recipe (``tformer-train``)."""
