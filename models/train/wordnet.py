"""Reads WordNet's data files as Debian's wordnet-base package installs them.

Gives entries ordered by how common a word is: its sense counts in cntlist.rev plus how often it
stands in the glosses and examples themselves, since the tagged corpus alone is small.
"""
import math
import os
import re
from collections import Counter, defaultdict

DEFAULT_DIR = "/usr/share/wordnet"
POS_NAME = {"n": "noun", "v": "verb", "a": "adjective", "r": "adverb"}
FILES = {"n": "noun", "v": "verb", "a": "adj", "r": "adv"}

# words and senses that a toy model need not know
UNWANTED = re.compile(
    r"offensive|disparag|derogatory|obscene|vulgar|ethnic|slur|slang|sexual|genital|coitus|copulat|"
    r"penis|vagina|prostitut|homosex|rape|incest|negro|intercourse|excrement|feces|racis|nazi|erotic|"
    r"semen|testic|masturb|whore|breast|buttock|suicid", re.I)


class Sense:
    __slots__ = ("word", "pos", "gloss", "examples", "synonyms", "antonyms", "count", "pointers", "offset", "instance", "lex", "first")


def tidy_gloss(text, limit=110):
    """A dictionary gloss cut to what one sentence can carry; None if there is no such cut."""
    text = re.sub(r"^\([^)]*\)\s*", "", text.strip()).strip(" ;:")
    if len(text.split(";")[0]) > limit:
        text = re.sub(r"\s*\([^)]*\)", "", text)
    out = ""
    for part in (p.strip() for p in text.split(";")):
        if not part or '"' in part:
            continue
        longer = f"{out}; {part}" if out else part
        if len(longer) > (limit if out else limit + 40):
            break
        out = longer
    out = re.sub(r"\s+", " ", out).strip(" .,:")
    if out.count("(") != out.count(")") or not out or not out.isascii():
        return None
    return out


def split_gloss(raw):
    examples = [re.sub(r"\s+", " ", e).strip(" .;,") for e in re.findall(r'"([^"]+)"', raw)]
    definition = raw.split('; "')[0] if '; "' in raw else raw
    return definition, examples


def strip_marker(lemma):
    return re.sub(r"\((a|p|ip)\)$", "", lemma).replace("_", " ")


def load(folder=None):
    """-> {(word, pos): [Sense, ...] in WordNet's order}, plain texts, commonness {word: float}"""
    folder = folder or os.environ.get("WORDNET", DEFAULT_DIR)
    if not os.path.exists(f"{folder}/data.noun"):
        raise SystemExit(f"no WordNet in {folder}: install Debian's wordnet-base, or set WORDNET to its folder")
    tagged = {}
    for line in open(f"{folder}/cntlist.rev", encoding="latin-1"):
        key, _, count = line.split()
        lemma, rest = key.split("%")
        pos = {"1": "n", "2": "v", "3": "a", "4": "r", "5": "a"}[rest[0]]
        tagged[lemma, pos, rest.split(":")[1], rest.split(":")[2]] = int(count)

    synsets, texts, frequency = {}, [], Counter()
    for pos, name in FILES.items():
        for line in open(f"{folder}/data.{name}", encoding="latin-1"):
            if line.startswith("  "):
                continue
            head, raw = line.rstrip().split(" | ", 1)
            field = head.split()
            n = int(field[3], 16)
            words = [(field[4 + 2 * i], field[5 + 2 * i]) for i in range(n)]
            at = 4 + 2 * n
            pointers = [tuple(field[at + 1 + 4 * i: at + 5 + 4 * i]) for i in range(int(field[at]))]
            definition, examples = split_gloss(raw)
            synsets[pos, field[0]] = (words, pointers, definition, examples, field[1])
            texts.append((strip_marker(words[0][0]), POS_NAME[pos], definition, examples))
            for w in re.findall(r"[a-z]+", raw.lower()):
                frequency[w] += 1

    senses = defaultdict(list)
    for pos, name in FILES.items():
        for line in open(f"{folder}/index.{name}", encoding="latin-1"):
            if line.startswith("  "):
                continue
            field = line.split()
            lemma, count = field[0], int(field[2])
            for offset in field[-count:]:
                words, pointers, definition, examples, lex = synsets[pos, offset]
                spelled = [(strip_marker(w), i) for w, i in words]
                me = next((k for k, (w, _) in enumerate(spelled) if w.lower() == lemma.replace("_", " ")), 0)
                s = Sense()
                s.word, s.pos, s.offset, s.lex = spelled[me][0], pos, offset, lex
                s.first = me == 0
                s.gloss, s.examples = definition, [e for e in examples if e.isascii()]
                s.synonyms = [w for w, _ in spelled if w != s.word and w.isascii()]
                s.pointers = pointers
                s.instance = any(p[0] == "@i" for p in pointers)
                s.antonyms = []
                for kind, target, tpos, which in pointers:
                    if kind == "!" and int(which[:2], 16) == me + 1:
                        tw = synsets["a" if tpos == "s" else tpos, target][0]
                        s.antonyms.append(strip_marker(tw[int(which[2:], 16) - 1][0]))
                s.count = tagged.get((lemma, pos, lex, words[me][1].zfill(2)), 0)
                senses[lemma.replace("_", " "), pos].append(s)

    common = Counter()
    for (word, pos), list_ in senses.items():
        common[word] += sum(s.count for s in list_)
    for word in list(common):
        if word.isalpha():
            common[word] = 3.0 * common[word] + frequency.get(word, 0) + frequency.get(word + "s", 0) + 0.3 * math.log1p(
                sum(len(senses.get((word, p), ())) for p in FILES))
    return senses, texts, common


def usable(sense):
    if UNWANTED.search(sense.gloss) or any(UNWANTED.search(s) for s in sense.synonyms) or UNWANTED.search(sense.word):
        return None
    return tidy_gloss(sense.gloss)
