// Draws snapshots of the KV memory: `new BlockDrawing(root).draw(snapshot)`, and again for each new snapshot. Only the blocks of the pool
// that changed are painted, and only the block tables of sequences that changed.
// options: live: events flash on the pool as rings, and what is shown keeps its place; chips, sequences: the most to show.

const PALETTE = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8a6fd1", "#7a8b2e"]; // Okabe and Ito's, extended
const KINDS = {copy: ["#d55e00", "copy on write"], fork: ["#0072b2", "fork"], swap_out: ["#cc79a7", "swapped out"], swap_in: ["#009e73", "swapped in"],
               recompute: ["#cc79a7", "preempted"], pin: ["#e69f00", "pinned"]};
const RINGS = ["copy", "swap_out", "swap_in"]; // what happens to a block, not to a request

function percent(x) { return (100 * x).toFixed(1) + " %"; }  // for people
function length(x) { return (100 * x).toFixed(1) + "%"; }    // for style sheets

function rgb(hex) { return [1, 3, 5].map(i => parseInt(hex.slice(i, i + 2), 16)); }
function mix(hex, other, share) { // that share of `other`
  const a = rgb(hex), b = rgb(other);
  return "#" + a.map((x, i) => Math.round(x + (b[i] - x) * share).toString(16).padStart(2, "0")).join("");
}
function brightness(hex) { return rgb(hex).reduce((sum, x, i) => sum + (x / 255) ** 2.2 * [.2126, .7152, .0722][i], 0); } // 0 to 1

const SHADES = PALETTE.flatMap(c => [c, mix(c, "#ffffff", .4), mix(c, "#000000", .34), mix(c, "#ffffff", .62), mix(c, "#000000", .54)]);
function shadeOf(q) { // a hue for each request, a shade for each of its answers
  return (q.request + 7) % 8 * 5 + (q.index === 0 ? 0 : (q.index - 1) % 4 + 1);
}
function colorOf(q) { return SHADES[shadeOf(q)]; }

function totalsOf(s) {
  const t = {used: 0, cached: 0, free: 0, pinned: 0, shared: 0, entries: 0, filled: 0};
  for (const b of s.blocks) {
    if (!b.refs) { b.hash ? t.cached++ : t.free++; continue; }
    t.used++; t.entries += b.refs; t.filled += b.filled;
    if (b.pinned) t.pinned++;
    if (b.refs > 1) t.shared++;
  }
  t.waste = t.used ? 1 - t.filled / (t.used * s.block_size) : 0;
  t.saved = t.entries ? 1 - t.used / t.entries : 0;
  return t;
}

// Of each block the sequences that map it; undefined: none.
function ownersOf(s) {
  const owners = new Array(s.blocks.length);
  for (const q of s.sequences)
    if (q.status !== "swapped")
      for (const b of q.blocks) owners[b] ? owners[b].push(q) : owners[b] = [q];
  return owners;
}

function nameOf(q, several) { return `request ${q.request}` + (several.has(q.request) ? ` · ${q.index}` : ""); }
function severalOf(s) { return new Set(s.sequences.filter(q => q.index > 0).map(q => q.request)); } // requests of more than one answer

// What happened, in words: [text, whether it is out of the ordinary, kind].
function happenings(s) {
  const out = [], moved = kind => s.events.filter(e => e.kind === kind && e.from >= 0).length;
  const blocks = n => `${n} block${n === 1 ? "" : "s"}`;
  const copies = moved("copy"), evicted = moved("evict");
  if (copies > 6) out.push([`copy on write: ${blocks(copies)}`, true, "copy"]);
  if (evicted > 6) out.push([`${blocks(evicted)} evicted from the cache`, false, "evict"]);
  for (const e of s.events) {
    if (e.kind === "copy" && copies <= 6) out.push([`copy on write: ${e.from} → ${e.to}`, true, e.kind]);
    if (e.kind === "admit") out.push([`request ${e.request} admitted`, false, e.kind]);
    if (e.kind === "fork") out.push([`request ${e.request} forked`, true, e.kind]);
    if (e.kind === "recompute") out.push([`request ${e.request} gave up its blocks`, true, e.kind]);
    if (e.kind === "finish") out.push([`request ${e.request} · ${e.index} ended`, false, e.kind]);
    if (e.kind === "evict" && evicted <= 6) out.push([`${e.from} evicted from the cache`, false, e.kind]);
    if (e.kind === "pin") out.push([`request ${e.request} pinned`, true, e.kind]);
  }
  if (moved("swap_out")) out.push([`${blocks(moved("swap_out"))} swapped out`, true, "swap_out"]);
  if (moved("swap_in")) out.push([`${blocks(moved("swap_in"))} swapped in`, true, "swap_in"]);
  return out;
}

// -- the pool, on a canvas

class PoolDrawing {
  constructor(pointed) { // pointed(id): somebody points at that block; undefined: at none
    this.box = element("div", "pool");
    this.canvas = element("canvas");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "img");
    this.box.append(this.canvas);
    this.paint = this.canvas.getContext("2d");
    this.looks = [];
    this.canvas.onpointermove = this.canvas.onpointerdown = e => pointed(this.at(e.offsetX, e.offsetY));
    this.canvas.onpointerleave = this.canvas.onblur = () => pointed(undefined);
    this.canvas.onkeydown = e => {
      const step = {ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns}[e.key];
      if (!step || !this.n) return;
      e.preventDefault();
      e.stopPropagation();
      pointed(Math.max(0, Math.min(this.n - 1, (this.marked ?? -step) + step)));
      this.mark?.scrollIntoView({block: "nearest"});
    };
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { this.width = 0; if (this.last) this.draw(...this.last); });
  }

  // Cells as large as the number of blocks lets them be; above 4,000 whole pixels.
  lay(n) {
    const width = this.box.clientWidth || 640, dpr = devicePixelRatio || 1;
    if (n === this.n && width === this.width && dpr === this.dpr) return false;
    Object.assign(this, {n, width, dpr});
    const wanted = n <= 20 ? 72 : n <= 64 ? 54 : n <= 200 ? 40 : n <= 800 ? 26 : n <= 2000 ? 14 : n <= 8000 ? 9 : n <= 30000 ? 5 : 3;
    this.gap = wanted < 9 ? 1 : wanted < 26 ? 2 : Math.max(2, wanted / 11);
    this.columns = Math.max(1, Math.floor((width + this.gap) / (wanted + this.gap)));
    this.cell = wanted < 26 ? wanted : (width - (this.columns - 1) * this.gap) / this.columns;
    this.pitch = wanted < 26 ? Math.floor((width + this.gap) / this.columns * dpr) / dpr : this.cell + this.gap;
    if (wanted < 26) this.cell = this.pitch - this.gap;
    const height = Math.ceil(n / this.columns) * this.pitch;
    this.canvas.style.height = height + "px";
    this.canvas.width = Math.round(width * dpr);
    this.canvas.height = Math.round(height * dpr);
    const style = getComputedStyle(this.canvas);
    for (const name of ["free", "hatch", "line", "soft", "card"]) this[name] = style.getPropertyValue("--" + name).trim();
    return true;
  }

  place(id) { return [id % this.columns * this.pitch, Math.floor(id / this.columns) * this.pitch]; }
  at(x, y) {
    const column = Math.floor(x / this.pitch), id = Math.floor(y / this.pitch) * this.columns + column;
    return column >= 0 && column < this.columns && id >= 0 && id < this.n ? id : undefined;
  }

  draw(s, owners) {
    this.last = [s, owners];
    if (this.lay(s.blocks.length)) this.looks = new Array(this.n);
    this.paint.setTransform(this.dpr, 0, 0, this.dpr, 0, 0);
    s.blocks.forEach((b, id) => {
      let colors = 0; // a number for what can be seen of the block
      if (b.refs && owners[id]) for (const q of owners[id]) colors = (colors * 41 + shadeOf(q) + 1) % 65521;
      const look = b.refs ? ((b.refs * 65537 + b.filled) * 65521 + colors) * 2 + (b.pinned ? 1 : 0) + 2 : b.hash ? 1 : 0;
      if (look === this.looks[id]) return;
      this.looks[id] = look;
      this.paintBlock(b, id, owners[id] || [], s.block_size);
    });
    const t = totalsOf(s);
    this.canvas.setAttribute("aria-label", `Pool of ${this.n} blocks: ${t.used} used, ${t.cached} cached, ${t.free} free. Arrow keys go from block to block.`);
  }

  paintBlock(b, id, owners, slots) {
    const p = this.paint, size = this.cell, [x, y] = this.place(id), radius = size < 9 ? 0 : Math.max(2, size / 8);
    p.clearRect(x, y, size + .5, size + .5);
    p.save();
    if (radius) { p.beginPath(); p.roundRect(x, y, size, size, radius); p.clip(); }
    p.fillStyle = this.free;
    p.fillRect(x, y, size, size);
    if (b.refs) {
      const colors = [...new Set(owners.map(colorOf))].slice(0, Math.max(1, Math.floor(size)));
      if (!colors.length) colors.push("#888888");
      const ink = size * Math.min(1, b.filled / slots);
      colors.forEach((color, i) => {
        const left = x + size * i / colors.length, wide = size / colors.length;
        p.fillStyle = color;
        p.globalAlpha = .22;
        p.fillRect(left, y, wide, size - ink);
        p.globalAlpha = 1;
        p.fillRect(left, y + size - ink, wide, ink);
      });
    } else if (b.hash) {
      if (size < 9) { p.globalAlpha = .75; p.fillStyle = this.hatch; p.fillRect(x, y, size, size); p.globalAlpha = 1; }
      else {
        p.strokeStyle = this.hatch;
        p.lineWidth = size < 24 ? 1 : 1.6;
        const apart = size < 24 ? 4 : 9;
        p.beginPath();
        for (let d = -size; d < size; d += apart) { p.moveTo(x + d, y + size); p.lineTo(x + d + size, y); }
        p.globalAlpha = .65;
        p.stroke();
        p.globalAlpha = 1;
      }
    }
    p.restore();
    if (radius && !b.refs) {
      p.strokeStyle = b.hash ? this.hatch : this.line;
      p.lineWidth = 1;
      p.setLineDash(b.hash && size >= 24 ? [3, 3] : []);
      p.beginPath(); p.roundRect(x + .5, y + .5, size - 1, size - 1, radius); p.stroke();
      p.setLineDash([]);
    }
    if (size < 24) return;
    const write = (text, left, top, height, align, weight, color, most) => {
      p.font = `${weight} ${height}px system-ui, "Segoe UI", "Helvetica Neue", sans-serif`;
      p.textAlign = align;
      p.textBaseline = "middle";
      if (color === "#fff") { p.shadowColor = "rgb(0 0 0 / .6)"; p.shadowBlur = 3 * this.dpr; }
      p.fillStyle = color;
      p.fillText(text, left, top, most);
      p.shadowBlur = 0;
    };
    p.globalAlpha = b.refs || b.hash ? 1 : .55;
    // The marks have the upper part for themselves, the number what they leave.
    const pinned = b.refs && b.pinned, marked = b.refs > 1 || pinned, small = Math.max(9, size * .2), number = Math.max(9, size * .27);
    const middle = marked ? (size + small) / 2 + 1 : size / 2 + 1, under = b.refs && owners.length === 1 ? colorOf(owners[0]) : "#000000";
    // White stands on full and dark colours; on light ones, and where a slot is free, what the page is written in.
    const white = b.filled * size > slots * (size - middle) ? brightness(under) < .45 : matchMedia("(prefers-color-scheme: dark)").matches || owners.length > 1;
    write(id, x + size / 2, y + middle, number, "center", b.refs ? 620 : 400, !b.refs ? this.soft : white ? "#fff" : "#1d1f24", size - 4);
    p.globalAlpha = 1;
    const top = y + small * .5 + size * .05;
    const full = b.filled === slots || owners.length > 1 || white;
    if (pinned) write("◆", x + 2, top, small * .8, "left", 400, full ? "#fff" : "#1d1f24");
    if (b.refs > 1) write("×" + b.refs, x + size - 2, top, small, "right", 700, full ? "#fff" : "#1d1f24", size - 4 - (pinned ? small * .9 : 0));
  }

  over(className, id) { // an element exactly over a block
    const e = element("div", className), [x, y] = this.place(id);
    Object.assign(e.style, {left: x + "px", top: y + "px", width: this.cell + "px", height: this.cell + "px"});
    this.box.append(e);
    return e;
  }

  light(id) {
    this.mark?.remove();
    this.marked = id;
    this.mark = id === undefined || id >= this.n ? undefined : this.over("lit", id);
  }

  flash(events) {
    const shown = events.filter(e => RINGS.includes(e.kind) && (e.to ?? e.from ?? -1) >= 0).slice(-48);
    for (const e of shown) {
      const id = e.kind === "swap_out" ? e.from : e.to;
      if (id === undefined || id >= this.n) continue;
      const mark = this.over("flash", id);
      mark.style.setProperty("--own", KINDS[e.kind][0]);
      setTimeout(() => mark.remove(), 1200);
    }
  }

  // Copies as arrows, while they are few and the blocks large enough.
  arrows(events) {
    this.svg?.remove();
    const copies = events.filter(e => e.kind === "copy" && e.from < this.n && e.to < this.n);
    this.box.style.overflow = copies.length && this.cell >= 24 ? "visible" : "";
    if (!copies.length || copies.length > 24 || this.cell < 24) return;
    const node = (tag, attributes) => {
      const e = document.createElementNS("http://www.w3.org/2000/svg", tag);
      for (const [name, value] of Object.entries(attributes)) e.setAttribute(name, value);
      return e;
    };
    this.svg = node("svg", {class: "arrows"});
    const marker = node("marker", {id: "tip", viewBox: "0 0 8 8", refX: 6.5, refY: 4, markerWidth: 5, markerHeight: 5, orient: "auto"});
    marker.append(node("path", {d: "M0 0 8 4 0 8z"}));
    this.svg.append(marker);
    for (const e of copies) {
      const [x1, y1] = this.place(e.from), [x2, y2] = this.place(e.to), half = this.cell / 2;
      const lift = Math.max(18, Math.min(46, Math.abs(x2 - x1) / 4));
      this.svg.append(node("path", {"marker-end": "url(#tip)",
        d: `M${x1 + half} ${y1 - 1} C${x1 + half} ${y1 - 1 - lift} ${x2 + half} ${y2 - 4 - lift} ${x2 + half} ${y2 - 4}`}));
    }
    this.box.append(this.svg);
  }
}

// -- all of it

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
    this.left.append(tables);

    const card = element("section", "card"), title = element("h2", "", "Pool"), legend = element("div", "legend");
    this.size = element("small");
    title.append(this.size);
    this.pool = new PoolDrawing(id => this.point(id));
    for (const [k, text] of [["owned", "used, and how far it is filled"], ["shared", "shared: ×n tables map it"], ["cached", "free, but found by its hash"], ["", "free"]]) {
      const item = element("span");
      item.append(element("i", k), text);
      legend.append(item);
    }
    legend.append(element("span", "", "◆ pinned"));
    for (const kind of this.options.live ? RINGS : []) {
      const item = element("span"), ring = element("i", "ring");
      ring.style.setProperty("--own", KINDS[kind][0]);
      item.append(ring, KINDS[kind][1]);
      legend.append(item);
    }
    const pointed = element("span");
    pointed.append(element("i", "ring"), "pointed at");
    legend.append(pointed);
    this.details = element("div", "details");
    card.append(title, this.pool.box, legend, this.details);
    this.sums = element("section", "card");
    this.right.append(...(this.options.live ? [this.sums, card] : [card, this.sums]));
    if (!this.options.live) root.append(this.events);
    root.append(stage);
    stage.hidden = true; // until there is something to draw
    this.slots = [];     // live: of each place in the tables the key of its sequence; undefined: free
    this.holes = [];     // and what stands there then

    stage.onpointerover = stage.onfocusin = e => {
      const chip = e.target.closest?.(".chip[data-block]");
      if (chip) this.point(Number(chip.dataset.block));
      else if (e.target !== this.pool.canvas) this.point(undefined);
    };
  }

  draw(s) {
    this.s = s;
    this.owners = ownersOf(s);
    this.several = severalOf(s);
    this.stage.hidden = false;
    this.stage.classList.toggle("wide", s.blocks.length > 2000);
    this.size.textContent = `${s.blocks.length.toLocaleString("en")} blocks of ${s.block_size} token${s.block_size === 1 ? "" : "s"}`;
    if (!this.options.live) this.events.replaceChildren(...happenings(s).slice(0, 64).map(([text, hot]) => element("span", hot ? "hot" : "", text)));
    this.drawTables();
    this.drawSums();
    this.pool.draw(s, this.owners);
    if (this.options.live) this.pool.flash(s.events);
    else this.pool.arrows(s.events);
    this.point(this.pool.marked);
  }

  drawTables() {
    const {sequences, chips} = this.options, all = this.s.sequences, shown = all.slice(0, sequences), now = new Map();
    for (const q of shown) {
      const key = `${q.request}.${q.index}`;
      const many = q.blocks.length > chips, head = many ? q.blocks.slice(0, chips >> 1) : q.blocks;
      const tail = many ? q.blocks.slice(-(chips >> 1)) : [];
      const look = [q.status, q.prompt, q.tokens, q.computed, q.blocks.length, head, tail, this.several.has(q.request), q.texts ? this.s.step : 0].join();
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
      element("span", "", q.status === "pinned" ? `${q.prompt} tokens` : `${q.prompt} + ${q.tokens - q.prompt} tokens`),
      element("span", "status " + q.status, q.status));
    const released = q.released || 0; // leading blocks that a sliding window has left behind
    const add = (b, i) => {
      const chip = element("div", "chip"), map = element("div", "map"), bar = element("div", "bar-of");
      const filled = Math.max(0, Math.min(this.s.block_size, q.computed - (released + i) * this.s.block_size));
      map.append(element("i", "", `${released + i} →`), element("b", "", q.status === "swapped" ? `host ${b}` : b), element("i", "", `${filled}/${this.s.block_size}`));
      bar.style.setProperty("--fill", length(filled / this.s.block_size));
      chip.append(map, bar);
      if (q.texts && q.texts.length) chip.append(element("div", "text", (q.texts[i] || "").replace(/\n/g, "⏎") || " "));
      if (q.status !== "swapped") {
        if (!this.options.live) chip.tabIndex = 0;
        chip.dataset.block = b;
      }
      table.append(chip);
    };
    if (released) table.append(element("span", "more", `${released} released`));
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
    sum(count(t.used), "used"); sum(count(t.cached), "cached"); sum(count(t.free), "free");
    if (t.pinned || this.options.live) sum(count(t.pinned), "pinned");
    if (this.options.live) sum(count(t.shared), "shared");
    sum(percent(t.waste), "internal waste"); sum(percent(t.saved), "saved by sharing");
    if (s.swap_used || this.options.live) sum(`${count(s.swap_used)}/${count(s.swap_blocks)}`, "swap pool");
    this.sums.replaceChildren(share, grid);
  }

  // Shows who maps a block, there and in the tables.
  point(id) {
    const s = this.s;
    if (id === undefined || !s || id >= s.blocks.length) {
      if (this.pool.marked !== undefined) this.pool.light(undefined);
      for (const e of this.tables.querySelectorAll(".lit")) e.classList.remove("lit");
      this.details.textContent = "Point at a block to see who maps it.";
      return;
    }
    const b = s.blocks[id], owners = this.owners[id] || [];
    this.pool.light(id);
    for (const e of this.tables.querySelectorAll(".chip")) e.classList.toggle("lit", e.dataset.block === String(id));
    this.details.replaceChildren(element("b", "", `Block ${id}`), ` · ${b.refs ? `${b.refs} reference${b.refs > 1 ? "s" : ""}` : b.hash ? "free, still findable" : "free"}` +
      (b.refs ? ` · ${b.filled} of ${s.block_size} slots filled` : "") + (b.hash ? ` · hash ${b.hash.slice(0, 8)}…` : "") + (b.pinned ? " · pinned" : "") +
      (owners.length ? " · " + owners.slice(0, 8).map(q => nameOf(q, this.several)).join(", ") + (owners.length > 8 ? ` and ${owners.length - 8} more` : "") : ""));
  }
}
