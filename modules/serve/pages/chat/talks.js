// The conversations: which there are, which one is shown, and what becomes of them.

class Talk {
  constructor(chat, messages) {
    this.chat = chat;
    this.tree = new Tree(messages);
    this.chat.leaf = this.tree.messages.has(chat.leaf) ? chat.leaf : this.tree.leafBelow(null);
  }

  get path() { return this.tree.pathTo(this.chat.leaf); }

  // Adds a message behind another and shows it.
  add(parent, role, more) {
    const message = this.tree.add({id: newId(), chat: this.chat.id, parent, role, content: "", ...more});
    this.chat.leaf = message.id;
    this.chat.changed = Date.now();
    if (!this.chat.title) this.chat.title = titleOf(message);
    chats.set(this.chat.id, this.chat);
    talks.set(this.chat.id, this);
    this.save(message);
    return message;
  }

  // Keeps the chat, and messages that are new or changed.
  save(...messages) {
    if (!chats.has(this.chat.id)) return; // nothing was said yet
    tell(this.chat.id, store.write("chats", this.chat), messages.length && store.write("messages", ...messages));
  }
}

// Other tabs read the chat again when this has been written: what they are told overtakes what is on its way to the database.
async function tell(id, ...writes) {
  await Promise.all(writes);
  tabs?.postMessage(id);
}

let store = null;
let newDraft; // of a conversation without a word, which is kept beside the chats under the name "new"
const chats = new Map(); // id → chat, those without a word yet left out
const talks = new Map(); // id → Talk, of the chats that were opened
const heard = new Map(); // id → how often another tab has changed the chat
let now = newTalk();     // the Talk on the page
let turns = [];          // its messages that are shown
// Other tabs of this page have the same chats.
const tabs = window.BroadcastChannel && new BroadcastChannel("quire");

function titleOf(message) {
  const line = (message.content.trim() || message.files?.[0]?.name || "").split("\n")[0];
  return line.length > 60 ? line.slice(0, 59).trimEnd() + "…" : line;
}

function newTalk() { return new Talk({id: newId(), title: "", created: Date.now(), changed: Date.now(), leaf: null, settings: savedSettings()}); }

const UNDO = 60000; // so long, in milliseconds, another tab may still have a deleted chat back

async function openStore() {
  store = await Store.open();
  store.onfault = error => toast(error?.name === "QuotaExceededError"
    ? "The browser's storage for this page is full: export and delete conversations." : "The browser could not keep the conversation.");
  await rescue();
  for (const chat of await store.read("chats")) {
    if (chat.id === "new") newDraft = chat.draft;
    else if (chat.deleted) {
      if (chat.deleted < Date.now() - UNDO) store.remove(chat.id);
    } else chats.set(chat.id, chat);
  }
  await lookElsewhere().catch(() => {});
  await show(recall(sessionStorage, "chat", null));
}

// -- what is not sent yet: the text in the box, its files, an edited question, the results of calls

let draftSoon = 0;
let draftKept; // by this tab, as JSON: another tab may write the chat without it
function draftChanged() {
  clearTimeout(draftSoon);
  draftSoon = setTimeout(keepDraft, 300);
}

function keepDraft() {
  clearTimeout(draftSoon);
  if (!store) return;
  const {edited = null, results = null} = now, any = box.value || attached.length || edited || results;
  const draft = any ? {text: box.value, files: attached, edited, results} : undefined;
  const known = chats.has(now.chat.id), text = JSON.stringify(draft);
  if (draftKept === text) return;
  draftKept = text;
  if (known) now.chat.draft = draft;
  else newDraft = draft;
  if (known) store.writeFields("chats", now.chat, "draft");
  else store.write("chats", {id: "new", draft});
}

// What this tab kept survives another tab's write of the chat with `draft`.
function keepDraftAgain(id, draft) {
  if (now.chat.id !== id || !draftKept || JSON.stringify(draft) === draftKept) return;
  chats.get(id).draft = JSON.parse(draftKept);
  store.writeFields("chats", chats.get(id), "draft");
}

function takeDraft() {
  const draft = chats.has(now.chat.id) ? now.chat.draft : newDraft, {text = "", files = [], edited = null, results = null} = draft ?? {};
  draftKept = JSON.stringify(draft);
  box.value = text;
  attached = [...files];
  Object.assign(now, {edited, results});
  drawAttached();
}

// Shows a conversation; without an id, or with one that is gone, a new one.
let shown = 0;
async function show(id) {
  const chat = chats.get(id), number = ++shown;
  if (shown > 1) keepDraft();
  let messages = null, change;
  if (chat && !talks.has(id))
    do {
      change = heard.get(id);
      messages = await store.read("messages", id);
    } while (change !== heard.get(id)); // the chat may name a message that was written behind these
  if (number !== shown) return; // another was wanted meanwhile
  if (messages && !talks.has(id)) talks.set(id, new Talk(chat, messages));
  const again = chat && now.chat.id === id, {edited, results} = now; // which another tab changed
  now = chat ? talks.get(id) : newTalk();
  if (again) Object.assign(now, {edited, results});
  else takeDraft();
  remember(sessionStorage, "chat", now.chat.id);
  drawTalk();
  drawChats();
  fit();
  follow(true);
  meet().catch(() => {}); // greet() says it
}

// A page that is left has no time for a database: what came last goes where it is written at once, and from there to the database.
function leave() {
  if (!store) return;
  const [messages, chats] = [store.pending.messages, store.pending.chats].map(pending => [...pending.values()].map(({value}) => value));
  messages.push(...[...runs.values()].map(run => run.turn));
  const {messages: more = [], chats: others = []} = recall(localStorage, "rescue", {}); // of other tabs
  if (messages.length || chats.length) remember(localStorage, "rescue", {messages: [...more, ...messages], chats: [...others, ...chats]});
  for (const {id} of chats) tabs?.postMessage(id);
}
async function rescue() {
  const {messages, chats} = recall(localStorage, "rescue", {});
  if (!messages) return;
  await store.write("messages", ...messages);
  await store.write("chats", ...chats);
  try { localStorage.removeItem("quire.rescue"); } catch { /* then it was not there either */ }
}

async function rename(chat, title) {
  if (!title.trim() || title === chat.title) return;
  Object.assign(chat, {title: title.trim(), named: true});
  await tell(chat.id, store.writeFields("chats", chat, "title", "named"));
}

function pin(chat) {
  chat.pinned = !chat.pinned;
  tell(chat.id, store.writeFields("chats", chat, "pinned"));
  drawChats();
}

// The conversation is gone at once, and can be had back for a while.
function discard(chat) {
  for (const run of runs.values()) if (run.turn.chat === chat.id) run.controller.abort();
  chat.deleted = Date.now();
  tell(chat.id, store.write("chats", chat));
  chats.delete(chat.id);
  if (now.chat === chat) show(null);
  else drawChats();
  toast(`“${chat.title}” is deleted.`, "Undo", () => { // of each one that was deleted a moment ago
    delete chat.deleted;
    const messages = talks.get(chat.id)?.tree.messages.values() ?? [];
    tell(chat.id, store.write("chats", chat), store.write("messages", ...messages)); // an answer that the deletion broke off was kept only in part
    chats.set(chat.id, chat);
    show(chat.id);
  });
}

// -- files

// Conversations as a file that can be read again: all of them, or one.
async function exportChats(chat) {
  const file = {quire: "conversations", version: 1, chats: (chat ? [chat] : [...chats.values()]).map(({draft, ...rest}) => rest), messages: await store.read("messages", chat?.id)};
  file.messages = file.messages.filter(m => file.chats.some(c => c.id === m.chat));
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify(file, null, 1)], {type: "application/json"}));
  link.download = chat ? `${chat.title.replace(/[^\p{L}\p{N} ]/gu, "").trim() || "conversation"}.json` : "quire-conversations.json";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// Of what a file says of settings, those that there are.
function settingsFrom(given) {
  const settings = {};
  for (const name of ["system", "more", "model"]) if (typeof given?.[name] === "string") settings[name] = given[name];
  for (const name of NUMBERS) if (Number.isFinite(given?.[name])) settings[name] = given[name];
  return settings;
}

// What may come from a file: known fields of the right kind. A conversation that is there already is not touched: its copy gets a new name.
async function importChats(text) {
  let file;
  try { file = JSON.parse(text); } catch { return toast("This file is no JSON."); }
  const isBackup = file?.quire === "conversations" && Array.isArray(file.chats) && Array.isArray(file.messages) && !file.chats.includes(null);
  if (!isBackup) return toast("This file has no conversations of quire.");
  const ids = new Map(), fresh = id => ids.get(id) ?? ids.set(id, newId()).get(id), isText = value => typeof value === "string";
  const added = [], messages = [];
  for (const {id, title, pinned, created, changed, settings, leaf} of file.chats) {
    if (!isText(id)) continue;
    added.push({id: fresh(id), title: isText(title) ? title : "", named: true, pinned: !!pinned, created: Number(created) || Date.now(),
                changed: Number.isFinite(changed) ? changed : Date.now(), leaf: isText(leaf) ? fresh(leaf) : null,
                settings: settingsFrom(settings)});
  }
  for (const m of file.messages) {
    if (!isText(m?.id) || !ids.has(m.chat) || !isText(m.content) || !["user", "assistant", "tool"].includes(m.role)) continue;
    const texts = ["reasoning", "note", "fault"].filter(name => isText(m[name])).map(name => [name, m[name]]);
    const numbers = ["thought", "tokens", "prompt", "cached", "begun", "parts", "surplus"].filter(name => Number.isFinite(m[name])).map(name => [name, Number(m[name])]);
    const flags = ["open", "cut", "anyway", "ended"].filter(name => m[name] === true).map(name => [name, true]);
    const {made, verified} = m, isNumber = value => Number.isFinite(value);
    const calls = (Array.isArray(m.calls) ? m.calls : []).filter(c => isText(c?.name) && isText(c.arguments)).map(c => ({name: c.name, arguments: c.arguments}));
    messages.push({...Object.fromEntries([...texts, ...numbers, ...flags]), ...calls.length && {calls},
                   ...made && typeof made === "object" && {made: {...settingsFrom(made), ...isText(made.from) && {from: fresh(made.from)}}},
                   ...verified?.same === true && isNumber(verified.tokens) && isNumber(verified.seed) && {verified: {same: true, tokens: verified.tokens, seed: verified.seed}},
                   ...verified?.same === false && isNumber(verified.at) && {verified: {same: false, at: verified.at}},
                   ...isText(m.beside) && {beside: fresh(m.beside)},
                   ...isText(m.call) && {call: m.call}, id: fresh(m.id), chat: ids.get(m.chat), parent: isText(m.parent) ? fresh(m.parent) : null,
                   at: Number(m.at) || Date.now(), role: m.role, content: m.content, start: !!m.start,
                   files: (Array.isArray(m.files) ? m.files : []).filter(f => isText(f?.name) && isText(f.text)).map(({name, text}) => ({name, text}))});
  }
  // From each message a path leads to one without a parent: a circle would have no end.
  const parents = new Map(messages.map(m => [m.id, m])), good = new Set(); // good: what leads there
  for (const m of messages) if (parents.get(m.parent)?.chat !== m.chat) m.parent = null; // it is missing
  for (const m of messages) {
    const seen = new Set();
    let top = m;
    while (top.parent !== null && !seen.has(top) && !good.has(top)) { seen.add(top); top = parents.get(top.parent); }
    if (seen.has(top)) top.parent = null;
    for (const one of seen) good.add(one);
  }
  await store.write("messages", ...messages);
  await store.write("chats", ...added);
  for (const chat of added) chats.set(chat.id, chat);
  toast(added.length === 1 ? "1 conversation is imported." : `${added.length} conversations are imported.`);
  await show(added[0]?.id);
}
