"""The server's pages in a real browser: questions, answers, Stop, settings, the block pool. Nothing that a model writes is
executed, the console shows no errors, and no other server is contacted. Every test runs in four looks, wide and narrow, light and
dark, unless it chooses its looks itself (page_tools.once). Screenshots go to build/pages.

    tests/clients/pages.py [SERVER [FOLDER [WORD …]]]    WORD: of the names of the tests to run, or a look: 420-dark
"""
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import accessibility
import block_page
import chat_files
import chat_kept
import chat_keys
import chat_page
import chat_texts
from browser import Browser, find_browser, name_of
from page_tools import LOOKS, SERVER, SHOTS, Server


SECOND_ATTEMPTS = 2  # of all tests in one look: other work on the machine can delay what a browser draws
TESTS = chat_page.TESTS + chat_files.TESTS + chat_keys.TESTS + chat_kept.TESTS + chat_texts.TESTS + block_page.TESTS + accessibility.TESTS


def run_look(look, words):
    """The tests whose names have one of the words, or all, in one look. True: they passed."""
    browser, server, passed, left = Browser(look=look), Server(), True, SECOND_ATTEMPTS
    try:
        for test in TESTS:
            if words and not any(word in test.__name__ for word in words) or hasattr(test, "once") and look != LOOKS[0]:
                continue
            name = test.__name__.replace("_", " ")
            for again in (False, True):
                begun, last = time.monotonic(), again or left == 0
                try:
                    test(browser, server) if test.__code__.co_argcount == 2 else test(browser)
                    print("passed:", name, *["at the second attempt"] * again, f"({time.monotonic() - begun:.1f} s)", flush=True)
                    break
                except (AssertionError, TimeoutError, RuntimeError) as e:
                    passed &= not last
                    print(f"{'FAILED' if last else 'once more'}: {name}: {type(e).__name__}: {e}", flush=True)
                    browser.close()
                    browser = Browser(look=look)  # nothing that the attempt left is met by what follows
                    if last:
                        break
                    left -= 1
    finally:
        browser.close()
        server.close()
    return passed


def begin(name, more):
    """This program once more, for one look; its lines begin with the look."""
    child = subprocess.Popen([sys.executable, __file__, SERVER, SHOTS, name, *more], stdout=subprocess.PIPE, text=True)
    for line in child.stdout:
        print(f"{name}: {line}", end="", flush=True)
    return child.wait() == 0


def main():
    if not find_browser():
        print("pages: there is no Chromium here (Debian: chromium)")
        return 1
    os.makedirs(SHOTS, exist_ok=True)
    names, words = {name_of(look): look for look in LOOKS}, sys.argv[3:]
    chosen = [word for word in words if word in names]
    if len(chosen) == 1:
        words.remove(chosen[0])
        return 0 if run_look(names[chosen[0]], words) else 1
    with ThreadPoolExecutor(2) as pool:  # two looks at a time, each with its browser and its server
        passed = list(pool.map(lambda name: begin(name, [word for word in words if word not in names]), chosen or names))
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
