"""Problems of every format, and the programs in answers to them."""

from eval_pipeline.judge import FunctionTests, ProgramCase, ProgramTests, ReferenceAnswer
from eval_pipeline.problems.problem import Problem
from eval_pipeline.problems.record import Record

__all__ = ["FunctionTests", "Problem", "ProgramCase", "ProgramTests", "Record", "ReferenceAnswer"]
