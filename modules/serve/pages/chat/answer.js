// Answers, from the request to the last token. Several come at once, one or more in each conversation.

const runs = new Map(); // id of an answer that comes → {talk, turn, controller, id: the server's, usage, reason: why it ended, times in milliseconds}
let left = false;       // the page is gone: what fails now was only interrupted

// A browser opens six connections to a server. One of them is for what is asked meanwhile.
const MOST_STREAMS = 5;
const queue = []; // called in turn, when an answer has come
let streams = 0;

async function takeStream(signal) {
  if (streams >= MOST_STREAMS) await new Promise((go, fail) => {
    queue.push(go);
    signal.addEventListener("abort", () => {
      if (queue.includes(go)) queue.splice(queue.indexOf(go), 1);
      fail(signal.reason);
    });
  });
  else streams++;
}
function leaveStream() {
  if (queue.length) queue.shift()();
  else streams--;
}

// An answer that comes holds a lock of the browser, by which other tabs know of it, and see when it has come or its tab is closed.
const LOCK = "quire.answer.";
const elsewhere = new Map(); // id of an answer that comes in another tab → {controller}, whose abort() asks that tab to stop it

async function lookElsewhere() {
  const {held} = await navigator.locks?.query() ?? {held: []}; // there are none without TLS but on this machine
  for (const {name, mode} of held) {
    if (!name.startsWith(LOCK) || mode === "shared") continue; // shared: of a tab that waited for the answer's end, maybe this one
    const [chat, id] = name.slice(LOCK.length).split(".");
    if (runs.has(id) || elsewhere.has(id)) continue;
    elsewhere.set(id, {turn: {id, chat}, controller: {abort: () => tabs?.postMessage({stop: id})}});
    navigator.locks.request(name, {mode: "shared"}, () => {}).then(() => {
      elsewhere.delete(id);
      readAgain(chat);
    });
  }
}

// Fills `turn`, an answer in its place of the tree; one that has text goes on where it broke off. `anyway`: even if it has little room.
async function answer(talk, turn, anyway = false) {
  const run = {talk, turn, controller: new AbortController(), started: performance.now(), usage: null, reason: "", first: 0, last: 0, firstTokens: 0};
  const signal = run.controller.signal, settings = turn.made ?? talk.chat.settings, model = modelOf(settings);
  // A last message of the assistant is the beginning of the answer.
  const path = sent(talk.tree.pathTo(turn.parent)), messages = turn.content ? [...path, turn] : path;
  runs.set(turn.id, run);
  navigator.locks?.request(LOCK + turn.chat + "." + turn.id, () => new Promise(done => { run.release = done; if (!runs.has(turn.id)) done(); }));
  for (const old of ["fault", "surplus", "anyway", "cut", "verified"]) delete turn[old];
  turn.made = {seed: Math.floor(Math.random() * 2 ** 31), ...settings, from: path[0]?.id};
  turn.parts = (turn.parts ?? 0) + 1;
  turn.begun = turn.content.length;
  turn.open = true;
  talk.save(turn);
  if (talk === now) {
    talkBox.ariaLive = "off"; // an answer is read when it is complete
    drawTalk();
    follow(true);
  }
  drawChats();
  let painted = 0, kept = performance.now();
  const before = turn.thought ?? 0;
  const paint = () => {
    painted = 0;
    turn.note = figures(run);
    repaint(turn);
  };
  try {
    if (!known.has(model)) {
      run.waits = `Waiting for ${model || "the model"} to be loaded …`;
      repaint(turn);
      await ensure(model, signal);
      run.waits = "";
      if (talk === now) showModel();
    }
    if (streams >= MOST_STREAMS) {
      run.waits = "Waits for another answer …";
      repaint(turn);
    }
    await takeStream(signal);
    run.streams = true;
    run.waits = "";
    const fields = {reasoning_control: true, ...fieldsOf(turn.made)};
    if (turn.content && turn.reasoning) fields.enable_thinking = false; // it has thought already
    const tight = anyway ? null : await tightness(talk, messages, signal).catch(e => { if (e.name === "AbortError") throw e; });
    if (tight) throw Object.assign(new Refusal(tight.fault, 0, "tight"), {tight});
    for await (const chunk of chunksOf(messagesOf(messages, settings.system), fields, signal)) {
      run.id = chunk.id;
      if (chunk.usage) {
        run.usage = chunk.usage;
        turn.tokens = chunk.usage.prompt_tokens + chunk.usage.completion_tokens;
        turn.prompt = chunk.usage.prompt_tokens;
        turn.cached = chunk.usage.prompt_tokens_details?.cached_tokens ?? 0;
      }
      const choice = chunk.choices?.[0], {content = "", reasoning_content: thinks = "", tool_calls: calls} = choice?.delta ?? {};
      if (choice?.finish_reason) run.reason = choice.finish_reason;
      if (content || thinks || calls) {
        run.last = performance.now();
        if (!run.first) { run.first = run.last; run.firstTokens = run.usage?.completion_tokens ?? 1; }
        if (thinks || !turn.content && turn.reasoning) turn.thought = before + (run.last - run.started) / 1000;
        if (thinks) turn.reasoning = (turn.reasoning ?? "") + thinks;
        if (content) turn.content += content;
        for (const {index = 0, function: f = {}} of calls ?? []) {
          const its = (turn.calls ??= [])[index] ??= {name: "", arguments: ""};
          its.name += f.name ?? "";
          its.arguments += f.arguments ?? "";
        }
      }
      painted ||= requestAnimationFrame(paint);
      if (performance.now() - kept > 400) {
        store.write("messages", turn);
        tabs?.postMessage({turn});
        kept = performance.now();
      }
    }
    if (!run.reason) throw new Refusal("The server ended the answer early.", 0);
    delete turn.open;
    const {room} = about(settings);
    run.full = run.reason === "length" && room - turn.tokens < enough(talk);
    turn.cut = run.reason === "length" && room - turn.tokens >= 1;
    if (run.full) {
      turn.surplus = await surplusOf(talk, [...path, turn], signal).catch(() => 0);
      if (turn.surplus) turn.fault = `The context of ${room.toLocaleString("en")} tokens is full.`;
    }
  } catch (e) {
    if (e.name === "AbortError") run.reason = "stopped";
    else if (e.tight) Object.assign(turn, e.tight, {anyway: true});
    else if (!left) turn.fault = e instanceof Refusal ? e.message : "The connection to the server was lost.";
    if (e.code === "context_length_exceeded") {
      turn.surplus = await surplusOf(talk, messages, signal).catch(() => 0);
      if (turn.surplus) turn.fault = "The conversation is longer than the model's context.";
    }
    if (e.status === 401) askForKey($(".key"), e.message, () => { greet(); answer(talk, turn); });
  }
  if (run.streams) leaveStream();
  cancelAnimationFrame(painted);
  turn.note = [figures(run), run.reason === "stopped" && "stopped"].filter(Boolean).join(" · ");
  runs.delete(turn.id);
  run.release?.();
  talk.chat.changed = Date.now();
  talk.save(turn); // before it is drawn: no fault there costs the answer
  drawChats();
  if (talk !== now) return;
  talkBox.ariaLive = "polite";
  redraw(turn);
  follow();
  $(".unseen[role=status]").textContent = run.reason === "stopped" ? "Answer stopped." : "";
}

function figures({usage, first, last, firstTokens, started, reason, full}) {
  const parts = [];
  if (usage?.prompt_tokens) {
    const cached = usage.prompt_tokens_details?.cached_tokens;
    parts.push(`${usage.prompt_tokens} prompt tokens` + (cached ? ` (${cached} cached)` : ""));
  }
  const thinking = usage?.completion_tokens_details?.reasoning_tokens;
  if (usage?.completion_tokens) parts.push(`${usage.completion_tokens} tokens` + (thinking ? ` (${thinking} thinking)` : ""));
  const tokens = (usage?.completion_tokens ?? 0) - firstTokens;
  // A short answer comes in one piece: its rate is that of the whole.
  const apart = last - first > 100;
  if (first && tokens > 0) parts.push(`${(1000 * (apart ? tokens / (last - first) : usage.completion_tokens / (last - started))).toFixed(1)} tokens/s`);
  if (first) parts.push(`first after ${((first - started) / 1000).toFixed(2)} s`);
  if (reason === "length") parts.push(full ? "cut: the context is full" : "cut at the limit of tokens");
  return parts.join(" · ");
}

// Ends the thinking of an answer that comes; it goes on with what follows from the thoughts so far.
async function endThinking(turn, b) {
  const run = runs.get(turn.id);
  if (!run?.id) return;
  b.disabled = true;
  turn.ended = true;
  try {
    const {success} = await (await call("/v1/chat/completions/control", {body: named(turn.made, {id: run.id, action: "reasoning_end"})})).json();
    if (!success && !run.reason && !turn.content) toast("The server could not end the thinking.");
  } catch (e) {
    b.disabled = false;
    toast(e.message);
  }
}

const said = turn => turn.content || turn.reasoning || turn.calls;

// The answers that come in the conversation on the page, also those that another tab gets, and those that are asked for once more.
const running = () => turns.flatMap(turn => [turn.id, turn.beside]).flatMap(id => [runs.get(id), verifications.get(id), elsewhere.get(id)]).filter(Boolean);
function stop() { for (const run of running()) run.controller.abort(); }

function ask(text, files = []) {
  if (!text.trim() && !files.length || running().length) return;
  // What failed without a word is no part of the conversation, but what a tool returned is.
  const path = [...turns];
  while (path.length && path.at(-1).role !== "tool" && !(path.at(-1).role === "assistant" && said(path.at(-1)))) path.pop();
  box.value = "";
  attached = [];
  keepDraft(); // it is none any more, of a new conversation either
  let parent = path.at(-1)?.id ?? null;
  // A call without a result is refused: nothing came of it.
  path.at(-1)?.calls?.forEach((call, i) => { parent = now.add(parent, "tool", {call: callId(i)}).id; });
  const question = now.add(parent, "user", {content: text.trim(), ...files.length && {files}, ...startsAnew && {start: true}});
  drawAttached();
  lookAhead();
  fit();
  answer(now, now.add(question.id, "assistant"));
}

// Another answer in the place of this one; an answer without a word is not kept.
function again(turn, anyway = false) {
  const talk = now;
  answer(talk, said(turn) ? talk.add(turn.parent, "assistant") : Object.assign(turn, {made: undefined, parts: 0, ended: false}), anyway);
}

function withoutOldest(turn) {
  const path = sent(now.tree.pathTo(turn.parent)), first = path[turn.surplus] ?? path.at(-1); // a file may say any number
  if (first) {
    first.start = true;
    now.save(first);
  }
  if (turn.content) answer(now, turn, true);
  else again(turn, true);
}

// An edited question is a branch beside the old one.
function askInstead(turn, text) {
  if (!text.trim()) return;
  now.edited = null;
  const question = now.add(turn.parent, "user", {content: text.trim(), ...turn.files && {files: turn.files}, ...turn.start && {start: true}});
  answer(now, now.add(question.id, "assistant"));
}

// Shows the branch so many steps from the one that is shown.
function step(turn, by) {
  const all = now.tree.branches(turn), to = all[all.indexOf(turn) + by];
  if (!to) return;
  now.chat.leaf = now.tree.leafBelow(to.id);
  now.save();
  drawTalk();
  showState();
}
