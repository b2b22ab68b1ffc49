"""The server's pages in a real browser: questions, answers, Stop, settings, the block pool. Nothing that a model writes is
executed, the console shows no errors, and no other server is contacted. Screenshots go to build/pages.

    tests/clients/pages.py [SERVER [FOLDER [WORD …]]]    WORD: of the names of the tests to run
"""
import os
import sys

import accessibility
import block_page
import chat_files
import chat_kept
import chat_keys
import chat_page
import chat_texts
from browser import Browser, find_browser
from page_tools import SHOTS, Server


def main():
    if not find_browser():
        print("pages: there is no Chromium here (Debian: chromium)")
        return 1
    os.makedirs(SHOTS, exist_ok=True)
    only = sys.argv[3:]
    browser, server, failed = Browser(), Server(), 0
    try:
        for test in chat_page.TESTS + chat_files.TESTS + chat_keys.TESTS + chat_kept.TESTS + chat_texts.TESTS + block_page.TESTS + accessibility.TESTS:
            if only and not any(word in test.__name__ for word in only):
                continue
            name = test.__name__.replace("_", " ")
            for last in (False, True):  # other work on the machine can delay what a browser draws: a test has two attempts
                try:
                    test(browser, server) if test.__code__.co_argcount == 2 else test(browser)
                    print("passed:", name, *["at the second attempt"] * last, flush=True)
                    break
                except (AssertionError, TimeoutError, RuntimeError) as e:
                    failed += last
                    print(f"{'FAILED' if last else 'once more'}: {name}: {type(e).__name__}: {e}", flush=True)
                    browser.close()
                    browser = Browser()  # nothing that the attempt left is met by what follows
    finally:
        browser.close()
        server.close()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
