"""The jobs of one place: entered into the ledger, begun, and completed."""

from __future__ import annotations

from collections.abc import Sequence

from eval_pipeline.config import EvalConfig
from eval_pipeline.flow.place import Place
from eval_pipeline.judge.packages import versions_of
from eval_pipeline.ledger.job import Job
from eval_pipeline.ledger.ledger import Ledger
from eval_pipeline.models.checkpoint import Checkpoint
from eval_pipeline.models.integrity import require_whole_export
from eval_pipeline.problems.dataset import load_problems, problems_digest
from eval_pipeline.problems.problem import Problem
from eval_pipeline.report.results import METRICS_FILE, SUMMARY_FILE, EvaluatedModel, read_evaluation
from eval_pipeline.work.digests import Digests, digests_of
from eval_pipeline.work.driver import Task
from eval_pipeline.work.evaluation import Evaluation
from verl_ext.console import warn
from verl_ext.errors import UserError
from verl_ext.files import parse_json


class Session:
    """What a command knows while it evaluates.

    Args:
        place: where ledger and files are.
        recipe: of the evaluation.

    Raises:
        UserError: the ledger cannot be used.
    """

    def __init__(self, place: Place, recipe: EvalConfig) -> None:
        self.place, self.recipe = place, recipe
        self.ledger = Ledger(place.root, recipe.max_attempts, recipe.backoff_s)
        self._problems: dict[str, list[Problem]] = {}
        self._problem_digests: dict[str, str] = {}
        self._sound: set[tuple[str, str]] = set()
        self._weights: dict[str, str] = {}
        self._digests: dict[tuple[str, str], Digests] = {}

    def problems(self, dataset: str) -> list[Problem]:
        """The problems of a data set, read once.

        Raises:
            UserError: they cannot be read.
        """
        if dataset not in self._problems:
            self._problems[dataset] = load_problems(self.recipe.sources[dataset])
            self._problem_digests[dataset] = problems_digest(self._problems[dataset])
        return self._problems[dataset]

    def digest_of_problems(self, dataset: str) -> str:
        """Tells the problems of a data set from others."""
        self.problems(dataset)
        return self._problem_digests[dataset]

    def enter(self, checkpoint: Checkpoint, tier: int) -> list[Task]:
        """Enter a checkpoint's jobs of a tier and those before it into the ledger.

        Args:
            checkpoint: with an export that can be loaded.
            tier: 1, 2 or 3.

        Raises:
            UserError: the problems of a data set cannot be read, or the checkpoint has just been removed.
        """
        return [self._enter(checkpoint, name, its_tier) for name, its_tier in self.recipe.datasets_up_to(tier)]

    def _enter(self, checkpoint: Checkpoint, dataset: str, tier: int) -> Task:
        try:
            digests = self._digests_of(checkpoint, dataset)
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read {checkpoint.path} ({error}); name another checkpoint") from error
        self._digests[checkpoint.label, dataset] = digests
        if self._weights.get(checkpoint.label) != digests.model:
            self._weights[checkpoint.label] = digests.model
            self._drop_figures_of_other_weights(checkpoint.label)
        self.ledger.add(checkpoint.label, dataset, tier, digests.verdicts)
        return Task(checkpoint, dataset, digests.verdicts)

    def _digests_of(self, checkpoint: Checkpoint, dataset: str) -> Digests:
        """With the versions of packages that a finished evaluation was judged with, or else with the installed ones.

        Newer packages could change a verdict, but a new release is no reason to judge everything again.
        """
        installed = versions_of(self.recipe.judge.packages)
        judged_with = self._judged_with(checkpoint.label, dataset)
        problems = self.digest_of_problems(dataset)
        if judged_with != installed and judged_with.keys() == installed.keys():
            digests = digests_of(checkpoint, problems, self.recipe, judged_with)
            if (checkpoint.label, dataset, digests.verdicts) in self._ended():
                return digests
        return digests_of(checkpoint, problems, self.recipe, installed)

    def _judged_with(self, label: str, dataset: str) -> dict[str, str]:
        """Versions of packages by name, as the last result has them."""
        try:
            model = EvaluatedModel.from_json(parse_json(self.place.result_of(label, dataset).read_bytes()))
            return dict(model.datasets[dataset].protocol["packages"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # it is judged again
            return {}

    def begin(self, job: Job, checkpoint: Checkpoint) -> Evaluation:
        """Open a claimed job's files.

        Raises:
            UserError: the export is damaged, or the files cannot be written.
        """
        digests = self._digests[job.checkpoint, job.dataset]
        # by label too: of two checkpoints with equal weights one may be damaged
        if checkpoint.export is not None and (job.checkpoint, digests.model) not in self._sound:
            require_whole_export(checkpoint)
            self._sound.add((job.checkpoint, digests.model))
        directory = self.place.work_of(job.checkpoint, job.dataset)
        try:
            return Evaluation(job, checkpoint, self.problems(job.dataset), self.recipe, digests, directory)
        except OSError as error:
            raise UserError(
                f"cannot write to {directory} ({error.strerror}); free disk space or fix the directory"
            ) from error

    def weights_of(self, label: str) -> str:
        """Digest of the weights that an entered checkpoint has now."""
        return self._weights[label]

    def _drop_figures_of_other_weights(self, label: str) -> None:
        """Remove the figures of a checkpoint that was trained again, or they would count until the new ones are in."""
        directory = self.place.directory_of(label)
        if not (directory / METRICS_FILE).exists():
            return
        try:
            if read_evaluation(directory).weights == self._weights[label]:
                return
            warn(f"the results in {directory} belong to other weights than {label} has now; evaluating it again")
        except UserError as error:
            warn(str(error))
        for name in (METRICS_FILE, SUMMARY_FILE):
            (directory / name).unlink(missing_ok=True)
        self.ledger.published.mark(label, "")

    def left_of(self, tasks: Sequence[Task]) -> list[Task]:
        """Those that have not ended."""
        ended = self._ended()
        return [task for task in tasks if (*task.key, task.digest) not in ended]

    def _ended(self) -> set[tuple[str, str, str]]:
        return {(job.checkpoint, job.dataset, job.digest) for job in self.ledger.jobs() if job.has_ended}
