"""Chat generators. A skill returns a list of messages; the last one is the assistant's answer to learn. Assistant messages may
carry "think" (short reasoning); with "auto" set the model thinks without being asked to."""

import json

from stories import (
    ADJ,
    ANIMALS,
    BOYS,
    COLOURS,
    GIRLS,
    NO_HELP,
    OBJECTS,
    PEOPLE,
    PLACES,
    M,
    Who,
    a,
    odd_name,
    story,
)

CAPITALS, SOUNDS, COLOUR_OF, CAN, THEMES, ASKS = (
    M[k] for k in ("capitals", "sounds", "colour_of", "can", "themes", "asks")
)
CITIES = list(CAPITALS.values()) + M["more_cities"]
DAYS, MONTHS, NUMBERS = (M[k].split() for k in ("days", "months", "numbers"))
OPPOSITES = [p.split("-") for p in M["opposites"].split()]
LISTS = dict(
    animals=[x for x in ANIMALS if x != "dragon"],
    colours=COLOURS,
    countries=[c for c in CAPITALS if "the " not in c],
    days=DAYS,
    months=MONTHS,
    cities=CITIES,
    names=GIRLS + BOYS,
    **{k: v.split() for k, v in M["lists"].items()},
)


def U(text):
    return {"role": "user", "content": text}


def A(text, think=None, auto=False):
    return {"role": "assistant", "content": text, "think": think, "auto": auto}


def loosen(r, text):
    "Users do not all write alike: now and then no capital, no full stop, or a polite word."
    if r.random() < 0.15:
        text = text[0].lower() + text[1:]
    if r.random() < 0.2:
        text = text.rstrip("?.!")
    elif r.random() < 0.08 and text[-1] in "?.":
        text = text[:-1] + ", please" + text[-1]
    return text


def any_name(r):
    return odd_name(r) if r.random() < 0.45 else r.choice(GIRLS + BOYS)


def join(words):
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def up(text):
    return text[0].upper() + text[1:]


def pick(r, text):
    return r.choice(text.split("|"))


def greet(r):
    ask, ans = ("".join(pick(r, x) for x in pair) for pair in (M["hello"][:2], M["hello"][2:4]))
    if "how are" in ask.lower():
        ans = pick(r, M["hello"][4])
    return [U(ask), A(ans, "The user says hello. I will greet them and offer help.")]


def small_talk(r):
    q, ans = r.choice(M["small_talk"])
    return [
        U(pick(r, q)),
        A(pick(r, ans), "The user makes small talk. I will answer in a friendly way."),
    ]


def story_chat(r):
    who, form, tell = r.choice(ANIMALS * 2 + PEOPLE), r.randrange(8), r.choice(M["story_asks"])
    kw, ask = dict(hero=who), f"{tell} {a(who)}"
    if form < 3:
        kw["obj"] = r.choice(OBJECTS)
        ask += f" and {a(kw['obj'])}"
    elif form == 3:
        kw["helper"] = r.choice([x for x in ANIMALS if x != who])
        ask += f" and {a(kw['helper'])}"
    elif form == 4:
        kw["name"] = r.choice(GIRLS + BOYS)
        ask += f" named {kw['name']}"
    elif form == 5:
        kw["place"] = r.choice(PLACES)
        ask += f" near the {kw['place']}"
    elif form == 7:
        theme = r.choice(list(THEMES))
        kw = dict(plot=THEMES[theme]) if r.random() < 0.5 else {}
        ask = (
            f"{tell} {theme}"
            if kw
            else pick(
                r, "Tell me a story|Tell me a bedtime story|Can you tell me a story|A story, please"
            )
        )
    ask += "?" if ask == "Can you tell me a story" else "."
    text, m = story(r, **kw)
    hero, helper = m["hero"], m["helper"]
    think = f"The user wants a story. It is about {hero.name} the {hero.kind} and {a(m['obj'])}. {helper.name} will help."
    if kw.get("obj") and r.random() < 0.2:
        ask = f'Write a story with the title "{m["title"]}".'
        text = m["title"] + "\n\n" + text
    out = [U(loosen(r, ask)), A(text, think)]
    if r.random() < 0.45:  # a question about the story; who helped makes no sense in some plots
        qs = r.choice(M["story_questions"][: 5 if m["plot"] in NO_HELP else 6])
        q, s = (
            x.format(N=hero.name, k=hero.kind, h=helper.name, hk=helper.kind, ao=a(m["obj"]))
            for x in qs
        )
        out += [U(loosen(r, q)), A(s, f"I look back at the story. {s}")]
    return out


def capital(r):
    c, k = r.choice(list(CAPITALS.items()))
    if r.random() < 0.3:
        out = [
            U(loosen(r, pick(r, ASKS["country"]).format(k=k))),
            A(f"{k} is the capital of {c}.", f"The user asks about {k}. It is the capital of {c}."),
        ]
    else:
        out = [
            U(loosen(r, pick(r, ASKS["capital"]).format(c=c))),
            A(f"The capital of {c} is {k}.", f"The user asks for the capital of {c}. It is {k}."),
        ]
    while r.random() < 0.35 and len(out) < 6:
        c = r.choice(list(CAPITALS))
        out += [
            U(pick(r, ASKS["next_capital"]).format(c=c)),
            A(
                f"The capital of {c} is {CAPITALS[c]}.",
                f"The user now asks about {c}. The capital is {CAPITALS[c]}.",
            ),
        ]
    return out


def facts(r):
    f = r.randrange(8)
    if f == 0:
        t = r.choice(list(COLOUR_OF))
        q, s = pick(r, ASKS["colour"]).format(t=t), f"{t} is {COLOUR_OF[t]}."
    elif f == 1:
        t = r.choice(list(SOUNDS))
        q, s = pick(r, ASKS["sound"]).format(t=a(t)), f"{a(t)} says {SOUNDS[t]}."
    elif f in (2, 3):
        row, what = (DAYS, "What day") if f == 2 else (MONTHS, "Which month")
        d, k = r.randrange(len(row)), r.choice((1, -1))
        side = "after" if k > 0 else "before"
        q, s = f"{what} comes {side} {row[d]}?", f"{row[(d + k) % len(row)]} comes {side} {row[d]}."
    elif f in (4, 5):
        x, y = r.choice(OPPOSITES)
        q, s = pick(r, ASKS["opposite"]).format(x=x), f"The opposite of {x} is {y}."
    elif f == 6:
        n, m = sorted(r.sample(range(0, 21), 2))
        n, m = (1, max(m, 2)) if r.random() < 0.5 else (n, m)
        seq = [str(i) for i in range(n, m + 1)]
        if r.random() >= 0.75:
            q, seq = f"Count down from {m} to {n}.", seq[::-1]
        elif n != 1:
            q = f"Count from {n} to {m}."
        else:
            q = pick(r, f"Count to {m}.|Count from 1 to {m}.|Can you count to {m}?")
        s = ", ".join(seq) + "."
    else:
        q, s = r.choice(M["facts"])
    return [U(loosen(r, q)), A(up(s), f"This is a simple question. {up(s)}")]


def sums(r):
    x, y, plus = r.randrange(10), r.randrange(10), r.random() < 0.55
    if not plus and x < y and r.random() < 0.5:
        x, y = y, x
    word, res, op = ("plus", x + y, "+") if plus else ("minus", x - y, "-")
    if r.random() < 0.3 and (plus or x >= y):
        n, o = any_name(r), r.choice(OBJECTS)
        more = f"{n} gets {y} more." if plus else f"{n} gives away {y}."
        return [
            U(f"{n} has {x} {o}s. {more} How many {o}s does {n} have now?"),
            A(f"{n} now has {res} {o}s.", f"{n} starts with {x}. {x} {op} {y} = {res}.", True),
        ]
    q = pick(r, ASKS["sum"]).format(x=x, y=y, word=word, op=op)
    out = [
        U(q if q.endswith("=") else loosen(r, q)),
        A(
            f"{x} {word} {y} is {res}.",
            f"The user asks for {x} {op} {y}. {x} {op} {y} = {res}.",
            True,
        ),
    ]
    if r.random() < 0.25 and 0 <= res <= 9:
        z = r.randrange(10)
        out += [
            U(pick(r, f"And plus {z}?|Now add {z}.|And if you add {z}?")),
            A(
                f"{res} plus {z} is {res + z}.",
                f"The last result was {res}. {res} + {z} = {res + z}.",
                True,
            ),
        ]
    return out


def compare(r):
    x, y = r.sample(range(0, 100 if r.random() < 0.3 else 21), 2)
    word, other, res = (
        ("bigger", "larger", max(x, y)) if r.random() < 0.5 else ("smaller", "smaller", min(x, y))
    )
    return [
        U(pick(r, f"Which is {word}, {x} or {y}?|Which number is {other}: {x} or {y}?")),
        A(
            f"{res} is {word} than {x + y - res}.",
            f"I compare {x} and {y}. {max(x, y)} is more than {min(x, y)}.",
            True,
        ),
    ]


def repeat(r):
    banks = (OBJECTS, ADJ, ANIMALS, PLACES, COLOURS, CITIES, GIRLS, BOYS)
    n = r.randint(1, 7) if r.random() < 0.6 else r.randint(8, 30)
    odd = r.choice((0, 0.1, 0.5, 1))
    t = " ".join(
        pick(r, odd_name(r) + "|" + odd_name(r).lower())
        if r.random() < odd
        else r.choice(r.choice(banks))
        for _ in range(n)
    )
    if r.random() < 0.25:
        form = pick(r, "The {} {} is in the {}.|My {1} is {0}, not {2}.|I see a {} {} near the {}!")
        t = form.format(r.choice(ADJ), r.choice(OBJECTS + ANIMALS), r.choice(PLACES))
    return [U(pick(r, ASKS["repeat"]).format(t)), A(t, "I have to repeat the words: " + t)]


def lists(r):
    kind, n = r.choice(list(LISTS)), r.randint(2, 6)
    w = r.sample(LISTS[kind], n)
    q = pick(r, ASKS["list"]).format(n=n, w=NUMBERS[n], kind=kind)
    s = "\n".join(f"{i + 1}. {up(x)}" for i, x in enumerate(w)) if "ist" in q else up(join(w)) + "."
    return [U(loosen(r, q)), A(s, f"The user wants {NUMBERS[n]} {kind}. I will name {join(w)}.")]


def yes_no(r):
    f, yes, auto = r.randrange(6), r.random() < 0.5, False
    if f == 0:
        c = r.choice(list(CAPITALS))
        k = CAPITALS[c] if yes else r.choice([x for x in CAPITALS.values() if x != CAPITALS[c]])
        q, s = f"Is {k} the capital of {c}?", f"the capital of {c} is {CAPITALS[c]}."
    elif f == 1:
        t = r.choice(list(COLOUR_OF))
        k = COLOUR_OF[t] if yes else r.choice([x for x in COLOURS if x != COLOUR_OF[t]])
        q, s = f"Is {t} {k}?", f"{t} is {COLOUR_OF[t]}."
    elif f == 2:
        x, y = r.sample(range(21), 2)
        yes = x > y
        q, s, auto = (
            f"Is {x} bigger than {y}?",
            f"{x} is {'bigger' if yes else 'smaller'} than {y}.",
            True,
        )
    elif f == 3:
        v = r.choice(list(CAN))
        t = r.choice(
            (CAN[v] if yes else "horse cow lion elephant giraffe camel sheep goat donkey").split()
        )
        q, s = f"Can {a(t)} {v}?", f"{a(t)} {'can' if yes else 'cannot'} {v}."
    elif f == 4:
        kind = r.choice(["animals", "fruits", "colours", "vegetables", "clothes", "flowers"])
        t = r.choice(
            LISTS[
                kind
                if yes
                else r.choice(
                    [k for k in ("animals", "clothes", "toys", "drinks", "jobs") if k != kind]
                )
            ]
        )
        if kind in ("fruits", "colours", "flowers", "vegetables") and t in OBJECTS + [
            "orange",
            "violet",
            "rose",
        ]:
            t, yes = "lion", False
        one = kind[:-1] if kind != "clothes" else "piece of clothing"
        q, s = f"Is {a(t)} {a(one)}?", f"{a(t)} is {'' if yes else 'not '}{a(one)}."
    else:
        q, s, yes = r.choice(M["truths"])
    return [U(loosen(r, q)), A(f"{'Yes' if yes else 'No'}, {s}", f"I check the fact: {s}", auto)]


def refuse(r):
    x = r.random()
    if x < 0.1:
        t = odd_name(r)
        return [
            U(loosen(r, f"What is the capital of {t}?")),
            A(f"I do not know a country called {t}.", f"I do not know {t}. I will say so."),
        ]
    if x < 0.2:
        x, y, op = (
            r.randint(21, 9999),
            r.randint(21, 9999),
            r.choice("+ plus - minus * times / by".split()),
        )
        s = pick(
            r,
            "These numbers are too big for me. I can only add and subtract small numbers.|Sorry, I can only work with small numbers.",
        )
        return [
            U(loosen(r, pick(r, f"What is {x} {op} {y}?|{x} {op} {y}?|Calculate {x} {op} {y}."))),
            A(s, "These numbers are too big for me.", True),
        ]
    t = (
        r.choice(M["topics"])
        if r.random() < 0.7
        else f"the {pick(r, 'life|work|history|family')} of {odd_name(r)}"
    )
    return [
        U(loosen(r, r.choice(M["refuse_asks"]).format(t))),
        A(
            r.choice(M["refusals"]).format(t),
            "This is too hard for me. I will say politely that I do not know.",
        ),
    ]


def summary(r):
    text, m = story(r)
    h, w = m["hero"], m["helper"]
    s = (
        M["summaries"][m["plot"]]
        .replace("a {o}", a(m["obj"]))
        .format(N=h.name, k=h.kind, h=w.name, hk=w.kind, o=m["obj"])
    )
    return [
        U(pick(r, ASKS["summary"]).format(" ".join(text.split()))),
        A(s, f"The story is about {h.name}, {w.name} and {a(m['obj'])}."),
    ]


def memory(r):
    n, c, k = (
        any_name(r),
        r.choice(COLOURS),
        r.choice([x for x in ANIMALS if x not in ("dragon", "whale")]),
    )
    f = dict(
        n=n,
        c=c,
        C=up(c),
        k=k,
        ak=a(k),
        pet=any_name(r),
        city=r.choice(CITIES),
        age=r.randint(4, 60),
    )
    known = [
        [pick(r, say).format(**f), pick(r, reply).format(**f), ask.format(**f), ans.format(**f)]
        for say, reply, ask, ans in M["known"]
    ]
    told = (
        r.sample(known, r.choice((1, 1, 2, 3)))
        if r.random() < 0.5
        else [known[0]] + r.sample(known[1:], r.choice((0, 0, 1)))
    )
    out = [
        m
        for t in told
        for m in (U(loosen(r, t[0])), A(t[1], "The user tells me something. I will remember it."))
    ]
    if r.random() < 0.45:
        out += r.choice((capital, facts, small_talk, yes_no, lists, repeat))(r)[:2]
    t = r.choice(told)
    out += [U(loosen(r, pick(r, t[2]))), A(t[3], f"The user told me: {t[0]}")]
    if r.random() < 0.12:
        t = r.choice([x for x in known if x not in told])
        out += [
            U(pick(r, t[2])),
            A("You did not tell me that yet.", "The user did not tell me that."),
        ]
    return out


def reading(r):
    f = {}
    for i in ("", "2"):
        f |= {
            "w" + i: any_name(r),
            "o" + i: r.choice(OBJECTS),
            "c" + i: r.choice(COLOURS),
            "p" + i: r.choice(PLACES),
        }
        f["ac" + i] = a(f["c" + i])
    q, s = (x.format(**f) for x in r.choice(M["reading"]))
    text = "{w} has {ac} {o} and is at the {p}. {w2} has {ac2} {o2} and is at the {p2}.".format(**f)
    return [U(text + " " + q), A(s, f"I read the text: {s}")]


def as_json(r):
    n = any_name(r)
    fields = dict(
        name=n,
        age=r.randint(1, 99),
        city=r.choice(CITIES),
        colour=r.choice(COLOURS),
        animal=r.choice(ANIMALS),
        job=r.choice(LISTS["jobs"]),
        food=r.choice(LISTS["fruits"]),
    )
    phrase = dict(
        age="is {}",
        city="lives in {}",
        colour="likes {}",
        animal="has {}",
        job="works as {}",
        food="eats {}",
    )
    keys = ["name"] + r.sample(list(phrase), r.randint(1, 3))
    if r.random() < 0.2:
        fields = dict(object=r.choice(OBJECTS), count=r.randint(1, 50), place=r.choice(PLACES))
        keys = list(fields)
        q = "Give a JSON object with object, count and place: there are {count} {object}s in the {place}.".format(
            **fields
        )
    else:
        says = " and ".join(
            phrase[k].format(a(fields[k]) if k in ("animal", "job", "food") else fields[k])
            for k in keys[1:]
        )
        q = pick(r, ASKS["json"]).format(k=join(keys), n=n, s=says)
    return [
        U(q),
        A(
            json.dumps({k: fields[k] for k in keys}),
            "The user wants JSON with the keys " + join(keys) + ".",
        ),
    ]


def rhyme(r):
    t = r.choice(r.choice((OBJECTS, ANIMALS)))
    text = "\n".join(pick(r, line).format(t=t, at=a(t)) for line in M["rhyme"])
    return [
        U(loosen(r, pick(r, ASKS["poem"]).format(a(t)))),
        A(text, f"The user wants a poem about {a(t)}. I will write four short lines."),
    ]


def joke(r):
    return [
        U(loosen(r, r.choice(M["joke_asks"]))),
        A(r.choice(M["jokes"]), "The user wants a joke. I know a short one."),
    ]


def plain(r):
    "Plain sentences without chat marks, for text completion."
    if r.random() < 0.4:
        w = Who(r, r.choice(PEOPLE))
        return (
            f"Hello, my name is {w.name}. I am {a(w.adj + ' ' + w.kind)} and I live near the {r.choice(PLACES)}. I have "
            f"{a(r.choice(ADJ))} {r.choice(OBJECTS)} and {a(r.choice(ANIMALS))}. My favourite colour is {r.choice(COLOURS)}."
        )
    return " ".join(
        up(r.choice((capital, facts, facts, sums))(r)[1]["content"]) for _ in range(r.randint(3, 7))
    )


SKILLS = dict(  # how to make a chat and how often
    greet=(greet, 3),
    small_talk=(small_talk, 4),
    story=(story_chat, 20),
    capital=(capital, 6),
    facts=(facts, 8),
    sums=(sums, 10),
    compare=(compare, 2),
    repeat=(repeat, 10),
    lists=(lists, 5),
    yes_no=(yes_no, 5),
    refuse=(refuse, 4),
    summary=(summary, 4),
    memory=(memory, 11),
    reading=(reading, 8),
    json=(as_json, 8),
    rhyme=(rhyme, 3),
    joke=(joke, 1.5),
)


def chat(r, skill=None):
    "A chat of one skill, now and then with other small turns before it."
    skill = skill or r.choices(list(SKILLS), [v[1] for v in SKILLS.values()])[0]
    out = []
    while r.random() < 0.22 and len(out) < 6:
        out += SKILLS[
            r.choice(("greet", "small_talk", "capital", "facts", "sums", "yes_no", "lists"))
        ][0](r)
    out += SKILLS[skill][0](r)
    if r.random() < 0.35:
        out.insert(0, {"role": "system", "content": r.choice(M["systems"])})
    return out
