// The objects of a PDF file, read without its table of references: those are found by a scan, and the last one with a number counts.
// Values: numbers, booleans, null; names as "/Name"; strings as {bytes}, a character for each byte; arrays; dictionaries without a
// prototype; {ref: number}; operators as {op}; streams as {dict, from, to}.

const PDF_MOST = 32e6;      // bytes of a file
const PDF_UNPACKED = 128e6; // bytes of all its streams, unpacked
const PDF_OBJECT = 1e6;     // characters of an object, but for its stream
const PDF_SECONDS = 20;     // for one file
const PDF_SPACE = 1, PDF_DELIMITER = 2, PDF_KINDS = new Uint8Array(256); // of characters; the others are parts of words
for (const c of "\0\t\n\f\r ") PDF_KINDS[c.charCodeAt(0)] = PDF_SPACE;
for (const c of "()<>[]{}/%") PDF_KINDS[c.charCodeAt(0)] = PDF_DELIMITER;

// The time that a file may take; the page goes on meanwhile.
class PdfClock {
  begun = performance.now();
  rested = this.begun;
  get isLate() { return performance.now() - this.begun > 1000 * PDF_SECONDS; }

  async rest() {
    if (performance.now() - this.rested < 25) return;
    await new Promise(done => setTimeout(done));
    this.rested = performance.now();
  }
}

const amount = value => typeof value === "number" && isFinite(value) ? value : 0; // of what should be a number
const isDict = value => value !== null && typeof value === "object" && Object.getPrototypeOf(value) === null;

// Bytes as characters of the same numbers.
function bytesAsText(bytes) {
  const parts = [];
  for (let i = 0; i < bytes.length; i += 32768) parts.push(String.fromCharCode(...bytes.subarray(i, i + 32768)));
  return parts.join("");
}

class PdfReader {
  constructor(text, at = 0, end = text.length) { Object.assign(this, {text, at, end}); }

  skipSpace() {
    for (; this.at < this.end; this.at++) {
      const c = this.text.charCodeAt(this.at);
      if (c === 37) while (this.at < this.end && this.text[this.at] !== "\n" && this.text[this.at] !== "\r") this.at++; // %: a comment
      else if (PDF_KINDS[c] !== PDF_SPACE) return;
    }
  }

  // The next value; undefined: the end, or of a bracket.
  value(depth = 0) {
    this.skipSpace();
    if (this.at >= this.end) return undefined;
    const c = this.text[this.at];
    if (c === "/") return this.name();
    if (c === "(") return {bytes: this.string()};
    if (c === "<" && this.text[this.at + 1] === "<") return this.dict(depth);
    if (c === "<") return {bytes: this.hex()};
    if (c === "[") {
      this.at++;
      const list = [];
      for (let v; depth < 40 && (v = this.value(depth + 1)) !== undefined;) v?.op === "R" && list.length > 1 ? list.splice(-2, 2, {ref: list.at(-2)}) : list.push(v);
      return list;
    }
    if (c === "]" || c === ">") { this.at += this.text.startsWith(">>", this.at) ? 2 : 1; return undefined; }
    if (PDF_KINDS[c.charCodeAt(0)]) { this.at++; return {op: c}; }
    const word = this.word();
    if (/^[+-]?(\d+\.?\d*|\.\d+)$/.test(word)) return Number(word);
    return word === "true" ? true : word === "false" ? false : word === "null" ? null : {op: word};
  }

  word() {
    const from = this.at;
    while (this.at < this.end && this.at - from < 256 && !PDF_KINDS[this.text.charCodeAt(this.at)]) this.at++;
    return this.text.slice(from, this.at);
  }

  name() {
    this.at++;
    return "/" + this.word().replace(/#([0-9a-f]{2})/gi, (_, hex) => String.fromCharCode(parseInt(hex, 16)));
  }

  dict(depth) {
    this.at += 2;
    const dict = Object.create(null), values = [];
    for (let v; depth < 40 && (v = this.value(depth + 1)) !== undefined;) v?.op === "R" && values.length > 1 ? values.splice(-2, 2, {ref: values.at(-2)}) : values.push(v);
    for (let i = 0; i + 1 < values.length; i += 2) if (typeof values[i] === "string") dict[values[i].slice(1)] = values[i + 1];
    return dict;
  }

  string() {
    const parts = [], special = /[()\\]/g;
    let open = 1;
    for (this.at++; this.at < this.end; this.at++) {
      special.lastIndex = this.at;
      const next = Math.min(special.exec(this.text)?.index ?? this.end, this.end);
      if (next > this.at) parts.push(this.text.slice(this.at, next));
      if ((this.at = next) === this.end) break;
      let c = this.text[this.at];
      if (c === "(") open++;
      if (c === ")" && !--open) { this.at++; break; }
      if (c === "\\") {
        c = this.text[++this.at] ?? "";
        const octal = /^[0-7]{1,3}/.exec(this.text.slice(this.at, this.at + 3))?.[0];
        if (octal) { c = String.fromCharCode(parseInt(octal, 8) & 255); this.at += octal.length - 1; }
        else if (c === "\r" || c === "\n") { if (c === "\r" && this.text[this.at + 1] === "\n") this.at++; c = ""; }
        else c = {n: "\n", r: "\r", t: "\t", b: "\b", f: "\f"}[c] ?? c;
      }
      parts.push(c);
    }
    return parts.join("");
  }

  hex() {
    const close = this.text.indexOf(">", this.at), end = close < 0 ? this.end : Math.min(close, this.end);
    const digits = this.text.slice(this.at + 1, end).replace(/[^0-9a-f]/gi, "");
    this.at = end + 1;
    return (digits.length % 2 ? digits + "0" : digits).replace(/../g, pair => String.fromCharCode(parseInt(pair, 16)));
  }
}

class PdfFile {
  constructor(bytes, clock) {
    this.bytes = bytes;
    this.clock = clock;
    this.text = bytesAsText(bytes);
    this.objects = new Map(); // number → value
    this.unpacked = 0;
    this.trailers = [];
  }

  // Finds all objects.
  async open() {
    const begin = /(?<![0-9])(\d{1,10})[\0\t\n\f\r ]{1,8}\d{1,5}[\0\t\n\f\r ]{1,8}obj|\btrailer/g;
    for (let found; !this.clock.isLate && (found = begin.exec(this.text));) {
      await this.clock.rest();
      const reader = new PdfReader(this.text, begin.lastIndex, Math.min(this.text.length, begin.lastIndex + PDF_OBJECT)), value = reader.value();
      if (!found[1]) { if (isDict(value)) this.trailers.push(value); continue; }
      const number = Number(found[1]);
      this.objects.set(number, value);
      begin.lastIndex = Math.max(begin.lastIndex, reader.at);
      if (!isDict(value)) continue;
      reader.skipSpace();
      if (!this.text.startsWith("stream", reader.at)) continue;
      const from = reader.at + 6 + (this.text.startsWith("\r\n", reader.at + 6) ? 2 : 1);
      let to = from + (typeof value.Length === "number" ? value.Length : -1);
      if (to < from || !/^[\r\n]{0,2}endstream/.test(this.text.slice(to, to + 11))) {
        to = this.text.indexOf("endstream", from);
        if (to < 0) to = this.text.length;
        for (let n = 0; n < 2 && to > from && /[\r\n]/.test(this.text[to - 1]); n++) to--;
      }
      const stream = {dict: value, from, to};
      this.objects.set(number, stream);
      begin.lastIndex = to;
      if (value.Type === "/XRef") this.trailers.push(value);
      if (value.Type === "/ObjStm") await this.openObjects(stream);
    }
  }

  // The objects within a stream of objects.
  async openObjects(stream) {
    const text = await this.unpack(stream), first = amount(this.get(stream.dict.First)), count = amount(this.get(stream.dict.N)), head = new PdfReader(text, 0, first);
    for (let i = 0, work = 0; i < count && work < 4 * text.length && !this.clock.isLate; i++) { // objects that overlap have no end
      await this.clock.rest();
      const number = head.value(), at = head.value();
      if (typeof number !== "number" || typeof at !== "number") return;
      const reader = new PdfReader(text, first + at);
      this.objects.set(number, reader.value());
      work += reader.at - first - at;
    }
  }

  // The value that a reference stands for.
  get(value) {
    for (let n = 0; n < 20 && value && typeof value === "object" && "ref" in value; n++) value = this.objects.get(value.ref);
    return value ?? null;
  }

  // A member of a dictionary; of a stream's, too.
  of(dict, name) {
    const whole = this.get(dict), found = isDict(whole) ? whole : whole?.dict;
    return found ? this.get(found[name]) : null;
  }

  list(value) {
    const found = this.get(value);
    return Array.isArray(found) ? found.map(v => this.get(v)) : found === null ? [] : [found];
  }

  // A stream's bytes, unpacked, as text; "" if it is packed in another way.
  async unpack(stream) {
    if (stream?.from === undefined) return "";
    let bytes = this.bytes.subarray(stream.from, stream.to);
    for (const filter of this.list(stream.dict.Filter)) {
      if (filter === "/FlateDecode" || filter === "/Fl") bytes = await this.inflate(bytes);
      else if (filter === "/ASCII85Decode" || filter === "/A85") bytes = from85(bytesAsText(bytes));
      else if (filter === "/ASCIIHexDecode" || filter === "/AHx") bytes = Uint8Array.from(new PdfReader("<" + bytesAsText(bytes)).hex(), c => c.charCodeAt(0));
      else return "";
      if (this.list(stream.dict.DecodeParms).some(parms => amount(this.of(parms, "Predictor")) > 1)) return "";
    }
    return bytesAsText(bytes);
  }

  // The text before an error is kept.
  async inflate(bytes) {
    const parts = [], reader = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate")).getReader();
    let n = 0;
    try {
      for (let piece; !(piece = await reader.read()).done;) {
        parts.push(piece.value);
        n += piece.value.length;
        if ((this.unpacked += piece.value.length) > PDF_UNPACKED) throw new RangeError("too large when unpacked");
      }
    } catch (e) {
      reader.cancel().catch(() => {});
      if (e instanceof RangeError) throw e;
    }
    const whole = new Uint8Array(n);
    n = 0;
    for (const part of parts) { whole.set(part, n); n += part.length; }
    return whole;
  }
}

function from85(text) {
  const out = [], group = [];
  for (const c of text) {
    if (c === "~") break;
    if (c === "z" && !group.length) { out.push(0, 0, 0, 0); continue; }
    if (c < "!" || c > "u") continue;
    group.push(c.charCodeAt(0) - 33);
    if (group.length === 5) flush(5);
  }
  if (group.length > 1) flush(group.length);
  function flush(n) {
    while (group.length < 5) group.push(84);
    const value = group.reduce((sum, digit) => sum * 85 + digit, 0);
    out.push(...[value / 2 ** 24, value / 65536, value / 256, value].map(x => Math.floor(x) & 255).slice(0, n - 1));
    group.length = 0;
  }
  return Uint8Array.from(out);
}
