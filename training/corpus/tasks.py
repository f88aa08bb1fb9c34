"""The tasks. Each gives a Sample: pieces of text and whether they are the model's to learn.

Conversations are written in the form of chat_template.jinja; a test renders both and compares.
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from training.corpus import free_requests, number_sequences, small_talk
from training.corpus.everyday_tools import question_and_call
from training.corpus.words import VERBS, Words
from training.evaluation_sets.request_set import Call, Requests

INSTRUCTIONS = (
    "If you choose to call a function ONLY reply in the following format with NO suffix:\n\n"
    "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n"
    "</parameter>\n</function>\n</tool_call>"
)
NO_THOUGHT = "<think>\n\n</think>\n\n"


@dataclass
class Sample:
    """task: its name. pieces: (text, learned). The prompt is all before the last learned piece."""

    task: str
    pieces: list[tuple[str, bool]] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)

    @property
    def prompt(self) -> str:
        """What is given."""
        return "".join(text for text, _ in self.pieces[:-1])

    @property
    def answer(self) -> str:
        """What is to come."""
        return self.pieces[-1][0]


class Chat:
    """Builds a conversation, message by message, in template form."""

    def __init__(
        self, task: str, system: str | None = None, tools: list[Any] | None = None
    ) -> None:
        self.sample = Sample(task, tools=tools or [])
        self.given = ""
        if tools:
            lines = "".join("\n" + json.dumps(t, ensure_ascii=False) for t in tools)
            body = "# Tools\n\nYou have access to the following functions:\n\n<tools>" + lines
            body += "\n</tools>\n\n" + INSTRUCTIONS + (f"\n\n{system}" if system else "")
            self.given = f"<|im_start|>system\n{body}<|im_end|>\n"
        elif system:
            self.given = f"<|im_start|>system\n{system}<|im_end|>\n"
        if system:
            self.sample.messages.append({"role": "system", "content": system})
        self.turns: list[tuple[str, str]] = []

    def user(self, text: str) -> "Chat":
        """A user's message."""
        self.turns.append(("user", text))
        self.sample.messages.append({"role": "user", "content": text})
        return self

    def tool(self, text: str) -> "Chat":
        """A tool's result."""
        self.turns.append(("tool", text))
        self.sample.messages.append({"role": "tool", "content": text})
        return self

    def assistant(self, text: str) -> "Chat":
        """The model's answer."""
        self.turns.append(("assistant", text))
        self.sample.messages.append({"role": "assistant", "content": text})
        return self

    def call(self, *calls: Call) -> "Chat":
        """The model's call, or calls."""
        self.turns.append(("assistant", calls_text(calls)))
        made = [
            {"type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments in calls
        ]
        message = {"role": "assistant", "content": "", "tool_calls": made}
        self.sample.messages.append(message)
        return self

    def done(self) -> Sample:
        """The sample: answers are learned, the rest is given."""
        last_query = max(i for i, (role, _) in enumerate(self.turns) if role == "user")
        for i, (role, text) in enumerate(self.turns):
            if role == "assistant":
                thought = NO_THOUGHT if i > last_query else ""
                self.given += f"<|im_start|>assistant\n{thought}"
                self.sample.pieces += [(self.given, False), (text + "<|im_end|>", True)]
                self.given = "\n"
            elif role == "tool":
                roles = [turn[0] for turn in self.turns]
                self.given += "" if roles[i - 1] == "tool" else "<|im_start|>user"
                self.given += f"\n<tool_response>\n{text}\n</tool_response>"
                self.given += "" if roles[i + 1 : i + 2] == ["tool"] else "<|im_end|>\n"
            else:
                self.given += f"<|im_start|>user\n{text}<|im_end|>\n"
        self.sample.messages.pop()
        return self.sample


def calls_text(calls: Sequence[Call]) -> str:
    """Calls in the model's grammar."""
    return "\n".join(_call_text(name, arguments) for name, arguments in calls)


def _call_text(name: str, arguments: dict[str, Any]) -> str:
    body = "".join(
        f"<parameter={k}>\n{v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)}\n"
        "</parameter>\n"
        for k, v in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def _value(w: Words, spec: dict[str, Any]) -> tuple[Any, str]:
    """A value of the parameter's type, and how a user says it."""
    r = w.rng
    if "enum" in spec:
        value = r.choice(spec["enum"])
        return value, value
    kind = spec["type"]
    if kind == "integer":
        number = r.randint(0, r.choice((9, 99, 999, 99999)))
        return number, str(number)
    if kind == "number":
        decimal = round(r.uniform(0, r.choice((1, 10, 1000))), r.randint(1, 2))
        return decimal, str(decimal)
    if kind == "boolean":
        flag = r.random() < 0.5
        return flag, r.choice(("true", "yes", "on") if flag else ("false", "no", "off"))
    text = r.choice((w.phrase, w.phrase, w.name, w.code))()
    return text, r.choice((text, f'"{text}"', f"'{text}'"))


def _tool(w: Words) -> dict[str, Any]:
    r = w.rng
    verb = r.choice(VERBS)
    noun = w.identifier(r.randint(1, 2))
    properties: dict[str, Any] = {}
    for _ in range(r.randint(1, 4)):
        kind = r.choices(("string", "integer", "number", "boolean", "enum"), (5, 3, 1, 2, 2))[0]
        name = w.identifier(r.choice((1, 1, 2)))
        if kind == "enum":
            properties[name] = {"type": "string", "enum": [w.noun() for _ in range(3)]}
        else:
            properties[name] = {"type": kind}
        if r.random() < 0.4:
            properties[name]["description"] = f"The {name.replace('_', ' ')}"
    about = f"{verb.capitalize()} the {noun.replace('_', ' ')}"
    return {
        "type": "function",
        "function": {
            "name": f"{verb}_{noun}",
            "description": about,
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": list(properties),
            },
        },
    }


ASKS = ("Please {}", "{}", "Can you {}", "I need you to {}", "Could you {}", "Now {}", "Hey, {}")
GIVES = ("{} {}", "{} is {}", "{}: {}", "{} = {}", "{} set to {}", "{} of {}")


def tool_call(w: Words) -> Sample:
    """Several functions; the question names one of them and all its arguments."""
    r = w.rng
    tools = [_tool(w) for _ in range(r.randint(1, 4))]
    chosen = r.choice(tools)["function"]
    specs = chosen["parameters"]["properties"]
    arguments = {}
    said = []
    form = r.choice(GIVES)
    for name, spec in specs.items():
        arguments[name], spoken = _value(w, spec)
        shown = name.replace("_", " ") if r.random() < 0.7 else name
        said.append(form.format(r.choice(("", "the ")) + shown, spoken))
    if r.random() < 0.3:
        r.shuffle(said)
    what = chosen["description"].lower()
    listed = ", ".join(said[:-1]) + (r.choice((" and ", ", ")) if said[1:] else "") + said[-1]
    question = r.choice(ASKS).format(f"{what} {r.choice(('with', 'where', 'using'))} {listed}")
    question = question[0].upper() + question[1:] + r.choice((".", "", "?"))
    system = r.choice((None, None, "You are a helpful assistant."))
    chat = Chat("tools", system, tools).user(question)
    chat.call((chosen["name"], arguments))
    if r.random() < 0.25:
        result = {w.identifier(1): w.phrase(2)}
        key, value = next(iter(result.items()))
        chat.tool(json.dumps(result))
        chat.assistant(f"The {key.replace('_', ' ')} is {value}.")
        if w.evaluation:
            return tool_call(w)
    return chat.done()


def daily(w: Words) -> Sample:
    """A few everyday functions and a question as people ask it."""
    tools, question, name, arguments = question_and_call(w)
    system = w.rng.choice((None, None, "You are a helpful assistant."))
    chat = Chat("daily", system, tools).user(question)
    return chat.call((name, arguments)).done()


SYSTEMS = (
    "You are a helpful assistant.", "You are a helpful assistant.",
    "You are an assistant with tools.",
    "Answer briefly.", "You are a friendly assistant. Use the tools where they fit.", "Be concise.",
    "You are a travel agent.", "You help the people of a small company.", "Today is Monday.",
    "You are a voice assistant in a home.", "Use tools when needed.", "You are a bot.",
    "You may call functions to help the user.", "Do not make up values for arguments.",
    "The user's name is Robin.", "You are connected to several services.", "Always be polite.",
)  # fmt: skip


def _system(w: Words) -> str | None:
    return w.rng.choice(SYSTEMS) if w.rng.random() < 0.3 else None


def _results(w: Words, chat: Chat, count: int) -> None:
    """A result for each call, and what they say in words."""
    pairs = [free_requests.result(w) for _ in range(count)]
    for given, _ in pairs:
        chat.tool(given)
    chat.assistant(" ".join(said for _, said in pairs))


def _go_on(w: Words, chat: Chat, request: free_requests.Request, turns: int) -> None:
    """More turns with the same tools: small changes, other calls, thanks."""
    r = w.rng
    for _ in range(turns):
        chance = r.random()
        follow = free_requests.follow_up(w, request) if chance < 0.5 else None
        if follow:
            text, call = follow
            chat.user(text).call(call)
            request.calls = [call]
        elif chance < 0.75 and any(tool.intent.frames for tool in request.tools):
            request = free_requests.single(w, request.tools)
            chat.user(request.text).call(*request.calls)
        else:
            question, answer = _talk_turn(w)
            chat.user(question).assistant(answer)
            continue
        if r.random() < 0.8:
            _results(w, chat, 1)
        else:
            return


def _conversation(w: Words, task: str, request: free_requests.Request) -> Sample:
    r = w.rng
    chat = Chat(task, _system(w), [tool.schema for tool in request.tools]).user(request.text)
    if request.calls:
        chat.call(*request.calls)
        if r.random() < 0.5:
            return chat.done()
        _results(w, chat, len(request.calls))
    else:
        chat.assistant(small_talk.NO_TOOL)
    if r.random() < 0.6:
        _go_on(w, chat, request, r.choice((1, 1, 2, 3)))
    return chat.done()


def free_call(w: Words) -> Sample:
    """A request in free phrasing, and what follows."""
    return _conversation(w, "free", free_requests.single(w))


def quiz(w: Words) -> Sample:
    """One set of tools, many requests: what teaches to choose."""
    r = w.rng
    tools = free_requests.rivals(w)
    chat = Chat("quiz", _system(w), [tool.schema for tool in tools])
    for _ in range(r.randint(3, 8)):
        chance = r.random()
        if chance < 0.7:
            request = free_requests.single(w, tools)
            chat.user(request.text).call(*request.calls)
            if r.random() < 0.75:
                chat.tool('{"status": "ok"}').assistant("Done.")
            else:
                _results(w, chat, 1)
        elif chance < 0.93:
            chat.user(free_requests.foreign(w, tools)).assistant(small_talk.NO_TOOL)
        else:
            question, answer = _talk_turn(w)
            chat.user(question).assistant(answer)
    return chat.done()


def several_calls(w: Words) -> Sample:
    """A request of two or three calls."""
    return _conversation(w, "several", free_requests.several(w))


def unfit(w: Words) -> Sample:
    """A request that none of the tools is for, or a question that no tool answers."""
    if w.rng.random() < 0.7:
        return _conversation(w, "unfit", free_requests.unfit(w))
    tools = free_requests.tools(w, frozenset({"search_web", "get_news"}))
    return _conversation(
        w, "unfit", free_requests.Request(tools, free_requests.spoken(w, small_talk.unknown(w)), [])
    )


def no_tool(w: Words) -> Sample:
    """Tools are there, and none is needed."""
    question, answer = _talk_turn(w)
    tools = [_tool(w) for _ in range(w.rng.randint(1, 3))]
    if w.rng.random() < 0.7:
        tools = [tool.schema for tool in free_requests.tools(w)]
    return Chat("talk", _system(w), tools).user(question).assistant(answer).done()


def without_tools(w: Words) -> Sample:
    """What would need a tool, and there is none."""
    text = small_talk.unknown(w)
    text = free_requests.spoken(w, text) if w.rng.random() < 0.4 else free_requests.single(w).text
    return Chat("talk").user(text).assistant(small_talk.NEEDS_TOOL).done()


TALK = (
    ("Hi", "Hello! How can I help you?"),
    ("Hello", "Hello! How can I help you?"),
    ("Hey there", "Hello! How can I help you?"),
    ("Good morning", "Good morning! How can I help you?"),
    ("Thanks", "You are welcome!"),
    ("Thank you very much", "You are welcome!"),
    ("Bye", "Goodbye!"),
    ("How are you?", "I am fine, thank you. How can I help you?"),
    ("Who are you?", "I am the small model that comes with Lockstep."),
    ("What are you?", "I am a small language model that comes with Lockstep."),
    ("What is your name?", "I have no name. I am the small model that comes with Lockstep."),
    (
        "What can you do?",
        "I can call tools, find facts in long texts, remember what you told me, write JSON, number "
        "sequences, lists and a little Python.",
    ),
    ("Help", "I can call tools, find facts in long texts, write JSON, lists and a little Python."),
)


def _talk_turn(w: Words) -> tuple[str, str]:
    """A greeting or a question about the model."""
    question, answer = small_talk.talk(w, TALK)
    return free_requests.spoken(w, question.rstrip("?")), answer


def talk(w: Words) -> Sample:
    """Small talk alone."""
    question, answer = _talk_turn(w)
    return Chat("talk").user(question).assistant(answer).done()


FILLER: list[list[str]] = []
"""Paragraphs of the Python installation's texts; filled by training.text."""


def filler(w: Words, characters: int) -> list[str]:
    """Sentences of about this many characters in all."""
    r = w.rng
    total = 0
    out = []
    while total < characters:
        if FILLER and r.random() < 0.5:
            some = r.choice(FILLER)
        else:
            shape = r.choice(("The {} of the {} is {}.", "A {} {} near the {}.", "{} and {} {}."))
            some = [shape.format(w.noun(), w.noun(), w.noun()) for _ in range(r.randint(2, 6))]
        out += some
        total += sum(map(len, some)) + len(some)
    return out


SECRETS = ("secret", "secret", "secret", "password", "access code", "magic word", "passphrase")
ASK_SECRET = ("What is {}?", "What is {}?", "Tell me {}.", "Do you remember {}? What is it?")


def needle(w: Words, characters: int | None = None) -> Sample:
    """Secrets somewhere in filler, asked for at the end."""
    r = w.rng
    size = characters or int(100 * 2 ** r.uniform(0, 7.8))
    lines = filler(w, size)
    subjects = [r.choice(SECRETS)] if r.random() < 0.5 else []
    count = r.randint(1, 2) if w.evaluation else r.choice((1, 1, 2, 3, 4, 6))
    while len(subjects) < count:
        subjects.append(f"{r.choice(SECRETS)} of {w.made_up()}")
    subjects = list(dict.fromkeys(subjects))
    facts = {s: f"The {s} is {w.secret()}." for s in subjects}
    for fact in facts.values():
        lines.insert(r.randint(0, len(lines)), fact)
    asked = r.sample(subjects, 1 if w.evaluation else r.randint(1, len(subjects)))
    text = r.choice((" ", "\n")).join(lines) + "\n\n"
    chat = Chat("needle")
    for subject in asked:
        chat.user(text + r.choice(ASK_SECRET).format(f"the {subject}")).assistant(facts[subject])
        text = ""
    return chat.done()


def dialogue(w: Words) -> Sample:
    """Facts given early, asked for later."""
    r = w.rng
    facts = {
        "name": ("My name is {}.", "What is my name?", "Your name is {}."),
        "city": ("I live in {}.", "Where do I live?", "You live in {}."),
        "pet": ("My pet is called {}.", "What is my pet called?", "Your pet is called {}."),
        "job": ("I work at {}.", "Where do I work?", "You work at {}."),
        "color": ("My favorite word is {}.", "What is my favorite word?",
                  "Your favorite word is {}."),
        "code": ("My locker code is {}.", "What is my locker code?", "Your locker code is {}."),
        "friend": ("My best friend is {}.", "Who is my best friend?", "Your best friend is {}."),
    }  # fmt: skip
    chosen = r.sample(list(facts), r.randint(1, 4))
    values = {k: w.code() if k == "code" else w.name() for k in chosen}
    offered = not w.evaluation and r.random() < 0.1
    tools = [tool.schema for tool in free_requests.tools(w)] if offered else None
    chat = Chat("dialogue", None, tools)
    rest = list(chosen)
    while rest:
        now = [rest.pop() for _ in range(min(len(rest), r.randint(1, 2)))]
        chat.user(" ".join(facts[k][0].format(values[k]) for k in now)).assistant("Noted.")
    for _ in range(r.choice((0, 0, 1, 2))):
        question, answer = r.choice(TALK)
        chat.user(question).assistant(answer)
    for k in r.sample(chosen, r.randint(1, len(chosen))):
        chat.user(facts[k][1]).assistant(facts[k][2].format(values[k]))
    return chat.done()


def json_task(w: Words) -> Sample:
    """Data said in a sentence, to be written as JSON of a given schema."""
    r = w.rng
    properties = {}
    data = {}
    said = []
    for _ in range(r.randint(2, 6)):
        name = w.identifier(r.choice((1, 1, 2)))
        kind = r.choice(("string", "integer", "number", "boolean", "array"))
        properties[name] = {"type": kind}
        if kind == "array":
            properties[name]["items"] = {"type": "string"}
            data[name] = [w.noun() for _ in range(r.randint(2, 4))]
            spoken = ", ".join(data[name])
        else:
            data[name], spoken = _value(w, {"type": kind})
        said.append(f"{name.replace('_', ' ')}: {spoken}")
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    given = r.choice(("; ", "\n")).join(said)
    ask = f"Write JSON for this schema:\n{json.dumps(schema)}\n\n{given}"
    if not w.evaluation and r.random() < 0.2:
        ask = f"Return a JSON object with the keys {', '.join(properties)}:\n{given}"
    indent = r.random() < 0.5
    if indent:
        ask = "Use indentation. " + ask
    answer = json.dumps(data, indent=2 if indent else None)
    return Chat("json").user(ask).assistant(answer).done()


def _primes(count: int) -> list[int]:
    found: list[int] = []
    n = 2
    while len(found) < count:
        if all(n % p for p in found if p * p <= n):
            found.append(n)
        n += 1
    return found


PRIMES = _primes(200)


def sequence(w: Words) -> Sample:
    """Number sequences."""
    r = w.rng
    count = r.randint(5, 60)
    kind = r.randrange(6) if w.evaluation else r.choice((0, 1, 1, 1, 2, 3, 3, 4, 5, 5, 5))
    if kind == 0:
        count = r.choice((count, 100, 200))
        ask = f"List the first {count} primes."
        numbers = PRIMES[:count]
    elif kind == 1:
        start = r.randint(0, 100)
        step = r.randint(1, 12)
        numbers = [start + step * i for i in range(count)]
        ask = f"Count from {start} in steps of {step}, {count} numbers."
    elif kind == 2:
        ask = f"List the first {count} squares."
        numbers = [i * i for i in range(1, count + 1)]
    elif kind == 5:
        count = min(count, 30)
        start = r.randint(0, 60)
        step = r.randint(1, 12)
        given = ", ".join(str(start + step * i) for i in range(r.randint(4, 10)))
        start = int(given.split(", ")[-1]) + step
        numbers = [start + step * i for i in range(count)]
        ask = f"Continue the sequence with {count} more numbers: {given}"
    elif kind == 3:
        start = r.randint(count, 300)
        numbers = [start - i for i in range(count)]
        ask = f"Count down from {start}, {count} numbers."
    else:
        count = min(count, 20)
        ask = f"List the first {count} powers of two."
        numbers = [2**i for i in range(count)]
    return Chat("sequence").user(ask).assistant(", ".join(map(str, numbers))).done()


def free_sequence(w: Words) -> Sample:
    """Number sequences in free phrasing."""
    ask, found = number_sequences.question(w)
    return Chat("sequence").user(ask).assistant(", ".join(map(str, found))).done()


def listing(w: Words) -> Sample:
    """Structured lists: numbered, bulleted, sorted, reversed, tables; and plain repetition."""
    r = w.rng
    items = [w.phrase(2) for _ in range(r.randint(3, 12))]
    given = ", ".join(items)
    kind = r.randrange(5)
    if kind == 0:
        ask = f"Make a numbered list of: {given}"
        answer = "\n".join(f"{i}. {x}" for i, x in enumerate(items, 1))
    elif kind == 1:
        ask = f"Make a bulleted list of: {given}"
        answer = "\n".join(f"- {x}" for x in items)
    elif kind == 2:
        ask = f"Repeat this: {given}"
        answer = given
    elif kind == 3:
        rows = [(x, r.randint(0, 99)) for x in items]
        ask = "Make a table of: " + ", ".join(f"{a} {b}" for a, b in rows)
        answer = "| name | value |\n| --- | --- |\n" + "\n".join(f"| {a} | {b} |" for a, b in rows)
    else:
        ask = f"Put each in quotes: {given}"
        answer = ", ".join(f'"{x}"' for x in items)
    return Chat("list").user(ask).assistant(answer).done()


def copying(w: Words) -> Sample:
    """Random words, twice: what teaches induction soonest."""
    text = " ".join(w.made_up() if w.rng.random() < 0.7 else w.code() for _ in range(
        w.rng.randint(5, 60)))  # fmt: skip
    return Chat("copy").user(f"Repeat this: {text}").assistant(text).done()


SOURCES: dict[bool, tuple[str, ...]] = {}
"""Source files for training (False) and evaluation (True); filled by training.text."""


def code(w: Words) -> Sample:
    """Python source to be continued."""
    r = w.rng
    lines = r.choice(SOURCES[w.evaluation]).split("\n")
    at = r.randrange(max(1, len(lines) - 12))
    n = r.randint(4, 24)
    m = r.randint(4, 24)
    given = "\n".join(lines[at : at + n])
    rest = "\n".join(lines[at + n : at + n + m]).rstrip()
    ask = r.choice(("Continue this Python code:", "Continue this code:", "Complete this code:"))
    return Chat("code").user(f"{ask}\n\n{given}").assistant(rest.strip("\n") or "# end").done()


DEFINITIONS: list[tuple[str, str, str]] = []
"""(class or function, name, source) of the training side; filled by training.text."""


def write_code(w: Words) -> Sample:
    """Python source to be written."""
    kind, name, source = w.rng.choice(DEFINITIONS)
    asked = w.rng.choice(("Write a Python {} {}.", "Write a Python {} for a {}.", "Write a {} {}."))
    return Chat("code").user(asked.format(kind, name.strip("_"))).assistant(source).done()


TASKS: dict[str, tuple[Callable[[Words], Sample], float]] = {
    "tools": (tool_call, 0.08),
    "daily": (daily, 0.02),
    "free": (free_call, 0.15),
    "quiz": (quiz, 0.37),
    "several": (several_calls, 0.09),
    "unfit": (unfit, 0.07),
    "code": (code, 0.02),
    "write_code": (write_code, 0.01),
    "no_tool": (no_tool, 0.02),
    "without_tools": (without_tools, 0.01),
    "talk": (talk, 0.01),
    "needle": (needle, 0.03),
    "dialogue": (dialogue, 0.03),
    "json": (json_task, 0.08),
    "sequence": (sequence, 0.07),
    "free_sequence": (free_sequence, 0.02),
    "list": (listing, 0.05),
    "copy": (copying, 0.03),
}

SHARES = {name: share for name, (_, share) in TASKS.items()}
"""How often each is drawn."""
CALLS = {
    "tools": 0.25,
    "daily": 0.10,
    "free": 0.12,
    "quiz": 0.22,
    "several": 0.05,
    "unfit": 0.04,
    "no_tool": 0.02,
    "without_tools": 0.01,
    "talk": 0.01,
    "needle": 0.06,
    "dialogue": 0.03,
    "json": 0.04,
    "list": 0.02,
    "copy": 0.03,
}
"""The same for a short training: mostly calls, and where copying is learned."""


def draw(
    seed: int,
    evaluation: bool = False,
    task: str | None = None,
    shares: dict[str, float] = SHARES,
    **options: Any,
) -> Sample:
    """The sample of this seed: of this task, or of one that is drawn by its share."""
    w = Words(random.Random(f"{seed}/{evaluation}"), evaluation)
    if task is None:
        task = w.rng.choices(list(shares), list(shares.values()))[0]
    return TASKS[task][0](w, **options)


def written(requests: Requests) -> list[tuple[Sample, list[Call]]]:
    """The requests of a set written by hand, and the calls that are right."""
    found = []
    for tools, request, calls in requests.cases():
        chat = Chat("heldout", None, tools).user(request)
        chat = chat.call(*calls) if calls else chat.assistant(small_talk.NO_TOOL)
        found.append((chat.done(), calls))
    return found
