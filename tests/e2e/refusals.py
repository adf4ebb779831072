"""What every refusal has in common."""

from __future__ import annotations

from typing import Any

from click.testing import Result


def refused(result: Any, code: int, *parts: str) -> None:
    """One error with a hint, on stderr only, naming every one of `parts`."""
    exit_code = result.exit_code if isinstance(result, Result) else result.returncode
    assert exit_code == code, result.stderr
    assert result.stderr.count("error: ") == 1, result.stderr
    error = result.stderr[result.stderr.index("error: ") :]
    for part in (*parts, "\nhint: "):
        assert part in error, f"{part!r} is not in:\n{error}"
    assert error.count("hint: ") == 1
    assert "Traceback" not in result.stderr
    assert "unexpected" not in error
    assert result.stdout == ""
