// An answer as its tokens. A token has alternatives, with the model's probabilities; each begins a branch that goes on from there.
// Nothing about them is stored: the server is asked for one token behind the text before it, whose blocks it has in its cache.

const alternatives = $(".alternatives");

// The tokens of a text; those that are part of a character are put together.
async function tokensOf(text, settings) {
  const {tokens} = await (await call("/tokenize", {body: named(settings, {content: text, with_pieces: true, add_special: false})})).json();
  const whole = [], decoder = new TextDecoder("utf-8", {fatal: true});
  let bytes = [];
  for (const {piece} of tokens) {
    if (typeof piece === "string" && !bytes.length) { whole.push(piece); continue; }
    bytes.push(...typeof piece === "string" ? new TextEncoder().encode(piece) : piece);
    try { whole.push(decoder.decode(new Uint8Array(bytes))); bytes = []; } catch { /* the character goes on */ }
  }
  return whole;
}

// What can be seen of a token.
const visible = text => text.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/ /g, "␣") || "∅";

// Shows the answer as tokens, or as text again.
async function toggleTokens(turn) {
  const view = views.get(turn.id);
  if (view.tokens) return redraw(turn);
  let tokens;
  try { tokens = await tokensOf(turn.content, turn.made ?? now.chat.settings); } catch (e) { return toast(e.message); }
  if (views.get(turn.id) !== view || runs.has(turn.id)) return;
  view.changed = true;
  const field = view.tokens = element("div", "text tokens");
  tokens.forEach((text, i) => {
    const token = element("span", "token", text);
    token.title = visible(text);
    token.tabIndex = i ? -1 : 0;
    token.role = "button";
    field.append(token);
  });
  const end = element("span", "token end", "■");
  end.tabIndex = -1;
  end.role = "button";
  end.title = "The end of the answer";
  field.append(end);
  field.onclick = e => { if (e.target.classList.contains("token")) showAlternatives(turn, tokens, [...field.children].indexOf(e.target), e.target); };
  field.onkeydown = e => {
    const to = {ArrowLeft: e.target.previousSibling, ArrowRight: e.target.nextSibling, Home: field.firstChild, End: field.lastChild}[e.key];
    if (to) { e.target.tabIndex = -1; to.tabIndex = 0; to.focus(); }
    else if (e.key === "Enter" || e.key === " ") e.target.click();
    else return;
    e.preventDefault();
  };
  (view.source ?? view.text).replaceWith(field);
  view.toggle.textContent = "Text";
  field.firstChild.focus();
}

// The alternatives to the token with this number; behind the last one, to the end.
async function showAlternatives(turn, tokens, number, at) {
  const before = tokens.slice(0, number).join(""), chosen = tokens[number] ?? "";
  const path = sent(now.tree.pathTo(turn.parent)), settings = turn.made ?? now.chat.settings, talk = now;
  alternatives.replaceChildren(element("p", "", "Asking …"));
  alternatives.showPopover();
  const place = () => {
    const r = at.getBoundingClientRect();
    alternatives.style.left = Math.max(8, Math.min(r.left, innerWidth - alternatives.offsetWidth - 8)) + "px";
    alternatives.style.top = (r.bottom + alternatives.offsetHeight + 14 < innerHeight ? r.bottom + 6 : Math.max(8, r.top - alternatives.offsetHeight - 6)) + "px";
  };
  place();
  let choice, usage;
  try {
    const body = {...fieldsOf(settings), messages: messagesOf(before ? [...path, {role: "assistant", content: before}] : path, settings.system),
                  max_tokens: 1, min_tokens: 0, logprobs: true, top_logprobs: 12};
    if (turn.reasoning) body.enable_thinking = false; // the thoughts are not sent back
    ({choices: [choice], usage} = await (await call("/v1/chat/completions", {body})).json());
  } catch (e) {
    alternatives.replaceChildren(element("p", "", e.message));
    return place();
  }
  const {endOfAnswer} = about(settings), tops = choice.logprobs?.content?.[0]?.top_logprobs ?? [], rows = element("div", "rows");
  for (const {token, logprob, bytes} of tops) {
    const ends = token === endOfAnswer || !bytes?.length, share = Math.exp(logprob), isChosen = ends ? !chosen : token === chosen;
    const row = button("", () => branchAt(talk, turn, before, ends ? null : token), isChosen ? "chosen" : ""), bar = element("span", "share");
    bar.style.setProperty("--share", share);
    row.append(element("span", "what", ends ? "end of the answer" : visible(token)), bar, element("span", "percent", percent(share)));
    row.disabled = isChosen || token.includes("\ufffd"); // part of a character: no text goes on from there
    rows.append(row);
  }
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const note = element("p", "", `${cached} of ${usage.prompt_tokens} tokens came from the cache. A click goes on from there, as a branch.`);
  alternatives.replaceChildren(element("p", "", "What could stand here, by the model's own probabilities:"), rows, note);
  if (!tops.length) rows.append(element("p", "", "The server gave no alternatives."));
  place();
  rows.querySelector("button:not(:disabled)")?.focus();
}
const percent = share => share >= .1 ? `${Math.round(100 * share)} %` : share >= .0001 ? `${Number((100 * share).toPrecision(2))} %` : "< 0.01 %";

function branchAt(talk, turn, before, token) {
  alternatives.hidePopover();
  const {seed, from, ...settings} = turn.made ?? talk.chat.settings;
  // Of one that ends here another request made the text, and a longer one: the same request again would not end here.
  const branch = talk.add(turn.parent, "assistant", {content: before + (token ?? ""), made: settings, parts: token === null ? 2 : 1});
  if (token !== null) return answer(talk, branch);
  talk.save(branch);
  drawTalk();
}
