// The model or the models that the server has. With several, a conversation's settings name its model, and so does each request.

let trouble = "";        // why nothing is known
let models = [];         // the names, in the server's order; empty: the server has one model, and no request names it
const loaded = new Set(); // of these, what was in memory when the list was made
const known = new Map(); // name, or "" for the one model → what is known of it:
const UNKNOWN = {alias: "", defaults: {}, room: Infinity, endOfAnswer: "", note: "", ideas: []};
// alias: its name; defaults: the server's settings for what is left empty; room: tokens that a conversation can have, the context or what the
// KV blocks hold; endOfAnswer: the token that ends an answer; note: what the reader should know; ideas: for a first question.

const choice = $(".bar .models");

// The model that settings mean.
const modelOf = settings => models.includes(settings?.model) ? settings.model : models.find(name => loaded.has(name)) ?? models[0] ?? "";
const about = settings => known.get(modelOf(settings)) ?? UNKNOWN;

// The fields of a request to that model.
const named = (settings, fields) => models.length ? {...fields, model: modelOf(settings)} : fields;

// Makes the list, and asks for what the model of the conversation on the page is.
async function greet() {
  trouble = "";
  try {
    const props = await (await call("/props")).json();
    if (props.role === "router") await listModels();
    else {
      models = [];
      learn("", props);
    }
    drawModels();
    await meet();
  } catch (e) {
    if (e.status === 401) askForKey($(".key"), e.message, greet);
    trouble = e.message;
    showModel();
  }
}

async function listModels() {
  const {data} = await (await call("/v1/models")).json(), writing = data.filter(m => m.architecture?.output_modalities?.[0] !== "embeddings");
  models = writing.map(m => m.id);
  loaded.clear();
  for (const {id, status} of writing) if (["loaded", "sleeping"].includes(status?.value)) loaded.add(id);
  if (!models.length) throw new Refusal("The server has no model.", 0);
}

function learn(name, props) {
  const isToy = props.model_path === "quire-14m-q8_0.gguf", defaults = {...props.default_generation_settings.params};
  if (defaults.max_tokens < 0) delete defaults.max_tokens;
  if (isToy) defaults.temperature = 0; // it has learned facts by heart; a random token spoils them
  known.set(name, {
    alias: props.model_alias, defaults, endOfAnswer: props.eos_token,
    room: Math.min(props.default_generation_settings.n_ctx ?? Infinity, props.engine.kv_blocks * props.engine.block_size),
    note: props.chat_template_missing ? "The model's file has no chat template: chatml is used. The server's flag --chat-template names another." : "",
    ideas: isToy ? ["What is paged attention?", "Tell me a story.", "What does gratitude mean?"]
      : ["Explain paged attention in three sentences.", "Write a haiku about memory.", "Sort a list in Python."],
  });
  loaded.add(name);
}

// Asks what a model is. A server with several loads it for that, where it does so for requests, or where `load` says so.
async function ensure(name, signal, load = "") {
  if (known.has(name)) return;
  const props = await (await call("/props" + (name && `?model=${encodeURIComponent(name)}${load}`), {signal})).json();
  if (props.role !== "router") return learn(name, props);
  await greet(); // the list could not be made before
  throw new Refusal("The server has several models: choose one.", 0);
}

// Shows the model of the conversation. One that is not in memory is loaded by the first message to it, or now, if `load` says so.
async function meet(load = "") {
  const name = modelOf(now.chat.settings);
  showModel();
  if (known.has(name) || !load && !loaded.has(name)) return;
  if (load) $(".welcome .who").textContent = `${name} is being loaded …`;
  try {
    await ensure(name, undefined, load || "&autoload=false");
  } catch (e) {
    if (e.status === 401) throw e;
    loaded.delete(name);
    if (load) return toast(e.message);
  }
  showModel();
}

function showModel() {
  const {alias, note, ideas} = about(now.chat.settings), name = modelOf(now.chat.settings);
  choice.value = name;
  $(".ways [target]").href = "/blocks.html" + (name && `?model=${encodeURIComponent(name)}`);
  $(".bar .model").textContent = models.length ? "" : alias;
  $(".welcome .who").textContent = trouble || alias || name && `${name} will be loaded for the first message.`;
  $(".notice").hidden = !note;
  $(".notice").textContent = note;
  const some = ideas.length || !name ? ideas : ["Explain paged attention in three sentences.", "Write a haiku about memory."];
  $(".ideas").replaceChildren(...some.map(text => button(text, () => askIdea(text))));
  showFullness();
}

// What stands in the box is not sent yet, and stays there.
function askIdea(text) {
  const {value} = box, files = attached;
  ask(text);
  box.value = value;
  attached = files;
  drawAttached();
  lookAhead();
  fit();
  keepDraft();
}

function drawModels() {
  choice.hidden = $("dialog .which").hidden = models.length === 0;
  for (const list of [choice, $("dialog .which select")]) list.replaceChildren(...models.map(name => new Option(name, name)));
}

choice.onchange = () => {
  const model = choice.value;
  now.chat.settings = {...now.chat.settings, model};
  now.save();
  remember(localStorage, "settings", {...recall(localStorage, "settings", {}), model}); // a new conversation begins with it
  meet("&autoload=true");
  box.focus();
};
