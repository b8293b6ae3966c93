"""Which run a run started from, and in which order chains are listed."""

from __future__ import annotations

from verl_ext.monitor.lineage import Parent, chains, origin_of, parents_of


def test_parent_is_found_by_project_and_experiment() -> None:
    origins = {
        "a/p/sft": "Qwen/Qwen2.5-Coder-7B",
        "b/p/sft": "",
        "a/p/grpo": "/elsewhere/p/sft/global_step_40/huggingface",
        "b/p/grpo": "checkpoints/p/sft",
        "b/q/grpo": "checkpoints/p/other/global_step_3/huggingface",
        "b/q/same": "q/same/global_step_3/huggingface",
    }
    assert parents_of(origins) == {
        "a/p/sft": None,
        "b/p/sft": None,
        "a/p/grpo": Parent("a/p/sft", 40),
        "b/p/grpo": Parent("b/p/sft", None),
        "b/q/grpo": None,
        "b/q/same": None,
    }
    assert parents_of({".": "", "a/b": ""}) == {".": None, "a/b": None}
    assert parents_of({"sft": "", "grpo": "x/p/sft/global_step_1"})["grpo"] == Parent("sft", 1)


def test_chain_takes_place_of_its_first_run() -> None:
    parents = {"grpo2": Parent("grpo", 4), "alone": None, "sft": None, "grpo": Parent("sft", 40)}
    assert [*chains(parents)] == [("sft", 0), ("grpo", 1), ("grpo2", 2), ("alone", 0)]
    circle = {"a": Parent("b", 1), "b": Parent("a", 1)}
    assert sorted(path for path, _ in chains(circle)) == ["a", "b"]


def test_origin_of_damaged_configuration_is_unknown() -> None:
    assert origin_of({"model": {"partial_pretrain": None, "sft_run": "p/sft"}}) == "p/sft"
    assert [origin_of(each) for each in ({}, {"model": [1]}, {"model": {"partial_pretrain": 3}})] == ["", "", ""]
