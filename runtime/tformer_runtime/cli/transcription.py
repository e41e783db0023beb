"""The job of speech recognition: a text per audio file, with the file's name if there are several."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from tformer_runtime.cli.job import BatchSettings, Job, count_several, run_named
from tformer_runtime.model import Model
from tformer_runtime.tasks.speech import Transcription, one_line


class TranscriptionJob(Job):
    """Write a line of text per recording, a line per timestamped segment, or a JSON object.

    Lines of segments begin with the name of the file if there are several.
    """

    batch_size = 8
    several = False

    def results(
        self, model: Model, inputs: Iterable[Any], batches: BatchSettings
    ) -> Iterator[tuple[str, Transcription]]:
        self.several, recordings = count_several(inputs, batches.index_offset)
        settings = {**self.settings, **({"adapter": self.adapter} if self.adapter is not None else {})}
        return run_named(
            ((str(recording), recording) for recording in recordings),
            lambda values: model.transcribe_batch(values, batches.size, batches.workers, **settings),
        )

    def format_result(self, result: tuple[str, Transcription], index: int) -> str:
        name, transcription = result
        if self.as_json:
            fields = {"index": index, "input": name, **self.task.format_fields(transcription)}
            return json.dumps(fields, ensure_ascii=False) + "\n"
        if not self.settings.get("timestamps"):
            return f"{self.task.format_line(transcription)}\n"
        label = f"{name}\t" if self.several else ""
        return "".join(
            f"{label}{segment.start:.2f}\t{segment.end:.2f}\t{one_line(segment.text)}\n"
            for segment in transcription.segments
            if segment.text
        )
