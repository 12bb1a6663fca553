"""Chat generators. A skill returns a list of messages; the last one is the assistant's answer to learn. Assistant messages may
carry "think" (short reasoning); with "auto" set the model thinks without being asked to."""

import json

from knowledge import capital, compare, facts, lists, sums, yes_no
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
from wording import (
    ASKS,
    CITIES,
    LISTS,
    THEMES,
    A,
    U,
    any_name,
    join,
    loosen,
    pick,
    up,
)


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
