"""Word lists (material.json) and the story generator: tales put together from plots, beats and variants."""

import json
import os

with open(
    os.path.join(os.path.dirname(os.path.abspath(__file__)), "material.json"), encoding="utf-8"
) as f:
    M = json.load(f)
GIRLS, BOYS, PEOPLE, OBJECTS, PLACES, ADJ, COLOURS = (
    M[k].split() for k in ("girls", "boys", "people", "objects", "places", "adjectives", "colours")
)
ANIMALS = list(M["sounds"]) + M["animals"].split()
SYLLABLES, ENDS = M["syllables"].split(), "n l r s x m th k".split() + [""] * 6
ONSETS = "b br c ch cl d dr f fl g gr h j k l m n p ph pl r s sh sl st t th tr v w y z".split()
NO_HELP = (
    "found",
    "gift",
    "race",
    "share",
    "wish",
)  # plots where the second character is not the helper


def odd_name(r):
    "A made-up name, so that names must be copied and not only known."
    if r.random() < 0.5:
        parts = (
            r.choice(ONSETS) + r.choice("a e i o u ai ea ee ie oo ou".split())
            for _ in range(r.choice((1, 2, 2, 3)))
        )
        return (
            "".join(parts) + r.choice("n l r s x m th k rt nd ck ll tt ng d t".split())
        ).capitalize()
    return (
        "".join(r.choice(SYLLABLES) for _ in range(r.choice((2, 2, 3)))) + r.choice(ENDS)
    ).capitalize()


def a(words):
    return ("an " if words[0] in "aeiou" else "a ") + words


class Who:
    "A character with a kind, a name and fitting pronouns."

    def __init__(self, r, kind=None, name=None, avoid=()):
        self.kind = kind or r.choice(ANIMALS * 2 + PEOPLE)
        girl = self.kind in ("girl", "queen", "princess") or (
            self.kind not in ("boy", "king", "prince", "fisherman") and r.random() < 0.5
        )
        if name:
            girl = name in GIRLS or (name not in BOYS and girl)
        self.name = name or r.choice([n for n in (GIRLS if girl else BOYS) if n not in avoid])
        self.adj = r.choice(M["kind_adjectives"].split())
        self.p = ("she", "her", "her") if girl else ("he", "him", "his")

    def slots(self, pre):
        he, him, his = self.p
        return {
            pre + k: v
            for k, v in dict(
                N=self.name,
                k=self.kind,
                ak=a(f"{self.adj} {self.kind}"),
                he=he,
                him=him,
                his=his,
                He=he.capitalize(),
                His=his.capitalize(),
            ).items()
        }


def story(r, hero=None, obj=None, place=None, helper=None, name=None, plot=None):
    """One story; gives the text and what is needed to ask about it. In the material N, he, him, his belong to the hero,
    hN, hhe ... to the second character, o and ao are the object, p and q two places."""
    w = Who(r, hero, name)
    h = Who(r, helper or r.choice([x for x in ANIMALS + PEOPLE if x != w.kind]), avoid=(w.name,))
    o = obj or r.choice(OBJECTS)
    p = place or r.choice(PLACES)
    q = r.choice([x for x in PLACES if x != p])
    slots = dict(
        w.slots(""),
        **h.slots("h"),
        o=o,
        p=p,
        q=q,
        ao=a(f"{r.choice(ADJ)} {o}"),
        ao2=a(o),
        him2=h.p[1],
    )
    plot = plot or r.choice(list(M["plots"]))
    beats, out = M["beats"], [r.choice(M["beats"]["OPEN"])]
    if r.random() < 0.6:
        out.append(r.choice(beats["DAY"]))
    for beat in M["plots"][plot]:
        line = r.choice(beat)
        out.append(r.choice(beats[line]) if line in beats else line)
    out += r.sample(beats["END"], r.choice((1, 1, 2)))
    if r.random() < 0.5:
        out.append(r.choice(beats["MORAL"]))
    text = [x.format(**slots) for x in out]
    cuts = sorted(r.sample(range(2, len(text) - 1), 2)) if r.random() < 0.6 else []
    paras = [" ".join(text[i:j]) for i, j in zip([0] + cuts, cuts + [len(text)])]
    return r.choice(("\n\n", "\n\n", "\n")).join(paras), dict(
        hero=w,
        helper=h,
        obj=o,
        place=p,
        plot=plot,
        title=f"The {w.kind.capitalize()} and the {o.capitalize()}",
    )
