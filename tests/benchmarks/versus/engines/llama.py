"""llama.cpp by the C functions of llama-cpp-python: the requests of a batch are sequences of one llama_batch.

The weights are written as GGUF in float32, and quantised by llama_model_quantize: Q8_0, and Q4_0 for four bits
(`llama_k`: Q4_K_M). With quantised weights the cache and attention have llama.cpp's defaults: float16, and
flash_attn where it can. In float32 the cache is float32 without flash_attn, which computes parts in float16: so the
tokens are those of the source.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from versus.engines import UnavailableError, build_once, gguf_weights, hugging_face
from versus.shapes import END, Case, Shape

TYPES = {"fp32": "F32", "int8": "Q8_0", "int4": "Q4_0"}
PADDING = 256  # llama.cpp rounds the tokens of a sequence up to a multiple
ROWS = 32  # sequences at once, of a file of texts
CHUNK = 2048  # tokens at most in one llama_batch of a file of texts: llama.cpp's default


def prepare(folder: Path, shape: Shape, precision: str, type: str | None = None) -> int:
    if shape.kind != "continue":
        raise UnavailableError("decoder-only models alone, here")
    type = type or TYPES[precision]
    source, plain = hugging_face(folder, shape), model_path(folder, "F32")
    size = build_once(plain.parent, lambda part: gguf_weights.write(source, part / plain.name))
    if type == "F32":
        return size
    path = model_path(folder, type)
    return build_once(path.parent, lambda part: quantize(plain, part / path.name, type))


def model_path(folder: Path, type: str) -> Path:
    return folder / f"llama.cpp-{type}" / "model.gguf"


def quantize(plain: Path, path: Path, type: str) -> None:
    import llama_cpp

    ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{type}")
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = ftype
    if llama_cpp.llama_model_quantize(str(plain).encode(), str(path).encode(), ctypes.byref(options)):
        raise UnavailableError(f"llama_model_quantize to {type} failed")


class Engine:
    type: str | None = None

    def __init__(self, folder: Path, shape: Shape, precision: str, threads: int) -> None:
        import llama_cpp

        self.llama, self.threads, self.vocabulary = llama_cpp, threads, shape.vocabulary
        whole = precision == "fp32"
        self.cache = llama_cpp.GGML_TYPE_F32 if whole else llama_cpp.GGML_TYPE_F16
        self.flash = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED if whole else llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO
        llama_cpp.llama_backend_init()
        path = model_path(folder, self.type or TYPES[precision])
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not self.model:
            raise UnavailableError(f"llama.cpp cannot open {path.name}")
        self.sessions: dict[tuple[int, int, int, bool], _Session] = {}

    def run(self, case: Case, inputs: list[list[int]]) -> tuple[float | None, list[list[Any]]]:
        if case.beams > 1:
            raise UnavailableError("it has no beam search")
        session = self._session(case.batch, case.prompt + case.new, case.batch * case.prompt)
        session.clear()
        rows = range(case.batch)
        chosen = session.greedy([(row, 0, ids) for row, ids in zip(rows, inputs, strict=True)])
        first = time.perf_counter()
        results = [[token] for token in chosen]
        for position in range(case.prompt, case.prompt + case.new - 1):
            chosen = session.greedy([(row, position, [token]) for row, token in zip(rows, chosen, strict=True)])
            for result, token in zip(results, chosen, strict=True):
                result.append(token)
        return first, results

    def many(self, inputs: list[list[int]], new: int) -> list[list[int]]:
        """Continue texts of any lengths as llama.cpp's server does: a text that ends makes room for the next one."""
        longest = max(map(len, inputs)) + new
        session = self._session(ROWS, longest, CHUNK, unified=True)
        session.clear()
        results: list[list[int]] = [[] for _ in inputs]
        waiting = list(range(len(inputs)))[::-1]
        running: dict[int, int] = {}  # row of the batch → text
        while waiting or running:
            parts = [(row, len(inputs[text]) + len(results[text]) - 1, results[text][-1:])
                     for row, text in running.items()]  # fmt: skip
            room = CHUNK - len(parts)
            for row in (row for row in range(ROWS) if row not in running):
                if not waiting or len(inputs[waiting[-1]]) > room:
                    break
                running[row] = waiting.pop()
                session.clear(row)
                parts.append((row, 0, inputs[running[row]]))
                room -= len(inputs[running[row]])
            for (row, _, _), token in zip(parts, session.greedy(parts), strict=True):
                results[running[row]].append(token)
                if len(results[running[row]]) == new:
                    del running[row]
        return results

    def score(self, inputs: list[list[int]], last: int) -> list[float]:
        import numpy as np

        scores: list[float] = []
        for ids in inputs:
            session = self._session(1, len(ids), len(ids), outputs=len(ids))
            session.clear()
            logits = session.logits([(0, 0, ids)], every=True)[-last - 1 : -1].astype(np.float64)
            logits -= logits.max(-1, keepdims=True)
            chosen = logits[np.arange(last), ids[-last:]]
            scores += (chosen - np.log(np.exp(logits).sum(-1))).tolist()
        return scores

    def _session(self, rows: int, length: int, tokens: int, outputs: int = 1, unified: bool = False) -> _Session:
        """Return a session for requests of this size.

        outputs: positions of a sequence whose logits are wanted. unified: one cache for all sequences, which is faster
        where prompts and single tokens are computed together; otherwise each has its own.
        """
        length = -(-length // PADDING) * PADDING
        key = (rows, length, outputs, unified)
        if key not in self.sessions or self.sessions[key].tokens < tokens:
            self.sessions[key] = _Session(self, rows, length, tokens, outputs, unified)
        return self.sessions[key]


Part = tuple[int, int, Sequence[int]]  # a sequence, the position of its first new token, and its new tokens


class _Session:
    """A llama_context with one llama_batch."""

    def __init__(self, engine: Engine, rows: int, length: int, tokens: int, outputs: int, unified: bool) -> None:
        self.llama, self.vocabulary, self.tokens = engine.llama, engine.vocabulary, max(tokens, rows)
        options = self.llama.llama_context_default_params()
        options.n_seq_max, options.n_ctx = rows, rows * length
        options.n_batch, options.kv_unified = self.tokens, unified
        options.n_outputs_max, options.n_outputs_max_per_seq = rows * outputs, outputs
        options.n_threads = options.n_threads_batch = engine.threads
        options.type_k = options.type_v = engine.cache
        options.flash_attn_type = engine.flash
        options.no_perf = True
        self.context = self.llama.llama_init_from_model(engine.model, options)
        if not self.context:
            raise UnavailableError(f"llama.cpp makes no context of {rows} sequences of {length} tokens")
        self.memory = self.llama.llama_get_memory(self.context)
        self.batch = self.llama.llama_batch_init(self.tokens, 0, 1)

    def clear(self, row: int | None = None) -> None:
        """Forget all sequences, or one."""
        if row is None:
            self.llama.llama_memory_clear(self.memory, False)
        else:
            self.llama.llama_memory_seq_rm(self.memory, row, -1, -1)

    def greedy(self, parts: Sequence[Part]) -> list[int]:
        """Return the most likely next token of each part. The end is forbidden, as in all engines."""
        logits = self.logits(parts)
        logits[:, END] = float("-inf")
        return logits.argmax(-1).tolist()

    def logits(self, parts: Sequence[Part], every: bool = False) -> Any:
        """Return the logits after the last token of each part, or after every token."""
        import numpy as np

        batch, at, outputs = self.batch, 0, 0
        for row, start, ids in parts:
            for offset, token in enumerate(ids):
                batch.token[at], batch.pos[at] = token, start + offset
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, row
                wanted = every or offset == len(ids) - 1
                batch.logits[at] = wanted
                outputs += wanted
                at += 1
        batch.n_tokens = at
        if self.llama.llama_decode(self.context, batch):
            raise UnavailableError(f"llama_decode failed on {len(parts)} sequences, {at} tokens")
        found = self.llama.llama_get_logits(self.context)
        return np.ctypeslib.as_array(found, shape=(outputs, self.vocabulary))
