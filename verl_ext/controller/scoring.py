"""Accuracy of answers about images: VQA soft accuracy, or CIDEr-D for captions.

VQA soft accuracy: Antol et al., "VQA: Visual Question Answering" (ICCV 2015), with answers normalized as in
https://visualqa.org/evaluation.html. CIDEr-D: Vedantam et al., "CIDEr: Consensus-based Image Description Evaluation"
(CVPR 2015), computed by pycocoevalcap. The official evaluation splits words with Stanford's tokenizer, which needs
Java; here, a word is a lowercase sequence of letters and digits.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from verl_ext.data.image_questions import ImageQuestion

REMOVED = r""";/[]"{}()=+\_-><@`,?!"""
"""Characters that are removed next to a space, and otherwise replaced with a space."""
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
CONTRACTIONS = {full[:i] + full[i + 1 :]: full for full in CONTRACTED for i, sign in enumerate(full) if sign == "'"}
CONTRACTIONS["somebody'd"] = "somebodyd"  # the official table has this entry reversed
FULL_AGREEMENT = 3
"""Number of annotators who must give an answer for it to score 1."""
FULL_CIDER = 1.0
"""CIDEr-D that scores 1; human captions reach 0.85 on COCO's five references."""


class AnswerScorer:
    """Scores answers from 0 to 1 by VQA soft accuracy or CIDEr-D, depending on the question's metric.

    Args:
        questions: all questions that will be scored; their captions determine how rare a word is.
    """

    def __init__(self, questions: Sequence[ImageQuestion]) -> None:
        captions = [question.references for question in questions if question.metric == "cider"]
        if captions:  # only captions need pycocoevalcap
            self._captions = CaptionScorer(captions)

    def __call__(self, question: ImageQuestion, answer: str) -> float:
        """The accuracy of an answer."""
        if question.metric == "cider":
            return self._captions.accuracy(answer, question.references)
        return soft_accuracy(answer, question.references)


def normalize_answer(answer: str) -> str:
    """Normalize an answer like the official evaluation: punctuation, case, numbers, articles, apostrophes."""
    original = answer = re.sub(r"[\n\t]", " ", answer).strip()
    has_thousands = re.search(r"\d,\d", original) is not None
    for sign in REMOVED:
        next_to_space = f"{sign} " in original or f" {sign}" in original
        answer = answer.replace(sign, "" if next_to_space or has_thousands else " ")
    answer = re.sub(r"\.(?!\d)", "", answer, count=32)  # the official code passes a flag as the count
    words = [NUMBERS.get(word, word) for word in answer.lower().split()]
    return " ".join(CONTRACTIONS.get(word, word) for word in words if word not in ARTICLES)


def soft_accuracy(answer: str, references: Sequence[str]) -> float:
    """VQA soft accuracy, from 0 to 1.

    For each annotator, an answer scores a third of the number of *other* annotators who gave it, at most 1; the result
    is the mean over annotators. With fewer than four annotators, an answer that any of them gave scores 1. The
    official code does not normalize if all annotators agree exactly; this function always does, so that "Yes." scores
    1 if all said "yes".

    Args:
        answer: answer of the model.
        references: answers of the annotators, usually ten.

    Raises:
        ValueError: there are no references.
    """
    if not references:
        raise ValueError("an answer cannot be scored without references")
    given, normalized = normalize_answer(answer), [normalize_answer(each) for each in references]
    agreeing = normalized.count(given)
    if len(normalized) <= FULL_AGREEMENT:
        return float(agreeing > 0)
    for_agreeing = min(1.0, max(agreeing - 1, 0) / FULL_AGREEMENT)
    for_others = min(1.0, agreeing / FULL_AGREEMENT)
    return (agreeing * for_agreeing + (len(normalized) - agreeing) * for_others) / len(normalized)


class CaptionScorer:
    """Scores captions one at a time by CIDEr-D.

    Args:
        references: captions of every image, which determine how rare a word is.
    """

    def __init__(self, references: Collection[Sequence[str]]) -> None:
        from pycocoevalcap.cider.cider_scorer import CiderScorer

        corpus = CiderScorer()
        for captions in references:
            corpus += (None, [caption_words(caption) for caption in captions])
        corpus.compute_doc_freq()
        self._document_frequency, self._num_images = corpus.document_frequency, len(references)

    def cider(self, caption: str, references: Sequence[str]) -> float:
        """CIDEr-D, from 0 to 10."""
        from pycocoevalcap.cider.cider_scorer import CiderScorer, cook_refs, cook_test

        scorer = CiderScorer()
        scorer.document_frequency = self._document_frequency
        scorer.ctest = [cook_test(caption_words(caption))]
        # Only the first image is compared; empty images fill up the number of images behind the frequencies.
        scorer.crefs = [cook_refs([caption_words(each) for each in references]), *[[]] * (self._num_images - 1)]
        return float(scorer.compute_cider()[0])

    def accuracy(self, caption: str, references: Sequence[str]) -> float:
        """CIDEr-D as a share of `FULL_CIDER`, at most 1."""
        return min(self.cider(caption, references), FULL_CIDER) / FULL_CIDER


def caption_words(caption: str) -> str:
    """The words of a caption, separated by spaces."""
    return " ".join(re.findall(r"[^\W_]+", caption.lower()))
