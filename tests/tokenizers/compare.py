#!/usr/bin/env python3
"""Compares `inspect tokenize` with llama.cpp's vectors, and over random texts with the tokenizers and sentencepiece libraries,
made from the same files.

usage: compare.py INSPECT LLAMA_CPP_SOURCE; prints a table, exits with 1 at a difference.
"""
import concurrent.futures, glob, json, os, random, re, subprocess, sys, tempfile

import sentencepiece
import tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

import gguf_file

N_TEXTS = 150
SEPARATOR = "\n__ggml_vocab_test__\n"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4

# Patterns that the source has as code, or in a form for std::regex that means something else with letters beyond ASCII.
HAN = r"&&[^\p{Han}]"
UPPER, LOWER, CONTRACTION = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
CASED = r"[^\r\n\p{L}\p{N}]?[%s]*[%s]+%s|[^\r\n\p{L}\p{N}]?[%s]+[%s]*%s"
REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {
    "KIMI_K2": [
        r"[\p{Han}]+|"
        + CASED % (UPPER + HAN, LOWER + HAN, CONTRACTION, UPPER + HAN, LOWER + HAN, CONTRACTION)
        + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + REST
    ],
    "GRANITE_EMB_MULTI": [
        CASED % (UPPER, LOWER, CONTRACTION, UPPER, LOWER, CONTRACTION)
        + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + REST
    ],
}
# Code in llama.cpp that no pattern of the tokenizers library says: spelling as sentencepiece has it, white space left out, digits in threes from the right.
NOT_AS_PATTERN = {"GEMMA4", "SARVAM_MOE", "MMBERT", "WHITESPACE", "AFMOE"}


def source_patterns(source):
    """tokenizer.ggml.pre → (patterns, whole words first), from llama-vocab.cpp: the model's own patterns where its comments have them."""
    text = open(os.path.join(source, "src", "llama-vocab.cpp"), encoding="utf-8").read()
    types, kinds = {}, []
    for line in text[text.index("struct llm_tokenizer_bpe ") : text.index("struct llm_tokenizer_bpe_session")].splitlines():
        if found := re.match(r"\s*(?:case LLAMA_VOCAB_PRE_TYPE_(\w+)|(default)):", line):
            kinds, original = (kinds if not kinds or not types.get(kinds[0]) else []) + [found[1] or "DEFAULT"], None
            types[kinds[-1]] = []
        elif found := re.search(r'"((?:[^"\\]|\\.)+)"', line):
            pattern = re.sub(r"\\(.)", lambda m: {"r": "\r", "n": "\n", "t": "\t"}.get(m[1], m[1]), found[1])
            if line.lstrip().startswith("//"):
                original = pattern
            elif kinds:
                for kind in kinds:
                    types[kind].append(original or pattern)
                original = None
    by_name = {}
    for names, block in re.findall(r'if \(\s*((?:tokenizer_pre == "[^"]+"[\s|]*)+)\) \{(.*?)\}', text, re.S):
        if kind := re.search(r"pre_type\s*=\s*LLAMA_VOCAB_PRE_TYPE_(\w+)", block):
            for name in re.findall(r'"([^"]+)"', names):
                by_name[name] = kind[1], PATTERNS.get(kind[1], types.get(kind[1])), "ignore_merges = true" in block
    if len(by_name) < 60 or any(not patterns for _, patterns, _ in by_name.values()):
        sys.exit("llama-vocab.cpp has another form than this test knows")
    return by_name


# -- texts

WORDS = """the The and don't I'LL we're Über straße naïve café Ångström Привет мир ñandú ελληνικά ΑΒΓ עברית العربية हिन्दी ไทย
한국어 日本語 中文字符 カタカナ ひらがな x86_64 for(int i=0;i<10;++i) return; 3.14159 1234567 12 007 ٣٤٥ Ⅷ ½ http://a.b/c?d=e&f#g
user@example.com $100,000.00 #hash @you <b>bold</b> `code` "quoted" 'single' (paren) [x] {y} a/b\\\\c -- --- ... ?! !!! 🙂 🚀🚀 👩‍👩‍👧 👍🏽
🇩🇪 e\u0301 a\u0308\u0323 İstanbul ŉ ﬁne Ａｂｃ — “quoted” ‘s’ ’t … € ± × ÷ ™ snake_case camelCase HTTPServer ABCdef""".split()
SPACES = [" ", " ", " ", " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n ", "\n\n\n ", "\u00a0", "\u3000", ""]
CHARACTERS = "abzAZ09 .,!?'\"-_/\\\n\r\t éßÄñøПяЖβΩ中日本語한글あアไทยहिन्दी٣½€—…🙂🚀\u0301\u0308\u200d\ufe0f\u00a0\u3000"


def random_texts(seed):
    chance = random.Random(seed)
    for i in range(N_TEXTS):
        if i % 3 < 2:
            yield "".join(chance.choice(WORDS) + chance.choice(SPACES) for _ in range(chance.randint(1, 24)))
        else:
            yield "".join(chance.choice(CHARACTERS) * chance.choice([1, 1, 1, 2, 5]) for _ in range(chance.randint(1, 40)))


# -- the same vocabulary in other libraries

def spelled(metadata):
    return [t.decode() for t in metadata["tokenizer.ggml.tokens"]]


def byte_pairs(metadata, patterns, whole_first):
    tokens, types = spelled(metadata), metadata["tokenizer.ggml.token_type"]
    merges = []
    for merge in metadata["tokenizer.ggml.merges"]:
        space = merge.index(b" ", 1)
        merges.append((merge[:space].decode(), merge[space + 1 :].decode()))
    vocabulary = {token: i for i, token in reversed(list(enumerate(tokens)))}
    there = lambda a, b: a in vocabulary and b in vocabulary and a + b in vocabulary
    t = tokenizers.Tokenizer(models.BPE(vocabulary, [m for m in merges if there(*m)], ignore_merges=whole_first))
    t.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(p), "isolated") for p in patterns]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    defined = [tokens[i] for i, kind in enumerate(types) if kind == USER_DEFINED]
    t.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in defined])
    return lambda text: t.encode(text, add_special_tokens=False).ids


def text_pairs(metadata):
    """Byte pairs of characters: ▁ for a space, bytes for characters that are no token, lines apart."""
    merges = [m.decode() for m in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: i for i, token in reversed(list(enumerate(spelled(metadata))))}
    merges = [(m[: m.index(" ", 1)], m[m.index(" ", 1) + 1 :]) for m in merges]
    t = tokenizers.Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True))
    t.normalizer = normalizers.Replace(" ", "\u2581")
    t.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    defined = [x for x, kind in zip(spelled(metadata), metadata["tokenizer.ggml.token_type"]) if kind == USER_DEFINED]
    t.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in defined])
    return lambda text: t.encode(text, add_special_tokens=False).ids


def word_pieces(metadata):
    mark = "\u2581"
    vocabulary = {}
    for i, (token, kind) in enumerate(zip(spelled(metadata), metadata["tokenizer.ggml.token_type"])):
        token = token if kind != NORMAL else token[1:] if token.startswith(mark) else "##" + token
        vocabulary.setdefault(token, i)
    t = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=100))
    t.normalizer = normalizers.BertNormalizer(lowercase=True)
    t.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return lambda text: t.encode(text, add_special_tokens=False).ids


def sentence_pieces(metadata, kind):
    proto = sentencepiece_model_pb2.ModelProto()
    proto.trainer_spec.model_type = kind
    proto.trainer_spec.byte_fallback = 6 in metadata["tokenizer.ggml.token_type"]
    proto.trainer_spec.unk_id = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    proto.normalizer_spec.name = "identity"
    proto.normalizer_spec.add_dummy_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    proto.normalizer_spec.remove_extra_whitespaces = metadata.get("tokenizer.ggml.remove_extra_whitespaces", False)
    if charsmap := metadata.get("tokenizer.ggml.precompiled_charsmap"):
        proto.normalizer_spec.precompiled_charsmap = bytes(b & 255 for b in charsmap)
    seen = set()
    for i, (token, score, kind) in enumerate(
        zip(spelled(metadata), metadata["tokenizer.ggml.scores"], metadata["tokenizer.ggml.token_type"])
    ):
        while token in seen or not token:
            token += "\U000f0000"  # no two pieces may be equal; the first one counts
        seen.add(token)
        if (kind == UNKNOWN) != (i == proto.trainer_spec.unk_id):
            kind = UNKNOWN if kind != UNKNOWN else CONTROL  # it takes one such piece
        proto.pieces.add(piece=token, score=score, type=kind)
    library = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
    return library.encode


# -- comparing

def by_inspect(inspect, file, texts):
    run = subprocess.run([inspect, "tokenize", file, "--no-special", "--json-lines"],
                         input="".join(json.dumps(t) + "\n" for t in texts).encode(), capture_output=True)
    if run.returncode:
        return run.stderr.decode().strip()
    return [json.loads(line)["ids"] for line in run.stdout.decode().splitlines()]


def tied(metadata):
    """Whether two ways to cut a text are equally likely: sentencepiece adds their scores as float32, others as float64."""
    scores = metadata["tokenizer.ggml.scores"]
    return lambda a, b: len(a) == len(b) and abs(sum(scores[i] for i in a) - sum(scores[i] for i in b)) < 1e-3


def differences(name, what, texts, expected, got, equal=lambda a, b: False):
    if isinstance(got, str):
        return f"{name:32} {what:28} refused: {got}", len(texts)
    wrong = [i for i, ids in enumerate(expected) if ids != got[i] and not equal(ids, got[i])]
    line = f"{name:32} {what:28} {len(texts):4} texts, {f'{len(wrong)} differ' if wrong else 'equal'}"
    for i in wrong[:3]:
        line += f"\n  {texts[i]!r}\n    expected {expected[i]}\n    here     {got[i]}"
    return line, len(wrong)


def compare_vectors(inspect, file):
    with open(file + ".inp", encoding="utf-8", newline="") as inp, open(file + ".out") as out:
        texts = inp.read().split(SEPARATOR)
        expected = [[int(i) for i in line.split()] for line in out]
    return differences(os.path.basename(file), "llama.cpp's vectors", texts, expected, by_inspect(inspect, file, texts))


def compare_library(inspect, file, patterns):
    metadata = gguf_file.read(file)
    model, pre = metadata["tokenizer.ggml.model"], metadata.get("tokenizer.ggml.pre", b"default").decode()
    texts, equal = list(random_texts(os.path.basename(file))), lambda a, b: False
    if model == b"gpt2":
        _, splits, whole_first = patterns[pre]
        what, encode = "tokenizers' BPE", byte_pairs(metadata, splits, whole_first)
    elif model == b"bert":
        what, encode = "tokenizers' WordPiece", word_pieces(metadata)
    elif model == b"llama":
        what, encode = "sentencepiece's BPE", sentence_pieces(metadata, 2)
    elif model == b"t5":
        what, encode, equal = "sentencepiece's unigram", sentence_pieces(metadata, 1), tied(metadata)
    else:
        what, encode = "tokenizers' BPE", text_pairs(metadata)
    return differences(os.path.basename(file), what, texts, [encode(t) for t in texts], by_inspect(inspect, file, texts), equal)


def trained_pairs():
    """A vocabulary whose merges cross every border, so that the ids show where a pre-tokenizer split."""
    t = tokenizers.Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(vocab_size=3000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    t.train_from_iterator([text for seed in range(6) for text in random_texts(f"train {seed}")], trainer)
    model = json.loads(t.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    return {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": [x.encode() for x in tokens],
            "tokenizer.ggml.token_type": [NORMAL] * len(tokens), "tokenizer.ggml.merges": [m.encode() for m in merges]}


def compare_pre(inspect, folder, metadata, pre, row):
    kind, splits, whole_first = row
    if kind in NOT_AS_PATTERN:
        return f"pre {pre:28} {'(code, no pattern)':28}", 0
    file = os.path.join(folder, pre + ".gguf")
    gguf_file.write(file, {**metadata, "tokenizer.ggml.pre": pre})
    texts = list(random_texts(pre))
    encode = byte_pairs(metadata, splits, whole_first)
    return differences(f"pre {pre}", "tokenizers' Split", texts, [encode(t) for t in texts], by_inspect(inspect, file, texts))


def compare_whitespace(inspect, folder, lower):
    t = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    t.normalizer = normalizers.Lowercase() if lower else None
    t.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    t.train_from_iterator([text for seed in range(6) for text in random_texts(f"train {seed}")],
                          trainers.BpeTrainer(vocab_size=2000, special_tokens=["<unk>"], show_progress=False))
    model = json.loads(t.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    file = os.path.join(folder, f"whitespace{lower}.gguf")
    gguf_file.write(file, {"general.architecture": "llama", "tokenizer.ggml.model": "whitespace",
                           "tokenizer.ggml.pre": "whitespace", "tokenizer.ggml.tokens": [x.encode() for x in tokens],
                           "tokenizer.ggml.token_type": [UNKNOWN] + [NORMAL] * (len(tokens) - 1),
                           "tokenizer.ggml.merges": [m.encode() for m in merges], "tokenizer.ggml.unknown_token_id": 0,
                           "tokenizer.ggml.normalizer.lowercase": lower})
    texts = list(random_texts(f"whitespace {lower}"))
    return differences(f"trained whitespace {'lower' if lower else ''}", "tokenizers' BPE", texts,
                       [t.encode(x).ids for x in texts], by_inspect(inspect, file, texts))


def compare_unigram(inspect, folder, rule):
    corpus = os.path.join(folder, f"{rule}.txt")
    with open(corpus, "w", encoding="utf-8") as file:
        for seed in range(20):
            file.write("\n".join(" ".join(t.split()) for t in random_texts(f"train {seed}")) + "\n")
    prefix = os.path.join(folder, rule)
    sentencepiece.SentencePieceTrainer.train(input=corpus, model_prefix=prefix, model_type="unigram", vocab_size=600,
                                             normalization_rule_name=rule, hard_vocab_limit=False, num_threads=1,
                                             minloglevel=2)
    proto = sentencepiece_model_pb2.ModelProto.FromString(open(prefix + ".model", "rb").read())
    metadata = {"general.architecture": "t5", "tokenizer.ggml.model": "t5",
                "tokenizer.ggml.tokens": [p.piece.encode() for p in proto.pieces],
                "tokenizer.ggml.scores": [p.score for p in proto.pieces],
                "tokenizer.ggml.token_type": [p.type for p in proto.pieces],
                "tokenizer.ggml.unknown_token_id": 0, "tokenizer.ggml.eos_token_id": 2,
                "tokenizer.ggml.add_space_prefix": proto.normalizer_spec.add_dummy_prefix,
                "tokenizer.ggml.remove_extra_whitespaces": proto.normalizer_spec.remove_extra_whitespaces}
    if proto.normalizer_spec.precompiled_charsmap:
        metadata["tokenizer.ggml.precompiled_charsmap"] = bytearray(proto.normalizer_spec.precompiled_charsmap)
    file = prefix + ".gguf"
    gguf_file.write(file, metadata)
    library = sentencepiece.SentencePieceProcessor(model_file=prefix + ".model")
    texts = list(random_texts(rule))
    return differences(f"trained unigram {rule}", "sentencepiece", texts, [library.encode(t) for t in texts],
                       by_inspect(inspect, file, texts), tied(metadata))


def main():
    inspect, source = sys.argv[1:]
    files = sorted(glob.glob(os.path.join(source, "models", "ggml-vocab-*.gguf")))
    with_vectors = [f for f in files if os.path.exists(f + ".out")]
    if len(with_vectors) < 10:
        sys.exit(f"{source} has {len(with_vectors)} vocabularies with vectors")
    patterns = source_patterns(source)
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ProcessPoolExecutor(os.cpu_count()) as pool:
        metadata = trained_pairs()
        work = [pool.submit(compare_vectors, inspect, f) for f in with_vectors]
        work += [pool.submit(compare_library, inspect, f, patterns) for f in files]
        work += [pool.submit(compare_pre, inspect, folder, metadata, pre, row) for pre, row in patterns.items()]
        work += [pool.submit(compare_unigram, inspect, folder, rule) for rule in ("identity", "nmt_nfkc", "nmt_nfkc_cf")]
        work += [pool.submit(compare_whitespace, inspect, folder, lower) for lower in (False, True)]
        wrong = 0
        for done in work:
            line, n = done.result()
            print(line, flush=True)
            wrong += n
    print(f"{len(files)} vocabularies ({len(with_vectors)} with vectors), {len(patterns)} pre-tokenizers: {wrong} differences")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
