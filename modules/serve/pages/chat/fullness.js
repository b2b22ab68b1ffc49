// How full the model's context is: shown, explained, and said before a message that would have no room for its answer is sent.

const gauge = $(".gauge"), ahead = $(".ahead"), explanation = $(".explain");
let startsAnew = false; // the next message is to be the first that the model sees

function showFullness() {
  const n = turns.findLast(t => t.tokens && !t.dropped)?.tokens, {room} = about(now.chat.settings);
  gauge.hidden = !n || !isFinite(room);
  if (gauge.hidden) return;
  gauge.firstChild.style.setProperty("--share", Math.min(1, n / room));
  gauge.lastChild.textContent = `${n.toLocaleString("en")} of ${room.toLocaleString("en")} tokens`;
  gauge.title = "How full the model's context is";
  gauge.classList.toggle("full", room - n < enough(now));
}

gauge.onclick = async () => {
  const talk = now, path = sent(turns), {room} = about(talk.chat.settings), share = Math.round(100 * (turns.findLast(t => t.tokens && !t.dropped)?.tokens ?? 0) / room);
  explanation.replaceChildren(element("p", "", `The model sees at most ${room.toLocaleString("en")} tokens of a conversation, its own answer among them. This one fills ${share} %.`),
    element("p", "", "When there is too little room for an answer, the page says so before it sends, and offers to leave out the oldest messages. They stay on this page."));
  explanation.showPopover();
  const surplus = path.length > 2 ? await surplusOf(talk, path).catch(() => 0) : 0;
  if (surplus && talk === now) explanation.append(button(`Leave out the ${surplus} oldest messages now`, () => { explanation.hidePopover(); leaveOut(path, surplus); }));
};

// The model sees this path from here on only; at its end, from the next message on.
function leaveOut(path, surplus) {
  startsAnew = surplus >= path.length;
  if (!startsAnew) {
    path[surplus].start = true;
    now.save(path[surplus]);
    drawTalk();
  }
  ahead.hidden = true;
}

// Before the message in the box is sent.
let looking = null, lookSoon = 0;
function lookAhead() {
  clearTimeout(lookSoon);
  looking?.abort();
  ahead.hidden = true;
  startsAnew = false;
  const before = turns.findLast(t => t.tokens && !t.dropped)?.tokens ?? 0, letters = box.value.length + attached.reduce((sum, f) => sum + f.text.length, 0);
  if (!letters || before + letters / 2 < about(now.chat.settings).room - enough(now)) return; // a token has hardly fewer than two letters
  lookSoon = setTimeout(async () => {
    const controller = looking = new AbortController(), path = sent(turns).filter(t => t.role !== "assistant" || said(t));
    try {
      const messages = [...path, {role: "user", content: box.value.trim(), files: attached}];
      const n = await count(now, messages, controller.signal).catch(e => {
        if (e.code === "context_length_exceeded") return Number(/requested (\d+)/.exec(e.message)?.[1] ?? Infinity);
        throw e;
      });
      const {room} = about(now.chat.settings);
      if (room - n >= enough(now)) return;
      const surplus = await surplusOf(now, messages, controller.signal);
      if (controller.signal.aborted) return;
      ahead.replaceChildren(n >= room ? `With this message the conversation is longer than the model's context${isFinite(n) ? `: ${n.toLocaleString("en")} of ${room.toLocaleString("en")} tokens` : ""}. `
        : `With this message the conversation has ${n.toLocaleString("en")} of ${room.toLocaleString("en")} tokens: ${(room - n).toLocaleString("en")} are left for an answer. `);
      if (surplus) ahead.append(button(`Go on without the ${surplus} oldest messages`, () => leaveOut(path, surplus)));
      ahead.hidden = false;
    } catch { /* it is said when the message is sent */ }
  }, 400);
}
