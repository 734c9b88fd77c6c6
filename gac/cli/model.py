"""Commands that make a model smaller: choose a plan, and apply it."""

from collections.abc import Callable
from pathlib import Path

import click

from gac.cli.checks import check_file, check_writable
from gac.cli.documents import plan_document
from gac.cli.measuring import STATISTICS_KEPT, recipe_options, say_cost, tokenizer_option
from gac.cli.verb import Answer, Verb, note
from gac.errors import CheckpointError, PlanError
from gac.recipe import Recipe


@click.command(cls=Verb, resume=STATISTICS_KEPT)
@click.argument("model")
@recipe_options(limits=True)
@click.option(
    "--verify", is_flag=True, help="Solve it a second time with OR-Tools CP-SAT, and fail if the two disagree."
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=Path("plan.json"),
    show_default=True,
    help="The plan to write; an existing file is replaced.",
)
def allocate(model: str, recipe: Callable[[], Recipe], output: Path, tokenizer: str | None, verify: bool) -> Answer:
    """Choose what every weight of MODEL becomes.

    MODEL is a directory, a hub id, or smollm2 (packaged). Measures what each choice loses on calibration text,
    then picks the form and dim of every weight at once: the least loss within the budget, with a proof.
    """
    check_file(output, PlanError)
    asked = recipe()
    say_cost(model, asked)
    from gac.api import allocate as make_plan
    from gac.models.loading import load_tokenizer
    from gac.reporting.tables import plan_summary, plan_table

    reader = load_tokenizer(tokenizer) if tokenizer else None
    plan = make_plan(model, recipe=asked, tokenizer=reader, verify=verify)
    plan.save(output)
    note(f"saved as {output}")
    return Answer({"path": str(output)} | plan_document(plan), lambda: [plan_table(plan), plan_summary(plan)])


@click.command(cls=Verb, resume=f"No checkpoint was written. {STATISTICS_KEPT}")
@click.argument("model")
@click.option(
    "--plan", "plan_file", type=click.Path(path_type=Path), required=True, help="A plan that gac allocate wrote."
)
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The directory to write.")
@click.option("--overwrite", is_flag=True, help="Replace an existing compressed checkpoint.")
@tokenizer_option
def compress(model: str, plan_file: Path, output: Path, overwrite: bool, tokenizer: str | None) -> Answer:
    """Apply a plan to MODEL and save the smaller model.

    MODEL is the one that the plan was made for. The directory holds safetensors, the config, the plan, the
    tokenizer and a model card; gac.load opens it.
    """
    from gac.checkpoint.target import check_free
    from gac.plan import Plan
    from gac.reporting.tables import plan_line

    plan = Plan.load(plan_file)
    check_writable(output, CheckpointError)
    check_free(output, overwrite)
    from gac.api import compress as apply_plan
    from gac.checkpoint.save import save
    from gac.models.loading import load_model

    text = plan.measured.calibration
    note(
        f"loading {model}; its statistics on {text.windows} windows of {text.window_tokens} tokens of {text.text} are "
        "read, or taken again where they are gone" + (" (in two shots)" if plan.recipe.measure.shots == 2 else "")
    )
    loaded = load_model(model, tokenizer)
    small = apply_plan(loaded.model, plan, tokenizer=loaded.tokenizer)
    save(small, output, tokenizer=loaded.tokenizer, overwrite=overwrite)
    size = _bytes(output)
    document = {
        "directory": str(output),
        "bytes": size,
        "parameters": sum(parameter.numel() for parameter in small.parameters()),
        "dense_parameters": plan.measured.params,
        "plan": plan_document(plan),
    }
    return Answer(document, lambda: [f"saved in {output}, {size / 1e6:,.1f} MB", plan_line(plan)])


@click.command(cls=Verb, resume="Nothing was written; run it again.")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The new directory.")
@click.option("--merge", is_flag=True, help="Give every weight its dense dims again: neither smaller nor faster.")
def export(directory: Path, output: Path, merge: bool) -> Answer:
    """Write a compressed model as one of its stock architecture.

    DIRECTORY was written by gac compress. Tools that know nothing of GAC open the new one without any code. A stock
    architecture can keep the dims where MLPs alone are narrower, by as much in every layer; --merge does without.
    """
    from gac.checkpoint.target import check_free

    check_writable(output, CheckpointError)
    check_free(output, overwrite=False)
    from gac.checkpoint.export import export as write_plain
    from gac.checkpoint.load import load

    model = load(directory)
    write_plain(model, output, merge=merge)
    size = _bytes(output)
    document = {"directory": str(output), "bytes": size, "merged": merge}
    return Answer(document, lambda: [f"saved in {output}, {size / 1e6:,.1f} MB"])


def _bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
