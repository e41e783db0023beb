"""Transcribing on the command line: what each file says, with its name where there are several."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

from tformer_runtime.cli.job import Batches, Job
from tformer_runtime.model import Model
from tformer_runtime.tasks.ctc_recognition import Transcription, one_line


class Transcribing(Job):
    """A line of text for each sound, or of each of its pieces with their times, behind the name of its file if there
    are several; or an object."""

    batch_size = 8
    several = False

    def results(self, model: Model, values: Iterable[Any], how: Batches) -> Iterator[tuple[str, Transcription]]:
        rest = iter(values)
        begin = list(islice(rest, 2))
        self.several = how.first > 0 or len(begin) > 1
        names: deque[str] = deque()

        def sounds() -> Iterator[Any]:
            for value in chain(begin, rest):
                names.append(str(value))
                yield value

        for result in model.transcribe_batch(sounds(), how.size, how.workers, how.first, **self.settings):
            yield names.popleft(), result

    def written(self, result: tuple[str, Transcription], index: int) -> str:
        name, found = result
        if self.as_json:
            fields = {"index": index, "input": name, **self.task.fields(found)}
            return json.dumps(fields, ensure_ascii=False) + "\n"
        if not self.settings.get("timestamps"):
            return f"{self.task.line(found)}\n"
        front = f"{name}\t" if self.several else ""
        return "".join(f"{front}{s.start:.2f}\t{s.end:.2f}\t{one_line(s.text)}\n" for s in found.segments if s.text)
