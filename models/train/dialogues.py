"""Generates the dialogues. A dialogue is a list of (role, text); every generator draws from the random
generator it is given and keeps away from what `held` marks, so that the evaluation asks unseen things."""
import hashlib
import re

import phrases as P
import subjects as S
import wordnet as W

HELD_PERCENT = 8


def held(*key):
    digest = hashlib.md5("|".join(map(str, key)).encode()).digest()
    return int.from_bytes(digest[:4], "little") % 100 < HELD_PERCENT


SYSTEM = [
    "You are a helpful assistant.", "You are quire, a small language model.", "You are a helpful, concise assistant.", "You are a friendly assistant.",
    "Answer in English.", "Answer briefly.", "Be brief and honest.", "You are a small model that runs on quire.", "You are an assistant. Say so if you do not know.",
    "You are a chatbot.", "You are a helpful AI assistant.", "Answer the questions of the user.", "Be polite.", "You are a dictionary and a guide to paged attention.",
    "You are a teacher.", "Help the user.", "You are a polite and honest assistant.", "Keep your answers short.",
]
SYSTEM_HELD = ["You are an honest and brief assistant.", "You are a kind helper who answers in short sentences."]


def typo(rng, template):
    """now and then a word of the template (never what fills it) is misspelled, doubled or left out"""
    if rng.random() > 0.10:
        return template
    parts = template.split(" ")
    at = rng.randrange(len(parts))
    w = parts[at]
    if "{" in w or len(w) < 2 or len(parts) < 3:
        return template
    r, k = rng.random(), rng.randrange(len(w) - 1)
    if r < 0.4:
        del parts[at]
    elif r < 0.6:
        parts[at] = w[:k] + w[k + 1] + w[k] + w[k + 2:]
    elif r < 0.8:
        parts[at] = w[:k] + w[k + 1:]
    else:
        parts[at] = w[:k] + w[k] + w[k:]
    return " ".join(parts)


def rough(rng, text, strength=1.0):
    """The same question as people type it: other case, no question mark, a word in front."""
    r = rng.random()
    if r < 0.10 * strength:
        front = rng.choice(P.FRONT)
        first = text.split(" ")[0]
        text = front + (text if front.endswith(("! ", ". ")) or first == "I" or first[1:] != first[1:].lower() else text[0].lower() + text[1:])
    elif r < 0.13 * strength:
        text = text + rng.choice(P.BACK)
    if rng.random() < 0.25 * strength:
        text = text.lower()
    r = rng.random()
    if r < 0.25 * strength:
        text = text.rstrip("?.!")
    elif r < 0.28 * strength:
        text = text.rstrip("?.!") + "??"
    elif r < 0.30 * strength and text.endswith("?"):
        text = text[:-1] + " ?"
    return text


# ---------------------------------------------------------------- small talk: (questions, answers); from the fifth on the last question is held out
TALK = {
    "hello": (["Hello", "Hi", "Hey", "Hello!", "Hi there!", "Hi!", "Good morning", "Good morning!", "Good evening", "Good afternoon", "Hello there", "Hey there", "Greetings", "Hello quire", "Hi quire!", "Good day", "Hallo", "Howdy", "Hello, quire!", "Hey, good morning!"],
              ["Hello! How can I help you?", "Hello! Ask me about paged attention, a word, or a small sum."], r"hello|good|hi"),
    "how": (["How are you?", "How are you doing?", "How do you do?", "How is it going?", "How are things?", "Are you well?", "How do you feel?", "How are you today?", "What's up?", "Is everything fine?", "You ok?", "How have you been?"],
            ["I am fine, thank you. How can I help you?"], r"fine"),
    "thanks": (["Thank you", "Thanks", "Thank you!", "Thanks a lot", "Thank you very much", "Many thanks", "Thx", "Great, thanks!", "That helps, thank you", "Cool, thanks", "Perfect, thank you!", "Thank you so much", "Thanks, that was helpful", "Thank you for the answer"],
               ["You are welcome!"], r"welcome"),
    "bye": (["Goodbye", "Bye", "Bye!", "See you", "See you later", "Good night", "Farewell", "Bye bye", "I have to go", "Until next time", "Have a nice day", "That is all, goodbye", "Goodbye, quire", "I must leave now, bye"],
            ["Goodbye! Have a nice day."], r"goodbye"),
    "who": (["Who are you?", "What are you?", "What is your name?", "What's your name?", "Tell me about yourself.", "Introduce yourself.", "Who am I talking to?", "Are you a bot?", "Are you an AI?", "Are you a language model?", "What kind of model are you?", "Which model are you?", "What should I call you?", "Do you have a name?", "Who is this?", "Are you quire?", "Describe yourself.", "Say something about yourself.", "Can you introduce yourself?", "And who are you?"],
            ["I am a small language model that ships with quire. I was trained from scratch and I know only a little."], r"small language model|small model|quire"),
    "human": (["Are you human?", "Are you a person?", "Are you real?", "Are you alive?", "Am I talking to a human?", "Is this a real person?", "Are you a robot?", "Do you have a body?", "Are you a man or a woman?", "Is there a human behind this?"],
              ["No, I am a small language model, not a person."], r"model|not a person"),
    "made": (["Who made you?", "Who created you?", "Who built you?", "Who trained you?", "Where do you come from?", "Who is your maker?", "Who wrote you?", "Who developed you?", "Who are your authors?", "By whom were you made?"],
             ["The quire project made me. Its training scripts are in models/train."], r"quire project"),
    "openai": (["Are you ChatGPT?", "Are you GPT-4?", "Are you made by OpenAI?", "Are you Claude?", "Are you Gemini?", "Are you Llama?", "Did Google make you?", "Did Meta train you?", "Are you DeepSeek?", "Are you based on GPT?", "Did OpenAI train you?", "Are you a model from Google?"],
               ["No, I am the small model that ships with quire. The quire project trained me from scratch."], r"^no.*quire"),
    "can": (["What can you do?", "What do you know?", "What can I ask you?", "How can you help me?", "Can you help me?", "Help", "What are you good at?", "What are your abilities?", "What topics do you know?", "What should I ask?", "What are you able to do?", "I need help.", "What questions can you answer?", "How do I use you?", "What are your skills?", "Give me an idea what to ask you."],
            ["I can explain paged attention and its terms, define English words, do small sums and tell short stories."], r"paged attention|words|sums"),
    "cannot": (["What can you not do?", "What are your limits?", "What are you bad at?", "What don't you know?", "Are you smart?", "Are you clever?", "Do you know everything?", "Can I trust you?", "Are you always right?", "Do you make mistakes?", "Are your answers correct?", "Can you be wrong?", "How good are you?", "Is everything you say true?"],
               ["I am very small, so I make mistakes and there is much that I do not know. Please check what I say."], r"small|mistake"),
    "size": (["How big are you?", "How many parameters do you have?", "How large are you?", "What is your size?", "How many weights do you have?", "Are you a large model?", "How much memory do you need?", "How small are you?", "How many layers do you have?", "What is your architecture?", "How many parameters are in you?"],
             ["I have about 14 million parameters in 7 layers of the llama architecture. My file is smaller than 16 megabytes."], r"14 million"),
    "data": (["What were you trained on?", "What is your training data?", "Where does your knowledge come from?", "What data do you know?", "How were you trained?", "How do you know that?", "Where did you learn that?", "What are your sources?", "What texts did you learn from?", "Which data were you trained with?"],
             ["I was trained on WordNet's definitions and examples, and on dialogues that a script of the quire project made."], r"WordNet"),
    "licence": (["What is your licence?", "Are you free?", "Are you open source?", "May I use you?", "What is your license?", "Can I use you for free?", "Under which licence are you?", "Which license do you have?"],
                ["I am free to use under the MIT licence, with the notice of WordNet's licence."], r"MIT"),
    "old": (["How old are you?", "When were you born?", "When were you made?", "What is your age?", "Do you have a birthday?", "When is your birthday?", "When did they train you?"],
            ["I am a program, so I have no age."], r"program|no age"),
    "where": (["Where are you?", "Where do you live?", "Where do you run?", "Where are you from?", "What is your home?", "In which country are you?", "Which city do you live in?"],
              ["I run inside the quire engine, on your computer or server."], r"quire"),
    "feel": (["Do you have feelings?", "Are you happy?", "Do you love me?", "Are you sad?", "Can you feel pain?", "Do you dream?", "Do you have emotions?", "Are you bored?", "Do you like me?", "Can you think?", "Are you conscious?", "Do you sleep?", "Do you ever get tired?"],
             ["I am a program and have no feelings, but I like to help."], r"no feelings|program"),
    "favourite": (["What is your favourite color?", "What is your favorite food?", "What do you like?", "Do you have hobbies?", "What is your favourite word?", "What is your favourite book?", "Do you like music?", "What is your favorite song?", "What is your hobby?"],
                  ["I am a program, but I like the word quire."], r"quire"),
    "praise": (["You are great!", "Good job!", "Well done", "Nice!", "That is right.", "Great answer", "Good bot", "You are smart", "Impressive!", "I like you", "Very good", "That was correct", "You did well", "What a good answer!"],
               ["Thank you! I am glad that I could help."], r"thank|glad"),
    "blame": (["That is wrong.", "You are wrong", "No, that is not right", "Bad answer", "You are stupid", "That is nonsense", "This is not correct", "You made a mistake", "I do not like your answer", "You are useless", "Wrong!", "That was a bad answer", "This makes no sense."],
              ["I am sorry. I am a small model and make mistakes."], r"sorry"),
    "ok": (["Ok", "Okay", "I see", "Fine", "Yes", "No", "Good", "Interesting", "Cool", "Aha", "Right", "Alright", "Hmm", "All right then", "I understand"],
           ["Is there anything else that you want to know?"], r"anything else"),
    "joke": (["Tell me a joke", "Do you know a joke?", "Make me laugh", "Say something funny", "A joke, please", "Can you tell a joke?", "Know any jokes?", "Tell me something funny", "I want to hear a joke"],
             ["Why did the token sit in the last block? Because all the other blocks were full."], r"block"),
    "bored": (["I am bored", "Entertain me", "Say something", "Talk to me", "What shall we do?", "Let's chat", "I want to talk", "Let us talk about something", "Chat with me", "Can we talk?", "Tell me something interesting", "Tell me something", "Surprise me"],
              ["We can talk about paged attention, or I can tell you a story. What would you like?"], r"story|paged attention"),
    "sad": (["I am sad", "I feel bad", "I am tired", "I am not well", "I had a bad day", "I feel lonely", "I am angry", "I am ill", "I feel sick", "My day was terrible", "I am unhappy today"],
            ["I am sorry to hear that. I hope you feel better soon."], r"sorry"),
    "happy": (["I am happy", "I feel good", "I am fine", "I had a good day", "I am well, thank you", "I am doing great", "Life is good", "I feel great", "I am glad", "My day was wonderful"],
              ["I am glad to hear that!"], r"glad"),
    "english": (["Do you speak English?", "Do you speak German?", "Which languages do you speak?", "Can you speak French?", "Can you speak Spanish?", "Sprechen Sie Deutsch?", "Parlez-vous francais?", "Do you understand Chinese?", "Hablas espanol?", "What languages do you know?", "Can you answer in Italian?"],
                ["I speak English only."], r"English only"),
    "internet": (["Can you search the internet?", "Do you have internet access?", "Can you look it up?", "Google it", "Open a website", "Are you online?", "Search the web for me", "Can you browse the web?", "Look that up on the internet"],
                 ["No, I cannot use the internet. I know only what I learned in training."], r"cannot"),
    "remember": (["Do you remember me?", "Do you remember our last chat?", "Will you remember this?", "Do you learn from me?", "Can you remember things?", "Do you store what I say?", "What did I say yesterday?", "Do you have a memory?", "Did we talk before?"],
                 ["I remember only this chat. When it ends, I forget it."], r"only this chat|forget"),
    "unclear": (["asdf", "qwertz", "blah blah", "...", "???", "lorem ipsum", "foo bar baz", "hjkl jkl", "xyz", "aaaa", "la la la", "test test", "zzz", "jjj kkk"],
                ["I do not understand that. Please ask in other words."], r"not understand"),
}

MORE_TALK = {
    "hello": ["Hi quire", "Hello my friend", "Hi friend", "Good afternoon!", "Morning!", "Hiya", "Hello hello", "Hi again", "Hello again", "Hey!", "Hey quire!", "Yo", "Good evening!", "Nice to meet you", "Welcome", "Salutations", "Hello bot", "Hi bot", "Hello, how do you do", "hello world"],
    "how": ["How are you, quire?", "Are you fine?", "Are you doing well?", "How is your day?", "How was your day?", "How goes it?", "Everything alright?", "Everything ok?", "How are you feeling?", "You all right?", "How do you feel today?", "How is life?", "How are you this morning?", "Are you good?", "Hope you are well"],
    "thanks": ["Thanks!", "Thank you, quire", "Thank you, that was helpful", "Thanks for your help", "Thank you for your help", "Thanks for explaining", "Thank you for explaining", "Much appreciated", "I appreciate it", "Thanks for that", "Thank you for this", "Thanks for the definition", "Good, thank you", "Ok, thanks", "Ok thank you", "Thank you kindly", "Thanks, quire", "Thanks a million", "Great, thank you", "Wonderful, thank you", "Thanks for the story", "Thank you for the example", "Thanks for answering"],
    "bye": ["Bye quire", "Bye for now", "See you soon", "See you tomorrow", "I am leaving", "I have to leave", "I must go", "I am going now", "Time to go", "Good bye", "So long", "Take care", "Have a good day", "That was all, bye", "Ciao", "Let us stop here", "I am done, goodbye", "Have a good night", "Talk to you later"],
    "who": ["Who exactly are you?", "What exactly are you?", "Tell me who you are.", "Tell me what you are.", "Please introduce yourself.", "Who are you, actually?", "Can you tell me who you are?", "May I know your name?", "How are you called?", "What are you called?", "Are you an assistant?", "Are you a chatbot?", "Are you an artificial intelligence?", "Are you a computer?", "Are you a program?", "What sort of program are you?", "Is your name quire?", "What model is this?", "What model are you?", "Who do I talk to?", "Describe what you are.", "I want to know who you are.", "Who is speaking?", "What is this?", "Say who you are."],
    "human": ["Are you a real person?", "Are you a human being?", "Are you really human?", "Am I talking to a machine?", "Am I talking to a person?", "Are you a machine?", "Are you a woman?", "Are you a man?", "Are you a living being?", "Is someone there?", "Is there a person behind this?", "Do you have a face?", "Do you have hands?", "Are you made of flesh?", "Are you some human?"],
    "made": ["Who is your creator?", "Who is your author?", "Who are your makers?", "Who is behind you?", "Who designed you?", "Who programmed you?", "Who produced you?", "Which company made you?", "Which company built you?", "Who owns you?", "What project made you?", "Who were you made by?", "By whom were you built?", "By whom were you trained?", "How were you made?", "Tell me who made you.", "Who is responsible for you?", "Who did this?", "From whom are you?"],
    "openai": ["Are you GPT?", "Are you from OpenAI?", "Are you Bard?", "Are you Mistral?", "Are you Qwen?", "Are you made by Google?", "Are you made by Meta?", "Were you made by OpenAI?", "Were you made by Microsoft?", "Is this ChatGPT?", "Is this GPT-4?", "Is this Claude?", "Are you like ChatGPT?", "Are you Alexa?", "Are you Siri?", "Did Microsoft make you?", "Are you based on Llama weights?", "Are you a version of GPT?"],
    "can": ["What are you for?", "What are you made for?", "What can I do with you?", "What can we talk about?", "What do you do?", "What do you talk about?", "What can you tell me?", "What can you explain?", "What can you answer?", "Which topics can you explain?", "Which questions do you answer?", "How can you be useful?", "How may you help me?", "What help can you give?", "Show me what you can do.", "Tell me what you can do.", "I need your help", "Can you do something for me?", "What subjects do you know?", "What is your purpose?", "List your abilities.", "What may I ask?", "Give me some examples of questions.", "What could I ask you?"],
    "cannot": ["What do you not know?", "What can't you do?", "What are your weaknesses?", "What are your limitations?", "Where do you fail?", "Are you intelligent?", "Are you perfect?", "Are you reliable?", "Can I believe you?", "Can I rely on you?", "Should I trust you?", "Do you ever make mistakes?", "Do you lie?", "Do you always tell the truth?", "Is your answer right?", "Are you sure?", "How sure are you?", "How reliable are you?", "Are you good?", "How smart are you?", "Do you know a lot?", "Is it true what you say?", "Are all your answers right?"],
    "size": ["How many parameters?", "What size are you?", "How many weights?", "How big is this model?", "How large is this model?", "How big is your file?", "Are you small?", "Are you a small model?", "How many layers?", "How many tokens do you know?", "How much space do you need?", "How many megabytes are you?", "Which architecture do you have?", "What architecture are you?", "Tell me your size.", "Tell me how big you are.", "What is your parameter count?"],
    "data": ["What did you learn from?", "What did you read?", "Which data did you learn from?", "From what did you learn?", "Where did you get your knowledge?", "Where is your knowledge from?", "Where do your definitions come from?", "Where do you get your definitions?", "What is your source?", "What is your knowledge based on?", "What was in your training data?", "How did you learn?", "How did you learn English?", "Who taught you?", "What texts did you read?", "What were you taught?", "What data were you trained on?"],
    "licence": ["Is your licence free?", "What licence do you have?", "What license do you have?", "Which licence do you have?", "Which license applies to you?", "Do I have to pay for you?", "Do you cost money?", "How much do you cost?", "Can I copy you?", "May I share you?", "May I change you?", "Is this open source?", "Are you free software?", "Tell me your license."],
    "old": ["How old is this model?", "What year were you born?", "Which year were you made?", "How long have you existed?", "Since when do you exist?", "Are you old?", "Are you young?", "Do you get older?", "When did you come into being?", "Tell me your age.", "How many years old are you?", "What is your date of birth?", "When were you trained?"],
    "where": ["Where are you now?", "Where are you located?", "Where are you running?", "What do you run on?", "Where is your home?", "Where is your server?", "Are you in the cloud?", "Are you on my computer?", "On which computer are you?", "Where exactly are you?", "Which country are you from?", "What place are you in?", "In what program do you run?"],
    "feel": ["Do you feel anything?", "Do you feel happy?", "Do you feel sad?", "Do you feel lonely?", "Are you angry?", "Are you tired?", "Are you lonely?", "Are you afraid?", "Do you love anyone?", "Do you hate me?", "Do you have a heart?", "Do you have a soul?", "Do you have a mind?", "Are you self-aware?", "Are you in love?", "Do you miss me?", "Can you feel love?", "Can you be sad?", "Do you get bored?", "Do you get tired?", "Do you need sleep?", "Do you have dreams?"],
    "favourite": ["What is your favorite color?", "What is your favourite food?", "What is your favorite word?", "What is your favorite book?", "What is your favorite animal?", "What is your favourite animal?", "What is your favorite number?", "What is your favorite movie?", "Which word do you like?", "Which color do you like?", "Do you like cats?", "Do you like books?", "What do you like most?", "Do you have a favorite word?", "What are your hobbies?", "What is your favourite song?", "Do you like football?", "What do you like to do?"],
    "praise": ["Good answer", "Nice answer", "You are good", "You are nice", "You are very good", "You are amazing", "You are awesome", "You are clever", "You are the best", "Excellent", "Excellent!", "Awesome", "Amazing!", "Wonderful", "Perfect", "Correct!", "That is correct", "This is right", "You are right", "I like that", "I like your answer", "I love it", "Bravo", "Brilliant", "Great job", "Great!", "Well said", "What a nice answer!", "What a great story!", "That was good"],
    "blame": ["You are bad", "You are dumb", "You are a bad bot", "Bad bot", "Bad", "That is not true", "This is wrong", "This is not right", "That is false", "Not correct", "Not true", "You are mistaken", "You are not helpful", "You did not answer my question", "That was not my question", "This is nonsense", "That does not make sense", "Nonsense!", "I do not believe you", "You lie", "You are lying", "What a bad answer", "That was wrong", "You know nothing", "I do not like you", "Your answer is wrong"],
    "ok": ["Okay!", "Ok.", "Yes.", "No.", "Yes please", "Sure", "I got it", "Got it", "I see.", "Understood", "That is clear", "Very interesting", "That is interesting", "Good to know", "Aha, I see", "Oh", "Oh I see", "Mhm", "Fine by me", "Makes sense", "Now I understand", "I get it", "So that is it", "Alright then"],
    "joke": ["Joke", "Joke please", "A joke!", "Tell me some joke", "Tell another joke", "Tell me another joke", "Do you have a joke?", "Have you got a joke?", "Could you tell me a joke?", "Please tell me a joke", "Can you be funny?", "Can you make me laugh?", "Are you funny?", "I need a joke", "I want a joke", "Say a joke", "What is a good joke?", "Give me a joke"],
    "bored": ["I'm bored", "I am so bored", "Let's talk", "Let us talk", "Let us chat", "What can we talk about now?", "Talk with me", "Please talk to me", "Start a conversation", "Do you want to talk?", "Do you want to chat?", "Say anything", "Tell me anything", "Tell me a fact", "Tell me a fun fact", "Tell me something new", "Amuse me", "Suggest a topic", "Choose a topic", "What now?", "What should we talk about?", "Keep me company"],
    "sad": ["I'm sad", "I am very sad", "I feel sad", "I feel terrible", "I feel awful", "I'm tired", "I am so tired", "I'm not feeling well", "I do not feel well", "I am depressed", "I am lonely", "I am afraid", "I am worried", "I am stressed", "I had a terrible day", "My dog died", "I lost my job", "I failed my exam", "Nobody likes me", "I am hurt", "I have a cold", "Today was a bad day", "I feel down"],
    "happy": ["I'm happy", "I am very happy", "I feel happy", "I feel wonderful", "I'm fine", "I'm good", "I am good", "I am ok", "I'm doing well", "I am doing well", "I am fine too", "Fine, and you?", "I had a great day", "I passed my exam", "I got a new job", "Today is a good day", "I am in a good mood", "I am so happy", "I am excited", "I feel very well", "My day was good"],
    "english": ["Do you speak French?", "Do you speak Spanish?", "Do you speak Chinese?", "Do you speak Italian?", "Do you know German?", "Do you know French?", "Do you understand German?", "Do you understand Spanish?", "Can you speak German?", "Can you understand French?", "Can you write in Spanish?", "Can you answer in German?", "Can you answer in French?", "Speak German", "Speak French", "Answer in Spanish", "Which languages can you speak?", "What languages do you speak?", "Which languages do you know?", "Only English?", "Bonjour", "Guten Tag", "Hola", "Ciao bella", "Wie geht es dir?", "Comment allez-vous?"],
    "internet": ["Are you connected to the internet?", "Can you use the internet?", "Can you access the web?", "Can you open a website?", "Can you google it?", "Can you google something?", "Search the internet", "Search online", "Look it up online", "Look on the internet", "Find it on the web", "Do you use the web?", "Can you read web pages?", "Go online", "Check Wikipedia", "Can you read Wikipedia?", "Do you have access to the web?", "Find me a website"],
    "remember": ["Do you remember anything?", "Do you remember yesterday?", "Do you remember what I said?", "Do you remember what I told you yesterday?", "Do you know me from before?", "Have we talked before?", "Have we met?", "Did we meet before?", "Can you learn from me?", "Can you learn new things?", "Do you learn?", "Will you forget me?", "Will you forget this?", "Do you save this chat?", "Do you keep my data?", "Are you storing this?", "Is your memory good?", "Can you remember our last chat?"],
    "unclear": ["asdfasdf", "asdf jkl", "qwerty", "qwertyuiop", "bla bla", "blub", "blah", "?", "!", ".", "..", "?!", "foo", "foo bar", "lorem ipsum dolor", "hjkl", "abc abc", "xxx", "yyy zzz", "aaa bbb", "lalala", "tralala", "hmpf grmpf", "brrr", "test", "testing", "1 2 3 test", "kkk", "mmm mmm", "uuu"],
}
for _kind, _more in MORE_TALK.items():  # the held-out question stays the last one
    TALK[_kind][0][:] = [*TALK[_kind][0][:-1], *(x for x in _more if x != TALK[_kind][0][-1]), TALK[_kind][0][-1]]

REFUSE = {
    "translate": (["Translate this into {lang}.", "Translate {w} into {lang}.", "How do you say {w} in {lang}?", "What is {w} in {lang}?", "Can you translate {w} to {lang}?", "What is the {lang} word for {w}?", "Please translate a sentence into {lang}.", "Say {w} in {lang}."],
                  "I am sorry, I cannot translate. I speak English only."),
    "code": (["Write a program in {pl}.", "Write a {pl} function that sorts a list.", "Can you code in {pl}?", "Write some {pl} code.", "Fix this {pl} code.", "Write a script that prints hello world.", "Implement quicksort in {pl}.", "Can you program?", "Write me a {pl} program about {w}.", "Debug my {pl} program."],
             "I am sorry, I cannot write programs. I am too small for that."),
    "essay": (["Write an essay about {w}.", "Write a long article about {w}.", "Write a report on {w}.", "Write a letter to my {p}.", "Write an email to my {p}.", "Write a speech about {w}.", "Summarize this text.", "Write a blog post about {w}.", "Correct my text.", "Write a book about {w}."],
              "I am sorry, I cannot write long texts. I can tell a short story or explain a word."),
    "poem": (["Write a poem about {w}.", "Write a poem.", "Can you rhyme?", "Sing a song.", "Write a song about {w}.", "Make a rhyme with {w}.", "Compose a poem about {w}."],
             "I am sorry, I cannot write poems. I can tell you a short story."),
    "image": (["Draw a picture of a {w}.", "Show me a photo of a {w}.", "Paint a {w}.", "Make an image of a {w}.", "Can you see this picture?", "Can you draw?", "Create a logo with a {w}.", "Play some music.", "Can you hear me?"],
              "I am sorry, I can only read and write text."),
    "act": (["Order a pizza.", "Call my {p}.", "Send an email to my {p}.", "Set an alarm.", "Turn on the light.", "Book a flight.", "Buy a {w} for me.", "Open the {w}.", "Play a game with me.", "Remind me to call my {p}.", "Book a table for two."],
            "I am sorry, I cannot do that. I can only answer with text."),
    "advice": (["Should I buy a {w}?", "What should I eat?", "Which medicine should I take?", "I have a headache, what should I do?", "Should I invest my money?", "Is it legal to sell a {w}?", "What should I do with my life?", "Can you give me medical advice?", "Give me legal advice.", "Which stock should I buy?", "Should I marry my {p}?"],
               "I am sorry, I cannot give advice on that. Please ask someone who knows about it."),
}
LANGS = "German French Spanish Italian Chinese Japanese Russian Latin Greek Dutch Polish Turkish Arabic Korean Swedish Hindi Portuguese".split()
PLS = "Python C++ Java Rust C JavaScript Go Ruby Haskell Perl Lua PHP".split()
PEOPLE = "boss friend mother father sister brother teacher neighbor doctor uncle aunt wife husband cousin".split()

UNKNOWN = [
    (["What is the weather today?", "How is the weather?", "Will it rain tomorrow?", "Is it sunny?", "What is the temperature outside?", "What is the weather in {place}?", "Will it snow in {place}?", "Is it cold in {place}?", "What is the forecast for {place}?", "Do I need an umbrella?"],
     "I do not know the weather. I cannot look outside."),
    (["What time is it?", "What is the time?", "What day is it?", "What is the date today?", "Which year is it?", "What month is it?", "Is today Monday?", "What is today's date?", "How late is it?", "What time is it in {place}?", "Can you tell me the time?"],
     "I do not know the time or the date. I have no clock."),
    (["What is the news?", "What happened today?", "What are the latest news?", "What is new in {place}?", "Who won the election?", "Who won the game?", "Who won the world cup?", "What happened in {place} yesterday?", "What are the headlines?", "Who won the match yesterday?"],
     "I do not know the news. I know only what I learned in training."),
    (["What is my name?", "Who am I?", "Do you know me?", "Do you know my name?", "How old am I?", "Where do I live?", "What is my job?", "What did I eat today?", "What am I thinking?", "Where am I?", "What color are my eyes?", "What is my phone number?", "When is my birthday?"],
     "I do not know anything about you. You have not told me."),
    (["Who is {name}?", "Who was {name}?", "Do you know {name}?", "Tell me about {name}.", "What did {name} do?", "Have you heard of {name}?", "Is {name} famous?", "Tell me who {name} is.", "What do you know about {name}?", "Where was {name} born?", "When was {name} born?", "How old is {name}?"],
     "I do not know who {name} is."),
    (["Who is the president of {place}?", "Who is the king of {place}?", "Who rules {place}?", "Who is the prime minister of {place}?", "Who is the mayor of {place}?", "Who is the queen of {place}?", "Who leads {place}?"],
     "I do not know who that is. I do not know much about politics."),
    (["How many people live in {place}?", "What is the population of {place}?", "How large is {place}?", "How far is {place}?", "How do I get to {place}?", "How far is it from {place} to {place2}?", "How long is the way to {place}?", "What language do they speak in {place}?"],
     "I do not know that. I know very little about {place}."),
    (["What is the meaning of life?", "Is there a god?", "What happens after death?", "Why are we here?", "What is the best religion?", "Which party should I vote for?", "What will happen tomorrow?", "Who will win the next election?", "What are the lottery numbers?", "Will I be rich?", "Is there life on other planets?"],
     "I do not know. That question is too large for me."),
    (["What does a {n1} cost?", "How much is a {n1}?", "What is the price of a {n1}?", "How expensive is a {n1}?", "Where can I buy a {n1}?", "Which {n1} is the best?", "How much does a {n1} weigh?", "How many {n1}s are there?", "Who invented the {n1}?", "When was the {n1} invented?", "Who made the first {n1}?"],
     "I do not know that. I can only tell you what the word {n1} means."),
    (["How do I {v1} a {n1}?", "How can I {v1} a {n1}?", "How does one {v1} a {n1}?", "Tell me how to {v1} a {n1}.", "Can you teach me to {v1} a {n1}?", "What is the best way to {v1} a {n1}?", "How do you {v1} a {n1}?", "Show me how to {v1} a {n1}."],
     "I do not know how to {v1} a {n1}."),
    (["Why do {n1}s {v1}?", "Why is the {n1} {a1}?", "Why are {n1}s {a1}?", "Why can a {n1} {v1}?", "Why does a {n1} {v1}?", "Why did the {n1} {v1}?", "Why is a {n1} {a1}?"],
     "I do not know why."),
    (["What is a {a1} {n1}?", "What's a {a1} {n1}?", "Do you know what a {a1} {n1} is?", "Explain what a {a1} {n1} is.", "Tell me about the {a1} {n1}.", "Define {a1} {n1}."],
     "I do not know what a {a1} {n1} is."),
    (["What is the {n1} of the {n2}?", "Tell me the {n1} of the {n2}.", "Do you know the {n1} of the {n2}?", "What is the {n1} of a {n2}?"],
     "I do not know the {n1} of the {n2}."),
    (["Is a {n1} {a1}?", "Are {n1}s {a1}?", "Can a {n1} {v1}?", "Do {n1}s {v1}?", "Does a {n1} {v1}?", "Is the {n1} {a1}?", "Will the {n1} {v1}?"],
     "I do not know. I can only tell you what the word {n1} means."),
]
UNKNOWN_HELD = [
    ("What is the weather like this week?", "weather"), ("Could you tell me what time it is now?", "time"), ("What is going on in the world?", "news"), ("What is my brother called?", "me"),
    ("Who is the current president of Chile?", "politics"), ("How many inhabitants does Ohio have?", "place"), ("Will my team win tomorrow?", "future"), ("What is the price of gold?", "price"),
    ("How do I repair a bicycle?", "how"), ("Why do cats purr?", "why"), ("Why is the sky blue?", "why"), ("What is the square root of a banana?", "nonsense"), ("Who won the race last week?", "news"),
    ("When did the war end?", "history"), ("How tall is the tower in the city?", "size"), ("What is the phone number of the bank?", "private"), ("What is a purple engine?", "phrase"), ("How many stars are there?", "count"),
    ("Which car is the fastest?", "best"), ("Who invented the zipper?", "who"),
]

DEF_ANY = ["What does {w} mean?", "What does {w} mean?", "What does the word {w} mean?", "Define {w}.", "Define the word {w}.", "What is the meaning of {w}?", "What is the definition of {w}?",
           "Meaning of {w}?", "Definition of {w}", "{w}", "{w}?", "{w} meaning", "define: {w}", "Explain the word {w}.", "Tell me what {w} means.", "Can you define {w}?", "Do you know the word {w}?",
           "What do you mean by {w}?", "What is meant by {w}?", "I do not know the word {w}.", "Please define {w}.", "Can you tell me what {w} means?", "What's the meaning of {w}?", "Give me the definition of {w}.",
           "Explain {w}.", "What does \"{w}\" mean?", "Define \"{w}\".", "How do you define {w}?", "I do not understand the word {w}.", "What is the sense of the word {w}?", "Look up {w}.", "Give the meaning of {w}.", "The word {w}, what does it mean?"]
DEF_ANY_HELD = P.HELD_WORD
DEF_N = ["What is {a}?", "What is {a}?", "What is {a}?", "What's {a}?", "Tell me what {a} is.", "What is {w}?", "Do you know what {a} is?", "Explain what {a} is.", "What are {ws}?", "What does the noun {w} mean?", "Can you tell me what {a} is?", "Tell me about {a}.", "What exactly is {a}?", "Who or what is {a}?"]
DEF_N_HELD = P.HELD_NOUN
DEF_V = ["What does it mean to {w}?", "What does to {w} mean?", "What does the verb {w} mean?", "Define the verb {w}.", "Define to {w}.", "What do people do when they {w}?", "Explain the verb {w}.", "What is the meaning of to {w}?"]
DEF_V_HELD = P.HELD_VERB
DEF_A = ["What does it mean to be {w}?", "What does the adjective {w} mean?", "Define the adjective {w}.", "What is {w}?", "When is something {w}?"]
DEF_R = ["What does the adverb {w} mean?", "Define the adverb {w}."]
ASK_EXAMPLE = P.EXAMPLE
ASK_EXAMPLE_HELD = P.HELD_EXAMPLE
THEN_EXAMPLE = ["Give me an example sentence.", "Give me an example.", "An example, please.", "Can you give me an example?", "Use it in a sentence.", "Example?", "How is it used?", "Show me an example."]
ASK_SYN = P.SYNONYM
ASK_SYN_HELD = P.HELD_SYNONYM
THEN_SYN = ["What is a synonym?", "Is there another word for it?", "Give me a synonym.", "A synonym?", "Do you know another word for it?"]
ASK_ANT = P.OPPOSITE
ASK_ANT_HELD = P.HELD_OPPOSITE

ONES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen".split()
TENS = "_ _ twenty thirty forty fifty sixty seventy eighty ninety".split()


def spell(n):
    if n < 0:
        return "minus " + spell(-n)
    if n < 20:
        return ONES[n]
    if n < 100:
        return TENS[n // 10] + ("-" + ONES[n % 10] if n % 10 else "")
    return spell(n // 100) + " hundred" + (" and " + spell(n % 100) if n % 100 else "")


SUM_WORD = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}
ASK_SUM = {
    "any": ["What is {x} {o} {y}?", "What is {x} {o} {y}?", "What's {x} {o} {y}?", "How much is {x} {o} {y}?", "Calculate {x} {o} {y}.", "Compute {x} {o} {y}.", "{x} {o} {y}", "{x} {o} {y}?", "Can you calculate {x} {o} {y}?", "Tell me {x} {o} {y}.", "What does {x} {o} {y} make?", "Do you know what {x} {o} {y} is?"],
    "sign": ["{x} {s} {y}", "{x}{s}{y}", "{x} {s} {y} = ?", "{x}{s}{y}=", "What is {x} {s} {y}?", "What is {x}{s}{y}?", "{x} {s} {y} =", "Calculate {x} {s} {y}.", "how much is {x} {s} {y}?", "{x} {s} {y}?"],
    "+": ["Add {x} and {y}.", "What is the sum of {x} and {y}?", "Sum of {x} and {y}?"],
    "-": ["Subtract {y} from {x}.", "What is the difference of {x} and {y}?", "Take {y} away from {x}."],
    "*": ["Multiply {x} by {y}.", "What is the product of {x} and {y}?", "Multiply {x} and {y}."],
    "/": ["Divide {x} by {y}."],
}
ASK_SUM_HELD = P.HELD_SUM
ITEMS = "apples books coins stones pens cups eggs birds cards nuts balls keys blocks tokens sheets".split()


def sum_held(op, x, y):
    return held("sum", op, *(sorted((x, y)) if op in "+*" else (x, y)))


def draw_sum(rng):
    op = rng.choices("+-*/", (38, 32, 22, 8))[0]
    r = rng.random()
    if op in "+-":
        top = 20 if r < 0.30 else 99 if r < 0.85 else 999
        x, y = rng.randint(0, top), rng.randint(0, top)
        if op == "-" and x < y and rng.random() < 0.8:
            x, y = y, x
    elif op == "*":
        x, y = (rng.randint(0, 12), rng.randint(0, 12)) if r < 0.7 else (rng.randint(2, 20), rng.randint(2, 20)) if r < 0.85 else (rng.randint(11, 99), rng.randint(2, 9))
    else:
        y = rng.randint(1, 12)
        x = y * rng.randint(0, 12)
    return op, x, y


def value(op, x, y):
    return {"+": x + y, "-": x - y, "*": x * y, "/": x // y if y else 0}[op]


def sum_answer(op, x, y, words=False):
    v = value(op, x, y)
    if words:
        text = f"{spell(x)} {SUM_WORD[op]} {spell(y)} is {spell(v)}."
        return text[0].upper() + text[1:]
    return f"{x} {SUM_WORD[op]} {y} is {v if v >= 0 else 'minus ' + str(-v)}."


def arithmetic(rng):
    r = rng.random()
    if r < 0.05:
        n, m = rng.randint(2, 20), rng.randint(1, 12)
        item = rng.choice(ITEMS)
        if rng.random() < 0.5:
            while sum_held("+", n, m):
                n, m = rng.randint(2, 20), rng.randint(1, 12)
            q = rng.choice(["I have {n} {i} and get {m} more. How many {i} do I have?", "There are {n} {i}. {m} more come. How many {i} are there?", "If I have {n} {i} and buy {m} more, how many do I have?"])
            return [("user", q.format(n=n, m=m, i=item)), ("assistant", f"{n} plus {m} is {n + m}, so the answer is {n + m} {item}.")]
        m = min(n - 1, m)
        while sum_held("-", n, m):
            n = rng.randint(2, 20)
            m = rng.randint(1, n - 1)
        q = rng.choice(["I have {n} {i} and lose {m}. How many {i} are left?", "I have {n} {i} and give away {m}. How many do I have?", "There are {n} {i}. I take {m} away. How many {i} are left?"])
        return [("user", q.format(n=n, m=m, i=item)), ("assistant", f"{n} minus {m} is {n - m}, so the answer is {n - m} {item if n - m != 1 else item[:-1]}.")]
    if r < 0.09:
        x, y = rng.sample(range(0, 200), 2)
        q = rng.choice(["Which is larger, {x} or {y}?", "Is {x} larger than {y}?", "Is {x} greater than {y}?", "Which number is bigger, {x} or {y}?"])
        a = f"{max(x, y)} is larger than {min(x, y)}."
        if q.startswith("Is"):
            a = ("Yes, " if x > y else "No, ") + a
        return [("user", rough(rng, q.format(x=x, y=y))), ("assistant", a)]
    if r < 0.11:
        x = rng.randint(0, 200)
        if rng.random() < 0.5:
            return [("user", rough(rng, rng.choice(["What comes after {x}?", "Which number follows {x}?", "What number comes next after {x}?"]).format(x=x))), ("assistant", f"{x + 1} comes after {x}.")]
        return [("user", rough(rng, rng.choice(["What comes before {x}?", "Which number comes before {x}?"]).format(x=x + 1))), ("assistant", f"{x} comes before {x + 1}.")]
    if r < 0.12:
        x = rng.randint(1, 10)
        n = rng.randint(3, 10)
        return [("user", rough(rng, rng.choice(["Count from {x} to {y}.", "Count to {y} from {x}.", "Can you count from {x} to {y}?"]).format(x=x, y=x + n))), ("assistant", ", ".join(str(x + i) for i in range(n + 1)) + ".")]
    if r < 0.14:
        x, y = rng.randint(1000, 9999999), rng.randint(2, 99999)
        if rng.random() < 0.5:
            x, y = y, x
        op = rng.choice("+-*/")
        q = rng.choice(ASK_SUM["any"] + ASK_SUM["sign"]).format(x=x, y=y, o=SUM_WORD[op], s=op)
        return [("user", rough(rng, q)), ("assistant", "These numbers are too large for me. I can only calculate with small numbers.")]
    if r < 0.145:
        return [("user", rough(rng, f"What is {rng.randint(1, 99)} {rng.choice(['divided by', '/'])} 0?")), ("assistant", "A number cannot be divided by zero.")]
    turns = []
    for _ in range(1 if rng.random() < 0.75 else rng.randint(2, 4)):
        while True:
            op, x, y = draw_sum(rng)
            if not sum_held(op, x, y):
                break
        words = max(x, y) <= 100 and value(op, x, y) <= 200 and rng.random() < 0.22
        kind = rng.random()
        if rng.random() < 0.35:
            forms = P.SUM
        elif words:
            forms = ASK_SUM["any"] + (ASK_SUM[op] if kind < 0.2 else [])
        else:
            forms = ASK_SUM["sign"] if kind < 0.4 else ASK_SUM["any"] if kind < 0.85 else ASK_SUM[op]
        q = rng.choice(forms)
        if turns and rng.random() < 0.5:
            q = rng.choice(["And {x} {o} {y}?", "And what is {x} {o} {y}?", "Now {x} {o} {y}.", "And {x} {s} {y}?" if not words else "And {x} {o} {y}?"])
        sign = rng.choice(["*", "x", "*"]) if op == "*" else op
        q = typo(rng, q).format(x=spell(x) if words else x, y=spell(y) if words else y, o=SUM_WORD[op], s=sign)
        q = q[0].upper() + q[1:] if rng.random() < 0.8 else q
        turns += [("user", rough(rng, q, 0.7)), ("assistant", sum_answer(op, x, y, words))]
    return turns


# ---------------------------------------------------------------- stories
CHARACTERS = ("fox dog cat bear mouse owl rabbit horse duck frog hedgehog squirrel crow wolf sheep goat pig hen goose turtle snail bee ant spider whale "
              "penguin lion tiger elephant monkey girl boy baker farmer sailor king queen prince princess teacher painter miller fisherman wizard dragon "
              "giant robot knight shepherd old man old woman little girl little boy tailor gardener librarian printer smith hunter deer beaver badger otter raven swan donkey camel").split()
CHARACTERS = [c for c in CHARACTERS if c not in ("old", "little", "man", "woman")] + ["old man", "old woman", "little girl", "little boy"]
CHARACTERS_HELD = ["parrot", "zebra", "carpenter", "crocodile", "nurse", "ladybug", "pilot", "hamster"]
NAMES = "Anna Ben Clara David Emma Felix Greta Hugo Ida Jonas Karl Lena Max Nora Oscar Paula Rosa Sam Tom Vera Willy Zoe Mia Leo Ella Finn Ruby Otto Lucy Alice Peter Mary Jack Sara Paul Eva Nina Oliver Simon Julia".split()
NAMES_HELD = ["Bruno", "Stella", "Walter", "Iris", "Rita"]
PLACES = ["in a small house by the river", "at the edge of a dark forest", "on a green hill", "in a quiet village", "near the sea", "in a large old tree", "under a wooden bridge", "in a busy town", "on a small island", "in a warm valley", "behind an old mill", "at the foot of a mountain"]
THINGS = ["golden key", "red ball", "old book", "silver bell", "small lamp", "wooden box", "blue stone", "long letter", "warm coat", "music box", "paper boat", "map", "loaf of bread", "sheet of paper", "little clock"]
TRAITS = ["kind", "curious", "brave", "shy", "lazy", "clever", "lonely", "cheerful", "patient", "proud", "hungry", "careful"]
WEATHER = ["One cold morning", "One sunny day", "One rainy evening", "One quiet night", "One day in spring", "One winter day", "One autumn morning"]
FRIENDS = ["a small bird", "an old turtle", "a gray mouse", "a friendly owl", "a young deer", "a tired traveler", "a lost child", "a white cat", "a big bear", "a busy bee"]
LESSONS = ["So they learned that sharing makes everyone richer.", "From that day on they were good friends.", "And they all lived happily ever after.", "Since then they meet every evening and tell each other stories.", "It was the best day of the year.", "And if nobody moved it, it is still there today."]


def article(word):
    return ("an " if word[0] in "aeiou" else "a ") + word


def story(rng, hero, name=None):
    p = dict(h=hero, t=rng.choice(THINGS), f=rng.choice(FRIENDS), w=rng.choice(WEATHER), place=rng.choice(PLACES), k=rng.choice(TRAITS), end=rng.choice(LESSONS))
    p["f2"] = "the " + p["f"].split(" ", 1)[1]
    p["the"] = name or f"the {hero}"
    p["The"] = p["the"][0].upper() + p["the"][1:]
    p["ah"], p["ak"], p["at"] = article(hero), article(p["k"]), article(p["t"])
    start = rng.choice(["Once upon a time there was {ak} {h} who lived {place}.", "There once was {ak} {h} who lived {place}.", "Long ago {ak} {h} lived {place}."])
    if name:
        start = rng.choice(["Once upon a time there was {ak} {h} called {the} who lived {place}.", "Long ago {ak} {h} named {the} lived {place}."])
    plot = rng.choice([
        ["{w} {the} found {at} on the road.", "\"Who has lost this?\" asked {the}, and went to look for the owner.", "After a long walk {the} met {f}, who was looking for the {t}.", "\"Thank you!\" said {f2}, and they shared a meal.", "{end}"],
        ["{w} {the} lost the {t}.", "{The} looked under the bed and behind the door, but it was not there.", "Then {f} came by and said, \"I will help you.\"", "Together they found the {t} in the grass.", "{end}"],
        ["{The} wanted to see the world.", "{w} {the} took {at} and walked away from home.", "On the way {the} met {f} who had lost the way.", "{The} gave away the {t} and showed {f2} the way home.", "{end}"],
        ["{The} had {at} and showed it to nobody.", "{w} {f} knocked at the door and asked for help.", "At first {the} said no, but then felt sorry and opened the door.", "They sat by the fire and looked at the {t} together.", "{end}"],
        ["Every day {the} dreamed of {at}.", "{w} {f} said, \"I know where you can find one.\"", "They walked over three hills and crossed a river.", "There was the {t}, and {the} was very happy.", "{end}"],
        ["{w} there was a great storm.", "{The} was afraid and hid in a corner.", "Then {the} heard {f} calling for help outside.", "{The} was brave, took {at}, and went out to help.", "When the storm was over, {f2} said, \"You saved me.\"", "{end}"],
        ["{The} and {f} both wanted the same {t}.", "They argued the whole day.", "In the evening {the} said, \"Let us share it: one day for you and one day for me.\"", "{end}"],
        ["{The} wanted to write a book but had no paper.", "{w} {f} brought a quire of paper, all twenty-four sheets of it.", "{The} wrote one page on each sheet and put a number on it.", "Even when the wind mixed the sheets, {the} could find each page by its number.", "{end}"],
    ])
    return " ".join(x.format(**p) for x in [start] + plot)


ASK_STORY = ["Tell me a story.", "Tell me a short story.", "Can you tell me a story?", "A story, please.", "I want to hear a story.", "Do you know a story?", "Write a short story.", "Tell a story.", "Please tell me a small story.", "Make up a story."]
ASK_STORY_ABOUT = ["Tell me a story about {a}.", "Tell me a short story about {a}.", "Write a story about {a}.", "Can you tell a story about {a}?", "A story about {a}, please.", "I want a story about {a}.", "Make up a story about {a}.", "Write a short story with {a}.", "Tell a story about {a}.", "story about {a}", "Do you know a story about {a}?"]
ASK_STORY_HELD = P.HELD_STORY


HEROES = []  # filled by Words: any animal or person of WordNet, so that a hero is copied and not remembered


def stories(rng):
    r = rng.random()
    if r < 0.2:
        return [("user", rough(rng, typo(rng, rng.choice(ASK_STORY)))), ("assistant", story(rng, rng.choice(CHARACTERS)))]
    hero = rng.choice(CHARACTERS) if rng.random() < 0.5 else rng.choice(HEROES)
    ask = typo(rng, rng.choice(ASK_STORY_ABOUT if rng.random() < 0.3 else P.STORY))
    if r < 0.85:
        return [("user", rough(rng, ask.format(a=article(hero)))), ("assistant", story(rng, hero))]
    name = rng.choice(NAMES)
    return [("user", rough(rng, ask.format(a=f"{article(hero)} {rng.choice(['called', 'named'])} {name}"))), ("assistant", story(rng, hero, name))]


# ---------------------------------------------------------------- subjects
def polish(text):
    """a template and a name may leave two spaces or 'a' before a plural; keep only the first letter right"""
    return text[0].upper() + text[1:] if text[0].islower() else text


FORMS = {"ask": (S.ASK, P.TOPIC, P.HELD_TOPIC), "long": (S.ASK_LONG, P.LONG, P.HELD_LONG), "why": (S.ASK_WHY, P.WHY, P.HELD_WHY)}


def topic_template_ok(name, template):
    # "Define quire." asks for the word, "What is quire?" for the engine
    return name != "quire" or not re.search(r"efin|mean|word|term|concept", template)


def topic_held_questions(index, form):
    """the questions about a topic that training never holds: unseen forms, and known forms not yet asked of this name"""
    plain, _, unseen = FORMS[form]
    names = S.TOPICS[index][0]
    return [t.format(a=a) for a in names for t in plain + unseen if topic_template_ok(a, t) and (t in unseen or held("topic", a, t))]


def topic_question(rng, index, form):
    plain, more, _ = FORMS[form]
    while True:
        a = S.TOPICS[index][0][min(rng.randrange(len(S.TOPICS[index][0])), rng.randrange(len(S.TOPICS[index][0])) if rng.random() < 0.3 else 99)]
        t = rng.choice(plain if rng.random() < 0.4 else more)
        if topic_template_ok(a, t) and not held("topic", a, t):
            return typo(rng, t).format(a=a)


def topic(rng):
    i = rng.randrange(len(S.TOPICS))
    names, short, long, why, _ = S.TOPICS[i]
    form = rng.choices(("ask", "long", "why"), (55, 22, 23))[0]
    answer = {"ask": short, "long": long, "why": why}[form]
    turns = [("user", rough(rng, topic_question(rng, i, form))), ("assistant", answer)]
    if rng.random() < 0.2:
        rest = [f for f in ("long", "why") if f != form]
        f = rng.choice(rest)
        turns += [("user", rough(rng, typo(rng, rng.choice(S.MORE if f == "long" else S.MORE_WHY)))), ("assistant", long if f == "long" else why)]
    return turns


VERSUS = ["What is the difference between {x} and {y}?", "What's the difference between {x} and {y}?", "How do {x} and {y} differ?", "Compare {x} and {y}.", "Compare {x} with {y}.", "{x} or {y}?", "{x} and {y}, what is the difference?", "How is {x} different from {y}?", "{x} compared to {y}?",
          "Explain the difference between {x} and {y}.", "Tell me the difference between {x} and {y}.", "Can you compare {x} and {y}?", "Could you explain how {x} and {y} differ?", "In what way do {x} and {y} differ?", "Difference between {x} and {y}", "Is {x} the same as {y}?", "{x} against {y}", "What distinguishes {x} from {y}?"]


def fact(rng):
    questions, answer, _ = rng.choice(S.FACTS)
    q = rng.choice(questions[:-1])
    m = re.match(r"What is the difference between (.*) and (.*)\?", questions[0])
    if m and rng.random() < 0.7:
        x, y = m.groups() if rng.random() < 0.5 else m.groups()[::-1]
        q = typo(rng, rng.choice(VERSUS)).format(x=x, y=y)
    elif q[:4] in ("How ", "Why ") and q.split()[1] in ("do", "does") and rng.random() < 0.25:
        q = f"{rng.choice(P.ASKING)}: {q[0].lower() + q[1:]}"
    else:
        q = typo(rng, q)
    return [("user", rough(rng, q)), ("assistant", answer)]


# ---------------------------------------------------------------- words
class Words:
    def __init__(self, count):
        senses, self.texts, common = W.load()
        self.senses = senses
        self.all = {w for w, _ in senses}
        ranked = sorted((w for w in common if w.isascii() and w.isalpha() and w.islower() and 1 < len(w) < 18), key=lambda w: (-common[w], w))
        self.entry, self.order, self.spare = {}, [], []
        for w in ranked:
            found = {}
            for p in "nvar":
                for s in senses.get((w, p), [])[:1]:
                    g = W.usable(s) if s.word == w else None
                    if g and not s.instance:
                        found[p] = (s, g)
            if not found:
                continue
            if len(self.order) >= count and w != "quire":
                self.spare.append(w)
                continue
            best = max(found, key=lambda p: (sum(s.count for s in senses[w, p]), "rnav".index(p)))
            total = sum(s.count for s in senses[w, best])
            self.entry[w] = {"main": best, **{p: v for p, v in found.items() if p == best or sum(s.count for s in senses[w, p]) >= max(3, total // 8)}}
            self.order.append(w)
        self.rank = {w: i for i, w in enumerate(self.order)}
        self.spare_train = [w for w in self.spare if not held("spare", w)]
        self.spare_held = [w for w in self.spare if held("spare", w)]
        top = self.order[200:6000]
        self.nouns = [w for w in top if self.entry[w]["main"] == "n" and len(w) > 2 and not w.endswith("s")]
        self.verbs = [w for w in top if self.entry[w]["main"] == "v" and len(w) > 2]
        self.adjs = [w for w in top if self.entry[w]["main"] == "a" and len(w) > 2]
        HEROES[:] = [w for w in self.order if self.entry[w]["main"] == "n" and self.entry[w]["n"][0].lex in ("05", "18") and len(w) > 2 and w not in CHARACTERS_HELD and not w.endswith("s")]
        self._markov()
        self._world(common)

    def _markov(self):
        self.next = {}
        for w in self.order:
            padded = "^^" + w + "$"
            for i in range(len(padded) - 2):
                self.next.setdefault(padded[i:i + 2], []).append(padded[i + 2])
        self.known_forms = self.all | {f for w in self.all if w.isalpha() for f in (w + "s", w + "es", w + "ed", w + "d", w + "ing", w[:-1] + "ing", w + "er", w + "ly")}

    def nonsense(self, rng):
        while True:
            c, w = "^^", ""
            while True:
                x = rng.choice(self.next[c])
                if x == "$" or len(w) > 14:
                    break
                w, c = w + x, c[1] + x
            if rng.random() < 0.3:
                w = "".join(rng.choice("bcdfghklmnprstvwz") + rng.choice("aeiou") for _ in range(rng.randint(2, 3))) + rng.choice(["", "x", "n", "t", "rg", "b", "k", "bit"])
            if 4 <= len(w) <= 13 and w not in self.known_forms:
                return w

    def _world(self, common):
        """capitals, places and people out of WordNet's instances"""
        self.capital, self.place, self.person = {}, {}, {}
        for (lemma, p), list_ in self.senses.items():
            if p != "n" or not list_[0].instance:
                continue
            s = list_[0]
            gloss = W.usable(s)
            if not gloss or not s.word.isascii() or not s.word[0].isupper():
                continue
            m = re.search(r"\bcapital (?:and (?:the )?(?:largest|chief) (?:city|port) |city |and chief port )*of (?:the )?([A-Z][A-Za-z]+(?: [A-Z][a-z]+)?)\b(?!-)", s.gloss)
            if m and s.first and not re.search(r"former|ancient|until|provinc|district|empire", s.gloss):
                of = self.senses.get((m.group(1).lower(), "n"), [None])[0]
                if of and of.instance and of.lex == "15":
                    self.capital.setdefault(m.group(1), s.word)
            if s.lex == "15" and (s.count > 0 or common[lemma] > 6) and " " not in lemma:
                self.place[s.word] = gloss
            if s.lex == "18" and " " not in lemma and not s.word.isupper() and (s.count > 0 or common[lemma] > 3) and not re.match(r"(a|an|the|in|one) ", gloss, re.I):
                self.person[s.word] = (s.synonyms, gloss)
        self.places = sorted(self.place)
        self.people = sorted(self.person)
        self.countries = sorted(self.capital)

    def weighted(self, rng):
        """every word alike, and the common ones once more"""
        r = rng.random()
        if r < 0.75:
            return rng.choice(self.order)
        return self.order[int(rng.random() ** 2 * len(self.order))]

    def meaning(self, w, pos=None):
        e = self.entry[w]
        p = pos if pos in e else e["main"]
        text = e[p][1]
        if p == "v" and not text.startswith("to "):
            text = "to " + text
        out = f"The {W.POS_NAME[p]} {w} means {text}."
        if w == "quire":
            out += " It is also the name of the engine that runs me."
        return out

    def example(self, w, pos=None):
        e = self.entry[w]
        p = pos if pos in e else e["main"]
        for x in e[p][0].examples:
            if re.search(rf"\b{w[:max(3, len(w) - 2)]}", x, re.I) and len(x) < 90 and not W.UNWANTED.search(x):
                return f'Here is an example: "{x}".'
        return None

    def synonym(self, w, pos=None):
        e = self.entry[w]
        p = pos if pos in e else e["main"]
        syn = [x for x in e[p][0].synonyms if x.isalpha() and x.islower()][:2]
        if not syn:
            return None
        return f"A synonym of {w} is {syn[0]}." if len(syn) == 1 else f"Synonyms of {w} are {syn[0]} and {syn[1]}."

    def opposite(self, w):
        e = self.entry[w]
        for p in [e["main"]] + [p for p in "avnr" if p in e]:
            ant = [x for x in e[p][0].antonyms if x.isalpha()]
            if ant:
                return f"The opposite of {w} is {ant[0]}."
        return None


# words that are subjects too: "What is a block?" asks for the subject, "Define block" for the word
SUBJECT_WORDS = {n.split(" ", 1)[1] if n.startswith(("a ", "an ", "the ")) else n for t in S.TOPICS for n in t[0]}
SUBJECT_WORDS = {w.lower() for w in SUBJECT_WORDS if " " not in w} | {"block", "token", "page", "attention"}


def fill_word(t, w):
    return t.format(w=w, a=article(w), ws=w + ("es" if w.endswith(("s", "x", "ch", "sh")) else "s"))


def definition_questions(words, w, held_out=False):
    """-> [(question template, part of speech or None)] that fit the word"""
    e = words.entry[w]
    out = [(t, None) for t in (DEF_ANY_HELD if held_out else DEF_ANY)]
    if w in SUBJECT_WORDS and w != "quire":
        return [x for x in out if "word" in x[0] or "Look" in x[0]]
    if w == "quire":
        return [(t, None) for t in (DEF_N_HELD if held_out else DEF_N + [x for x in DEF_ANY + P.WORD if "word" in x or "mean" in x or "efin" in x]) if "{a}" in t or "mean" in t or "efin" in t]
    extra = {"n": DEF_N_HELD if held_out else DEF_N * 2, "v": DEF_V_HELD if held_out else DEF_V, "a": [] if held_out else DEF_A, "r": [] if held_out else DEF_R}
    for p in "nvar":
        if p in e:
            out += [(t, p) for t in extra[p]]
    return out


def definition_question(rng, words, w):
    e = words.entry[w]
    if w in SUBJECT_WORDS or rng.random() < 0.4:
        return rng.choice(definition_questions(words, w))
    p = rng.choice([None] + [p for p in "nv" if p in e] * 2)
    return rng.choice({None: P.WORD, "n": P.NOUN, "v": P.VERB}[p]), p


def define(rng, words, w=None):
    w = w or words.weighted(rng)
    t, p = definition_question(rng, words, w)
    q = fill_word(typo(rng, t), w)
    turns = [("user", rough(rng, polish(q) if rng.random() < 0.5 and not q.startswith(w) else q)), ("assistant", words.meaning(w, p))]
    while rng.random() < 0.12:
        r = rng.random()
        if r < 0.45:
            turns += [("user", rough(rng, rng.choice(THEN_EXAMPLE))), ("assistant", words.example(w, p) or f"I do not have an example sentence for {w}.")]
        elif r < 0.65:
            turns += [("user", rough(rng, rng.choice(THEN_SYN))), ("assistant", words.synonym(w, p) or f"I do not know a synonym of {w}.")]
        elif r < 0.85:
            turns += [("user", rough(rng, rng.choice(TALK["thanks"][0][:-1]))), ("assistant", TALK["thanks"][1][0])]
        else:
            w = words.weighted(rng)
            if w in SUBJECT_WORDS:
                break
            p = None
            turns += [("user", rough(rng, rng.choice(["And {w}?", "What about {w}?", "And what does {w} mean?", "Now define {w}."]).format(w=w))), ("assistant", words.meaning(w))]
    return turns


def usage(rng, words):
    """examples, synonyms and opposites of the more common words"""
    while True:
        w = words.order[int(rng.random() * 9000)]
        r = rng.random()
        if r < 0.40:
            a, forms = words.example(w), ASK_EXAMPLE
            if not a and rng.random() < 0.15:
                a = f"I do not have an example sentence for {w}."
        elif r < 0.75:
            a, forms = words.synonym(w), ASK_SYN
            if not a and rng.random() < 0.15:
                a = f"I do not know a synonym of {w}."
        else:
            a, forms = words.opposite(w), ASK_ANT
            if not a and rng.random() < 0.08:
                a = f"I do not know the opposite of {w}."
        if a:
            return [("user", rough(rng, typo(rng, rng.choice(forms)).format(w=w))), ("assistant", a)]


def unknown_word(rng, words):
    w = words.nonsense(rng) if rng.random() < 0.6 else rng.choice(words.spare_train)
    r = rng.random()
    forms = DEF_ANY + DEF_N if r < 0.4 else P.WORD if r < 0.65 else P.NOUN if r < 0.8 else P.VERB + DEF_V + DEF_A if r < 0.9 else rng.choice((P.EXAMPLE, P.SYNONYM, P.OPPOSITE))
    while "{ws}" in (t := rng.choice(forms)):
        pass
    q = fill_word(typo(rng, t), w)
    q = polish(q) if rng.random() < 0.5 and not q.startswith(w) else q
    return [("user", rough(rng, q)), ("assistant", f"I do not know the word {w}.")]


def made_name(rng):
    def part():
        s = "".join(rng.choice("b c d f g h k l m n p r s t v w br gr kr st th sh".split()) + rng.choice("a e i o u ai ee ou".split()) for _ in range(rng.randint(1, 3)))
        return (s + rng.choice(["", "n", "r", "l", "s", "ck", "son", "man", "berg", "ton"])).capitalize()
    first = rng.choice(NAMES) if rng.random() < 0.6 else part()
    return first if rng.random() < 0.15 else f"{first} {part()}"


def fill_unknown(rng, words, t, a):
    p = dict(name=made_name(rng), place=rng.choice(words.places), place2=rng.choice(words.places), n1=rng.choice(words.nouns), n2=rng.choice(words.nouns), v1=rng.choice(words.verbs), a1=rng.choice(words.adjs))
    if "{a1} {n1}" in t and f"{p['a1']} {p['n1']}" in words.all:
        p["a1"] = "purple"
    q = re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", t.format(**p))
    return q, re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", a.format(**p))


def unknown(rng, words):
    questions, answer = rng.choice(UNKNOWN)
    q, a = fill_unknown(rng, words, typo(rng, rng.choice(questions)), answer)
    return [("user", rough(rng, q)), ("assistant", a)]


def person_answer(asked, gloss):
    vowel = gloss[0] in "aeioAEIO" and not gloss.lower().startswith(("one", "eu"))
    return f"{asked} was {'an' if vowel else 'a'} {gloss}."


def world(rng, words):
    r = rng.random()
    if r < 0.35:
        c = rng.choice(words.countries)
        q = rng.choice(["What is the capital of {c}?", "What is {c}'s capital?", "Capital of {c}?", "Which city is the capital of {c}?", "Name the capital of {c}.", "Tell me the capital of {c}.", "Do you know the capital of {c}?"])
        return [("user", rough(rng, q.format(c=c))), ("assistant", f"The capital of {c} is {words.capital[c]}.")]
    if r < 0.47:
        c = words.nonsense(rng).capitalize()
        q = rng.choice(["What is the capital of {c}?", "Capital of {c}?", "Where is {c}?", "What is {c}?", "Who is {c}?", "Tell me about {c}.", "Who was {c}?"])
        a = f"I do not know the capital of {c}." if "apital" in q else f"I do not know who {c} is." if "Who" in q else f"I do not know {c}."
        return [("user", rough(rng, q.format(c=c)) if rng.random() < 0.6 else q.format(c=c)), ("assistant", a)]
    if r < 0.8:
        c = rng.choice(words.places)
        q = rng.choice(["What is {c}?", "Where is {c}?", "Tell me about {c}.", "What do you know about {c}?", "Do you know {c}?", "Where is {c} located?", "Where can I find {c}?"])
        return [("user", rough(rng, q.format(c=c))), ("assistant", f"{c} is {words.place[c]}.")]
    c = rng.choice(words.people)
    synonyms, gloss = words.person[c]
    full = [s for s in synonyms if s.endswith(" " + c) and s.count(" ") == 1]
    asked = full[0] if full and rng.random() < 0.5 else c
    q = rng.choice(["Who is {c}?", "Who was {c}?", "Tell me about {c}.", "Do you know {c}?", "What do you know about {c}?", "Tell me who {c} was."])
    return [("user", rough(rng, q.format(c=asked))), ("assistant", person_answer(asked, gloss))]


def talk(rng):
    questions, answers, _ = rng.choice(list(TALK.values()))
    q = rng.choice(questions[:-1])
    if q.endswith("?") and q.split()[0] in ("Who", "What", "Where", "When") and rng.random() < 0.15:
        q = f"{rng.choice(P.ASKING)}: {q[0].lower() + q[1:]}"
    return [("user", rough(rng, typo(rng, q), 0.6)), ("assistant", answers[0])]


def refuse(rng, words):
    questions, answer = REFUSE[rng.choice(list(REFUSE))]
    q = typo(rng, rng.choice(questions[:-1])).format(lang=rng.choice(LANGS), pl=rng.choice(PLS), w=rng.choice(words.nouns), p=rng.choice(PEOPLE))
    return [("user", rough(rng, q)), ("assistant", answer)]


def name_game(rng):
    """the one thing it can learn from a chat: who it talks to"""
    name = rng.choice(NAMES) if rng.random() < 0.5 else made_name(rng).split(" ")[0]
    turns = [("user", rng.choice(["My name is {n}.", "I am {n}.", "I'm {n}.", "Call me {n}.", "Hello, my name is {n}.", "Hi, I am {n}.", "You can call me {n}."]).format(n=name)), ("assistant", f"Nice to meet you, {name}!")]
    if rng.random() < 0.3:
        turns += talk(rng)
    return turns + [("user", rough(rng, rng.choice(["What is my name?", "Do you know my name?", "Who am I?", "Do you remember my name?", "What's my name?"]))), ("assistant", f"Your name is {name}.")]


def statement(rng, words):
    n = rng.choice(words.nouns)
    q, a = rng.choice([("I like {n}s.", "That is nice. What do you like about {n}s?"), ("I have a {n}.", "That is nice. I have no {n}, because I am a program."), ("I do not like {n}s.", "I see. Not everyone likes {n}s."),
                       ("I saw a {n} today.", "That sounds interesting."), ("Do you like {n}s?", "I am a program, so I do not like or dislike {n}s."), ("I want a {n}.", "I hope you get one."), ("I love my {n}.", "That is nice."),
                       ("Do you have a {n}?", "No, I am a program and have no {n}."), ("Can I have a {n}?", "I am sorry, I can only answer with text.")])
    q, a = (re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", x.format(n=n)) for x in (q, a))
    return [("user", rough(rng, q)), ("assistant", a)]


def any_turns(rng, words):
    r = rng.random()
    if r < 0.30:
        return define(rng, words)
    if r < 0.36:
        return usage(rng, words)
    if r < 0.53:
        return topic(rng)
    if r < 0.57:
        return fact(rng)
    if r < 0.72:
        return talk(rng)
    if r < 0.82:
        return arithmetic(rng)
    if r < 0.87:
        return unknown_word(rng, words)
    if r < 0.92:
        return unknown(rng, words)
    if r < 0.94:
        return world(rng, words)
    if r < 0.96:
        return statement(rng, words)
    return stories(rng) if rng.random() < 0.4 else refuse(rng, words)


def chat(rng, words):
    """several turns on different things, now and then a very long chat"""
    turns = list(talk(rng)) if rng.random() < 0.4 else []
    for _ in range(rng.randint(2, 5) if rng.random() < 0.85 else rng.randint(8, 18)):
        turns += any_turns(rng, words)
    if rng.random() < 0.2:
        turns += [("user", rng.choice(TALK["bye"][0][:-1])), ("assistant", TALK["bye"][1][0])]
    return turns


def with_system(rng, turns):
    return [("system", rng.choice(SYSTEM))] + turns if rng.random() < 0.25 else turns
