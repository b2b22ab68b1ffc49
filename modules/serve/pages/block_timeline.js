// A run as a line to go along: what of the pool was used and cached, events as dots, and buttons that play it and step through it.

const TIMELINE_HEIGHT = 62, TIMELINE_TOP = 16; // pixels; the dots stand above the top of the curves

class Timeline {
  // root: an element for it. shown(i): the reader goes to point i. options: stepTime(i): milliseconds that playing stays at point i;
  // ended(): playing has come to the end.
  constructor(root, shown, {stepTime, ended = () => {}}) {
    Object.assign(this, {shown, stepTime, ended, points: [], at: 0, timer: 0, root});
    const button = (text, name, act) => {
      const b = element("button", "", text);
      b.type = "button";
      b.setAttribute("aria-label", name);
      b.onclick = act;
      return b;
    };
    this.canvas = element("canvas", "timeline");
    this.canvas.setAttribute("aria-label", "Blocks over time");
    this.canvas.setAttribute("role", "img");
    this.canvas.onclick = e => this.choose(Math.round((e.offsetX - 4) / Math.max(1, this.canvas.clientWidth - 8) * (this.points.length - 1)));
    this.button = button("▶", "Play or stop", () => this.timer ? this.stop() : this.play());
    this.slider = element("input");
    this.slider.type = "range";
    this.slider.min = 0;
    this.slider.setAttribute("aria-label", "Step");
    this.slider.oninput = () => this.choose(Number(this.slider.value));
    this.output = element("output");
    const row = this.row = element("div", "row");
    row.append(this.button, button("◂", "Step back", () => this.choose(this.at - 1)), button("▸", "Step on", () => this.choose(this.at + 1)), this.slider, this.output);
    root.append(this.canvas, row);
    addEventListener("keydown", e => {
      if (root.closest("[hidden]") || e.ctrlKey || e.altKey || e.metaKey || e.target.matches?.("select, input, textarea, .branches")) return;
      if (e.key === "ArrowRight" || e.key === "ArrowLeft") this.choose(this.at + (e.key === "ArrowRight" ? 1 : -1));
      else if (e.key === " " && !e.target.matches?.("button")) this.timer ? this.stop() : this.play();
      else return;
      e.preventDefault();
    });
  }

  // points: {used, cached, blocks, kinds} each; the last one is shown.
  set(points, at = points.length - 1) {
    this.points = points;
    this.slider.max = Math.max(0, points.length - 1);
    this.mark(at);
  }

  mark(i) {
    this.at = Math.max(0, Math.min(this.points.length - 1, i));
    this.slider.value = this.at;
    this.draw();
  }
  choose(i) { // by the reader
    this.stop();
    this.go(i);
  }
  go(i) {
    this.mark(i);
    this.shown(this.at);
  }

  stop() {
    clearTimeout(this.timer);
    this.timer = 0;
    this.button.textContent = "▶";
  }
  // on: the line goes on by itself, and the newest point is shown; to stop is to stay at it.
  follow(on) {
    this.following = on;
    this.button.textContent = on ? "❚❚" : "▶";
  }
  play() {
    if (this.following) return this.shown(this.at);
    if (this.at === this.points.length - 1) this.go(0);
    this.button.textContent = "❚❚";
    const next = () => {
      if (this.at + 1 < this.points.length) { this.go(this.at + 1); this.timer = setTimeout(next, this.stepTime(this.at)); }
      else { this.stop(); this.ended(); }
    };
    this.timer = setTimeout(next, this.stepTime(this.at));
  }

  draw() {
    const {canvas, points} = this, dpr = devicePixelRatio || 1, w = canvas.clientWidth || 800, h = TIMELINE_HEIGHT, top = TIMELINE_TOP, n = points.length;
    canvas.width = Math.round(w * dpr);
    canvas.height = Math.round(h * dpr);
    const p = canvas.getContext("2d"), style = getComputedStyle(canvas), color = name => style.getPropertyValue("--" + name).trim();
    const x = i => n > 1 ? 4 + i * (w - 8) / (n - 1) : w / 2;
    const most = points.reduce((most, m) => Math.max(most, Math.min(m.blocks, Math.max(64, 1.2 * (m.used + m.cached)))), 1), y = blocks => h - 2 - blocks / most * (h - top - 4);
    p.setTransform(dpr, 0, 0, dpr, 0, 0);
    p.fillStyle = color("free");
    p.beginPath(); p.roundRect(0, top, w, h - top, 5); p.fill();
    for (const [name, opacity, value] of [["hatch", .8, m => m.used + m.cached], ["accent", .55, m => m.used]]) {
      p.globalAlpha = opacity;
      p.fillStyle = color(name);
      p.beginPath();
      p.moveTo(x(0), h - 2);
      points.forEach((m, i) => p.lineTo(x(i), y(value(m))));
      p.lineTo(x(n - 1), h - 2);
      p.fill();
    }
    p.globalAlpha = 1;
    points.forEach((m, i) => m.kinds.forEach((kind, j) => {
      p.fillStyle = KINDS[kind][0];
      p.beginPath(); p.arc(x(i), 7, 4.5 - 1.2 * Math.min(j, 2), 0, 2 * Math.PI); p.fill();
    }));
    p.fillStyle = color("ink");
    if (n) p.fillRect(x(this.at) - .75, 0, 1.5, h);
    canvas.setAttribute("aria-label", n ? `Blocks over time: at step ${this.at + 1} of ${n}, ${points[this.at].used} used and ${points[this.at].cached} cached of ${points[this.at].blocks}` : "Blocks over time");
  }
}

// The kinds of events of a snapshot that a timeline marks.
function marksOf(s) { return [...new Set([...s.events.map(e => e.kind), ...(s.found?.length ? ["hit"] : [])].filter(k => KINDS[k]))]; }
