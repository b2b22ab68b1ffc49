// Two settings beside each other on one question: two answers, which share the blocks of the prompt in the server's memory.

// Until one of them is chosen by going on.
function partnerOf(turn) {
  const partner = turn.beside && now.tree.messages.get(turn.beside);
  return partner?.parent === turn.parent && turn === turns.at(-1) ? partner : null;
}

function answerBeside(turn, settings) {
  const other = now.add(turn.parent, "assistant", {made: settings, beside: turn.id});
  turn.beside = other.id;
  now.chat.leaf = turn.id;
  now.save(turn);
  answer(now, other);
}

// What one answer was made with and the other not; the seed only where nothing else differs.
function differenceOf(turn, partner) {
  const names = ["model", "system", ...NUMBERS.filter(name => name !== "seed"), "more"], mine = turn.made ?? {}, other = partner.made ?? {};
  const {defaults} = about(mine);
  const told = names.filter(name => mine[name] !== other[name])
    .map(name => `${name.replace("_", " ")} ${mine[name] ?? (defaults[name] === undefined ? "none" : Number(defaults[name]) || defaults[name])}`);
  return (told.length ? told : [`seed ${mine.seed}`]).join(", ");
}

function drawPair(turn, partner) {
  const pair = element("div", "pair");
  for (const one of [turn, partner].sort((a, b) => a.at - b.at)) {
    const column = element("section", "column-of-two"), head = element("div", "head");
    head.append(element("span", "", differenceOf(one, one === turn ? partner : turn)));
    if (one !== turn) head.append(button("Go on with this", () => { now.chat.leaf = now.tree.leafBelow(one.id); now.save(); drawTalk(); }));
    else head.append(element("span", "kept", "goes on"), button("Close", () => part(turn, partner)));
    column.append(head, drawTurn(one));
    pair.append(column);
  }
  return pair;
}

function part(turn, partner) {
  delete turn.beside;
  delete partner.beside;
  now.save(turn, partner);
  drawTalk();
}
