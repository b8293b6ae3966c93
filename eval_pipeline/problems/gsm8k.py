"""GSM8K's format: `question` and `answer`, which ends with `#### 42` (Cobbe et al. 2021, arXiv 2110.14168)."""

from __future__ import annotations

from eval_pipeline.judge import ReferenceAnswer
from eval_pipeline.judge.numeric_answer import parse_number
from eval_pipeline.problems.problem import Problem
from eval_pipeline.problems.record import Record

INSTRUCTION = """{question}

Solve this step by step. Then write the result as a number, without words, on a last line of its own that begins \
with ####."""


def parse_problem(record: Record) -> Problem:
    """The problem of one row, asked for in the data set's own `#### 42` form.

    `reference.is_right` also takes `<answer>42</answer>` and `\\boxed{42}`, so a model that was trained to those is
    not judged by the form. Rows without an `id` are named after their place in the file, the first `gsm8k/1`.

    Raises:
        UserError: a key is missing or of the wrong type, or the answer does not end with `####` and a number.
    """
    question, answer = record.text("question"), record.text("answer")
    _, mark, reference = answer.rpartition("####")
    if not mark or parse_number(reference) is None:
        raise record.error("'answer' must end with #### and a number")
    row_id = record.first("id", "task_id", "problem_id")
    return Problem(
        problem_id=f"gsm8k/{record.number}" if row_id is None else record.identifier("id", "task_id", "problem_id"),
        prompt=INSTRUCTION.format(question=question.strip()),
        tests=ReferenceAnswer(reference.strip()),
        canonical_solution=answer,
    )
