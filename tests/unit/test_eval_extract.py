"""Which part of an answer is taken for the program."""

from __future__ import annotations

import pytest

from eval_pipeline.extract import extract_code

ADD = "def add(a, b):\n    return a + b\n"


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (ADD, ADD),
        (f"Sure:\n```python\n{ADD}```\nDone.", ADD),
        (f"```python\ndef add(a, b):\n    pass\n```\nBetter:\n```python\n{ADD}```", ADD),
        (f"```python\n{ADD}```\nUse it:\n```python\nprint(add(1, 2))\n```", ADD),
        (f"```\n{ADD}```\n```text\n3\n```", ADD),
        (f"```bash\ndef add(\n```\n```py\n{ADD}```", ADD),
        (f"```js\n{ADD}```\n```python\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1\n```\n```text\ny\n```", "y\n"),
        (f"Cut off:\n```python\n{ADD}", ADD),
        (f"1. item\n   ```python\n   {ADD.replace(chr(10), chr(10) + '   ').rstrip(' ')}   ```", ADD),
        ("```python\r\nadd = sum\r\n```", "add = sum\n"),
        ("```python\nadd: object = sum\n```\n```python\nadd == 1\n```", "add: object = sum\n"),
        ("```python\nclass add:\n    pass\n```\n```python\nadder = 1\n```", "class add:\n    pass\n"),
        ("", ""),
    ],
)
def test_extract_code(answer: str, code: str) -> None:
    assert extract_code(answer, "add") == code
