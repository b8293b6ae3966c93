"""CIDEr-D of a caption by pycocoevalcap, one at a time.

Vedantam et al., "CIDEr: Consensus-based Image Description Evaluation" (CVPR 2015). The official evaluation splits words
with Stanford's tokenizer, which needs Java; here a word is a run of letters and digits, in small letters.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from pycocoevalcap.cider.cider_scorer import CiderScorer, cook_refs, cook_test

MOST = 1.0
"""What counts as wholly right: captions of people score 0.85 on COCO's five references."""


class CaptionScorer:
    """Compares captions with references; how rare a word is, all references tell.

    Args:
        references: of every image.
    """

    def __init__(self, references: Collection[Sequence[str]]) -> None:
        corpus = CiderScorer()
        for captions in references:
            corpus += (None, [words(caption) for caption in captions])
        corpus.compute_doc_freq()
        self._document_frequency, self._num_images = corpus.document_frequency, len(references)

    def cider(self, caption: str, references: Sequence[str]) -> float:
        """CIDEr-D, from 0 to 10."""
        scorer = CiderScorer()
        scorer.document_frequency = self._document_frequency
        scorer.ctest = [cook_test(words(caption))]
        # only the first is compared; the others count as the images that the frequencies are of
        scorer.crefs = [cook_refs([words(each) for each in references]), *[[]] * (self._num_images - 1)]
        return float(scorer.compute_cider()[0])

    def accuracy(self, caption: str, references: Sequence[str]) -> float:
        """CIDEr-D up to `MOST`, as a share of that."""
        return min(self.cider(caption, references), MOST) / MOST


def words(caption: str) -> str:
    """A caption's words with spaces between them."""
    return " ".join(re.findall(r"[^\W_]+", caption.lower()))
