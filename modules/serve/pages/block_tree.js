// The answers of one request as a tree: what they share stands once, on the left of what they do not share.

class TreeDrawing {
  constructor() {
    this.card = element("section", "card tree");
    this.card.hidden = true; // until there is a tree
    this.title = element("h2", "", "Answers as a tree");
    this.size = element("small");
    this.title.append(this.size);
    this.box = element("div", "branches");
    this.box.tabIndex = 0;
    this.box.setAttribute("role", "group");
    this.card.append(this.title, this.box);
  }

  draw(s) {
    const requests = new Map(); // request → its answers that have blocks
    for (const q of s.sequences)
      if (q.blocks.length && q.status !== "swapped") requests.set(q.request, [...(requests.get(q.request) ?? []), q]);
    const answers = [...requests.values()].sort((a, b) => b.length - a.length)[0] ?? [];
    const look = answers.map(q => [q.request, q.index, q.blocks.join(), q.texts?.at(-1)].join()).join();
    if (look === this.look) return;
    this.look = look;
    if (answers.length < 2) {
      this.size.textContent = "";
      this.box.replaceChildren(element("p", "rest", "A request with several answers or beams is drawn here. Its answers share blocks up to the place where they part."));
      return;
    }
    this.card.hidden = false;
    const nodes = [], tree = treeOf(answers);
    const place = (node, row, column) => {
      nodes.push({node, row, column});
      for (const child of node.children) { place(child, row, column + 1); row += child.rows.length; }
    };
    place(tree, 0, 0);
    const columns = Math.max(...nodes.map(n => n.column)) + 1;
    this.box.style.gridTemplateColumns = `repeat(${columns}, minmax(88px, 1fr))`;
    this.box.replaceChildren(...nodes.filter(({node}) => node.to > node.from).map(({node, row, column}) => this.branch(node, row, column)));
    const shared = tree.to;
    this.size.textContent = `request ${answers[0].request} · ${answers.length} answers`;
    this.box.setAttribute("aria-label", `Request ${answers[0].request} has ${answers.length} answers. All of them share ${shared} block${shared === 1 ? "" : "s"}.`);
  }

  branch({rows, from, to, children}, row, column) {
    const e = element("div", "branch"), n = to - from, q = rows[0], blocks = q.blocks.slice(from, to);
    e.style.setProperty("--own", colorOf(q));
    e.style.gridRow = `${row + 1} / span ${rows.length}`;
    e.style.gridColumn = children.length ? String(column + 1) : `${column + 1} / -1`;
    const shown = n > 4 ? `${blocks[0]} … ${blocks.at(-1)}` : blocks.join(" ");
    e.append(element("b", "", shown), element("span", "", rows.length > 1 ? `×${rows.length}` : `answer ${q.index + 1}`));
    if (q.texts) e.append(element("q", "", oneLine(q.texts.slice(from, to).join("").slice(-80))));
    e.title = `${n} block${n === 1 ? "" : "s"}, mapped by ${rows.map(r => `answer ${r.index + 1}`).join(", ")}`;
    return e;
  }
}
