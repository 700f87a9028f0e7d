"""[N] Every metric name is told apart from the others and explained."""

import ast
from pathlib import Path

from rl_jax.metrics import names


def test_names_are_unique_lower_case_and_documented():
    body = ast.parse(Path(names.__file__).read_text()).body
    values = []
    for statement, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(statement, ast.Assign):
            name, value = ast.unparse(statement.targets[0]), ast.literal_eval(statement.value)
            assert value.replace("/", "_") == name.lower()
            assert isinstance(after, ast.Expr), f"{name} has no docstring"
            assert isinstance(ast.literal_eval(after.value), str)
            values.append(value)
    assert len(values) > 10 and len(set(values)) == len(values)
