// The list of conversations: search, and what can be done with each.

const list = $(".chats ul"), search = $(".chats input[type=search]"), menu = $(".menu");

let found = null;     // while something is sought: id of a chat → the text around it, "" of a title
let renaming = false; // a title is being edited

function drawChats() {
  if (renaming) return; // it is drawn when the title is complete
  if (search.value.trim()) findSoon(); // what changed may be found now, or no longer
  const at = list.contains(document.activeElement) ? document.activeElement : null, focused = at && [at.closest("li")?.id, at.className || "open"];
  const order = [...chats.values()].sort((a, b) => !!b.pinned - !!a.pinned || b.changed - a.changed).filter(chat => !found || found.has(chat.id));
  list.replaceChildren(...order.map(chat => {
    const item = element("li", chat.pinned ? "pinned" : "");
    item.id = "chat-" + chat.id;
    const open = element("button", "open"), more = element("button", "more", "⋯");
    open.type = more.type = "button";
    open.append(element("span", "title", chat.title || "New chat"));
    open.title = chat.title;
    if (found?.get(chat.id)) open.append(element("span", "found", found.get(chat.id)));
    if ([...runs.values(), ...elsewhere.values()].some(run => run.turn.chat === chat.id)) {
      const dot = element("span", "dot");
      dot.role = "img";
      dot.ariaLabel = "answering";
      item.append(dot);
    }
    if (chat === now.chat) open.setAttribute("aria-current", "true");
    open.onclick = () => { show(chat.id); closeSidebar(); box.focus(); };
    more.ariaLabel = `More for ${chat.title}`;
    more.onclick = () => openMenu(more, chat, item);
    item.prepend(open);
    item.append(more);
    return item;
  }));
  if (focused) (document.getElementById(focused[0])?.querySelector("." + focused[1]) ?? search).focus();
  $(".chats .nothing").hidden = order.length > 0;
  $(".chats .nothing").textContent = found ? "Nothing is found." : "Conversations are kept in this browser.";
}

// The text around what is sought, as far as a line shows it.
function excerpt(text, at) {
  const from = Math.max(0, at - 16);
  return (from ? "…" : "") + text.slice(from, at + 60).replace(/\s+/g, " ");
}

async function find() {
  const word = search.value.trim().toLowerCase(), all = new Map();
  if (word) for (const chat of chats.values()) if (chat.title.toLowerCase().includes(word)) all.set(chat.id, "");
  if (word) for (const message of await store.read("messages")) {
    for (const text of [message.content, ...(message.files ?? []).flatMap(file => [file.name, file.text])]) {
      if (all.has(message.chat)) break;
      const at = text.toLowerCase().indexOf(word);
      if (at >= 0) all.set(message.chat, excerpt(text, at));
    }
  }
  if (search.value.trim().toLowerCase() !== word) return;
  found = word ? all : null;
  drawChats();
  clearTimeout(soon); // nothing has changed since
}

let soon = 0;
function findSoon() {
  clearTimeout(soon);
  soon = setTimeout(find, 120);
}
search.oninput = findSoon;
search.onkeydown = e => {
  if (e.key === "Enter") { e.preventDefault(); list.querySelector(".open")?.click(); }
  if (e.key === "Escape" && search.value) { e.stopPropagation(); search.value = ""; find(); }
};

function openMenu(at, chat, item) {
  const choice = (name, run) => {
    const b = element("button", "", name);
    b.type = "button";
    b.onclick = () => { menu.hidePopover(); run(); };
    return b;
  };
  menu.replaceChildren(choice("Rename", () => editTitle(chat, item)), choice(chat.pinned ? "Unpin" : "Pin", () => pin(chat)),
                       choice("Export", () => exportChats(chat)), choice("Delete", () => discard(chat)));
  menu.showPopover();
  const r = at.getBoundingClientRect();
  menu.style.left = Math.min(r.left, innerWidth - menu.offsetWidth - 8) + "px";
  menu.style.top = Math.min(r.bottom + 4, innerHeight - menu.offsetHeight - 8) + "px";
  menu.firstChild.focus();
}

function editTitle(chat, item) {
  const input = element("input");
  input.value = chat.title;
  input.ariaLabel = "Title";
  let over = false;
  const finish = async keep => {
    if (over) return;
    over = true;
    renaming = false;
    if (keep) await rename(chat, input.value);
    drawChats();
  };
  input.onkeydown = e => {
    if (e.key === "Enter") finish(true);
    if (e.key === "Escape") { e.stopPropagation(); finish(false); }
  };
  input.onblur = () => finish(true);
  renaming = true;
  item.replaceChildren(input);
  input.select();
}

// -- whether it is shown: beside the talk where there is room, else over it

const wide = matchMedia("(min-width: 900px)");
function placeSidebar(open = wide.matches && recall(localStorage, "sidebar", true)) {
  document.body.classList.toggle("with-chats", open);
  $(".toggle").setAttribute("aria-expanded", open);
}
function toggleSidebar() {
  const open = !document.body.classList.contains("with-chats");
  if (wide.matches) remember(localStorage, "sidebar", open);
  placeSidebar(open);
  if (open && !wide.matches) search.focus();
}
function closeSidebar() { if (!wide.matches) placeSidebar(false); }
wide.onchange = () => placeSidebar();
$(".toggle").onclick = toggleSidebar;
$(".scrim").onclick = closeSidebar;
$(".export").onclick = () => exportChats();
const chooser = $(".import input");
chooser.onchange = async () => {
  if (chooser.files[0]) await importChats(await chooser.files[0].text());
  chooser.value = "";
};

// -- sentences that go away by themselves, each with one thing to do

// Notices with a button stand below each other; of notices without a button there is one.
function toast(text, name, run) {
  const bar = $(".toast"), line = element("div", name ? "line" : "line plain", text);
  const fade = () => { line.remove(); bar.hidden = !bar.childNodes.length; };
  if (bar.hidden) bar.replaceChildren();
  bar.querySelector(".plain")?.remove();
  if (name) line.append(button(name, () => { fade(); run(); }));
  bar.append(line);
  bar.hidden = false;
  setTimeout(fade, name ? 10000 : 5000);
}
