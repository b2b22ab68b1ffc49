// The pool of blocks, on a canvas.

const MOST_CELLS = 800; // each a block; of a larger pool a cell stands for 2, 4, 8 … blocks

class PoolDrawing {
  // pointed(from, to): somebody points at these blocks; undefined: at none. looked(): other blocks have come into view. used: only blocks in
  // use are drawn, each in a place of its own for as long as it is.
  constructor(pointed, looked, used = false) {
    this.places = used ? [] : undefined; // of each cell the block; undefined: none

    this.box = element("div", used ? "seats" : "pool");
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
    const repaint = () => { this.width = 0; if (this.last) this.draw(...this.last); };
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
    addEventListener("theme", repaint); // chosen by the reader, on the chat's page
  }

  // -- cells and the blocks that they stand for

  cellOf(id) {
    if (this.places) return this.cells.get(id);
    return id >= this.first && id < this.behind ? Math.floor((id - this.first) / this.per) : undefined;
  }
  idsOf(cell) {
    if (this.places) return [this.places[cell], this.places[cell] + 1];
    return cell === undefined ? [undefined] : [this.first + cell * this.per, Math.min(this.behind, this.first + (cell + 1) * this.per)];
  }

  pick(blocks) {
    const {places} = this, there = new Set();
    places.forEach((id, cell) => blocks[id]?.refs ? there.add(id) : places[cell] = undefined);
    let cell = 0;
    blocks.forEach((b, id) => {
      if (!b.refs || there.has(id)) return;
      while (places[cell] !== undefined) cell++;
      if (cell < MOST_CELLS) places[cell] = id;
    });
    while (places.length && places.at(-1) === undefined) places.pop();
    this.cells = new Map();
    places.forEach((id, cell) => { if (id !== undefined) this.cells.set(id, cell); });
  }

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
    let seats = 64; // twice as many when they do not suffice: then all moves, which is rare
    while (seats < (this.places?.length ?? 0)) seats *= 2;
    const [first, behind] = this.zoomed ?? [0, this.places ? seats : n_blocks];
    let per = 1;
    if (behind - first > MOST_CELLS) while ((behind - first) / per > Math.floor(width / 29) * 16) per *= 2;
    const n = Math.ceil((behind - first) / per);
    if (n === this.n && per === this.per && first === this.first && behind === this.behind && width === this.width && dpr === this.dpr) return false;
    Object.assign(this, {n, per, first, behind, width, dpr});
    const wanted = n <= 20 ? 72 : n <= 64 && !this.places ? 54 : n <= 200 && per === 1 ? 40 : 26;
    this.gap = Math.max(2, wanted / 11);
    this.columns = Math.max(1, Math.floor((width + this.gap) / (wanted + this.gap)));
    this.cell = (width - (this.columns - 1) * this.gap) / this.columns;
    this.pitch = this.cell + this.gap;
    const places = [n, per, first, this.columns, this.pitch].join();
    if (places !== this.laid) for (const e of this.box.querySelectorAll(".flash, .arrows")) e.remove(); // they stand where their cells were
    this.laid = places;
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
    if (this.places) this.pick(s.blocks);
    if (this.lay(s.blocks.length)) this.looks = new Array(this.n);
    this.paint.setTransform(this.dpr, 0, 0, this.dpr, 0, 0);
    for (let cell = 0; cell < this.n; cell++) {
      const [from, to] = this.idsOf(cell);
      let look = from === undefined ? -1 : this.places ? 8 * from : 0; // a number for what can be seen of the cell
      for (let id = from; id < to; id++) {
        const b = s.blocks[id];
        let colors = 0;
        if (b.refs && owners[id]) for (const q of owners[id]) colors = (colors * 41 + shadeOf(q) + 1) % 65521;
        const one = b.refs ? ((b.refs * 65537 + b.filled) * 65521 + colors) * 2 + (b.pinned ? 1 : 0) + 4 : (b.hash ? 1 : 0) + (b.state ? 2 : 0);
        look = this.per === 1 && !this.places ? one : (look * 31 + one) % 140737488355213;
      }
      if (look === this.looks[cell]) continue;
      this.looks[cell] = look;
      if (from === undefined) this.within(cell, () => {});
      else if (this.per === 1) this.paintBlock(s.blocks[from], from, cell, owners[from] || [], s.block_size);
      else this.paintBlocks(s.blocks.slice(from, to), cell, owners.slice(from, to));
    }
    const t = totalsOf(s), many = this.per > 1 ? `, ${this.per} in a cell; Enter looks into a cell` : "";
    const part = this.places ? `Blocks in use of a pool of ${s.blocks.length}` : this.zoomed ? `Blocks ${this.first} to ${this.behind - 1} of a pool of ${s.blocks.length}` : `Pool of ${s.blocks.length} blocks`;
    this.canvas.setAttribute("aria-label", `${part}${many}: ${t.used} used, ${t.cached} cached, ${t.free} free${this.zoomed ? " in all; Escape shows all" : ""}. Arrow keys go from cell to cell.`);
  }

  // Paints within the rounded corners of a cell, or within a circle.
  within(cell, paint, round) {
    const p = this.paint, size = this.cell, [x, y] = this.place(cell), radius = round ? size / 2 : Math.max(2, size / 8);
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
      const ink = size * (b.state ? 1 : Math.min(1, b.filled / slots));
      colors.forEach((color, i) => {
        const left = x + size * i / colors.length, wide = size / colors.length;
        for (const [top, high, full] of [[y, size - ink, mix(this.free, color, .22)], [y + size - ink, ink, color]]) {
          p.fillStyle = full;
          p.fillRect(left, top, wide, high);
          if (high > 0) areas.push([left, top, wide, high, full]);
        }
      });
    }, b.state);
    if (!b.refs) this.outline(x, y, size, radius, b.hash ? this.hatch : this.line, b.hash);
    // The marks have the upper part for themselves, the number what they leave.
    const pinned = b.refs && b.pinned, marked = b.refs > 1 || pinned, small = Math.max(9, size * .2), number = Math.max(9, size * .27);
    const middle = marked ? (size + small) / 2 + 1 : size / 2 + 1, top = y + small * .5 + size * .05;
    this.write(areas, id, x + size / 2, y + middle, number, "center", b.refs ? 620 : 400, size - 4);
    if (pinned) this.write(areas, "◆", x + 2, top, small * .8, "left", 400);
    if (b.group && !b.state && size >= 39) this.write(areas, "g" + b.group, x + 3, y + size - small * .6, small * .9, "left", 600);
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

  // Copies as arrows, while they are few and the blocks large enough; for `milliseconds`, or until the next call.
  arrows(events, milliseconds) {
    const copies = this.per > 1 ? [] : events.filter(e => e.kind === "copy" && this.cellOf(e.from) !== undefined && this.cellOf(e.to) !== undefined);
    if (milliseconds && !copies.length) return; // the former ones stay for their time
    this.svg?.remove();
    clearTimeout(this.fading);
    if (!milliseconds) this.box.style.overflow = copies.length ? "visible" : "";
    if (!copies.length || copies.length > 24) return;
    if (milliseconds) this.fading = setTimeout(() => this.svg.remove(), milliseconds);
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
