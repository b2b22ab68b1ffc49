// The same request again: with the same seed the server gives the same answer, whatever else it is doing.

// Only an answer of one request that came to its end, or to its limit of tokens, can be asked for again.
const repeatable = turn => turn.made && turn.parts === 1 && !turn.open && !turn.fault && !turn.ended && said(turn) && !turn.calls;

// The messages of the request that gave this answer.
function askedFor(turn) {
  const path = now.tree.pathTo(turn.parent);
  return path.slice(Math.max(0, path.findIndex(m => m.id === turn.made.from)));
}

const verifications = new Map(); // id of an answer whose request is made again → {controller}

async function verify(turn, b) {
  if (models.length && turn.made.model && !models.includes(turn.made.model)) return toast(`The server no longer has the model ${turn.made.model}.`);
  let content = "", reasoning = "", tokens = 0;
  const controller = new AbortController();
  verifications.set(turn.id, {controller});
  b.disabled = true;
  showState();
  try {
    for await (const chunk of chunksOf(messagesOf(askedFor(turn), turn.made.system), fieldsOf(turn.made), controller.signal)) {
      const {content: more, reasoning_content: thinks} = chunk.choices?.[0]?.delta ?? {}; // either may be null
      content += more ?? "";
      reasoning += thinks ?? "";
      tokens = chunk.usage?.completion_tokens ?? tokens;
      b.textContent = `Again … ${tokens} tokens`;
    }
  } catch (e) {
    if (e.name !== "AbortError") toast(e.message);
    return redraw(turn);
  } finally {
    verifications.delete(turn.id);
    showState();
  }
  const old = (turn.reasoning ?? "") + turn.content, made = reasoning + content;
  let same = 0;
  while (same < old.length && old[same] === made[same]) same++;
  turn.verified = old === made ? {same: true, tokens, seed: turn.made.seed} : {same: false, at: same + 1};
  store.write("messages", turn);
  redraw(turn);
}

function drawVerified({same, tokens, seed, at}) {
  const badge = element("span", same ? "verified" : "differs", same ? `✓ same again: ${tokens} tokens, seed ${seed}` : `✗ differs from character ${at} on`);
  badge.title = same ? "The server was asked again with the same seed and settings, and gave the same text." : "The server was asked again with the same seed and settings, and gave another text.";
  return badge;
}
