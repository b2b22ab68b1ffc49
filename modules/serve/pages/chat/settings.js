// The settings of a conversation: {system, temperature, …}. A new conversation has those that were saved last.

let besides = null; // the answer beside which another is wanted
const dialog = $("dialog.settings"), form = dialog.querySelector("form");

function savedSettings() {
  const {key, ...settings} = recall(localStorage, "settings", {});
  return settings;
}

// For the conversation; with an answer, for another one beside it.
function openSettings(turn) {
  besides = turn;
  $("#settings-title").textContent = turn ? "Another answer, beside this one" : "Settings";
  dialog.querySelector("[value=save]").textContent = turn ? "Answer" : "Save";
  form.elements.key.parentElement.hidden = !!turn;
  const settings = {...now.chat.settings, key: recall(localStorage, "settings", {}).key};
  const {defaults} = about(settings);
  if (models.length) settings.model = modelOf(settings);
  for (const field of form.elements) {
    if (!field.name) continue;
    field.value = settings[field.name] ?? "";
    if (NUMBERS.includes(field.name)) field.placeholder = {max_tokens: "no limit", seed: "random"}[field.name] ?? (field.name in defaults ? Number(defaults[field.name].toPrecision(4)) : "");
  }
  form.elements.theme.value = recall(localStorage, "theme", "system");
  checkMore();
  presetName.value = "";
  listPresets();
  dialog.showModal();
}

function enteredSettings() {
  const settings = {};
  for (const field of form.elements) {
    const value = field.name && field.name !== "theme" && field.value.trim();
    if (value) settings[field.name] = NUMBERS.includes(field.name) ? Number(value) : value;
  }
  return settings;
}

$(".set").onclick = () => openSettings();
form.onsubmit = () => {
  const all = enteredSettings();
  if (besides) {
    delete all.key;
    return answerBeside(besides, all);
  }
  remember(localStorage, "settings", all);
  remember(localStorage, "theme", form.elements.theme.value);
  now.chat.settings = savedSettings();
  now.save();
  $(".key").hidden = true;
  greet();
};
dialog.onclose = () => {
  wear(recall(localStorage, "theme", "system"));
  box.focus();
};
form.elements.theme.onchange = () => wear(form.elements.theme.value);
form.elements.more.oninput = checkMore;
function checkMore() {
  const field = form.elements.more;
  let value = {};
  try { value = JSON.parse(field.value || "{}"); } catch { value = null; }
  const isObject = value && typeof value === "object" && !Array.isArray(value), own = isObject && OWN.find(name => name in value);
  field.setCustomValidity(!isObject ? "This is not a JSON object." : own ? `The page itself sets ${own}.` : "");
}
dialog.querySelector(".cancel").onclick = () => dialog.close();
dialog.querySelector(".reset").onclick = () => { for (const field of form.elements) if (field.name && field.name !== "key" && field.name !== "theme") field.value = ""; checkMore(); };

// -- presets: settings under a name

const presetName = dialog.querySelector(".preset input");
const presets = () => recall(localStorage, "presets", {});

function listPresets() {
  dialog.querySelector("datalist").replaceChildren(...Object.keys(presets()).map(name => { const o = element("option"); o.value = name; return o; }));
  dialog.querySelector(".drop").disabled = !Object.hasOwn(presets(), presetName.value);
}
presetName.oninput = listPresets;
presetName.onchange = () => { // one that is there is taken over, when its name is complete
  const all = presets(), preset = Object.hasOwn(all, presetName.value) && all[presetName.value];
  if (preset) for (const field of form.elements) if (field.name && field.name !== "key" && field.name !== "theme") field.value = preset[field.name] ?? "";
  checkMore();
};
presetName.onkeydown = e => { if (e.key === "Enter") { e.preventDefault(); dialog.querySelector(".keep").click(); } };
dialog.querySelector(".keep").onclick = () => {
  const {key, ...settings} = enteredSettings(), name = presetName.value.trim();
  if (!name) return presetName.focus();
  remember(localStorage, "presets", {...presets(), [name]: settings});
  listPresets();
  toast(`The preset “${name}” is kept.`);
};
dialog.querySelector(".drop").onclick = () => {
  const {[presetName.value]: gone, ...rest} = presets();
  remember(localStorage, "presets", rest);
  presetName.value = "";
  listPresets();
};
