// A font of a PDF file: which characters the codes of its strings are, and how wide they are drawn.

class PdfFont {
  static async of(file, dict) {
    const font = new PdfFont();
    font.bytesOfCode = dict.Subtype === "/Type0" ? 2 : 1;
    const map = file.get(dict.ToUnicode), encoding = file.get(dict.Encoding);
    font.ranges = map?.dict ? rangesOfCMap(await file.unpack(map)) : [];
    font.isUtf16 = font.bytesOfCode === 2 && typeof encoding === "string" && /^\/Uni.*(UTF16|UCS2)/.test(encoding);
    font.widths = new Map();
    if (font.bytesOfCode === 2) {
      const inner = file.list(dict.DescendantFonts)[0], list = file.list(file.of(inner, "W"));
      font.wide = amount(file.of(inner, "DW") ?? 1000);
      for (let i = 0, n = 0; i + 1 < list.length && n < 200000;) { // a file may name each code many times
        const first = Math.max(0, amount(list[i])), widths = list[i + 1];
        if (Array.isArray(widths)) { widths.forEach((w, k) => font.widths.set(first + k, amount(file.get(w)))); i += 2; }
        else {
          for (let code = first; code <= Math.min(amount(widths), 65535); code++, n++) font.widths.set(code, amount(list[i + 2]));
          i += 3;
        }
      }
    } else {
      font.wide = amount(file.of(dict.FontDescriptor, "MissingWidth") ?? (dict.Widths ? 0 : 500));
      file.list(dict.Widths).slice(0, 256).forEach((w, i) => font.widths.set(amount(file.get(dict.FirstChar)) + i, amount(w)));
      font.letters = lettersOf(file, encoding);
    }
    // The glyphs of a Type3 font have a measure of their own.
    font.unit = dict.Subtype === "/Type3" ? Math.abs(amount(file.list(dict.FontMatrix)[0])) || .001 : .001;
    return font;
  }

  // {text, width: of an em, isSpace: the code 32 of a single byte} for each code of a string.
  decode(bytes) {
    const out = [], n = this.bytesOfCode;
    for (let i = 0; i + n <= bytes.length; i += n) {
      const code = n === 2 ? bytes.charCodeAt(i) << 8 | bytes.charCodeAt(i + 1) : bytes.charCodeAt(i);
      const text = this.mapped(code) ?? (this.isUtf16 ? String.fromCharCode(code) : n === 1 ? this.letters[code] : "\ufffd");
      out.push({text, width: (this.widths.get(code) ?? this.wide) * this.unit, isSpace: n === 1 && code === 32});
    }
    return out;
  }

  mapped(code) {
    let low = 0, high = this.ranges.length; // the last range that begins at the code, or before it
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.ranges[middle][0] <= code) low = middle + 1;
      else high = middle;
    }
    const [first, last, text] = this.ranges[low - 1] ?? [1, 0];
    if (code > last || code < first) return undefined;
    if (Array.isArray(text)) return text[code - first];
    return code === first ? text : text.slice(0, -1) + String.fromCharCode(text.charCodeAt(text.length - 1) + code - first);
  }
}

// [first code, last code, the text of the first, or those of all], sorted, of a CMap's sections bfchar and bfrange.
function rangesOfCMap(text) {
  const reader = new PdfReader(text), ranges = [], operands = [];
  const code = v => [...v?.bytes ?? ""].reduce((sum, c) => sum * 256 + c.charCodeAt(0), 0);
  const utf16 = v => (v?.bytes ?? "").replace(/([^])([^])/g, (_, a, b) => String.fromCharCode(a.charCodeAt(0) << 8 | b.charCodeAt(0)));
  while (reader.at < reader.end && ranges.length < 200000) {
    const value = reader.value();
    if (!value?.op) { operands.push(value); continue; }
    if (value.op === "endbfchar") for (let i = 0; i + 1 < operands.length; i += 2) ranges.push([code(operands[i]), code(operands[i]), utf16(operands[i + 1])]);
    if (value.op === "endbfrange")
      for (let i = 0; i + 2 < operands.length; i += 3)
        ranges.push([code(operands[i]), code(operands[i + 1]), Array.isArray(operands[i + 2]) ? operands[i + 2].map(utf16) : utf16(operands[i + 2])]);
    operands.length = 0;
  }
  return ranges.filter(range => range[2].length).sort((a, b) => a[0] - b[0]);
}

// The 256 letters of a font with codes of one byte.
function lettersOf(file, encoding) {
  const base = typeof encoding === "string" ? encoding : file.of(encoding, "BaseEncoding");
  const letters = [...new TextDecoder(base === "/MacRomanEncoding" ? "macintosh" : "windows-1252").decode(Uint8Array.from({length: 256}, (_, i) => i))];
  if (!base) for (const [code, letter] of [[0x27, "’"], [0x60, "‘"], [0xaa, "“"], [0xae, "fi"], [0xaf, "fl"], [0xb1, "–"], [0xb7, "•"], [0xba, "”"], [0xd0, "—"]]) letters[code] = letter;
  let code = 0;
  for (const value of file.list(file.of(encoding, "Differences"))) {
    if (typeof value === "number") code = value;
    else if (typeof value === "string") { if (code >= 0 && code < 256) letters[code] = letterNamed(value.slice(1)); code++; }
  }
  return letters;
}

// Names of glyphs: those of ASCII in its order, others with their letters, accents that a letter's name ends with.
const GLYPHS = new Map();
const glyphs = (from, names) => names.split(" ").forEach((name, i) => GLYPHS.set(name, typeof from === "number" ? String.fromCharCode(from + i) : from[i]));
glyphs(32, "space exclam quotedbl numbersign dollar percent ampersand quotesingle parenleft parenright asterisk plus comma hyphen period slash zero one two three four five six seven eight nine colon semicolon less equal greater question at");
glyphs(91, "bracketleft backslash bracketright asciicircum underscore grave");
glyphs(123, "braceleft bar braceright asciitilde");
glyphs(0x3b1, "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigma1 sigma tau upsilon phi chi psi omega");
glyphs(0x391, "Alpha Beta Gamma Delta Epsilon Zeta Eta Theta Iota Kappa Lambda Mu Nu Xi Omicron Pi Rho");
glyphs(0x3a3, "Sigma Tau Upsilon Phi Chi Psi Omega");
glyphs([..."‘’“”‚„–—•…ıßæÆœŒøØłŁðÐþÞ€£¥¢§¶°±×÷−®©™«»‹› †‡·≤≥≠∞∑∂"], "quoteleft quoteright quotedblleft quotedblright quotesinglbase quotedblbase endash emdash bullet ellipsis dotlessi germandbls ae AE oe OE oslash Oslash lslash Lslash eth Eth thorn Thorn Euro sterling yen cent section paragraph degree plusminus multiply divide minus registered copyright trademark guillemotleft guillemotright guilsinglleft guilsinglright nbspace dagger daggerdbl periodcentered lessequal greaterequal notequal infinity summation partialdiff");
glyphs(["ff", "fi", "fl", "ffi", "ffl"], "ff fi fl ffi ffl");
const ACCENTS = {grave: "\u0300", acute: "\u0301", circumflex: "\u0302", tilde: "\u0303", macron: "\u0304", breve: "\u0306", dotaccent: "\u0307", dieresis: "\u0308", ring: "\u030a", hungarumlaut: "\u030b", caron: "\u030c", cedilla: "\u0327", ogonek: "\u0328"};

function letterNamed(name) {
  name = name.replace(/(?<=.)\..*/, "");
  const known = GLYPHS.get(name) ?? (/^[A-Za-z]$/.test(name) ? name : null);
  if (known) return known;
  const hex = /^(?:uni([0-9A-F]{4})|u([0-9A-F]{4,6}))$/.exec(name), code = hex && parseInt(hex[1] ?? hex[2], 16);
  if (hex) return code <= 0x10ffff ? String.fromCodePoint(code) : "\ufffd";
  const accented = /^([A-Za-z]|dotlessi)([a-z]+)$/.exec(name), accent = accented && ACCENTS[accented[2]];
  return accent ? (accented[1] === "dotlessi" ? "ı" : accented[1]) + accent : "\ufffd";
}
