// Demonstrations: requests from this page to this server that show what its blocks are for.

const LIBRARY = "You tell stories to the readers of a small library. The library has three rooms: one for stories, one for science and one for music. " +
  "It opens at nine in the morning and closes at six in the evening. Your stories are short and friendly, and each has a beginning and an end.";
// Within the question: some chat templates refuse a system message.
const story = (question, more) => ({messages: [{role: "user", content: `${LIBRARY}\n\n${question}`}], temperature: .7, ...more});

// room: what the server can hold: {model (its name, where there are several), blocks, block_size, swap_blocks, sequences, context (tokens), cache (whether prefixes are kept)}.
// missing(room): why this server cannot show it; "": it can. run(room, ask): asks; ask(path, body) gives the response.
const DEMOS = [
  {
    name: "Four chats, one beginning",
    see: "Four chats begin with the same instructions. The blocks of the instructions stand in all four tables (×4): they were computed once.",
    missing: room => !room.cache ? "it needs the prefix cache, which --no-prefix-cache switched off" : room.sequences < 4 ? "it needs -np 4 or more" : "",
    async run(room, ask) {
      const chat = async (question, begun) => {
        const most = atMost(room, 320); // none ends before the last one has begun
        const response = await ask("/v1/chat/completions", story(question, {...most, min_tokens: most.max_tokens >> 1, stream: true}));
        for await (const _ of serverEvents(response)) begun?.();
      };
      const chats = [];
      await new Promise((begun, failed) => chats.push(chat("Tell me a story.", begun).then(begun, failed))); // the others find what it has computed
      for (const question of ["Tell me a story about a dog.", "Tell me a story about the sea.", "Tell me a story about a king."]) chats.push(chat(question));
      await Promise.all(chats);
    },
  },
  {
    name: "Four answers to one question",
    see: "One request asks for four answers. Each begins in the same blocks; when an answer writes into a shared block, it gets a copy (the arrow).",
    missing: room => room.sequences < 4 ? "it needs -np 4 or more" : "",
    run: (room, ask) => ask("/v1/chat/completions", story("Tell me a story.", {n: 4, ...atMost(room, 320)})),
  },
  {
    name: "Beam search",
    see: "Four beams grow together. A beam that loses gives its blocks back, and one that wins forks: the tree shows which blocks they share.",
    missing: room => room.sequences < 4 ? "it needs -np 4 or more" : "",
    run: (room, ask) => ask("/v1/chat/completions", story("Tell me a story.", {n: 4, use_beam_search: true, temperature: 0, ...atMost(room, 320)})),
  },
  {
    name: "More than fits",
    see: "These requests want more blocks than there are. The blocks of some go to host memory and come back later; no answer is lost.",
    missing(room) {
      const start = "start with --kv-blocks 144 --swap-blocks 64 --blocks-text";
      if (!room.swap_blocks) return `no host memory to swap to: ${start}`;
      return pressureOf(room) ? "" : `${atOnce(room)} sequences fit into this pool: ${start}`;
    },
    run: (room, ask) => Promise.all(Array.from({length: Math.min(8, room.sequences >> 1)}, (_, i) => {
      const {max_tokens} = atMost(room, pressureOf(room));
      return ask("/v1/completions", {prompt: `Story ${i + 1}. Once upon a time there was`, n: 2, max_tokens, min_tokens: max_tokens, temperature: .7});
    })),
  },
];

const atMost = (room, tokens) => ({max_tokens: Math.min(tokens, room.context >> 1)});

// Sequences that this page's requests of two answers have at once: a browser opens six connections to a server, and the page listens by one.
const atOnce = room => Math.min(10, room.sequences & ~1);

// Tokens of each answer with which these sequences together want three times what the pool has, at least half as much again; 0: they cannot
// be so long.
function pressureOf(room) {
  const share = room.blocks * room.block_size / atOnce(room), most = room.context >> 1;
  return room.sequences > 1 && 1.5 * share <= most ? Math.min(most, Math.ceil(3 * share)) : 0;
}

// root: an element for the buttons and the sentence about the demonstration that runs.
class Demonstrations {
  // again(from): shows what was on the page from that moment on (seconds of performance.now()) once more, slowly.
  constructor(root, again) {
    this.again = again;
    this.buttons = element("div", "demos");
    this.said = element("p", "said", "Start a demonstration: the page sends requests to this server, and below you see their blocks.");
    this.said.setAttribute("role", "status");
    root.append(this.buttons, this.said);
    this.running = undefined; // {button, stop}
  }

  offer(room) {
    if (this.running || JSON.stringify(room) === this.offered) return; // as it was
    this.offered = JSON.stringify(room);
    this.buttons.replaceChildren(...DEMOS.map(demo => {
      const button = element("button", "", demo.name), why = demo.missing(room);
      button.type = "button";
      if (why) {
        button.setAttribute("aria-disabled", "true"); // one can still reach it, and read why
        button.append(element("small", "", `Not here: ${why}.`));
      } else button.onclick = () => this.running?.button === button ? this.running.stop.abort() : this.start(demo, room, button);
      return button;
    }));
  }

  async start(demo, room, button) {
    this.running?.stop.abort();
    const stop = new AbortController(), run = this.running = {button, stop}, from = performance.now() / 1000;
    button.textContent = "Stop";
    this.said.textContent = demo.see;
    try {
      await demo.run(room, async (path, body) => {
        const response = await call(path, {body: room.model ? {...body, model: room.model} : body, signal: stop.signal});
        if (!body.stream) await response.text();
        return response;
      });
    } catch (e) {
      stop.abort(); // the rest of it
      if (e.name !== "AbortError" && this.running === run) this.said.textContent = "The demonstration failed. " + e.message;
    }
    button.textContent = demo.name;
    if (this.running !== run) return;
    this.running = undefined;
    if (stop.signal.aborted) return;
    const slowly = element("button", "", "See it again, slowly");
    slowly.type = "button";
    slowly.onclick = () => this.again(from);
    this.said.append(" ", slowly);
  }
}
