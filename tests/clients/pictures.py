"""The pictures of docs/, from the pages as they are now: python3 tests/clients/pictures.py [SERVER]; SERVER: ./server"""
import os
import subprocess
import tempfile
import time

from page_tools import BLOCK_VIZ, READY, ROOT, TURNS, Server, settle
from browser import Browser

DOCS = os.path.join(ROOT, "docs")


def chat(browser):
    server = Server()
    try:
        page = browser.page(1180, 720)
        page.go(server.url + "/")
        page.until(READY)
        for chat in (("What does gratitude mean?",), ("What is paged attention?", "Why?"), ("Tell me a story.",)):
            page.click(".new")
            for n, question in enumerate(chat):
                page.type(question)
                page.press("Enter")
                page.until(f"{TURNS} === {2 * n + 2}")
                settle(page)
        # The answer as its tokens, and what else could have stood in it.
        page.run("toggleTokens(turns[1])")
        page.until("document.querySelector('.tokens')")
        page.click(".token:nth-child(6)")
        page.until("document.querySelector('.alternatives .percent')")
        page.screenshot(os.path.join(DOCS, "server-chat.png"))
    finally:
        server.close()


def blocks(browser):
    server = Server("--kv-blocks", "144", "--swap-blocks", "64", "-np", "16", "--blocks-text")
    try:
        page = browser.page(1280, 1240)
        page.go(server.url + "/blocks.html")
        page.until("document.querySelectorAll('.demos button').length === 4")
        for demonstration in (0, 3, 2):
            page.run(f"document.querySelectorAll('.demos button')[{demonstration}].click()")
            page.until("!demonstrations.running", 180)
        at = page.run("""minutes.steps.findLastIndex(step => step.snapshot.sequences.length === 4 && step.snapshot.sequences[0].blocks.length < 8 &&
            treeOf(step.snapshot.sequences).children.length > 1 && step.snapshot.events.some(e => e.kind === 'copy'))""")
        page.run(f"pause(); timeline.choose({at}); document.activeElement.blur()")
        time.sleep(0.5)
        page.screenshot(os.path.join(DOCS, "server-blocks.png"))
    finally:
        server.close()


def walkthrough(browser):
    with tempfile.TemporaryDirectory() as folder:
        html = os.path.join(folder, "fig8.html")
        subprocess.run([BLOCK_VIZ, "--demo", "fig8", "--html", html], check=True)
        page = browser.page(1180, 720)
        page.go(f"file://{html}#step=2")
        page.screenshot(os.path.join(DOCS, "block-viz.png"))


if __name__ == "__main__":
    browser = Browser()
    try:
        chat(browser)
        blocks(browser)
        walkthrough(browser)
    finally:
        browser.close()
