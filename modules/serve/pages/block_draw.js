// Draws snapshots of the KV memory: `new BlockDrawing(root).draw(snapshot)`, and again for each new snapshot. Only the blocks of the pool
// that changed are painted, and only the block tables of sequences that changed. In a large pool a cell stands for several blocks, into
// which one can look by a click.
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
// Relative luminance, 0 to 1, and the contrast of two colours, as WCAG defines them.
function luminance(hex) {
  return rgb(hex).map(x => (x /= 255) <= .04045 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4).reduce((sum, x, i) => sum + x * [.2126, .7152, .0722][i], 0);
}
function contrast(a, b) {
  const [light, dark] = [luminance(a), luminance(b)].sort((x, y) => y - x);
  return (light + .05) / (dark + .05);
}
const inks = new Map(); // by colour: which of black and white stands on it; one of them has a contrast of at least 4.5
function inkOn(color) {
  if (!inks.has(color)) inks.set(color, contrast("#ffffff", color) >= contrast("#000000", color) ? "#ffffff" : "#000000");
  return inks.get(color);
}

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
      for (const b of [...q.blocks, ...(q.state ? q.state.blocks : [])]) owners[b] ? owners[b].push(q) : owners[b] = [q];
  return owners;
}

// Requests and their answers are counted from 1; in a snapshot an answer's index begins at 0.
function nameOf(q, several) { return `request ${q.request}` + (several.has(q.request) ? `, answer ${q.index + 1}` : ""); }
function severalOf(s) { return new Set(s.sequences.filter(q => q.index > 0).map(q => q.request)); } // requests of more than one answer

// What happened, in words: [text, whether it is out of the ordinary, kind].
function happenings(s) {
  const out = [], moved = kind => s.events.filter(e => e.kind === kind && e.from >= 0).length;
  const blocks = n => `${n} block${n === 1 ? "" : "s"}`;
  const several = severalOf(s);
  for (const e of s.events) if (e.index > 0) several.add(e.request);
  const copies = moved("copy"), evicted = moved("evict");
  if (copies > 6) out.push([`copy on write: ${blocks(copies)}`, true, "copy"]);
  if (evicted > 6) out.push([`${blocks(evicted)} evicted from the cache`, false, "evict"]);
  for (const e of s.events) {
    if (e.kind === "copy" && copies <= 6) out.push([`copy on write: ${e.from} → ${e.to}`, true, e.kind]);
    if (e.kind === "admit") out.push([`request ${e.request} admitted`, false, e.kind]);
    if (e.kind === "fork") out.push([`request ${e.request} forked`, true, e.kind]);
    if (e.kind === "recompute") out.push([`request ${e.request} gave up its blocks`, true, e.kind]);
    if (e.kind === "finish") out.push([`${nameOf(e, several)} ended`, false, e.kind]);
    if (e.kind === "evict" && evicted <= 6) out.push([`${e.from} evicted from the cache`, false, e.kind]);
    if (e.kind === "pin") out.push([`request ${e.request} pinned`, true, e.kind]);
  }
  if (moved("swap_out")) out.push([`${blocks(moved("swap_out"))} swapped out`, true, "swap_out"]);
  if (moved("swap_in")) out.push([`${blocks(moved("swap_in"))} swapped in`, true, "swap_in"]);
  return out;
}

// -- the pool, on a canvas

const MOST_CELLS = 800; // each a block; of a larger pool a cell stands for 2, 4, 8 … blocks

class PoolDrawing {
  // pointed(from, to): somebody points at these blocks; undefined: at none. looked(): other blocks have come into view.
  constructor(pointed, looked) {
    this.box = element("div", "pool");
    this.canvas = element("canvas");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "img");
    this.box.append(this.canvas);
    this.paint = this.canvas.getContext("2d");
    this.looks = [];
    this.zoomed = undefined; // [first, behind the last] of the blocks that are looked into
    this.looked = looked;
    this.canvas.onpointermove = this.canvas.onpointerdown = e => pointed(...this.idsOf(this.at(e.offsetX, e.offsetY)));
    this.canvas.onpointerleave = this.canvas.onblur = () => pointed(undefined);
    this.canvas.onclick = e => this.lookInto(this.at(e.offsetX, e.offsetY));
    this.canvas.onkeydown = e => {
      const step = {ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns}[e.key];
      if (e.key === "Enter" && this.mark) this.lookInto(this.cellOf(this.marked));
      else if (e.key === "Escape" && this.zoomed) this.lookAtAll();
      else if (step && this.n) pointed(...this.idsOf(Math.max(0, Math.min(this.n - 1, (this.mark ? this.cellOf(this.marked) : -step) + step))));
      else return;
      e.preventDefault();
      e.stopPropagation();
      this.mark?.scrollIntoView({block: "nearest"});
    };
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { this.width = 0; if (this.last) this.draw(...this.last); });
  }

  // -- cells and the blocks that they stand for

  cellOf(id) { return id >= this.first && id < this.behind ? Math.floor((id - this.first) / this.per) : undefined; }
  idsOf(cell) { return cell === undefined ? [undefined] : [this.first + cell * this.per, Math.min(this.behind, this.first + (cell + 1) * this.per)]; }
  place(cell) { return [cell % this.columns * this.pitch, Math.floor(cell / this.columns) * this.pitch]; }
  at(x, y) {
    const column = Math.floor(x / this.pitch), cell = Math.floor(y / this.pitch) * this.columns + column;
    return column >= 0 && column < this.columns && cell >= 0 && cell < this.n ? cell : undefined;
  }

  lookInto(cell) {
    if (cell === undefined || this.per === 1) return;
    this.zoomed = this.idsOf(cell);
    this.looked();
  }
  lookAtAll() {
    this.zoomed = undefined;
    this.looked();
  }

  // Cells as large as their number lets them be; so many blocks in one that all can be seen at once. True: all must be painted anew.
  lay(n_blocks) {
    const width = this.box.clientWidth || 640, dpr = devicePixelRatio || 1;
    if (this.zoomed && this.zoomed[1] > n_blocks) this.zoomed = undefined;
    const [first, behind] = this.zoomed ?? [0, n_blocks];
    let per = 1;
    if (behind - first > MOST_CELLS) while ((behind - first) / per > Math.floor(width / 29) * 16) per *= 2;
    const n = Math.ceil((behind - first) / per);
    if (n === this.n && per === this.per && first === this.first && behind === this.behind && width === this.width && dpr === this.dpr) return false;
    Object.assign(this, {n, per, first, behind, width, dpr});
    const wanted = n <= 20 ? 72 : n <= 64 ? 54 : n <= 200 && per === 1 ? 40 : 26;
    this.gap = Math.max(2, wanted / 11);
    this.columns = Math.max(1, Math.floor((width + this.gap) / (wanted + this.gap)));
    this.cell = (width - (this.columns - 1) * this.gap) / this.columns;
    this.pitch = this.cell + this.gap;
    const height = Math.ceil(n / this.columns) * this.pitch;
    this.canvas.style.height = height + "px";
    this.canvas.width = Math.round(width * dpr);
    this.canvas.height = Math.round(height * dpr);
    const style = getComputedStyle(this.canvas);
    for (const name of ["free", "hatch", "line", "soft", "ink"]) this[name] = style.getPropertyValue("--" + name).trim();
    this.quiet = mix(this.soft, this.ink, .5); // what is written on a free block
    return true;
  }

  draw(s, owners) {
    this.last = [s, owners];
    if (this.lay(s.blocks.length)) this.looks = new Array(this.n);
    this.paint.setTransform(this.dpr, 0, 0, this.dpr, 0, 0);
    for (let cell = 0; cell < this.n; cell++) {
      const [from, to] = this.idsOf(cell);
      let look = 0; // a number for what can be seen of the cell
      for (let id = from; id < to; id++) {
        const b = s.blocks[id];
        let colors = 0;
        if (b.refs && owners[id]) for (const q of owners[id]) colors = (colors * 41 + shadeOf(q) + 1) % 65521;
        const one = b.refs ? ((b.refs * 65537 + b.filled) * 65521 + colors) * 2 + (b.pinned ? 1 : 0) + 2 : b.hash ? 1 : 0;
        look = this.per === 1 ? one : (look * 31 + one) % 140737488355213;
      }
      if (look === this.looks[cell]) continue;
      this.looks[cell] = look;
      if (this.per === 1) this.paintBlock(s.blocks[from], from, cell, owners[from] || [], s.block_size);
      else this.paintBlocks(s.blocks.slice(from, to), cell, owners.slice(from, to));
    }
    const t = totalsOf(s), many = this.per > 1 ? `, ${this.per} in a cell; Enter looks into a cell` : "";
    const part = this.zoomed ? `Blocks ${this.first} to ${this.behind - 1} of a pool of ${s.blocks.length}` : `Pool of ${s.blocks.length} blocks`;
    this.canvas.setAttribute("aria-label", `${part}${many}: ${t.used} used, ${t.cached} cached, ${t.free} free${this.zoomed ? " in all; Escape shows all" : ""}. Arrow keys go from cell to cell.`);
  }

  // Paints within the rounded corners of a cell.
  within(cell, paint) {
    const p = this.paint, size = this.cell, [x, y] = this.place(cell), radius = Math.max(2, size / 8);
    p.clearRect(x, y, size + .5, size + .5);
    p.save();
    p.beginPath();
    p.roundRect(x, y, size, size, radius);
    p.clip();
    p.fillStyle = this.free;
    p.fillRect(x, y, size, size);
    paint(p, x, y, size);
    p.restore();
    return [p, x, y, size, radius];
  }

  hatchOver(x, y, width, height) { // from y - height to y
    const p = this.paint, apart = this.cell < 40 ? 5 : 9;
    p.save();
    p.beginPath();
    p.rect(x, y - height, width, height);
    p.clip();
    p.strokeStyle = this.hatch;
    p.lineWidth = this.cell < 40 ? 1.2 : 1.6;
    p.beginPath();
    for (let d = -height; d < width; d += apart) { p.moveTo(x + d, y); p.lineTo(x + d + height, y - height); }
    p.stroke();
    p.restore();
  }

  outline(x, y, size, radius, color, dashed) {
    const p = this.paint;
    p.strokeStyle = color;
    p.lineWidth = 1;
    p.setLineDash(dashed ? [3, 3] : []);
    p.beginPath(); p.roundRect(x + .5, y + .5, size - 1, size - 1, radius); p.stroke();
    p.setLineDash([]);
  }

  // A text that can be read on what it stands on. `areas`: [x, y, width, height, colour] of all that may be under it.
  write(areas, text, left, top, height, align, weight, most = Infinity) {
    const p = this.paint;
    p.font = `${weight} ${height}px system-ui, "Segoe UI", "Helvetica Neue", sans-serif`;
    p.textAlign = align;
    p.textBaseline = "middle";
    const wide = Math.min(most, p.measureText(text).width), x = left - (align === "center" ? wide / 2 : align === "right" ? wide : 0), y = top - height * .55;
    const under = areas.filter(([ax, ay, w, h]) => ax < x + wide && ax + w > x && ay < y + height * 1.1 && ay + h > y);
    const kinds = new Set(under.map(([, , , , color]) => inkOn(color)));
    if (kinds.size > 1) { // no ink stands on all of it: a plate does
      p.fillStyle = "rgb(255 255 255 / .88)";
      p.beginPath(); p.roundRect(x - 2, y, wide + 4, height * 1.1, 3); p.fill();
    }
    p.fillStyle = kinds.size > 1 ? "#000000" : [...kinds][0] ?? this.quiet;
    p.fillText(text, left, top, ...(isFinite(most) ? [most] : []));
  }

  paintBlock(b, id, cell, owners, slots) {
    const areas = [];
    const [p, x, y, size, radius] = this.within(cell, (p, x, y, size) => {
      if (!b.refs) { if (b.hash) this.hatchOver(x, y + size, size, size); return; }
      const colors = [...new Set(owners.map(colorOf))].slice(0, Math.max(1, Math.floor(size)));
      if (!colors.length) colors.push("#888888");
      const ink = size * Math.min(1, b.filled / slots);
      colors.forEach((color, i) => {
        const left = x + size * i / colors.length, wide = size / colors.length;
        for (const [top, high, full] of [[y, size - ink, mix(this.free, color, .22)], [y + size - ink, ink, color]]) {
          p.fillStyle = full;
          p.fillRect(left, top, wide, high);
          if (high > 0) areas.push([left, top, wide, high, full]);
        }
      });
    });
    if (!b.refs) this.outline(x, y, size, radius, b.hash ? this.hatch : this.line, b.hash);
    // The marks have the upper part for themselves, the number what they leave.
    const pinned = b.refs && b.pinned, marked = b.refs > 1 || pinned, small = Math.max(9, size * .2), number = Math.max(9, size * .27);
    const middle = marked ? (size + small) / 2 + 1 : size / 2 + 1, top = y + small * .5 + size * .05;
    this.write(areas, id, x + size / 2, y + middle, number, "center", b.refs ? 620 : 400, size - 4);
    if (pinned) this.write(areas, "◆", x + 2, top, small * .8, "left", 400);
    if (b.refs > 1) this.write(areas, "×" + b.refs, x + size - 2, top, small, "right", 700, size - 4 - (pinned ? small * .9 : 0));
  }

  // Several blocks in one cell: from below the part that is used, in the colours of those who use it, then the cached part.
  paintBlocks(blocks, cell, owners) {
    const shares = new Map(), areas = [];
    let used = 0, cached = 0;
    blocks.forEach((b, i) => {
      if (!b.refs) { cached += b.hash ? 1 : 0; return; }
      used++;
      const color = owners[i] ? colorOf(owners[i][0]) : "#888888";
      shares.set(color, (shares.get(color) ?? 0) + 1);
    });
    const [p, x, y, size, radius] = this.within(cell, (p, x, y, size) => {
      const high = used ? Math.max(2, size * used / blocks.length) : 0;
      let left = x;
      for (const [color, n] of shares) {
        const wide = size * n / used;
        p.fillStyle = color;
        p.fillRect(left, y + size - high, wide + .5, high);
        areas.push([left, y + size - high, wide, high, color]);
        left += wide;
      }
      if (cached) this.hatchOver(x, y + size - high, size, Math.min(size - high, Math.max(2, size * cached / blocks.length)));
      if (high < size) areas.push([x, y, size, size - high, this.free]);
    });
    this.outline(x, y, size, radius, used ? mix(this.line, this.ink, .25) : cached ? this.hatch : this.line);
    if (used) this.write(areas, used, x + size / 2, y + size / 2 + 1, Math.max(9, size * .4), "center", 620, size - 4);
  }

  over(className, id) { // an element exactly over a block's cell
    const e = element("div", className), [x, y] = this.place(this.cellOf(id));
    Object.assign(e.style, {left: x + "px", top: y + "px", width: this.cell + "px", height: this.cell + "px"});
    this.box.append(e);
    return e;
  }

  light(id, to) {
    this.mark?.remove();
    this.marked = id;
    this.markedTo = to;
    this.mark = id === undefined || this.cellOf(id) === undefined ? undefined : this.over("lit", id);
  }

  flash(events) {
    const shown = events.filter(e => RINGS.includes(e.kind) && (e.to ?? e.from ?? -1) >= 0).slice(-48);
    for (const e of shown) {
      const id = e.kind === "swap_out" ? e.from : e.to;
      if (id === undefined || this.cellOf(id) === undefined) continue;
      const mark = this.over("flash", id);
      mark.style.setProperty("--own", KINDS[e.kind][0]);
      setTimeout(() => mark.remove(), 1200);
    }
  }

  // Copies as arrows, while they are few and the blocks large enough.
  arrows(events) {
    this.svg?.remove();
    const copies = this.per > 1 ? [] : events.filter(e => e.kind === "copy" && this.cellOf(e.from) !== undefined && this.cellOf(e.to) !== undefined);
    this.box.style.overflow = copies.length ? "visible" : "";
    if (!copies.length || copies.length > 24) return;
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
      const [x1, y1] = this.place(this.cellOf(e.from)), [x2, y2] = this.place(this.cellOf(e.to)), half = this.cell / 2;
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
    this.back = element("button", "back", "Whole pool");
    this.back.type = "button";
    this.back.onclick = () => this.pool.lookAtAll();
    title.append(this.size, this.back);
    this.pool = new PoolDrawing((from, to) => this.point(from, to), () => { this.point(undefined); this.draw(this.s); });
    const item = (k, text, of) => {
      const span = element("span", of);
      span.append(...(k === undefined ? [] : [element("i", k)]), text);
      legend.append(span);
    };
    item("owned", "used, and how far it is filled", "one");
    item("owned", "the used part, and how many blocks are used", "many");
    item("shared", "shared: ×n tables map it", "one");
    item("cached", "free, but found by its hash");
    item("", "free");
    item(undefined, "◆ pinned", "one");
    for (const kind of this.options.live ? RINGS : []) {
      const span = element("span"), ring = element("i", "ring");
      ring.style.setProperty("--own", KINDS[kind][0]);
      span.append(ring, KINDS[kind][1]);
      legend.append(span);
    }
    item("ring", "pointed at");
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
    if (!this.options.live) this.events.replaceChildren(...happenings(s).slice(0, 64).map(([text, hot]) => element("span", hot ? "hot" : "", text)));
    this.drawTables();
    this.drawSums();
    this.pool.draw(s, this.owners);
    this.drawTitle();
    if (this.options.live) this.pool.flash(s.events);
    else this.pool.arrows(s.events);
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
      const look = [q.status, q.prompt, q.tokens, q.computed, q.blocks.length, head, tail, this.several.has(q.request), q.texts ? this.s.step : 0, q.state && q.state.tokens].join();
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
        (q.state ? `, state of ${q.state.tokens} in ${q.state.blocks.length} blocks` : "")),
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

  // Shows who maps a block, or the blocks from `id` up to `to`, there and in the tables.
  point(id, to = id + 1) {
    const s = this.s;
    if (id === undefined || !s || id >= s.blocks.length) {
      if (this.pool.marked !== undefined) this.pool.light(undefined);
      for (const e of this.tables.querySelectorAll(".lit")) e.classList.remove("lit");
      this.details.textContent = this.pool.per > 1 ? "Point at a square to see who maps its blocks; a click looks into it." : "Point at a block to see who maps it.";
      return;
    }
    this.pool.light(id, to);
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
      (b.state ? " · a recurrent state" : b.refs ? ` · ${b.filled} of ${s.block_size} slots filled` : "") + (b.hash ? ` · hash ${b.hash.slice(0, 8)}…` : "") + (b.pinned ? " · pinned" : "") + names(owners));
  }
}
