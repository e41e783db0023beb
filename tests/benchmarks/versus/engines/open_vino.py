"""OpenVINO: models converted by optimum-intel, with weights compressed by nncf; a decoder is a stateful model.

A decoder runs in an infer request, which holds the cache, without other layers around it (`openvino_genai` measures
OpenVINO's own pipeline). An encoder-decoder runs in the generate() of optimum-intel. In float32, computing and cache
are float32; with int8 and int4 weights they have OpenVINO's defaults, which depend on the processor.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from versus.engines import SOURCE, UnavailableError, build_once, eager, hugging_face
from versus.engines.batched import in_batches, left_padded
from versus.shapes import END, Case, Shape

BITS = {"int8": 8, "int4": 4}
MODEL = "openvino_model.xml"
SAMPLES = 64  # inputs that the ranges of an encoder's activations are learnt from


def prepare(folder: Path, shape: Shape, precision: str) -> int:
    source = hugging_face(folder, shape)

    def make(path: Path) -> None:
        from optimum.intel import OVWeightQuantizationConfig

        whole = shape.kind == "embed" and precision == "int8"  # weights and activations
        bits = None if whole else BITS.get(precision)
        model = _class(shape).from_pretrained(
            source, export=True, compile=False, load_in_8bit=False if bits is None else None,
            quantization_config=None if bits is None else OVWeightQuantizationConfig(bits=bits),
        )  # fmt: skip
        model.save_pretrained(path)
        if whole:
            _quantize_activations(folder, shape, path)
        if shape.kind == "continue":
            _convert_tokenizer(source, path)

    return build_once(model_path(folder, precision), make)


def model_path(folder: Path, precision: str) -> Path:
    return folder / f"openvino-{precision}"


def properties(precision: str, threads: int) -> dict[str, Any]:
    """Return the settings of a compiled model.

    Activations are quantised in groups of 128, which is as exact as the default of 32 here and up to 20 % faster.
    """
    if precision == "fp32":
        others = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    else:
        others = {"DYNAMIC_QUANTIZATION_GROUP_SIZE": "128"}
    return {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", **others}


def _class(shape: Shape) -> Any:
    from optimum import intel

    return {
        "translate": intel.OVModelForSeq2SeqLM,
        "continue": intel.OVModelForCausalLM,
        "embed": intel.OVModelForFeatureExtraction,
    }[shape.kind]


def _quantize_activations(folder: Path, shape: Shape, path: Path) -> None:
    import nncf
    import numpy as np
    import openvino

    ids = np.array(json.loads((folder / SOURCE / "reference.json").read_text())["inputs"], np.int64)[:SAMPLES]
    model = openvino.Core().read_model(path / MODEL)
    names = {given.get_any_name() for given in model.inputs}
    samples = [{name: row for name, row in _fed(ids[i : i + 1]).items() if name in names} for i in range(len(ids))]
    quantized = nncf.quantize(model, nncf.Dataset(samples), model_type=nncf.ModelType.TRANSFORMER)
    del model
    for old in path.glob("openvino_model.*"):
        old.unlink()
    openvino.save_model(quantized, path / MODEL, compress_to_fp16=False)


def _convert_tokenizer(source: Path, path: Path) -> None:
    """Write the tokenizer as models, without which openvino-genai opens no folder."""
    import openvino
    from openvino_tokenizers import convert_tokenizer
    from transformers import PreTrainedTokenizerFast

    models = convert_tokenizer(PreTrainedTokenizerFast.from_pretrained(source), with_detokenizer=True)
    for model, name in zip(models, ("tokenizer", "detokenizer"), strict=True):
        openvino.save_model(model, path / f"openvino_{name}.xml")


def _fed(ids: Any) -> dict[str, Any]:
    import numpy as np

    return {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}


class Engine:
    def __init__(self, folder: Path, shape: Shape, precision: str, threads: int) -> None:
        path, settings = model_path(folder, precision), properties(precision, threads)
        self.model = {"translate": _Translator, "continue": _Decoder, "embed": _Encoder}[shape.kind](path, settings)

    def run(self, case: Case, inputs: list[list[int]]) -> tuple[float | None, list[list[Any]]]:
        return self.model.run(case, inputs)

    def many(self, inputs: list[list[int]], new: int) -> list[list[int]]:
        return self.model.many(inputs, new)


class _Translator(eager.Engine):
    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        import torch
        from optimum.intel import OVModelForSeq2SeqLM

        torch.set_num_threads(settings["INFERENCE_NUM_THREADS"])
        self.kind = "translate"
        self.model = OVModelForSeq2SeqLM.from_pretrained(path, device="CPU", ov_config=settings)


class _Encoder:
    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        import openvino

        self.model = openvino.Core().compile_model(path / MODEL, "CPU", settings)
        self.request = self.model.create_infer_request()
        self.names = {given.get_any_name() for given in self.model.inputs}

    def run(self, case: Case, inputs: list[list[int]]) -> tuple[float | None, list[list[Any]]]:
        import numpy as np

        fed = {name: array for name, array in _fed(np.array(inputs, np.int64)).items() if name in self.names}
        self.request.infer(fed, share_inputs=True)
        return None, self.request.get_output_tensor(0).data.mean(1).tolist()


class _Decoder:
    """A stateful decoder, whose output projection reads the last position alone, as in openvino-genai."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        import openvino

        core = openvino.Core()
        model = core.read_model(path / MODEL)
        _select_last_position(model)
        self.model = core.compile_model(model, "CPU", settings)
        self.size = (0, 0)  # rows and tokens that the infer request has held

    def run(self, case: Case, inputs: list[list[int]]) -> tuple[float | None, list[list[Any]]]:
        if case.beams > 1:
            raise UnavailableError("an infer request has no beam search")
        times: list[float] = []
        results = self.generate(inputs, case.new, times)
        return times[0], results

    def many(self, inputs: list[list[int]], new: int) -> list[list[int]]:
        return in_batches(inputs, lambda rows: self.generate(rows, new))

    def generate(self, inputs: Sequence[Sequence[int]], new: int, times: list[float] | None = None) -> list[list[int]]:
        """Return the generated tokens of each row. times: receives the time of the first token."""
        import numpy as np

        ids, mask = left_padded(inputs)
        rows, length = ids.shape
        self._begin(rows, length + new)
        mask = np.concatenate([mask, np.ones((rows, new), np.int64)], 1)
        positions = np.maximum(mask.cumsum(1) - 1, 0)
        beams = np.arange(rows, dtype=np.int32)
        begin, chosen = 0, []
        for end in range(length, length + new):
            fed = {"input_ids": ids, "attention_mask": mask[:, :end], "position_ids": positions[:, begin:end]}
            self.request.infer({**fed, "beam_idx": beams}, share_inputs=True)
            logits = self.request.get_output_tensor(0).data[:, -1]
            logits[:, END] = -np.inf
            ids, begin = logits.argmax(-1)[:, None], end
            chosen.append(ids)
            if times is not None and not times:
                times.append(time.perf_counter())
        return np.concatenate(chosen, 1).tolist()

    def _begin(self, rows: int, tokens: int) -> None:
        """Empty the cache.

        A request whose cache in uint8 grew after reset_state gave other tokens once (OpenVINO 2026.4): make it again.
        """
        if rows != self.size[0] or tokens > self.size[1]:
            self.request = self.model.create_infer_request()
            self.size = rows, tokens
        self.request.reset_state()


def _select_last_position(model: Any) -> None:
    """Slice the last position before the output projection."""
    import numpy as np
    from openvino import opset13 as ops

    projection = model.outputs[0].get_node().input_value(0).get_node()
    last = ops.slice(projection.input_value(0), [-1], [np.iinfo(np.int64).max], [1], [1])
    projection.input(0).replace_source_output(last.output(0))
    model.validate_nodes_and_infer_types()
