"""Packages that answers and tests may import."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from eval_pipeline.judge.client import JudgeServer
from eval_pipeline.judge.limits import Limits
from eval_pipeline.judge.packages import find_packages, versions_of
from eval_pipeline.judge.submission import Submission
from eval_pipeline.problems.problem import Case, FunctionTests, ProgramTests
from verl_ext.errors import UserError

LIMITS = Limits(cpu_s=20, wall_s=120)


@pytest.fixture(scope="module", params=["bwrap", "sandlock", "rlimits"])
def server(request: pytest.FixtureRequest) -> Iterator[JudgeServer]:
    """A server at each level, with NumPy."""
    try:
        server = JudgeServer(request.param, num_workers=1, limits=LIMITS, packages=["numpy"]).__enter__()
    except UserError as error:
        pytest.skip(f"{request.param} does not work on this machine: {error}")
    yield server
    server.__exit__(None, None, None)


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


@pytest.mark.parametrize("name", ANSWERS)
def test_numpy_in_answers_and_tests(server: JudgeServer, name: str) -> None:
    """Within the default limit of memory."""
    program, test = ANSWERS[name]
    verdict = server.submit(Submission(program, FunctionTests("f", (test,)))).result(timeout=120)
    assert verdict.error_type == "success", verdict.message


def test_numpy_starts_no_threads() -> None:
    """It works where one task is allowed, and the environment is empty still."""
    program = "import numpy as np, os\ndef f(n): return (np.ones((n, n)) @ np.ones((n, n)))[0, 0] + len(os.environ)"
    submission = Submission(program, FunctionTests("f", ("assert f(300) == 300",)))
    with JudgeServer(num_workers=1, packages=["numpy"]) as server:
        verdict = server.submit(submission, Limits(num_processes=1)).result(timeout=120)
    assert verdict.error_type == "success", verdict.message


def test_numpy_in_programs(server: JudgeServer) -> None:
    """After `importlib.invalidate_caches` too."""
    program = "import importlib\nimportlib.invalidate_caches()\nimport numpy as np\nprint(int(np.ones(2).sum()))"
    verdict = server.submit(Submission(program, ProgramTests((Case("", "2"),)))).result(timeout=120)
    assert verdict.error_type == "success", verdict.message


def test_nothing_else_can_be_imported(server: JudgeServer) -> None:
    """Not what lies beside it, either."""
    program = "import numpy\nimport yaml\ndef f(x): return 1"
    verdict = server.submit(Submission(program, FunctionTests("f", ("assert f(1) == 1",)))).result(timeout=120)
    assert verdict.error_type == "runtime_error" and "No module named 'yaml'" in verdict.message


def test_without_packages_there_is_the_standard_library_alone() -> None:
    """NumPy is one of them."""
    submission = Submission("import numpy\ndef f(x): return 1", FunctionTests("f", ("assert f(1) == 1",)))
    with JudgeServer(num_workers=1) as server:
        assert "No module named 'numpy'" in server.submit(submission).result(timeout=60).message


def test_unknown_packages_are_refused() -> None:
    """Before anything starts."""
    with pytest.raises(UserError, match="'no-such-package', which is not installed"):
        JudgeServer(packages=["numpy", "no-such-package"])


def test_packages_are_found_with_all_that_they_need() -> None:
    """NumPy's libraries lie in a folder beside it; a module may be a single file."""
    import numpy
    import six

    found = find_packages(["numpy", "six"])
    assert found[0].modules == {"numpy": numpy.__file__} and found[1].modules == {"six": six.__file__}
    assert {path.rsplit("/", 1)[1] for path in found[0].paths} >= {"numpy", "numpy.libs"}
    assert versions_of(["numpy"]) == {"numpy": numpy.__version__}
