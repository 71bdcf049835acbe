# `make` lists the targets and the variables; `make TARGET NAME=value` sets one.

# What to train, and how; an empty one is left to `agentenv-tinker train`, whose --help has the defaults.
BUNDLE ?= bundles/gridsim#   the bundle's folder
MODEL ?=#                    base model, by name or folder
STEPS ?=#                    RL steps
RUN ?=#                      name of the run: results go to runs/RUN
GROUPS ?=#                   groups per batch
GROUP_SIZE ?=#               rollouts per group
EVAL_TASKS ?=#               tasks of the held-out evaluation
MAX_TOKENS ?=#               tokens per reply
LEARNING_RATE ?=#            learning rate
SEED ?=#                     seed
RECIPE ?=#                   settings: one of the bundle's TOML files, by name, or a file under runs/; empty for recipe.toml
QUICK ?=#                    1 takes the bundle's quick.toml: less of everything
FROM ?=#                     weights to train on from: a run's folder or a tinker:// path; empty for the recipe's start
RECYCLE ?=#                  0 gives every episode an env container of its own
SANDBOX_NETWORK ?=#          off keeps the environments from every network, in builds of their images too
SANDBOX_MEMORY ?=#           memory of one environment; empty for 2g
SANDBOX_CPUS ?=#             CPUs of one environment; empty for 2
SANDBOX_PIDS ?=#             processes of one environment; empty for 1024
IMAGES ?=#                   images for `make sandbox-images`, by name
CHECKPOINT ?=#               weights for `make eval`: a run's folder or a tinker:// path; empty for the base model
SPLIT ?=#                    split for `make eval`; empty for held_out
FIRST ?=#                    evaluation for `make compare`: the folder of a `make eval`, or an evaluation's file
SECOND ?=#                   the one that is compared with it
ARGS ?=#                     further options, as they are
EXTRAS ?=#                   extras of the package that the image has too: ray, wandb
PORT ?= 8077#                port of `make serve` on 127.0.0.1
PYTHON ?= python3#           Python >= 3.11 for the tests
V ?=#                        1 shows what every command says

VARIABLES := BUNDLE MODEL STEPS RUN GROUPS GROUP_SIZE EVAL_TASKS MAX_TOKENS LEARNING_RATE SEED RECIPE QUICK FROM RECYCLE \
  SANDBOX_NETWORK SANDBOX_MEMORY SANDBOX_CPUS SANDBOX_PIDS IMAGES EXTRA_CA_CERTS EXTRAS \
  CHECKPOINT SPLIT FIRST SECOND ARGS PORT PYTHON V
UNKNOWN := $(filter-out $(VARIABLES) TINKER_API_KEY TINKER_BASE_URL,\
  $(foreach name,$(.VARIABLES),$(if $(findstring command line,$(origin $(name))),$(name))))
$(if $(strip $(UNKNOWN)),$(error unknown variable $(strip $(UNKNOWN)): `make` lists the known ones))

export V EXTRAS RECYCLE SANDBOX_NETWORK SANDBOX_MEMORY SANDBOX_CPUS SANDBOX_PIDS
export UID_GID := $(shell id -u):$(shell id -g)
BASE := python:3.11-slim-trixie
BUNDLE_PATH := $(abspath $(BUNDLE))
PHASE := @stack/phase
option = $(if $($(2)),$(1) '$($(2))')
RECIPE_OPTION = $(if $(QUICK),--recipe quick,$(call option,--recipe,RECIPE))
OPTIONS = $(call option,--model,MODEL) $(call option,--steps,STEPS) $(call option,--run,RUN) \
  $(call option,--groups-per-batch,GROUPS) $(call option,--group-size,GROUP_SIZE) \
  $(call option,--eval-tasks,EVAL_TASKS) $(call option,--max-tokens,MAX_TOKENS) \
  $(call option,--learning-rate,LEARNING_RATE) $(call option,--seed,SEED) $(call option,--from,FROM) \
  $(RECIPE_OPTION) $(ARGS)
WARM_START_OPTIONS = $(call option,--model,MODEL) $(call option,--run,RUN) $(call option,--max-tokens,MAX_TOKENS) \
  $(call option,--seed,SEED) $(RECIPE_OPTION) $(ARGS)
EVAL_OPTIONS = $(call option,--model,MODEL) $(call option,--run,RUN) $(call option,--tasks,EVAL_TASKS) \
  $(call option,--max-tokens,MAX_TOKENS) $(call option,--from,CHECKPOINT) $(call option,--split,SPLIT) \
  $(RECIPE_OPTION) $(ARGS)
TOX := .venv/bin/tox -q run -e

.NOTPARALLEL:
.PHONY: help check train resume warm-start eval compare report up explorer down logs shell image sandbox-images base-image serve test unit tinker-test service-test docker-test e2e bench lint types \
  pins clean prune bundle docker runs

help: ## List the targets and variables
	@sed -nE 's/^([a-z0-9-]+):.*## (.*)/  \1|\2/p' Makefile | awk -F'|' 'BEGIN {print "Targets:"} {printf "%-18s%s\n", $$1, $$2}'
	@sed -nE 's/^([A-Z_]+) \?= ?([^#]*)# +(.*)/  \1|\3|\2/p' Makefile | awk -F'|' \
	  'BEGIN {print "Variables:"} {printf "%-18s%s%s\n", $$1, $$2, $$3 == "" ? "" : " (default: " $$3 ")"}'

train: bundle up ## Train a model on BUNDLE: results under runs/
	@stack/attached --volume '$(BUNDLE_PATH):/bundles/$(notdir $(BUNDLE_PATH)):ro' trainer \
	  agentenv-tinker train 'bundles/$(notdir $(BUNDLE_PATH))' $(OPTIONS)

resume: bundle up ## Go on with RUN where it was interrupted, on the BUNDLE that it was started with
	@stack/attached --volume '$(BUNDLE_PATH):/bundles/$(notdir $(BUNDLE_PATH)):ro' trainer agentenv-tinker resume 'runs/$(RUN)'

check: bundle up ## Check BUNDLE with no model: every problem that keeps it from being trained on
	@stack/attached --volume '$(BUNDLE_PATH):/bundles/$(notdir $(BUNDLE_PATH)):ro' trainer \
	  agentenv-tinker check 'bundles/$(notdir $(BUNDLE_PATH))'

warm-start: bundle up ## Teach the model BUNDLE's demonstrations, for `make train` to go on from
	@stack/attached --volume '$(BUNDLE_PATH):/bundles/$(notdir $(BUNDLE_PATH)):ro' trainer \
	  agentenv-tinker warm-start 'bundles/$(notdir $(BUNDLE_PATH))' $(WARM_START_OPTIONS)

eval: bundle up ## Play a split of BUNDLE with the base model or CHECKPOINT: what it earns, under runs/
	@stack/attached --volume '$(BUNDLE_PATH):/bundles/$(notdir $(BUNDLE_PATH)):ro' trainer \
	  agentenv-tinker eval 'bundles/$(notdir $(BUNDLE_PATH))' $(EVAL_OPTIONS)

report: image ## Write the page of RUN anew: runs/RUN/report.html
	@docker run --rm --user $(UID_GID) --volume '$(CURDIR)/runs:/runs' --workdir / --env HOME=/tmp --network none \
	  agentenv-tinker:latest agentenv-tinker report 'runs/$(RUN)'

compare: image ## Compare two evaluations under runs/, FIRST and SECOND, task by task
	@docker run --rm --user $(UID_GID) --volume '$(CURDIR)/runs:/runs:ro' --workdir / \
	  agentenv-tinker:latest agentenv-tinker compare $(if $(FIRST),'$(FIRST)') $(if $(SECOND),'$(SECOND)')

up: image runs ## Bring the stack up, healthy and idle
	$(PHASE) up "Bringing the stack up" docker compose up --detach --wait --wait-timeout 600

explorer: image ## Show the episodes of RUN in the framework's explorer, on 127.0.0.1:8234, until `make down`
	@[ -n '$(RUN)' ] && [ -f 'runs/$(RUN)/records/config.toml' ] || { echo "there are no records of a run in runs/$(RUN): name one with RUN=" >&2; exit 2; }
	@RUN='$(RUN)' stack/phase explorer "Bringing the explorer up" docker compose up --detach --wait --wait-timeout 120 explorer
	@echo "The episodes of runs/$(RUN): http://127.0.0.1:8234 (until \`make down\`)"

down: ## Stop the stack and remove its containers and volumes: runs/ stays
	$(PHASE) down "Taking the stack down" docker compose --profile '*' down --volumes --remove-orphans

logs: ## Follow what the stack says
	@docker compose logs --follow --tail 100

shell: up ## Open a shell where training runs
	@docker compose run --rm --no-deps trainer bash

serve: image runs ## Serve the Tinker-compatible service alone, on 127.0.0.1:PORT, until Ctrl-C
	@docker run --rm --init --network host --user $(UID_GID) --volume '$(CURDIR)/runs:/runs' --env HOME=/tmp \
	  agentenv-tinker:latest python -m tinker_local --host 127.0.0.1 --port $(PORT) --data /runs/.tinker

image: docker ## Build the image
	@stack/wheels && stack/certs
	@docker image inspect $(BASE) >/dev/null 2>&1 || \
	  ADVICE='no image registry serves it here: make a stand-in with `make base-image`, then go on; the log has the reason' \
	  stack/phase base "Fetching $(BASE)" docker pull $(BASE)
	$(PHASE) image "Building the image" docker compose build

sandbox-images: up ## Load IMAGES of this machine's Docker into the sandbox host, for environments to start from
	@stack/sandbox-images $(IMAGES)

base-image: docker ## Make a stand-in for python:3.11-slim-trixie, where no image registry can be reached
	$(PHASE) base-image "Building a stand-in for $(BASE)" stack/base-image $(BASE)

test: .venv image ## Run every test
	@$(TOX) unit,tinker-release,tinker-main,service,docker,e2e

unit: .venv ## Run the tests of single modules
	@$(TOX) unit

tinker-test: .venv ## Run tst/tinker against the cookbook as released and against its main
	@$(TOX) tinker-release,tinker-main

service-test: .venv ## Run the tests of tinker_local
	@$(TOX) service

docker-test: .venv image ## Run the tests that need Docker: environments and the stack
	@$(TOX) docker

e2e: .venv image ## Run the tests of the whole path
	@$(TOX) e2e

bench: .venv ## Measure the service's sampling, or what ARGS names: `make bench ARGS=bench/pool.py`
	@$(TOX) bench $(if $(ARGS),-- $(ARGS))

lint: .venv ## Check style
	@$(TOX) lint

types: .venv ## Check types
	@$(TOX) types

pins: .venv ## Show which pins of constraints.txt have something newer
	@$(TOX) types --notest && .venv/bin/uv pip list --outdated --python .tox/types

clean: ## Remove what builds and tests left in this folder: runs/ stays
	@rm -rf build dist .tox .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis wheels/*.whl certs/*.crt

prune: down ## Remove the image too, and the service's copy of the base models
	$(PHASE) prune "Removing the image" sh -c 'docker image rm --force agentenv-tinker:latest && rm -rf runs/.tinker/models'

bundle:
	@stack/preflight '$(BUNDLE)'

docker:
	@stack/preflight

runs:
	@mkdir -p runs

.venv: constraints.txt stack/venv
	$(PHASE) venv "Setting up tox" stack/venv '$(PYTHON)'
