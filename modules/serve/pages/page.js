// What both pages of the server share: values kept in the browser, API calls with the key, server-sent events.

// Kept in the browser; where it keeps nothing (private windows), for as long as the page is open.
const kept = {};
function recall(area, name, fallback) {
  try {
    const text = kept[name] ?? area.getItem("quire." + name);
    return text ? JSON.parse(text) : fallback;
  } catch { return fallback; }
}
function remember(area, name, value) {
  const text = JSON.stringify(value);
  try { area.setItem("quire." + name, text); } catch { kept[name] = text; }
}

// The theme: "light", "dark", or "system": as the system has it. The styles know the system's only.
const darkRules = [...document.styleSheets[0].cssRules].filter(rule => rule.media?.mediaText.includes("prefers-color-scheme"));
function wear(theme) {
  document.documentElement.style.colorScheme = theme === "system" ? "" : theme;
  for (const rule of darkRules) rule.media.mediaText = {light: "not all", dark: "all"}[theme] ?? "(prefers-color-scheme: dark)";
  dispatchEvent(new Event("theme")); // for what is painted
}
wear(recall(localStorage, "theme", "system"));
addEventListener("storage", e => { if (e.key === "quire.theme") wear(recall(localStorage, "theme", "system")); }); // another tab

class Refusal extends Error { // what the server has against a request, as a sentence; its status and the error's code
  constructor(message, status, code) { super(message); this.status = status; this.code = code; }
}

function sentence(text) {
  text = String(text).trim();
  return text ? text[0].toUpperCase() + text.slice(1) + (/[.!?…]$/.test(text) ? "" : ".") : "";
}

async function call(path, {body, signal} = {}) {
  const headers = {}, key = recall(localStorage, "settings", {}).key;
  if (key) headers.Authorization = "Bearer " + key;
  if (body) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal, cache: "no-store"});
  } catch (e) {
    if (e.name === "AbortError") throw e;
    if (/ISO-8859-1|header/i.test(e.message)) throw new Refusal("The API key has characters that cannot be sent.", 401);
    throw new Refusal("The server cannot be reached.", 0);
  }
  if (response.ok) return response;
  let why = "", code;
  try { ({message: why, code} = (await response.json()).error); } catch { /* not one of the server's own answers */ }
  if (response.status === 401) why = key ? "This API key is not accepted" : "This server asks for an API key";
  throw new Refusal(sentence(why || "The server answered with status " + response.status), response.status, code);
}

// The data of each event as it comes.
async function* serverEvents(response) {
  const reader = response.body.getReader(), decoder = new TextDecoder();
  let text = "", data = [];
  try {
    while (true) {
      const {value, done} = await reader.read();
      if (done) return;
      text += decoder.decode(value, {stream: true});
      const lines = text.split("\n");
      text = lines.pop();
      for (let line of lines) {
        if (line.endsWith("\r")) line = line.slice(0, -1);
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        else if (line === "" && data.length) { yield data.join("\n"); data = []; }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// The bar that asks for a key; `then` runs when there is one.
function askForKey(bar, why, then) {
  bar.hidden = false;
  bar.querySelector("label").textContent = why;
  const input = bar.querySelector("input");
  bar.onsubmit = e => {
    e.preventDefault();
    remember(localStorage, "settings", {...recall(localStorage, "settings", {}), key: input.value.trim()});
    input.value = "";
    bar.hidden = true;
    then();
  };
}
