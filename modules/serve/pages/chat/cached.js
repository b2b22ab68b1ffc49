// Marks which part of each message of a prompt came from the cache: the border lies within a message's text, behind the last cached token.
// The server makes the prompt's tokens again, and its template renders the messages once more with marks around their texts. What the
// template writes itself lies between the marks. The border is shown only if the tokens have the bytes of the rendered text.

let origins = null; // what is shown: {turn: the answer whose prompt it is, of: id of a message, or "system" → its Origin, note}
// An Origin is {text: of the message, at: so many of its characters came from the cache, tokens, cached: of these}.

// Only where it is known how long the prompt of the last request was.
const hasOrigins = turn => turn.cached > 0 && turn.prompt > 0 && turn.made;

// A mark in front of a text names its place in the list of messages. No text has such characters, which are of private use.
const MARKS = /\u{10fff0}(\d+)\u{10fff1}|\u{10fff2}/u;
// A template may strip a message: the marks stand within its white space.
const withMarks = (message, i) => ({...message, content: message.content.replace(/\S(?:[^]*\S)?/, text => `\u{10fff0}${i}\u{10fff1}${text}\u{10fff2}`)});

// The bytes of a text with marks, without them, and where in the bytes the text of each message lies: its place in the list → [begin, end].
function placesIn(marked) {
  const encoder = new TextEncoder(), parts = marked.split(MARKS), texts = [], places = new Map();
  let at = 0, place = null;
  parts.forEach((part, i) => {
    if (i % 2 === 0) {
      texts.push(encoder.encode(part));
      at += texts.at(-1).length;
    } else if (part !== undefined) {
      place = part;
      if (!places.has(place)) places.set(place, [at]);
    } else if (places.get(place)?.length === 1) places.get(place).push(at);
  });
  const bytes = new Uint8Array(at);
  at = 0;
  for (const text of texts) { bytes.set(text, at); at += text.length; }
  return {bytes, places};
}

// Where in the bytes each token ends; null: these are not the tokens of these bytes.
function endsOf(tokens, bytes) {
  const encoder = new TextEncoder(), lies = (its, at) => its.every((byte, i) => byte === bytes[at + i]), ends = [];
  let at = 0;
  for (const {piece} of tokens) {
    const its = typeof piece === "string" ? [...encoder.encode(piece)] : piece;
    if (lies(its, at)) at += its.length;
    else if (its[0] === 32 && lies(its.slice(1), at)) at += its.length - 1; // some vocabularies put a space in front of a text
    else if (ends.length) return null; // the first token may be the one that begins every prompt
    ends.push(at);
  }
  return at === bytes.length ? ends : null;
}

async function originsOf(turn) {
  const path = [...askedFor(turn)], {made} = turn;
  if (turn.begun) path.push({...turn, content: turn.content.slice(0, turn.begun)});
  const messages = messagesOf(path, made.system), fields = {...fieldsOf(made), ...turn.begun && turn.reasoning && {enable_thinking: false}};
  const ids = path.map(m => m.id);
  if (made.system) ids.unshift("system");
  const [{tokens}, {prompt}] = await Promise.all([["/tokenize", {messages, with_pieces: true}], ["/apply-template", {messages: messages.map(withMarks)}]]
    .map(async ([path, body]) => (await call(path, {body: {...fields, ...body}})).json()));
  const {bytes, places} = placesIn(prompt), ends = tokens.length === turn.prompt && endsOf(tokens, bytes);
  if (!ends) throw new Refusal("The server makes another prompt of these messages now: which part was cached is no longer known.", 0);
  const border = ends[turn.cached - 1], of = new Map();
  let told = 0;
  for (const [i, [begin, end]] of places) {
    const text = messages[i].content, first = text.length - text.trimStart().length;
    const within = ends.map((to, t) => to > begin && (ends[t - 1] ?? 0) < end), n = within.filter(Boolean).length, cached = within.slice(0, turn.cached).filter(Boolean).length;
    // A border within a character lies in front of it.
    const letters = new TextDecoder("utf-8", {ignoreBOM: true}).decode(bytes.subarray(begin, Math.max(begin, Math.min(border, end))), {stream: true}).length;
    of.set(ids[i], {text, at: border >= end ? text.length : letters && first + letters, tokens: n, cached});
    told += cached;
  }
  if (of.has(turn.id)) of.get(turn.id).text = turn.content; // of which the prompt had the beginning
  const rest = turn.cached - told;
  return {turn, of, note: `${turn.cached} of the ${turn.prompt} prompt tokens came from the cache` + (rest > 0 ? `, of which the chat template wrote ${rest}.` : ".")};
}

// Shows what came from the cache, or the messages as they were.
async function toggleOrigins(turn) {
  if (origins?.turn === turn) origins = null;
  else {
    const talk = now;
    let found;
    try { found = await originsOf(turn); } catch (e) { return toast(e.message); }
    if (talk !== now || runs.has(turn.id)) return;
    origins = found;
  }
  const top = () => views.get(turn.id)?.origins?.getBoundingClientRect().top, before = top();
  drawTalk();
  views.get(turn.id)?.origins?.focus({preventScroll: true});
  scroll.scrollTop += top() - before || 0; // the button stays under the pointer
}

function drawOrigin({text, at, tokens, cached}) {
  const box = element("div", "origin"), share = element("i");
  share.style.setProperty("--share", cached / tokens);
  const told = element("p", "told", `${cached} of ${tokens} token${tokens === 1 ? "" : "s"} from the cache`);
  told.prepend(share);
  const source = element("div", "source");
  if (at) source.append(element("mark", at < text.length ? "border" : "", text.slice(0, at)));
  source.append(text.slice(at));
  box.append(source, told);
  return box;
}

// Puts its origin in the place of a message's text.
function showOrigin(view, turn) {
  const origin = origins?.of.get(turn.id);
  if (origin) (view.body ?? view.text).replaceWith(view.source = drawOrigin(origin));
}

// The system prompt, which is on the page only for this, in front of the first message of the prompt.
function systemOrigin(turn) {
  const origin = turn.id === origins?.turn.made.from && origins.of.get("system");
  if (!origin) return [];
  const system = element("article", "turn system");
  system.append(element("div", "name", "System prompt"), drawOrigin(origin));
  return [system];
}
