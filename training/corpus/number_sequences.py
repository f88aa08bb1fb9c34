"""Number sequences in free phrasing."""

from training.corpus.argument_values import number_words
from training.corpus.words import Words

ORDERS = (
    "list {}", "give me {}", "write down {}", "name {}", "show me {}", "print {}", "what are {}?",
    "can you list {}?", "please list {}", "I need {}", "write {}", "tell me {}", "{}", "{} please",
)  # fmt: skip


def question(w: Words) -> tuple[str, list[int]]:
    """Return a request and its numbers."""
    r = w.rng
    count = r.randint(3, r.choice((12, 30, 50)))
    count_phrase = number_words(count) if r.random() < 0.4 else str(count)
    kind = r.randrange(10)
    a = r.randint(0, 100)
    d = r.randint(1, 12)
    n = range(count)
    if kind == 0:
        high = a + r.randint(3, 50)
        text = r.choice(
            ("count from {a} to {b}", "count up from {a} to {b}", "the numbers from {a} to {b}")
        )
        return _sentence(w, text.format(a=a, b=high)), list(range(a, high + 1))
    if kind == 1:
        high = r.randint(3, 60)
        return _sentence(w, r.choice((f"count to {high}", f"count up to {high}"))), list(
            range(1, high + 1)
        )
    if kind == 2:
        low = r.randint(0, 30)
        high = low + r.randint(3, 40)
        return _sentence(w, f"count down from {high} to {low}"), list(range(high, low - 1, -1))
    if kind == 3:
        text = r.choice(("continue the sequence with {n} more numbers: {g}",
            "continue with {n} numbers: {g}",
                         "continue: {g}. {n} more numbers", "the next {n} numbers of {g}",
                         "what are the next {n} numbers: {g}"))  # fmt: skip
        shown = [a + d * i for i in range(r.randint(4, 10))]
        following = [shown[-1] + d * (i + 1) for i in n]
        return _sentence(
            w, text.format(n=count_phrase, g=", ".join(map(str, shown))), False
        ), following
    if kind == 4:
        text = r.choice(("count from {a} in steps of {d}, {n} numbers",
            "count by {d} from {a}, {n} numbers",
                         "{n} numbers from {a} in steps of {d}",
                         "start at {a} and add {d}, {n} numbers"))  # fmt: skip
        return _sentence(w, text.format(a=a, d=d, n=count_phrase)), [a + d * i for i in n]
    if kind == 5:
        text = r.choice(("the first {n} multiples of {d}", "{n} multiples of {d}"))
        return _sentence(w, text.format(n=count_phrase, d=d), True), [d * (i + 1) for i in n]
    length = min(count, 20)
    short_phrase = number_words(length) if r.random() < 0.4 else str(length)
    name, numbers = r.choice((
        ("even numbers", [2 * i + 2 for i in range(length)]),
        ("odd numbers", [2 * i + 1 for i in range(length)]),
        ("Fibonacci numbers", _fibonacci(length)), ("cubes", [(i + 1) ** 3 for i in range(length)]),
        ("square numbers", [(i + 1) ** 2 for i in range(length)]),
        ("powers of three", [3**i for i in range(length)]),
        ("triangular numbers", [(i + 1) * (i + 2) // 2 for i in range(length)]),
        ("prime numbers", [p for p in range(2, 80) if all(p % q for q in range(2, p))][:length]),
        ("natural numbers", [i + 1 for i in range(length)]),
        ("powers of ten", [10**i for i in range(length)]),
    ))  # fmt: skip
    return _sentence(w, f"the first {short_phrase} {name}", True), numbers


def _fibonacci(count: int) -> list[int]:
    """Return the first Fibonacci numbers."""
    numbers = [0, 1]
    while len(numbers) < count:
        numbers.append(numbers[-1] + numbers[-2])
    return numbers[:count]


def _sentence(w: Words, text: str, listed: bool | None = None) -> str:
    """Return the request as a sentence."""
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
