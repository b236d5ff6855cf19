# Two commands on a fresh clone: `make demo` and `make test`. Each sets up .venv by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Tests side by side.
JOBS ?= 2
# Without kept bytecode every process compiles torch and transformers anew: 7 s of CPU.
unexport PYTHONDONTWRITEBYTECODE
# On a machine where pip would choose a CUDA build of torch, point this at an index of CPU builds, which is asked for
# torch alone:
#   make test TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=

.PHONY: help install demo lock lint format type test test-all test-browser test-docker check-gpu-service test-deploy docs fuzz fuzz-parsers attack bench-checkpoint bench-store bench-queue bench-queue-load bench-queue-peer bench-collate bench-startup bench-ops bench-e2e bench-on-policy bench-e2e-mps bench-e2e-two-gpus bench-divided-teacher bench-node-groups bench-kills bench-control clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

install: $(STAMP)  ## create .venv and install xtoken with its development tools; with an NVIDIA driver, the extra gpu too

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@# Modules are compiled when they are first imported, most of them never: that saves a minute here.
	$(if $(TORCH_INDEX),$(BIN)/python -m pip install --no-compile --no-deps --index-url $(TORCH_INDEX) -c constraints.txt torch)
	$(BIN)/python -m pip install --no-compile -c constraints.txt torch -e ".[dev,triton,lora,tensorboard$$(test -e /proc/driver/nvidia/version && echo ,gpu)]"
	@touch $@

LOCK := $(BIN)/uv pip compile --quiet --python $(BIN)/python --generate-hashes --no-header --no-annotate pyproject.toml - --extra all

lock: $(STAMP)  ## hash the packages of both images, for deploy/lock; of torch the CPU builds at TORCH_INDEX
	$(BIN)/python -m pip install --quiet uv
	@# What stands in deploy/lock keeps its version if constraints.txt allows it: torch and triton of the GPU image do.
	mkdir -p build && grep -vE '^(torch|triton)==' constraints.txt > build/constraints-gpu.txt
	echo hatchling | $(LOCK) -c constraints.txt -o deploy/lock/cpu.txt \
		--find-links $(or $(TORCH_INDEX),https://download.pytorch.org/whl/cpu)/torch/ > /dev/null
	echo hatchling | $(LOCK) --extra gpu --extra wandb -c build/constraints-gpu.txt -o deploy/lock/gpu.txt > /dev/null

demo: $(STAMP)  ## distil a small teacher into a smaller student, all processes real, on this machine
	$(BIN)/xtoken demo

lint: $(STAMP)  ## formatting, style and the import rule
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports

format: $(STAMP)  ## rewrite the files as `make lint` wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

type: $(STAMP)  ## static types
	$(BIN)/mypy

test: $(STAMP)  ## every test that needs no GPU, container engine or browser
	$(BIN)/pytest -n $(JOBS) --dist worksteal

test-all: $(STAMP)  ## the slow ones too
	$(BIN)/pytest -n $(JOBS) --dist worksteal -m 'not gpu and not docker and not browser'

test-docker: $(STAMP)  ## build the images' CPU profile and run it; DOCKER_HOST, XTOKEN_BASE and TORCH_INDEX are respected
	$(BIN)/pytest -m docker tests/docker

check-gpu-service: $(STAMP)  ## what compose starts on a GPU node, without a container engine: a run by REST; two minutes
	$(BIN)/python -m tests.docker.by_hand

test-deploy: $(STAMP)  ## the Kubernetes manifests against their API's schemas
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[deploy]'
	$(BIN)/pytest tests/unit/deploy/test_kubernetes.py

test-browser: $(STAMP)  ## start, watch, stop and resume a run by the web page, in a headless Chromium (CHROMIUM names it)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[browser]'
	$(BIN)/pytest -m browser tests/browser

docs: $(STAMP)  ## generate the reference pages and the measured figures, build the site into build/site
	$(BIN)/python docs/generate.py
	$(BIN)/python -m benchmarks.pages
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench-queue: $(STAMP)  ## the queue beside raw pyzmq and TransferQueue; eight minutes
	$(BIN)/python -m benchmarks.queue
	$(BIN)/python -m benchmarks.pages

bench-queue-load: $(STAMP)  ## 1,000 connections of 100 runs, a day's steps of one run, 500 kills of a queue; two hours
	$(BIN)/python -m benchmarks.queue.load --runs 100 --steps 200 --out benchmarks/results/queue_runs.json
	$(BIN)/python -m benchmarks.queue.load --runs 1 --steps 86400 --out benchmarks/results/queue_day.json
	$(BIN)/python -m tests.contract.killing 500 benchmarks/results/queue_kills.json

bench-queue-peer:  ## install TransferQueue and Ray, in an environment of their own, for bench-queue
	benchmarks/queue/transferqueue/install.sh .venv-transferqueue $(PYTHON)

fuzz: $(STAMP)  ## a million malformed frame lists against a queue
	$(BIN)/python -m tests.contract.fuzz --lists 1000000 --seconds 900 --out benchmarks/results/fuzz.json

fuzz-parsers: $(STAMP)  ## five parsers fuzzed with coverage guidance, FUZZ_S seconds of processor time each
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[fuzz]'
	$(BIN)/python -m tests.fuzz all --seconds $(or $(FUZZ_S),1200) --out benchmarks/results/fuzz_parsers.json

attack: $(STAMP)  ## attack a queue and a control plane that serve a real run, for five minutes (ATTACK_S)
	$(BIN)/python -m tests.attack --seconds $(or $(ATTACK_S),300) --out benchmarks/results/attack.json

bench-checkpoint: $(STAMP)  ## two forms of a checkpoint side by side; two minutes
	$(BIN)/python -m benchmarks.checkpoint

bench-store: $(STAMP)  ## a store of MODEL's output of TEXT: bytes per token and rates; five minutes
	$(BIN)/python -m benchmarks.store --model $(MODEL) --text $(TEXT)
	$(BIN)/python -m benchmarks.pages

bench-collate: $(STAMP)  ## alignment beside TRL's, collation, projection; then two collators beside one
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[bench]'
	$(BIN)/python -m benchmarks.collate
	$(BIN)/python -m benchmarks.collate_workers
	$(BIN)/python -m benchmarks.pages

bench-startup: $(STAMP)  ## from `xtoken run` to the first step, on a finished demo-out, beside COMMIT; needs an idle machine
	$(BIN)/python -m benchmarks.startup demo-out $(if $(COMMIT),--commit $(COMMIT))
	$(BIN)/python -m benchmarks.pages

bench-ops: $(STAMP)  ## test and time the operators on a GPU, the references beside them
	$(BIN)/python -m benchmarks.gpu_tests
	$(BIN)/python -m benchmarks.ops
	$(BIN)/python -m benchmarks.hidden_states
	$(BIN)/python -m benchmarks.chain
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[bench]'
	$(BIN)/python -m benchmarks.same_tokenizer
	$(BIN)/python -m benchmarks.pages

bench-control: $(STAMP)  ## the control plane: its list, a run's first step, training beside readers; ten minutes
	$(BIN)/python -m benchmarks.control
	$(BIN)/python -m benchmarks.pages

bench-e2e: $(STAMP)  ## a whole run at real model sizes on a GPU, beside the plain serial loop and one with TRL's loss
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[bench]'
	$(BIN)/python -m benchmarks.end_to_end --out benchmarks/results/end_to_end.json --public-loss
	$(BIN)/python -m benchmarks.end_to_end --out benchmarks/results/end_to_end_chain.json --no-serial --steps 20 --warmup 5 \
		--variants chain_wide chain_fp8_wide chain_hidden_wide
	$(BIN)/python -m benchmarks.end_to_end --out benchmarks/results/end_to_end_lengths.json --samples 16 --steps 30 --warmup 24 --no-serial \
		--variants fixed_lengths text_padded text_packed chat_padded chat_packed
	$(BIN)/python -m benchmarks.end_to_end --out benchmarks/results/end_to_end_small.json --samples 128 --steps 10 --warmup 4 --no-serial \
		--variants small_fixed small_text_padded small_text_packed
	$(BIN)/python -m benchmarks.pages

bench-on-policy: $(STAMP)  ## on-policy distillation beside TRL's GOLD trainer: STUDENT, TEACHER, TEXT; one GPU, five minutes
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[bench]'
	$(BIN)/python -m benchmarks.on_policy --student $(STUDENT) --teacher $(TEACHER) --text $(TEXT)
	$(BIN)/python -m benchmarks.pages

bench-e2e-mps: $(STAMP)  ## the same on one GPU, without and with NVIDIA's MPS
	$(BIN)/python -m benchmarks.end_to_end --out benchmarks/results/end_to_end_mps.json \
		--variants p_kl_wide p_kl_wide_mps p_kl_fp8_wide p_kl_fp8_wide_mps gold_wide gold_wide_mps
	$(BIN)/python -m benchmarks.pages

bench-e2e-two-gpus: $(STAMP)  ## a teacher on its own, a shared student, beside one GPU
	$(BIN)/python -m benchmarks.end_to_end --out benchmarks/results/end_to_end_two_gpus.json \
		--samples 8 --steps 20 --no-serial \
		--variants p_kl_hidden_wide two_ranks_kept two_ranks teacher_apart p_kl_hidden_wide_mps two_ranks_mps
	$(BIN)/python -m benchmarks.pages

bench-divided-teacher: $(STAMP)  ## a teacher's rate on two GPUs beside one; needs two GPUs
	$(BIN)/python -m benchmarks.divided_teacher
	$(BIN)/python -m benchmarks.pages

bench-node-groups: $(STAMP)  ## two node groups by torchrun and Ray, one killed, beside one group; needs two GPUs
	tests/support/loopback.sh $(BIN)/python -m benchmarks.node_groups

bench-kills: $(STAMP)  ## kill teachers and trainers of real runs on a GPU at random moments, and resume
	$(BIN)/python -m benchmarks.worker_kills
	$(BIN)/python -m benchmarks.worker_kills.whole_run
	$(BIN)/python -m benchmarks.worker_kills.picture
	$(BIN)/python -m benchmarks.pages

clean:  ## remove what the commands above made
	rm -rf $(VENV) build runs demo-out .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
