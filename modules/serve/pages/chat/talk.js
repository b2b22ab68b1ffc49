// The conversation on the page.

const talkBox = $(".talk"), scroll = $(".scroll");
const views = new Map(); // id of a message on the page → its elements

function button(name, run, className = "") {
  const b = element("button", className, name);
  b.type = "button";
  b.onclick = () => run(b);
  return b;
}

// What was thought before the answer: unfolded while it comes and where nothing else came, or as the reader wants it.
function drawThought(view, turn) {
  const busy = runs.has(turn.id) || elsewhere.has(turn.id);
  view.thought.open = turn.unfolded ?? !turn.content;
  view.root.classList.toggle("thinks", !!turn.reasoning && !turn.content);
  drawMarkdown(view.thoughts, turn.reasoning ?? "");
  view.thought.firstChild.textContent = busy && !turn.content ? "Thinking …" : turn.thought ? `Thought for ${turn.thought.toFixed(1)} s` : "Thoughts";
  view.none.textContent = busy ? runs.get(turn.id)?.waits || "" : turn.content || turn.calls || turn.fault || turn.open ? "" : turn.reasoning ? "It thought, and gave no answer." : "The answer is empty.";
}

// The tools that an answer calls, as cards; the reader tells what came of them.
function drawCalls(view, turn) {
  const cards = (turn.calls ?? []).map(({name, arguments: text}) => {
    const card = element("div", "call text");
    card.append(element("div", "name", `Calls ${name}`), codeBlock("json", indented(text)));
    return card;
  });
  view.calls.replaceChildren(...cards);
  if (!cards.length || runs.has(turn.id) || turn !== turns.at(-1)) return;
  const results = cards.map((card, i) => {
    const area = element("textarea");
    area.ariaLabel = area.placeholder = `What ${turn.calls[i].name} returned`;
    area.value = now.results?.id === turn.id ? now.results.texts[i] ?? "" : "";
    area.oninput = () => { now.results = {id: turn.id, texts: results.map(({value}) => value)}; draftChanged(); };
    card.append(area);
    return area;
  });
  view.calls.append(button("Send the results", () => {
    let parent = turn.id;
    now.results = null;
    draftChanged();
    results.forEach((area, i) => { parent = now.add(parent, "tool", {content: area.value, call: callId(i)}).id; });
    answer(now, now.add(parent, "assistant"));
  }, "main"));
}
function indented(json) {
  try { return JSON.stringify(JSON.parse(json), null, 2); } catch { return json; } // which may still be coming
}

// ‹ 2/3 ›
function drawBranches(turn) {
  const all = now.tree.branches(turn), at = all.indexOf(turn), box = element("span", "branches");
  if (all.length < 2) return box;
  const [back, on] = [["‹", -1, "Previous branch"], ["›", 1, "Next branch"]].map(([name, by, label]) => {
    const b = button(name, () => step(turn, by));
    b.ariaLabel = b.title = label;
    b.disabled = !all[at + by];
    return b;
  });
  box.append(back, `${at + 1}/${all.length}`, on);
  return box;
}

function drawQuestion(turn) {
  const group = element("article", "turn user" + (turn.dropped ? " dropped" : "")), foot = element("div", "foot"), bubble = element("div", "bubble");
  const body = element("div");
  bubble.append(element("span", "unseen", "You: "), body);
  for (const {name, text} of turn.files ?? []) {
    const file = element("details", "file"), summary = element("summary", "", `${name} · ${text.length.toLocaleString("en")} characters`);
    file.append(summary, element("pre", "", text));
    body.append(file);
  }
  body.append(element("span", "said", turn.content));
  foot.append(drawBranches(turn), button("Copy", b => copyText(turn.content, b)), button("Edit", () => edit(turn, group)));
  group.append(bubble, foot);
  return {root: group, body};
}

function drawResult(turn) {
  const root = element("article", "turn tool" + (turn.dropped ? " dropped" : ""));
  const body = element("pre", "", turn.content);
  root.append(element("div", "name", "Result"), body);
  return {root, body};
}

// `text`: what was made of it before.
function edit(turn, root, text) {
  const form = element("form", "edit"), area = element("textarea"), row = element("div", "row"), send = element("button", "main", "Send");
  area.value = text ?? turn.content;
  now.edited = {id: turn.id, text: area.value};
  area.ariaLabel = "Your message, edited";
  area.rows = Math.min(12, turn.content.split("\n").length + 1);
  const cancel = () => { now.edited = null; draftChanged(); redraw(turn); box.focus(); };
  row.append(button("Cancel", cancel), send);
  form.append(area, row);
  form.onsubmit = e => { e.preventDefault(); askInstead(turn, area.value); box.focus(); };
  area.oninput = () => { now.edited = {id: turn.id, text: area.value}; draftChanged(); };
  area.onkeydown = e => {
    if (sends(e)) { e.preventDefault(); form.requestSubmit(); }
    if (e.key === "Escape") { e.stopPropagation(); cancel(); }
  };
  root.replaceChildren(form);
  views.get(turn.id).changed = true;
  if (text === undefined) area.focus();
}

function drawAnswer(turn) {
  const away = elsewhere.has(turn.id), busy = runs.has(turn.id) || away, root = element("article", "turn assistant" + (turn.dropped ? " dropped" : "") + (busy ? " busy" : ""));
  const text = element("div", "text answer"), foot = element("div", "foot"), note = element("span", "note", turn.note || "");
  const thought = element("details", "thought"), thoughts = element("div", "text"), none = element("div", "none"), calls = element("div", "calls");
  const view = {root, text, note, thought, thoughts, none, calls};
  const summary = element("summary");
  summary.onclick = () => { turn.unfolded = !thought.open; now.save(turn); };
  const enough = button("Answer now", b => endThinking(turn, b), "skip");
  enough.title = "Ends the thinking: the answer follows from the thoughts so far.";
  thought.append(summary, enough, thoughts);
  root.append(element("span", "unseen", "Answer: "), thought, text, calls, none);
  drawThought(view, turn);
  drawMarkdown(text, turn.content);
  drawCalls(view, turn);
  if (turn.fault) root.append(drawFault(turn));
  foot.append(drawBranches(turn), note);
  if (away) note.textContent = "answering in another tab";
  if (turn.open && !busy && !turn.fault && !/stopped$/.test(turn.note)) note.textContent = [turn.note, "interrupted"].filter(Boolean).join(" · ");
  if (!busy) {
    if (turn.content || turn.reasoning) foot.append(button("Copy", b => copyText(turn.content || turn.reasoning, b)));
    if ((turn.open || turn.cut) && turn.content && !turn.surplus) foot.append(button("Continue", () => goOn(turn)));
    if (!turn.anyway) foot.append(button("Try again", () => again(turn)));
    if (turn.content) foot.append(view.toggle = button("Tokens", () => toggleTokens(turn)));
    if (hasOrigins(turn)) {
      foot.append(view.origins = button("Cached", () => toggleOrigins(turn)));
      view.origins.title = "Which part of each message came from the cache";
      view.origins.ariaPressed = origins?.turn === turn;
    }
    if (said(turn) && turn === turns.at(-1) && !partnerOf(turn)) foot.append(button("Compare", () => openSettings(turn)));
    if (turn.verified) foot.append(drawVerified(turn.verified));
    else if (repeatable(turn)) foot.append(button("Verify", b => verify(turn, b)));
  }
  if (origins?.turn === turn) foot.append(element("span", "origins-note", origins.note));
  root.append(foot);
  return view;
}

function goOn(turn) {
  now.chat.leaf = turn.id;
  answer(now, turn);
}

function drawFault(turn) {
  const fault = element("div", turn.surplus ? "fault full" : "fault", turn.fault);
  fault.setAttribute("role", "alert");
  if (turn.surplus) {
    const row = element("div", "row");
    row.append(button(`Go on without the ${turn.surplus} oldest messages`, () => withoutOldest(turn), "main"));
    if (turn.anyway) row.append(button("Answer anyway", () => turn.content ? answer(now, turn, true) : again(turn, true)));
    fault.append(row, element("small", "", "They stay on this page, but the model no longer sees them. The system prompt is kept."));
  }
  return fault;
}

// All that the elements of a message depend on, but for what its own buttons make of them (view.changed).
function lookOf(turn) {
  const all = now.tree.branches(turn);
  return JSON.stringify([turn, runs.has(turn.id) || elsewhere.has(turn.id), turn === turns.at(-1), !!partnerOf(turn), all.indexOf(turn), all.length, origins?.turn === turn, origins?.of.get(turn.id)]);
}

function drawTurn(turn) {
  const view = {user: drawQuestion, tool: drawResult}[turn.role]?.(turn) ?? drawAnswer(turn);
  Object.assign(view, {turn, look: lookOf(turn), changed: runs.has(turn.id)});
  views.set(turn.id, view);
  showOrigin(view, turn);
  return view.root;
}

// An answer that grows, if it is on the page.
function repaint(turn) {
  const view = views.get(turn.id);
  if (!view?.text) return;
  drawThought(view, turn);
  drawMarkdown(view.text, turn.content);
  if (turn.calls) drawCalls(view, turn);
  view.note.textContent = elsewhere.has(turn.id) ? "answering in another tab" : turn.note;
  showFullness();
  follow();
}

// A message whose state changed, and the whole's.
function redraw(turn) {
  const old = views.get(turn.id)?.root;
  if (old?.isConnected) old.replaceWith(drawTurn(turn));
  showFullness();
  showState();
}

function drawTalk() {
  turns = now.path;
  const first = turns.length - sent(turns).length;
  turns.forEach((turn, i) => { turn.dropped = i < first; });
  const before = new Map(views);
  views.clear();
  if (runs.has(origins?.turn.id) || !turns.some(turn => turn === origins?.turn || turn.beside === origins?.turn.id)) origins = null;
  // A message that looks as before keeps its elements: a long conversation is not drawn again for each question.
  const roots = turns.flatMap((turn, i) => {
    const old = before.get(turn.id), root = partnerOf(turn) ? drawPair(turn, partnerOf(turn))
      : old?.turn === turn && !old.changed && old.look === lookOf(turn) ? views.set(turn.id, old).get(turn.id).root : drawTurn(turn);
    const cut = i === first && i > 0 ? [element("div", "cut", "The model no longer sees what is above: the context was full.")] : [];
    return [...cut, ...systemOrigin(turn), root];
  });
  let same = 0;
  while (same < roots.length && talkBox.childNodes[same] === roots[same]) same++;
  while (talkBox.childNodes.length > same) talkBox.lastChild.remove();
  talkBox.append(...roots.slice(same));
  const edited = now.edited && turns.find(turn => turn.id === now.edited.id);
  if (edited) edit(edited, views.get(edited.id).root, now.edited.text);
  $(".welcome").hidden = turns.length > 0;
  $("main .title").hidden = !turns.length;
  $("main .title").textContent = now.chat.title;
  document.title = now.chat.title ? `${now.chat.title} · quire` : "quire · chat";
  showModel();
  showState();
}

function showState() {
  const busy = running().length > 0;
  send.textContent = busy ? "Stop" : "Send";
  send.classList.toggle("main", !busy);
  send.disabled = !busy && !box.value.trim() && !attached.length;
}

let following = true; // the end of the talk, until the reader scrolls away from it
scroll.onscroll = () => { following = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 60; };
function follow(always) {
  if (always) following = true;
  if (following) scroll.scrollTop = scroll.scrollHeight;
}
