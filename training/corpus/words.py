"""Words, names and values from syllables, split into a training and an evaluation side."""

import random
import zlib
from collections import defaultdict
from functools import cache

SYLLABLES = (
    "ba be bi bo bu da de di do du fa fe fi fo fu ga ge gi go gu ha he hi ho ka ke ki ko ku "
    "la le li lo lu ma me mi mo mu na ne ni no nu pa pe pi po pu ra re ri ro ru sa se si so "
    "su ta te ti to tu va ve vi vo wa we wi wo ya yo za ze zi zo zu bra cle dri fro gla kri "
    "plo sto tra vin mer sol tar nor lin dan mark ber ton ley field wick"
).split()
COMMON = (
    "time year people way day man thing woman life child world school state family student "
    "group country problem hand part place case week company system program question work "
    "number night point home water room mother area money story fact month lot right study "
    "book eye job word business issue side kind head house service friend father power hour "
    "game line end member law car city community name president team minute idea body "
    "information back parent face others level office door health person art war history "
    "party result change morning reason research girl guy moment air teacher force education "
    "river garden window bridge market engine signal report ticket order invoice account "
    "folder record table channel message device sensor camera battery printer router server "
    "cluster package module version branch label budget profile"
).split()
ADJECTIVES = (
    "silver golden quiet rapid gentle bright hollow ancient crimson velvet amber frozen "
    "hidden lucky noble purple rusty scarlet silent smooth sturdy tiny violet wooden yellow "
    "brave calm clever cosmic curious dusty eager emerald fancy fierce fluffy foggy giant "
    "grumpy happy humble icy jolly lazy loyal magic mellow misty modest narrow polite proud "
    "royal salty shiny sleepy solar spicy stormy sunny swift tender turbo vivid warm wild "
    "wise zesty copper bronze ivory cobalt"
).split()
ANIMALS = (
    "platypus otter falcon badger lynx heron walrus gecko panther beaver raven tiger dolphin "
    "hedgehog lizard magpie narwhal ocelot penguin quokka rabbit salmon toucan urchin viper "
    "weasel yak zebra antelope bison camel donkey eagle ferret giraffe hamster iguana jackal "
    "koala lemur mongoose newt octopus puffin raccoon sparrow turtle vulture wombat alpaca "
    "buffalo cheetah dingo emu finch goose"
).split()
VERBS = (
    "get set create delete update find list send open close start stop add remove check fetch "
    "book move copy rename schedule cancel convert compute measure assign archive restore "
    "resize merge split print scan lock unlock publish deploy rotate reserve track translate "
    "summarize export"
).split()


VOCABULARY: list[str] = []
"""Words of the Python installation's texts; stdlib_text.load_filler fills it."""
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def known() -> list[str]:
    """Return correctly spelled words."""
    return VOCABULARY or [*COMMON, *ADJECTIVES, *ANIMALS]


@cache
def _followers(count: int) -> dict[str, str]:
    """Return two letters -> letters that follow them in the first `count` known words.

    A full stop marks the beginning and the end of a word.
    """
    letters_by_pair: dict[str, list[str]] = defaultdict(list)
    for word in known()[:count]:
        padded = f"..{word}."
        for i in range(len(word) + 1):
            letters_by_pair[padded[i : i + 2]].append(padded[i + 2])
    return {pair: "".join(letters) for pair, letters in letters_by_pair.items()}


def spelled_alike(rng: random.Random) -> str:
    """Return a nonexistent word of 3 to 12 letters with the letter statistics of known words."""
    followers = _followers(len(known()))
    while True:
        word = ".."
        while not (word.endswith(".") and len(word) > 2) and len(word) < 15:
            word += rng.choice(followers[word[-2:]])
        if 3 <= len(word.strip(".")) <= 12:
            return word.strip(".")


def misspelled(rng: random.Random, word: str) -> str:
    """Return the word with one letter doubled, dropped, replaced, or two swapped."""
    at = rng.randrange(1, len(word) - 1)
    head = word[:at]
    letter = word[at]
    tail = word[at + 1 :]
    doubled = head + letter * 2 + tail
    wrong = head + rng.choice(LETTERS) + tail
    swapped = head + tail[0] + letter + tail[1:]
    return rng.choice((head + tail, doubled, wrong, swapped))


def held_out(text: str) -> bool:
    """Return whether a name, value or needle belongs to evaluation: one in eight, by its hash."""
    return zlib.crc32(text.encode()) % 8 == 0


class Words:
    """Seeded source of words. Its made-up words belong to one side of the split."""

    def __init__(self, rng: random.Random, evaluation: bool) -> None:
        self.rng = rng
        self.evaluation = evaluation

    def fresh(self, make) -> str:
        """Return the first result of make() on this side of the split."""
        while True:
            text = make()
            if held_out(text) == self.evaluation:
                return text

    def made_up(self) -> str:
        """Return a word of syllables, a word-like string, a known word, or a misspelled one."""
        return self.fresh(self._word)

    def _word(self) -> str:
        """Return a made-up word of either side."""
        chance = self.rng.random()
        if chance < 0.35:
            return "".join(self.rng.choices(SYLLABLES, k=self.rng.randint(2, 3)))
        if chance < 0.65:
            return spelled_alike(self.rng)
        word = self.rng.choice(known())
        return word if chance < 0.9 else misspelled(self.rng, word)

    def noun(self) -> str:
        """Return a common noun, or a made-up one."""
        return self.rng.choice(COMMON) if self.rng.random() < 0.6 else self.made_up()

    def name(self) -> str:
        """Return a made-up proper name."""
        return self.made_up().capitalize()

    def identifier(self, parts: int) -> str:
        """Return a snake_case name of nouns; the split applies to the whole name."""
        return self.fresh(lambda: "_".join(self.noun() for _ in range(parts)))

    def phrase(self, max_words: int = 4) -> str:
        """Return 1 to `max_words` words; the split applies to the whole phrase."""
        return self.fresh(
            lambda: " ".join(self.noun() for _ in range(self.rng.randint(1, max_words)))
        )

    def secret(self) -> str:
        """Return a phrase such as "silver platypus 22"; the split applies to the whole phrase."""
        pick = self.rng.choice
        return self.fresh(lambda: f"{pick(ADJECTIVES)} {pick(ANIMALS)} {self.rng.randint(0, 99)}")

    def code(self) -> str:
        """Return a code such as "QX-4821"."""
        letters = "".join(self.rng.choices("ABCDEFGHJKLMNPQRSTUVWXYZ", k=self.rng.randint(1, 3)))
        return self.fresh(lambda: f"{letters}-{self.rng.randint(10, 9999)}")
