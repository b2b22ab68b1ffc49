// Markdown as DOM elements. A model's text becomes text nodes, never HTML: there is no innerHTML, no image (a link to it in its place),
// and no link but http and https. Formulas are those of math.js, colours those of colour.js. Nesting is bounded, and the time is about proportional to the length of the text.

const DEEPEST = 6; // lists in lists, quotes in quotes, bold in italic

function link(address) {
  let url;
  try { url = new URL(address); } catch { return null; }
  if (url.protocol !== "http:" && url.protocol !== "https:") return null;
  const a = element("a");
  a.href = url.href;
  a.rel = "noopener noreferrer nofollow";
  a.target = "_blank";
  a.title = url.href;
  return a;
}

// An address may have brackets in pairs, or stand between < and >.
const ADDRESS = "\\(\\s{0,9}(<[^<>\\n]{1,2000}>|(?:[^\\s()]|\\([^\\s()]{0,500}\\)){1,2000})(?:[ \\t][^)\\n]{0,200})?\\)";
const CHARACTER = /^&(amp|lt|gt|quot|apos|nbsp|#\d{1,7}|#x[\da-f]{1,6});/i, CHARACTERS = {amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0"};
function characterOf(name) {
  const number = name[0] !== "#" ? NaN : /x/i.test(name) ? parseInt(name.slice(2), 16) : Number(name.slice(1));
  return CHARACTERS[name.toLowerCase()] ?? String.fromCodePoint(number > 0 && number < 0x110000 && !(number >= 0xd800 && number < 0xe000) ? number : 0xfffd);
}
const TERM = /^[\w()[\],.]+(?: ?[-\/:!'] ?[\w()[\],.]*)*$/; // n-1, 2x, (a, b)
// Of brackets that close at an address's end, those that it opened.
const unpaired = (tail, at, all) => {
  const open = all.slice(0, at).split("(").length - all.slice(0, at).split(")").length, n = /^\)+/.exec(tail)[0].length;
  return ")".repeat(Math.max(0, Math.min(open, n)));
};
// A text may have brackets in code. Each backtick is read in one way: else the time would have no bound.
const LINK = RegExp("^\\[((?:`[^`]{1,200}`|[^[\\]`]|`(?![^`]{1,200}`)){1,500})\\]" + ADDRESS);
const IMAGE = RegExp("^!\\[([^[\\]]{0,500})\\]" + ADDRESS);
const LINKED_IMAGE = RegExp("^\\[!\\[([^[\\]]{0,500})\\]\\([^)\\n]{1,2200}\\)\\]" + ADDRESS);

// [text][label], [text][], [label]; and a footnote's mark [^label]
const REFERENCE = /^!?\[([^[\]]{1,500})\](?:\[([^[\]]{0,200})\])?/, MARK = /^\[\^([^[\]\s]{1,50})\]/;
const DEFINITION = /^ {0,3}\[([^[\]^][^[\]]{0,199})\]:[ \t]{1,9}(?:<([^<>\s]{1,2000})>|(\S{1,2000}))(?:[ \t]+(?:"[^"]{0,200}"|'[^']{0,200}'|\([^()]{0,200}\)))?[ \t]{0,9}$/;
const FOOTNOTE = /^ {0,3}\[\^([^[\]\s]{1,50})\]:[ \t]{0,9}(.*)$/;
const labelOf = text => text.trim().replace(/\s+/g, " ").toLowerCase();
let defined = new Map(); // of the text that is drawn: label → address; "^" and a footnote's label → ""

// The label and the address in a line that defines one.
function definitionIn(line) {
  const found = line.includes("]:") && DEFINITION.exec(line), address = found && (found[2] ?? found[3]);
  return address && link(address) ? [labelOf(found[1]), address] : null;
}

const HIDDEN = /\\[!-/:-@[-`{-~]|(?<!`)(`+)(?!`)[^]*?(?<!`)\1(?!`)/g; // a backslash and its sign, and code

// The lines of a paragraph as one text. Two blanks at a line's end, or a backslash, break the line.
const paragraph = lines => lines.map(l => l.trim() + (/\S {2,}$/.test(l) ? "  " : "")).join("\n").trimEnd();

// `linked`: the text is that of a link, which has no other link in it.
function inline(parent, text, depth = 0, linked = false) {
  let plain = "", at = 0;
  const never = new Set(); // marks that do not come again
  const next = (mark, from, all = text) => {
    const found = never.has(mark) ? -1 : all.indexOf(mark, from);
    if (found < 0) never.add(mark);
    return found;
  };
  const add = node => { if (plain) parent.append(plain); plain = ""; if (node) parent.append(node); };
  const isWord = c => c !== undefined && /[\p{L}\p{N}_]/u.test(c), isSpace = c => c === undefined || /\s/.test(c);

  const code = () => {
    let n = 1;
    while (text[at + n] === "`") n++;
    const mark = "`".repeat(n);
    let end = next(mark, at + n);
    while (end >= 0 && text[end + n] === "`") { // a longer run is another mark
      let over = end + n;
      while (text[over] === "`") over++;
      end = next(mark, over);
    }
    if (end < 0) { plain += mark; at += n; return; }
    let inside = text.slice(at + n, end).replace(/\n/g, " ");
    if (inside.length > 2 && inside.startsWith(" ") && inside.endsWith(" ")) inside = inside.slice(1, -1);
    add(element("code", "", inside));
    at = end + n;
  };
  let marks; // the text without what is code and what stands behind a backslash: a mark there closes nothing
  const emphasis = c => {
    marks ??= text.replace(HIDDEN, found => "\0".repeat(found.length));
    const mark = text[at + 1] === c ? c + c : c, from = at + mark.length;
    let end = -1;
    if (depth < DEEPEST && !isSpace(text[from]) && !(c === "_" && isWord(text[at - 1]))) {
      end = next(mark, from + 1, marks);
      for (let tries = 0; end >= 0; end = next(mark, end + 1, marks)) {
        if (++tries > 16) { end = -1; break; }
        if (mark.length === 1 && marks[end + 1] === c) { end++; continue; } // a double mark inside
        while (mark.length === 2 && marks[end + 2] === c) end++;
        if (!isSpace(text[end - 1]) && !(c === "_" && isWord(text[end + mark.length]))) break;
      }
    }
    if (end < 0) { plain += mark; at = from; return; }
    const e = element(c === "~" ? "del" : mark.length === 2 ? "strong" : "em");
    inline(e, text.slice(from, end), depth + 1, linked);
    add(e);
    at = end + mark.length;
  };
  const bracket = () => { // [text](address), ![image](address), [![image](address)](address), and those above
    const here = text.slice(at, at + 5300);
    const found = !linked && (LINK.exec(here) || IMAGE.exec(here) || LINKED_IMAGE.exec(here));
    const address = found && found[2].replace(/^<(.*)>$/, "$1"), a = found && link(address);
    if (a) {
      inline(a, found[1].trim() || address, depth + 1, true);
      add(a);
      at += found[0].length;
      return;
    }
    const mark = MARK.exec(here);
    if (mark && defined.has("^" + labelOf(mark[1]))) {
      add(element("sup", "", mark[1]));
      at += mark[0].length;
      return;
    }
    const to = !linked && defined.size && REFERENCE.exec(here), place = to && defined.get(labelOf(to[2] || to[1]));
    if (place) {
      const a = link(place);
      inline(a, to[1], depth + 1, true);
      add(a);
      at += to[0].length;
      return;
    }
    plain += text[at++];
  };

  // The source of a formula, from one mark to the other, in which nothing else means anything. False: it is none.
  const formula = (open, close) => {
    const end = next(close, at + open.length);
    if (end < 0) return false;
    const inside = text.slice(at + open.length, end);
    // One $ is mostly money: a formula touches both, and has a sign of one.
    if (open === "$" && (!(/[\\*_^={}<>+|]|^[A-Za-z]$|^[A-Za-z]\(/.test(inside) || inside.length < 60 && TERM.test(inside) && !isWord(text[at - 1]) && !isWord(text[end + 1])) ||
                         /^\s|\s$/.test(inside) || /\d/.test(text[end + 1] ?? ""))) return false;
    if (!inside.trim()) return false;
    add(formulaOf(inside, open === "$$" || open === "\\[") ?? element("code", "math", open + inside + close));
    at = end + close.length;
    return true;
  };

  let here, found;
  while (at < text.length) {
    const c = text[at];
    if (c === "\\" && (text[at + 1] === "(" || text[at + 1] === "[")) {
      if (!formula(c + text[at + 1], text[at + 1] === "(" ? "\\)" : "\\]")) { plain += text.slice(at, at + 2); at += 2; }
    } else if (c === "$" && formula(text[at + 1] === "$" ? "$$" : "$", text[at + 1] === "$" ? "$$" : "$")) continue;
    else if ((c === "\\" && text[at + 1] === "\n") || (c === " " && text.startsWith("  \n", at))) { add(element("br")); at += c === " " ? 3 : 2; }
    else if (c === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "")) { plain += text[at + 1]; at += 2; }
    else if (c === "`") code();
    else if (c === "*" || c === "_" || (c === "~" && text[at + 1] === "~")) emphasis(c);
    else if (c === "<" && /^<(?:br\s{0,9}\/?|https?:\/\/[^\s<>]{1,2000})>/i.test(here = text.slice(at, at + 2010))) {
      const inside = here.slice(1, here.indexOf(">")), a = /^br/i.test(inside) ? element("br") : !linked && link(inside);
      if (a?.tagName === "A") a.append(inside);
      if (a) add(a); else plain += `<${inside}>`;
      at += inside.length + 2;
    } else if (c === "&" && (found = CHARACTER.exec(text.slice(at, at + 12)))) { plain += characterOf(found[1]); at += found[0].length; }
    else if (c === "[" || (c === "!" && text[at + 1] === "[")) bracket();
    else if (c === "h" && !linked && (text.startsWith("http://", at) || text.startsWith("https://", at)) && !isWord(text[at - 1])) {
      const address = /^[^\s<>"'`\]]{1,2000}/.exec(text.slice(at, at + 2000))[0].replace(/[.,;:!?*_]+$/, "").replace(/\)+[.,;:!?*_)]*$/, unpaired);
      const a = link(address);
      if (a && address.length > 8) { a.append(address); add(a); } else plain += address;
      at += address.length;
    } else { plain += c; at++; }
  }
  add();
}

// `growing`: its end has not come. Then a long one is not coloured again and again: a part is, when it is complete.
function codeBlock(language, text, growing) {
  const box = element("div", "code"), head = element("div", "head"), pre = element("pre"), code = element("code");
  head.append(element("span", "", language), button("Copy", b => copyText(code.textContent, b)));
  pre.tabIndex = 0; // it may scroll
  if (text.length <= (growing ? SHORT : LONGEST)) colour(code, language, text);
  else {
    code.language = language;
    appendLines(code, text);
    if (!growing) colourPart(code, code.lastChild);
  }
  pre.append(code);
  box.append(head, pre);
  return box;
}

// Long code stands in parts of so many lines, so that a browser lays out those alone that change or are seen.
const PART = 100;
function appendLines(code, text) {
  const lines = text.split("\n");
  let part = code.lastChild, n = part ? part.lines : PART;
  for (const [i, line] of lines.entries()) {
    if (i && n === PART) { part.lastChild.appendData("\n"); colourPart(code, part); n = 0; part = null; }
    if (!part) {
      part = element("span", "part");
      part.append("");
      code.append(part);
      n = part.lines = 1;
      part.lastChild.appendData(line);
    } else {
      part.lastChild.appendData((i ? "\n" : "") + line);
      if (i) part.lines = ++n;
    }
  }
}

// Adds what is new to a block of code whose end has not come. False: it has to be drawn.
function growCode(block, old, now) {
  const code = block.querySelector("code");
  if (!code?.firstChild?.classList?.contains("part") || indentOf(now.text) || isClosed(old.text) || isClosed(now.text)) return false;
  appendLines(code, now.text.slice(old.text.length));
  return true;
}

async function copyText(text, button) {
  try {
    if (navigator.clipboard) await navigator.clipboard.writeText(text);
    else { // without TLS and not on this machine
      const area = element("textarea");
      area.value = text;
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    const before = button.textContent;
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = before === "Copied" ? "Copy" : before; }, 1200);
  } catch { /* the browser does not allow it */ }
}

// The blocks of a text: [kind, first line, line behind the last].
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)/, HEADING = /^ {0,3}(#{1,6})\s+(\S.*)$/, RULE = /^ {0,3}([-*_])\s*(?:\1\s*){2,}$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:\s+(.*)|$)/, QUOTE = /^ {0,3}> ?(.*)$/, DASHES = /^ *\|? *:?-+:? *(\| *:?-+:? *)*\|? *$/;
const INDENTED = /^(?: {4}| {0,3}\t)/; // code
const UNDERLINE = /^ {0,3}(?:=+|-{2,})\s*$/; // of a heading
const MATH = /^ {0,3}(\\\[|\$\$)/, MATH_END = {"\\[": "\\]", "$$": "$$"};
const indentOf = line => line.length - line.trimStart().length;
const kindOf = item => item.at(-1); // of a list, by the mark of an item: - * + . )

// `known`: a line that the first block reaches, if it is code or a list.
function split(lines, known = 0) {
  const blocks = [], n = lines.length;
  for (let i = 0; i < n;) {
    const line = lines[i], from = i++;
    if (!line.trim()) continue;
    const fence = FENCE.exec(line), math = MATH.exec(line);
    const end = math ? endOfMath(lines, from, math[1]) : 0;
    if (end) blocks.push(["math", from, i = end]);
    else if (fence) {
      if (!from) i = Math.max(i, known);
      while (i < n && !(lines[i].trim().startsWith(fence[1]) && !lines[i].trim().replaceAll(fence[1][0], ""))) i++;
      blocks.push(["fence", from, i = Math.min(n, i + 1)]);
    } else if (INDENTED.test(line) && !line.trimStart().includes("|") && !ITEM.test(line.trimStart())) {
      for (let j = i; j < n && (!lines[j].trim() || INDENTED.test(lines[j])); j++) if (lines[j].trim()) i = j + 1;
      blocks.push(["indented", from, i]);
    } else if (HEADING.test(line)) blocks.push(["heading", from, i]);
    else if (RULE.test(line)) blocks.push(["rule", from, i]);
    else if (QUOTE.test(line)) {
      while (i < n && QUOTE.test(lines[i])) i++;
      blocks.push(["quote", from, i]);
    } else if (ITEM.test(line)) {
      const base = indentOf(line), kind = kindOf(ITEM.exec(line)[2]);
      const another = at => { const found = ITEM.exec(lines[at]); return found && found[1].length <= base + 1 && kindOf(found[2]) !== kind; };
      if (!from) i = Math.max(i, known);
      // As long as items of this list follow, or what belongs to them: indented, or going on without a blank line.
      while (i < n) {
        if (!lines[i].trim()) {
          let j = i + 1;
          while (j < n && !lines[j].trim()) j++;
          if (j >= n || !(indentOf(lines[j]) > base || ITEM.test(lines[j])) || another(j)) break;
          i = j;
        } else if (another(i)) break;
        else if (indentOf(lines[i]) <= base && !ITEM.test(lines[i]) && (!lines[i - 1].trim() || starts(lines[i]))) break;
        i++;
      }
      blocks.push(["list", from, i]);
    } else if (definitionIn(line)) {
      while (i < n && definitionIn(lines[i])) i++;
      blocks.push(["definition", from, i]);
    } else if (FOOTNOTE.test(line)) {
      while (i < n && lines[i].trim() && !starts(lines[i]) && !FOOTNOTE.test(lines[i])) i++;
      blocks.push(["footnote", from, i]);
    } else if (line.includes("|") && i < n && /-/.test(lines[i]) && /\|/.test(lines[i]) && lines[i].length < 2000 && DASHES.test(lines[i])) {
      while (i < n && lines[i].includes("|")) i++;
      blocks.push(["table", from, i]);
    } else {
      const under = () => i < n && UNDERLINE.test(lines[i]);
      while (i < n && lines[i].trim() && !under() && !interrupts(lines[i]) && !(MATH.test(lines[i]) && endOfMath(lines, i, MATH.exec(lines[i])[1]))) i++;
      blocks.push(under() ? ["underlined", from, ++i] : ["text", from, i]);
    }
  }
  return blocks;
}
// The line behind a formula that begins in this line and has nothing behind it; 0: it is none.
function endOfMath(lines, from, open) {
  const close = MATH_END[open];
  for (let i = from; i < lines.length && i < from + 200; i++) {
    const at = lines[i].indexOf(close, i === from ? lines[i].indexOf(open) + open.length : 0);
    if (at >= 0) return lines[i].slice(at + close.length).trim() ? 0 : i + 1;
    if (i > from && !lines[i].trim()) return 0;
  }
  return 0;
}
function starts(line) { return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line); }
// In a paragraph a line that begins with a number is mostly text: "… in the year\n1986. It …".
function interrupts(line) { return starts(line) && !/^ *(?!0*1[.)])\d{1,9}[.)]/.test(line); }

// Whether the last line of a block of code is its end.
function isClosed(text) {
  const at = text.lastIndexOf("\n"), mark = FENCE.exec(text.slice(0, text.indexOf("\n")))?.[1], last = text.slice(at + 1).trim();
  return at >= 0 && last.startsWith(mark) && !last.replaceAll(mark[0], "");
}

function draw(kind, lines, depth) {
  if (kind === "fence") {
    const [, , language] = FENCE.exec(lines[0]), closed = isClosed(lines.join("\n")), cut = indentOf(lines[0]);
    return codeBlock(language, lines.slice(1, closed ? -1 : undefined).map(l => l.slice(Math.min(cut, indentOf(l)))).join("\n"), !closed);
  }
  if (kind === "heading") {
    const [, marks, text] = HEADING.exec(lines[0]), h = element("h" + Math.min(6, marks.length + 2));
    inline(h, text.trimEnd().replace(/(?<=\s)#{1,6}$/, "").trimEnd());
    return h;
  }
  if (kind === "underlined") {
    const h = element(lines.at(-1).includes("=") ? "h3" : "h4");
    inline(h, paragraph(lines.slice(0, -1)));
    return h;
  }
  if (kind === "indented") return codeBlock("", lines.map(l => l.replace(INDENTED, "")).join("\n"));
  if (kind === "rule") return element("hr");
  if (kind === "math") {
    const source = lines.join("\n").trim(), set = formulaOf(source.slice(2, -2), true);
    if (set) { set.tabIndex = 0; return set; } // it may scroll
    const pre = element("pre", "math", source);
    pre.tabIndex = 0;
    return pre;
  }
  if (kind === "quote") {
    const quote = element("blockquote");
    drawAll(quote, lines.map(l => QUOTE.exec(l)[1]), depth + 1);
    return quote;
  }
  if (kind === "list") return drawList(lines, depth);
  if (kind === "table") return drawTable(lines);
  if (kind === "definition" && !depth) return document.createComment(""); // in lists and quotes it stands as it is written
  if (kind === "footnote" && !depth) {
    const note = element("p", "footnote"), [, label, first] = FOOTNOTE.exec(lines[0]);
    note.append(element("sup", "", label), " ");
    inline(note, paragraph([first, ...lines.slice(1)]));
    return note;
  }
  const p = element("p");
  inline(p, paragraph(lines));
  return p;
}

function drawList(lines, depth) {
  const [, , first] = ITEM.exec(lines[0]), ordered = /\d/.test(first), list = element(ordered ? "ol" : "ul");
  if (ordered) list.start = parseInt(first, 10);
  return addItems(list, lines, 0, depth);
}

// The line behind the item that begins in a line.
function endOfItem(lines, from, base) {
  for (let i = from + 1; i < lines.length; i++) if (ITEM.exec(lines[i])?.[1].length <= base + 1) return i;
  return lines.length;
}

// The items from a line on. Of a long list, the parts stand in a box, so that a browser lays out those alone that change or are seen.
function addItems(list, lines, from, depth) {
  const base = indentOf(lines[0]);
  let part = list.tagName === "DIV" ? list.lastChild : list, last;
  for (let to; from < lines.length; from = to) {
    to = endOfItem(lines, from, base);
    const item = itemOf(lines.slice(from, to), base), li = element("li", item.task ? "task" : "");
    if (item.task) {
      const box = element("span", "box", item.task === " " ? "☐" : "☑");
      box.role = "img";
      box.ariaLabel = item.task === " " ? "to do" : "done";
      li.append(box);
    }
    drawAll(li, item.lines, depth + 1);
    if (part.childElementCount === PART) {
      if (part === list) {
        list = element("div", "parts");
        part.replaceWith(list);
        list.append(part);
      }
      const more = element(part.tagName);
      if (part.tagName === "OL") more.start = part.start + PART;
      list.append(part = more);
    }
    part.append(li);
    last = {from, task: item.task};
  }
  list.last = last ?? list.last;
  return list;
}

// The lines of an item without its mark and its indentation; the sign in its box.
function itemOf(lines, base) {
  const [, indent, mark, first = ""] = ITEM.exec(lines[0]), rest = lines.slice(1), task = /^\[([ xX])\]\s+(?=\S)/.exec(first);
  const edge = first ? lines[0].length - first.length : indent.length + mark.length + 1; // the column where its text begins
  const least = rest.reduce((least, l) => l.trim() ? Math.min(least, indentOf(l)) : least, base + 16), text = rest.find(l => l.trim());
  // A line four columns behind the item's text, with a blank line before it, is code.
  const cut = text && !rest[0].trim() && indentOf(text) >= edge + 4 && !starts(text.trim()) ? Math.min(least, edge) : Math.min(least, base + 8);
  return {task: task?.[1], lines: [first.slice(task?.[0].length), ...rest.map(l => l.slice(Math.min(cut, indentOf(l))))]};
}

function growList(list, lines, depth) {
  const {from, task} = list.last, base = indentOf(lines[0]), to = endOfItem(lines, from, base), item = itemOf(lines.slice(from, to), base);
  const li = (list.tagName === "DIV" ? list.lastChild : list).lastChild, grown = item.task === task && growAll(li, item.lines, depth + 1);
  if (!grown) li.remove();
  addItems(list, lines, grown ? to : from, depth);
  return true;
}

// A bar behind a backslash is one of the text.
const cellsOf = line => line.trim().replace(/^\||(?<!\\)\|$/g, "").split(/(?<!\\)\|/).slice(0, 64).map(c => c.trim().replaceAll("\\|", "|"));

function drawTable(lines) {
  const box = element("div", "wide");
  addRows(box, lines, 0);
  box.tabIndex = 0;
  return box;
}

// The rows from a line on. A long table is several below each other, with columns of the same width.
function addRows(box, lines, from) {
  const sides = cellsOf(lines[1]).map(c => c.endsWith(":") ? c.startsWith(":") ? "middle" : "right" : "");
  let body = lastBody(box);
  for (let i = from; i < lines.length; i++) {
    if (i === 1) continue;
    if (!body || body.childElementCount === PART) {
      const table = element("table"), first = box.firstChild;
      table.append(body = element("tbody"));
      box.append(table);
      if (first?.tagName === "TABLE") setColumns(first, lines);
      if (first) setColumns(table, lines);
    }
    const row = element("tr");
    cellsOf(lines[i]).forEach((text, column) => {
      const cell = element(i ? "td" : "th", sides[column]);
      inline(cell, text);
      row.append(cell);
    });
    body.append(row);
  }
}

const lastBody = box => [...box.querySelectorAll("tbody")].at(-1);

// As wide as the longest text in the first part, within limits.
function setColumns(table, lines) {
  const rows = lines.slice(0, PART).map(cellsOf), columns = element("colgroup");
  let all = 0;
  for (let i = 0; i < Math.max(...rows.map(row => row.length)); i++) {
    const column = element("col"), wide = 3 + Math.min(60, Math.max(...rows.map(row => row[i]?.length ?? 0)));
    column.style.width = wide + "ch";
    columns.append(column);
    all += wide;
  }
  const part = element("div", "part");
  table.replaceWith(part);
  part.append(table);
  part.style.width = all + "ch";
  table.prepend(columns);
}

function growTable(box, old, lines) {
  const known = old.to - old.from - 1; // complete lines
  if (known < 2) return false;
  lastBody(box).lastChild.remove();
  addRows(box, lines, known);
  return true;
}

const blocksOf = (lines, at = 0, known = 0) => split(at ? lines.slice(at) : lines, known).map(([kind, from, to]) => ({kind, from: from + at, to: to + at, text: lines.slice(from + at, to + at).join("\n")}));

function drawAll(root, lines, depth) {
  if (depth > DEEPEST) { root.append(lines.join("\n")); return; }
  const blocks = blocksOf(lines), tight = root.tagName === "LI" && blocks.length <= 2 && blocks.filter(({kind}) => kind === "text").length === 1;
  for (const {kind, from, to} of blocks) {
    if (kind === "text" && tight) inline(root, paragraph(lines.slice(from, to)));
    else root.append(draw(kind, lines.slice(from, to), depth));
  }
  root.blocks = blocks;
}

// Adds what is new to a quote or an item of a list. False: it has to be drawn.
function growAll(root, lines, depth) {
  const before = root.blocks;
  if (!before?.length) return false;
  const blocks = blocksOf(lines), last = before.length - 1, now = blocks[last];
  if (!now || blocks.length > before.length && root.tagName === "LI") return false; // what stands in a paragraph may change
  for (let i = 0; i < last; i++) if (blocks[i].kind !== before[i].kind || blocks[i].text !== before[i].text) return false;
  if (!grow(root.lastChild, before[last], now, lines.slice(now.from, now.to), depth)) return false;
  for (const {kind, from, to} of blocks.slice(last + 1)) root.append(draw(kind, lines.slice(from, to), depth));
  root.blocks = blocks;
  return true;
}

// Adds what is new to the last block of a text. False: it has to be drawn.
function grow(node, old, now, lines, depth) {
  if (old.kind !== now.kind || !now.text.startsWith(old.text)) return false;
  if (old.text === now.text) return true;
  if (now.kind === "fence") return growCode(node, old, now);
  if (now.kind === "table") return growTable(node, old, lines);
  if (now.kind === "list") return growList(node, lines, depth);
  return now.kind === "quote" && growAll(node, lines.map(l => QUOTE.exec(l)[1]), depth + 1);
}

// So many lines may pass until it is known what one of them begins: a formula (endOfMath).
const FORESIGHT = 200;

// The definitions in the blocks. A line that may still grow defines nothing yet.
function definitionsIn(blocks, n, grows) {
  const found = new Map();
  for (const {kind, to, text} of blocks) {
    if (kind === "footnote") found.set("^" + labelOf(FOOTNOTE.exec(text.split("\n")[0])[1]), "");
    if (kind !== "definition") continue;
    const lines = text.split("\n");
    if (grows && to === n) lines.pop();
    for (const [label, address] of lines.map(definitionIn)) if (!found.has(label)) found.set(label, address);
  }
  return found;
}

function drawMarkdown(root, text) {
  try { drawBlocks(root, text); } catch (e) { // then it stands as it is written: the conversation goes on
    console.error(e);
    root.textContent = text;
    delete root.drawn;
  }
}

// Draws a text that grows: blocks that are as they were keep their elements, and most are not looked at again.
function drawBlocks(root, text) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n"), before = root.drawn ?? {text: "", lines: 0, blocks: [], defined: new Map()};
  let settled = 0; // blocks that what was added cannot change
  if (text.startsWith(before.text)) while (before.blocks[settled + 1]?.from < before.lines - FORESIGHT) settled++;
  const {from = 0, to = 0} = before.blocks[settled] ?? {};
  const known = text.startsWith(before.text) ? Math.min(to, before.lines - 1) - 1 : 0; // the last complete line of the first block that is looked at
  const blocks = [...before.blocks.slice(0, settled), ...blocksOf(lines, from, known - from)];
  defined = definitionsIn(blocks, lines.length, root.drawn && text !== before.text);
  // Labels that are defined now, or no longer, may stand in earlier blocks.
  const changed = [...new Set([...defined.keys(), ...before.defined.keys()])].filter(label => defined.get(label) !== before.defined.get(label));
  let same = settled;
  while (same < blocks.length && blocks[same].kind === before.blocks[same]?.kind && blocks[same].text === before.blocks[same].text) same++;
  const next = blocks[same];
  if (next && before.blocks.length === same + 1 && grow(root.lastChild, before.blocks[same], next, lines.slice(next.from, next.to), 0)) same++;
  while (root.childNodes.length > same) root.lastChild.remove();
  for (const {kind, from, to} of blocks.slice(same)) root.append(draw(kind, lines.slice(from, to), 0));
  if (changed.length) blocks.slice(0, same).forEach(({kind, from, to, text}, i) => {
    const low = text.includes("[") ? labelOf(text) : "";
    if (low && changed.some(label => low.includes(`[${label}]`))) root.childNodes[i].replaceWith(draw(kind, lines.slice(from, to), 0));
  });
  root.classList.toggle("long", blocks.length > 100); // a browser lays out what is seen of it
  root.drawn = {text, lines: lines.length, blocks, defined};
}
