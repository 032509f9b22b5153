"""Ask: the command line. Each command lives in its own module of `shardwise.commands`."""

from __future__ import annotations

import sys

import typer

from shardwise.commands import calibrate, doctor, limits, plan, predict, run, scaling, train, validate
from shardwise.runtime.errors import TransportError

app = typer.Typer(
    name="shardwise",
    help="Predict, choose and run the best split of a convolutional network's training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

# The script's own options follow its name and must reach it untouched.
_PASS_THROUGH = {"allow_interspersed_args": False, "ignore_unknown_options": True}

app.command("run", context_settings=_PASS_THROUGH)(run.command)
app.command("doctor")(doctor.command)
app.command("calibrate")(calibrate.command)
app.command("plan")(plan.command)
app.command("predict")(predict.command)
app.command("limits")(limits.command)
app.command("scaling")(scaling.command)
app.command("validate")(validate.command)
app.command("train")(train.command)


@app.callback()
def _root() -> None:
    """Keep commands named even while there is only one."""


def main() -> None:
    """Run the command line; an error that names its own remedy is shown without a traceback."""
    try:
        app()
    except (ValueError, FileNotFoundError, TransportError) as error:
        print(f"shardwise: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
