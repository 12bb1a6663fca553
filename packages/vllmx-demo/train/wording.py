"""The words and turns of phrase that chat generators share."""

from stories import (
    ANIMALS,
    BOYS,
    COLOURS,
    GIRLS,
    M,
    odd_name,
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
