// Code in colours, by highlight.js. It answers with markup of spans alone, which becomes elements here: nothing is parsed as HTML.

const MARKUP = /<span class="([\w\- ]+)">|(<\/span>)|&(amp|lt|gt|quot|#x27|#39);/g;
const LETTERS = {amp: "&", lt: "<", gt: ">", quot: '"', "#x27": "'", "#39": "'"};
// Characters of code that is coloured as one: while it grows; when it is whole. The time of plain words in C++ grows with their square. Longer code
// is coloured in pieces, and no more than COLOURED characters of it.
const SHORT = 4000, LONGEST = 8000, COLOURED = 60000;
const PIECE = /[^]{1,2000}[^\n]*\n?/g; // whole lines

// Adds the code to an element. `state`: that in which the code before it ended, such as a comment that is open. Returns the state at the end, of a
// highlight.js that tells it.
function colour(code, language, text, state) {
  const {value: markup, top} = window.hljs && hljs.getLanguage(language) && marked(language, text, state) || {};
  if (!markup) return void code.append(text);
  let at = 0, parent = code, plain = "";
  const flush = () => { if (plain) parent.append(plain); plain = ""; };
  for (const found of markup.matchAll(MARKUP)) {
    plain += markup.slice(at, found.index);
    at = found.index + found[0].length;
    if (found[3]) { plain += LETTERS[found[3]]; continue; }
    flush();
    if (found[1]) { const span = element("span", found[1]); parent.append(span); parent = span; }
    else parent = parent.parentElement ?? code;
  }
  plain += markup.slice(at);
  flush();
  return top;
}

const isOld = () => Number(hljs.versionString?.split(".")[0] ?? 9) < 10;
function marked(language, text, state) {
  try {
    return isOld() ? hljs.highlight(language, text, true, state) : hljs.highlight(text, {language, ignoreIllegals: true});
  } catch { return null; }
}

// Colours a part of long code, behind the parts that are coloured. Where a line is too long, all that follows stays plain.
function colourPart(code, part) {
  const text = part.textContent, pieces = text.match(PIECE) ?? [];
  code.coloured = (code.coloured ?? 0) + (pieces.some(piece => piece.length > LONGEST) ? Infinity : text.length);
  if (code.coloured > COLOURED || !window.hljs || !isOld()) return;
  part.textContent = "";
  for (const piece of pieces) code.state = colour(part, code.language, piece, code.state);
}
