"""Claims about the pages of the block pool, the server's and those of block-viz, for pages.py."""
import json
import os
import re
import subprocess
import threading

from browser import name_of
from page_tools import BLOCK_VIZ, ROOT, SHOTS, Server, check, shot, presentable, watch_shifts, no_shift, readable, no_overflow, clean, load


def blocks_are_seen_changing(browser):
    server = Server("--kv-blocks", "96", "--swap-blocks", "64", "-np", "16")
    try:
        threads, faults = load(server)
        page = browser.page()
        page.go(server.url + "/blocks.html")
        page.until("past.length && document.querySelector('.state').textContent === 'live'")
        check(page.run("totalsOf(snapshot).pinned") > 0, "no pinned block is seen")
        looks = "drawing.pool.looks.join()"
        before = page.run(looks)
        page.run("""window.rings = []; new MutationObserver(list => { for (const {addedNodes} of list) for (const e of addedNodes)
            if (e.className === 'flash') rings.push(getComputedStyle(e).borderColor); }).observe(document.querySelector('.pool'), {childList: true}); 0""")
        for t in threads:
            t.start()
        page.until("totalsOf(snapshot).shared > 0 && snapshot.sequences.filter(q => q.status === 'running').length > 2")
        page.until(f"{looks} !== {json.dumps(before)}")
        page.until("past.some(m => m.waiting + m.swapped > 0)")
        page.until("[...document.querySelectorAll('.feed li')].some(e => /copy on write/.test(e.textContent))")
        page.until("[...document.querySelectorAll('.feed li')].some(e => /swapped out/.test(e.textContent))")
        names = page.run("[...document.querySelectorAll('.sequence .who b')].map(e => e.textContent)")
        check(names and all(re.fullmatch(r"request [1-9]\d*(, answer [1-9]\d*)?", name) for name in names), names)
        check(any(name.endswith(", answer 1") for name in names), "no first answer of several:", names)
        # What is drawn is what the server says, and each change came once.
        x, y = page.middle(".pool canvas")
        page.move(x, y)
        page.until("/^Block \\d+/.test(document.querySelector('.details').textContent)")
        presentable(page, "blocks", "the block page")
        for t in threads:
            t.join()
        check(not faults, faults)
        page.until("snapshot.sequences.every(q => q.status === 'pinned')")
        now = json.loads(server.get("/blocks"))
        check(page.run("snapshot.blocks") == now["blocks"], "the page's blocks are not the server's")
        check(page.run("past.some(m => m.saved > 0) && past.some(m => m.waste > 0)"), "no waste, no saving")
        rings = set(page.run("rings"))
        legend = page.run("[...document.querySelectorAll('.legend span')].map(e => [getComputedStyle(e.querySelector('.ring') ?? e).borderColor, e.textContent])")
        named = {color for color, text in legend if re.search("copy on write|swapped|found again", text)}
        check(rings and rings <= named, "rings that the legend does not name:", rings - named, legend)
        # Once more by the keyboard, from the first block on.
        page.move(1, 1)
        page.run("document.querySelector('.pool canvas').focus()")
        page.press("ArrowRight")
        check(page.run("document.querySelector('.details').textContent").startswith("Block 0"), page.run("document.querySelector('.details').textContent"))
        clean(page, server, "the block page")
    finally:
        server.close()


# All that can be seen, and what each block tells when it is pointed at.
SEEN = """(() => {
    const at = drawing.pool.marked, all = drawn.blocks.map((b, id) => { drawing.point(id); return document.querySelector('.details').textContent; });
    drawing.point(at);
    return JSON.stringify([all, document.querySelector('main').innerText, drawing.pool.canvas.toDataURL(),
        [...document.querySelectorAll('canvas')].map(c => c.ariaLabel)]);
})()"""


def pause_freezes_all_that_is_seen(browser):
    server = Server("--kv-blocks", "96", "--swap-blocks", "64", "-np", "16")
    try:
        page = browser.page()
        page.go(server.url + "/blocks.html")
        threads, faults = load(server)
        for t in threads:
            t.start()
        page.until("drawn && snapshot.sequences.filter(q => q.status === 'running').length > 4")
        page.click(".pause")
        before, step = page.run(SEEN), page.run("snapshot.step")
        page.until(f"snapshot.step > {step + 60}")
        x, y = page.middle(".pool canvas")
        page.move(x, y)  # what is under the pointer is frozen, too
        told = page.run("document.querySelector('.details').textContent")
        for t in threads:
            t.join()
        page.until("snapshot.sequences.every(q => q.status === 'pinned')")
        page.move(x + 1, y)
        check(page.run("document.querySelector('.details').textContent") == told, "what is pointed at goes on:", told)
        page.move(1, 1)
        after = page.run(SEEN)
        check(after == before, "it goes on while paused:", [(a, b) for a, b in zip(json.loads(before)[0], json.loads(after)[0]) if a != b][:3])
        page.look(1000, 900, page.own[2])
        page.until("drawing.pool.box.clientWidth === drawing.pool.width && innerWidth === 1000")
        check(json.loads(page.run(SEEN))[0] == json.loads(before)[0], "another width shows another moment")
        page.click(".pause")
        page.until("drawn === snapshot")
        check(json.loads(page.run(SEEN))[0] != json.loads(before)[0], "it does not go on")
        check(page.run("drawn.blocks") == json.loads(server.get("/blocks"))["blocks"], "after the pause it is not the server's pool")
        check(not faults, faults)
        clean(page, server, "the pause")
    finally:
        server.close()


def the_block_page_does_not_shift(browser):
    server = Server("--kv-blocks", "96", "--swap-blocks", "64", "-np", "16")
    try:
        page = browser.page()
        watch_shifts(page)
        page.go(server.url + "/blocks.html")
        page.until("drawn")
        threads, faults = load(server)
        for t in threads:
            t.start()
        page.until("totalsOf(snapshot).used > 60")
        page.run("drawing.pool.box.scrollIntoView(); 0")
        for t in threads:
            t.join()
        page.until("drawn.sequences.every(q => q.status === 'pinned')")
        check(not faults, faults)
        no_shift(page, "the block page")
        clean(page, server, "the block page")
    finally:
        server.close()


def marks_and_numbers_of_a_block_stand_apart(browser):
    server = Server("--kv-blocks", "200", "-np", "32")
    try:
        prefix = "You are a friendly assistant that answers briefly. " * 4
        server.post("/pin", prompt=prefix)
        page = browser.page()
        page.go(server.url + "/blocks.html")
        page.until("drawn")
        thread = threading.Thread(target=lambda: server.post("/v1/completions", prompt=prefix, n=19, max_tokens=60, ignore_eos=True, temperature=1))
        thread.start()
        page.until("snapshot.blocks.some(b => b.refs >= 19 && b.pinned)")
        page.click(".pause")
        thread.join()
        # The same moment in pools of other sizes: cells from 72 to 26 pixels.
        for n in (16, 64, 200, 800):
            texts = page.run(f"""(() => {{
                const texts = [], faint = [], real = CanvasRenderingContext2D.prototype.fillText;
                CanvasRenderingContext2D.prototype.fillText = function (text, x, y, most) {{
                    const m = this.measureText(text), thin = Math.min(1, (most ?? Infinity) / m.width), cell = drawing.pool.pitch;
                    const colors = [], left = x - m.actualBoundingBoxLeft * thin, top = y - m.actualBoundingBoxAscent, r = devicePixelRatio || 1;
                    const pixels = this.getImageData(left * r, top * r, Math.max(1, m.width * thin * r), Math.max(1, (m.actualBoundingBoxAscent + m.actualBoundingBoxDescent) * r)).data;
                    for (let i = 0; i < pixels.length; i += 4) colors.push(contrast(this.fillStyle, "#" + [0, 1, 2].map(k => pixels[i + k].toString(16).padStart(2, "0")).join("")));
                    faint.push([String(text), colors.sort((a, b) => a - b)[colors.length >> 3]]); // but for a corner
                    texts.push([String(text), Math.floor(x / cell) + ' ' + Math.floor(y / cell), x - m.actualBoundingBoxLeft * thin, x + m.actualBoundingBoxRight * thin,
                                y - m.actualBoundingBoxAscent, y + m.actualBoundingBoxDescent, x - x % cell, x - x % cell + drawing.pool.cell]);
                    return real.apply(this, arguments);
                }};
                const blocks = drawing.s.blocks.slice(0, {n}), none = {{refs: 0, filled: 0}};
                while (blocks.length < {n}) blocks.push(none);
                blocks[{n - 1}] = {{refs: 119, filled: 16, pinned: true, hash: 'ff'}};
                if ({n} > 64) for (let i = 20; i < {n} - 1; i++) blocks[i] = i % 3 ? {{refs: 1, filled: 1 + i % 16, hash: 'a'}} : {{refs: 0, filled: 16, hash: 'a'}};
                const owners = [...drawing.owners];
                for (let i = 20; i < {n} - 1; i++) owners[i] = blocks[i].refs && {n} > 64 ? [{{request: 1 + i % 8, index: i % 5}}] : undefined;
                drawing.pool.draw({{...drawing.s, blocks}}, owners);
                CanvasRenderingContext2D.prototype.fillText = real;
                return [texts, faint];
            }})()""")
            texts, contrasts = texts
            least = 3 if n == 800 else 4.5  # in small cells a line of the hatching may lie under a figure
            check(all(c >= least for _, c in contrasts), f"of {n} blocks: hard to read:", [c for c in contrasts if c[1] < least][:5])
            shot(page, f"marks-{n}")
            cells = {}
            for text, cell, *box in texts:
                cells.setdefault(cell, []).append((text, *box))
            check(any(text.startswith("×") and int(text[1:]) >= 19 for texts in cells.values() for text, *_ in texts), "no block is shared by 19")
            for texts in cells.values():
                for i, (a, left, right, top, bottom, first, last) in enumerate(texts):
                    check(left >= first - .5 and right <= last + .5, f"of {n} blocks:", a, "leaves its block")
                    for b, l, r, t, bt, *_ in texts[:i]:
                        check(right <= l or r <= left or bottom <= t or bt <= top, f"of {n} blocks:", a, "stands on", b)
    finally:
        server.close()


def a_large_pool_stays_fluid(browser):
    server = Server("--kv-blocks", "100000", "--swap-blocks", "16", "--block-size", "1", "-np", "48")
    try:
        page = browser.page()
        page.go(server.url + "/blocks.html")
        page.until("drawn")
        check(page.run("document.querySelectorAll('*').length") < 1500, "an element for each block")
        page.run("window.gaps = []; { let last = performance.now(); (function frame(now) { gaps.push(now - last); last = now; requestAnimationFrame(frame); })(last); }")
        threads = [threading.Thread(target=lambda i=i: server.post("/v1/completions", prompt=f"{i} Hello", n=8, max_tokens=200, ignore_eos=True)) for i in range(6)]
        for t in threads:
            t.start()
        page.until("totalsOf(snapshot).used > 3000")
        shot(page, "blocks-100000")
        for t in threads:
            t.join()
        gaps = sorted(page.run("gaps"))
        print(f"  100,000 blocks: {len(gaps)} frames, median {gaps[len(gaps) // 2]:.0f} ms, longest {gaps[-1]:.0f} ms")
        check(page.run("document.querySelectorAll('*').length") < 4000, "an element for each block")
        clean(page, server, "the large pool")
    finally:
        server.close()


def a_default_pool_can_be_read(browser):
    server = Server("--kv-blocks", "17141", "--swap-blocks", "16", "-np", "16")
    try:
        server.post("/pin", prompt="You are a friendly assistant that answers briefly. " * 4)
        page = browser.page()
        page.go(server.url + "/blocks.html")
        page.until("drawn")
        thread = threading.Thread(target=lambda: server.post("/v1/completions", prompt="A story", n=8, max_tokens=120, ignore_eos=True, temperature=1))
        thread.start()
        page.until("snapshot.sequences.length > 6 && totalsOf(snapshot).used > 20")
        page.click(".pause")
        thread.join()
        check(page.run("drawing.pool.cell") >= 20, "specks of", page.run("drawing.pool.cell"))
        check(page.run("drawing.pool.box.scrollHeight <= drawing.pool.box.clientHeight"), "not all of the pool is seen")
        if page.own[0] > 900:
            check(page.run("document.querySelector('.sequence .chip').getBoundingClientRect().bottom < innerHeight"), "the block tables are below the fold")
        presentable(page, "blocks-17141", "the block page")
        # Pointed at, a square tells of its blocks; looked into, it shows each.
        seen = page.run("(() => { const id = drawn.blocks.findIndex(b => b.refs), [from, to] = drawing.pool.idsOf(drawing.pool.cellOf(id)); drawing.point(from, to); return [from, to, document.querySelector('.details').textContent]; })()")
        check(re.match(rf"Blocks {seen[0]} to {seen[1] - 1} · \d+ used.* request 1", seen[2]), seen)
        page.run("drawing.pool.box.scrollIntoView()")
        spot = page.run("(() => { const r = drawing.pool.canvas.getBoundingClientRect(), [x, y] = drawing.pool.place(drawing.pool.cellOf(drawn.blocks.findIndex(b => b.refs))); return [r.x + x + 9, r.y + y + 9]; })()")
        for kind in ("mousePressed", "mouseReleased"):
            page.call("Input.dispatchMouseEvent", type=kind, x=spot[0], y=spot[1], button="left", clickCount=1)
        page.until("drawing.pool.per === 1 && !document.querySelector('.back').hidden")
        check(page.run("drawing.pool.n") == seen[1] - seen[0], "other blocks are shown")
        shot(page, "blocks-17141-into")
        page.click(".back")
        page.until("drawing.pool.per > 1 && document.querySelector('.back').hidden")
        page.run("drawing.pool.canvas.focus()")
        for key in ("ArrowRight", "ArrowRight", "Enter"):
            page.press(key)
        page.until("drawing.pool.per === 1")
        page.press("Escape")
        page.until("drawing.pool.per > 1")
        clean(page, server, "the large pool")
    finally:
        server.close()


# The lines of the chart "Pool" are areas on top of each other: what is cached does not cover what is used.
def what_is_cached_stands_on_what_is_used(browser, server):
    page = browser.page()
    page.go(server.url + "/blocks.html")
    page.until("snapshot")
    colors = page.run("""(() => {
        const chart = CHARTS[0], at = performance.now() / 1000, m = {at, used: 50, cached: 0, blocks: 100, waste: 0, saved: 0, running: 0, waiting: 0, swapped: 0};
        const look = cached => {
            still = {now: at, history: [{...m, at: at - 60, cached}, {...m, cached}]};
            drawCharts();
            const {canvas} = chart, p = canvas.getContext("2d"), color = share => [...p.getImageData(canvas.width * .75, Math.round(canvas.height * share), 1, 1).data].slice(0, 3).join();
            return [color(.8), color(.4), color(.05), chart.values.map(v => v.textContent).join()];
        };
        return [look(0), look(30)];
    })()""")
    used, cached = "0,114,178", "138,111,209"
    check(colors[0][0] == used and cached not in colors[0] and colors[0][3] == "50,0", colors)
    check(colors[1][0] == used and colors[1][1] == cached and colors[1][2] != cached and colors[1][3] == "50,30", colors)


def a_paused_page_takes_another_theme(browser, server):
    server.post("/v1/completions", prompt="Hello", max_tokens=40)
    page, chat = browser.page(), browser.page()
    page.go(server.url + "/blocks.html")
    page.until("document.querySelector('.state').textContent === 'live' && snapshot")
    page.click(".pause")
    page.run("window.colour = (canvas, x, y) => { const p = Object.assign(document.createElement('canvas'), {width: 1, height: 1}).getContext('2d', {willReadFrequently: true}); "
             "p.drawImage(canvas, Math.round(x * devicePixelRatio), Math.round(y * devicePixelRatio), 1, 1, 0, 0, 1, 1); return [...p.getImageData(0, 0, 1, 1).data].slice(0, 3); }; 0")
    free = "(() => { const p = drawing.pool, [x, y] = p.place(p.cellOf(drawn.blocks.findLastIndex(b => !b.refs && !b.hash))); return colour(p.canvas, x + p.cell / 2, y + p.cell * .85); })()"
    line = "colour(timeline.canvas, timeline.canvas.clientWidth / 4, 24)"
    first = page.run(f"[{free}, {line}]")
    chat.go(server.url + "/")
    theme = "light" if page.own[2] else "dark"
    chat.run(f"remember(localStorage, 'theme', '{theme}'); 0")
    page.until(f"document.documentElement.style.colorScheme === '{theme}'")
    second = page.run(f"[{free}, {line}]")
    light, dark = (second, first) if page.own[2] else (first, second)
    check(all(sum(b) < sum(a) / 2 for a, b in zip(light, dark)), "light:", light, "dark:", dark)
    chat.run("localStorage.clear(); 0")
    clean(page, server, "another theme")


def demonstrate(page, number):
    """Starts a demonstration by the keyboard, and waits for its end."""
    page.run(f"document.querySelectorAll('.demos button')[{number}].focus()")
    page.press("Enter")
    page.until("demonstrations.running")
    page.until("!demonstrations.running && totalsOf(snapshot).used === 0", 180)
    check("failed" not in page.run("demonstrations.said.textContent"), page.run("demonstrations.said.textContent"))


# Of all steps that the page keeps, how many satisfy a condition on their snapshot s and its blocks.
def steps_where(page, condition):
    return page.run(f"""(() => {{ const r = minutes.replay(); let n = 0;
        for (let i = r.steps.length; i--;) {{ const s = r.go(i); if ({condition}) n++; }} return n; }})()""")


def the_demonstrations_show_what_they_say(browser):
    server = Server("--kv-blocks", "144", "--swap-blocks", "64", "--blocks-text")  # as in the README
    try:
        page = browser.page()
        watch_shifts(page)
        page.go(server.url + "/blocks.html")
        page.until("document.querySelectorAll('.demos button:not([aria-disabled])').length === 4")
        demonstrate(page, 0)
        check(steps_where(page, "s.blocks.filter(b => b.refs >= 4).length > 2"), "no four chats share blocks")
        check(steps_where(page, "s.sequences.some(q => q.texts?.join('').includes('small library'))"), "the words are not in the blocks")
        demonstrate(page, 0)
        check(steps_where(page, "s.found.length > 2"), "no cached block comes back to life")
        check(page.run("/found again/.test(feed.textContent)"), "the feed does not say so")
        demonstrate(page, 1)
        forks = page.run("minutes.steps.map(({snapshot: s}) => s.events.filter(e => e.kind === 'fork').length)")  # a look may come between them
        check(sum(forks) >= 3, "forks:", [n for n in forks if n])
        demonstrate(page, 2)
        check(steps_where(page, "treeOf(s.sequences).children.length > 1 && s.sequences.length > 2"), "no tree of beams")
        # It is played again, slowly, from where it began; and the pool stands where one looks first.
        page.click(".said button")
        page.until("still && timeline.timer && timeline.at > 0")
        check(page.run("document.querySelector('.pool canvas').getBoundingClientRect().y") < (400 if page.own[0] > 900 else 500), "the pool is not on the first screen")
        page.click(".pause")
        page.until("!still")
        demonstrate(page, 3)
        check(page.run("minutes.moved.swap_out > 0 && minutes.moved.swap_in > 0"), "nothing went to host memory and back")
        # Back to the beams, by the keyboard.
        page.run("past.splice(0, past.length - 9); 0")  # the charts show less than what can be replayed
        page.run("document.activeElement.blur()")
        page.press("ArrowRight")
        page.until("still")
        at = page.run("""still.replay.steps.findIndex(({snapshot: s}) => s.sequences.length === 4 && s.sequences.every(q => q.request === s.sequences[0].request) &&
            s.events.some(e => e.kind === 'copy') && s.events.filter(e => e.kind === 'copy').length < 24)""")
        check(at >= 0, "no step with few copies")
        page.run(f"timeline.choose({at})")
        page.until("document.querySelector('.branch') && document.querySelector('.pool .arrows')")
        check(re.search(r"would hold \d+ of these \d+\.", page.run("document.querySelector('.room').textContent")), page.run("document.querySelector('.room').textContent"))
        check(page.run("document.querySelector('.chip .text').textContent.length") > 8, "no words in the tables")
        check(re.match(r"#[0-9a-f]{6}$", page.run("document.querySelector('.chip .mark').textContent")), "a full block without its hash")
        # Rings do not stay where their cells were: a narrow window could be scrolled sideways for a second.
        check(page.run(f"timeline.choose({at}); document.querySelectorAll('.pool .flash').length") > 0, "nothing flashes")
        for look in ((700, 900, page.own[2]), page.own):
            page.look(*look)
            page.until(f"innerWidth === {look[0]} && drawing.pool.box.clientWidth === drawing.pool.width")
            check(page.run("document.querySelectorAll('.pool .flash').length") == 0, "rings stay where their cells were")
        presentable(page, "demonstration", "a demonstration")
        check(page.run("!!document.querySelector('.pool .arrows')"), "another size of the window takes the arrows away")
        # Each step again is what it was, and the end is what the server says.
        early = page.run("points.map((m, i) => { rewind(i); return still.history.at(-1) === m; }).filter(same => !same).length")
        check(not early, early, "times the charts do not show the step")
        wrong = page.run("points.map((m, i) => { rewind(i); return totalsOf(drawn).used === m.used && totalsOf(drawn).cached === m.cached; }).filter(same => !same).length")
        check(wrong == 0, wrong, "steps are not what they were")
        check(page.run("still.replay.blocks") == json.loads(server.get("/blocks"))["blocks"], "the last step is not the server's pool")
        page.click(".pause")
        page.until("!still && drawn === snapshot")
        no_shift(page, "the demonstrations")
        clean(page, server, "the demonstrations")
    finally:
        server.close()


def what_a_server_cannot_show_is_said_on_the_button(browser):
    server = Server("--kv-blocks", "4000", "--swap-blocks", "0", "-np", "2", "--no-prefix-cache")
    try:
        page = browser.page()
        page.go(server.url + "/blocks.html")
        page.until("document.querySelectorAll('.demos button').length === 4")
        reasons = page.run("[...document.querySelectorAll('.demos button')].map(b => b.ariaDisabled === 'true' && b.querySelector('small').textContent)")
        for reason, word in zip(reasons, ("--no-prefix-cache", "-np 4", "-np 4", "--swap-blocks")):
            check(reason and word in reason, reasons)
        page.click(".demos button")
        check(not page.run("demonstrations.running"), "it runs nevertheless")
        presentable(page, "not-here", "the block page")
        check(not page.run("snapshot?.sequences.some(q => q.texts)"), "words without --blocks-text")
        clean(page, server, "the buttons")
    finally:
        server.close()


def states_and_windows_are_seen_as_what_they_are(browser):
    for model, who, item in (("nemotron_h", r"a state of 78 tokens in \d+ round blocks", "recurrent state"),
                             ("gemma2", r"group 1: 8 blocks, 12 left its window", "cache group 1"), ("mistral-swa", "", "")):
        html = os.path.join(SHOTS, f"{model}-{name_of(browser.look)}.html")  # looks run at the same time
        subprocess.run([BLOCK_VIZ, "-m", os.path.join(ROOT, "tests/data/models", f"{model}-Q8_0.gguf"), "-p", "Tell me a story of a long road and of the sea.",
                        "-n", "60", "--ignore-eos", "--raw", "--block-size", "4", "--html", html], check=True, stderr=subprocess.DEVNULL)
        page = browser.page()
        page.go("file://" + os.path.abspath(html) + "#step=59")
        check(re.search(who, page.run("document.querySelector('.who').innerText")), page.run("document.querySelector('.who').innerText"))
        legend = page.run("[...document.querySelectorAll('.legend span')].filter(e => e.checkVisibility()).map(e => e.textContent).join()")
        check(item in legend and ("recurrent" in legend) == (item == "recurrent state"), legend)
        # Only for blocks that all hold as many positions a contiguous engine can be reckoned.
        check(page.run("!!document.querySelector('.room')") == (model == "mistral-swa"), model, page.run("document.querySelector('.room')?.textContent"))
        check(model != "mistral-swa" or "12 left the window" in page.run("document.querySelector('.table').innerText"), "no block left the window")
        # Each used block has an owner, and so a colour, or the legend says what it is.
        check("grey" in legend or page.run("JSON.parse(trace.textContent).steps[58].blocks.every((b, id) => !b.refs || ownersOf(JSON.parse(trace.textContent).steps[58])[id])"), model, "has blocks of nobody")
        shot(page, model)
        readable(page, model)
        check(not page.complaints, page.complaints)


def the_walkthroughs_are_readable(browser):
    html = os.path.join(SHOTS, f"block-viz-{name_of(browser.look)}.html")
    subprocess.run([BLOCK_VIZ, "--demo", "--html", html], check=True)
    page = browser.page()
    page.go("file://" + os.path.abspath(html))
    steps = page.run("JSON.parse(document.getElementById('trace').textContent).steps.map(s => s.label)")
    for step, label in enumerate(steps):
        page.press("ArrowRight") if step else None
        check(page.run("document.querySelector('.caption').textContent") == (label or page.run("document.querySelector('.caption').textContent")), "no caption")
        if label or not steps[step - 1]:
            readable(page, f"step {step + 1}")
        if "copied" in label:
            shot(page, "block-viz")
    no_overflow(page, "block-viz")
    check(not page.complaints, page.complaints)


TESTS = [
    blocks_are_seen_changing, pause_freezes_all_that_is_seen, the_block_page_does_not_shift, marks_and_numbers_of_a_block_stand_apart,
    a_large_pool_stays_fluid, a_default_pool_can_be_read, what_is_cached_stands_on_what_is_used, the_demonstrations_show_what_they_say,
    what_a_server_cannot_show_is_said_on_the_button, a_paused_page_takes_another_theme, states_and_windows_are_seen_as_what_they_are,
    the_walkthroughs_are_readable,
]
