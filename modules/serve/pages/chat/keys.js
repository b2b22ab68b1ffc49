// What can be done by keys; the list that ? opens is made of the same table.

const lastAnswer = () => turns.findLast(t => t.role === "assistant"), lastQuestion = () => turns.findLast(t => t.role === "user");
const onAnswer = run => () => { const turn = lastAnswer(); if (turn && !runs.has(turn.id)) run(turn); };
function neighbour(by) {
  const open = [...list.querySelectorAll(".open")], at = open.findIndex(b => b.getAttribute("aria-current"));
  open[at < 0 ? 0 : Math.max(0, Math.min(open.length - 1, at + by))]?.click();
}
function stepLast(by) {
  const turn = turns.findLast(t => now.tree.branches(t).length > 1);
  if (turn) step(turn, by);
}
function editLast() {
  const turn = lastQuestion(), root = turn && views.get(turn.id).root, area = root?.querySelector(".edit textarea");
  if (area) area.focus(); // it is edited already
  else if (turn) edit(turn, root);
}

// Keys, what they do, how. Alt with a letter goes by the key's place, as some keyboards write signs with it.
const KEYS = [
  ["Ctrl+K", "Search the conversations", () => { placeSidebar(true); search.select(); }],
  ["Ctrl+B", "Show or hide the conversations", toggleSidebar],
  ["Alt+N", "New chat", begin],
  ["Alt+ArrowUp", "Conversation above", () => neighbour(-1)],
  ["Alt+ArrowDown", "Conversation below", () => neighbour(1)],
  ["Alt+ArrowLeft", "Previous branch", () => stepLast(-1)],
  ["Alt+ArrowRight", "Next branch", () => stepLast(1)],
  ["Alt+E", "Edit the last question", editLast],
  ["Alt+R", "Another answer", onAnswer(turn => again(turn))],
  ["Alt+G", "Go on with the answer", onAnswer(turn => { if (turn.content && (turn.open || turn.cut)) goOn(turn); })],
  ["Alt+W", "Answer now: end the thinking", () => document.querySelector(".busy.thinks .skip:not(:disabled)")?.click()],
  ["Alt+T", "Tokens of the answer; arrows and Enter there", onAnswer(turn => { if (turn.content) toggleTokens(turn); })],
  ["Alt+M", "Mark what came from the cache", onAnswer(turn => { if (hasOrigins(turn)) toggleOrigins(turn); })],
  ["Alt+C", "Compare with other settings", onAnswer(turn => openSettings(turn))],
  ["Alt+V", "Verify: the same answer again", onAnswer(turn => [...views.get(turn.id).root.querySelectorAll(".foot > button")].find(b => b.textContent === "Verify")?.click())],
  ["Alt+A", "Add text or PDF files", () => picker.click()],
  ["Alt+S", "Settings", () => openSettings()],
  ["Alt+H", "This list; outside of texts also ?", listKeys],
];

function keyOf(e) {
  const key = /^Key[A-Z]$/.test(e.code) ? e.code.slice(3) : e.key;
  return (e.ctrlKey || e.metaKey ? "Ctrl+" : "") + (e.altKey ? "Alt+" : "") + (e.shiftKey ? "Shift+" : "") + key;
}

function listKeys() {
  const rows = [...KEYS, ["Enter", "Send"], ["Shift+Enter", "New line"], ["Esc", "Stop the answer"]];
  $(".keys-list dl").replaceChildren(...rows.flatMap(([key, what]) => [element("dt", "", key.replace("Arrow", "")), element("dd", "", what)]));
  $(".keys-list").showModal();
}

addEventListener("keydown", e => {
  if (document.querySelector("dialog[open]")) return;
  const found = KEYS.find(([key]) => key === keyOf(e));
  if (found) { e.preventDefault(); found[2](); }
  else if (e.key === "?" && !e.target.closest("textarea, input, select")) { e.preventDefault(); listKeys(); }
});
$(".help").onclick = listKeys;
