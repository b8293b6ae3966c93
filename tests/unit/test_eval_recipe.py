"""Evaluation recipes: shipped ones parse, and invalid values are rejected with their key."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from eval_pipeline.__main__ import main, parse
from eval_pipeline.commands import with_problems
from eval_pipeline.config import EvalConfig
from eval_pipeline.engines import GeneratedAnswer
from eval_pipeline.judge import ReferenceAnswer, Verdict
from eval_pipeline.problems.datasets import load_problems
from eval_pipeline.problems.problem import Problem
from eval_pipeline.recipe import load_eval_config, metric_names, restrict_datasets, selection_metric
from eval_pipeline.report.metrics import JudgedAnswer, summarize
from tests.helpers import ROOT
from verl_ext.config.schema import check_value, keys
from verl_ext.errors import UserError

RECIPES = sorted(path.stem for path in (ROOT / "recipes" / "eval").glob("*.yaml"))


@pytest.mark.parametrize("name", RECIPES)
def test_shipped_recipe_parses_and_has_datasets(name: str) -> None:
    recipe = load_eval_config(name)
    assert recipe.tiers.tier1
    assert (recipe.sampling.temperature, recipe.sampling.top_p, recipe.sampling.num_samples) == (0.0, 1.0, 1)
    for tier in (1, 2, 3):
        names = [dataset for dataset, _ in recipe.datasets_up_to(tier)]
        assert len(set(names)) == len(names) and set(names) <= recipe.datasets.keys()
    assert {name for name, _ in recipe.datasets_up_to(3)} == recipe.datasets.keys()


def test_phase1_protocol_matches_specification() -> None:
    recipe = load_eval_config("phase1")
    assert (recipe.sampling.max_tokens, recipe.engine.max_model_len) == (2048, 6144)
    assert (recipe.judge.limits.wall_s, recipe.judge.limits.memory_mb) == (30.0, 1024)
    assert recipe.datasets_up_to(3) == [
        ("codecontests_valid", 1), ("mbpp", 1), ("codecontests_valid_big", 2), ("codecontests_test", 3),
        ("humaneval", 3),
    ]  # fmt: skip
    assert (recipe.tier2_every, recipe.selection.mode) == (4, "max")
    assert selection_metric(recipe, runs_code=True) == "exec_success_rate"
    assert {name: source.limit for name, source in recipe.sources.items() if source.limit} == {
        "mbpp": 200, "codecontests_valid_big": 500,
    }  # fmt: skip


def test_default_recipe_is_quickstart() -> None:
    assert load_eval_config(None) == load_eval_config("quickstart")


def test_dataset_of_two_tiers_counts_for_first() -> None:
    recipe = load_eval_config("phase1", ["tiers.tier2=[humaneval,mbpp]", "tiers.tier1=[mbpp]"])
    assert recipe.datasets_up_to(1) == [("mbpp", 1)]
    assert recipe.datasets_up_to(3) == [("mbpp", 1), ("humaneval", 2), ("codecontests_test", 3)]


def test_nested_keys_can_be_overridden() -> None:
    recipe = load_eval_config(
        "quickstart",
        [
            "datasets.quickstart.limit=7",
            "datasets.mine={format: mbpp, path: mine.jsonl}",
            "tiers.tier1=[quickstart,mine]",
            "judge.limits.cpu_s=1",
            "engine.vllm={enforce_eager: true}",
            "engine.vllm.max_num_seqs=8",
            "selection.dataset=mine",
            "judge.num_workers=null",
        ],
    )
    assert (recipe.sources["quickstart"].limit, recipe.sources["quickstart"].format) == (7, "quickstart")
    assert (recipe.sources["mine"].path, recipe.tiers.tier1) == ("mine.jsonl", ["quickstart", "mine"])
    assert (recipe.judge.limits.cpu_s, recipe.judge.num_workers, recipe.selection.dataset) == (1, None, "mine")
    assert recipe.engine.vllm == {"enforce_eager": True, "max_num_seqs": 8}


def test_recipe_may_be_any_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("datasets:\n  a: {format: gsm8k, path: a.jsonl}\ntiers: {tier1: [a]}\nbatch_size: 3\n")
    recipe = load_eval_config(str(path), ["batch_size=4"])
    assert (recipe.sources["a"].format, recipe.batch_size) == ("gsm8k", 4)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("sampling.max_token=5", "did you mean 'sampling.max_tokens'?"),
        ("max_tokens=5", "did you mean 'sampling.max_tokens'?"),
        ("judge.limits.cpu=5", "did you mean 'judge.limits.cpu_s'?"),
        ("+sampling.top_k=5", "'sampling.top_k', which is not a configuration key; did you mean 'sampling.top_p'?"),
        ("+tiers.tier4=[quickstart]", "'tiers.tier4', which is not a configuration key; did you mean 'tiers.tier"),
        ("sampling.max_tokens=many", "must be an integer"),
        ("sampling.max_tokens=null", "needs a value"),
        ("sampling.max_tokens", "not an override of the form key=value"),
        ("sampling.max_tokens=0", "sampling.max_tokens is 0"),
        ("batch_size=0", "batch_size is 0"),
        ("tier2_every=-1", "tier2_every is -1"),
        ("max_attempts=0", "max_attempts is 0"),
        ("qa_per_error_type=0", "qa_per_error_type is 0"),
        ("sampling.num_samples=0", "sampling.num_samples is 0"),
        ("sampling.num_samples=2", "set sampling.temperature above 0"),
        ("sampling.temperature=-0.1", "sampling.temperature is -0.1"),
        ("sampling.temperature=nan", "sampling.temperature is nan"),
        ("sampling.top_p=0", "sampling.top_p is 0"),
        ("sampling.top_p=1.5", "sampling.top_p is 1.5"),
        ("engine.max_model_len=0", "engine.max_model_len is 0"),
        ("engine.tensor_parallel_size=0", "engine.tensor_parallel_size is 0"),
        ("engine.concurrency=0", "engine.concurrency is 0"),
        ("engine.timeout_s=0", "engine.timeout_s is 0"),
        ("engine.load_timeout_s=0", "engine.load_timeout_s is 0"),
        ("engine.gpu_memory_utilization=2", "engine.gpu_memory_utilization is 2"),
        ("engine.kind=sglang", "must be vllm or openai"),
        ("engine.kind=openai", "needs the server's URL"),
        ("engine.vllm=5", "'engine.vllm' to 5, but it must be a mapping of names"),
        ("engine.vllm.dtype=float32", "set engine.dtype"),
        ("engine.chat_template_kwargs.tokenize=false", "engine.chat_template_kwargs.tokenize is not a template's"),
        ("engine.dtype=int4", "must be auto, float32"),
        ("judge.isolation=docker", "must be auto, bwrap, sandlock or rlimits"),
        ("judge.num_workers=0", "judge.num_workers is 0"),
        ("judge.num_workers=two", "'judge.num_workers' to 'two', but it must be an integer of at least 1, or null"),
        ("judge.limits.cpu_s=0", "judge.limits.cpu_s is 0"),
        ("judge.limits.wall_s=inf", "judge.limits.wall_s is inf"),
        ("judge.limits.memory_mb=-1", "judge.limits.memory_mb is -1"),
        ("judge.limits.num_processes=0", "judge.limits.num_processes is 0"),
        ("judge.limits.file_mb=0", "judge.limits.file_mb is 0"),
        ("judge.limits.output_mb=0", "judge.limits.output_mb is 0"),
        ("selection.mode=most", "must be max or min"),
        ("selection.dataset=mbpp", "selection.dataset is 'mbpp'"),
        ("executor.kind=slurm", "must be local or ray"),
        ("executor.num_workers=0", "executor.num_workers is 0"),
        ("poll_s=0", "poll_s is 0"),
        ("backoff_s=-1", "backoff_s is -1"),
        ("backoff_s=inf", "backoff_s is inf"),
        ("tiers.tier1=[mbpp]", "names 'mbpp', which is not in `datasets`; use quickstart"),
        ("tiers.tier3=[[quickstart]]", "must be a list .a, b. of strings"),
        ("datasets=5", "'datasets' to 5, but it must be a mapping of names"),
        ("datasets.quickstart=5", "lacks a key; set at least `format` and `path`"),
        ("~datasets.quickstart", "lacks a key; set at least `format` and `path`"),
        ("datasets.quickstart.limits=5", "datasets.quickstart has the unknown key 'limits'"),
        ("datasets.quickstart.num_fewshot=5", "unknown key 'num_fewshot'; .*; for few-shot prompts, see docs/guides"),
        ("datasets.quickstart.system_prompt=", "datasets.quickstart.system_prompt is empty"),
        ("datasets.quickstart.system_prompt=5", "datasets.quickstart.system_prompt is 5; it must be a string"),
        ("datasets.quickstart.limit=0", "datasets.quickstart.limit is 0"),
        ("datasets.quickstart.limit=few", "datasets.quickstart.limit is 'few'"),
        ("datasets.quickstart.path=5", "datasets.quickstart.path is 5"),
        ("datasets.quickstart.path=${nowhere}", "cannot be resolved"),
        ("datasets={a/b: {format: mbpp, path: x}}", "has the name 'a/b'"),
        ("datasets={5: {format: mbpp, path: x}}", "it must be a mapping of names"),
        ("datasets.quickstart.format=quick", "datasets.quickstart.format is 'quick'; use one of quickstart, "),
        ("engine.base_url=5", "'engine.base_url' to ..., but it must be a string"),
        ("engine.base_url=[http://localhost]", "'engine.base_url' to ..., but it must be a string"),
        ("engine.api_key_env=5", "'engine.api_key_env' to ..., but it must be a string"),
        ("engine.model=7", "'engine.model' to 7, but it must be a string, in quotes"),
        ("engine.dtype=3", "'engine.dtype' to 3, but it must be auto"),
        ("engine.kind=true", "'engine.kind' to True, but it must be vllm or"),
        ("engine.vllm={5: 1}", "it must be a mapping of names"),
        ("selection.dataset=[a]", "it must be a string"),
        ("selection.metric=5", "'selection.metric' to 5, but it must be a string, in quotes"),
        ("executor.address=6379", "'executor.address' to 6379, but it must be a string, in quotes"),
        (
            "executor.num_workers=1.5",
            "'executor.num_workers' to 1.5, but it must be an integer",
        ),
        (
            "executor.num_workers=true",
            "'executor.num_workers' to True, but it must be an integer",
        ),
        ("poll_s=${engine.dtype}", "poll_s is 'auto'; it must be a number"),
        ("wandb=${batch_size}", "wandb is 64; it must be true or false"),
        ("selection.metric=exec_succes_rate", "did you mean 'exec_success_rate'?"),
        ("selection.metric=accuracy", "use one of num_problems, exec_success_rate, "),
        ("selection.metric='<rate>_low'", "which no evaluation of this recipe reports"),
        ("selection.metric=pass_at_5", "pass_at_<k> needs sampling.num_samples of k or more"),
        ("selection.metric=num_samples", "which no evaluation of this recipe reports"),
        ("selection.metric=cost_per_solved_tokens", "set selection.mode=min"),
    ],
)
def test_invalid_recipe_values_are_rejected_by_key(override: str, words: str) -> None:
    with pytest.raises(UserError, match=words.replace("?", r"\?").replace("+", r"\+")):
        load_eval_config("quickstart", [override])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["selection.dataset=humaneval"], "selection.dataset is 'humaneval', but tiers.tier3"),
        (["selection.dataset=mbpp", "tiers.tier1=[codecontests_valid]"], "'mbpp', but no tier"),
        (["tiers.tier1=[]"], "tiers.tier1 is empty"),
        (["tiers.tier1=[]", "tiers.tier2=[]"], "tiers.tier1 is empty"),
    ],
)
def test_tiers_without_selectable_dataset_are_rejected(overrides: list[str], words: str) -> None:
    with pytest.raises(UserError, match=f"{words}.*; (add|set)"):
        load_eval_config("phase1", overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["selection.dataset=codecontests_valid_big"],
        ["selection.dataset=codecontests_valid_big", "tiers.tier1=[]"],
        ["selection.dataset=mbpp", "tiers.tier3=[mbpp]"],
        [f"tiers.tier{tier}=[]" for tier in (1, 2, 3)],
    ],
)
def test_tiers_with_selectable_dataset_or_none_are_accepted(overrides: list[str]) -> None:
    load_eval_config("phase1", overrides)


def test_possibly_secret_values_are_not_shown() -> None:
    for override in ("engine.api_key_env=123456", "engine.base_url=[secret]"):
        with pytest.raises(UserError) as refused:
            load_eval_config("quickstart", [override])
        assert "123456" not in str(refused.value) and "secret" not in str(refused.value)


def test_out_of_range_error_states_range() -> None:
    for words, range_ in {
        "engine.gpu_memory_utilization=2": "it must be a number above 0 and at most 1",
        "sampling.max_tokens=0": "it must be an integer of at least 1",
        "judge.num_workers=0": "it must be an integer of at least 1, or null",
        "sampling.temperature=-0.1": "it must be a number of at least 0",
        "judge.limits.wall_s=inf": "it must be a finite number above 0",
    }.items():
        with pytest.raises(UserError) as refused:
            load_eval_config("quickstart", [words])
        key, _, value = words.partition("=")
        assert str(refused.value) == f"{key} is {value}; {range_}"


def test_unknown_keys_cannot_be_added() -> None:
    for override in ("bogus_thing=1", "+bogus_thing=1", "++bogus_thing=1"):
        with pytest.raises(UserError, match="'bogus_thing', which is not a configuration key; known keys begin") as no:
            load_eval_config("quickstart", [override])
        assert "on purpose" not in str(no.value)
    recipe = load_eval_config("quickstart", ["+engine.vllm.max_num_seqs=8", "+batch_size=3"])
    assert (recipe.engine.vllm, recipe.batch_size) == ({"max_num_seqs": 8}, 3)


def test_mapping_override_extends_recipe() -> None:
    recipe = load_eval_config("quickstart", ["datasets={mine: {format: mbpp, path: mine.jsonl}}"])
    assert list(recipe.sources) == ["quickstart", "mine"]


def test_recipe_keys_are_documented() -> None:
    for name, key in keys(EvalConfig).items():
        assert key.setting.doc and not key.setting.doc.endswith("."), name
        check_value(key, key.default)


def test_config_imports_no_engine_and_no_sandbox() -> None:
    code = "import sys, eval_pipeline.config; print(*sorted(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    modules = found.stdout.split()
    assert not {"torch", "vllm", "numpy", "omegaconf", "hydra"} & set(modules)
    ours = {name for name in modules if name.startswith("eval_pipeline.")}
    assert ours >= {"eval_pipeline.config", "eval_pipeline.judge.types"}
    folders = {name.split(".")[1] for name in ours}
    assert folders == {"config", "judge", "problems"} and not ours & {
        "eval_pipeline.judge.server",
        "eval_pipeline.judge.sandbox",
    }


def test_default_metric_suits_problems() -> None:
    config = load_eval_config("quickstart")
    assert [selection_metric(config, runs_code) for runs_code in (True, False)] == [
        "exec_success_rate", "accepted_at_1",
    ]  # fmt: skip
    config = load_eval_config("quickstart", ["selection.metric=exec_success_rate"])
    assert selection_metric(config, runs_code=True) == "exec_success_rate"
    with pytest.raises(UserError, match="exec_success_rate, which is 1 .* answers to quickstart are not run; set "):
        selection_metric(config, runs_code=False)
    config = load_eval_config("quickstart", ["selection.metric=pass_ratio_mean"])
    assert selection_metric(config, runs_code=False) == "pass_ratio_mean"


SEVERAL = ("sampling.num_samples=7", "sampling.temperature=1")


@pytest.mark.parametrize(
    "overrides",
    [
        ("selection.metric=timeout_rate", "selection.mode=min"),
        ("selection.metric=cost_per_solved_judge_time", "selection.mode=min"),
        ("selection.metric=pass_at_5", *SEVERAL),
        ("selection.metric=pass_at_7", *SEVERAL),
    ],
)
def test_selection_metrics_are_accepted(overrides: tuple[str, ...]) -> None:
    assert load_eval_config("quickstart", overrides).selection.metric == overrides[0].partition("=")[2]


@pytest.mark.parametrize("k", [2, 10])
def test_unreported_pass_at_k_is_rejected(k: int) -> None:
    with pytest.raises(UserError, match=f"selection.metric is 'pass_at_{k}'.* pass_at_1, pass_at_5, pass_at_7"):
        load_eval_config("quickstart", [f"selection.metric=pass_at_{k}", *SEVERAL])


@pytest.mark.parametrize("num_samples", [1, 7])
def test_selectable_metrics_equal_reported_metrics(num_samples: int) -> None:
    problem, verdict = Problem("a", "Say 1.", ReferenceAnswer("1")), Verdict("success", 1, 1)
    answers = [JudgedAnswer(problem, sample, GeneratedAnswer("1", 1, False), verdict) for sample in range(num_samples)]
    assert set(summarize(answers, elapsed_s=1.0)) == set(metric_names(num_samples))


def test_recipe_can_be_restricted_to_datasets() -> None:
    recipe = restrict_datasets(load_eval_config("phase1"), {"mbpp", "humaneval", "gone"})
    assert recipe.datasets_up_to(3) == [("mbpp", 1), ("humaneval", 3)]
    chosen_by_another = load_eval_config("phase1", ["selection.dataset=mbpp"])
    assert restrict_datasets(chosen_by_another, {"humaneval"}).datasets_up_to(3) == [("humaneval", 3)]
    with pytest.raises(UserError, match="any of the evaluated datasets .gone.; .* --recipe"):
        restrict_datasets(recipe, {"gone"})


@pytest.mark.parametrize("text", ["- 1\n", "a: [", "datasets: {a: 1}\nfoo: 2\n", "\x00"])
def test_invalid_recipe_file_is_rejected(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match="mine.yaml|foo|lacks a key"):
        load_eval_config(str(path))


def test_unknown_recipe_error_names_closest() -> None:
    with pytest.raises(UserError, match="humaneval"):
        load_eval_config("human_eval")


def test_overrides_may_appear_anywhere() -> None:
    words = ["run", "a=1", "--checkpoint", "model", "b=2", "--limit", "3", "~c", "--no-wandb", "+d=4"]
    arguments = parse(words)
    assert sorted(arguments.overrides) == sorted(["a=1", "b=2", "~c", "+d=4"])
    assert (arguments.checkpoint, arguments.limit, arguments.no_wandb) == (Path("model"), 3, True)


@pytest.mark.parametrize("words", [["a=1", "dir", "b=2"], ["dir", "a=1", "b=2"], ["a=1", "b=2", "dir"]])
def test_directory_is_word_without_value(words: list[str]) -> None:
    arguments = parse(["watch", *words])
    assert (arguments.directory, arguments.overrides) == (Path("dir"), ["a=1", "b=2"])


def test_directory_may_contain_equals_sign() -> None:
    assert parse(["watch", "lr=1/sft"]).directory == Path("lr=1/sft")


PATHS = {
    "directory": ["status"],
    "checkpoint": ["run", "--checkpoint"],
    "problems": ["run", "--problems"],
    "baseline": ["report", "run_dir", "--baseline"],
    "answers": ["judge", "--problems", "x", "--output", "y", "--answers"],
}


@pytest.mark.parametrize("name", PATHS)
def test_input_paths_resolve_from_caller_then_repository(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERL_EXT_CALLED_FROM", str(tmp_path / "a=b"))  # as run.sh does before it changes directory
    (tmp_path / "a=b" / "recipes").mkdir(parents=True)

    def found(path: str) -> Path:
        return getattr(parse([*PATHS[name], path]), name)

    assert found("recipes") == tmp_path / "a=b" / "recipes"
    assert found("recipes/eval") == ROOT / "recipes/eval"
    assert found("nowhere") == tmp_path / "a=b" / "nowhere"
    assert found(str(ROOT)) == ROOT
    assert found("~/nowhere") == Path.home() / "nowhere"


@pytest.mark.parametrize(
    ("path", "name"),
    [("data/mine/problems.jsonl", "mine"), ("data/mine/sums.jsonl.gz", "sums"), ("/problems.jsonl", "problems")],
)
def test_dataset_of_problem_file_is_named_after_it(path: str, name: str) -> None:
    config = with_problems(load_eval_config("humaneval"), Path(path))
    assert [*config.datasets] == config.tiers.tier1 == [name]


@pytest.mark.parametrize("words", [["run"], ["judge", "--problems", "x", "--answers", "y"]])
def test_output_paths_resolve_from_caller(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_EXT_CALLED_FROM", str(tmp_path))
    assert parse([*words, "--output", "recipes"]).output == tmp_path / "recipes"
    monkeypatch.delenv("VERL_EXT_CALLED_FROM")
    assert parse([*words, "--output", "recipes"]).output == Path("recipes")


def test_dataset_paths_in_recipe_resolve_from_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_eval_config("quickstart", ["datasets.quickstart.path=tests/assets/none.jsonl"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"{ROOT}/tests/assets/none.jsonl"):
        load_problems(recipe.sources["quickstart"])


@pytest.mark.parametrize(
    "words",
    [
        ["run", "--checkpoint", "m", "--bogus", "a=1"],
        ["run", "--checkpoint", "m", "plain"],
        ["run", "--checkpoint", "m", "--bogus=1"],
        ["run", "--limit", "0"],
        ["run", "--tier", "4"],
        ["watch"],
        ["watch", "dir", "other"],
        ["status", "dir", "a=1"],
        ["judge", "--answers", "a", "--output", "b"],
        ["nothing"],
        [],
    ],
)
def test_unknown_options_are_rejected(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 2
    assert "error:" in capsys.readouterr().err
