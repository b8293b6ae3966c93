"""What each benchmark result says about the machine that it was measured on."""

from __future__ import annotations

from benchmarks.about import about, machine


def test_the_machine_is_described() -> None:
    assert machine() == about()["machine"] and " GiB, " in machine()
    assert about("torch")["versions"]["torch"]
