// Where conversations are kept: in this browser's IndexedDB. Nothing of them leaves the browser but what is sent to the model.
// A chat is {id, title, named: by the reader, pinned, created, changed, deleted: milliseconds, leaf: the message at the end of
// what is shown, settings, draft: {text, files, edited: {id, text}, a question, results: {id, texts}, of the calls of an answer} that is
// not sent}. A message is described in tree.js.

class Store {
  // The one store of the page. Where the browser keeps nothing (some private windows), it lives as long as the page.
  static async open() {
    const store = new Store();
    store.kept = {chats: new Map(), messages: new Map()}; // in place of a database
    store.pending = {chats: new Map(), messages: new Map()}; // id → {value, number of the write}, of what is on its way to the database
    store.writes = 0;
    try {
      store.database = await new Promise((done, fail) => {
        const request = indexedDB.open("quire", 1);
        request.onupgradeneeded = () => {
          request.result.createObjectStore("chats", {keyPath: "id"});
          request.result.createObjectStore("messages", {keyPath: "id"}).createIndex("chat", "chat");
        };
        request.onsuccess = () => done(request.result);
        request.onerror = () => fail(request.error);
      });
    } catch { store.database = null; }
    return store;
  }

  // All values of "chats" or "messages"; with a chat's id, its messages.
  async read(table, chat) {
    if (!this.database) return [...this.kept[table].values()].filter(value => !chat || value.chat === chat);
    return this.#run(table, "readonly", values => chat ? values.index("chat").getAll(chat) : values.getAll());
  }

  // Writes values, in the order of the calls. A value that cannot be written is still on the page, and onfault hears why.
  async write(table, ...values) {
    if (!this.database) for (const value of values) this.kept[table].set(value.id, value);
    else await this.#while(table, values, all => { for (const value of values) all.put(value); });
  }

  // Writes these fields of a value. What another tab has written of the others stays.
  async writeFields(table, value, ...names) {
    const fields = Object.fromEntries(names.map(name => [name, value[name]]));
    if (!this.database) this.kept[table].set(value.id, value);
    else await this.#while(table, [value], all => {
      const kept = all.get(value.id);
      kept.onsuccess = () => all.put({...kept.result ?? value, ...fields});
    });
  }

  // The values are pending for as long as the work takes.
  async #while(table, values, work) {
    const pending = this.pending[table], number = ++this.writes;
    for (const value of values) pending.set(value.id, {value, number});
    await this.#run(table, "readwrite", work);
    for (const value of values) if (pending.get(value.id)?.number === number) pending.delete(value.id); // nothing newer is on its way
  }

  async remove(chat) {
    const messages = await this.read("messages", chat);
    if (!this.database) {
      for (const {id} of messages) this.kept.messages.delete(id);
      this.kept.chats.delete(chat);
      return;
    }
    await this.#run("messages", "readwrite", all => { for (const {id} of messages) all.delete(id); });
    await this.#run("chats", "readwrite", all => { all.delete(chat); });
  }

  onfault() {}

  #run(table, mode, work) {
    return new Promise((done, fail) => {
      const transaction = this.database.transaction(table, mode), request = work(transaction.objectStore(table));
      transaction.oncomplete = () => done(request?.result);
      transaction.onabort = transaction.onerror = () => fail(transaction.error);
    }).catch(error => {
      this.onfault(error);
      return [];
    });
  }
}

// Names for chats and messages; crypto.randomUUID is missing on pages without TLS.
const newId = () => Date.now().toString(36) + Math.random().toString(36).slice(2, 10);
