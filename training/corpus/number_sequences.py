"""Number sequences as people ask for them."""

from training.corpus.argument_values import number_words
from training.corpus.words import Words

ORDERS = (
    "list {}", "give me {}", "write down {}", "name {}", "show me {}", "print {}", "what are {}?",
    "can you list {}?", "please list {}", "I need {}", "write {}", "tell me {}", "{}", "{} please",
)  # fmt: skip


def question(w: Words) -> tuple[str, list[int]]:
    """What is asked, and the numbers."""
    r = w.rng
    count = r.randint(3, r.choice((12, 30, 50)))
    said = number_words(count) if r.random() < 0.4 else str(count)
    kind = r.randrange(10)
    a = r.randint(0, 100)
    d = r.randint(1, 12)
    n = range(count)
    if kind == 0:
        high = a + r.randint(3, 50)
        text = r.choice(
            ("count from {a} to {b}", "count up from {a} to {b}", "the numbers from {a} to {b}")
        )
        return _said(w, text.format(a=a, b=high)), list(range(a, high + 1))
    if kind == 1:
        high = r.randint(3, 60)
        return _said(w, r.choice((f"count to {high}", f"count up to {high}"))), list(
            range(1, high + 1)
        )
    if kind == 2:
        low = r.randint(0, 30)
        high = low + r.randint(3, 40)
        return _said(w, f"count down from {high} to {low}"), list(range(high, low - 1, -1))
    if kind == 3:
        text = r.choice(("continue the sequence with {n} more numbers: {g}",
            "continue with {n} numbers: {g}",
                         "continue: {g}. {n} more numbers", "the next {n} numbers of {g}",
                         "what are the next {n} numbers: {g}"))  # fmt: skip
        given = [a + d * i for i in range(r.randint(4, 10))]
        found = [given[-1] + d * (i + 1) for i in n]
        return _said(w, text.format(n=said, g=", ".join(map(str, given))), False), found
    if kind == 4:
        text = r.choice(("count from {a} in steps of {d}, {n} numbers",
            "count by {d} from {a}, {n} numbers",
                         "{n} numbers from {a} in steps of {d}",
                         "start at {a} and add {d}, {n} numbers"))  # fmt: skip
        return _said(w, text.format(a=a, d=d, n=said)), [a + d * i for i in n]
    if kind == 5:
        text = r.choice(("the first {n} multiples of {d}", "{n} multiples of {d}"))
        return _said(w, text.format(n=said, d=d), True), [d * (i + 1) for i in n]
    few = min(count, 20)
    short = number_words(few) if r.random() < 0.4 else str(few)
    name, made = r.choice((
        ("even numbers", [2 * i + 2 for i in range(few)]),
        ("odd numbers", [2 * i + 1 for i in range(few)]),
        ("Fibonacci numbers", _fibonacci(few)), ("cubes", [(i + 1) ** 3 for i in range(few)]),
        ("square numbers", [(i + 1) ** 2 for i in range(few)]),
        ("powers of three", [3**i for i in range(few)]),
        ("triangular numbers", [(i + 1) * (i + 2) // 2 for i in range(few)]),
        ("prime numbers", [p for p in range(2, 80) if all(p % q for q in range(2, p))][:few]),
        ("natural numbers", [i + 1 for i in range(few)]),
        ("powers of ten", [10**i for i in range(few)]),
    ))  # fmt: skip
    return _said(w, f"the first {short} {name}", True), made


def _fibonacci(count: int) -> list[int]:
    found = [0, 1]
    while len(found) < count:
        found.append(found[-1] + found[-2])
    return found[:count]


def _said(w: Words, text: str, listed: bool | None = None) -> str:
    """The request in a sentence."""
    r = w.rng
    if listed or (listed is None and text[0].isdigit()) or text.startswith("the "):
        text = r.choice(ORDERS).format(text)
    elif r.random() < 0.3 and listed is None:
        text = r.choice(("please {}", "can you {}?", "could you {}?", "I want you to {}")).format(
            text
        )
    chance = r.random()
    if chance < 0.7:
        text = text[0].upper() + text[1:]
    if text[-1] not in "?!." and r.random() < 0.6 and listed is not False:
        text += "."
    return text
