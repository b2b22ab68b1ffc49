"""Ways to ask: a small grammar of polite and plain request forms, built around a slot. What evaluate.py asks
with (the lists named *_HELD) is taken out here, so that it stays unseen."""
import itertools

HELD_TOPIC = ["Help me understand {a}.", "Could you tell me what {a} is about?", "I wonder what {a} is.", "Would you please describe {a} for me?",
              "I keep reading about {a}, what is it?", "Can you give me an idea of {a}?"]
HELD_LONG = ["Could you go deeper into {a}?", "Please give a longer explanation of {a}."]
HELD_WHY = ["For what reason do we have {a}?", "What are the advantages of {a}?"]
HELD_WORD = ["Could you define the word {w} for me?", "Do you know what {w} means?", "I want to know what the word {w} means.", "How would you explain the word {w}?"]
HELD_NOUN = ["I would like to know what {a} is.", "Please tell me what {a} is."]
HELD_VERB = ["What does one mean by to {w}?"]
HELD_SUM = ["Please work out {x} {o} {y}.", "I need to know {x} {o} {y}."]
HELD_EXAMPLE, HELD_SYNONYM, HELD_OPPOSITE = ["I need a sentence that uses {w}."], ["Is there another word for {w}?"], ["Do you know the opposite of {w}?"]
HELD_STORY = ["I would love to hear a story about {a}.", "Invent a little story about {a}."]
ALL_HELD = {x.lower().rstrip("?.") for y in (HELD_TOPIC, HELD_LONG, HELD_WHY, HELD_WORD, HELD_NOUN, HELD_VERB, HELD_SUM, HELD_EXAMPLE, HELD_SYNONYM, HELD_OPPOSITE, HELD_STORY) for x in y}
ALL_HELD |= {x.replace("{w}", "{a}") for x in ALL_HELD} | {x.replace("{a}", "{w}") for x in ALL_HELD}

ASKING = ([f"{c} you {p}{v}" for c in ("can", "could", "would", "will") for p in ("", "please ") for v in ("tell me", "explain", "explain to me", "say", "show me", "let me know")]
          + ["tell me", "please tell me", "do you know", "do you happen to know", "I want to know", "I'd like to know", "I would like to know", "I want to learn", "I need to know", "I would like to understand",
             "I want to understand", "I do not know", "I don't know", "I do not understand", "I am not sure", "I am curious", "I forgot", "I have forgotten", "remind me", "let me know", "help me find out", "any idea",
             "please say", "please explain", "explain", "explain to me", "teach me", "we want to know", "I wish to know", "may I ask", "can I ask", "I must know", "I have to know", "you surely know", "maybe you know", "I wonder"])
DOING = [f"{c} you {p}" for c in ("can", "could", "would", "will") for p in ("", "please ", "kindly ", "quickly ")] + ["", "", "please ", "kindly ", "now ", "I want you to ", "I would like you to ", "try to ", "let me see you ", "you should ", "go ahead and "]


def sentence(text):
    question = text.split(" ")[0].lower() in ("can", "could", "would", "will", "do", "any", "may", "what", "why", "how", "which", "is", "are", "who", "where")
    text = text[0].upper() + text[1:] if text[0] != "{" else text
    return text + ("?" if question else ".")


def unseen_free(list_):
    return sorted({x for x in list_ if x.lower().rstrip("?.") not in ALL_HELD})


def clauses(*parts):
    return [sentence(f"{a} {c}") for a, c in itertools.product(ASKING, parts)]


def orders(*parts):
    return [sentence(f"{d}{c}") for d, c in itertools.product(DOING, parts)]


TOPIC = unseen_free(
    clauses("what {a} is", "what {a} is exactly", "what {a} means", "what is meant by {a}", "something about {a}")
    + orders("explain {a}", "explain {a} to me", "explain {a} for me", "explain {a} briefly", "describe {a}", "describe {a} for me", "describe {a} shortly", "define {a}", "define {a} for me", "summarize {a}",
             "tell me about {a}", "tell me a bit about {a}", "give me a definition of {a}", "give me an explanation of {a}", "give a short explanation of {a}", "give me a summary of {a}", "introduce {a}", "talk about {a}",
             "write about {a}", "say in one sentence what {a} is", "explain in simple words what {a} is", "help me with {a}")
    + ["I need help with {a}.", "I need an explanation of {a}.", "I want an explanation of {a}.", "I need a definition of {a}.", "I want to learn about {a}.", "I would like to read about {a}.", "Teach me about {a}.", "Let's talk about {a}.",
       "Let us talk about {a}.", "What can you tell me about {a}?", "What do you know of {a}?", "Do you know {a}?", "Do you know anything about {a}?", "Have you heard of {a}?", "I heard about {a}, what is it?", "I have heard of {a}. What is it?",
       "I read about {a}. What is that?", "{a} - what is it?", "{a}: what is that?", "What is {a}, please?", "What is {a} about?", "What is {a} all about?", "{a} explained", "about {a}", "{a} please", "Give me a hint about {a}.", "What kind of thing is {a}?",
       "What is the idea of {a}?", "What is the idea behind {a}?", "What is the concept of {a}?", "The meaning of {a}?", "How would you define {a}?", "How would you describe {a}?", "How do you define {a}?", "Someone asked me about {a}.",
       "My teacher asked me what {a} is.", "My boss wants to know what {a} is.", "In a few words, what is {a}?", "Briefly, what is {a}?", "What on earth is {a}?", "What would you say {a} is?", "What are we talking about when we say {a}?", "What do people mean by {a}?",
       "What do engineers mean by {a}?", "What does the term {a} mean?", "Define the term {a}.", "Explain the term {a}.", "The term {a} is new to me.", "I am new here, what is {a}?", "I never heard of {a}.", "Is there such a thing as {a}?", "{a} for beginners"])
LONG = unseen_free(
    clauses("how {a} works", "how {a} is used", "more about {a}", "how {a} works in detail", "what happens in {a}", "the details of {a}")
    + orders("explain {a} in detail", "explain {a} in depth", "explain {a} in more detail", "describe {a} in detail", "describe how {a} works", "explain how {a} works", "explain {a} step by step", "tell me more about {a}", "tell me everything about {a}",
             "give me a detailed explanation of {a}", "give me more details about {a}", "give details of {a}", "say more about {a}", "go into detail about {a}", "explain {a} at length", "explain {a} more deeply")
    + ["How does {a} work?", "How does {a} work exactly?", "How does {a} function?", "How does {a} really work?", "How do you use {a}?", "How is {a} done?", "How is {a} made?", "What are the details of {a}?", "What happens with {a}?", "In detail, what is {a}?",
       "I know a little about {a}, tell me more.", "More about {a}?", "More on {a}, please.", "What else should I know about {a}?", "I want a long explanation of {a}.", "What is the mechanism of {a}?", "How does {a} work inside?", "How does {a} work in quire?"])
WHY = unseen_free(
    clauses("why {a} is useful", "why {a} is needed", "why {a} is important", "why {a} matters", "what {a} is good for", "what {a} is for", "why we need {a}", "why we use {a}", "why people use {a}", "why there is {a}", "what the use of {a} is", "what the benefit of {a} is")
    + orders("explain why {a} is useful", "explain why we need {a}", "explain the purpose of {a}", "explain the benefit of {a}", "give me a reason for {a}", "give me one reason for {a}", "explain the reason for {a}", "explain the advantage of {a}", "name the benefits of {a}")
    + [f"What is the {n} {p} {{a}}?" for n in ("benefit", "use", "purpose", "point", "advantage", "value", "goal", "aim", "reason", "motivation", "gain", "sense") for p in ("of", "for", "behind")]
    + [f"Why {d} {v} {{a}}?" for d in ("do we", "does one", "would you", "should I", "do engines", "do people", "would anyone", "must we", "does quire") for v in ("use", "need", "have", "want")]
    + ["What are the benefits of {a}?", "What are the uses of {a}?", "What good is {a}?", "What does {a} bring?", "What do we gain from {a}?", "What do we get from {a}?", "What makes {a} useful?", "What makes {a} good?", "Why is {a} a good idea?", "Why is {a} needed?", "Why is {a} necessary?",
       "Why is {a} so important?", "Why {a}?", "What is {a} for?", "What is {a} used for?", "How does {a} help?", "How is {a} useful?", "Does {a} help?", "Is {a} useful?", "What would happen without {a}?", "What if there were no {a}?", "Who needs {a}?", "What is so good about {a}?", "Why was {a} made?"])
WORD = unseen_free(
    clauses("what {w} means", "what the word {w} means", "the meaning of {w}", "the definition of {w}", "the meaning of the word {w}", "what is meant by {w}", "what the term {w} means")
    + orders("define {w}", "define the word {w}", "define {w} for me", "explain {w}", "explain the word {w}", "explain the meaning of {w}", "give me the meaning of {w}", "give me a definition of {w}", "give the definition of the word {w}", "look up {w}",
             "look up the word {w}", "look {w} up for me", "describe the word {w}", "translate {w} into plain English", "help me with the word {w}", "tell me the meaning of {w}", "find the meaning of {w}")
    + ["What does {w} mean, please?", "What does {w} stand for?", "What is the meaning of the word {w}?", "What is the definition of the word {w}?", "What would {w} mean?", "What does it mean, {w}?", "{w} definition", "{w}, meaning?", "{w} means what?", "define {w}", "meaning of {w}",
       "I read the word {w}. What does it mean?", "I heard the word {w}. What is that?", "The word {w} is new to me.", "I never heard the word {w}.", "In English, what is {w}?", "What does a dictionary say about {w}?", "What does WordNet say about {w}?", "Dictionary: {w}", "Dictionary entry for {w}",
       "What do people mean by {w}?", "What does someone mean when they say {w}?", "How do you define the word {w}?", "How is {w} defined?", "How is the word {w} defined?", "I need a definition of {w}.", "I need the meaning of {w}.", "Have you heard the word {w}?", "Do you know {w}?", "word: {w}", "{w} - what does it mean?"])
NOUN = unseen_free(clauses("what {a} is", "what {a} is exactly") + orders("explain what {a} is", "describe {a}", "tell me about {a}", "define {a}", "describe what {a} is")
                   + ["What kind of thing is {a}?", "What would {a} be?", "What is {a}, please?", "What do you call {a}?", "So, what is {a}?", "I saw {a}. What is that?", "{a}, what is that?", "What on earth is {a}?", "What sort of thing is {a}?", "Have you heard of {a}?", "Do you know what {a} is?"])
VERB = unseen_free(clauses("what it means to {w}", "what to {w} means", "what the verb {w} means") + ["What does it mean when people {w}?", "What is it to {w}?", "What does someone do who wants to {w}?", "When I {w}, what do I do?", "What do you do when you {w}?"])
SUM = unseen_free(clauses("what {x} {o} {y} is", "how much {x} {o} {y} is", "the result of {x} {o} {y}") + orders("calculate {x} {o} {y}", "compute {x} {o} {y}", "work out {x} {o} {y}", "add up: {x} {o} {y}")
                  + ["{x} {o} {y} is what?", "{x} {o} {y} equals?", "What do I get for {x} {o} {y}?", "What is the result of {x} {o} {y}?", "How many is {x} {o} {y}?", "What makes {x} {o} {y}?", "Result of {x} {o} {y}?", "I need the result of {x} {o} {y}."])
SUM = [x for x in SUM if "add up" not in x.lower()]
EXAMPLE = unseen_free(orders("give me an example sentence with {w}", "use {w} in a sentence", "use the word {w} in a sentence", "make a sentence with {w}", "make a sentence with the word {w}", "show me an example of {w}", "give an example for {w}", "write a sentence with {w}", "form a sentence using {w}", "show me how to use {w}", "show the use of {w}")
                      + clauses("how {w} is used", "how to use the word {w}", "an example of {w}") + ["How do I use {w}?", "How is the word {w} used?", "Example for {w}?", "{w} in a sentence", "I want a sentence with {w}.", "I would like an example of {w}.", "What is an example sentence for {w}?", "An example with {w}, please."])
SYNONYM = unseen_free(orders("give me a synonym for {w}", "name a synonym of {w}", "find a synonym for {w}", "give me another word for {w}", "name another word for {w}", "say {w} in another way") + clauses("a synonym of {w}", "another word for {w}", "which word means the same as {w}")
                      + ["What is a synonym of {w}?", "What is another word for {w}?", "Synonym of {w}?", "Synonyms for {w}", "{w} synonym", "Which word means the same as {w}?", "What can I say instead of {w}?", "What other word is there for {w}?", "Are there synonyms of {w}?", "A different word for {w}?", "What is similar to {w}?"])
OPPOSITE = unseen_free(orders("give me the opposite of {w}", "name the opposite of {w}", "tell me the antonym of {w}", "find the opposite of {w}") + clauses("the opposite of {w}", "what the opposite of {w} is", "the antonym of {w}")
                       + ["What is the opposite of {w}?", "What is the antonym of {w}?", "Opposite of {w}?", "Which word is the opposite of {w}?", "{w} opposite", "What is not {w}?", "What is the contrary of {w}?", "Is there an opposite of {w}?", "Antonym of {w}?"])
STORY = unseen_free(orders("tell me a story about {a}", "tell a story about {a}", "tell me a short story about {a}", "write a story about {a}", "write a short story about {a}", "write me a story with {a}", "make up a story about {a}", "think of a story about {a}", "give me a story about {a}", "create a tale about {a}", "tell me a tale of {a}")
                    + ["A story about {a}, please.", "I want a story about {a}.", "I want to hear a story about {a}.", "I would like a story about {a}.", "Do you know a story about {a}?", "Story about {a}?", "story with {a}", "Do you have a story about {a}?", "Once more a story about {a}.", "Any story about {a}?", "a tale about {a}"])
FRONT = ["Please, ", "Hi, ", "Hello! ", "Hey, ", "Hey quire, ", "quire, ", "Ok, ", "So, ", "Now, ", "Well, ", "Tell me, ", "One question: ", "Sorry, ", "Good, ", "And ", "Hi! ", "Hmm, ", "By the way, ", "Quick question: ", "Excuse me, ", "Dear quire, ", "Hello, ", "Question: ",
         "Alright, ", "Ok quire, ", "Oh, ", "Listen, ", "Next question: ", "Another question: ", "Thanks. ", "Great. ", "Yes, ", "No, ", "Then ", "But ", "Hello quire! ", "Good morning! ", "Good evening, ", "I have a question. ", "May I ask: ", "First, ", "Also, ", "Just tell me: ", "Friend, "]
BACK = [" Thanks.", " Please.", " Thank you.", " Thanks!", " please", " Thanks in advance.", " I am curious.", " Be brief.", " In English, please.", " Go!", " Thank you!", " I need it.", " Right now.", " My friend asked me."]
