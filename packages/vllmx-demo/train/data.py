"""Tokenizer, chat rendering and packing of the training rows (python data.py --help)."""

import argparse
import glob
import json
import os
import random
import re

import jinja2
import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from chats import chat, plain
from stories import story
from tools import tool_chat

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKS = [f"<{s}{m}>" for m in ("think", "tool_call", "tool_response", "tools") for s in ("", "/")]
ROW = 512
with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "chat_template.jinja")) as f:
    SOURCE = f.read()
ENV = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
ENV.filters["tojson"] = lambda x: json.dumps(x, ensure_ascii=False)
TEMPLATE = ENV.from_string(SOURCE)


def render(r, messages, tools=None, mode=None):
    """A chat as (prompt, spans of the prompt to learn, answer). The modes: auto; think and no_think, asked for at the end of
    the last user turn; off (enable_thinking false, the empty block belongs to the prompt)."""
    mode = mode or r.choices(("auto", "think", "no_think", "off"), (48, 22, 12, 18))[0]
    last, hist = (
        messages[-1],
        [{k: v for k, v in m.items() if k not in ("think", "auto")} for m in messages[:-1]],
    )
    for m in hist:
        if m.get("tool_calls"):
            m["content"] = ""
    if mode in ("think", "no_think"):
        [m for m in hist if m["role"] == "user"][-1]["content"] += " /" + mode
    prompt = TEMPLATE.render(
        messages=hist, tools=tools, add_generation_prompt=True, enable_thinking=mode != "off"
    )
    think = (
        last.get("think")
        if mode == "think" or mode == "auto" and last.get("auto")
        else ""
        if mode == "no_think"
        else None
    )
    answer = (
        (f"<think>\n{think}\n</think>\n\n" if think is not None else "")
        + last["content"]
        + "<|im_end|>"
    )
    turns = re.finditer(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", prompt, re.S)
    said = [m for m in messages[:-1] if m["role"] == "assistant"]
    spans = [
        t.span(1)
        for t, m in zip(turns, said)
        if not (m.get("auto") or m.get("tool_calls") or hist[-1]["role"] == "tool")
    ]
    return prompt, spans, answer


def encode(tok, item):
    "Ids and which of them are to be learned: plain text, answers, and earlier answers that needed no thinking."
    if isinstance(item, str):
        ids = tok.encode(item).ids
        return ids, [1] * len(ids)
    prompt, spans, answer = item
    e, t = tok.encode(prompt), tok.encode(answer).ids
    return e.ids + t, [int(any(s <= b < f for s, f in spans)) for b, _ in e.offsets] + [1] * len(t)


def item(r):
    "One training document: plain sentences, a plain story, a tool chat or a chat."
    x = r.random()
    if x < 0.02:
        return plain(r) + "<|endoftext|>"
    if x < 0.14:
        text, m = story(r)
        return (m["title"] + "\n\n" if r.random() < 0.3 else "") + text + "<|endoftext|>"
    return render(r, *tool_chat(r)) if x < 0.31 else render(r, chat(r))


def prose(corpus):
    "Public-domain books without their last 2 % (held out), in parts of 20 000 characters; children's tales three times."
    parts = []
    for name in sorted(glob.glob(corpus + "/standardebooks/*.txt")) + [
        corpus + "/fairytaleqa_stories.txt"
    ]:
        with open(name, encoding="utf-8") as f:
            text = f.read()
        text = text[: int(len(text) * 0.98)]
        weight = 3 if re.search("fairytale|grimm|aesop|kipling|baum|dolittle|carroll", name) else 1
        parts += [text[i : i + 20000] for i in range(0, len(text), 20000)] * weight
    random.Random(1).shuffle(parts)
    return parts


def make_tokenizer(corpus, out):
    r = random.Random(11)
    texts = [
        x if isinstance(x, str) else x[0] + x[2] for x in (item(r) for _ in range(16000))
    ] + prose(corpus)[:250]
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    names = [AddedToken(t, special=t in SPECIAL, normalized=False) for t in SPECIAL + MARKS]
    trainer = trainers.BpeTrainer(
        vocab_size=4096, special_tokens=names, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tok.train_from_iterator(
        (re.sub("|".join(map(re.escape, SPECIAL + MARKS)), "\n", t) for t in texts), trainer
    )
    raw = json.loads(tok.to_str())
    for t in raw["added_tokens"]:
        t["special"] = t["content"] in SPECIAL
    cfg = dict(
        tokenizer_class="PreTrainedTokenizerFast",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        bos_token=None,
        unk_token=None,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
        add_bos_token=False,
        chat_template=SOURCE,
        added_tokens_decoder={
            str(t["id"]): {k: v for k, v in t.items() if k != "id"} for t in raw["added_tokens"]
        },
    )
    os.makedirs(out, exist_ok=True)
    for name, what in (("tokenizer", raw), ("tokenizer_config", cfg)):
        with open(f"{out}/{name}.json", "w", encoding="utf-8") as f:
            json.dump(what, f, ensure_ascii=False, indent=1)


def pack(tok, corpus, groups, seed, every, out):
    """Rows of 512 in groups of four. Documents are never cut; prose (doc 255, not learned) fills the gaps. One group of so many is all prose,
    so that its four rows make one stretch of 2048 tokens."""
    r, parts = random.Random(seed), prose(corpus)
    r.shuffle(parts)
    stream, nxt, wait, own = [], 0, [], 0
    ids, learn, doc = (np.zeros((groups * 4, ROW), t) for t in (np.uint16, np.uint8, np.uint8))
    for row in range(groups * 4):
        fill = n = misses = 0
        while row // 4 % every and misses < 12:
            x, m = wait.pop(0) if len(wait) > 60 else encode(tok, item(r))
            if fill + len(x) > ROW:
                misses += 1
                if len(x) <= ROW:
                    wait.append((x, m))
                continue
            part = slice(fill, fill + len(x))
            ids[row, part], learn[row, part], doc[row, part] = x, m, n
            fill, n = fill + len(x), n + 1
        while len(stream) < ROW:
            stream, nxt = stream + tok.encode(parts[nxt % len(parts)]).ids, nxt + 1
        ids[row, fill:], learn[row, fill:], doc[row, fill:] = (
            stream[: ROW - fill],
            int(fill == 0),
            255,
        )
        stream, own = stream[ROW - fill :], own + fill
    np.savez(out, ids=ids, learn=learn, doc=doc)
    print(
        f"{out}: {ids.size} tokens, {own} of them generated, {int(learn.sum())} learned", flush=True
    )


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("what", choices=("tokenizer", "pack"))
    p.add_argument(
        "--corpus", required=True, help="folder with standardebooks/ and fairytaleqa_stories.txt"
    )
    p.add_argument("--model", required=True, help="model folder; the tokenizer lives here")
    p.add_argument("--out", help="folder for the shards")
    p.add_argument("--shards", type=int, default=18)
    p.add_argument(
        "--groups", type=int, default=512, help="groups of 4 rows of 512 tokens per shard"
    )
    p.add_argument("--prose-every", type=int, default=15, help="one group of so many is all prose")
    p.add_argument("--seed", type=int, default=1000)
    args = p.parse_args()
    if args.what == "tokenizer":
        make_tokenizer(args.corpus, args.model)
    else:
        os.makedirs(args.out, exist_ok=True)
        for i in range(args.shards):
            tok = Tokenizer.from_file(args.model + "/tokenizer.json")
            pack(
                tok,
                args.corpus,
                args.groups,
                args.seed + i,
                args.prose_every,
                f"{args.out}/{i:03}.npz",
            )
