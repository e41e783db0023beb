"""Write a recording down as text, with the time of each part, with a speech model such as Whisper.

python examples/transcribe.py openai/whisper-tiny.en recording.flac
"""

from __future__ import annotations

import sys
from pathlib import Path

from tformer_export import export, load_source
from tformer_runtime import Model
from tformer_runtime.tasks.speech import Transcription


def transcribe(model: str, recording: Path, file: Path, quantization: str = "int8") -> Transcription:
    """Export the model if `file` is not there. Return the text of the recording with its segments."""
    if not file.exists():
        export(load_source(model), file, quantization=quantization)
    with Model.load(file) as recogniser:
        return recogniser.transcribe(recording, timestamps=True)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    file = Path(f"transcribe-{Path(sys.argv[1]).name}.onnx")
    for segment in transcribe(sys.argv[1], Path(sys.argv[2]), file).segments:
        print(f"{segment.start:7.2f} {segment.end:7.2f}  {segment.text}")
