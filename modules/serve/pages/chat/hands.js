// The box for a message, keys, and what happens when the page comes and goes.

function fit() { // the box grows with what is in it
  box.style.height = "auto";
  box.style.height = Math.min(box.scrollHeight + 2, innerHeight * .4) + "px";
  showState();
}

function begin() {
  show(null);
  closeSidebar();
  box.focus();
}

box.oninput = () => { fit(); lookAhead(); draftChanged(); };
addEventListener("resize", fit);
// On the keyboard of a phone nothing but Enter starts a line.
const fingers = matchMedia("(hover: none) and (pointer: coarse)");
const sends = e => e.key === "Enter" && !e.shiftKey && !e.isComposing && e.keyCode !== 229 && !fingers.matches;
box.onkeydown = e => {
  if (!sends(e)) return;
  e.preventDefault();
  ask(box.value, attached);
};
$(".ask").onsubmit = e => {
  e.preventDefault();
  if (running().length) stop();
  else ask(box.value, attached);
  box.focus();
};
addEventListener("keydown", e => {
  if (e.key === "Escape" && !wide.matches && document.body.classList.contains("with-chats") && !document.querySelector("dialog[open], :popover-open")) {
    closeSidebar();
    box.focus();
  } else if (e.key === "Escape" && running().length && !document.querySelector("dialog[open], :popover-open")) { e.preventDefault(); stop(); }
});
for (const b of document.querySelectorAll(".new")) b.onclick = begin;

addEventListener("pagehide", () => {
  left = true;
  keepDraft();
  leave();
  for (const run of runs.values()) run.release?.();
});
addEventListener("pageshow", () => { left = false; });
if (tabs) tabs.onmessage = ({data}) => {
  if (data.stop) runs.get(data.stop)?.controller.abort();
  else if (data.turn) follows(data.turn);
  else readAgain(data);
};

// An answer that another tab gets, as far as it has come.
function follows(turn) {
  const mine = talks.get(turn.chat)?.tree.messages.get(turn.id);
  if (!mine || runs.has(turn.id)) return;
  const {unfolded} = mine;
  Object.assign(mine, turn, {unfolded});
  repaint(mine);
}

// Another tab changed this chat.
async function readAgain(id) {
  if (!store) return;
  heard.set(id, (heard.get(id) ?? 0) + 1);
  await rescue(); // what a tab that was closed left
  const own = () => [...runs.values()].filter(run => run.turn.chat === id); // answers that come in this tab
  for (const {leaf, ...chat} of await store.read("chats")) {
    if (chat.deleted) {
      if (chat.id === id) for (const run of own()) run.controller.abort();
      chats.delete(chat.id);
    } else if (chat.id === id) {
      chats.set(id, Object.assign(chats.get(id) ?? {}, chat, !own().length && {leaf}));
      keepDraftAgain(id, chat.draft);
    }
  }
  await lookElsewhere();
  if (chats.has(id) && own().length) { // the messages of this tab are the newer ones
    if (now.chat.id === id) $("main .title").textContent = now.chat.title;
    return drawChats();
  }
  talks.delete(id); // behind all that takes time: what an earlier change had read is not shown for this one
  if (now.chat.id === id) show(id);
  else drawChats();
}

placeSidebar();
openStore().catch(e => console.error(e)).then(() => { fit(); greet(); });
