// Draws snapshots of the KV memory: `new BlockDrawing(root).draw(snapshot)`, and again for each new snapshot. Only the blocks of the pool
// that changed are painted, and only the block tables of sequences that changed. In a large pool a cell stands for several blocks, into
// which one can look by a click.
// options: live: events flash on the pool as rings, and what is shown keeps its place; chips, sequences: the most to show.
// draw(snapshot, still, again): still: the reader looks at one moment of a live pool, so that nothing fades. again: of what is on the page
// already, so that nothing flashes.

class BlockDrawing {
  constructor(root, options = {}) {
    this.options = {live: false, chips: 64, sequences: 256, ...options};
    this.boxes = new Map(); // of the block tables: key → [what it shows, element]
    const stage = this.stage = element("div", this.options.live ? "stage live" : "stage");
    this.left = element("div");
    this.right = element("div");
    stage.append(this.left, this.right);

    this.events = element("div", "events");
    const tables = element("section", "card"), h = element("h2", "", "Block tables");
    h.append(element("small", "", "logical → physical"));
    this.tables = element("div");
    tables.append(h, this.tables);
    this.tree = new TreeDrawing();
    this.left.append(...(this.options.live ? [this.tree.card] : []), tables);

    const card = element("section", "card"), title = element("h2", "", "Pool"), legend = element("div", "legend");
    this.size = element("small");
    this.back = element("button", "back", "Whole pool");
    this.back.type = "button";
    this.back.onclick = () => this.pool.lookAtAll();
    title.append(this.size, this.back);
    this.pool = new PoolDrawing((from, to) => this.point(from, to), () => { this.point(undefined); this.draw(this.s, this.still); });
    const item = (k, text, of) => {
      const span = element("span", of);
      span.append(...(k === undefined ? [] : [element("i", k)]), text);
      legend.append(span);
      return span;
    };
    item("colors", "a colour for each request, a shade for each of its answers");
    item("owned", "used, and how far it is filled");
    item("owned", "the used part, and how many blocks are used", "many");
    item("shared", "shared: ×n tables map it");
    item("cached", "free, but found by its hash");
    item("", "free");
    item(undefined, "◆ pinned");
    this.rare = [[item("round", "a recurrent state"), b => b.state], [item(undefined, "g1: of the layers of cache group 1"), b => b.group > 0 && !b.state],
      [item("grey", "grey: of a layer whose tables are not shown"), (b, id) => b.refs && !this.owners[id]]];
    for (const kind of this.options.live ? RINGS : []) {
      const span = element("span"), ring = element("i", "ring");
      ring.style.setProperty("--own", KINDS[kind][0]);
      span.append(ring, KINDS[kind][1]);
      legend.append(span);
    }
    item("ring", "pointed at");
    this.details = element("div", "details");
    this.used = new PoolDrawing((from, to) => this.point(from, to), () => {}, true); // of a pool whose blocks are too many to be drawn large
    this.usedTitle = element("p", "rest", "The blocks in use:");
    this.allTitle = element("p", "rest", "All blocks:");
    card.append(title, this.usedTitle, this.used.box, this.allTitle, this.pool.box, legend, this.details);
    this.sums = element("section", "card");
    this.right.append(card, this.sums);
    if (!this.options.live) root.append(this.events);
    root.append(stage);
    stage.hidden = true; // until there is something to draw
    this.slots = [];     // live: of each place in the tables the key of its sequence; undefined: free
    this.holes = [];     // and what stands there then

    stage.onpointerover = stage.onfocusin = e => {
      const chip = e.target.closest?.(".chip[data-block]");
      if (chip) this.point(Number(chip.dataset.block));
      else if (e.target !== this.pool.canvas && e.target !== this.used.canvas) this.point(undefined);
    };
  }

  draw(s, still, again) {
    this.s = s;
    this.still = still;
    this.owners = ownersOf(s);
    this.several = severalOf(s);
    this.stage.hidden = false;
    if (!this.options.live) this.events.replaceChildren(...happenings(s).slice(0, 64).map(([text, hot]) => element("span", hot ? "hot" : "", text)));
    this.stage.classList.toggle("words", s.sequences.some(q => q.texts));
    for (const [item, is] of this.rare) item.hidden = !s.blocks.some(is);
    this.drawTables();
    this.tree.draw(s);
    this.drawSums();
    this.pool.draw(s, this.owners);
    this.drawTitle();
    const many = this.pool.per > 1 || !!this.pool.zoomed, near = many ? this.used : this.pool; // where a block can be seen
    for (const e of [this.usedTitle, this.used.box, this.allTitle]) e.hidden = !many;
    if (many) this.used.draw(s, this.owners);
    if (this.options.live && !again) near.flash([...s.events, ...(s.found ?? []).map(to => ({kind: "hit", to}))]);
    near.arrows(s.events, this.options.live && !still ? 2000 : 0);
    this.point(this.pool.marked, this.pool.markedTo);
  }

  drawTitle() {
    const {first, behind, per, zoomed} = this.pool, s = this.s, count = x => x.toLocaleString("en");
    const all = `${count(s.blocks.length)} blocks of ${s.block_size} token${s.block_size === 1 ? "" : "s"}`;
    this.size.textContent = (zoomed ? `blocks ${count(first)} to ${count(behind - 1)} of ${count(s.blocks.length)}` : all) + (per > 1 ? ` · ${per} in a square` : "");
    this.back.hidden = !zoomed;
    this.stage.classList.toggle("many", per > 1);
  }

  drawTables() {
    const {sequences, chips} = this.options, all = this.s.sequences, shown = all.slice(0, sequences), now = new Map();
    for (const q of shown) {
      const key = `${q.request}.${q.index}`;
      const many = q.blocks.length > chips, head = many ? q.blocks.slice(0, chips >> 1) : q.blocks;
      const tail = many ? q.blocks.slice(-(chips >> 1)) : [];
      const look = [q.status, q.prompt, q.tokens, q.computed, q.blocks.length, head, tail, this.several.has(q.request), q.texts ? q.texts.at(-1) : "", q.released, q.state && q.state.tokens, q.other_groups?.map(g => [g.blocks.length, g.released])].join();
      const before = this.boxes.get(key);
      now.set(key, before && before[0] === look ? before : [look, this.drawTable(q, head, tail)]);
    }
    this.boxes = now;
    const wanted = this.options.live ? this.placed(now) : [...now.values()].map(([, box]) => box);
    if (!all.length) wanted.push(element("div", "rest", "No request holds a block."));
    if (all.length > shown.length) wanted.push(element("div", "sequence rest", `… and ${(all.length - shown.length).toLocaleString("en")} more`));
    const there = this.tables.childNodes;
    if (there.length !== wanted.length || wanted.some((box, i) => box !== there[i])) this.tables.replaceChildren(...wanted);
  }

  // The boxes, each where it was; a new one takes the first place that is free.
  placed(now) {
    const slots = this.slots.map(key => now.has(key) ? key : undefined), there = new Set(slots);
    for (const key of now.keys()) {
      if (there.has(key)) continue;
      const free = slots.indexOf(undefined);
      if (free < 0) slots.push(key);
      else slots[free] = key;
    }
    while (slots.length && slots.at(-1) === undefined) slots.pop();
    this.slots = slots;
    return slots.map((key, i) => now.get(key)?.[1] ?? (this.holes[i] ??= element("div", "sequence")));
  }

  drawTable(q, head, tail) {
    const box = element("div", "sequence " + q.status), who = element("div", "who"), table = element("div", "table");
    box.style.setProperty("--own", colorOf(q));
    who.append(element("i", "dot"), element("b", "", nameOf(q, this.several)),
      element("span", "", (q.status === "pinned" ? `${q.prompt} tokens` : `${q.prompt} + ${q.tokens - q.prompt} tokens`) +
        (q.state ? `, a state of ${q.state.tokens} tokens in ${q.state.blocks.length} round blocks` : "") +
        (q.other_groups ?? []).map((g, i) => `, group ${i + 1}: ${g.blocks.length} blocks` + (g.released ? `, ${g.released} left its window` : "")).join("")),
      element("span", "status " + q.status, q.status));
    const released = q.released || 0; // leading blocks that a sliding window has left behind
    const add = (b, i) => {
      const chip = element("div", "chip"), map = element("div", "map"), bar = element("div", "bar-of");
      const filled = Math.max(0, Math.min(this.s.block_size, q.computed - (released + i) * this.s.block_size));
      const hash = q.status === "swapped" ? "" : this.s.blocks[b].hash;
      map.append(element("i", "", `${released + i} →`), element("b", "", q.status === "swapped" ? `host ${b}` : b));
      bar.style.setProperty("--fill", length(filled / this.s.block_size));
      chip.append(map, bar, element("div", "mark", hash ? "#" + hash.slice(0, 6) : `${filled} of ${this.s.block_size}`));
      if (q.texts) chip.append(element("div", "text", oneLine(q.texts[i] ?? "")));
      if (q.status !== "swapped") {
        if (!this.options.live) chip.tabIndex = 0;
        chip.dataset.block = b;
      }
      table.append(chip);
    };
    if (released) table.append(element("span", "more", `${released} left the window`));
    head.forEach((b, i) => add(b, i));
    if (tail.length) table.append(element("span", "more", `… ${q.blocks.length - head.length - tail.length} more …`));
    tail.forEach((b, i) => add(b, q.blocks.length - tail.length + i));
    if (!q.blocks.length) table.append(element("span", "", q.status === "waiting" ? "waits for blocks" : "has no blocks: it will be computed again"));
    box.append(who, table);
    return box;
  }

  drawSums() {
    const s = this.s, t = totalsOf(s), share = element("div", "share"), grid = element("div", "sums");
    for (const [part, color] of [[t.used, "var(--accent)"], [t.cached, "var(--hatch)"]]) {
      const i = element("i");
      i.style.width = length(part / Math.max(1, s.blocks.length));
      i.style.background = color;
      share.append(i);
    }
    const sum = (value, name) => { const d = element("div"); d.append(element("b", "", value), name); grid.append(d); };
    const count = x => x.toLocaleString("en");
    if (!this.options.live) { sum(count(t.used), "used"); sum(count(t.cached), "cached"); }
    sum(count(t.free), "free");
    if (t.pinned || this.options.live) sum(count(t.pinned), "pinned");
    if (this.options.live) sum(count(t.shared), "shared"); // the rest stands in the page's charts
    else { sum(percent(t.waste), "internal waste"); sum(percent(t.saved), "saved by sharing"); }
    const parts = this.options.live ? [grid] : [share, grid], room = contiguousOf(s);
    if (s.swap_blocks && (s.swap_used || s.host_cached || s.in_files || this.options.live)) parts.push(this.journey(s, t));
    if (room?.held || (room && this.options.live))
      parts.push(element("p", "room", room.held ? `An engine that reserves ${count(s.context)} tokens in one piece for each sequence would hold ${count(room.room)} of these ${count(room.held)}.`
        : `An engine that reserves ${count(s.context)} tokens in one piece for each sequence would have room for ${count(Math.floor(s.blocks.length * s.block_size / s.context))}.`));
    this.sums.replaceChildren(...parts);
  }

  // Where blocks go when the pool is full, and how many went.
  journey(s, t) {
    const line = element("div", "journey"), count = x => x.toLocaleString("en");
    const place = (name, text) => { const e = element("div"); e.append(element("b", "", name), text); line.append(e); };
    place("Pool", `${count(t.used)} of ${count(s.blocks.length)} used`);
    const ways = element("span");
    ways.append(element("i", "", `${s.moved ? count(s.moved.swap_out) + " " : ""}→`), element("i", "", `← ${s.moved ? count(s.moved.swap_in) : ""}`));
    line.append(ways);
    place("Host memory", `${count(s.swap_used)} swapped out, ${count(s.host_cached)} cached, of ${count(s.swap_blocks)}`);
    if (s.in_files) {
      line.append(element("span", "", "⇄"));
      place("Files", `${count(s.in_files)} cached`);
    }
    return line;
  }

  // Shows who maps a block, or the blocks from `id` up to `to`, there and in the tables.
  point(id, to = id + 1) {
    const s = this.s;
    if (id === undefined || !s || id >= s.blocks.length) {
      if (this.pool.marked !== undefined) for (const pool of [this.pool, this.used]) pool.light(undefined);
      for (const e of this.tables.querySelectorAll(".lit")) e.classList.remove("lit");
      this.details.textContent = this.pool.per > 1 ? "Point at a square to see who maps its blocks; a click looks into it." : "Point at a block to see who maps it.";
      return;
    }
    this.pool.light(id, to);
    if (!this.used.box.hidden) this.used.light(id, to);
    for (const e of this.tables.querySelectorAll(".chip")) e.classList.toggle("lit", Number(e.dataset.block) >= id && Number(e.dataset.block) < to);
    const names = owners => owners.length ? " · " + owners.slice(0, 8).map(q => nameOf(q, this.several)).join("; ") + (owners.length > 8 ? ` and ${owners.length - 8} more` : "") : "";
    if (to - id > 1) {
      const t = totalsOf({...s, blocks: s.blocks.slice(id, to)});
      this.details.replaceChildren(element("b", "", `Blocks ${id} to ${to - 1}`), ` · ${t.used} used` + (t.shared ? ` (${t.shared} shared)` : "") + (t.pinned ? ` (${t.pinned} pinned)` : "") +
        ` · ${t.cached} free, still findable · ${t.free} free` + names([...new Set(this.owners.slice(id, to).flat().filter(Boolean))]));
      return;
    }
    const b = s.blocks[id], owners = this.owners[id] || [];
    this.details.replaceChildren(element("b", "", `Block ${id}`), ` · ${b.refs ? `${b.refs} reference${b.refs > 1 ? "s" : ""}` : b.hash ? "free, still findable" : "free"}` +
      (b.state ? " · a recurrent state" : b.refs ? ` · ${b.filled} of ${s.block_size} slots filled` : "") + (b.hash ? ` · hash ${b.hash.slice(0, 8)}…` : "") + (b.group ? ` · of cache group ${b.group}` : "") + (b.first === undefined ? "" : ` · in the entry of block ${b.first}`) + (b.pinned ? " · pinned" : "") + names(owners) + this.wordsIn(b.first ?? id, b, owners));
  }

  wordsIn(id, b, owners) { // quoted; "" where they are not known
    const q = owners.find(q => q.texts && q.blocks.includes(id)), text = q ? q.texts[q.blocks.indexOf(id)] : b.hash && this.s.words?.get(b.hash);
    return text ? ` · “${oneLine(text)}”` : "";
  }
}

function oneLine(text) { return text.replace(/\n/g, "⏎"); }
