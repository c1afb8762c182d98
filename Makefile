# `make demo` and `make test` need Python 3.10 or newer, and nothing else: they make .venv themselves.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo finetune test test-slow quality style clean

demo: $(INSTALLED)
	$(BIN)/rope-pad-fix demo

# SmolLM2-135M learns to label real addresses; out/finetune is the adapter. Goes on where an earlier run stopped.
finetune: $(INSTALLED)
	test -f out/usaddress/test.jsonl || $(BIN)/python examples/data/usaddress.py --train out/usaddress/train.jsonl out/usaddress/test.jsonl
	$(BIN)/python train/finetune.py --train-file out/usaddress/train.jsonl --eval-file out/usaddress/test.jsonl \
		--task fields --learning-rate 2e-3 --max-new-tokens 72 --output-dir out/finetune \
		$(if $(wildcard out/finetune/checkpoint-*),--resume)

test: quality
	$(BIN)/python -m pytest

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -m slow

quality: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

style: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The pinned versions and the package in one go, so that pip takes no other torch than the pinned one.
# deep_training carries the real code of ChatGLM-6B, 2 and 3 for the tests; what it depends on is not needed.
$(INSTALLED): requirements-dev.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt -e '.[chatglm,train]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps deep_training==0.3.0
	touch $@
