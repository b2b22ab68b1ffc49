"""Claims about the page of the chat, for pages.py: all that it does can be done by keys alone; what Enter does on a phone."""
import json

from chat_tools import LISTED, SCRIPTED, forget_all, leave, reload, script
from page_tools import BUSY, LAST, TURNS, check, clean, no_overflow, no_shift, readable, settle, watch_shifts


def tab_to(page, selector, text=None):
    """Tab until the focus is on such an element, of that text."""
    wanted = f"document.activeElement.matches({json.dumps(selector)})" + (f" && document.activeElement.textContent === {json.dumps(text)}" if text else "")
    for _ in range(160):
        if page.run(wanted):
            return
        page.press("Tab")
    raise AssertionError(f"Tab does not reach {selector} {text or ''}")


def push(page, *answer):
    page.run(f"script.push({json.dumps(answer)}); 0")


def say(page, text, *answer):
    before = page.run("turns.length")
    push(page, *answer)
    tab_to(page, ".ask textarea")
    page.type(text)
    page.press("Enter")
    page.until(f"turns.length === {before + 2}")
    settle(page)


def menu(page, name):
    """What the menu of the first listed conversation offers."""
    tab_to(page, ".chats .more")
    page.press("Enter")
    page.until("document.querySelector('.menu:popover-open') && document.activeElement.closest('.menu')")
    tab_to(page, ".menu button", name)
    page.press("Enter")


def all_is_done_by_keys_alone(browser, server):
    page = browser.page()
    watch_shifts(page)
    page.call("Page.addScriptToEvaluateOnNewDocument", source=SCRIPTED)
    reload(page, server)
    forget_all(page)
    # An answer with thoughts, which unfold and fold; a gauge that explains itself.
    say(page, "One?", [["reasoning_content", "Well. "], ["content", "A."]], "length", 10)
    for is_open in (True, False):
        tab_to(page, ".thought summary")
        page.press("Enter")
        check(page.run("document.querySelector('.thought').open") == is_open, "the thoughts do not unfold and fold")
    tab_to(page, ".gauge")
    page.press("Enter")
    page.until("document.querySelector('.explain:popover-open')")
    page.press("Escape")
    page.until("!document.querySelector('.explain:popover-open')")
    # Continued, edited, asked again; from branch to branch.
    push(page, [["content", " And more."]], "stop", 12)
    page.press("KeyG", alt=True)
    page.until(f"!{BUSY} && {LAST} === 'A. And more.'")
    push(page, [["content", "B."]], "stop", 10)
    page.press("KeyE", alt=True)
    page.until("document.activeElement.closest('.edit')")
    page.type(" Or two?")
    page.press("Enter")
    page.until(f"!{BUSY} && {LAST} === 'B.'")
    push(page, [["content", "C."]], "stop", 10)
    tab_to(page, ".turn.assistant .foot button", "Try again")
    page.press("Enter")
    page.until(f"!{BUSY} && {LAST} === 'C.'")
    tab_to(page, "[aria-label='Previous branch']")
    page.press("Enter")
    page.until(f"{LAST} === 'B.' || {LAST} === 'A. And more.'")
    page.press("ArrowRight", alt=True)
    # Settings, a preset, the theme.
    page.press("KeyS", alt=True)
    page.until("dialog.open")
    tab_to(page, "[name=temperature]")
    page.type("0.5")
    tab_to(page, ".preset input")
    page.type("Mild")
    tab_to(page, ".keep")
    page.press("Enter")
    check(page.run("'Mild' in presets()"), "no preset is kept")
    tab_to(page, "[name=theme]")
    page.press("ArrowDown")
    tab_to(page, "dialog [value=save]")
    page.press("Enter")
    page.until("!dialog.open")
    check(page.run("now.chat.settings.temperature") == 0.5, "the settings are not saved")
    # An answer beside another one, and on with it.
    push(page, [["content", "D."]], "stop", 10)
    page.press("KeyC", alt=True)
    page.until("dialog.open")
    tab_to(page, "dialog [value=save]")
    page.press("Enter")
    page.until("document.querySelectorAll('.pair .turn').length === 2")
    settle(page)
    no_overflow(page, "a pair")
    tab_to(page, ".pair button", "Go on with this")
    page.press("Enter")
    page.until("turns.at(-1).content === 'D.'")
    # A tool's result.
    say(page, "Weather?", [["tool_calls", [{"index": 0, "id": "x", "function": {"name": "weather", "arguments": "{}"}}]]], "tool_calls", 10)
    push(page, [["content", "It rains."]], "stop", 20)
    tab_to(page, ".call textarea")
    page.type("rain")
    tab_to(page, ".calls > button")
    page.press("Enter")
    page.until(f"!{BUSY} && {LAST} === 'It rains.'")
    no_overflow(page, "the chat")
    readable(page, "the chat")
    # The list: pinned, renamed, deleted and had back, searched, exported.
    page.press("KeyN", alt=True)
    say(page, "Another.", [["content", "Yes."]], "stop", 10)
    page.run("window.files = []; URL.createObjectURL = blob => { files.push(blob); return 'data:,'; }; HTMLAnchorElement.prototype.click = () => {}; 0")

    def with_list():
        if not page.run("document.body.classList.contains('with-chats')"):
            page.press("KeyB", ctrl=True)
            page.until("document.body.classList.contains('with-chats')")
    with_list()
    menu(page, "Pin")
    check(page.run("[...chats.values()].some(c => c.pinned && c.title === 'Another.')"), "it is not pinned")
    menu(page, "Rename")
    page.until("document.activeElement.closest('.chats li')")
    page.type("Renamed")
    page.press("Enter")
    page.until(f"{LISTED}[0] === 'Renamed'")
    with_list()
    menu(page, "Delete")
    page.until(f"{LISTED}.length === 1")
    tab_to(page, ".toast button")
    page.press("Enter")
    page.until(f"{LISTED}.length === 2")
    with_list()
    tab_to(page, ".export")
    page.press("Enter")
    page.until("files.length === 1")
    page.press("KeyK", ctrl=True)
    page.until("document.activeElement === search")
    page.type("rains")
    page.until(f"{LISTED}.length === 1")
    readable(page, "the list")
    page.press("Enter")
    page.until(f"{LAST} === 'It rains.'")
    check(page.run("[...document.querySelectorAll('.foot button')].some(b => b.textContent === 'Tokens')"), "an answer without its buttons")
    page.run("localStorage.clear(); 0")
    no_shift(page, "all keys")
    clean(page, server, "all keys")


def on_a_phone_enter_starts_a_line(browser, server):
    page = browser.page()
    page.call("Page.addScriptToEvaluateOnNewDocument", source=SCRIPTED)
    page.call("Emulation.setDeviceMetricsOverride", width=page.own[0], height=900, deviceScaleFactor=1, mobile=True)
    page.call("Emulation.setTouchEmulationEnabled", enabled=True)
    reload(page, server)
    check(page.run("fingers.matches"), "no phone")
    page.type("One")
    page.press("Enter")
    page.type("two")
    check(page.run("box.value") == "One\ntwo", page.run("box.value"))
    script(page, [["content", "Yes."]], "stop", 10)
    page.click(".send")
    page.until(f"{TURNS} === 2")
    settle(page)
    page.run("edit(turns[0], views.get(turns[0].id).root); 0")
    page.press("Enter")
    check(page.run(TURNS) == 2 and page.run("document.querySelector('.edit textarea').value.split('\\n').length") == 3, "an edited question is sent")
    page.run("document.querySelector('.edit .row button').click(); 0")
    leave(page, server, "a phone")


TESTS = [all_is_done_by_keys_alone, on_a_phone_enter_starts_a_line]
