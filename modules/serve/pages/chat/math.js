// Formulas, set by KaTeX as MathML, which the browser draws itself. Without the library, or where it refuses, they stay as they are written.

const formulas = new Map(); // source → element: an answer that grows is drawn many times
// Definitions could repeat each other without end, and links and foreign markup have no business in a formula.
const REFUSED = /\\(?:[egx]?def|g?let|futurelet|global|long|(?:re)?newcommand|providecommand|href|url|html\w*|includegraphics)(?![A-Za-z])/;

// Null: it is none that can be set.
function formulaOf(source, display) {
  const key = display + source;
  if (!window.katex || source.length > 5000 || REFUSED.test(source)) return null;
  if (!formulas.has(key)) {
    const box = element("span", display ? "formula display" : "formula");
    let made = box;
    try {
      katex.render(source, box, {displayMode: display, output: "mathml", strict: "ignore", trust: false, maxSize: 20, maxExpand: 200});
    } catch { made = null; }
    if (formulas.size > 500) formulas.clear();
    formulas.set(key, made);
  }
  return formulas.get(key)?.cloneNode(true) ?? null;
}
