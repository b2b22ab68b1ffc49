"""Masks against llguidance's, token by token along texts that satisfy made-up schemas; and random texts under the masks against
jsonschema. Run it with the Python that has both: masks.py [SCHEMAS WALKS]."""

import collections
import json
import os
import re
import subprocess
import sys
import tempfile

import jsonschema
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from schemas import Maker

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
MODEL = os.path.join(ROOT, "models", "quire-14m-q8_0.gguf")
# A space may follow a comma and a colon; there is no other white space.
WHITE_SPACE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?", "coerce_one_of": False}


def inspect(schemas, *arguments):
    """Lines of ./inspect constrain for these (schema, value) pairs."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        for i, (schema, value) in enumerate(schemas):
            print(json.dumps({"id": i, "schema": schema, "tests": [{"valid": True, "data": value}]}), file=file)
        file.flush()
        program = os.environ.get("QUIRE_INSPECT", os.path.join(ROOT, "inspect"))
        done = subprocess.run([program, "constrain", MODEL, "--key-order", "declared", "--numbers", "plain", "--schema-tests", file.name,
                               *arguments], stdout=subprocess.PIPE, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


class Vocabulary:
    """quire's vocabulary for llguidance."""

    def __init__(self, line):
        self.tokens = [bytes.fromhex(token) or b"\xff<%d>" % i for i, token in enumerate(line["vocabulary"])]
        self.special_token_ids = [i for i, token in enumerate(line["vocabulary"]) if not token]
        self.eos_token_id, self.bos_token_id = line["end"][0], None
        self.ids = {token: i for i, token in enumerate(self.tokens)}

    def __call__(self, text):
        text = text if isinstance(text, bytes) else text.encode()
        return [self.ids[bytes([byte])] for byte in text]


def members(mask):
    return {i for i in range(8 * len(mask)) if mask[i // 8] >> (i % 8) & 1}


def difference(token, own, other, tokens, before):
    """Why a token is in one mask only, where both are right; None: one is wrong."""
    text = tokens[token]
    if token in own and b"\x7f" in text:
        return "DEL is not escaped in JSON (RFC 8259, 7)"
    if token in own and len(other) == 1 and text != (forced := tokens[min(other)]) and (forced.startswith(text) or text.startswith(forced)):
        return "llguidance takes bytes that are forced in their usual tokens only"
    if token in own and re.fullmatch(rb" ?-", text):
        return "llguidance has no -0 where a bound is 0"
    if token in other and text == b"0" and before.endswith(b"-"):
        return "an integer is written 0, not -0"
    if token in other and text == b"6" and re.search(rb"[0-9]{2}:[0-9]{2}:$", before):
        return "a leap second is at 23:59:60 only (RFC 3339, 5.6)"
    if token in own and re.fullmatch(rb"[0-9.]*[eE][-+]?[0-9]{0,2}", text):
        return "llguidance has no exponents where a number has bounds"
    return None


def compare(schemas):
    lines = inspect(schemas, "--masks")
    vocabulary = Vocabulary(lines[0])
    tokenizer = LLTokenizer(TokenizerWrapper(vocabulary), eos_token=lines[0]["end"], slices=[])
    n_masks, n_same, differences, faults = 0, 0, collections.Counter(), []
    for (schema, value), line in zip(schemas, lines[1:], strict=True):
        if line["accepted"] != [True]:
            faults.append(f"{json.dumps(value)} is refused: {json.dumps(schema)}: {line}")
            continue
        matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(schema, WHITE_SPACE))
        text, tokens = b"", line["tokens"][0]
        for i, mask in enumerate(line["masks"][0]):
            own, other = members(bytes.fromhex(mask)), members(matcher.compute_bitmask())
            for token in own ^ other:
                why = difference(token, own, other, vocabulary.tokens, text)
                differences[why] += 1
                if why is None:
                    faults.append(f"{vocabulary.tokens[token]} after {text} only {'here' if token in own else 'there'}: {json.dumps(schema)}")
            n_masks += 1
            n_same += len(own & other)
            if i < len(tokens):
                text += vocabulary.tokens[tokens[i]]
                if not matcher.consume_token(tokens[i]):
                    faults.append(f"llguidance refuses {text}: {json.dumps(schema)}")
                    break
    print(f"masks: {n_masks} along {len(schemas)} texts, {n_same} tokens in both")
    for why, n in sorted(differences.items(), key=str):
        print(f"    {n} in one alone: {why or 'FAULT'}")
    return faults


def walk(schemas, n_walks):
    """Random texts under the masks satisfy their schemas."""
    lines = inspect(schemas, "--walks", str(-(-n_walks // len(schemas))), "--seed", "26")
    n, faults = 0, []
    formats = jsonschema.FormatChecker(["date", "uuid", "ipv4"])  # of time it has another idea than the specification
    for (schema, _), line in zip(schemas, lines, strict=True):
        validator = jsonschema.Draft202012Validator(schema, format_checker=formats)
        for text in line["walks"]:
            n += 1
            try:
                validator.validate(json.loads(text))
            except (ValueError, jsonschema.ValidationError) as error:
                faults.append(f"{text} does not satisfy {json.dumps(schema)}: {error.message if hasattr(error, 'message') else error}")
    print(f"walks: {n} texts")
    return faults if n >= n_walks * 0.8 else faults + [f"only {n} of {n_walks} walks came to an end"]


def main():
    n_schemas, n_walks = (int(a) for a in sys.argv[1:3] or ("250", "3000"))
    schemas = [Maker(seed).document() for seed in range(n_schemas)]
    faults = compare(schemas) + walk(schemas, n_walks)
    for fault in faults[:20]:
        print("FAULT", fault)
    print(f"{len(faults)} faults")
    return bool(faults)


sys.exit(main())
