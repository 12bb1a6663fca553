"""Check a trained model with transformers: accuracy per skill, perplexity, sample chats, greedy reference."""

import argparse
import glob
import json
import math
import random
import re

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import chats
import wording
from data import render
from stories import ANIMALS, OBJECTS, a, story
from tools import TOOLS, call, schema, tool_chat

NEW_NAMES = "Harriet Quentin Zelda Boris Ingrid Marvin Yusuf Penelope Winston Agatha Dmitri Felicity Gustav Bertram Wilma Norbert".split()
NEW_TOOLS = [
    ("launch_rover", "zone"),
    ("get_tide", "coast"),
    ("rent_scooter", "model"),
    ("tune_engine", "mode"),
    ("water_plants", "area"),
    ("lookup_word", "word"),
    ("charge_battery", "level"),
    ("grade_exam", "student"),
]


class Bot:
    def __init__(self, path):
        self.tok = AutoTokenizer.from_pretrained(path, padding_side="left")
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.model.generation_config.max_length = None

    def many(self, prompts, new=90, size=48, **how):
        out = [None] * len(prompts)
        how = how or dict(do_sample=False, temperature=None, top_p=None, top_k=None)
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        for i in range(0, len(order), size):
            idx = order[i : i + size]
            enc = self.tok(
                [prompts[j] for j in idx],
                return_tensors="pt",
                padding=True,
                add_special_tokens=False,
            )
            with torch.no_grad():
                y = self.model.generate(
                    **enc, max_new_tokens=new, pad_token_id=0, eos_token_id=[2, 0], **how
                )
            for j, row in zip(idx, y[:, enc.input_ids.shape[1] :].tolist()):
                row = row[: next((k for k, t in enumerate(row) if t in (0, 2)), len(row))]
                out[j] = self.tok.decode(row)
        return out

    def perplexity(self, texts, width=512):
        ids = [t for x in texts for t in self.tok.encode(x)]
        rows = torch.tensor(ids[: len(ids) // width * width]).view(-1, width)[:64]
        with torch.no_grad():
            return math.exp(
                sum(self.model(input_ids=x[None], labels=x[None]).loss.item() for x in rows)
                / len(rows)
            )


def said(text):
    return text.split("</think>")[-1].strip()


def same_json(x, y):
    try:
        return json.loads(x) == json.loads(y)
    except ValueError:
        return False


def calls(text):
    found = re.findall(r"<tool_call>\n(.*?)\n</tool_call>", text, re.S)
    try:
        return [json.loads(x) for x in found]
    except ValueError:
        return None


def good_list(got, kind, n):
    items = re.findall(r"^\d+\. (.+)$", got, re.M) or [
        x for x in re.split(r", | and ", got.strip().rstrip("."))
    ]
    known = {x.lower() for x in wording.LISTS[kind]}
    return len(items) == n == len(set(items)) and all(x.lower() in known for x in items)


def skill_tests(r):
    "name -> list of (messages, tools, check of the answer)."
    t = {}

    def add(name, messages, tools=None, check=None):
        want = messages[-1]["content"]
        t.setdefault(name, []).append((messages, tools, check or (lambda got: said(got) == want)))

    for c, k in wording.CAPITALS.items():
        add(
            "capitals",
            [wording.U(f"What is the capital of {c}?"), wording.A(f"The capital of {c} is {k}.")],
        )
        add(
            "capitals reversed",
            [
                wording.U(f"{k} is the capital of which country?"),
                wording.A(f"{k} is the capital of {c}."),
            ],
        )
    for x in range(10):
        for y in range(10):
            add(
                "sums, all 100",
                [
                    wording.U(f"What is {x} plus {y}?"),
                    wording.A(f"{x} plus {y} is {x + y}.", auto=True),
                ],
            )
            add(
                "differences, all 100",
                [
                    wording.U(f"What is {x} - {y}?"),
                    wording.A(f"{x} minus {y} is {x - y}.", auto=True),
                ],
            )
    for name in ("facts", "compare", "repeat", "yes_no", "reading", "memory", "summary"):
        for _ in range(80):
            add(name, chats.SKILLS[name][0](r))
    for _ in range(80):
        m = chats.as_json(r)
        add("JSON equal", m, None, lambda got, m=m: same_json(said(got), m[-1]["content"]))
        add("JSON valid", m, None, lambda got: same_json(said(got), said(got)))
        kind, n = r.choice(list(wording.LISTS)), r.randint(2, 6)
        add(
            "lists (count and kind)",
            [wording.U(f"Give me a list of {wording.NUMBERS[n]} {kind}."), wording.A("")],
            None,
            lambda got, k=kind, n=n: good_list(said(got), k, n),
        )
        m, tools = tool_chat(r, only_call=True)
        want = calls(m[-1]["content"])
        add("tool call valid", m, tools, lambda got: bool(calls(got)))
        add(
            "tool call right tool",
            m,
            tools,
            lambda got, w=want: (
                bool(calls(got)) and [x.get("name") for x in calls(got)] == [x["name"] for x in w]
            ),
        )
        add("tool call all right", m, tools, lambda got, w=want: calls(got) == w)
        m, tools = tool_chat(r, only_call=False)
        if m[-2]["role"] == "tool":
            add("answer after the tool", m, tools)
    for i, n in enumerate(NEW_NAMES * 2):
        more = [wording.U("What colour is grass?"), wording.A("Grass is green.")] if i % 2 else []
        add(
            "name memory, names never seen",
            [wording.U(f"Hello, my name is {n}."), wording.A(f"Nice to meet you, {n}!")]
            + more
            + [wording.U("What is my name?"), wording.A(f"Your name is {n}.")],
        )
    for i in range(40):
        name, par = NEW_TOOLS[i % 8]
        verb, noun = name.split("_")
        have = [schema(r, k, TOOLS[k]) for k in r.sample(list(TOOLS), 2)] + [
            schema(r, name, (f"{verb.capitalize()} {a(noun)}", {par: "string"}))
        ]
        r.shuffle(have)
        v = r.choice(wording.LISTS["toys"] + wording.DAYS)
        want = calls(call(name, {par: v}))
        add(
            "tool call, tools never seen",
            [wording.U(f"Please {verb} the {noun}. The {par} is {v}."), wording.A("")],
            have,
            lambda got, w=want: calls(got) == w,
        )
    for _ in range(60):
        who, o = r.choice(ANIMALS), r.choice(OBJECTS)
        add(
            "story with both topic words",
            [wording.U(f"Tell me a story about {a(who)} and {a(o)}."), wording.A("")],
            None,
            lambda got, w=who, o=o: w in got and o in got,
        )
    return t


def measure(bot, corpus, seed=987654):
    r = random.Random(seed)
    res, known = {}, {}
    for name, cases in skill_tests(r).items():
        for mode in ("auto", "off"):
            prompts = [render(r, m, tools, mode)[0] for m, tools, _ in cases]
            todo = list(dict.fromkeys(p for p in prompts if p not in known))
            known.update(zip(todo, bot.many(todo, new=230 if "story" in name else 96)))
            got = [known[p] for p in prompts]
            ok = [bool(c[2](g)) for c, g in zip(cases, got)]
            res.setdefault(name, {})[mode] = round(100 * sum(ok) / len(ok), 1)
            bad = next((i for i, k in enumerate(ok) if not k), None)
            if bad is not None:
                print(
                    f"   wrong: {cases[bad][0][-2]['content'][-150:]!r} -> {got[bad][:200]!r} wanted {cases[bad][0][-1]['content'][:120]!r}"
                )
        print(name, len(cases), res[name], flush=True)
    res["perplexity, held-out generated stories"] = round(
        bot.perplexity([story(r)[0] + "<|endoftext|>" for _ in range(200)]), 2
    )
    tails = [
        open(f, encoding="utf-8").read()
        for f in sorted(glob.glob(corpus + "/standardebooks/*.txt"))
        + [corpus + "/fairytaleqa_stories.txt"]
    ]
    res["perplexity, held-out book ends"] = round(
        bot.perplexity([x[int(len(x) * 0.98) :][:4000] for x in tails]), 2
    )
    print(res, flush=True)
    return res


ASK = [
    "Hello!",
    "Who are you?",
    "Tell me a story about a fox and a lamp.",
    "What is the capital of France?",
    "What is 7 plus 8?",
    "Tom has 3 apples. Tom gets 4 more. How many apples does Tom have now?",
    "Repeat after me: the quick brown fox",
    "Give me a list of five animals.",
    "What does a duck say?",
    "What day comes after Monday?",
    "What is the opposite of hot?",
    "Count to ten.",
    "Is the sky green?",
    "Explain quantum physics.",
    "Give a JSON object with name and age for Tom who is 7.",
    "Write a poem about a star.",
    "Tell me a joke.",
    "I am sad today.",
    "Which is bigger, 4 or 9? /no_think",
    "What is the capital of Japan? /think",
    "Write a story about a brave robot in the desert.",
    "How do I cook rice?",
    "Thank you!",
]
TALK = [
    wording.U("Hi, my name is Sara."),
    wording.A("Hello, Sara! Nice to meet you."),
    wording.U("My favourite colour is green."),
    wording.A("Green is a lovely colour!"),
    wording.U("What is my name?"),
]


def sample_prompts(tok):
    tools = [
        schema(random.Random(3), n, TOOLS[n]) for n in ("get_time", "get_weather", "set_timer")
    ]
    ask = [([wording.U(x)], None) for x in ASK] + [
        (TALK, None),
        ([wording.U("What is the weather in Paris?")], tools),
    ]
    return [
        (
            m[-1]["content"],
            tok.apply_chat_template(m, tools=t, add_generation_prompt=True, tokenize=False),
        )
        for m, t in ask
    ]


def reference(bot, path):
    out = []
    prompts = [p for _, p in sample_prompts(bot.tok)]
    for text in [prompts[i] for i in (0, 2, 3, 5, 7, 14, 19, 23, 24)] + [
        "Once upon a time, there was a",
        "The capital of France is",
        "Alice was beginning to get very tired of",
    ]:
        ids = bot.tok.encode(text, add_special_tokens=False)
        seq, gap = list(ids), []
        for _ in range(64):
            with torch.no_grad():
                logits = bot.model(input_ids=torch.tensor([seq])).logits[0, -1]
            top = logits.topk(2)
            gap.append((top.values[0] - top.values[1]).item())
            seq.append(top.indices[0].item())
        end = next((i for i, t in enumerate(seq[len(ids) :]) if t in (0, 2)), None)
        out.append(
            dict(
                prompt=text,
                prompt_ids=ids,
                greedy_ids=seq[len(ids) :],
                greedy_text=bot.tok.decode(seq[len(ids) :]),
                smallest_margin=round(min(gap), 5),
                smallest_margin_at=gap.index(min(gap)),
                end_at=end,
                smallest_margin_to_end=round(min(gap[: None if end is None else end + 1]), 5),
            )
        )
    json.dump(
        dict(
            note="64 greedy ids after each prompt, float32 on CPU, not stopped at an end token (end_at tells where the first one is); "
            "a margin is the top-1 logit minus the top-2 logit",
            cases=out,
        ),
        open(path, "w"),
        indent=1,
        ensure_ascii=False,
    )


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--model", required=True)
    p.add_argument("--corpus", required=True)
    p.add_argument("--results", help="JSON file for the accuracies")
    p.add_argument("--reference", help="file for the greedy reference")
    p.add_argument("--samples", action="store_true")
    args = p.parse_args()
    bot = Bot(args.model)
    if args.samples:
        asks = sample_prompts(bot.tok)
        torch.manual_seed(0)
        cold, warm = (
            bot.many([p for _, p in asks], 200, **how)
            for how in ({}, dict(do_sample=True, temperature=0.7, top_k=0, top_p=1.0))
        )
        for (q, _), x, y in zip(asks, cold, warm):
            print(f"### {q}\n[greedy] {x}\n[0.7]    {y}\n")
    if args.results:
        json.dump(measure(bot, args.corpus), open(args.results, "w"), indent=1)
    if args.reference:
        reference(bot, args.reference)
