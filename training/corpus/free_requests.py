"""Generator of tool requests in free phrasing, from the intents of tool_intents.txt."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from training.corpus import argument_values
from training.corpus.words import Words
from training.evaluation_sets import blind_requests, development_requests
from training.evaluation_sets.request_set import Call

PLACE = re.compile(r"\{(on )?(\w+)(?::(\w+))?(?:=(\w+)/([\w ]+))?\}")
"""Placeholder of a frame: (on, slot, kind); "{status=closed/close}" adds (member, phrase)."""
FRAME = re.compile(r"([!?~.])(\+?) (.*)")
"""Line of a frame: (sort, "+" if unambiguous, text)."""
GROUP = re.compile(r"\(([^()\[\]]*)\)|\[([^()\[\]]*)\]")
"""Choice in parentheses, or optional part in brackets."""


@dataclass(frozen=True)
class Param:
    """Parameter of an intent.

    names: possible names in a schema. kind: kind of its values. optional: whether a request may
    omit it.
    """

    names: tuple[str, ...]
    kind: str
    optional: bool


class Frame(NamedTuple):
    """Phrasing of a request.

    sort: !, ?, ~ or a full stop. sure: whether it excludes all clashing tools.
    """

    sort: str
    text: str
    sure: bool = True


@dataclass(frozen=True)
class Intent:
    """Tool with all spellings of its name, its descriptions, parameters and frames."""

    names: tuple[str, ...]
    abouts: tuple[str, ...]
    params: dict[str, Param]
    frames: tuple[Frame, ...]


Shape = tuple[dict[str, Param], list[tuple[str, str]]]
"""Parameters, and the (sort, text) of frames that mention them."""


@dataclass
class Offer:
    """Tool as one request presents it.

    keys: slot -> name of the parameter. values: slot -> how draw_value draws its values.
    """

    intent: Intent
    schema: dict[str, Any]
    keys: dict[str, str] = field(default_factory=dict)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the function's name."""
        return self.schema["function"]["name"]


@cache
def intents() -> tuple[Intent, ...]:
    """Return the intents of tool_intents.txt."""
    text = (Path(__file__).parent / "tool_intents.txt").read_text()
    intents_of_file = []
    for block in re.split(r"\n\s*\n", text):
        lines = [line for line in block.strip().split("\n") if line and not line.startswith("#")]
        if not lines:
            continue
        params = {}
        frames = []
        abouts = []
        for line in lines[1:]:
            if line[:2] == "- ":
                abouts.append(line[2:].strip())
            elif marked := FRAME.match(line):
                frames.append(Frame(marked[1], marked[3].strip(), bool(marked[2])))
            else:
                head, kind = line.split(" : ", 1)
                names = tuple(head.removesuffix(" ?").strip().split("|"))
                params[names[0]] = Param(names, kind.strip(), head.endswith("?"))
        names = tuple(lines[0].removeprefix("=").split())
        intents_of_file.append(Intent(names, tuple(abouts), params, tuple(frames)))
    return tuple(intents_of_file)


RELATED = (
    "get_weather get_forecast get_air_quality get_sunrise get_tide",
    "turn_light turn_on_light turn_off_light set_brightness set_lamp_color set_curtain",
    "play_music play_artist play_video get_lyrics find_movie find_book renew_book get_showtimes "
    "book_tickets create_playlist follow_artist",
    "search_flights book_flight get_distance train_times get_directions get_bus_times book_car",
    "send_email send_message post_tweet search_inbox delete_email create_note search_notes "
    "send_invitation create_poll",
    "create_event list_events cancel_event set_reminder add_todo complete_todo schedule_delivery "
    "book_room parse_date get_holidays create_note",
    "convert_currency get_exchange_rate convert_units transfer_money donate pay_bill "
    "create_invoice calculate_tip check_balance",
    "add_numbers subtract multiply divide square_root random_number calculate_tip roll_dice "
    "calculate_bmi",
    "search_web get_news define_word find_synonyms get_definition_of_country get_population "
    "get_capital get_word_of_day get_quote get_joke open_page search_notes check_visa summarize "
    "get_horoscope get_stock_price find_recipe get_recipe_nutrition find_product find_nearby "
    "identify_plant compare_products get_match_result find_job find_employee get_birthday",
    "find_product add_to_cart order_food add_to_shopping_list compare_products list_orders",
    "read_file write_file move_file copy_file delete_file list_directory search_files open_app "
    "open_page download_file compress_file print_document tag_photo resize_image identify_plant",
    "track_order return_item cancel_order schedule_delivery list_orders update_address",
    "restart_service stop_service deploy_app get_logs scale_service ping_host get_cpu_usage "
    "close_app",
    "find_nearby find_doctor_nearby get_parking book_doctor book_haircut order_taxi",
    "create_user delete_user reset_password block_user list_users add_contact",
    "create_issue close_ticket update_status assign_ticket",
    "start_timer set_alarm set_reminder get_time",
    "set_volume pause_music next_track",
    "translate define_word spell_check summarize find_synonyms",
    "call_contact send_message send_email create_group",
    "log_meal log_weight log_water start_workout feed_pet order_food make_coffee calculate_bmi",
    "set_temperature set_brightness charge_car start_washer start_engine",
    "lock_door unlock_door",
    "find_employee get_birthday add_contact get_age get_customer",
    "book_table book_hotel find_apartment book_room find_nearby",
    "take_photo take_screenshot",
)
"""Groups of tools that can substitute for one another. If no tool fits a request, none of its group
is offered."""

CLASHES = (
    "turn_light turn_on_light turn_off_light",
    "play_music play_artist play_video",
    "search_flights book_flight",
    "add_to_cart order_food find_product",
    "add_to_cart compare_products",
    "set_reminder add_todo",
    "convert_currency get_exchange_rate",
    "delete_email delete_file",
    "create_issue create_event",
    "close_ticket update_status",
    "stop_service close_app",
    "set_brightness set_volume",
    "create_note post_tweet",
    "book_doctor book_haircut",
    "find_doctor_nearby find_nearby",
    "get_bus_times train_times",
    "search_web get_news search_notes",
    "restart_service start_engine",
    "order_taxi book_car",
    "find_movie find_book get_lyrics",
    "find_movie play_video",
)
"""Groups of tools that some frames cannot distinguish. If two are offered, a sure frame is drawn.
"""


@cache
def _neighbours(lists: tuple[str, ...]) -> dict[str, frozenset[str]]:
    """Return name -> all names of its groups."""
    groups: dict[str, set[str]] = {}
    for group in lists:
        names = group.split()
        for name in names:
            groups.setdefault(name, set()).update(names)
    return {name: frozenset(group) for name, group in groups.items()}


def related(intent: Intent) -> frozenset[str]:
    """Return first names of the intents that can substitute for this one, itself included."""
    return _neighbours(RELATED).get(intent.names[0], frozenset()) | {intent.names[0]}


def clashing(intent: Intent) -> frozenset[str]:
    """Return first names of the intents that an unsure frame may also mean, itself included."""
    return _neighbours(CLASHES).get(intent.names[0], frozenset()) | {intent.names[0]}


def excluded_by(intent: Intent, frame: Frame) -> frozenset[str]:
    """Return first names of the intents that must not be offered with a request of this frame."""
    return frozenset({intent.names[0]}) if frame.sure else clashing(intent)


def incompatible_with(intent: Intent) -> frozenset[str]:
    """Return first names of the intents that are never offered together with this one."""
    sayable = any(frame.sure for frame in intent.frames)
    return frozenset({intent.names[0]}) if sayable else clashing(intent)


VERB_SAYINGS = {
    "archive": "archive|put away|move to the archive", "assign": "assign", "book": "book|reserve",
    "cancel": "cancel|call off", "check": "check|look at|inspect|verify", "close": "close|shut",
    "copy": "copy|duplicate|clone", "create": "create|make|add|set up", "delete":
    "delete|remove|erase|get rid of", "deploy": "deploy|roll out", "export": "export",
    "fetch": "fetch|get|show me|pull up|load", "find": "find|look for|search for|locate",
    "get": "get|show me|give me|fetch|tell me about|look up", "lock": "lock", "unlock": "unlock",
    "merge": "merge|combine", "open": "open|bring up", "print": "print|print out", "publish":
    "publish|release", "remove": "remove|delete|take away|get rid of", "rename": "rename",
    "reserve": "reserve|book", "restore": "restore|bring back|recover", "rotate": "rotate|turn",
    "scan": "scan", "send": "send|deliver", "start": "start|launch|begin|run", "stop":
    "stop|halt|end|shut down", "track": "track|follow|trace", "update": "update|refresh|renew",
    "approve": "approve|accept|sign off", "reject": "reject|decline|refuse", "count": "count",
    "validate": "validate|check|verify", "measure": "measure", "schedule": "schedule|plan",
    "list": "list|show me|show|display", "pause": "pause|suspend", "resume": "resume|continue",
    "submit": "submit|hand in", "download": "download|save", "upload": "upload", "split": "split",
}  # fmt: skip


def _shape_bare(w: Words, verb: str, noun: str) -> Shape:
    """Return a shape without parameters."""
    phrase = f"({VERB_SAYINGS.get(verb, verb)})"
    return {}, [
        ("!", f"{phrase} the {noun}"),
        ("!", f"{phrase} (my|our|this) {noun}"),
        (".", f"the {noun}, {verb} it"),
        (".", f"I (want|need|have) to {verb} the {noun}"),
    ]


def _key(w: Words, noun: str) -> Param:
    """Return an id parameter."""
    word = noun.replace(" ", "_")
    if w.rng.random() < 0.4:
        return Param((f"{word}_id", "id", "number"), "idint", False)
    return Param((f"{word}_id", "id", word, "number", f"{word}_number", "identifier"), "id", False)


def _name(w: Words, noun: str) -> Param:
    """Return a name parameter."""
    word = noun.replace(" ", "_")
    kind = w.rng.choice(("product", "first_name", "user", "label", "word"))
    return Param(("name", word, "title", f"{word}_name", "label"), kind, False)


def _shape_key(w: Words, verb: str, noun: str) -> Shape:
    """Return a shape with an id."""
    phrase = f"({VERB_SAYINGS.get(verb, verb)})"
    number = "(number |with the id |with id |no. |)"
    return {"key": _key(w, noun)}, [
        *[("!", f"{phrase} (the |){noun} {number}{{key}}")] * 3,
        (".", f"I (want|need|have|would like) to {verb} {noun} {{key}}"),
        (".", f"{noun} {{key}} (needs|has|is supposed) to be handled, (please |){verb} it"),
        (".", f"{phrase} {{key}}, (that is|it is|it's) (a|the) {noun}"),
        (".", f"{noun} {{key}} has been on my (desk|mind) (for days|all week), can you {verb} it"),
        (".", f"I (got|was given|have) {noun} {{key}} here; (please |){verb} it"),
        (".", f"it is about {noun} {{key}}, could you {verb} that (one |)for me"),
        ("!", f"{phrase} {noun} {{key}} (in|on|from) the (system|list|register|database|records)"),
        ("!", f"look (in|through) the (system|register|database) and {verb} the {noun} {{key}}"),
    ]


def _shape_name(w: Words, verb: str, noun: str) -> Shape:
    """Return a shape with a name."""
    phrase = f"({VERB_SAYINGS.get(verb, verb)})"
    return {"name": _name(w, noun)}, [
        *[("!", f"{phrase} (the |a |){noun} (called |named |){{name}}")] * 2,
        (".", f"{noun}: {{name}}, {verb} it"),
        (".", f"I (want|need) to {verb} (the|a) {noun} (called |named |){{name}}"),
        (".", f"I was told about the {noun} {{name}}; (please |){verb} it"),
        (".", f"there is a {noun} called {{name}}, can you {verb} it"),
        ("!", f"{phrase} the {noun} {{name}} (on the list|in the directory|in the system)"),
    ]


def _shape_field(w: Words, verb: str, noun: str) -> Shape:
    """Return a shape with an id and the value of a field."""
    r = w.rng
    title = w.noun()
    phrase = f"({VERB_SAYINGS.get(verb, verb)})"
    kind = r.choice(("int 1-999", "word", "first_name", "colour", "num 1-100"))
    value = Param((title, f"new_{title}", f"{title}_value"), kind, r.random() < 0.5)
    tail = f" (with|using) (a |the |){title} (of |){{value}}"
    tail = f"[{tail}]" if value.optional else tail
    return {"key": _key(w, noun), "value": value}, [
        *[("!", f"{phrase} (the |){noun} {{key}}{tail}")] * 2,
        ("!", f"{phrase} (the |){noun} {{key}}, {title} {{value}}"),
        ("!", f"{phrase} {noun} {{key}}, {title}: {{value}}"),
    ]


def _shape_choice(w: Words, verb: str, noun: str) -> Shape:
    """Return a shape with a name and a choice."""
    r = w.rng
    phrase = f"({VERB_SAYINGS.get(verb, verb)})"
    members = dict.fromkeys(w.noun() for _ in range(r.randint(2, 4)))
    title = r.choice(("mode", "type", "kind", "state", "level", "category", w.noun()))
    choice = Param((title,), "{" + " ".join(members) + "}", r.random() < 0.5)
    part = f"(, {title} {{choice}}| with {title} {{choice}}| (as|in) {{choice}})"
    part = f"[{part}]" if choice.optional else part
    return {"name": _name(w, noun), "choice": choice}, [
        ("!", f"{phrase} (the |a |){noun} (called |named |){{name}}{part}"),
        (".", f"I need to {verb} (the |a |){noun} {{name}}{part}"),
    ]


def _shape_count(w: Words, verb: str, noun: str) -> Shape:
    """Return a shape with a count."""
    phrase = f"({VERB_SAYINGS.get(verb, verb)})"
    missing = w.rng.random() < 0.5
    names = ("count", "limit", "amount", "quantity", "number")
    frames = [
        ("!", f"{phrase} {{count}} {noun}s"),
        (".", f"I (need|want) to {verb} {{count}} {noun}s"),
    ]
    frames += [("!", f"{phrase} (the|all|some) {noun}s")] if missing else []
    return {"count": Param(names, "int 2-90", missing)}, frames


def _shape_person(w: Words, verb: str, noun: str) -> Shape:
    """Return a shape with a name and a person."""
    phrase = f"({VERB_SAYINGS.get(verb, verb)})"
    names = ("recipient", "user", "to", "person", "for_whom", "owner")
    return {"name": _name(w, noun), "who": Param(names, "first_name", False)}, [
        ("!", f"{phrase} (the |){noun} {{name}} (for|to) {{who}}"),
        (".", f"{{who}} (needs|wants) (the |){noun} {{name}}, {verb} it"),
    ]


def _shape_amount(w: Words, verb: str, noun: str) -> Shape:
    """Return a shape with a name and an amount."""
    phrase = f"({VERB_SAYINGS.get(verb, verb)})"
    kind = w.rng.choice(("product", "food", "ingredient", "word", "document"))
    name = Param(("name", "item", "what", noun.replace(" ", "_"), "title"), kind, False)
    counts = ("count", "quantity", "amount", "number", "copies", "pieces", "units")
    units = "(pieces|boxes|packs|copies|bags|units|sets|bottles|servings|portions|pairs|trays)"
    return {"name": name, "count": Param(counts, "int 2-60", True)}, [
        ("!", f"{phrase} [{{count}} {units} of ]the {noun} {{name}}"),
        ("!", f"{phrase} {{count}} {units} of {{name}}(| for the {noun})"),
        ("!", f"{phrase} {{count}} {{name}} for the {noun}"),
        (".", f"{{count}} {units} of the {noun} {{name}}, {verb} them"),
        (".", f"I need {{count}} {units} of {{name}}; {verb} them for the {noun}"),
        ("!", f"{phrase} the {noun} {{name}}[, {{count}} times|, {{count}} of them]"),
    ]


def _shape_text(w: Words, verb: str, noun: str) -> Shape:
    """Return a shape with a text, and sometimes an id."""
    phrase = f"({VERB_SAYINGS.get(verb, verb)})"
    kind = w.rng.choice(("text", "topic", "task", "event", "phrase_text", "title", "bug", "howto"))
    names = ("text", "message", "description", "content", "note", "title", "summary", "subject")
    lead = {"topic": "about", "howto": "how to"}.get(kind, "")
    frames = [
        (
            "!",
            f"{phrase} (a|the|another) {noun} {lead or '(called|saying|with the text)'} {{text}}",
        ),
        (".", f"(I need|there has to be) a {noun} {lead or 'saying'} {{text}}"),
    ]
    if not lead:
        frames += [
            ("!", f"{phrase} (a|the|another) {noun}: {{text}}"),
            (".", f"{noun}: {{text}}"),
            ("!", f"{phrase} {{text}} (as|in) a {noun}"),
            (".", f"my {noun} is this: {{text}}. (Please |){verb} it"),
        ]
    if kind not in ("topic", "howto") or w.rng.random() < 0.5:
        return {"text": Param(names, kind, False)}, frames
    key = _key(w, noun)
    frames = [("!", f"{phrase} {noun} {{key}} {lead} {{text}}"), *frames[:1]]
    frames.append(("!", f"{phrase} {noun} {{key}} with the remark {{text}}"))
    key = Param(key.names, key.kind, True)
    return {"key": key, "text": Param(names, kind, False)}, frames


SHAPES = (
    _shape_bare, _shape_key, _shape_key, _shape_name, _shape_field, _shape_choice, _shape_count,
    _shape_person, _shape_amount, _shape_text,
)  # fmt: skip
"""Shapes of made-up tools."""


STATES = (
    "approve approved", "reject rejected", "archive archived", "close closed", "open open",
    "reopen open", "pause paused", "resume active", "activate active", "lock locked",
    "unlock unlocked", "cancel cancelled", "publish published", "start running", "stop stopped",
    "enable enabled", "disable disabled", "hide hidden", "finish done", "block blocked",
    "suspend suspended", "begin in_progress", "ship shipped", "mute muted", "reserve reserved",
    "confirm confirmed", "decline declined", "free available", "postpone postponed",
)  # fmt: skip
"""Verbs, and the states that they lead to."""


def _stateful(w: Words, noun: str) -> Intent:
    """Return a tool that sets a state; requests name the state or a verb that leads to it."""
    r = w.rng
    word = noun.replace(" ", "_")
    pairs = [pair.split() for pair in r.sample(STATES, r.randint(2, 5))]
    members = dict.fromkeys(member for _, member in pairs)
    sayings = " ".join(f"{m}={m}" for m in members)
    title = r.choice(("state", "status", "new_state", "mode", "stage"))
    state = Param((title, "state", "status", f"{word}_state"), "{" + sayings + "}", False)
    thing = _key(w, noun) if r.random() < 0.6 else _name(w, noun)
    names = tuple(f"{verb}_{word}_{end}" for verb in ("set", "update", "change")
                  for end in ("state", "status"))  # fmt: skip
    abouts = (f"Change the state of a {noun}", f"Sets the {title} of a {noun}", f"Updates a {noun}")
    frames = [
        ("!", f"set (the |){noun} {{thing}} to {{state}}"),
        ("!", f"(mark|flag) (the |){noun} {{thing}} as {{state}}"),
        (".", f"{noun} {{thing}} (is|should be|is now) {{state}}(| now)"),
        ("!", f"(change|update|switch) the {title} of {noun} {{thing}} to {{state}}"),
    ]
    for verb, member in pairs:
        meant = f"{{state={member}/{verb}}}"
        frames.append(("!", f"{meant} (the |){noun} {{thing}}"))
        frames.append((".", f"(please |you can |I want to ){meant} {noun} {{thing}}(| now)"))
    params = {"thing": thing, "state": state}
    return Intent(names, abouts, params, tuple(Frame(*frame) for frame in frames))


SWITCHINGS = (
    "off kill", "off cut", "off shut down", "off power down", "off turn off", "off switch off",
    "on power up", "on fire up", "on turn on", "on switch on", "off shut off", "on start",
    "off stop",
)  # fmt: skip
"""States, and phrases that mean them."""


def _switch(w: Words, noun: str) -> Intent:
    """Return a tool that turns things on and off; requests use the state, a verb or an idiom."""
    word = noun.replace(" ", "_")
    names = (f"switch_{word}", f"toggle_{word}", f"{word}_control", f"set_{word}", f"{word}_power")
    abouts = (f"Turn the {noun} on or off", f"Switches a {noun}", f"{noun.capitalize()} on or off")
    place_names = ("room", "location", "where", "place", "area")
    params = {
        "where": Param(place_names, w.rng.choice(("room", "room", "label", "word")), False),
        "state": Param(("state", "power", "status", "mode", "action"), "{on off}", False),
    }
    frames = [
        (".", f"{noun} {{state}} in the {{where}}"),
        (".", f"{{where}} {noun} {{state}}(| please)"),
        ("!", f"(turn|switch) {{state}} the {noun} in the {{where}}"),
        ("!", f"(turn|switch) the {{where}} {noun} {{state}}"),
        (".", f"{noun} {{state=off/out}} (for|at) the {{where}}"),
        (".", f"{{state=off/no more}} {noun} in the {{where}}(| please)"),
        (".", f"nobody needs the {noun} in the {{where}}, {{state=off/stop}} it"),
        (".", f"we need the {noun} in the {{where}} now, {{state=on/start}} it"),
        ("!", f"get the {noun} in the {{where}} {{state=on/going}}"),
    ]
    for pair in SWITCHINGS:
        state, verb = pair.split(" ", 1)
        frames.append(("!", f"{{state={state}/{verb}}} the {noun} in the {{where}}"))
    return Intent(names, abouts, params, tuple(Frame(*frame) for frame in frames))


def made_up(w: Words, noun: str | None = None, verb: str | None = None) -> Intent:
    """Return an intent of a random verb and noun with a random shape."""
    r = w.rng
    if noun is None and verb is None and r.random() < 0.16:
        return _stateful(w, w.noun()) if r.random() < 0.65 else _switch(w, w.noun())
    verb = verb or r.choice(list(VERB_SAYINGS))
    noun = noun or (w.noun() if r.random() < 0.75 else f"{w.noun()} {w.noun()}")
    word = noun.replace(" ", "_")
    names = (f"{verb}_{word}", f"{verb}_{word}", f"{word}_{verb}", f"{verb}_the_{word}")
    abouts = (
        f"{verb.capitalize()} a {noun}",
        f"{verb.capitalize()}s the {noun}",
        f"Used to {verb} a {noun}",
        f"{noun.capitalize()}: {verb}",
    )
    params, frames = r.choice(SHAPES)(w, verb, noun)
    return Intent(names, abouts, params, tuple(Frame(*frame) for frame in frames))


def resolve(w: Words, frame: str) -> str:
    """Return the frame with its choices made and its optional parts included or dropped."""
    while match := GROUP.search(frame):
        if match[1] is not None:
            text = w.rng.choice(match[1].split("|"))
        else:
            text = w.rng.choice(match[2].split("|")) if w.rng.random() < 0.5 else ""
        frame = frame[: match.start()] + text + frame[match.end() :]
    return re.sub(r" ('(?:d|m|s|ll|ve)\b)", r"\1", " ".join(frame.split()))


def _camel(name: str) -> str:
    """Return a snake_case name in camel case."""
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


def _styled(w: Words, name: str) -> tuple[str, bool]:
    """Return a name in a random naming style, and whether that is camel case."""
    r = w.rng
    if name.count("_") == 1 and r.random() < 0.12:
        name = "_".join(reversed(name.split("_")))
    if r.random() < 0.05:
        name += r.choice(("_tool", "_v2", "_api", "_function", "_by_name"))
    style = r.choices(range(7), (48, 19, 4, 12, 9, 7, 1))[0]
    if style == 1:
        return _camel(name), True
    if style == 2:
        return "".join(part.capitalize() for part in name.split("_")), r.random() < 0.5
    if style == 3:
        return name.replace("_", ".", 1), False
    if style == 4:
        return name.replace("_", "-"), False
    if style == 5:
        space = r.choice(("api", "tools", "functions", "assistant", "app", w.noun(), w.made_up()))
        return space + r.choice((".", "_", "-", "__", ":")) + name, False
    return (name.replace("_", ""), False) if style == 6 else (name, False)


UNITS = (
    ("celsius", "fahrenheit"), ("celsius", "fahrenheit"), ("Celsius", "Fahrenheit"), ("C", "F"),
    ("CELSIUS", "FAHRENHEIT"), ("c", "f"), ("metric", "imperial"), ("fahrenheit", "celsius"),
    ("celsius", "fahrenheit", "kelvin"), ("degC", "degF"), ("°C", "°F"),
)  # fmt: skip
UNIT_SAYINGS = {
    "c": ("Celsius", "celsius", "C", "Celsius", "celsius", "°C", "centigrade", "metric"),
    "f": ("Fahrenheit", "fahrenheit", "F", "Fahrenheit", "fahrenheit", "°F", "imperial"),
    "k": ("Kelvin", "kelvin", "K"),
}
UNIT_ABOUT = (
    "C or F",
    "celsius or fahrenheit",
    "temperature unit",
    "Celsius or Fahrenheit",
    "unit",
)
BOOL_SAYINGS = {
    "vegetarian": ("vegetarian", "veggie", "meatless"),
    "video": ("video",),
    "verbose": ("verbose",),
    "subtitles": ("with subtitles", "without subtitles"),
}


def _options(kind: str) -> dict[str, tuple[str, ...]]:
    """Return member -> phrases of a {...} kind."""
    options = {}
    for part in kind.strip("{}").split():
        member, _, phrases = part.partition("=")
        options[member] = tuple(s.replace("_", " ") for s in (phrases or member).split("/"))
    return options


def _entry(w: Words, param: Param, listed: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the schema of a parameter, and how draw_value draws its values.

    listed: show the members of a {...} kind, for a request that means one of them without naming
    it.
    """
    r = w.rng
    kind = param.kind
    if kind.startswith("int") or kind in ("year", "idint"):
        sort = r.choices(("integer", "number", "string"), (88, 6, 6))[0]
        return {"type": "integer" if kind == "idint" else sort}, {}
    if kind.startswith("num") or kind == "money":
        return {"type": r.choices(("number", "string"), (92, 8))[0]}, {}
    if kind.startswith("list "):
        return {"type": "array", "items": {"type": "string"}}, {}
    if kind.startswith("bool "):
        return {"type": "boolean"}, {}
    if kind == "unit" and r.random() < 0.6:
        members = r.choice(UNITS)
        letters = {"m": "c", "i": "f", "d": ""}
        phrases = {}
        for m in members:
            first = letters.get(m[0].lower(), m[0].lower()) or m[3].lower()
            first = m[1].lower() if first == "°" else first
            phrases[m] = UNIT_SAYINGS[first]
        return {"type": "string", "enum": list(members)}, {"enum": phrases}
    if kind.startswith("{"):
        options = _options(kind)
        if set(options) == {"on", "off"} and not listed and r.random() < 0.15:
            return {"type": "boolean"}, {"enum": {"true": ("on",), "false": ("off",)}}
        if listed or r.random() < 0.72:
            shape = r.choice((str, str, str, str.upper, str.capitalize))
            phrases = {shape(m): s for m, s in options.items()}
            order = r.sample(list(phrases), len(phrases)) if r.random() < 0.3 else list(phrases)
            return {"type": "string", "enum": order}, {"enum": phrases}
        return {"type": "string"}, {}
    if kind in argument_values.LISTS and r.random() < 0.12:
        values = r.sample(
            argument_values.LISTS[kind], min(len(argument_values.LISTS[kind]), r.randint(3, 8))
        )
        shape = r.choice((str, str, str.upper, str.lower, lambda s: s.replace(" ", "_")))
        phrases = {shape(s): (s,) for s in values}
        return {"type": "string", "enum": list(phrases)}, {"enum": phrases}
    return {"type": "string"}, {}


def _describe(w: Words, param: Param, name: str, entry: dict[str, Any]) -> None:
    """Add a description, title or default to a parameter's schema at random."""
    r = w.rng
    plain = name.replace("_", " ").lower()
    if param.kind == "unit" and "enum" not in entry and r.random() < 0.5:
        entry["description"] = r.choice(UNIT_ABOUT)
    elif param.kind.startswith("{") and "enum" not in entry and r.random() < 0.5:
        entry["description"] = ", ".join(_options(param.kind))
    elif r.random() < 0.45:
        abouts = argument_values.ABOUT.get(param.kind, ())
        entry["description"] = r.choice(
            (plain, f"the {plain}", f"The {plain}.", f"{plain.capitalize()} to use", *abouts)
        )
    if r.random() < 0.04:
        entry["title"] = plain.title()
    if r.random() < 0.02 and param.optional:
        entry["default"] = None


def offer(
    w: Words,
    intent: Intent,
    needed: frozenset[str] = frozenset(),
    meant: frozenset[str] = frozenset(),
) -> Offer:
    """Return the intent as a tool of one request, with a random name and schema.

    needed: slots that the schema must have. meant: slots whose members it must show.
    """
    r = w.rng
    name, camel = _styled(w, r.choice(intent.names))
    tool = Offer(intent, {})
    properties = {}
    required = []
    order = list(intent.params)
    if r.random() < 0.25:
        r.shuffle(order)
    for slot in order:
        param = intent.params[slot]
        if slot not in needed and param.optional and r.random() < 0.35:
            continue
        key = param.names[0] if r.random() < 0.4 else r.choice(param.names)
        key = _camel(key) if camel else key
        if key in properties:
            key = f"{key}_{slot}" if not camel else _camel(f"{key}_{slot}")
        entry, drawn = _entry(w, param, slot in meant)
        _describe(w, param, key, entry)
        properties[key] = entry
        tool.keys[slot] = key
        tool.values[slot] = {**drawn, "type": entry["type"]}
        if not param.optional or r.random() < 0.08:
            required.append(key)
    tool.schema = {
        "type": "function",
        "function": _function(w, intent, name, properties, required),
    }
    return tool


def _function(
    w: Words, intent: Intent, name: str, properties: dict[str, Any], required: list[str]
) -> dict[str, Any]:
    """Return a function's schema; optional fields are included at random."""
    r = w.rng
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required and r.random() < 0.8:
        parameters["required"] = required
    if r.random() < 0.06:
        parameters["additionalProperties"] = False
    about = r.choice(intent.abouts)
    if r.random() < 0.03:
        name = w.made_up() + r.choice(("", f"_{r.randint(1, 9)}"))
    elif r.random() < 0.12:
        about = ""
    function: dict[str, Any] = {"name": name}
    if about:
        function["description"] = about if r.random() < 0.8 else about.rstrip(".") + "."
    if properties or r.random() < 0.7:
        function["parameters"] = parameters
    if r.random() < 0.03:
        function["strict"] = True
    return function


@dataclass
class Phrasing:
    """Phrased request and the arguments of its calls by slot.

    parts: (text, slot or None) in order. copied: slots whose value is the text itself, so that it
    follows changes of case.
    """

    parts: list[tuple[str, str | None]]
    arguments: dict[str, Any]
    copied: set[str]

    @property
    def text(self) -> str:
        """Return the whole text."""
        return "".join(text for text, _ in self.parts)


def draw_value(
    w: Words, param: Param, how: dict[str, Any], kind: str = ""
) -> tuple[Any, str, bool]:
    """Return (value, phrase, whether the value is the phrase itself)."""
    r = w.rng
    kind = kind or param.kind
    if "enum" in how:
        member = r.choice(list(how["enum"]))
        value = {"true": True, "false": False}[member] if how["type"] == "boolean" else member
        return value, r.choice(how["enum"][member]), False
    if kind.startswith("bool "):
        phrase = r.choice(BOOL_SAYINGS[kind.split()[1]])
        return not phrase.startswith("without"), phrase, False
    if kind.startswith("list "):
        make = argument_values.KINDS[kind.split()[1]]
        items = list(dict.fromkeys(make(w) for _ in range(r.choice((1, 2, 2, 3, 3, 4)))))
        glue = r.choice((" and ", " and ", ", ", ", and "))
        phrase = ", ".join(items[:-1]) + (glue if len(items) > 1 else "") + items[-1]
        return items, phrase, True
    if kind.startswith(("int", "num")) or kind in ("year", "idint", "money"):
        low, high = {"year": "1900-2035", "idint": "1-99999", "money": "1-2000"}.get(
            kind, kind.split()[-1]
        ).split("-")
        draw = (
            argument_values.decimal
            if kind.startswith("num") or kind == "money"
            else argument_values.integer
        )
        value, phrase = draw(r, int(low), int(high))
        if kind in ("year", "idint"):
            phrase = str(value)
        return (phrase, phrase, True) if how["type"] == "string" else (value, phrase, False)
    if kind == "unit":
        phrase = r.choice(UNIT_SAYINGS[r.choice("cf")])
    elif kind.startswith("{"):
        phrase = r.choice(r.choice(list(_options(kind).values())))
    else:
        phrase = argument_values.KINDS[kind](w)
    return phrase, phrase, True


def offer_for(w: Words, intent: Intent, frame: str) -> Offer:
    """Return the intent as a tool that satisfies the resolved frame."""
    return offer(w, intent, slots_of(frame), meant_in(frame))


def meant_in(frame: str) -> frozenset[str]:
    """Return the slots of which the frame means a member without naming it."""
    return frozenset(match[2] for match in PLACE.finditer(frame) if match[4])


def can_answer(tool: Offer, frame: str) -> bool:
    """Return whether the tool has every slot of the frame and every member that it means."""
    return slots_of(frame) <= tool.keys.keys() and all(
        "enum" in tool.values[slot] and tool.values[slot]["type"] == "string"
        for slot in meant_in(frame)
    )


def _member_spelling(tool: Offer, slot: str, member: str) -> str:
    """Return the tool's spelling of a member."""
    return next(m for m in tool.values[slot]["enum"] if m.lower() == member)


def fill(w: Words, frame: str, tool: Offer) -> Phrasing:
    """Return the resolved frame with values, some of them quoted."""
    r = w.rng
    at = 0
    phrasing = Phrasing([], {}, set())
    for match in PLACE.finditer(frame):
        on = match[1]
        slot = match[2]
        kind = match[3]
        before = frame[at : match.start()]
        if match[4]:
            phrasing.parts += [(before + match[5], None)]
            phrasing.arguments[slot] = _member_spelling(tool, slot, match[4])
            at = match.end()
            continue
        value, text, copied = draw_value(w, tool.intent.params[slot], tool.values[slot], kind or "")
        if on and not text.startswith(
            ("today", "tomorrow", "tonight", "next ", "this ", "the day after")
        ):
            before += "on "
        quote = ""
        if copied and isinstance(value, str) and r.random() < 0.04 and '"' not in before[-1:]:
            quote = r.choice(('"', "'", '"'))
        phrasing.parts += [(before + quote, None), (text, slot)]
        if quote:
            phrasing.parts.append((quote, None))
        phrasing.arguments[slot] = value
        phrasing.copied |= {slot} if copied else set()
        at = match.end()
    phrasing.parts.append((frame[at:], None))
    phrasing.parts = [part for part in phrasing.parts if part[0]]
    return phrasing


def slots_of(frame: str) -> frozenset[str]:
    """Return the slots that a resolved frame mentions."""
    return frozenset(match[2] for match in PLACE.finditer(frame))


ORDERS = (
    "{}", "{}", "{}", "{}", "please {}", "can you {}?", "could you {}?", "could you please {}?",
    "can you please {}?", "would you {}?", "I want you to {}", "I need you to {}", "please, {}",
    "I'd like you to {}", "hey, {}", "hey, can you {}?", "would you please {}?", "go ahead and {}",
    "I want to {}", "I'd like to {}", "I need to {}", "help me {}", "now {}", "ok, {}", "okay, {}",
    "will you {}?", "would you be so kind and {}?", "can we {}?", "let's {}", "kindly {}",
    "you could {}", "I would like to {}", "may I ask you to {}?", "be so good and {}", "so {}",
    "is it possible to {}?", "are you able to {}?", "do me a favour and {}", "hello, {}",
    "I was wondering if you could {}", "if you can, {}", "quickly {}", "use a tool to {}",
    "use the tool to {}", "hi, could you {}?", "do {}", "then {}", "next, {}", "also {}",
    "try to {}", "could you {} please?", "can you {}, please?", "please {}, thanks", "{} please",
    "would you {}, if you can?", "I need someone to {}, can you do it?",
)  # fmt: skip
LOOKUPS = (
    "what is {}?", "what's {}?", "tell me {}", "show me {}", "give me {}", "I want to know {}",
    "I'd like to know {}", "do you know {}?", "can you tell me {}?", "could you tell me {}?",
    "find out {}", "look up {}", "check {}", "get me {}", "get {}", "I need {}", "{}", "{} please",
    "{}, please", "can you check {}?", "could you look up {}?", "please look up {}",
    "let me see {}",
    "I need to know {}", "please tell me {}", "can I see {}?", "fetch {}", "can I have {}?",
    "find {}",
    "I would like to see {}", "what about {}?", "I'm curious about {}", "could you find out {}?",
    "please find out {} for me", "use the tool to find {}", "may I see {}?", "please show me {}",
    "I'm interested in {}", "can you get {} for me?", "display {}", "could I get {}?",
    "I never remember {}, can you look it up?", "I forgot {}, could you check it?", "{}, thanks",
    "I keep forgetting {}; please check it", "I don't have {} at hand, can you get it?",
    "somebody asked me for {}, can you find it?", "I was asked about {}; look it up please",
    "I wonder about {}, could you find out?", "the point is {}, please check that",
)  # fmt: skip
ASKS = (
    "{}?", "{}?", "{}?", "{}?", "{}?", "{}?", "{}", "hey, {}?", "tell me, {}?", "so, {}?",
    "hi, {}?",
    "quick question: {}?", "please tell me: {}?", "I was wondering, {}?", "hello, {}?", "and {}?",
    "can you tell me: {}?", "excuse me, {}?", "do you know: {}?", "say, {}?", "{}? I need to know",
    "one question, {}?", "please check: {}?", "{}, do you know?", "could you check, {}?", "ok, {}?",
    "{}, can you check that?", "{}, could you look it up?", "{}? can you find out for me?",
    "I forget such things: {}?", "{}? please check it", "{}, somebody asked me",
)  # fmt: skip
BEFORE = (
    "I have a question.", "Quick question.", "One more thing.", "Hello!", "Hi!", "Hi there.",
    "Hey.",
    "I am in a hurry.", "My boss wants to know.", "Sorry to bother you.", "It is me again.",
    "Listen.",
    "I'm planning a trip.", "My friend asked me.", "I need your help.", "Ok.", "Good morning.",
    "So.",
    "I'm on the phone right now.", "This is for my mother.", "I forgot my glasses.", "All right.",
    "You are my assistant.", "I can't do it myself.", "My hands are full.", "Let's try something.",
    "I am curious.", "Here is what I need.", "Next request.", "Good evening.",
    "Thanks for the help.",
    "My sister lives in {c}.", "I just came back from {c}.", "{p} told me to ask you.",
    "I met {p}.",
    "I was in {c} last year.", "My name is {p}.", "I'm at the {x}.", "I like the {x}.", "I'm {p}.",
    "We bought a {x}.", "{p} is here.", "It is {d}.", "The {x} is {a}.", "I had a long day.",
)  # fmt: skip
AFTER = (
    "Thanks!", "Thank you.", "Please.", "Use the tool.", "Use a tool.", "Use the tool for that.",
    "It's urgent.", "No rush.", "Please use the tool.", "Use the function.", "Call the tool.",
    "Now.",
    "Please call the right function.", "Thanks in advance.", "I need it now.", "Use your tools.",
    "Make it quick.", "You have a tool for that.", "Do it now.", "That would be great.",
    "Thanks a lot!",
    "I appreciate it.", "Answer with a tool call.", "Thx", "Can you do that?", "Is that possible?",
    "It is for {p}.", "{p} asked for it.", "I'm in a hurry.", "Use a function call.", "Ok?",
    "Cheers!",
)  # fmt: skip
NOISE = (" right now", " for me", " please", ", please", " now", " quickly", ", ok?",
    " for me please",
         ", would you", " real quick", ", thanks", ", if you can", ", thank you", " asap",
         " immediately")  # fmt: skip
POLITE = (" please", " please", ", please", ", thanks", " thanks", ", if you can", ", thank you",
          ", if possible", ", would you", ", cheers", ", if you don't mind", ", many thanks",
          ", be so kind", " pls", ", ok?", ", will you", " - thanks", " - please")  # fmt: skip
"""Phrases that may follow a value without being a part of it."""
REMARKS = (
    "my phone is nearly dead", "I can't look myself", "the others are waiting", "I'm already late",
    "it slipped my mind", "we are in a rush", "the boss asked me about it", "I have no time left",
    "my hands are wet", "I just sat down", "the guests are here", "I always forget such things",
    "I don't have my glasses on", "it matters a lot to me", "I am driving", "we talked about it",
    "{p} keeps asking", "{p} is getting nervous", "I promised {p}",
    "I'm too tired", "the baby is crying", "it can't wait", "I'm no good at this",
    "they are closing soon", "I have been meaning to do it", "there is no time",
    "I nearly forgot", "I will explain it to you one day",
)  # fmt: skip
"""Reasons and remarks within a request's sentence that ask for nothing."""


def _aside(w: Words, form: str) -> str:
    """Return a remark with its placeholders filled."""
    r = w.rng
    form = form.replace("{c}", argument_values.city(w)).replace(
        "{p}", argument_values.first_name(w)
    )
    form = form.replace("{x}", w.noun()).replace("{d}", r.choice(argument_values.DAYS))
    return form.replace("{a}", r.choice(("nice", "old", "new", "broken", "great", "small")))


def wrap(w: Words, sort: str, phrasing: Phrasing, plain: bool = False) -> Phrasing:
    """Return the request as a sentence: polite or plain, with remarks around it, in random case."""
    r = w.rng
    forms = {"!": ORDERS, "~": LOOKUPS, "?": ASKS, ".": ("{}",)}[sort]
    form = r.choice(forms) if not plain and (sort != "!" or r.random() < 0.62) else "{}"
    if plain and sort == "~":
        form = r.choice(LOOKUPS[:6])
    head, tail = form.split("{}")
    parts = [(head, None), *phrasing.parts]
    loose = phrasing.parts[-1][1] is None or w.rng.random() < 0.05
    if not tail and sort in "!." and r.random() < (0.12 if loose else 0.16):
        kinds = NOISE if loose else POLITE
        tail = r.choice(kinds)
        if tail.strip(" ,") and phrasing.text.rstrip("?.!").endswith(tail.strip(" ,")):
            tail = ""
    if sort == "?" and not tail.endswith("?") and r.random() < 0.7 and not tail:
        tail = "?"
    parts.append((tail, None))
    text = "".join(t for t, _ in parts)
    if text[-1] not in "?!." and r.random() < 0.5:
        parts.append((r.choice((".", ".", ".", "!", "?" if sort == "?" else ".")), None))
    if not plain:
        _surround(w, parts)
    parts = [part for part in parts if part[0]]
    return _cased(w, Phrasing(parts, dict(phrasing.arguments), phrasing.copied))


def _surround(w: Words, parts: list[tuple[str, str | None]]) -> None:
    """Insert remarks before and after the request at random."""
    r = w.rng
    chance = r.random()
    if chance < 0.13:
        parts.insert(0, (_aside(w, r.choice(BEFORE)) + " ", None))
    elif chance < 0.17:
        glue = r.choice((", ", ", ", "; ", " - ", ", so ", ". "))
        parts.insert(0, (_aside(w, r.choice(REMARKS)) + glue, None))
    chance = r.random()
    if chance < 0.045:
        _remark(w, parts)
    elif chance < 0.22:
        text = "".join(t for t, _ in parts)
        gap = " " if text[-1] in ".?!" else ". "
        parts.append((gap + _aside(w, r.choice(AFTER)), None))


def _remark(w: Words, parts: list[tuple[str, str | None]]) -> None:
    """Append a remark, in the same sentence only if it cannot be read as a part of a value."""
    text, slot = parts[-1] if parts[-1][0] else parts[-2]
    if text[-1] in ".?!":
        glue = " "
    elif slot is None or " " not in text:
        glue = w.rng.choice((", ", ", ", "; ", " - ", ". "))
    else:
        glue = ". "
    parts.append((glue + _aside(w, w.rng.choice(REMARKS)), None))


def _sentences(parts: list[tuple[str, str | None]]) -> list[tuple[str, str | None]]:
    """Capitalize the beginnings of sentences, but not values."""
    sentences = []
    fresh = True
    for text, slot in parts:
        if slot is None:
            text = re.sub(r"([.?!] )([a-z])", lambda m: m[1] + m[2].upper(), text)
            if fresh and text[0].isalpha():
                text = text[0].upper() + text[1:]
        sentences.append((text, slot))
        fresh = text.endswith((". ", "? ", "! "))
    return sentences


def _cased(w: Words, phrasing: Phrasing) -> Phrasing:
    """Return the request in random case; copied arguments follow."""
    r = w.rng
    chance = w.rng.random()
    change: Callable[[str], str] = str
    if chance < 0.62:
        phrasing.parts = _sentences(phrasing.parts)
    elif chance < 0.82:
        change = str.lower
    elif chance < 0.87:
        change = str.upper
    parts = [(change(text), slot) for text, slot in phrasing.parts]
    if r.random() < 0.04:
        parts = [(t.replace("'", "").replace(",", "") if s is None else t, s) for t, s in parts]
    arguments = dict(phrasing.arguments)
    for slot in phrasing.copied:
        value = arguments[slot]
        arguments[slot] = [change(v) for v in value] if isinstance(value, list) else change(value)
    return Phrasing(parts, arguments, phrasing.copied)


def call_of(tool: Offer, arguments: dict[str, Any]) -> Call:
    """Return the call with its arguments in the schema's order."""
    return tool.name, {key: arguments[slot] for slot, key in tool.keys.items() if slot in arguments}


@dataclass
class Request:
    """Request with its tools and its correct calls.

    phrasing: phrasing of a single call, for a follow-up.
    """

    tools: list[Offer]
    text: str
    calls: list[Call]
    phrasing: Phrasing | None = None


def pick(w: Words) -> Intent:
    """Return a random intent of the file or a made-up one."""
    return made_up(w) if w.rng.random() < 0.2 else w.rng.choice(intents())


def domain(w: Words, intent: Intent, max_tools: int = 4) -> list[Offer]:
    """Return tools related to the intent, as one application offers them."""
    candidates = [i for i in intents() if i.names[0] in related(intent)]
    tools = []
    excluded = set(incompatible_with(intent))
    for other in w.rng.sample(candidates, len(candidates)):
        if other.names[0] in excluded or len(tools) == max_tools:
            continue
        excluded |= incompatible_with(other)
        tools.append(offer(w, other))
    return tools


@cache
def _by_word() -> dict[str, tuple[Intent, ...]]:
    """Return word -> intents whose names or descriptions contain it."""
    intents_by_word: dict[str, dict[str, Intent]] = {}
    for intent in intents():
        text = " ".join((*intent.names, *intent.abouts)).lower().replace("_", " ")
        for word in re.findall(r"[a-z]{3,}", text):
            intents_by_word.setdefault(word, {})[intent.names[0]] = intent
    return {
        word: tuple(i.values()) for word, i in intents_by_word.items() if word not in EMPTY_WORDS
    }


EMPTY_WORDS = frozenset("the and for with from that what something somebody into its".split())
"""Words that do not relate two tools."""


def echo_tool(w: Words, frame: str, without: frozenset[str]) -> list[Offer]:
    """Return a tool that shares a word with the request but means something else, or none."""
    table = _by_word()
    words = [word for word in frame.lower().split() if word in table]
    if not words:
        return []
    intent = w.rng.choice(table[w.rng.choice(words)])
    return [] if intent.names[0] in without else [offer(w, intent)]


def distractors_for(
    w: Words, chosen: list[Intent], without: frozenset[str], max_tools: int = 5
) -> list[Offer]:
    """Return distractor tools: random ones, or ones similar to the chosen tool."""
    r = w.rng
    tools = []
    excluded = set(without)
    for _ in range(r.choice((0, 0, 1, 1, 2, 2, 3, 4, max_tools))):
        chance = r.random()
        reference = chosen[0] if chosen else None
        name = reference.names[0] if reference else ""
        if reference and chance < 0.45 and name in _neighbours(RELATED):
            options = [i for i in intents() if i.names[0] in related(reference)]
            intent = r.choice(options)
        elif (
            reference
            and chance < 0.58
            and not reference.params.keys().isdisjoint({"key", "name", "count"})
        ):
            verb, _, noun = name.partition("_")
            intent = made_up(w, noun=noun.replace("_", " ")) if r.random() < 0.5 else made_up(w,
                verb=verb if verb in VERB_SAYINGS else None)  # fmt: skip
            if intent.names[0].split("_")[0] in _same_verbs(verb):
                continue
        else:
            intent = pick(w)
        if intent.names[0] in excluded:
            continue
        excluded |= incompatible_with(intent)
        tools.append(offer(w, intent))
    return tools


@cache
def _same_verbs(verb: str) -> frozenset[str]:
    """Return verbs with a meaning in common with this one."""
    mine = set(VERB_SAYINGS.get(verb, verb).split("|"))
    return frozenset(v for v, s in VERB_SAYINGS.items() if mine & set(s.split("|"))) | {verb}


def _shuffled_by_name(w: Words, tools: list[Offer], more_tools: list[Offer]) -> list[Offer]:
    """Return all tools in random order without duplicate names."""
    named = {tool.name: tool for tool in more_tools}
    named.update({tool.name: tool for tool in tools})
    mixed = list(named.values())
    w.rng.shuffle(mixed)
    return mixed


def _normal(text: str) -> str:
    """Return the text in lower case without punctuation."""
    return re.sub(r"\W+", " ", text).strip().lower()


@cache
def _evaluation_requests() -> frozenset[str]:
    """Return all requests of the evaluation sets, normalized."""
    written = development_requests.REQUESTS.cases() + blind_requests.REQUESTS.cases()
    return frozenset(_normal(text) for _, text, _ in written)


def allowed(text: str) -> bool:
    """Return whether a request may be used for training, i.e. is in no evaluation set."""
    return _normal(text) not in _evaluation_requests()


BY_NAME = (
    ", {n} {s}", ", {n}: {s}", " ({n} {s})", " with {n} {s}", ". {n}: {s}", ". the {n} is {s}",
    ", and the {n} is {s}", ". use {s} as the {n}", ", with the {n} {s}", ", {n} = {s}",
    ". as {n} take {s}", ", {s} as {n}", ". make the {n} {s}",
)  # fmt: skip
"""Forms that add a value with the name of its parameter."""
BY_VALUE = (
    ". {s} is good", ". {s} please", ". make it {s}", ". {s} would be best", ". I'd prefer {s}",
    ", {s} if possible", ", {s} then", ". {s} will do", ", preferably {s}", ". I mean {s}",
    ", in other words {s}", ". {s} would be good", ". {s} is what I need", ", {s} would be nice",
)  # fmt: skip
"""Forms that add a value without the name of its parameter."""


def _and_more(w: Words, sort: str, frame: str, tool: Offer) -> tuple[str, str]:
    """Return the (sort, frame) with the value of an optional parameter appended at random."""
    r = w.rng
    slots_mentioned = slots_of(frame)
    missing_slots = [
        s for s in tool.keys if s not in slots_mentioned and tool.intent.params[s].optional
    ]
    ended = not frame or frame[-1] in "?!.}" or "? " in frame
    if not missing_slots or sort == "~" or r.random() > 0.16 or (ended and sort == "."):
        return sort, frame
    slot = r.choice(missing_slots)
    kind = tool.intent.params[slot].kind
    if kind.startswith(("bool ", "list ")):
        return sort, frame
    choice = kind == "unit" or kind.startswith("{")
    on = frame.endswith("}") and _runs_on(tool, frame)
    form = r.choice(BY_VALUE if choice and not on and r.random() < 0.6 else BY_NAME)
    name = re.sub(r"([a-z])([A-Z])", r"\1 \2", tool.keys[slot]).replace("_", " ").lower()
    form = form.replace("{n}", name).replace("{s}", f"{{{slot}}}")
    if on and form[0] == " ":
        form = "," + form
    if sort == "?" and form[0] == ".":
        return ".", f"{frame}?{form[1:]}"
    return sort, frame + form


def _runs_on(tool: Offer, frame: str) -> bool:
    """Return whether further words would be read as a part of the frame's last value."""
    last = list(PLACE.finditer(frame))[-1]
    return (last[3] or tool.intent.params[last[2]].kind) in argument_values.NOUN_KINDS


def single(w: Words, offered: list[Offer] | None = None) -> Request:
    """Return a request with one call. offered: tools of which one is requested, or None."""
    while True:
        if offered:
            tool = w.rng.choice(offered)
            form = w.rng.choice(tool.intent.frames)
            frame = resolve(w, form.text)
            if not can_answer(tool, frame):
                continue
            other_names = {t.intent.names[0] for t in offered if t is not tool}
            if other_names & excluded_by(tool.intent, form):
                continue
            mixed = offered
        else:
            intent = pick(w)
            form = w.rng.choice(intent.frames)
            frame = resolve(w, form.text)
            tool = offer_for(w, intent, frame)
            distractors = distractors_for(w, [intent], excluded_by(intent, form))
            if w.rng.random() < 0.12:
                excluded = excluded_by(intent, form).union(
                    *(incompatible_with(o.intent) for o in distractors)
                )
                distractors += echo_tool(w, frame, excluded | incompatible_with(intent))
            mixed = _shuffled_by_name(w, [tool], distractors)
        sort, frame = _and_more(w, form.sort, frame, tool)
        phrasing = wrap(w, sort, fill(w, frame, tool))
        if allowed(phrasing.text):
            return Request(mixed, phrasing.text, [call_of(tool, phrasing.arguments)], phrasing)


SEVERAL = frozenset(
    "city symbol id idint person first_name rare_word service file room doctor country venue day "
    "time title currency door product food document host app company dish user branch pet team "
    "person_name label image dir bill".split()
)
"""Kinds of which a request may name several values."""
PLURALS = re.compile(
    r"(?<![{:])\b(order|invoice|message|customer|client|ticket|mail|issue|user|file|word|service|"
    r"alarm|timer|email|parcel|package|light|lamp|hotel|room|door|flight|table|movie|film|book|"
    r"task|app|meeting|event|account|share|stock|contact|document|countdown|birthday)"
    r"\b(?![}:])(?=[^{]*\{)"
)
"""Nouns before a placeholder that become plural if it has several values."""


def several(w: Words) -> Request:
    """Return a request with two or three calls."""
    return _list_of(w) if w.rng.random() < 0.55 else _two(w)


def _list_of(w: Words) -> Request:
    """Return a request of one frame with several values of one slot."""
    r = w.rng
    while True:
        intent = pick(w)
        form = r.choice(intent.frames)
        sort = form.sort
        frame = resolve(w, form.text)
        slots = [
            f[2] for f in PLACE.finditer(frame)
            if not (f[1] or f[3] or f[4])
            and (intent.params[f[2]].kind in SEVERAL or intent.params[f[2]].kind.startswith("int"))
        ]  # fmt: skip
        if not slots or len(PLACE.findall(frame)) > 3 or sort == "." and frame.count(".") > 1:
            continue
        slot = r.choice(slots)
        if intent.params[slot].kind.startswith("int") and len(PLACE.findall(frame)) > 1:
            continue
        if r.random() < 0.5:
            frame = PLURALS.sub(r"\1s", frame, count=1)
        if sort == "?" and r.random() < 0.4:
            frame = frame.replace("what is ", "what are ", 1).replace("does ", "do ", 1)
        tool = offer_for(w, intent, frame)
        phrasing = fill(w, frame, tool)
        at = next(i for i, part in enumerate(phrasing.parts) if part[1] == slot)
        extra: list[str] = []
        for i in range(r.choice((1, 1, 1, 2))):
            value, text, copied = draw_value(w, intent.params[slot], tool.values[slot])
            name = f"{slot} {i}"
            phrasing.arguments[name] = value
            phrasing.copied |= {name} if copied else set()
            extra.append(name)
            phrasing.parts.insert(at + 1 + i, (text, name))
        named = [str(phrasing.arguments[s]).lower() for s in (slot, *extra)]
        if len(set(named)) <= len(extra) or any(" and " in text for text in named):
            continue
        _join(w, phrasing, at, len(extra))
        phrasing = wrap(w, sort, phrasing)
        if not allowed(phrasing.text):
            continue
        calls = []
        for name in (slot, *extra):
            arguments = {**phrasing.arguments, slot: phrasing.arguments[name]}
            calls.append(call_of(tool, arguments))
        mixed = _shuffled_by_name(
            w, [tool], distractors_for(w, [intent], excluded_by(intent, form), 3)
        )
        return Request(mixed, phrasing.text, calls)


def _join(w: Words, phrasing: Phrasing, at: int, more: int) -> None:
    """Insert words between the value at index `at` and the `more` values after it."""
    r = w.rng
    before = phrasing.parts[at - 1][0] if at else ""
    preposition = re.search(r"\b(in|for|at|of|from|to|with|about|on)( the)? $", before)
    again = ""
    if preposition and r.random() < 0.5:
        again = preposition[0]
    elif (word := re.search(r"(\w+) $", before)) and r.random() < 0.12:
        again = word[0]
    last = r.choice(
        (" and ", " and ", " and ", " and ", ", ", " as well as ", " & ", " and also ", ", and ")
    )
    for i in range(more, 0, -1):
        glue = last if i == more else ", "
        phrasing.parts.insert(at + i, (glue + again, None))
    if before and not again and more == 1 and r.random() < 0.1:
        phrasing.parts.insert(at, ("both ", None))


GLUE = " and | and |, and |, |. | and then | and also |; |. Then |. Also, ".split("|")
"""Conjunctions between two requests."""


def _second(w: Words, first: Intent) -> Intent:
    """Return the intent of a second request: random, or related to the first."""
    candidates = [i for i in intents() if i.names[0] in related(first)]
    return w.rng.choice(candidates) if candidates and w.rng.random() < 0.4 else pick(w)


@cache
def _speaking() -> tuple[tuple[Intent, tuple[Frame, ...]], ...]:
    """Return the intents with orders that end with free text, and these orders."""
    pairs = ((intent, _ending_orders(intent)) for intent in intents())
    return tuple((intent, frames) for intent, frames in pairs if frames)


def _ending_orders(intent: Intent) -> tuple[Frame, ...]:
    """Return the orders that end with free text."""
    orders = []
    for frame in intent.frames:
        end = re.search(r"\{(\w+)(?::(\w+))?\}$", frame.text)
        kind = (end[2] or intent.params[end[1]].kind) if end and end[1] in intent.params else ""
        if frame.sort == "!" and kind in SPEECH:
            orders.append(frame)
    return tuple(orders)


SPEECH = frozenset("text task topic howto howto_said event phrase_text bug commit".split())
"""Kinds of several words, after which "and" may begin a second request."""


def _pair_of(w: Words) -> tuple[Intent, Intent, list[Frame]]:
    """Return two intents, or one twice, and a frame of each. The first may end with free text."""
    r = w.rng
    if r.random() < 0.2:
        first, endings = r.choice(_speaking())
        second = _second(w, first)
        orders = [f for f in second.frames if f.sort == "!"]
        if orders:
            return first, second, [r.choice(endings), r.choice(orders)]
    first = pick(w)
    again = r.random() < 0.4
    second = first if again else _second(w, first)
    forms = [r.choice(first.frames)]
    forms.append(forms[0] if again and r.random() < 0.7 else r.choice(second.frames))
    return first, second, forms


def _two(w: Words) -> Request:
    """Return two requests in one sentence: of two tools, or of one with different values."""
    while True:
        first, second, forms = _pair_of(w)
        again = second is first
        if any(f.sort == "." and ("." in f.text or "?" in f.text) for f in forms):
            continue
        without = excluded_by(first, forms[0]) | excluded_by(second, forms[1])
        mistaken = second.names[0] in excluded_by(first, forms[0])
        if not again and (mistaken or first.names[0] in excluded_by(second, forms[1])):
            continue
        same = again and forms[0] == forms[1]
        frames = [resolve(w, form.text) for form in forms]
        both = " ".join(frames) if again else frames[0]
        tools = [offer_for(w, first, both)]
        tools.append(tools[0] if again else offer_for(w, second, frames[1]))
        phrasings = [fill(w, frame, tool) for frame, tool in zip(frames, tools, strict=True)]
        if again and phrasings[0].arguments == phrasings[1].arguments:
            continue
        if not again and tools[0].name == tools[1].name:
            continue
        joined = wrap(w, *_one_sentence(w, [form.sort for form in forms], phrasings, same))
        if not allowed(joined.text):
            continue
        one = {s: v for s, v in joined.arguments.items() if not s.endswith(" 2")}
        two = {s[:-2]: v for s, v in joined.arguments.items() if s.endswith(" 2")}
        mixed = _shuffled_by_name(w, list(tools), distractors_for(w, [first], without, 2))
        calls = [call_of(tools[0], one), call_of(tools[1], two)]
        return Request(mixed, joined.text, calls)


def _one_sentence(
    w: Words, sorts: list[str], phrasings: list[Phrasing], same: bool
) -> tuple[str, Phrasing]:
    """Return the sort and the phrasing of two joined requests. Slots of the second end in " 2"."""
    r = w.rng
    parts = list(phrasings[1].parts)
    if same and sorts[0] == "!" and r.random() < 0.6:
        head, slot = parts[0]
        if slot is None and " " in head.strip():
            parts[0] = (head.split(" ", 1)[1], None)
    glue = r.choice(GLUE)
    if glue == ". " and sorts[0] == "?":
        glue = "? "
    front = list(phrasings[0].parts)
    if sorts[0] == "~":
        lead = r.choice(("tell me ", "show me ", "give me ", "what is ", "I need "))
        front.insert(0, (lead, None))
    if sorts[1] == "~" and glue[0] in ".?;":
        parts.insert(0, (r.choice(("what is ", "tell me ", "show me ")), None))
    joined = Phrasing(
        [*front, (glue, None), *((t, f"{s} 2" if s else None) for t, s in parts)],
        {**phrasings[0].arguments, **{f"{s} 2": v for s, v in phrasings[1].arguments.items()}},
        phrasings[0].copied | {f"{s} 2" for s in phrasings[1].copied},
    )
    return "." if sorts[0] == "~" else sorts[0], joined


VAGUE = frozenset(
    "get find show search look up for check i need want would like have can could see give bring "
    "tell about know a the an me us my some any please what is where".split()
)
"""Words that do not identify a tool."""


def vague(frame: str) -> bool:
    """Return whether a resolved frame has no words but values, so that many tools may be meant."""
    words = re.findall(r"[a-z]+", PLACE.sub(" ", frame).lower())
    return bool(slots_of(frame)) and VAGUE.issuperset(words)


def foreign(w: Words, offered: list[Offer]) -> str:
    """Return a request that none of the tools fits."""
    while True:
        intent = pick(w)
        form = w.rng.choice(intent.frames)
        broad = {"search_web", "get_news"} if form.sort in "?~" else set()
        if any(_may_answer(intent, t.intent) or t.intent.names[0] in broad for t in offered):
            continue
        frame = resolve(w, form.text)
        if vague(frame):
            continue
        phrasing = wrap(w, form.sort, fill(w, frame, offer_for(w, intent, frame)))
        if allowed(phrasing.text):
            return phrasing.text


def rivals(w: Words) -> list[Offer]:
    """Return two to seven tools, some of them similar."""
    intent = pick(w)
    if w.rng.random() < 0.5 and (own_tools := domain(w, intent, w.rng.randint(2, 4))):
        return _shuffled_by_name(w, [offer(w, intent)], own_tools)
    distractors = distractors_for(w, [intent], incompatible_with(intent), 6)
    excluded = incompatible_with(intent).union(
        *(incompatible_with(tool.intent) for tool in distractors)
    )
    return _shuffled_by_name(w, [offer(w, intent)], [*distractors, *tools(w, excluded)][:6])


ONLY_ACTS = frozenset("! .".split())
"""Sorts of frames that ask for an action, not for information."""


def unfit(w: Words) -> Request:
    """Return tools, and a request that none of them fits."""
    r = w.rng
    while True:
        intent = pick(w)
        form = r.choice(intent.frames)
        frame = resolve(w, form.text)
        if vague(frame):
            continue
        phrasing = wrap(w, form.sort, fill(w, frame, offer_for(w, intent, frame)))
        if allowed(phrasing.text):
            break
    without = related(intent)
    if form.sort not in ONLY_ACTS or r.random() < 0.5:
        without |= {"search_web", "get_news"}
    unrelated: list[Offer] = []
    while not unrelated:
        unrelated = [t for t in tools(w, without) if not _may_answer(intent, t.intent)]
    if intent.names[0] in _neighbours(RELATED) and r.random() < 0.4:
        excluded = without.union(*(incompatible_with(other.intent) for other in unrelated))
        echoed = [t for t in echo_tool(w, frame, excluded) if not _may_answer(intent, t.intent)]
        unrelated = _shuffled_by_name(w, unrelated, echoed)
    return Request(unrelated, phrasing.text, [])


def _may_answer(intent: Intent, tool: Intent) -> bool:
    """Return whether a made-up tool shares its verb and noun with the requested one."""
    words = set(intent.names[0].split("_"))
    other_words = set(tool.names[0].split("_"))
    return len(words & other_words) > 1 or tool.names[0] in related(intent)


def tools(w: Words, without: frozenset[str] = frozenset()) -> list[Offer]:
    """Return one to six tools for a conversation that requests none of them."""
    if w.rng.random() < 0.35:
        chosen = w.rng.choice(intents())
        own_tools = [offer(w, chosen), *domain(w, chosen)]
        if own_tools := [tool for tool in own_tools if tool.intent.names[0] not in without]:
            return _shuffled_by_name(w, [], own_tools)
    while not (drawn := distractors_for(w, [], without, 6)):
        pass
    return _shuffled_by_name(w, [], drawn)


def spoken(w: Words, text: str) -> str:
    """Return a sentence as people type it: with or without capitals and punctuation."""
    r = w.rng
    asks = text.split(" ")[0] in (
        "who what why how is are do does can which where when should may did".split()
    )
    phrasing = Phrasing([(text, None)], {}, set())
    if r.random() < 0.5:
        phrasing.parts.append(
            (r.choice(("?", "?", "?", "?", ".")) if asks else r.choice(".!."), None)
        )
    return _cased(w, phrasing).text


FOLLOW = (
    "and {}?", "and {}?", "what about {}?", "how about {}?", "and in {}?", "and for {}?", "now {}",
    "same for {}", "the same for {} please", "and {} please", "also {}", "what about {} then?",
    "do the same for {}", "and what about {}?", "{}?", "again for {}", "now the same with {}",
    "now for {}", "then {}", "please do {} too", "and {} too", "ok, and {}?", "next: {}", "try {}",
)  # fmt: skip
INSTEAD = (
    "make it {}",
    "{} instead",
    "no, {}",
    "I meant {}",
    "make that {}",
    "sorry, {}",
    "rather {}",
    "better {}",
)


def follow_up(w: Words, request: Request) -> tuple[str, Call] | None:
    """Return a short second request that changes one value of the first, and its call."""
    if request.phrasing is None or len(request.calls) != 1:
        return None
    name, arguments = request.calls[0]
    tool = next(t for t in request.tools if t.name == name)
    slots = [
        s for s in request.phrasing.arguments
        if s in tool.keys and (tool.intent.params[s].kind in SEVERAL
        or tool.intent.params[s].kind.startswith(("int", "num", "money", "unit", "{")))
    ]  # fmt: skip
    if not slots:
        return None
    slot = w.rng.choice(slots)
    kind = tool.intent.params[slot].kind
    value, text, copied = draw_value(w, tool.intent.params[slot], tool.values[slot])
    if value == arguments[tool.keys[slot]]:
        return None
    forms = FOLLOW if kind in SEVERAL and w.rng.random() < 0.8 else INSTEAD
    head, tail = w.rng.choice(forms).split("{}")
    phrasing = Phrasing(
        [(head, None), (text, slot), (tail, None)], {slot: value}, {slot} if copied else set()
    )
    phrasing.parts = [part for part in phrasing.parts if part[0]]
    phrasing = _cased(w, phrasing)
    return phrasing.text, (name, {**arguments, tool.keys[slot]: phrasing.arguments[slot]})


DONE = (
    '{"status": "ok"}', "ok", '{"success": true}', "done", '{"ok": true}', "null", "OK", "success",
    '{"result": "ok"}', "true", '{"status": "success"}', "{}",
)  # fmt: skip
ERRORS = "{x} not found|timeout|permission denied|no such {x}|service unavailable|invalid {x}"
RESULT_KEYS = "temperature price status result time condition id total date name humidity".split()
SKIES = "sunny,cloudy,rain,snow,light rain,clear,windy".split(",")


def listed(items: list[str]) -> str:
    """Return a list in words, e.g. "a, b and c"."""
    return ", ".join(items[:-1]) + (" and " if items[1:] else "") + items[-1]


def _datum(w: Words) -> Any:
    """Return a random JSON value."""
    r = w.rng
    kind = r.randrange(6)
    if kind == 0:
        return r.randint(0, 999)
    if kind == 1:
        return round(r.uniform(0, 100), 1)
    return (
        w.phrase(2),
        argument_values.city(w),
        argument_values.clock(w),
        r.choice((w.code(), *SKIES)),
    )[kind - 2]


def _plain(w: Words) -> str:
    """Return a result that is not JSON."""
    r = w.rng
    return r.choice(
        (
            f"{r.randint(-20, 40)} degrees, {r.choice(SKIES)}",
            argument_values.filled(w, r.choice(argument_values.CLAUSES)),
            str(r.randint(0, 9999)),
            argument_values.filled(w, r.choice(argument_values.SENTENCES)).removesuffix("."),
            f"{w.noun()}: {w.phrase(3)}",
            f"{argument_values.city(w)}, {r.randint(1, 40)} °C",
        )
    )


def result(w: Words) -> tuple[str, str]:
    """Return a tool's result and the answer that reports it."""
    r = w.rng
    chance = r.random()
    if chance < 0.5:
        keys = [r.choice((*RESULT_KEYS, w.identifier(1), w.identifier(2))) for _ in range(3)]
        data = {key: _datum(w) for key in keys[: r.choice((1, 1, 2, 2, 3))]}
        sentence = listed(
            [f"the {key.replace('_', ' ')} is {value}" for key, value in data.items()]
        )
        return json.dumps(data, ensure_ascii=False), sentence[0].upper() + sentence[1:] + "."
    if chance < 0.65:
        return r.choice(DONE), "Done."
    if chance < 0.75:
        items = list(dict.fromkeys(w.phrase(2) for _ in range(r.randint(0, 4))))
        sentence = f"I found {listed(items)}." if items else "I found nothing."
        return json.dumps(items, ensure_ascii=False), sentence
    if chance < 0.82:
        error = r.choice(ERRORS.split("|")).format(x=w.noun())
        return json.dumps({"error": error}), f"That did not work: {error}."
    text = _plain(w)
    return text, f"The answer is: {text}."
