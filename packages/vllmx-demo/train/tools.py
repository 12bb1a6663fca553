"""Tool-call chats in the Hermes manner: tool lists, calls, tool answers and closing sentences."""

import json

from chats import greet, small_talk
from knowledge import capital, facts, sums, yes_no
from stories import ADJ, ANIMALS, COLOURS, OBJECTS, PLACES, M, a, odd_name
from wording import CITIES, LISTS, A, U, any_name, join, loosen, pick


# In the material a tool has a description, its parameters, ways to ask and a closing sentence. Here: arguments and answer.
def query(r):
    return dict(
        query=r.choice(
            (
                f"{r.choice(ADJ)} {r.choice(OBJECTS)}s",
                r.choice(ANIMALS) + "s",
                r.choice(M["topics"]),
                f"hotels in {r.choice(CITIES)}",
                f"the best {r.choice(OBJECTS)}",
            )
        )
    )


MAKE = dict(
    get_weather=(
        lambda r: dict(city=r.choice(CITIES)),
        lambda r, g: dict(
            temperature=r.randint(-9, 35), sky=pick(r, "sunny|cloudy|rainy|windy|snowy|foggy")
        ),
    ),
    get_time=(
        lambda r: dict(city=r.choice(CITIES)),
        lambda r, g: dict(time=f"{r.randrange(24):02}:{r.randrange(60):02}"),
    ),
    add=(
        lambda r: dict(a=r.randint(10, 999), b=r.randint(10, 999)),
        lambda r, g: dict(result=g["a"] + g["b"]),
    ),
    multiply=(
        lambda r: dict(a=r.randint(2, 99), b=r.randint(2, 99)),
        lambda r, g: dict(result=g["a"] * g["b"]),
    ),
    search=(query, lambda r, g: dict(title=f"All about {g['query']}")),
    set_timer=(lambda r: dict(minutes=r.randint(2, 90)), lambda r, g: dict(status="ok")),
    send_message=(
        lambda r: dict(to=any_name(r), text=r.choice(M["texts"])),
        lambda r, g: dict(status="sent"),
    ),
    play_music=(
        lambda r: dict(song=f"{r.choice(ADJ).capitalize()} {r.choice(OBJECTS).capitalize()}"),
        lambda r, g: dict(status="playing"),
    ),
    turn_on_light=(
        lambda r: dict(room=pick(r, "kitchen|bedroom|bathroom|hall|garage|garden|office|cellar")),
        lambda r, g: dict(status="on"),
    ),
    add_note=(lambda r: dict(text=r.choice(M["notes"])), lambda r, g: dict(status="saved")),
    translate=(
        lambda r: dict(
            text=r.choice(OBJECTS + ANIMALS + M["texts"]), language=r.choice(M["languages"])
        ),
        lambda r, g: dict(translation=any_name(r).lower()),
    ),
    get_price=(
        lambda r: dict(product=f"{a(r.choice(ADJ + COLOURS))} {r.choice(OBJECTS)}"),
        lambda r, g: dict(price=r.randint(1, 500)),
    ),
    book_table=(
        lambda r: dict(
            restaurant=f"The {r.choice(ADJ).capitalize()} {r.choice(ANIMALS).capitalize()}",
            people=r.randint(2, 12),
        ),
        lambda r, g: dict(status="booked"),
    ),
    get_stock=(
        lambda r: dict(item=r.choice(OBJECTS) + "s"),
        lambda r, g: dict(count=r.randint(0, 200)),
    ),
)
TOOLS = {k: (*M["tools"][k], *MAKE[k]) for k in M["tools"]}


def made_up(r):
    "A tool that nobody has seen before: its name and argument must be read from the list."
    verb, noun, par = (
        r.choice(M["verbs"].split()),
        r.choice(OBJECTS + PLACES),
        pick(r, "name|title|color|size|day|owner|place|city"),
    )
    if r.random() < 0.5:  # words that are no words, so that they are copied
        verb, noun, par = (
            odd_name(r).lower() if r.random() < 0.5 else x for x in (verb, noun, par)
        )
    value = dict(
        color=r.choice(COLOURS),
        size=pick(r, "small|medium|large"),
        day=r.choice(LISTS["days"]),
        place=r.choice(PLACES),
        city=r.choice(CITIES),
    ).get(par, any_name(r))
    ask = (
        f"{verb.capitalize()} the {noun} with the {par} {{{par}}}.|Please {verb} the {noun}. The {par} is {{{par}}}.|"
        f"Can you {verb} {a(noun)} for me? {par.capitalize()}: {{{par}}}"
    )
    return f"{verb}_{noun}", (
        f"{verb.capitalize()} {a(noun)}",
        {par: "string"},
        ask,
        f"Done! I used the {par} {{{par}}}.",
        lambda r: {par: value},
        lambda r, g: dict(status="done"),
    )


def schema(r, name, tool):
    more = r.random() < 0.4
    props = {
        k: {"type": t, "description": f"The {k}"} if more else {"type": t}
        for k, t in tool[1].items()
    }
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": tool[0],
            "parameters": {"type": "object", "properties": props, "required": list(props)},
        },
    }


def call(name, args):
    return (
        "<tool_call>\n"
        + json.dumps({"name": name, "arguments": args}, ensure_ascii=False)
        + "\n</tool_call>"
    )


def tool_chat(r, only_call=None):
    """Returns messages and tools. The last message is a call (only_call True), the sentence after the tool's answer
    (False), or one of these, an ordinary answer or a regret that no tool fits (None)."""
    have = dict(r.sample(list(TOOLS.items()), r.choice((1, 1, 2, 2, 3, 4))))
    have.update(made_up(r) for _ in range(r.choice((0, 1, 1, 2))))
    names, out = list(have), []
    r.shuffle(names)
    tools = [schema(r, n, have[n]) for n in names]
    if only_call is None and r.random() < 0.3:
        out.append({"role": "system", "content": "You are a helpful assistant."})
    if only_call is None and r.random() < 0.2:
        out += r.choice(
            [greet, small_talk, facts, capital, yes_no] + ([] if "add" in have else [sums])
        )(r)
        if r.random() < 0.6:
            return out, tools
    name = r.choice(names)
    if only_call is None and r.random() < 0.08:
        other = TOOLS[r.choice([n for n in TOOLS if n not in have])]
        ask = loosen(r, pick(r, other[2])).format(**other[4](r))
        sorry = pick(
            r,
            "I am sorry, I have no tool for that.|Sorry, I have no tool for that. I am a tiny demo model.",
        )
        return out + [U(ask), A(sorry, "None of my tools fits. I will say so.")], tools
    _, _, asks, close, make, reply = have[name]
    runs = [make(r)]
    ask = loosen(r, pick(r, asks)).format(**runs[0])
    if name in ("get_weather", "get_time") and r.random() < 0.15:  # two calls in one turn
        runs = [dict(city=c) for c in r.sample(CITIES, 2)]
        ask = f"What is the {name[4:]} in {runs[0]['city']} and {runs[1]['city']}?"
    think = (
        f"The tool {name} fits. I call it with "
        + join([f"{k} {v}" for g in runs for k, v in g.items()])
        + "."
    )
    calls = [{"type": "function", "function": {"name": name, "arguments": g}} for g in runs]
    out += [U(ask), dict(A("\n".join(call(name, g) for g in runs), think), tool_calls=calls)]
    if only_call or (only_call is None and r.random() < 0.6):
        return out, tools
    answers = [dict(reply(r, g)) for g in runs]
    out += [{"role": "tool", "content": json.dumps(x)} for x in answers]
    end = " ".join(close.format(**dict(g, **x)) for g, x in zip(runs, answers))
    return out + [A(end, "The tool has answered. I tell the user the result.")], tools
