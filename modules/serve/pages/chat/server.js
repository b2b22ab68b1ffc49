// The requests to the server: answers and their pieces, the number of tokens of a conversation.

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];

// Fields that the page sets itself: it shows one answer to its messages, as a stream.
const OWN = ["messages", "n", "stream", "stream_options"];

// A message as the model gets it: files stand before the question, in fences that they do not close.
function contentOf(message) {
  const files = (message.files ?? []).map(({name, text}) => {
    const fence = "`".repeat(Math.max(3, 1 + Math.max(0, ...(text.match(/`+/g) ?? []).map(run => run.length))));
    return `${name}:\n${fence}\n${text}\n${fence}\n\n`;
  });
  return files.join("") + message.content;
}

const callId = i => `call_${i}`;

function messagesOf(messages, system) {
  const list = messages.map(m => ({role: m.role, content: contentOf(m), ...m.call && {tool_call_id: m.call},
    ...m.calls && {tool_calls: m.calls.map((call, i) => ({id: callId(i), type: "function", function: call}))}}));
  return system ? [{role: "system", content: system}, ...list] : list;
}

// The settings of a chat as fields of a request.
function fieldsOf(settings) {
  const fields = {};
  const {temperature} = about(settings).defaults;
  if (temperature !== undefined) fields.temperature = temperature;
  for (const name of NUMBERS) if (settings[name] !== undefined) fields[name] = settings[name];
  try { Object.assign(fields, JSON.parse(settings.more || "{}")); } catch { /* refused where it is entered */ }
  for (const name of OWN) delete fields[name];
  return named(settings, fields);
}

// The chunks of an answer as they come. `fields`: those of a request.
async function* chunksOf(messages, fields, signal) {
  const body = {messages, ...fields, stream: true, stream_options: {include_usage: true, continuous_usage_stats: true}};
  for await (const data of serverEvents(await call("/v1/chat/completions", {body, signal}))) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refusal(sentence(chunk.error.message), 200, chunk.error.code);
    yield chunk;
  }
}

// -- room

// What is sent of a path: from the last message on that begins anew.
const sent = path => path.slice(Math.max(0, path.findLastIndex(m => m.start)));

// Of the room, what an answer should have: less is offered to be made by leaving out what is oldest.
const enough = talk => Math.min(about(talk.chat.settings).room / 8, talk.chat.settings.max_tokens ?? Infinity);

// Tokens of the prompt.
async function count(talk, messages, signal) {
  const {settings} = talk.chat;
  const response = await call("/tokenize", {body: named(settings, {messages: messagesOf(messages, settings.system)}), signal});
  const {count, max_model_len} = await response.json(), model = known.get(modelOf(settings));
  if (model) model.room = Math.min(model.room, max_model_len);
  return count;
}

// How many of the oldest messages have to be left out so that a quarter of the context is free again; or, where the last
// question alone is longer than that, so that it fits. 0: no number helps.
async function surplusOf(talk, messages, signal) {
  const starts = messages.flatMap((m, i) => i && m.role === "user" ? [i] : []); // the rest begins with a question
  const fits = async (start, share) => { // with that share of the context left for what comes
    try {
      const n = await count(talk, messages.slice(start), signal), {room} = about(talk.chat.settings);
      return n + Math.max(1, room * share) <= room;
    } catch (e) {
      if (e.code === "context_length_exceeded") return false;
      throw e;
    }
  };
  let low = 0, high = starts.length; // the first that fits is one of starts[low..high]
  while (low < high) {
    const middle = (low + high) >> 1;
    if (await fits(starts[middle], 1 / 4)) high = middle;
    else low = middle + 1;
  }
  if (low < starts.length) return starts[low];
  return starts.length && await fits(starts.at(-1), 0) ? starts.at(-1) : 0;
}

// What is said where an answer would have less room than it should, and how many of the oldest messages would make it; or nothing.
async function tightness(talk, messages, signal) {
  if (messages.filter(m => m.role === "user").length < 2) return null; // nothing can be left out
  const n = await count(talk, messages, signal), {room} = about(talk.chat.settings), rest = room - n;
  if (rest >= enough(talk)) return null;
  const surplus = rest < 1 ? 0 : await surplusOf(talk, messages, signal); // what does not fit at all, the server says
  return surplus ? {surplus, tokens: n, fault: `The conversation has ${n.toLocaleString("en")} of ${room.toLocaleString("en")} tokens: ${rest.toLocaleString("en")} are left for an answer.`} : null;
}
