"""WordNet and the dialogue generators -> tokenizer, training tokens, validation tokens, questions for the evaluation.

    python make_data.py [--out build/chat-data] [--words 50000] [--shards 12]

The same seed gives the same files. The training tokens are arrays of uint16, one for each shard; a dialogue ends with <|endoftext|>.
"""
import argparse
import json
import multiprocessing
import os
import random
import re

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import dialogues as D
import subjects as S
import wordnet as W
from chat import END, END_OF_TEXT, START, render

VOCAB = 8192


def train_tokenizer(texts):
    """Byte-level BPE with GPT-2's pre-tokenizer. Digits are taken out of the text it learns from, so no merge
    holds one and each digit stays a token of its own: sums are then a matter of columns."""
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    t.decoder = decoders.ByteLevel()
    t.train_from_iterator((re.sub(r"\d", "", x) for x in texts), trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=[END_OF_TEXT, START, END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    assert t.get_vocab_size() == VOCAB and not any(re.search(r"\d", k) and len(k) > 1 for k in t.get_vocab())
    return t


def build(words, rng, scale):
    def n(count):
        return range(int(count * scale))

    out = [D.define(rng, words, w) for w in words.order for _ in range(max(1, round(5 * scale)))]
    out += [D.define(rng, words, "quire") for _ in n(300)]
    out += [D.define(rng, words) for _ in n(50000)]
    out += [D.usage(rng, words) for _ in n(60000)]
    out += [D.topic(rng) for _ in n(60000)]
    out += [D.fact(rng) for _ in n(9000)]
    out += [D.arithmetic(rng) for _ in n(80000)]
    out += [D.talk(rng) for _ in n(22000)]
    out += [D.refuse(rng, words) for _ in n(6000)]
    out += [D.unknown(rng, words) for _ in n(30000)]
    out += [D.unknown_word(rng, words) for _ in n(60000)]
    out += [D.world(rng, words) for _ in n(20000)]
    out += [D.name_game(rng) for _ in n(5000)]
    out += [D.statement(rng, words) for _ in n(4000)]
    out += [D.stories(rng) for _ in n(14000)]
    out += [D.chat(rng, words) for _ in n(6000)]
    return [D.with_system(rng, x) for x in out]


def plain_texts(words):
    """all of WordNet as plain sentences: taught at the start only, for the language rather than the facts"""
    for word, pos, definition, examples in words.texts:
        if definition.isascii() and not W.UNWANTED.search(definition + word):
            yield f"{word} ({pos}): {definition}." + "".join(f" {e[0].upper() + e[1:]}." for e in examples if e and e.isascii() and not W.UNWANTED.search(e))


def questions(words, rng):
    """The held-out questions: phrasings, number pairs, names and words that no training dialogue holds."""
    out = []

    def add(category, user, reference, before=(), **how):
        turns = list(before) + [("user", user)]
        if rng.random() < 0.15:
            turns = [("system", rng.choice(D.SYSTEM_HELD))] + turns
        out.append(dict(category=category, messages=[dict(role=r, content=c) for r, c in turns], reference=reference, **how))

    def glosses(w):
        found = {e[1] for p, e in words.entry[w].items() if p != "main"}
        for p in "nvar":
            found |= {g for g in map(W.usable, words.senses.get((w, p), ())) if g}
        return sorted(found)

    for name, low, high in (("definition, the 2,000 most common words", 0, 2000), ("definition, words 2,000 to 10,000", 2000, 10000), ("definition, words 10,000 to 50,000", 10000, len(words.order))):
        for w in rng.sample(words.order[low:high], 200):
            forms = D.definition_questions(words, w, held_out=True)
            if not forms:
                continue
            t, p = rng.choice(forms)
            add(name, D.rough(rng, D.fill_word(t, w), 0.5), words.meaning(w, p), contains=glosses(w))
    for q in ("What is a quire?", "what is a quire", "Do you know what a quire is?", "Please tell me what a quire is.", "Define quire."):
        add("definition of quire", q, words.meaning("quire"), contains=["24 or 25 sheets"])

    for name, form, k in (("subject: what is it", "ask", 1), ("subject: how does it work", "long", 2), ("subject: what is it good for", "why", 3)):
        for i, topic in enumerate(S.TOPICS):
            pool = D.topic_held_questions(i, form)
            for q in rng.sample(pool, min(3, len(pool))):
                if form == "why":
                    add(name, D.rough(rng, q, 0.5), topic[k], contains=[topic[k]])
                else:
                    add(name, D.rough(rng, q, 0.5), topic[k], keys=topic[4])
    for qs, a, keys in S.FACTS:
        add("subject: single questions", qs[-1], a, keys=keys)

    for name, ops, low, top, count in (("sum and difference up to 20", "+-", 0, 20, 60), ("sum and difference up to 99", "+-", 21, 99, 200), ("sum and difference up to 999", "+-", 100, 999, 100), ("product up to 12 x 12", "*", 2, 12, 40)):
        seen = set()
        for _ in range(100000):
            op, x, y = rng.choice(ops), rng.randint(0, top), rng.randint(0, top)
            if op == "-" and x < y:
                x, y = y, x
            if D.sum_held(op, x, y) and (op, x, y) not in seen and max(x, y) >= low:
                seen.add((op, x, y))
                forms = D.ASK_SUM["any"] + D.ASK_SUM_HELD if rng.random() < 0.6 else D.ASK_SUM["sign"]
                add(name, D.rough(rng, rng.choice(forms).format(x=x, y=y, o=D.SUM_WORD[op], s=op), 0.5), D.sum_answer(op, x, y), exact=[D.sum_answer(op, x, y)])
            if len(seen) == count:
                break
    seen = set()
    while len(seen) < 50:
        op, x, y = rng.choice("+-"), rng.randint(0, 50), rng.randint(0, 50)
        x, y = max(x, y), min(x, y)
        if D.sum_held(op, x, y) and (op, x, y) not in seen:
            seen.add((op, x, y))
            add("sum and difference in words", f"What is {D.spell(x)} {D.SUM_WORD[op]} {D.spell(y)}?", D.sum_answer(op, x, y, True), exact=[D.sum_answer(op, x, y, True)])

    for _ in range(150):
        w = words.nonsense(rng)
        add("unknown: invented words", D.rough(rng, rng.choice(["What is {a}?", "What does {w} mean?", "Define {w}."] + D.DEF_ANY_HELD + D.DEF_N_HELD).format(w=w, a=D.article(w)), 0.5), f"I do not know the word {w}.", exact=[f"I do not know the word {w}."], keys=["not know"])
    for w in rng.sample(words.spare_held, 150):
        add("unknown: real words it was not taught", D.rough(rng, rng.choice(["What is {a}?", "What does {w} mean?", "Define {w}."] + D.DEF_ANY_HELD + D.DEF_N_HELD).format(w=w, a=D.article(w)), 0.5), f"I do not know the word {w}.", keys=["not know"])
    for q, _ in D.UNKNOWN_HELD:
        add("unknown: other questions", q, "I do not know that.", keys=[r"not know|cannot"])
    for _ in range(50):
        name = D.made_name(rng)
        q = rng.choice(["Who is {name}?", "Can you tell me who {name} is?", "Who exactly was {name}?", "I want to know who {name} is."]).format(name=name)
        add("unknown: invented people", q, f"I do not know who {name} is.", keys=[r"not know"])

    for kind, (qs, answers, key) in D.TALK.items():
        add("small talk", qs[-1], answers[0], keys=[key])
    for kind, (qs, answer) in D.REFUSE.items():
        add("refusals", qs[-1].format(lang="German", pl="Python", w="horse", p="brother"), answer, keys=["sorry"])
    for hero in D.CHARACTERS_HELD + D.CHARACTERS[::4]:
        add("stories", rng.choice(D.ASK_STORY_HELD).format(a=D.article(hero)), D.story(rng, hero), story=hero)

    pools = {"example": (words.example, D.ASK_EXAMPLE_HELD), "synonym": (words.synonym, D.ASK_SYN_HELD), "opposite": (words.opposite, D.ASK_ANT_HELD)}
    for kind, (f, forms) in pools.items():
        found = [w for w in words.order[:6000] if f(w)]
        for w in rng.sample(found, 50):
            add("examples, synonyms, opposites", rng.choice(forms).format(w=w), f(w), exact=[f(w)])
    for c in rng.sample(words.countries, 50):
        add("capitals", f"Could you tell me the capital of {c}?", f"The capital of {c} is {words.capital[c]}.", contains=[words.capital[c]])
    found = [w for w in words.order[:6000] if words.example(w) and w not in D.SUBJECT_WORDS]
    for w in rng.sample(found, 40):
        add("follow-up questions", rng.choice(["Give me an example sentence.", "Could you use it in a sentence?"]), words.example(w), before=[("user", f"What does {w} mean?"), ("assistant", words.meaning(w))], exact=[words.example(w)])
    for name in D.NAMES_HELD * 3:
        add("follow-up questions", rng.choice(["What is my name?", "Can you tell me my name?"]), f"Your name is {name}.", before=[("user", f"Hello, I am {name}."), ("assistant", f"Nice to meet you, {name}!")] + (D.talk(rng) if rng.random() < 0.5 else []), contains=[name])
    for i in rng.sample(range(len(S.TOPICS)), 25):
        add("follow-up questions", "Can you tell me more?", S.TOPICS[i][2], before=[("user", f"What is {S.TOPICS[i][0][0]}?"), ("assistant", S.TOPICS[i][1])], contains=[S.TOPICS[i][2]])
    return out


def shard(job):
    """one part of the training dialogues, drawn with its own seed -> how many, dropped, tokens"""
    number, a = job
    chats = [render(x) for x in build(WORDS, random.Random(a.seed + 1000 * number), a.scale)]
    before = len(chats)
    chats = [c for c in chats if not any(t.split(END)[0].lower().rstrip("?.! ") in TAKEN for t in c.split(f"{START}user\n")[1:])]
    random.Random(a.seed + 2).shuffle(chats)
    np.save(f"{a.out}/chat{number}.npy", tokens(Tokenizer.from_file(f"{a.out}/tokenizer.json"), chats))
    return len(chats), before - len(chats)


def tokens(tokenizer, texts):
    ids = []
    for at in range(0, len(texts), 20000):
        ids += [np.array(e.ids + [0], np.uint16) for e in tokenizer.encode_batch(texts[at:at + 20000])]
    return np.concatenate(ids)


def main():
    global WORDS, TAKEN
    arg = argparse.ArgumentParser()
    arg.add_argument("--out", default="build/chat-data")
    arg.add_argument("--words", type=int, default=50000)
    arg.add_argument("--shards", type=int, default=12, help="files of training dialogues, each drawn anew")
    arg.add_argument("--jobs", type=int, default=os.cpu_count())
    arg.add_argument("--scale", type=float, default=1.0, help="dialogues in a shard, 1.0 = about 28 million tokens")
    arg.add_argument("--seed", type=int, default=20)
    a = arg.parse_args()
    os.makedirs(a.out, exist_ok=True)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    WORDS = words = D.Words(a.words)
    asked = questions(words, random.Random(a.seed + 1))
    # a follow-up or the name of quire is no secret by itself; every other held-out question is kept out of all turns
    TAKEN = {m["content"].lower().rstrip("?.! ") for q in asked for m in q["messages"][-1:] if q["category"] not in ("definition of quire", "follow-up questions")}
    plain = sorted(set(plain_texts(words)))
    sample = [render(x) for x in build(words, random.Random(a.seed), 0.1)]
    train_tokenizer([*plain, *sample, *words.order]).save(f"{a.out}/tokenizer.json")

    with multiprocessing.get_context("fork").Pool(a.jobs) as pool:
        sizes = pool.map(shard, [(i, a) for i in range(a.shards)], chunksize=1)
    tokenizer = Tokenizer.from_file(f"{a.out}/tokenizer.json")
    random.Random(a.seed + 3).shuffle(plain)
    held = [render([(m["role"], m["content"]) for m in q["messages"]] + [("assistant", q["reference"])]) for q in asked]
    np.save(f"{a.out}/text.npy", tokens(tokenizer, plain))
    np.save(f"{a.out}/held.npy", tokens(tokenizer, held))
    with open(f"{a.out}/questions.jsonl", "w") as f:
        for q in asked:
            f.write(json.dumps(q) + "\n")
    print(f"{len(words.order)} words, {sum(n for n, _ in sizes)} dialogues in {a.shards} shards ({sum(d for _, d in sizes)} dropped that held a held-out question), {len(plain)} plain texts, {len(asked)} held-out questions")


if __name__ == "__main__":
    main()
