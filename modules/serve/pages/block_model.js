// What a snapshot of the KV memory says, without a word about how it is drawn; and the last minutes of snapshots.

function totalsOf(s) {
  const t = {used: 0, cached: 0, free: 0, pinned: 0, shared: 0, entries: 0, filled: 0};
  for (const b of s.blocks) {
    if (!b.refs) { b.hash ? t.cached++ : t.free++; continue; }
    t.used++; t.entries += b.refs; t.filled += b.filled;
    if (b.pinned) t.pinned++;
    if (b.refs > 1) t.shared++;
  }
  t.waste = t.used ? 1 - t.filled / (t.used * s.block_size) : 0;
  t.saved = t.entries ? 1 - t.used / t.entries : 0;
  return t;
}

// Of each block the sequences that map it; undefined: none. A table names the first block of an entry; the others know that one.
function ownersOf(s) {
  const owners = new Array(s.blocks.length);
  for (const q of s.sequences)
    if (q.status !== "swapped")
      for (const b of [...q.blocks, ...(q.other_groups ?? []).flatMap(g => g.blocks), ...(q.state ? q.state.blocks : [])]) owners[b] ? owners[b].push(q) : owners[b] = [q];
  s.blocks.forEach((b, id) => { if (b.first !== undefined) owners[id] ??= owners[b.first]; });
  return owners;
}

// Requests and their answers are counted from 1; in a snapshot an answer's index begins at 0.
function nameOf(q, several) { return `request ${q.request}` + (several.has(q.request) ? `, answer ${q.index + 1}` : ""); }
function severalOf(s) { return new Set(s.sequences.filter(q => q.index > 0).map(q => q.request)); } // requests of more than one answer

// What happened, in words: [text, whether it is out of the ordinary, kind].
function happenings(s) {
  const out = [], moved = kind => s.events.filter(e => e.kind === kind && e.from >= 0).length;
  const blocks = n => `${n} block${n === 1 ? "" : "s"}`;
  const several = severalOf(s);
  for (const e of s.events) if (e.index > 0) several.add(e.request);
  const copies = moved("copy"), evicted = moved("evict");
  if (copies > 6) out.push([`copy on write: ${blocks(copies)}`, true, "copy"]);
  if (evicted > 6) out.push([`${blocks(evicted)} evicted from the cache`, false, "evict"]);
  for (const e of s.events) {
    if (e.kind === "copy" && copies <= 6) out.push([`copy on write: ${e.from} → ${e.to}`, true, e.kind]);
    if (e.kind === "admit") out.push([`request ${e.request} admitted`, false, e.kind]);
    if (e.kind === "fork") out.push([`request ${e.request} forked`, true, e.kind]);
    if (e.kind === "recompute") out.push([`request ${e.request} gave up its blocks`, true, e.kind]);
    if (e.kind === "finish") out.push([`${nameOf(e, several)} ended`, false, e.kind]);
    if (e.kind === "evict" && evicted <= 6) out.push([`${e.from} evicted from the cache`, false, e.kind]);
    if (e.kind === "pin") out.push([`request ${e.request} pinned`, true, e.kind]);
  }
  if (s.found?.length) out.push([`${blocks(s.found.length)} found again in the cache`, true, "hit"]);
  if (moved("swap_out")) out.push([`${blocks(moved("swap_out"))} swapped out`, true, "swap_out"]);
  if (moved("swap_in")) out.push([`${blocks(moved("swap_in"))} swapped in`, true, "swap_in"]);
  return out;
}

// The blocks that were free and in the cache, and that a table now maps again: nothing was computed for them.
function isFoundAgain(before, after) { return before && !before.refs && before.hash && after.refs > 0 && after.hash === before.hash; }

// Of the sequences that hold memory, how many an engine could hold that reserves the whole context for each, in the memory of this pool.
// Undefined where the snapshot does not tell the context, and for a model of several cache groups or with recurrent states: there the number
// of blocks that a context needs is another.
function contiguousOf(s) {
  if (!s.context || s.sequences.some(q => q.other_groups || q.state) || s.blocks.some(b => b.group || b.state)) return undefined;
  const held = s.sequences.filter(q => ["running", "swapped", "preempted"].includes(q.status)).length;
  return {held, room: Math.min(held, Math.floor(s.blocks.length * s.block_size / s.context))};
}

// The tables of a request's answers as a tree. A node: the blocks [from, to) that all of `rows` map, and no others; `children` go on from it.
// The answers of `rows` stand in the order in which the tree has them.
function treeOf(sequences) {
  const grow = (rows, from) => {
    let to = from;
    while (rows.length && rows.every(q => to < q.blocks.length && q.blocks[to] === rows[0].blocks[to])) to++;
    const groups = new Map();
    for (const q of rows) {
      const next = q.blocks[to] ?? `end of ${q.index}`;
      groups.set(next, [...(groups.get(next) ?? []), q]);
    }
    const children = rows.length > 1 ? [...groups.values()].map(group => grow(group, to)) : [];
    return {rows: rows.length > 1 ? children.flatMap(c => c.rows) : rows, from, to, children};
  };
  return grow(sequences, 0);
}

// The last minutes of a server's pool. What an event changed is kept, not the whole pool.
class BlockHistory {
  constructor(seconds = 180, most = 4e6) { // most: table entries and changes
    Object.assign(this, {seconds, most, steps: [], blocks: [], newest: null, cost: 0, words: new Map(), moved: {swap_out: 0, swap_in: 0}});
  }

  // An event of /blocks/events?changes=1, at a time in seconds.
  add(s, at) {
    const all = s.blocks?.map((b, id) => ({id, ...b})) ?? s.changed;
    if (s.blocks && s.blocks.length !== this.blocks.length) { this.steps = []; this.cost = 0; this.blocks = new Array(s.blocks.length); }
    const changes = [], key = q => `${q.request}.${q.index}`, last = new Map();
    for (const {id, ...b} of all) {
      changes.push([id, this.blocks[id], b]);
      this.blocks[id] = b;
    }
    s.found = changes.filter(([, before, after]) => isFoundAgain(before, after)).map(([id]) => id);
    if (s.sequences.some(q => q.texts_kept)) for (const q of this.newest.sequences) last.set(key(q), q.texts);
    for (const q of s.sequences) if (q.texts_kept) q.texts = [...last.get(key(q)).slice(0, q.texts_kept), ...q.texts];
    this.remember(s);
    for (const e of s.events) if (e.kind in this.moved && e.from >= 0) this.moved[e.kind]++;
    s.moved = {...this.moved};
    s.blocks = this.blocks;
    this.newest = s;
    const cost = changes.length + s.sequences.reduce((sum, q) => sum + q.blocks.length, 10);
    this.steps.push({at, snapshot: s, changes, cost});
    this.cost += cost;
    while (this.steps.length > 1 && (this.steps[0].at < at - this.seconds || this.cost > this.most)) this.cost -= this.steps.shift().cost;
    return s;
  }

  // The words of full blocks by their hashes: a cached block belongs to no sequence that could tell them.
  remember(s) {
    for (const q of s.sequences)
      if (q.texts && q.status !== "swapped") q.texts.forEach((text, i) => { const hash = this.blocks[q.blocks[i]]?.hash; if (hash) this.words.set(hash, text); });
    s.words = this.words;
    if (this.words.size > 20000) this.words = new Map([...this.words].slice(-10000));
  }

  replay() { return new Replay([...this.steps], [...this.blocks]); }
}

// Steps of a history that one can go to, while the history itself goes on.
class Replay {
  constructor(steps, blocks) { // blocks: as the last step left them
    Object.assign(this, {steps, blocks, i: steps.length - 1});
  }
  go(to) {
    to = Math.max(0, Math.min(this.steps.length - 1, to));
    while (this.i > to) for (const [id, before] of this.steps[this.i--].changes) this.blocks[id] = before;
    while (this.i < to) for (const [id, , after] of this.steps[++this.i].changes) this.blocks[id] = after;
    return {...this.steps[to].snapshot, blocks: [...this.blocks]};
  }
}
