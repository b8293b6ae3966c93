"""`python -m verl_ext.controller.importance`: measures the importance of each block of a model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from verl_ext.cli import clean_exit
from verl_ext.commands import typed_command
from verl_ext.console import print_line, print_summary, progress_bar
from verl_ext.controller.calibrate import load_inputs, model_parser
from verl_ext.errors import UserError
from verl_ext.files import parse_json, replace_file

if TYPE_CHECKING:
    from verl_ext.controller.adapters import VLMAdapter
    from verl_ext.data.image_questions import ImageQuestion

TEXT = """Measure the importance of each block of a model.

The importance of a block is the increase in the loss of the first reference answer, in nats per token, when only that
block is skipped, averaged over questions. Block 0 always runs and has no importance."""
SCORE_KEYS = ("importance_scores", "merged_scores", "train_scores")
"""Keys of the scores in a file; a file may also consist of the scores alone."""

MAX_SCORE = 1e18
"""Maximum absolute value of a score; the variance of larger scores would overflow in float32."""


@clean_exit()
def main() -> None:
    """Measure, print the scores and write them."""
    arguments = model_parser("importance", TEXT, "--output importance.json").parse_args()
    adapter, questions = load_inputs(arguments)
    scores = measure_importance(adapter, questions)
    for block, score in sorted(scores.items(), key=lambda item: -item[1]):
        print_line(f"block {block:>3}  {score:+.4f}")
    save_importance(arguments.output, scores, adapter)
    path = arguments.output.absolute()
    then = (*typed_command("grpo"), 2, "recipe=budget_controller", f"controller.importance_file={path}")
    print_summary(f"Measured: the blocks of {arguments.model}", {"importance": path}, then)


def measure_importance(adapter: VLMAdapter, questions: Sequence[ImageQuestion]) -> dict[int, float]:
    """Measure the importance of each block except block 0, at the highest tier."""
    from verl_ext.controller.execution import VLMRunner  # here, as torch takes seconds to import

    blocks, runner = len(adapter.blocks), VLMRunner(adapter, max_new_tokens=1, max_encodings=1)
    space = adapter.space(1, blocks, (adapter.trained_topk,) if adapter.trained_topk else ())
    configurations = [space.full]  # index 0 is the full model, because block 0 always runs
    for skipped in range(1, blocks):
        mask = [block != skipped for block in range(blocks)]
        configurations.append(space.configuration(space.full.tier, mask))
    losses = [0.0] * blocks
    for question in progress_bar(questions, desc="measuring importance", unit="questions"):
        for skipped, configuration in enumerate(configurations):
            losses[skipped] += runner.reference_loss(question, configuration)
    return {skipped: (losses[skipped] - losses[0]) / len(questions) for skipped in range(1, blocks)}


def save_importance(path: Path, scores: Mapping[int, float], adapter: VLMAdapter) -> None:
    """Write the importance by block index as JSON, with the fingerprint of the model."""
    from verl_ext.controller.vlm import fingerprint

    model, num_blocks = fingerprint(adapter.model), len(adapter.blocks)
    content = {"model": model, "num_blocks": num_blocks, SCORE_KEYS[0]: dict(scores)}
    replace_file(path, [json.dumps(content, indent=2) + "\n"])


def load_importance(file: str | Path, adapter: VLMAdapter) -> dict[int, float]:
    """Read the importance by block index from a file of scores.

    Raises:
        UserError: the file is missing, has no scores, or belongs to another model.
    """
    from verl_ext.controller.vlm import matches_fingerprint, precision_of

    path = Path(file).expanduser()
    try:
        content = parse_json(path.read_text())
        by_block = next((content[key] for key in SCORE_KEYS if key in content), content)
        scores = {int(block): float(score) for block, score in by_block.items()}
        for block, score in scores.items():
            if not abs(score) <= MAX_SCORE:  # also refuses NaN
                raise ValueError(f"the score of block {block} is {score}")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} has no block importance ({error}); create it with `python -m verl_ext.controller.importance`"
        ) from error
    blocks, model = len(adapter.blocks), content.get("model")
    why = None
    if not set(range(1, blocks)) <= set(scores) <= set(range(blocks)):
        why = f"it has scores for {len(scores)} blocks, but this model has {blocks}"
    elif not matches_fingerprint(model, adapter):
        why = "the weights or their dtype differ"
    if why is not None:
        raise UserError(
            f"{path} belongs to another model: {why}; create it again with "
            f"`python -m verl_ext.controller.importance --dtype {precision_of(adapter)}`"
        )
    return scores


if __name__ == "__main__":
    main()
