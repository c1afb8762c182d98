"""The command ``rope-pad-fix``: its subcommands, their options, and what it says where its libraries are missing.

The library itself needs none of typer, rich and gguf, so they are imported only once `main` has seen that they are
there. For the same reason the subcommands are defined inside `build`.
"""

import importlib.util
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    import typer

EXTRA = ("gguf", "rich", "typer")


def main() -> None:
    """Run the command line, and exit."""
    missing = [name for name in EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        print(f'rope-pad-fix needs {", ".join(missing)}: pip install "rope-pad-fix[drift]"', file=sys.stderr)
        raise SystemExit(2)
    build()()


def build() -> "typer.Typer":
    """The typer application."""
    import typer

    from .demo import DTYPES, NEW_TOKENS, run
    from .patching import DEFAULT_LEVEL, LEVELS

    app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

    @app.callback()
    def about() -> None:
        """Batched inference that gives what single inference gives."""

    @app.command()
    def demo(
        dtype: Annotated[
            list[str] | None,
            typer.Option(
                metavar="NAME", help=f"{' or '.join(DTYPES)}; may be given more than once.", show_default="all"
            ),
        ] = None,
        threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.", show_default="torch's choice")] = None,
        new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate for each prompt.")] = NEW_TOKENS,
        level: Annotated[
            str, typer.Option(metavar="NAME", help=f"What to apply: {' or '.join(LEVELS)}.")
        ] = DEFAULT_LEVEL,
    ) -> None:
        """Let SmolLM2-135M answer 8 prompts alone and in a padded batch, stock and patched, and compare.

        The model is downloaded (93 MB) and converted at the first use.

        The exit status is 1 if a patched batch does not give what the prompts give alone.
        """
        dtypes = list(dict.fromkeys(dtype or DTYPES))
        for name in dtypes:
            _check("--dtype", name, DTYPES)
        _check("--level", level, LEVELS)
        raise typer.Exit(run(dtypes, level, new_tokens, threads))

    return app


def _check(option: str, value: str, known: Iterable[str]) -> None:
    import typer

    if value not in known:
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(known)}", param_hint=option)


if __name__ == "__main__":
    main()
