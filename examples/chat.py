"""Chat with a language model of the Hugging Face hub, or of a folder, in 4 bits on a CPU.

    python examples/chat.py HuggingFaceTB/SmolLM2-360M-Instruct "Why is the sky blue?" "And at sunset?"

The model needs a chat template. The second message follows the first one: the conversation keeps its cache.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tformer_export import export, load_source
from tformer_runtime import Model


def chat(
    model: str, messages: list[str], file: Path, quantization: str = "int4", max_new_tokens: int = 128
) -> list[str]:
    """Export the model if `file` is not there, print the answers as they are generated, and return them."""
    if not file.exists():
        report = export(load_source(model), file, quantization=quantization)
        for name, value in report.rows():  # its size, the parity with the model, the loss by 4 bits
            print(f"{name:15} {value}", file=sys.stderr)
    answers = []
    with Model.load(file) as loaded:
        conversation = loaded.chat(system="You answer in one sentence.")
        for message in messages:
            pieces = []
            for piece in conversation.stream(message, max_new_tokens=max_new_tokens):
                print(piece, end="", flush=True)
                pieces.append(piece)
            print()
            answers.append("".join(pieces))
    return answers


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    chat(sys.argv[1], sys.argv[2:], Path(f"chat-{Path(sys.argv[1]).name}.onnx"))
