"""Tasks of the corpus. Each returns a Sample, in which the pieces to learn are marked.

Conversations have the form of chat_template.jinja; a test renders both and compares.
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
"""Instructions of the chat template for tool calls."""
NO_THOUGHT = "<think>\n\n</think>\n\n"
"""Empty thought before an answer."""


@dataclass
class Sample:
    """Training sample.

    task: name of its task. pieces: (text, whether it is learned). The prompt is everything before
    the last piece.
    """

    task: str
    pieces: list[tuple[str, bool]] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)

    @property
    def prompt(self) -> str:
        """Return the text before the answer."""
        return "".join(text for text, _ in self.pieces[:-1])

    @property
    def answer(self) -> str:
        """Return the answer."""
        return self.pieces[-1][0]


class Chat:
    """Builder of a conversation in the chat template's form, message by message."""

    def __init__(
        self, task: str, system: str | None = None, tools: list[Any] | None = None
    ) -> None:
        self.sample = Sample(task, tools=tools or [])
        self.context = ""
        if tools:
            lines = "".join("\n" + json.dumps(t, ensure_ascii=False) for t in tools)
            body = "# Tools\n\nYou have access to the following functions:\n\n<tools>" + lines
            body += "\n</tools>\n\n" + INSTRUCTIONS + (f"\n\n{system}" if system else "")
            self.context = f"<|im_start|>system\n{body}<|im_end|>\n"
        elif system:
            self.context = f"<|im_start|>system\n{system}<|im_end|>\n"
        if system:
            self.sample.messages.append({"role": "system", "content": system})
        self.turns: list[tuple[str, str]] = []

    def user(self, text: str) -> "Chat":
        """Add a user's message."""
        self.turns.append(("user", text))
        self.sample.messages.append({"role": "user", "content": text})
        return self

    def tool(self, text: str) -> "Chat":
        """Add a tool's result."""
        self.turns.append(("tool", text))
        self.sample.messages.append({"role": "tool", "content": text})
        return self

    def assistant(self, text: str) -> "Chat":
        """Add an answer of the model."""
        self.turns.append(("assistant", text))
        self.sample.messages.append({"role": "assistant", "content": text})
        return self

    def call(self, *calls: Call) -> "Chat":
        """Add a message of calls."""
        self.turns.append(("assistant", calls_text(calls)))
        tool_calls = [
            {"type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments in calls
        ]
        message = {"role": "assistant", "content": "", "tool_calls": tool_calls}
        self.sample.messages.append(message)
        return self

    def done(self) -> Sample:
        """Return the sample: answers are learned, all other text is context."""
        last_query = max(i for i, (role, _) in enumerate(self.turns) if role == "user")
        for i, (role, text) in enumerate(self.turns):
            if role == "assistant":
                thought = NO_THOUGHT if i > last_query else ""
                self.context += f"<|im_start|>assistant\n{thought}"
                self.sample.pieces += [(self.context, False), (text + "<|im_end|>", True)]
                self.context = "\n"
            elif role == "tool":
                roles = [turn[0] for turn in self.turns]
                self.context += "" if roles[i - 1] == "tool" else "<|im_start|>user"
                self.context += f"\n<tool_response>\n{text}\n</tool_response>"
                self.context += "" if roles[i + 1 : i + 2] == ["tool"] else "<|im_end|>\n"
            else:
                self.context += f"<|im_start|>user\n{text}<|im_end|>\n"
        self.sample.messages.pop()
        return self.sample


def calls_text(calls: Sequence[Call]) -> str:
    """Return the calls in the model's format."""
    return "\n".join(_call_text(name, arguments) for name, arguments in calls)


def _call_text(name: str, arguments: dict[str, Any]) -> str:
    """Return one call in the model's format."""
    body = "".join(
        f"<parameter={k}>\n{v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)}\n"
        "</parameter>\n"
        for k, v in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def _value(w: Words, spec: dict[str, Any]) -> tuple[Any, str]:
    """Return a value of the parameter's type, and its phrase."""
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
    """Return a tool with a made-up name and parameters."""
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
    """Return a call of one of several functions; the question names it and all its arguments."""
    r = w.rng
    tools = [_tool(w) for _ in range(r.randint(1, 4))]
    chosen = r.choice(tools)["function"]
    specs = chosen["parameters"]["properties"]
    arguments = {}
    assignments = []
    form = r.choice(GIVES)
    for name, spec in specs.items():
        arguments[name], spoken = _value(w, spec)
        shown = name.replace("_", " ") if r.random() < 0.7 else name
        assignments.append(form.format(r.choice(("", "the ")) + shown, spoken))
    if r.random() < 0.3:
        r.shuffle(assignments)
    action = chosen["description"].lower()
    listed = (
        ", ".join(assignments[:-1])
        + (r.choice((" and ", ", ")) if assignments[1:] else "")
        + assignments[-1]
    )
    question = r.choice(ASKS).format(f"{action} {r.choice(('with', 'where', 'using'))} {listed}")
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
    """Return a call of an everyday function."""
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
"""System prompts."""


def _system(w: Words) -> str | None:
    """Return a system prompt, or None."""
    return w.rng.choice(SYSTEMS) if w.rng.random() < 0.3 else None


def _results(w: Words, chat: Chat, count: int) -> None:
    """Add a result for each call, and an answer that reports them."""
    pairs = [free_requests.result(w) for _ in range(count)]
    for result, _ in pairs:
        chat.tool(result)
    chat.assistant(" ".join(sentence for _, sentence in pairs))


def _go_on(w: Words, chat: Chat, request: free_requests.Request, turns: int) -> None:
    """Add turns with the same tools: changed values, other calls, thanks."""
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
    """Return a conversation that begins with the request."""
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
    """Return a request in free phrasing and its follow-ups."""
    return _conversation(w, "free", free_requests.single(w))


def quiz(w: Words) -> Sample:
    """Return many requests over one set of tools, which teaches to choose a tool."""
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
    """Return a request with two or three calls."""
    return _conversation(w, "several", free_requests.several(w))


def unfit(w: Words) -> Sample:
    """Return a request that no tool fits, or a question that no tool answers."""
    if w.rng.random() < 0.7:
        return _conversation(w, "unfit", free_requests.unfit(w))
    tools = free_requests.tools(w, frozenset({"search_web", "get_news"}))
    return _conversation(
        w, "unfit", free_requests.Request(tools, free_requests.spoken(w, small_talk.unknown(w)), [])
    )


def no_tool(w: Words) -> Sample:
    """Return small talk with tools, none of which is needed."""
    question, answer = _talk_turn(w)
    tools = [_tool(w) for _ in range(w.rng.randint(1, 3))]
    if w.rng.random() < 0.7:
        tools = [tool.schema for tool in free_requests.tools(w)]
    return Chat("talk", _system(w), tools).user(question).assistant(answer).done()


def without_tools(w: Words) -> Sample:
    """Return a request that needs a tool, in a conversation without tools."""
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
"""Requests of small talk and their answers."""


def _talk_turn(w: Words) -> tuple[str, str]:
    """Return a greeting or a question about the model, and the answer."""
    question, answer = small_talk.talk(w, TALK)
    return free_requests.spoken(w, question.rstrip("?")), answer


def talk(w: Words) -> Sample:
    """Return small talk without tools."""
    question, answer = _talk_turn(w)
    return Chat("talk").user(question).assistant(answer).done()


FILLER: list[list[str]] = []
"""Paragraphs of the Python installation's texts; stdlib_text.load_filler fills it."""


def filler(w: Words, characters: int) -> list[str]:
    """Return sentences with about `characters` characters in total."""
    r = w.rng
    total = 0
    out = []
    while total < characters:
        if FILLER and r.random() < 0.5:
            sentences = r.choice(FILLER)
        else:
            shape = r.choice(("The {} of the {} is {}.", "A {} {} near the {}.", "{} and {} {}."))
            sentences = [shape.format(w.noun(), w.noun(), w.noun()) for _ in range(r.randint(2, 6))]
        out += sentences
        total += sum(map(len, sentences)) + len(sentences)
    return out


SECRETS = ("secret", "secret", "secret", "password", "access code", "magic word", "passphrase")
ASK_SECRET = ("What is {}?", "What is {}?", "Tell me {}.", "Do you remember {}? What is it?")


def needle(w: Words, characters: int | None = None) -> Sample:
    """Return secrets within filler, and questions about them at the end."""
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
    questions = r.sample(subjects, 1 if w.evaluation else r.randint(1, len(subjects)))
    text = r.choice((" ", "\n")).join(lines) + "\n\n"
    chat = Chat("needle")
    for subject in questions:
        chat.user(text + r.choice(ASK_SECRET).format(f"the {subject}")).assistant(facts[subject])
        text = ""
    return chat.done()


def dialogue(w: Words) -> Sample:
    """Return a dialogue with facts, and later questions about them."""
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
    has_tools = not w.evaluation and r.random() < 0.1
    tools = [tool.schema for tool in free_requests.tools(w)] if has_tools else None
    chat = Chat("dialogue", None, tools)
    remaining = list(chosen)
    while remaining:
        keys = [remaining.pop() for _ in range(min(len(remaining), r.randint(1, 2)))]
        chat.user(" ".join(facts[k][0].format(values[k]) for k in keys)).assistant("Noted.")
    for _ in range(r.choice((0, 0, 1, 2))):
        question, answer = r.choice(TALK)
        chat.user(question).assistant(answer)
    for k in r.sample(chosen, r.randint(1, len(chosen))):
        chat.user(facts[k][1]).assistant(facts[k][2].format(values[k]))
    return chat.done()


def json_task(w: Words) -> Sample:
    """Return data in a sentence, to be written as JSON of a given schema."""
    r = w.rng
    properties = {}
    data = {}
    assignments = []
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
        assignments.append(f"{name.replace('_', ' ')}: {spoken}")
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    data_text = r.choice(("; ", "\n")).join(assignments)
    ask = f"Write JSON for this schema:\n{json.dumps(schema)}\n\n{data_text}"
    if not w.evaluation and r.random() < 0.2:
        ask = f"Return a JSON object with the keys {', '.join(properties)}:\n{data_text}"
    indent = r.random() < 0.5
    if indent:
        ask = "Use indentation. " + ask
    answer = json.dumps(data, indent=2 if indent else None)
    return Chat("json").user(ask).assistant(answer).done()


def _primes(count: int) -> list[int]:
    """Return the first prime numbers."""
    primes: list[int] = []
    n = 2
    while len(primes) < count:
        if all(n % p for p in primes if p * p <= n):
            primes.append(n)
        n += 1
    return primes


PRIMES = _primes(200)


def sequence(w: Words) -> Sample:
    """Return a number sequence with its exact rule."""
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
        shown = ", ".join(str(start + step * i) for i in range(r.randint(4, 10)))
        start = int(shown.split(", ")[-1]) + step
        numbers = [start + step * i for i in range(count)]
        ask = f"Continue the sequence with {count} more numbers: {shown}"
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
    """Return a number sequence in free phrasing."""
    ask, values = number_sequences.question(w)
    return Chat("sequence").user(ask).assistant(", ".join(map(str, values))).done()


def listing(w: Words) -> Sample:
    """Return a list task: numbered, bulleted, quoted, a table, or plain repetition."""
    r = w.rng
    items = [w.phrase(2) for _ in range(r.randint(3, 12))]
    text = ", ".join(items)
    kind = r.randrange(5)
    if kind == 0:
        ask = f"Make a numbered list of: {text}"
        answer = "\n".join(f"{i}. {x}" for i, x in enumerate(items, 1))
    elif kind == 1:
        ask = f"Make a bulleted list of: {text}"
        answer = "\n".join(f"- {x}" for x in items)
    elif kind == 2:
        ask = f"Repeat this: {text}"
        answer = text
    elif kind == 3:
        rows = [(x, r.randint(0, 99)) for x in items]
        ask = "Make a table of: " + ", ".join(f"{a} {b}" for a, b in rows)
        answer = "| name | value |\n| --- | --- |\n" + "\n".join(f"| {a} | {b} |" for a, b in rows)
    else:
        ask = f"Put each in quotes: {text}"
        answer = ", ".join(f'"{x}"' for x in items)
    return Chat("list").user(ask).assistant(answer).done()


def copying(w: Words) -> Sample:
    """Return random words to repeat, which teaches induction fastest."""
    text = " ".join(w.made_up() if w.rng.random() < 0.7 else w.code() for _ in range(
        w.rng.randint(5, 60)))  # fmt: skip
    return Chat("copy").user(f"Repeat this: {text}").assistant(text).done()


SOURCES: dict[bool, tuple[str, ...]] = {}
"""Source files for training (False) and evaluation (True); stdlib_text.load_filler fills it."""


def code(w: Words) -> Sample:
    """Return Python source to continue."""
    r = w.rng
    lines = r.choice(SOURCES[w.evaluation]).split("\n")
    at = r.randrange(max(1, len(lines) - 12))
    n = r.randint(4, 24)
    m = r.randint(4, 24)
    shown = "\n".join(lines[at : at + n])
    rest = "\n".join(lines[at + n : at + n + m]).rstrip()
    ask = r.choice(("Continue this Python code:", "Continue this code:", "Complete this code:"))
    return Chat("code").user(f"{ask}\n\n{shown}").assistant(rest.strip("\n") or "# end").done()


DEFINITIONS: list[tuple[str, str, str]] = []
"""(class or function, name, source) for training; stdlib_text.load_filler fills it."""


def write_code(w: Words) -> Sample:
    """Return a request for a Python definition."""
    kind, name, source = w.rng.choice(DEFINITIONS)
    form = w.rng.choice(("Write a Python {} {}.", "Write a Python {} for a {}.", "Write a {} {}."))
    return Chat("code").user(form.format(kind, name.strip("_"))).assistant(source).done()


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
"""Task -> (its function, its share of the bundled model's samples)."""

SHARES = {name: share for name, (_, share) in TASKS.items()}
"""Task -> share of the bundled model's samples."""
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
"""Task -> share of samples in a short training: mostly calls, and tasks that teach copying."""


def draw(
    seed: int,
    evaluation: bool = False,
    task: str | None = None,
    shares: dict[str, float] = SHARES,
    **options: Any,
) -> Sample:
    """Return the sample of a seed. task: its task; drawn by `shares` if None."""
    w = Words(random.Random(f"{seed}/{evaluation}"), evaluation)
    if task is None:
        task = w.rng.choices(list(shares), list(shares.values()))[0]
    return TASKS[task][0](w, **options)


def written(requests: Requests) -> list[tuple[Sample, list[Call]]]:
    """Return the samples of a set of handwritten requests, with their correct calls."""
    samples = []
    for tools, request, calls in requests.cases():
        chat = Chat("heldout", None, tools).user(request)
        chat = chat.call(*calls) if calls else chat.assistant(small_talk.NO_TOOL)
        samples.append((chat.done(), calls))
    return samples
