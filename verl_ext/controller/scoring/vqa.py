"""VQA soft accuracy with the normalisation of answers that the official evaluation makes.

Antol et al., "VQA: Visual Question Answering" (ICCV 2015), and the rules on https://visualqa.org/evaluation.html.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

REMOVED = r""";/[]"{}()=+\_-><@`,?!"""
"""Signs that become nothing where one stands beside a space, and else a space."""
NUMBERS = {"none": "0", "zero": "0", "one": "1", "two": "2", "three": "3", "four": "4", "five": "5"}
NUMBERS |= {"six": "6", "seven": "7", "eight": "8", "nine": "9", "ten": "10"}
ARTICLES = {"a", "an", "the"}
CONTRACTED = """
    ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd he'd've
    he's how'd how'll how's isn't it'd it'd've it'll ma'am mightn't mightn't've might've mustn't must've needn't not've
    o'clock oughtn't 'ow's'at shan't she'd've should've shouldn't shouldn't've somebody'd've somebody'll somebody's
    someone'd someone'd've someone'll someone's something'd something'd've something'll that's there'd there'd've
    there're there's they'd they'd've they'll they're they've 'twas wasn't we'd've we've weren't what'll what're what's
    what've when's where'd where's where've who'd who'd've who'll who's who've why'll why're why's won't would've
    wouldn't wouldn't've y'all y'all'll y'all'd've you'd you'd've you'll you're you've
""".split()
CONTRACTIONS = {
    full[:place] + full[place + 1 :]: full for full in CONTRACTED for place, sign in enumerate(full) if sign == "'"
} | {"somebody'd": "somebodyd"}  # the official table has this one the wrong way round
ENOUGH = 3
"""Annotators who gave an answer for it to be wholly right."""


def normalise(answer: str) -> str:
    """An answer as the official evaluation compares it: punctuation, case, numbers, articles and apostrophes alike."""
    given = answer = re.sub(r"[\n\t]", " ", answer).strip()
    joined = re.search(r"\d,\d", given) is not None
    for sign in REMOVED:
        beside_space = f"{sign} " in given or f" {sign}" in given
        answer = answer.replace(sign, "" if beside_space or joined else " ")
    answer = re.sub(r"\.(?!\d)", "", answer, count=32)  # the count stands where the official code means to set a flag
    words = [NUMBERS.get(word, word) for word in answer.lower().split()]
    return " ".join(CONTRACTIONS.get(word, word) for word in words if word not in ARTICLES)


def soft_accuracy(answer: str, references: Sequence[str]) -> float:
    """How many annotators agree, from 0 to 1.

    For each annotator, an answer is as right as a third of the number of *others* who gave it, at most 1; the mean
    over annotators counts. Where there are too few for that, fewer than four, an answer that any gave is right. The
    official code leaves answers as they are when all annotators agree to the letter; here they are always normalised,
    so that "Yes." is right where all said "yes".

    Args:
        answer: the model's.
        references: the annotators', usually ten.

    Raises:
        ValueError: there are none.
    """
    if not references:
        raise ValueError("an answer cannot be judged without references")
    given, found = normalise(answer), [normalise(each) for each in references]
    agreeing = found.count(given)
    if len(found) <= ENOUGH:
        return float(agreeing > 0)
    without_one = min(1.0, max(agreeing - 1, 0) / ENOUGH)
    return (agreeing * without_one + (len(found) - agreeing) * min(1.0, agreeing / ENOUGH)) / len(found)
