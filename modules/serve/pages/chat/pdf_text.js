// The text of a PDF file: what its pages draw, in the order in which they draw it, as lines. Pictures of text are none.

const PDF_FORMS = 5000; // drawn by one page: forms may draw each other

// {text, read, pages}; or {fault}: why there is none, as the end of a sentence that begins with the file's name.
async function textOfPdf(bytes) {
  const clock = new PdfClock(), file = new PdfFile(bytes, clock), out = new PdfLines();
  let read = 0, pages = [];
  try {
    await file.open();
    if (file.trailers.some(t => t.Encrypt)) return {fault: "is encrypted: its text cannot be read"};
    pages = pagesOf(file);
    const pen = new PdfPen(file, out, clock);
    for (const page of pages) {
      if (out.length > MOST || clock.isLate) break;
      const contents = [];
      for (const part of file.list(page.Contents)) contents.push(await file.unpack(part));
      await pen.draw(contents.join("\n"), page.Resources);
      out.endPage();
      read++;
    }
  } catch (e) {
    if (!read) return {fault: e instanceof RangeError ? "is too large when it is unpacked" : "is no PDF file that can be read"};
  }
  const text = out.text();
  if (!read && clock.isLate) return {fault: "takes too long to read"};
  if (!pages.length) return {fault: "is no PDF file that can be read"};
  if (!text) return {fault: "has no text: its pages are pictures, or empty"};
  if (text.split("\ufffd").length > 1 + text.length / 10) return {fault: "does not say which letters its fonts draw"};
  return {text, read, pages: pages.length};
}

// The dictionaries of the pages, in order, with the resources that they inherit.
function pagesOf(file) {
  const root = file.trailers.map(t => file.get(t.Root)).findLast(isDict) ?? [...file.objects.values()].find(o => isDict(o) && o.Type === "/Catalog");
  const pages = [], seen = new Set(), open = [[file.of(root, "Pages"), null]];
  while (open.length && pages.length < 10000) {
    const [node, inherited] = open.pop();
    if (!isDict(node) || seen.has(node)) continue;
    seen.add(node);
    const resources = node.Resources ?? inherited;
    if (node.Kids) open.push(...file.list(node.Kids).map(kid => [kid, resources]).reverse());
    else pages.push({Contents: node.Contents, Resources: resources});
  }
  return pages;
}

// Pieces of text at places of a page become lines: a piece that stands apart from the last one begins a word, a line, or a paragraph.
class PdfLines {
  parts = [];
  length = 0;
  last = null; // where the last piece ended, and its size

  add(text, from, to, size, along) {
    const last = this.last;
    if (last) {
      const dx = from[0] - last.at[0], dy = from[1] - last.at[1], gap = dx * along[0] + dy * along[1], aside = Math.abs(dx * along[1] - dy * along[0]);
      const em = Math.max(size, last.size);
      if (aside > .5 * em) this.put(aside > 1.9 * em ? "\n\n" : "\n");
      else if ((gap > .17 * em || gap < -em) && !/^\s/.test(text) && !/\s$/.test(this.parts.at(-1) ?? "\n")) this.put(" ");
    }
    this.put(text);
    this.last = {at: to, size};
  }

  put(text) { this.parts.push(text); this.length += text.length; }

  endPage() {
    if (this.last) this.put("\n\n");
    this.last = null;
  }

  text() {
    return this.parts.join("").replace(/\0/g, "").replace(/[ \u00a0]+/g, " ").replace(/ ?\n ?/g, "\n").replace(/\n{3,}/g, "\n\n").trim()
      .replace(/[\ufb00-\ufb06]/g, ligature => ligature.normalize("NFKC")).normalize("NFC");
  }
}

const times = (a, b) => [a[0] * b[0] + a[1] * b[2], a[0] * b[1] + a[1] * b[3], a[2] * b[0] + a[3] * b[2], a[2] * b[1] + a[3] * b[3],
                         a[4] * b[0] + a[5] * b[2] + b[4], a[4] * b[1] + a[5] * b[3] + b[5]];

const nameOf = value => typeof value === "string" ? value.slice(1) : "";

// Follows the operators of a page as far as they place text.
class PdfPen {
  constructor(file, out, clock) { Object.assign(this, {file, out, clock, fonts: new Map(), forms: 0}); }

  async draw(text, resources, outer = [1, 0, 0, 1, 0, 0], depth = 0) {
    const reader = new PdfReader(text), stack = [], operands = [], n = i => amount(operands[i]);
    let s = {ctm: outer, font: null, size: 1, space: 0, word: 0, scale: 1, leading: 0, rise: 0}, line = [1, 0, 0, 1, 0, 0], at = line;
    const matrix = () => Array.from({length: 6}, (_, i) => n(i));
    const move = (x, y) => { at = line = times([1, 0, 0, 1, x, y], line); };
    const show = string => {
      if (!string?.bytes || !s.font) return;
      const from = times([1, 0, 0, 1, 0, s.rise], times(at, s.ctm));
      let wide = 0, shown = "";
      for (const {text, width, isSpace} of s.font.decode(string.bytes.slice(0, 1e5))) {
        shown += text;
        wide += (width * s.size + s.space + (isSpace ? s.word : 0)) * s.scale;
      }
      at = times([1, 0, 0, 1, wide, 0], at);
      const to = times([1, 0, 0, 1, 0, s.rise], times(at, s.ctm)), right = Math.hypot(from[0], from[1]) || 1;
      if (shown) this.out.add(shown, from.slice(4), to.slice(4), Math.abs(s.size) * Math.hypot(from[2], from[3]), [from[0] / right, from[1] / right]);
    };
    if (depth === 0) this.forms = 0;
    for (let count = 0; ; count++) {
      if (count % 500 === 0) {
        if (this.clock.isLate || this.out.length > MOST) return;
        await this.clock.rest();
      }
      const value = reader.value();
      if (value === undefined) { if (reader.at >= reader.end) return; continue; }
      if (!value?.op) { if (operands.push(value) > 64) operands.shift(); continue; }
      switch (value.op) {
        case "q": if (stack.length < 500) stack.push({...s}); break;
        case "Q": s = stack.pop() ?? s; break;
        case "cm": s.ctm = times(matrix(), s.ctm); break;
        case "BT": at = line = [1, 0, 0, 1, 0, 0]; break;
        case "Tf": s.size = n(1); s.font = await this.font(resources, operands[0]); break;
        case "Tc": s.space = n(0); break;
        case "Tw": s.word = n(0); break;
        case "Tz": s.scale = n(0) / 100; break;
        case "TL": s.leading = n(0); break;
        case "Ts": s.rise = n(0); break;
        case "Tm": at = line = matrix(); break;
        case "TD": s.leading = -n(1); move(n(0), n(1)); break;
        case "Td": move(n(0), n(1)); break;
        case "T*": move(0, -s.leading); break;
        case "'": move(0, -s.leading); show(operands[0]); break;
        case '"': s.word = n(0); s.space = n(1); move(0, -s.leading); show(operands[2]); break;
        case "Tj": show(operands[0]); break;
        case "TJ":
          for (const part of Array.isArray(operands[0]) ? operands[0] : []) {
            if (typeof part === "number") at = times([1, 0, 0, 1, -part / 1000 * s.size * s.scale, 0], at);
            else show(part);
          }
          break;
        case "Do": {
          const form = this.file.of(this.file.of(resources, "XObject"), nameOf(operands[0]));
          if (form?.dict?.Subtype !== "/Form" || depth > 8 || ++this.forms > PDF_FORMS) break;
          const inner = this.file.list(form.dict.Matrix).map(amount);
          await this.draw(await this.file.unpack(form), form.dict.Resources ?? resources, inner.length === 6 ? times(inner, s.ctm) : s.ctm, depth + 1);
          break;
        }
        case "ID": { // a picture among the operators
          const end = /[\0\t\n\f\r ]EI(?![^\0\t\n\f\r ])/g;
          end.lastIndex = reader.at;
          reader.at = end.test(text) ? end.lastIndex : reader.end;
        }
      }
      operands.length = 0;
    }
  }

  async font(resources, name) {
    const dict = this.file.of(this.file.of(resources, "Font"), nameOf(name));
    if (!isDict(dict)) return null;
    if (!this.fonts.has(dict)) this.fonts.set(dict, await PdfFont.of(this.file, dict));
    return this.fonts.get(dict);
  }
}
