// The box for a message, keys, and what happens when the page comes and goes.

function fit() { // the box grows with what is in it
  box.style.height = "auto";
  box.style.height = Math.min(box.scrollHeight + 2, innerHeight * .4) + "px";
  remember(sessionStorage, "draft", box.value);
  showState();
}

function begin() {
  show(null);
  closeSidebar();
  box.focus();
}

box.oninput = () => { fit(); lookAhead(); };
addEventListener("resize", fit);
box.onkeydown = e => {
  if (e.key !== "Enter" || e.shiftKey || e.isComposing || e.keyCode === 229) return;
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
  if (e.key === "Escape" && running().length && !document.querySelector("dialog[open]")) { e.preventDefault(); stop(); }
});
for (const b of document.querySelectorAll(".new")) b.onclick = begin;

addEventListener("pagehide", () => {
  left = true;
  leave();
});
addEventListener("pageshow", () => { left = false; });
if (tabs) tabs.onmessage = async ({data: id}) => { // another tab changed this chat
  if (!store || [...runs.values()].some(run => run.turn.chat === id)) return;
  for (const chat of await store.read("chats")) {
    if (chat.deleted) chats.delete(chat.id);
    else if (chat.id === id) chats.set(id, Object.assign(chats.get(id) ?? {}, chat));
  }
  talks.delete(id);
  if (now.chat.id === id) show(id);
  else drawChats();
};

box.value = recall(sessionStorage, "draft", "");
placeSidebar();
openStore().then(() => { fit(); greet(); });
