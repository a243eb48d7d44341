"""Questions for the target: topics times forms that fit their kind, some with a second question behind the answer."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tools.drafters.topics import TOPICS, split

HELD_OUT_SHARE = 0.05
"""Share of the topics that no drafter is trained on."""
_SECOND_SHARE = 0.2
"""Share of the conversations with a second question."""

FORMS: dict[str, tuple[str, ...]] = {
    "thing": split(
        """What is {0} made of?|How does {0} work?|Who invented {0}?|Tell me the history of {0}.|What is {0} used
        for?| How do I choose {0}?|How should I look after {0}?|Describe {0} to someone who has never seen one.|
        What did people use before there was {0}?|Write an advertisement for {0}.|Give me five unusual uses for
        {0}.| Explain in two sentences what {0} does.|What could go wrong with {0}?|How is {0} made in a factory?|
        Imagine you are {0}. What do you see all day?|Is {0} still useful today? Why or why not?| I want to sell
        {0}. Write the text of the offer.|What are the parts of {0}?"""
    ),
    "activity": split(
        """How do I {0}?|Explain step by step how to {0}.|What do I need to {0}?|Give a beginner some advice on how
        to {0}.| Why is it worth it to {0}?|How long does it take to {0}?|What mistakes do people make when they
        {0}?| Write a checklist for someone who wants to {0}.|My friend wants to {0}. What would you tell her?| I
        have one hour a day to {0}. Make me a plan.|What is the cheapest way to {0}?|Can anyone {0}, or does it
        need talent?| Write a short motivational text for people who want to {0}.|How did you {0}? Answer as an
        expert would.| What are the first three steps to {0}?|Is it hard to {0}?|Write a dialogue in which a
        teacher explains how to {0}.| Please help me to {0}, I have never tried before."""
    ),
    "place": split(
        """What is special about {0}?|Where is {0}?|What can a visitor do in {0} in one day?|Describe {0} in a few
        sentences.| What is the weather like in {0}?|Tell me something about the history of {0}.|What do people
        eat in {0}?| Write a postcard from {0}.|When is the best time to travel to {0}?|What should I know before
        I go to {0}?| Name some famous sights of {0}.|How do people travel around in {0}?|Is {0} expensive to
        visit?| Write a short travel guide for {0}.|Why do so many people want to see {0}?|Which animals live in
        {0}?"""
    ),
    "animal": split(
        """What do {0} eat?|Where do {0} live?|How long do {0} live?|How do {0} protect themselves?|How do {0} raise
        their young?| Tell me three surprising facts about {0}.|Are {0} dangerous to people?|How do {0}
        communicate?| Why are {0} important for nature?|Write a short story in which {0} save a forest.|Describe
        what {0} look like.| Are {0} in danger of dying out?|How do {0} survive the winter?|Write a riddle whose
        answer is {0}.| What should a child know about {0}?|How have {0} changed over time?"""
    ),
    "food": split(
        """How do I make {0}?|What ingredients do I need for {0}?|Where does {0} come from?|What goes well with {0}?|
        Is {0} healthy?|How can I store {0}?|Give me a quick recipe for {0} for two people.|Describe the taste of
        {0}.| What can I use {0} for?|How do I make {0} without milk?|Write a review of a cafe that is famous for
        {0}.| My {0} never turns out well. What am I doing wrong?|Suggest a menu in which {0} is served.| Why do
        so many people love {0}?|How many calories are in {0}?"""
    ),
    "science": split(
        """What is the meaning of {0} in science?|Explain {0} in simple words.|How would you explain {0} to a child?|
        Why is {0} important?|Who discovered the facts that we know about {0}?|Give an example that shows {0} in
        daily life.| What are the most common mistakes about {0}?|Write a short lesson about {0}.|Summarise what
        is known about {0}.| Make a quiz of three questions about {0}, with answers.|What experiment can I do at
        home to understand {0}?| How is {0} measured or studied?|What would the world be without {0}?|Use an
        analogy to explain {0}.| Tell me about {0} in exactly three sentences.|What do students find hard about
        {0}?"""
    ),
    "history": split(
        """Tell me about {0}.|Why is {0} remembered today?|What happened around the time of {0}?| Summarise the story
        of {0} in a short paragraph.|When was {0}, and what came after?| What can we learn from {0}?|List four key
        facts about {0}.|Write a diary entry by someone who knew {0}.| How did {0} change the world?|Explain {0}
        to a school class.|What do people often get wrong about {0}?| Which books or films deal with {0}?|Write
        the opening of a documentary about {0}.|Who were the opponents of {0}?"""
    ),
    "job": split(
        """What does {0} do all day?|How do I become {0}?|What skills does {0} need?|What is the hardest part of
        being {0}?| How much does {0} earn?|Describe a normal working day of {0}.|Write a job advertisement for
        {0}.| What questions should I ask {0}?|Why would someone want to be {0}?|Will {0} be replaced by
        machines?| Write a short story about {0} on the first day at work.|Which subjects at school help to become
        {0}?| Write a letter of thanks to {0}.|What tools does {0} use?"""
    ),
    "computing": split(
        """What is the purpose of {0}?|Explain {0} to a beginner.|Give a simple example of {0}.|When should I use
        {0}?| What are the advantages and disadvantages of {0}?|How does {0} work inside?|Who came up with {0}?|
        What is a common mistake with {0}?|Explain {0} with an everyday comparison.|Write a short tutorial about
        {0}.| Why do programmers talk so much about {0}?|What should I learn before {0}?|Define {0} in one
        sentence.| Write three interview questions about {0} and answer them."""
    ),
    "code": split(
        """Write a Python program that {0}.|Write a JavaScript function that {0}.|Show me code that {0}, with
        comments.| How can I write a program that {0}?|Write a short function in C that {0}.|Explain an algorithm
        that {0}.| Write a test for a function that {0}.|I need a script that {0}. Please keep it short.| Write
        pseudocode that {0}.|Write a Python class with a method that {0}."""
    ),
    "health": split(
        """What should I know about {0}?|What causes {0}, and what helps?|Give me three pieces of advice about {0}.|
        How does {0} affect the body?|When should I see a doctor about {0}?|Explain {0} to a worried parent.| What
        do people get wrong about {0}?|Write a short leaflet about {0}.|How can I talk to my family about {0}?| Is
        there a link between {0} and sleep?|Make a weekly plan that takes account of {0}."""
    ),
    "money": split(
        """How does this work: {0}?|Explain {0} as if I were twelve.|What are the risks of {0}?|Why does {0} matter
        to families?| Give an example with numbers for {0}.|What should a student know about {0}?|Who decides
        about {0}?| What is the history of {0}?|Write a short newspaper article about {0}.|List the pros and cons
        of {0}.| What is a good question to ask an expert about {0}?"""
    ),
    "society": split(
        """What do you think about {0}?|Why is {0} important to people?|Give arguments for and against {0}.| How has
        {0} changed in the last fifty years?|Write a short essay about {0}.|Write a quote about {0} and explain
        it.| How can I learn more about {0}?|Explain {0} to someone from another planet.|What are the main ideas
        behind {0}?| Write the beginning of a speech about {0}.|How does {0} affect young people?|Write a haiku
        about {0}.| What will {0} look like in the year 2100?|Tell a short anecdote about {0}."""
    ),
    "word": split(
        """What is the meaning of "{0}"?|Use "{0}" in two sentences.|Explain "{0}" to someone who is learning
        English.| Where does the expression "{0}" come from?|Give me words that are close to "{0}".|What is the
        opposite of "{0}"?| Write a short dialogue that contains "{0}".|How do I pronounce "{0}", and when do I
        use it?| Write a sentence with "{0}" and one without it that mean the same."""
    ),
    "subject": split(
        """Write a short poem about {0}.|Write a short story about {0}.|Write the first lines of a novel about {0}.|
        Write a limerick about {0}.|Write a song text about {0}.|Describe a painting that shows {0}.| Write a
        bedtime story about {0}.|Write a dialogue about {0}.|Suggest five titles for a story about {0}.| Write a
        scary story about {0}.|Write a funny story about {0}, in at most six sentences.| Write four lines that
        rhyme about {0}.|How could a story about {0} end?|Write a scene of a play about {0}."""
    ),
    "letter": split(
        """Write a letter to {0}.|Write a short and friendly e-mail to {0}.|Draft a formal message to {0}.| How
        should I begin a letter to {0}?|Help me to write to {0}. What should I mention?| Write two versions of a
        note to {0}: one polite, one firm.|What subject line fits an e-mail to {0}?"""
    ),
    "pair": split(
        """Compare {0}.|What do {0} have in common?|How do {0} differ?|Which is better, and why: {0}?| Make a table
        of the differences of {0}.|Explain the difference of {0} with an example.| Write a debate between two
        friends about {0}.|When do I choose which: {0}?"""
    ),
    "situation": split(
        """What can I do? The problem: {0}.|Please help, {0}.|Here is my problem: {0}. Give me three ideas.| Suppose
        {0}. What is the first thing to do?|A friend tells me: "{0}". How should I answer?| It happened again:
        {0}. How do I stay calm?|Write a short message to a friend which says that {0}.| Why does it happen that
        {0}, and how can I prevent it?"""
    ),
    "claim": split(
        """True or false: {0}.|Is it true that {0}?|Someone told me that {0}. Is that right?|Explain why people say
        that {0}.| How could I check whether {0}?|Do you agree with this sentence: {0}? Answer yes or no and give
        a reason.| Correct the sentence if it is wrong: {0}."""
    ),
    "list": split(
        """List five {0}.|Name three {0} and say a word about each.|Give me a list of {0}.| What are some good
        examples of {0}?|I need ideas: {0}.|Which {0} do you know?| Write ten {0} in alphabetical order.|Choose
        one from this category and describe it: {0}."""
    ),
    "passage": split(
        """Summarise this text in one sentence: {0}|What is the main point of this text? {0}|Read the text and give
        it a title. {0}| {0} Continue this text with three more sentences.|Rewrite this text in simpler words:
        {0}| Ask three questions about this text: {0}|Which facts are in this text? List them. {0}| Rewrite the
        following as a poem. {0}|What could have happened before this? {0}| Turn this text into a dialogue: {0}|Is
        the tone of this text happy or sad? {0}|Correct the style of this paragraph: {0}"""
    ),
}
"""Forms of questions for each kind of topic; {0} is the topic."""

SECOND = split(
    """Can you say that in one sentence?|Give me an example.|Why is that?|Explain the last point in more detail.| Now
    say it in simpler words.|What else should I know?|Are you sure about that?|Write it as a list.|Turn that into
    a poem.| What would an expert add?|Thank you! What should I do next?|Which part is the most
    important?|Translate the first sentence into French.| Now make it shorter.|Now make it longer and more
    detailed.|What is the opposite view?|How would you explain this to my grandfather?| Ask me a question about
    it.|Where can I read more about this?|Give it a title.|Who would disagree, and why?| Can you give me a
    different answer?|What does that cost?|How long has this been known?|Write a short summary for a newspaper."""
)
"""Questions that fit behind any answer."""

_SYSTEM_FREE_PREFIXES = split(
    """Please answer briefly. |I have a question. |Quick question: |Hi! |Hello, can you help me? |I am a student. |I
    am curious: | Answer in one paragraph. |For my homework: |Be honest. |In a few words: |Take your time."""
)


class Question(NamedTuple):
    """What is asked in one conversation: its turns, and the topic by which it is held out or not."""

    kind: str
    topic: str
    turns: tuple[str, ...]


def words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z]+", text.lower()))


def resembles(question: str, others: Iterable[frozenset[str]], limit: float = 0.6) -> bool:
    """Whether a question shares more than ``limit`` of its words with one of the ``others`` (words of each)."""
    mine = words(question)
    return any(len(mine & other) > limit * len(mine | other) for other in others)


def held_out(kind: str, topics: Sequence[str]) -> frozenset[str]:
    """Return the topics of a kind that are kept for validation, the same ones at every call."""
    drawn = random.Random(f"held out {kind}").sample(range(len(topics)), max(1, round(len(topics) * HELD_OUT_SHARE)))
    return frozenset(topics[i] for i in drawn)


def _asked(rng: random.Random, form: str, topic: str) -> tuple[str, ...]:
    """Return the turns of one conversation."""
    text = form.format(topic)
    if rng.random() < 0.15:
        text = f"{rng.choice(_SYSTEM_FREE_PREFIXES)} {text}"
    text = text[0].upper() + text[1:]
    return (text, rng.choice(SECOND)) if rng.random() < _SECOND_SHARE else (text,)


def _rounds(rng: random.Random, kind: str, topics: Sequence[str]) -> list[list[Question]]:
    """Return rounds of questions, each with every topic once and in another form than before."""
    orders = {topic: rng.sample(FORMS[kind], len(FORMS[kind])) for topic in topics}
    return [
        [Question(kind, topic, _asked(rng, order[i], topic)) for topic, order in orders.items()]
        for i in range(len(FORMS[kind]))
    ]


def questions(seed: int, tests: Iterable[str], validation: bool) -> list[Question]:
    """Return all questions of the training or the validation topics, none of which resembles a test question.

    The first ones cover all topics once; those behind them do so again in another form, as often as there are forms.
    """
    rng = random.Random(f"{seed} {validation}")
    avoided = [words(test) for test in tests]
    rounds: dict[int, list[Question]] = {}
    for kind, topics in TOPICS.items():
        apart = held_out(kind, topics)
        mine = [topic for topic in topics if (topic in apart) == validation]
        for i, asked in enumerate(_rounds(rng, kind, mine)):
            rounds.setdefault(i, []).extend(asked)
    out = []
    for i in sorted(rounds):
        rng.shuffle(rounds[i])
        out += [q for q in rounds[i] if not resembles(q.turns[0], avoided)]
    return out
