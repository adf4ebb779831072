"""`tapeout models`: which model families work, by recorded or fresh comparisons with Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from tapeout.cli.paths import check_output
from tapeout.cli.streams import standard_output, writing

ALL = "all"


@click.command("models", short_help="Show which model families work.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list, nothing else.")
@click.option(
    "--verify",
    "names",
    multiple=True,
    metavar="NAME",
    help="Make this family's tiny random checkpoint and compare with Hugging Face now; `all` for every "
    "family. May be repeated.",
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Seed of --verify's weights and prompts."
)
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write what --verify found as a record (JSON). Results of other families that a record of this name "
    "holds stay, when seed and versions are the same.",
)
def command(as_json: bool, names: tuple[str, ...], seed: int, output: Path | None) -> None:
    """Show model families and how near their engines come to Hugging Face's float32 code.

    Parity is `exact` when greedy ids are equal and logits within tolerance, alone and batched; `tolerance`
    when only logits are; `none` when neither is, or when the family cannot be built: the notes say why.

    \b
    tapeout models
    tapeout models --verify qwen3 --seed 7
    tapeout models --verify all --output results.json
    """
    from tapeout.compiler.model_results import recorded_results, verify_families
    from tapeout.model_defs.families import families, family
    from tapeout.plugins.errors import TapeoutError, UsageError

    standard_output()
    if output is not None and not names:
        raise UsageError("--output writes what --verify finds", hint="add --verify NAME, or --verify all")
    if not names:
        if seed:
            raise UsageError("--seed is of --verify", hint="add --verify NAME")
        found = recorded_results()
        _print(found.rows(), as_json, f"recorded {found.date}, transformers {found.versions['transformers']}")
        return
    chosen = [n for name in names for n in (families() if name == ALL else [family(name).name])]
    if output is not None:
        check_output(output, "--output", inputs=())

    def told(result: Mapping[str, Any]) -> None:
        if len(chosen) > 1:
            click.echo(f"{result['family']}: {result['parity']}", err=True)

    found = verify_families(list(dict.fromkeys(chosen)), seed, told)
    if output is not None:
        older = recorded_results(output) if output.exists() else found
        output.write_text(found.joined(older).text())
    _print(found.rows(), as_json, f"seed {seed}, transformers {found.versions['transformers']}")
    if output is None and (bad := [r for r in found.results if r["parity"] == "none"]):
        names_text = ", ".join(r["family"] for r in bad)
        raise TapeoutError(f"no parity with Hugging Face: {names_text}", hint="the notes above say why")


def _print(rows: Sequence[Mapping[str, Any]], as_json: bool, conditions: str) -> None:
    with writing():
        if as_json:
            click.echo(json.dumps(list(rows), indent=2))
            return
        width = max((len(r["architecture"]) for r in rows), default=0)
        kind = max((len(r["model_type"]) for r in rows), default=0)
        for row in rows:
            difference = "-" if row["max_abs_logit_diff"] is None else f"{row['max_abs_logit_diff']:.1e}"
            note = row["notes"].splitlines()[0]
            click.echo(
                f"{row['architecture']:<{width}}  {row['model_type']:<{kind}}  {row['parity']:<9}  "
                f"{difference:>8}  {note}"
            )
        passed = sum(r["parity"] == "exact" for r in rows)
        click.echo(f"{passed} of {len(rows)} exact ({conditions})")
