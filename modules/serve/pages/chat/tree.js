// The messages of a conversation are a tree: an edited question and another answer are branches. What is shown is the path from
// the root to a leaf.
//
// A message is {id, chat, parent: an id or null, at: its place in time, role, content}, and may have
//   files: [{name, text}], sent before the content of a question;
//   reasoning: the thoughts before the answer; thought: their seconds; unfolded: as the reader chose; calls: [{name, arguments}], of tools;
//   call: the call that this message of a tool answers; ended: the reader ended the thinking;
//   made: the settings of the request and the id of the first message sent, `from`; parts: of how many requests the answer is made;
//   note: figures of the answer; tokens: of prompt and answer;
//   prompt: tokens of the last request; cached: of these, what the server had; begun: characters of the answer that this request began with;
//   open: the answer broke off; cut: it ended at the limit of tokens; fault: what went wrong, as a sentence;
//   surplus: so many of the oldest messages are too many; anyway: it could be answered with them;
//   start: the model no longer sees what is before this message;
//   beside: the id of the answer that is shown beside this one; verified: what came of the same request again.

class Tree {
  constructor(messages = []) {
    this.messages = new Map();
    this.children = new Map(); // of an id, or of null: the messages that begin the conversation
    for (const message of [...messages].sort((a, b) => a.at - b.at)) this.add(message);
  }

  add(message) {
    message.at ??= Math.max(Date.now(), 1 + Math.max(0, ...this.after(message.parent).map(m => m.at)));
    this.messages.set(message.id, message);
    this.children.set(message.parent, [...this.after(message.parent), message]);
    return message;
  }

  after(id) { return this.children.get(id) ?? []; }

  // From the first message to this one.
  pathTo(id) {
    const path = [];
    for (let message = this.messages.get(id); message && path.length <= this.messages.size; message = this.messages.get(message.parent)) path.push(message);
    return path.reverse();
  }

  // The leaf below a message to which the newest messages lead.
  leafBelow(id) {
    while (this.after(id).length) id = this.after(id).at(-1).id;
    return id;
  }

  // The messages in this one's place, itself among them.
  branches(message) { return this.after(message.parent); }
}
