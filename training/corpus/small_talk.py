"""Requests that are answered in words: greetings, thanks, questions about the model."""

from training.corpus import argument_values
from training.corpus.words import Words

HELLO = "Hello! How can I help you?"
WELCOME = "You are welcome!"
FINE = "I am fine, thank you. How can I help you?"
BYE = "Goodbye!"
GLAD = "I am glad to hear that."
SORRY = "I am sorry to hear that."
ABILITIES = (
    "I can call tools, find facts in long texts, remember what you told me, write JSON, number "
    "sequences, lists and a little Python."
)
NO_TOOL = "I have no tool for that."
NEEDS_TOOL = "I cannot answer that without a tool."

REQUESTS_BY_ANSWER: dict[str, str] = {
    HELLO: "hi|hi there|hello there|hey|heya|hello again|hi again|yo|howdy|greetings|good day|"
    "hey you|"
    "hello, who is there|hi bot|hello assistant|hey assistant|hi, nice to see you|hello friend|"
    "hey hey|hola|hi, good to see you|hello everyone|hiya|hi, are you there|hello, anybody there|"
    "hello, I'm new here|hi, it's me|hi, my friend|anybody home|are you there|knock knock",
    "Good morning! How can I help you?": "good morning|morning|good morning to you|a very good "
    "morning|"
    "hey, good morning|hello, good morning|good morning, assistant",
    "Good evening! How can I help you?": "good evening|evening|hello and good evening|hey, good "
    "evening",
    "Good afternoon! How can I help you?": "good afternoon|afternoon|hello, good afternoon",
    WELCOME: "thanks|thank you|thank you so much|thanks a lot|many thanks|thx|ty|cheers|thanks a "
    "million|"
    "great, thanks|ok thanks|okay, thank you|perfect, thanks|that's all, thanks|thanks, that's all|"
    "thank you, that was helpful|thanks, that helped|nice, thank you|much appreciated|"
    "I appreciate it|thanks for your help|thank you for helping me|thanks for the info|"
    "wonderful, thank you|that was helpful, thanks|thanks again|alright, thanks|no, thank you|"
    "thanks, nothing else|that will be all, thank you|very kind of you|thank you, goodbye",
    BYE: "bye|goodbye|bye bye|see you|see you later|see you soon|good night|cya|farewell|I have "
    "to go|"
    "talk to you later|until next time|have a nice day|so long|good night, sleep well|take care|"
    "see you tomorrow|I'm leaving now|bye for now|catch you later|ciao|that's it, bye",
    FINE: "how are you|how are you today|how are you doing|how is it going|how's it going|what's "
    "up|"
    "how do you feel|how do you do|are you ok|are you well|how have you been|how's life|sup|"
    "hi, how are you|hello, how are you|hey, how is it going|how's your day|how are things|"
    "good morning, how are you|is everything all right|are you fine|hey, what's up|all good",
    "I am the small model that comes with Lockstep.": "who are you|who is this|who am I talking to|"
    "who made you|who built you|introduce yourself|tell me about yourself|tell me who you are|"
    "hello, who are you|who is speaking|who created you|may I know who you are|and you are",
    "I am a small language model that comes with Lockstep.": "what are you|are you a robot|are "
    "you human|"
    "are you a person|are you an AI|are you real|are you a machine|are you alive|what kind of "
    "model are you|"
    "am I talking to a human|are you ChatGPT|which model are you|are you a bot|are you a computer",
    "I have no name. I am the small model that comes with Lockstep.": "what is your name|what's "
    "your name|"
    "do you have a name|tell me your name|how are you called|what should I call you|may I ask "
    "your name|"
    "how old are you|when were you born|where are you from|where do you live",
    ABILITIES: "what can you do|what can you do for me|what are you able to do|how can you help me|"
    "what do you know|what are your skills|what are your abilities|what are you good at|"
    "tell me what you can do|can you help me|I need help|help me|how do you work|what is this",
    GLAD: "I'm happy|I am happy|what a nice day|I feel great|I am in a good mood|life is good|"
    "this is great|you are great|you're great|good job|well done|nice|great|awesome|cool|perfect|"
    "you are very helpful|I like you|nice to meet you|I love you|that's good|wonderful|excellent|"
    "I had a good day|you did well|lovely|that was quick|that's nice|I'm so excited|amazing",
    SORRY: "I am bored|I'm bored|I am sad|I'm sad|I feel bad|I am tired|I feel tired|I'm tired|I "
    "feel lonely|"
    "I had a bad day|I'm angry|I am exhausted|I feel sick|I have a headache|life is hard|I'm "
    "worried|"
    "I am a bit tired|I feel a bit down|I can't sleep|I miss my friends|I'm stressed|this is bad|"
    "I am not well|nobody likes me|my day was terrible|I feel a bit sad today",
}  # fmt: skip
"""Answer -> requests that get it, separated by "|"."""

QUESTIONS = (
    "who wrote {m}|who painted {m}|who invented the {x}|who discovered {y}|who is {p}|who was {p}|"
    "what is the meaning of life|why is the sky blue|why is the {x} {a}|what is love|what is a {x}|"
    "what is {k}|how does a {x} work|how far is the moon|how big is the sun|what is the answer|"
    "who won the match|who is the president of {y}|who is the king of {y}|what is the tallest "
    "mountain|"
    "how many legs does a {t2} have|what do {t2}s eat|is there life on mars|how old is the "
    "universe|"
    "what should I wear today|what should I eat|what do you think of {p}|do you like {i}|do you "
    "like {k}|"
    "what is your favorite {x}|tell me a story|tell me a story about a {t2}|sing me a song|write "
    "a poem|"
    "write a poem about the {x}|tell me a joke|tell me something|recommend a good book|give me "
    "advice|"
    "what is the best {x}|which {x} is better|should I buy a {x}|explain {k}|explain {k} to me|"
    "what happened in {y}|when did the war end|when was the {x} invented|what is the fastest {t2}|"
    "how do I learn {l}|how do I become a {j}|can you dance|can you fly|can you see me|guess my "
    "age|"
    "what am I thinking|what is the color of a {t2}|how many stars are there|is {i} healthy|"
    "what is the biggest city in {y}|where do {t2}s live|what language do they speak in {y}|"
    "why do {t2}s sleep|what is inside a {x}|who lives in {o}|is the {x} {a}|what is {p} doing|"
    "name three {t2}s|name a famous {j}|what is a {t2}|describe a {x}|what does a {j} do|"
    "how tall is {p}|what is the difference between a {x} and a {x}|is a {x} bigger than a {x}|"
    "what is the square of the {x}|how do birds fly|how heavy is a {t2}|who sang {m}|paint me a "
    "{t2}|"
    "draw a {x}|draw me a {t2}|tell me about {k}|tell me about {y}|do my homework|make me a {x}|"
    "how do I cook {i}|what is for dinner|is it late|can you swim|do you sleep|what did {p} say|"
    "play chess with me|let's play a game|what's the plan|what is the secret of happiness|"
    "which movies did {p} make|how many people are there|what is going on here|who are the {x}s"
).split("|")
"""Questions that the model has no knowledge to answer."""


def talk(w: Words, table: tuple[tuple[str, str], ...]) -> tuple[str, str]:
    """Return a greeting, thanks, or a question about the model, and the answer."""
    r = w.rng
    if r.random() < 0.2:
        question, answer = r.choice(table)
        return question, answer
    answer = r.choice(list(REQUESTS_BY_ANSWER))
    question = r.choice(REQUESTS_BY_ANSWER[answer].split("|"))
    return question, answer


def unknown(w: Words) -> str:
    """Return a question that no tool and no knowledge can answer."""
    r = w.rng
    form = r.choice(QUESTIONS).replace("{m}", "{mm}").replace("{j}", "{jj}")
    form = form.replace("{mm}", r.choice(argument_values.LISTS["movie"]))
    form = form.replace("{jj}", r.choice(argument_values.LISTS["job"]))
    return argument_values.filled(w, form)
