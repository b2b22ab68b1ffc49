// Code in colours, by highlight.js. It answers with markup of spans alone, which becomes elements here: nothing is parsed as HTML.

const MARKUP = /<span class="([\w\- ]+)">|(<\/span>)|&(amp|lt|gt|quot|#x27|#39);/g;
const LETTERS = {amp: "&", lt: "<", gt: ">", quot: '"', "#x27": "'", "#39": "'"};
// Characters of code that is coloured: while it grows; when it is whole. The time of plain words in C++ grows with their square.
const SHORT = 4000, LONGEST = 8000;

// Adds the code to an element.
function colour(code, language, text) {
  const markup = window.hljs && hljs.getLanguage(language) && marked(language, text);
  if (!markup) return code.append(text);
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
}

function marked(language, text) {
  try {
    const old = Number(hljs.versionString?.split(".")[0] ?? 9) < 10;
    return (old ? hljs.highlight(language, text, true) : hljs.highlight(text, {language, ignoreIllegals: true})).value;
  } catch { return ""; }
}
