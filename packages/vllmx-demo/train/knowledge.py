"""Chat generators about what is the case: capitals, facts, sums, lists, yes or no."""

from stories import (
    COLOURS,
    OBJECTS,
    M,
    a,
)
from wording import (
    ASKS,
    CAN,
    CAPITALS,
    COLOUR_OF,
    DAYS,
    LISTS,
    MONTHS,
    NUMBERS,
    OPPOSITES,
    SOUNDS,
    A,
    U,
    any_name,
    join,
    loosen,
    pick,
    up,
)


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
