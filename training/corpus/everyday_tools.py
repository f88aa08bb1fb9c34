"""Everyday functions with questions that name no parameter."""

from typing import Any

from training.corpus.words import Words

CITIES = (
    "Lisbon Oslo Paris Tokyo Madrid Berlin Rome Cairo Lima Dublin Vienna Prague Athens Porto Milan "
    "Boston Chicago Seattle Toronto Sydney Mumbai Seoul Zurich Geneva Warsaw Kyoto Osaka Denver"
).split()
PEOPLE = "Alice Bob Carol David Emma Frank Grace Henry Julia Kevin Laura Maria Nina Oscar".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday today tomorrow".split()
NUMBERS = "two three four five six seven eight nine ten".split()

Spec = tuple[str, str, dict[str, str], tuple[str, ...]]
TABLE: tuple[Spec, ...] = (
    ("get_weather", "Weather of a city.", {"city": "city"},
     ("What is the weather in {city}?", "How is the weather in {city}?", "Weather in {city}",
      "What's the weather like in {city} today?")),
    ("get_weather", "Get the current weather.", {"location": "city", "unit": "unit"},
     ("What is the weather in {location}? Answer in degrees {unit}.",
      "What is the weather in {location} in {unit}?")),
    ("get_time", "The local time of a city.", {"city": "city"},
     ("What time is it in {city}?", "Tell me the time in {city}.")),
    ("send_email", "Sends an email.", {"recipient": "person", "subject": "phrase"},
     ("Send an email to {recipient} about {subject}.", "Write {recipient} a mail on {subject}.")),
    ("send_message", "Sends a message.", {"to": "person", "text": "phrase"},
     ("Tell {to}: {text}", 'Send "{text}" to {to}.', "Message {to} saying {text}.")),
    ("book_table", "Books a table.", {"restaurant": "place", "day": "day", "guests": "count"},
     ("Book a table at {restaurant} on {day} for {guests} guests.",
      "A table for {guests} at {restaurant} on {day}, please.")),
    ("search_files", "Finds files by name.", {"pattern": "word", "folder": "word"},
     ("Find all files named {pattern} in the folder {folder}.",
      "Search {folder} for files called {pattern}.")),
    ("search_web", "Searches the web.", {"query": "phrase"},
     ("Search the web for {query}.", "Look up {query}.", "Find information about {query}.")),
    ("set_timer", "Sets a timer.", {"minutes": "integer"},
     ("Set a timer for {minutes} minutes.", "Wake me in {minutes} minutes.")),
    ("add_numbers", "Adds two numbers.", {"a": "integer", "b": "integer"},
     ("What is {a} plus {b}?", "Add {a} and {b}.", "Compute {a} + {b}.")),
    ("get_stock_price", "The price of a stock.", {"symbol": "symbol"},
     ("What is the price of {symbol}?", "How much is one share of {symbol}?")),
    ("play_music", "Plays music.", {"artist": "place"},
     ("Play something by {artist}.", "Play music by {artist}")),
    ("create_event", "Adds an event to the calendar.", {"title": "phrase", "day": "day"},
     ("Add {title} to my calendar on {day}.", "Put {title} in my calendar for {day}.")),
    ("book_flight", "Books a flight.", {"origin": "city", "destination": "city", "day": "day"},
     ("Book a flight from {origin} to {destination} on {day}.",
      "I want to fly from {origin} to {destination} on {day}.")),
    ("translate", "Translates a text.", {"text": "phrase", "language": "language"},
     ("Translate {text} to {language}.", 'Translate "{text}" into {language}.')),
    ("turn_on_light", "Turns a light on.", {"room": "word"},
     ("Turn on the light in the {room}.", "Light on in the {room}, please.")),
)  # fmt: skip
"""Rows of (name, description, kind of each parameter's values, questions)."""


def _draw(w: Words, kind: str) -> Any:
    """Return a random value of a kind."""
    r = w.rng
    match kind:
        case "city":
            return r.choice(CITIES) if r.random() < 0.4 else w.name()
        case "person":
            return r.choice(PEOPLE) if r.random() < 0.4 else w.name()
        case "day":
            return r.choice(DAYS)
        case "unit":
            return r.choice(("C", "F", "celsius", "fahrenheit"))
        case "language":
            return r.choice(("French", "German", "Spanish", "Italian", "Dutch", "Polish", w.name()))
        case "count":
            return r.choice(NUMBERS) if r.random() < 0.5 else str(r.randint(1, 20))
        case "integer":
            return r.randint(1, r.choice((9, 99, 999)))
        case "symbol":
            return "".join(r.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=r.randint(3, 4)))
        case "place":
            return " ".join(w.name() for _ in range(r.randint(1, 2)))
        case "word":
            return w.noun()
        case _:
            return w.phrase()


def _schema(w: Words, spec: Spec) -> dict[str, Any]:
    """Return the function's schema."""
    name, about, kinds, _ = spec
    properties: dict[str, Any] = {
        p: {"type": "integer" if kind == "integer" else "string"} for p, kind in kinds.items()
    }
    if w.rng.random() < 0.5:
        for p, entry in properties.items():
            entry["description"] = w.rng.choice((p, f"the {p}", f"name of the {p}"))
    parameters = {"type": "object", "properties": properties, "required": list(kinds)}
    function = {"name": name, "description": about, "parameters": parameters}
    return {"type": "function", "function": function}


def question_and_call(w: Words) -> tuple[list[dict[str, Any]], str, str, dict[str, Any]]:
    """Return schemas of 1 to 4 functions, a question, and the call's name and arguments."""
    r = w.rng
    specs_by_name: dict[str, Spec] = {}
    for spec in r.sample(TABLE, r.randint(1, 4)):
        specs_by_name.setdefault(spec[0], spec)
    specs = list(specs_by_name.values())
    name, _, kinds, questions = r.choice(specs)
    arguments = {p: _draw(w, kind) for p, kind in kinds.items()}
    question = r.choice(questions).format(**arguments)
    return [_schema(w, s) for s in specs], question, name, arguments
