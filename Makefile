# make demo   export the g2p checkpoint to int8 and pronounce some words
# make test   the test suite
# make check  lint and types
# make evaluate   the model card's error rates, from exported files

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
WORDS ?= transformer onnx quantization pronunciation
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: demo test check evaluate clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) install --quiet --constraint constraints.txt torch
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

EXPORT = mkdir -p build && $(BIN)/tformer-export models/g2p/model.pt --force

demo: $(READY)
	$(EXPORT) --output build/g2p-int8.onnx --quantize int8 --report build/g2p-int8.json
	$(BIN)/tformer-run build/g2p-int8.onnx $(WORDS)

test: $(READY)
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

evaluate: $(READY)
	$(BIN)/python -m tformer_models.g2p evaluate models/g2p/model.pt
	for precision in none int8; do \
	  $(EXPORT) --output build/g2p-$$precision.onnx --quantize $$precision && \
	  $(BIN)/python -m tformer_models.g2p words --split test > build/words.txt && \
	  $(BIN)/tformer-run build/g2p-$$precision.onnx --input-file build/words.txt --output-file build/$$precision.txt --force && \
	  $(BIN)/python -m tformer_models.g2p score build/$$precision.txt || exit 1; \
	done

clean:
	rm -rf build .venv
