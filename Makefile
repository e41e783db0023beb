# make demo   export the g2p checkpoint to int8 and pronounce some words
# make test   the test suite; make thorough, the models that it leaves out for their minutes
# make check  lint and types
# make evaluate   the model card's error rates, from exported files
# make bench      against other engines: hours, 40 GB of disk, 16 GB of memory, two more environments

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
GENAI := onnxruntime-genai==0.18.0 transformers==5.23.0 onnx onnx-ir # its builder needs more than it asks for
OPTIMUM := 'optimum-onnx[onnxruntime]==0.1.0'
WORDS ?= transformer onnx quantization pronunciation
PIP := $(BIN)/python -m pip --disable-pip-version-check
PIP_OF_PEER = $(@D)/bin/python -m pip --disable-pip-version-check install --quiet --constraint $(@D)/same.txt

.PHONY: demo test thorough check evaluate bench clean

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
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder # the slowest come first

thorough: $(READY)
	$(BIN)/python -m pytest --numprocesses auto -m thorough

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

# The peers of the benchmark: one of them beside what we have, those that need other packages in environments of their own.
# One that cannot be installed is a column without figures.
SAME = sed -n 's/^onnxruntime-gpu/onnxruntime/p; /^\(torch\|numpy\|onnx\|onnx-ir\)==/p' constraints.txt
WITHOUT = || echo "$(@D) could not be made: its column will say so"

bench: $(READY) .venv/.peers .venv-genai/.ready .venv-optimum/.ready
	$(BIN)/python tests/benchmarks/versus.py

.venv/.peers: $(READY)
	$(PIP) install --quiet --constraint constraints.txt --editable '.[bench]' && touch $@ $(WITHOUT)

.venv-genai/.ready: constraints.txt
	$(PYTHON) -m venv $(@D) && $(SAME) > $(@D)/same.txt
	$(PIP_OF_PEER) torch && $(PIP_OF_PEER) $(GENAI) && touch $@ $(WITHOUT)

.venv-optimum/.ready: constraints.txt
	$(PYTHON) -m venv $(@D) && $(SAME) > $(@D)/same.txt
	$(PIP_OF_PEER) torch && $(PIP_OF_PEER) $(OPTIMUM) && touch $@ $(WITHOUT)

clean:
	rm -rf build .venv .venv-genai .venv-optimum
