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
  for (const field of form.elements) {
    if (!field.name) continue;
    field.value = settings[field.name] ?? "";
    if (NUMBERS.includes(field.name)) field.placeholder = {max_tokens: "no limit", seed: "random"}[field.name] ?? (field.name in defaults ? Number(defaults[field.name].toPrecision(4)) : "");
  }
  dialog.showModal();
}

function enteredSettings() {
  const settings = {};
  for (const field of form.elements) {
    const value = field.name && field.value.trim();
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
  now.chat.settings = savedSettings();
  now.save();
  $(".key").hidden = true;
  greet();
};
dialog.onclose = () => box.focus();
dialog.querySelector(".cancel").onclick = () => dialog.close();
dialog.querySelector(".reset").onclick = () => { for (const field of form.elements) if (field.name && field.name !== "key") field.value = ""; };
