"""Packages that answers and tests may import."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from eval_pipeline.judge import JudgeClient, ResourceLimits, Verdict
from eval_pipeline.judge.isolation import find_packages, versions_of
from tests.helpers.judge import LEVELS, function, judge_config, judged, script, serving, submit_all
from verl_ext.errors import UserError

LIMITS = ResourceLimits(cpu_s=20, wall_s=120)
IN_PROGRAMS = "import importlib\nimportlib.invalidate_caches()\nimport numpy as np\nprint(int(np.ones(2).sum()))"
IMPORTS_ANOTHER = "import numpy\nimport yaml\ndef f(x): return 1"
ANSWERS = {
    "an array": (
        "import numpy as np\ndef f(x): return np.array(x) @ np.ones((2, 2))",
        "import numpy as np\nassert np.allclose(f([[1, 2], [3, 4]]), [[3, 3], [7, 7]]) and f([[1, 2]]).shape == (1, 2)",
    ),
    "a number": ("import numpy as np\ndef f(x): return np.array(x).sum()", "assert f([1, 2]) == 3"),
    "an argument": (
        "def f(x):\n    x[0] = 5\n    return x",
        "import numpy as np\na = np.ones(2)\nassert f(a) is a and a.tolist() == [5, 1]",
    ),
    "an array of objects": (
        "import numpy as np\ndef f(x): return np.array([f, x], dtype=object)",
        "assert len(f(1)) == 2 and f(1)[1] == 1",
    ),
}


@pytest.fixture(scope="module", params=LEVELS)
def verdict(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Verdict]]:
    """The verdict on a case, from a server with NumPy at each isolation level."""
    submissions = {name: function(program, test) for name, (program, test) in ANSWERS.items()}
    submissions |= {"program": script(IN_PROGRAMS, ("", "2")), "another": function(IMPORTS_ANOTHER, "assert f(1) == 1")}
    with serving(request.param, 2, LIMITS, ("numpy",)) as server:
        yield submit_all(server, {name: (submission, LIMITS) for name, submission in submissions.items()})


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_and_tests_can_use_numpy(verdict: Callable[[str], Verdict], name: str) -> None:
    """The default memory limit is enough."""
    assert verdict(name).error_type == "success", verdict(name).message


def test_programs_can_use_numpy(verdict: Callable[[str], Verdict]) -> None:
    """Also after `importlib.invalidate_caches`."""
    assert verdict("program").error_type == "success", verdict("program").message


def test_unlisted_packages_cannot_be_imported(verdict: Callable[[str], Verdict]) -> None:
    """Not even packages installed in the same directory."""
    found = verdict("another")
    assert found.error_type == "runtime_error" and "No module named 'yaml'" in found.message


def test_numpy_starts_no_threads() -> None:
    """It works with a limit of one task, and the environment stays empty."""
    program = "import numpy as np, os\ndef f(n): return (np.ones((n, n)) @ np.ones((n, n)))[0, 0] + len(os.environ)"
    submission = function(program, "assert f(300) == 300")
    with JudgeClient(judge_config(num_workers=1, packages=["numpy"])) as server:
        assert judged(server, submission, ResourceLimits(num_processes=1)) == ("success", "")


def test_only_standard_library_is_importable_by_default() -> None:
    submission = function("import numpy\ndef f(x): return 1", "assert f(1) == 1")
    with JudgeClient(judge_config(num_workers=1)) as server:
        assert "No module named 'numpy'" in judged(server, submission)[1]


def test_rejects_unknown_packages() -> None:
    """The error is raised before anything starts."""
    with pytest.raises(UserError, match="'no-such-package', which is not installed"):
        JudgeClient(judge_config(packages=["numpy", "no-such-package"]))


def test_error_names_key_set_by_user() -> None:
    """GRPO's key is `reward.packages`."""
    for section in ("judge", "reward"):
        with pytest.raises(UserError, match=rf"^{section}\.packages names 'no-such-package'"):
            JudgeClient(judge_config(packages=["no-such-package"]), section=section)


def test_packages_are_found_with_their_libraries() -> None:
    """NumPy's libraries are in a sibling directory; a module may be a single file."""
    import numpy
    import six

    found = find_packages(["numpy", "six"])
    assert found[0].modules == {"numpy": numpy.__file__} and found[1].modules == {"six": six.__file__}
    assert {path.rsplit("/", 1)[1] for path in found[0].paths} >= {"numpy", "numpy.libs"}
    assert versions_of(["numpy"]) == {"numpy": numpy.__version__}
